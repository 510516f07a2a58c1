"""Starting ranks with hydra, the launcher of MPICH, MVAPICH and Intel MPI; pure functions and a filter."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hvdx.launch.families import Launcher
from hvdx.launch.plan import Plan

_BANNER = re.compile(
    r"=+\s*$|=   (BAD TERMINATION|RANK \d|PID \d|KILLED BY|EXIT |CLEANING UP|YOU CAN IGNORE)|"
    r"YOUR APPLICATION TERMINATED WITH|This typically refers to a problem|Please see the FAQ page|"
    r"\[(proxy:[0-9:]+|mpiexec)@[^\]]*\]|\s*$"
)


def command(plan: Plan, launcher: Launcher) -> list[str]:
    """Return the command line that starts the plan's ranks."""
    line = [launcher.path]
    if plan.interfaces:
        line += ["-iface", plan.interfaces[0]]
    # Hydra would ask ssh for a host of any other name than its own; ranks of this host need neither.
    if not plan.remote or not plan.hosts:
        return [*line, "-n", str(plan.np), *plan.command]
    line += ["-launcher", "ssh"]
    if launcher.intel:
        # Intel MPI takes no numbers in its list of hosts, and MPICH no second list.
        parts = (["-n", str(host.slots), "-host", host.name, *plan.command, ":"] for host in plan.hosts)
        return [*line, *[word for part in parts for word in part][:-1]]
    hosts = ",".join(f"{host.name}:{host.slots}" for host in plan.hosts)
    return [*line, "-hosts", hosts, "-n", str(plan.np), *plan.command]


def environment(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add for mpirun; what the user has set stays. Hydra passes all of them to the ranks."""
    wanted = {"I_MPI_PIN": "0"}
    if plan.ssh_arguments:
        text = " ".join(plan.ssh_arguments)
        wanted |= {"HYDRA_LAUNCHER_EXTRA_ARGS": text, "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": text}
    return {name: value for name, value in wanted.items() if name not in environ}


class Filter:
    """Holds back hydra's banner about a rank that ended badly; everything else passes."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.followers: set[int] = set()

    def feed(self, line: str) -> list[str]:
        """Take a line that hydra itself printed; return the lines to show now."""
        if _BANNER.match(line):
            self.held.append(line)
            return []
        return [line]

    def finish(self) -> list[str]:
        """Return what an unfinished banner still holds."""
        return []
