"""hvdxrun's arguments: the parser, and what each text means; every error is one sentence."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from hvdx.errors import LaunchError
from hvdx.launch.hosts import Host, parse_hostfile, parse_hosts
from hvdx.version import __version__

_EXAMPLES = """examples:
  hvdxrun -np 2 python train.py                      two ranks on this machine
  hvdxrun -np 4 -H alice:2,bob:2 python train.py     two machines, reached by ssh
  hvdxrun -np 4 --hostfile hosts python train.py     a line a host: alice slots=2
  hvdxrun -np 2 --servers 1 python train.py          two workers and a parameter server, of the same program
  hvdxrun -np 2 --dry-run python train.py            show the command, start nothing

Each line of output has its rank in front ([0]), a server's its number ([server 0]). The exit code is that of
the rank that failed first (128 + number for one that a signal ended); 2 means that nothing was started.
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
    add(
        "-np",
        "-n",
        "--num-proc",
        dest="np",
        metavar="N",
        type=_number("-np", "ranks"),
        help="number of ranks; with --servers, of workers",
    )
    add("--servers", metavar="S", type=_number("--servers", "servers"), default=0,
        help="start S parameter servers as well, spread over the hosts; slots count workers and servers")  # fmt: skip
    add("--on-worker-failure", metavar="end|continue", default="end",
        help="with --servers, whether the job goes on without a worker that has died (end)")  # fmt: skip
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
    add("--autotune", action="store_true",
        help="let optimizers find the fastest buckets and algorithm in their first updates")  # fmt: skip
    add("--output-filename", metavar="DIR", help="also write DIR/rank.<r>/stdout and stderr (DIR/server.<s>)")
    add("--dry-run", action="store_true", help="print the command that would run, and start nothing")
    add("--verbose", "-v", action="store_true", help="say what was found and what is run")
    add("--version", action="version", version=f"hvdxrun {__version__}")
    add("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    return result


def read_hosts(args: argparse.Namespace) -> tuple[Host, ...]:
    """Return the hosts of -H or the host file; empty where neither was given."""
    if args.hosts is not None and args.hostfile is not None:
        raise LaunchError("-H and --hostfile were both given. Write one of them.")
    if args.hostfile is not None:
        try:
            return parse_hostfile(Path(args.hostfile).read_text(), args.hostfile)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise LaunchError(f"--hostfile {args.hostfile} cannot be read: {reason}.") from None
    return parse_hosts(args.hosts) if args.hosts is not None else ()


def read_np(args: argparse.Namespace, hosts: Sequence[Host]) -> int:
    """Return the number of workers: as asked, else what the hosts' slots leave beside the servers."""
    if args.on_worker_failure not in {"end", "continue"}:
        raise LaunchError(
            f"--on-worker-failure {args.on_worker_failure!r} is not known. Write --on-worker-failure end, or continue."
        )
    if args.on_worker_failure == "continue" and not args.servers:
        raise LaunchError(
            "--on-worker-failure continue needs --servers: ranks that exchange with each other cannot lose one."
        )
    if args.np is not None:
        return int(args.np)
    slots = [host.slots for host in hosts]
    if not slots or None in slots:
        raise LaunchError("The number of ranks is missing. Write: hvdxrun -np 2 python train.py")
    total = sum(slot for slot in slots if slot is not None)
    if total <= args.servers:
        raise LaunchError(
            f"--servers {args.servers} leaves no slot for a worker: the hosts have {total} in all. Raise the numbers "
            "behind the colons, or name more hosts."
        )
    return total - int(args.servers)


def find_command(args: argparse.Namespace, path: str) -> list[str]:
    """Return the command, whose program must be on the search path."""
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


def exports(texts: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that -x passes on."""
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
