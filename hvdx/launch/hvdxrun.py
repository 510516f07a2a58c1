"""The command `hvdxrun`: reads its arguments, decides what to start, and starts it. Never imports TensorFlow."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from hvdx import environment
from hvdx.errors import HvdxError, LaunchError
from hvdx.launch import hydra, job, open_mpi, probe, reach
from hvdx.launch.families import Family, Launcher, choose
from hvdx.launch.hosts import Host, assign, parse_hostfile, parse_hosts
from hvdx.launch.plan import Plan, forwarded, in_allocation
from hvdx.launch.threads import cores_of_this_host, describe, divide
from hvdx.version import __version__

_RANK = str(Path(__file__).with_name("rank.py"))
_WAYS = {Family.OPEN_MPI: open_mpi, Family.HYDRA: hydra}

_EXAMPLES = """examples:
  hvdxrun -np 2 python train.py                      two ranks on this machine
  hvdxrun -np 4 -H alice:2,bob:2 python train.py     two machines, reached by ssh
  hvdxrun -np 4 --hostfile hosts python train.py     a line a host: alice slots=2
  hvdxrun -np 2 --dry-run python train.py            show the command, start nothing

Each line of output has its rank in front. The exit code is that of the rank that failed first (128 + number for one
that a signal ended); 2 means that nothing was started.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}. Write: hvdxrun -np 2 python train.py (hvdxrun -h explains the options)")


def _number(name: str, what: str) -> type[int]:
    def read(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < 1:
            raise LaunchError(f"{name} {text!r} is no number of {what}. Write a whole number, 1 or more: {name} 2")
        return int(text)

    return read  # type: ignore[return-value]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise LaunchError(f"--start-timeout {text!r} is no time. Write seconds above 0: --start-timeout 120")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the parser of hvdxrun's arguments."""
    result = _Parser(
        prog="hvdxrun", description="Starts N ranks of a program with any MPI.", epilog=_EXAMPLES, allow_abbrev=False,
        usage="hvdxrun -np N [options] command ...", formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = result.add_argument
    add("-np", "-n", "--num-proc", dest="np", metavar="N", type=_number("-np", "ranks"), help="number of ranks")
    add("-H", "--hosts", metavar="HOSTS", help="hosts and ranks on each: a:2,b:2")
    add("--hostfile", metavar="FILE", help="the same as a file, a line a host: a slots=2")
    add("-p", "--ssh-port", dest="port", metavar="PORT", type=_number("-p", "a port"), help="port of ssh on the hosts")
    add("-i", "--ssh-identity-file", dest="identity", metavar="FILE", help="key for ssh")
    add("--network-interfaces", metavar="IF,...", default="", help="interfaces between the hosts, such as eth0")
    add("-x", "--env", dest="exports", metavar="NAME[=VALUE]", action="append", default=[],
        help="pass a variable to all ranks; may be repeated (HVDX_*, TF_*, PATH and the like always are)")  # fmt: skip
    add("--threads-per-rank", metavar="T", type=_number("--threads-per-rank", "threads"),
        help="threads of TensorFlow's and OpenMP's pools (default: cores of the host / its ranks)")  # fmt: skip
    add("--start-timeout", metavar="S", type=_seconds, help="seconds a rank waits for the others to start (120)")
    add("--output-filename", metavar="DIR", help="also write DIR/rank.<r>/stdout and stderr")
    add("--dry-run", action="store_true", help="print the command that would run, and start nothing")
    add("--verbose", "-v", action="store_true", help="say what was found and what is run")
    add("--version", action="version", version=f"hvdxrun {__version__}")
    add("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    return result


def _read_hosts(args: argparse.Namespace) -> tuple[Host, ...]:
    if args.hosts is not None and args.hostfile is not None:
        raise LaunchError("-H and --hostfile were both given. Write one of them.")
    if args.hostfile is not None:
        try:
            return parse_hostfile(Path(args.hostfile).read_text(), args.hostfile)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise LaunchError(f"--hostfile {args.hostfile} cannot be read: {reason}.") from None
    return parse_hosts(args.hosts) if args.hosts is not None else ()


def _read_np(args: argparse.Namespace, hosts: Sequence[Host]) -> int:
    if args.np is not None:
        return int(args.np)
    slots = [host.slots for host in hosts]
    if not slots or None in slots:
        raise LaunchError("The number of ranks is missing. Write: hvdxrun -np 2 python train.py")
    return sum(slot for slot in slots if slot is not None)


def _find_command(args: argparse.Namespace, path: str) -> list[str]:
    command: list[str] = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise LaunchError("The command is missing. Write what each rank runs: hvdxrun -np 2 python train.py")
    program = command[0]
    if shutil.which(program, path=path):
        return command
    hint = ""
    if Path(program).is_dir():
        hint = "it is a folder"
    elif Path(program).exists():
        hint = f"the file is there but not executable; for a Python program write: python {program}"
    elif args.hosts is not None:
        joined = f"{args.hosts.rstrip(',')},{program}"
        hint = f"there is no such program; if it is a host, join the hosts by commas: -H {joined}"
    elif program.startswith("-"):
        hint = "it is no option of hvdxrun (hvdxrun -h lists them)"
    else:
        hint = "there is no such program on PATH"
    raise LaunchError(f"The command {program!r} cannot be run: {hint}.")


def _exports(texts: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    result = {}
    for text in (part for entry in texts for part in ([entry] if "=" in entry else entry.split(","))):
        name, equals, value = text.partition("=")
        if not name.replace("_", "a").isalnum() or name[0].isdigit():
            raise LaunchError(f"-x {text!r} is no variable. Write -x NAME or -x NAME=VALUE.")
        if equals:
            result[name] = value
        elif name in environ:
            result[name] = environ[name]
        else:
            raise LaunchError(f"-x {name}: the variable is not set here. Write -x {name}=VALUE.")
    return result


def _rank_command(args: argparse.Namespace, command: Sequence[str]) -> tuple[str, ...]:
    # Isolated from the user's PYTHON* variables and packages: this process must start whatever they are.
    line = [sys.executable, "-E", "-s", "-S", _RANK]
    if args.threads_per_rank is not None:
        line += ["--threads", str(args.threads_per_rank)]
    if args.output_filename is not None:
        folder = Path(args.output_filename).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"--output-filename {args.output_filename} cannot be made: {error.strerror}.") from None
        line += ["--output-filename", str(folder)]
    return (*line, "--", *command)


def make_plan(args: argparse.Namespace, environ: dict[str, str]) -> Plan:
    """Decide what to start; adds to `environ` what the ranks get from the launcher.

    Raises:
        LaunchError: an argument cannot be used.
    """
    hosts = _read_hosts(args)
    np = _read_np(args, hosts)
    exports = _exports(args.exports, environ)
    environ.update(exports)
    command = _find_command(args, environ.get("PATH", os.defpath))
    environ[environment.EXPECTED_SIZE.name] = str(np)
    if args.start_timeout is not None:
        environ[environment.START_TIMEOUT.name] = f"{args.start_timeout:g}"
    if args.identity is not None and not os.access(args.identity, os.R_OK):
        raise LaunchError(f"-i {args.identity}: the key cannot be read.")
    allocated = in_allocation(environ) and not hosts
    placed = () if allocated else assign(np, hosts)
    remote = allocated or not all(reach.is_local(host.name) for host in placed)
    if hosts and not remote and len(placed) == 1:
        placed = (Host("localhost", np),)
    return Plan(
        np=np, command=_rank_command(args, command), hosts=placed, remote=remote,
        forward=forwarded(environ, exports) if remote else (),
        ssh_arguments=reach.ssh_arguments(args.port, args.identity) if remote and not allocated else (),
        interfaces=tuple(name for name in args.network_interfaces.split(",") if name), root=os.geteuid() == 0,
    )  # fmt: skip


def find_launcher(command: Sequence[str], environ: Mapping[str, str]) -> Launcher:
    """Find the mpirun that fits the MPI library which the command's Python loads.

    Raises:
        LaunchError: there is none, or only one of another family.
    """
    python, library = probe.ask_python(probe.python_of(command, environ.get("PATH", os.defpath)), environ)
    return choose(probe.launchers(environ, [python, sys.executable]), library, python)


def _with_folder(path: str, launcher: str) -> str:
    # Some launchers are scripts that look for their own parts on PATH.
    folder = str(Path(launcher).parent)
    return path if folder in path.split(os.pathsep) else path + os.pathsep + folder


def _start(args: argparse.Namespace) -> int:
    environ = dict(os.environ)
    plan = make_plan(args, environ)
    launcher = find_launcher(plan.command[plan.command.index("--") + 1 :], environ)
    way = _WAYS[launcher.family]
    added = way.environment(plan, environ)
    environ["PATH"] = _with_folder(environ.get("PATH", os.defpath), launcher.path)
    line = way.command(plan, launcher)
    if args.verbose or args.dry_run:
        changed = added | {name: environ[name] for name in environ if os.environ.get(name) != environ[name]}
        shown = shlex.join(["env", *(f"{name}={value}" for name, value in sorted(changed.items())), *line])
        print(shown, file=sys.stdout if args.dry_run else sys.stderr, flush=True)
    if args.verbose:
        print(f"[hvdxrun] {launcher.path}: {launcher.family.value} {launcher.major or ''}", file=sys.stderr, flush=True)
    if args.dry_run:
        local = plan.hosts[0].slots if plan.hosts and plan.hosts[0].slots else plan.np
        cores = cores_of_this_host()
        print(
            f"[hvdxrun] {describe(divide(cores, local, environ, args.threads_per_rank), cores, local)}", file=sys.stderr
        )
        return 0
    if plan.ssh_arguments:
        reach.check(plan.hosts, sys.executable, plan.ssh_arguments, environ)
    return job.run(line, environ | added, plan.np, way.Filter())


def main(argv: Sequence[str] | None = None) -> int:
    """Run hvdxrun; return its exit code: the command's, or 2 where nothing was started."""
    try:
        return _start(parser().parse_args(argv))
    except HvdxError as error:
        print(f"hvdxrun: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
