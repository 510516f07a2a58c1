"""The command `hvdxrun`: reads its arguments, decides what to start, and starts it. Never imports TensorFlow."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdx import environment
from hvdx.errors import HvdxError, LaunchError
from hvdx.launch import hydra, job, open_mpi, probe, reach, servers
from hvdx.launch.arguments import exports, find_command, parser, read_hosts, read_np
from hvdx.launch.families import Family, Launcher, choose
from hvdx.launch.hosts import Host, assign
from hvdx.launch.plan import Plan, forwarded, in_allocation, server_ranks
from hvdx.launch.threads import cores_of_this_host, describe, divide

_RANK = str(Path(__file__).with_name("rank.py"))
_WAYS = {Family.OPEN_MPI: open_mpi, Family.HYDRA: hydra}


def _rank_command(args: argparse.Namespace, command: Sequence[str], np: int) -> tuple[str, ...]:
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
    if args.servers:
        line += ["--servers", ",".join(map(str, server_ranks(np + args.servers, args.servers)))]
    if args.on_worker_failure == "continue":
        line.append("--go-on")
    return (*line, "--", *command)


def make_plan(args: argparse.Namespace, environ: dict[str, str]) -> Plan:
    """Decide what to start; adds to `environ` what the ranks get from the launcher.

    Raises:
        LaunchError: an argument cannot be used.
    """
    hosts = read_hosts(args)
    np = read_np(args, hosts)
    passed = exports(args.exports, environ)
    environ.update(passed)
    command = find_command(args, environ.get("PATH", os.defpath))
    for variable in (environment.ROLE, environment.INDEX, environment.SERVERS, environment.ROOT, environment.TOKEN):
        environ.pop(variable.name, None)  # of a job that this one may be started from
    environ[environment.EXPECTED_SIZE.name] = str(np)
    if args.servers:
        environ[environment.SERVERS.name] = str(args.servers)
    if args.autotune:
        environ[environment.AUTOTUNE.name] = "1"
    if args.start_timeout is not None:
        environ[environment.START_TIMEOUT.name] = f"{args.start_timeout:g}"
    if args.identity is not None and not os.access(args.identity, os.R_OK):
        raise LaunchError(f"-i {args.identity}: the key cannot be read.")
    allocated = in_allocation(environ) and not hosts
    placed = () if allocated else assign(np, hosts, args.servers)
    remote = allocated or not all(reach.is_local(host.name) for host in placed)
    if hosts and not remote and len(placed) == 1:
        placed = (Host("localhost", np + args.servers),)
    later = [environment.ROOT.name, environment.TOKEN.name] if args.servers else []
    return Plan(
        np=np + args.servers, command=_rank_command(args, command, np), hosts=placed, remote=remote,
        forward=forwarded(environ, [*passed, *later]) if remote else (), servers=args.servers,
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
        _show(line, environ | added, args.dry_run)
    if args.verbose:
        print(f"[hvdxrun] {launcher.path}: {launcher.family.value} {launcher.major or ''}", file=sys.stderr, flush=True)
    if args.dry_run:
        local = plan.hosts[0].slots if plan.hosts and plan.hosts[0].slots else plan.np
        cores = cores_of_this_host()
        sentence = describe(divide(cores, local, environ, args.threads_per_rank), cores, local, bool(plan.servers))
        print(f"[hvdxrun] {sentence}", file=sys.stderr)
        if plan.servers:
            print("[hvdxrun] hvdxrun itself is the scheduler, which this command does not start", file=sys.stderr)
        return 0
    if plan.ssh_arguments:
        reach.check(plan.hosts, sys.executable, plan.ssh_arguments, environ)
    if not plan.servers:
        return job.run(line, environ | added, plan.np, way.Filter())
    with servers.Servers(plan, environ, go_on=args.on_worker_failure == "continue") as watcher:
        return job.run(line, environ | added | watcher.variables, plan.np, way.Filter(), watcher)


def _show(line: Sequence[str], environ: Mapping[str, str], on_stdout: bool) -> None:
    changed = {name: environ[name] for name in environ if os.environ.get(name) != environ[name]}
    shown = shlex.join(["env", *(f"{name}={value}" for name, value in sorted(changed.items())), *line])
    print(shown, file=sys.stdout if on_stdout else sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run hvdxrun; return its exit code: the command's, or 2 where nothing was started."""
    try:
        return _start(parser().parse_args(argv))
    except HvdxError as error:
        print(f"hvdxrun: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
