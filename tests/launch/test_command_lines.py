"""The command lines and environments of both families, and their filters for the launchers' own words."""

from __future__ import annotations

from hvdx.launch import hydra, open_mpi
from hvdx.launch.families import Family, Launcher
from hvdx.launch.hosts import Host
from hvdx.launch.plan import Plan, forwarded, in_allocation

OPEN = Launcher("/bin/mpirun", Family.OPEN_MPI, 5)
MPICH = Launcher("/bin/mpirun", Family.HYDRA, 5)
INTEL = Launcher("/bin/mpirun", Family.HYDRA, 2021, intel=True)
HERE = Plan(np=2, command=("python", "x.py"), hosts=(Host("localhost", 2),), root=True)
TWO = Plan(
    np=3, command=("python", "x.py"), hosts=(Host("a", 1), Host("b", 2)), remote=True, forward=("PATH", "TF_X"),
    ssh_arguments=("-p", "2222"), interfaces=("eth0", "eth1"),
)  # fmt: skip


def test_open_mpi_here() -> None:
    assert open_mpi.command(HERE, OPEN) == [
        "/bin/mpirun", "-np", "2", "--allow-run-as-root", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none",
        "--host", "localhost:2", "python", "x.py",
    ]  # fmt: skip


def test_open_mpi_on_two_hosts_forwards_variables_and_is_not_root() -> None:
    line = open_mpi.command(TWO, OPEN)
    assert "--allow-run-as-root" not in line
    assert line[line.index("--host") + 1] == "a:1,b:2"
    assert line[-6:] == ["-x", "PATH", "-x", "TF_X", "python", "x.py"]


def test_open_mpi_environment_knows_both_generations_and_keeps_what_the_user_set() -> None:
    added = open_mpi.environment(TWO, {"OMPI_MCA_btl": "self,tcp"})
    assert "OMPI_MCA_btl" not in added
    assert added["OMPI_MCA_osc"] == "^ucx"
    assert added["PRTE_MCA_plm_ssh_args"] == added["OMPI_MCA_plm_rsh_args"] == "-p 2222"
    assert added["PRTE_MCA_prte_if_include"] == added["OMPI_MCA_btl_tcp_if_include"] == "eth0,eth1"
    assert open_mpi.environment(HERE, {})["OMPI_MCA_btl"] == "^ofi"


def test_mpich_here_and_on_two_hosts() -> None:
    assert hydra.command(HERE, MPICH) == ["/bin/mpirun", "-n", "2", "python", "x.py"]
    assert hydra.command(TWO, MPICH) == [
        "/bin/mpirun", "-iface", "eth0", "-launcher", "ssh", "-hosts", "a:1,b:2", "-n", "3", "python", "x.py",
    ]  # fmt: skip


def test_intel_gets_a_part_for_each_host() -> None:
    assert hydra.command(TWO, INTEL) == [
        "/bin/mpirun", "-iface", "eth0", "-launcher", "ssh", "-n", "1", "-host", "a", "python", "x.py", ":",
        "-n", "2", "-host", "b", "python", "x.py",
    ]  # fmt: skip


def test_hydra_environment() -> None:
    added = hydra.environment(TWO, {})
    assert added["HYDRA_LAUNCHER_EXTRA_ARGS"] == "-p 2222"
    assert added["I_MPI_PIN"] == "0"
    assert hydra.environment(HERE, {"I_MPI_PIN": "1"}) == {}


def test_a_scheduler_chooses_its_own_hosts() -> None:
    plan = Plan(np=2, command=("x",), remote=True)
    assert "--host" not in open_mpi.command(plan, OPEN)
    assert hydra.command(plan, MPICH) == ["/bin/mpirun", "-n", "2", "x"]
    assert in_allocation({"SLURM_JOB_ID": "7"})
    assert not in_allocation({"SLURM_JOB_ID": ""})


def test_forwarded_variables() -> None:
    names = ["PATH", "HVDX_COMM", "HOROVOD_X", "TF_X", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "SECRET_TOKEN"]
    assert forwarded(dict.fromkeys(names, "1"), ["MINE"]) == (
        "HOROVOD_X", "HVDX_COMM", "LD_LIBRARY_PATH", "MINE", "PATH", "PYTHONPATH", "TF_X",
    )  # fmt: skip


RULE = "-" * 74 + "\n"


def test_open_mpi_filter_holds_the_banner_and_passes_the_rest() -> None:
    banner = [RULE, "prterun detected that one or more processes exited with non-zero status,\n", "x\n", RULE]
    other = [RULE, "There are not enough slots available in the system\n", RULE]
    words = open_mpi.Filter()
    shown = [line for given in (*banner, "warning\n", *other) for line in words.feed(given)]
    assert shown == ["warning\n", *other]
    assert words.held == banner


def test_open_mpi_filter_shows_an_unfinished_block_and_knows_followers() -> None:
    words = open_mpi.Filter()
    assert words.feed("[a:00000] *** reported by process [736755713,4]\n") == []
    assert words.followers == {4}
    assert words.feed(RULE) == []
    assert words.finish() == [RULE]


def test_hydra_filter_holds_the_banner() -> None:
    words = hydra.Filter()
    banner = ["\n", "=" * 83 + "\n", "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n", "=   EXIT CODE: 9\n"]
    assert [out for line in (*banner, "ssh: denied\n") for out in words.feed(line)] == ["ssh: denied\n"]
    assert words.held == banner
