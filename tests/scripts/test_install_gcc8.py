"""scripts/install_gcc8.sh with fake package managers, compilers and /etc/os-release: nothing is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "install_gcc8.sh"
# What the script itself calls; nothing else of this machine is on its PATH, least of all a compiler.
TOOLS = ("bash", "env", "sed", "head", "grep", "cat", "touch", "chmod", "mkdir", "dirname")

OS_RELEASE = {
    "centos7": 'ID="centos"\nVERSION_ID="7"\nPRETTY_NAME="CentOS Linux 7 (Core)"\nID_LIKE="rhel fedora"\n',
    "rhel7": 'ID="rhel"\nVERSION_ID="7.9"\nPRETTY_NAME="Red Hat Enterprise Linux 7.9"\nID_LIKE="fedora"\n',
    "rocky9": 'ID="rocky"\nVERSION_ID="9.4"\nPRETTY_NAME="Rocky Linux 9.4"\nID_LIKE="rhel centos fedora"\n',
    "debian12": "PRETTY_NAME='Debian GNU/Linux 12'\nID=debian\nVERSION_ID=\"12\"\n",
    "ubuntu18": 'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="18.04"\nPRETTY_NAME="Ubuntu 18.04.6 LTS"\n',
}


class FakeSystem:
    """A folder with the few programs the script may call, a root with os-release, and a record of what was called."""

    def __init__(self, folder: Path, system: str) -> None:
        self.bin = folder / "bin"
        self.root = folder / "root"
        self.calls = folder / "calls.txt"
        self.bin.mkdir()
        (self.root / "etc").mkdir(parents=True)
        (self.root / "etc" / "os-release").write_text(OS_RELEASE[system])
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, f"{tool} is needed by this test"
            (self.bin / tool).symlink_to(found)
        self.fake_user(0)

    def fake_program(self, path: Path, body: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def fake_user(self, uid: int) -> None:
        self.fake_program(self.bin / "id", f"echo {uid}")

    def fake_compiler(self, version: str, path: Path | None = None) -> None:
        self.fake_program(path or self.bin / "g++", f"echo {version}")

    def fake_manager(self, name: str, *, installs: str = "", at: Path | None = None, exit_code: int = 0) -> None:
        """A package manager that writes down its arguments; `install` makes a compiler of version `installs` appear."""
        target = at or self.bin / "g++"
        effect = f"mkdir -p {target.parent}; printf '#!/bin/sh\\necho {installs}\\n' > {target}; chmod 755 {target}"
        body = f'echo "{name} $*" >> {self.calls}\n[ {exit_code} = 0 ] || exit {exit_code}\n'
        if installs:
            body += f'case "$*" in *gcc-c++*|*g++*|*gxx*) {effect} ;; esac'
        self.fake_program(self.bin / name, body)

    def run(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        bash = str(self.bin / "bash")
        return subprocess.run(
            [bash, str(SCRIPT), "--root", str(self.root), *options],
            capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
            env={"PATH": str(self.bin), "HOME": os.environ.get("HOME", "/"), **environment},
        )  # fmt: skip

    def called(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


def test_nothing_to_do_with_a_new_enough_compiler(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, "debian12")
    system.fake_compiler("12.2.0")
    system.fake_manager("apt-get", installs="13.1.0")
    result = system.run()
    assert result.returncode == 0
    assert "nothing to do: g++ is version 12.2.0" in result.stdout
    assert system.called() == []


def test_exactly_version_8_is_enough(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, "debian12")
    system.fake_compiler("8")
    assert "nothing to do: g++ is version 8 " in system.run().stdout


def test_a_newer_compiler_under_another_name_is_found_and_its_use_told(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, "debian12")
    system.fake_compiler("6.3.0")
    system.fake_compiler("10.2.1", system.bin / "g++-10")
    result = system.run()
    assert "nothing to do: g++-10 is version 10.2.1" in result.stdout
    assert "CXX=g++-10 scripts/build_horovod.sh" in result.stdout


def test_apt_installs_and_the_result_is_verified(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, "debian12")
    system.fake_manager("apt-get", installs="12.2.0")
    result = system.run()
    assert result.returncode == 0, result.stderr
    assert system.called() == ["apt-get update", "apt-get install -y g++ make"]
    assert "installed: g++ 12.2.0" in result.stdout


def test_ubuntu_1804_gets_its_newer_package(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, "ubuntu18")
    system.fake_compiler("7.5.0")
    system.fake_manager("apt-get", installs="8.4.0", at=system.bin / "g++-8")
    result = system.run()
    assert result.returncode == 0, result.stderr
    assert "apt-get install -y g++-8 make" in system.called()
    assert "CXX=g++-8" in result.stdout


@pytest.mark.parametrize("manager", ["dnf", "yum"])
def test_dnf_or_yum_on_a_newer_enterprise_linux(tmp_path: Path, manager: str) -> None:
    system = FakeSystem(tmp_path, "rocky9")
    system.fake_manager(manager, installs="11.4.1")
    result = system.run()
    assert result.returncode == 0, result.stderr
    assert system.called() == [f"{manager} install -y gcc-c++ make"]


def test_centos_7_gets_the_software_collection_and_how_to_enter_it(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, "centos7")
    system.fake_compiler("4.8.5")
    compiler = system.root / "opt/rh/devtoolset-8/root/usr/bin/g++"
    system.fake_manager("yum", installs="8.3.1", at=compiler)
    result = system.run()
    assert result.returncode == 0, result.stderr
    assert system.called() == ["yum install -y centos-release-scl", "yum install -y devtoolset-8-gcc-c++ make"]
    assert "g++ 8.3.1 in the software collection devtoolset-8" in result.stdout
    assert "scl enable devtoolset-8 bash" in result.stdout
    again = system.run()
    assert "nothing to do: the software collection devtoolset-8 is installed" in again.stdout
    assert "scl enable devtoolset-8 bash" in again.stdout
    assert len(system.called()) == 2, "the second call must install nothing"


def test_rhel_7_has_its_collections_without_the_centos_package(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, "rhel7")
    system.fake_manager("yum", installs="8.3.1", at=system.root / "opt/rh/devtoolset-8/root/usr/bin/g++")
    assert system.run().returncode == 0
    assert system.called() == ["yum install -y devtoolset-8-gcc-c++ make"]


@pytest.mark.parametrize(
    ("name", "manager", "expected"),
    [
        ("centos7", "yum", "would run: yum install -y devtoolset-8-gcc-c++ make"),
        ("debian12", "apt-get", "would run: env DEBIAN_FRONTEND=noninteractive apt-get install -y g++ make"),
        ("rocky9", "dnf", "would run: dnf install -y gcc-c++ make"),
    ],
)
def test_dry_run_shows_the_commands_and_runs_none(tmp_path: Path, name: str, manager: str, expected: str) -> None:
    system = FakeSystem(tmp_path, name)
    system.fake_manager(manager, installs="12.2.0")
    result = system.run("--dry-run")
    assert result.returncode == 0, result.stderr
    assert expected in result.stdout
    assert system.called() == []


def test_without_root_it_refuses_and_installs_nothing(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, "debian12")
    system.fake_user(1000)
    system.fake_manager("apt-get", installs="12.2.0")
    result = system.run()
    assert result.returncode == 1
    assert "needs root" in result.stderr
    assert system.called() == []
    dry = system.run("--dry-run")
    assert dry.returncode == 0
    assert "this needs root" in dry.stdout


def test_without_root_an_active_conda_environment_is_the_way(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, "debian12")
    system.fake_user(1000)
    prefix = tmp_path / "conda"
    system.fake_manager("apt-get", installs="12.2.0")
    system.fake_manager("conda", installs="13.2.0", at=prefix / "bin" / "x86_64-conda-linux-gnu-g++")
    result = system.run(CONDA_PREFIX=str(prefix))
    assert result.returncode == 0, result.stderr
    assert system.called() == ["conda install -y -c conda-forge gxx_linux-64>=8 make"]
    assert f"CXX={prefix}/bin/x86_64-conda-linux-gnu-g++" in result.stdout


def test_without_a_known_manager_it_names_the_system(tmp_path: Path) -> None:
    result = FakeSystem(tmp_path, "rocky9").run()
    assert result.returncode == 1
    assert "no package manager" in result.stderr
    assert "Rocky Linux 9.4" in result.stderr


def test_a_manager_that_fails_stops_it_with_the_command_and_code(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, "centos7")
    system.fake_manager("yum", exit_code=3)
    result = system.run()
    assert result.returncode == 1
    assert "'yum install -y centos-release-scl' failed with exit code 3" in result.stderr
    assert system.called() == ["yum install -y centos-release-scl"]


def test_a_manager_that_installs_nothing_useful_is_noticed(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, "debian12")
    system.fake_manager("apt-get", installs="6.3.0")
    result = system.run()
    assert result.returncode == 1
    assert "no g++ 8 or newer is among them: the g++ here is 6.3.0" in result.stderr


def test_a_collection_that_does_not_appear_is_noticed(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, "centos7")
    system.fake_manager("yum")
    result = system.run()
    assert result.returncode == 1
    assert "devtoolset-8/root/usr/bin/g++ does not run" in result.stderr


def test_an_unknown_option_and_an_unknown_system_are_refused(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, "debian12")
    assert "unknown option --force" in system.run("--force").stderr
    (system.root / "etc" / "os-release").unlink()
    result = system.run()
    assert result.returncode == 1
    assert "cannot tell which system this is" in result.stderr
