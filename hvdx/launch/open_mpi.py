"""Starting ranks with Open MPI's mpirun (4 and 5); pure functions and the filter for what mpirun itself prints."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hvdx.launch.families import Launcher
from hvdx.launch.plan import Plan

_RULE = re.compile(r"-{40,}\s*")
_ENDED = re.compile(
    r"(prterun\S*|mpirun\S*|mpiexec\S*|orterun|Primary job) .*"
    r"(non-zero status|noticed that process rank|exited due to process rank|terminated normally, but)"
)
# An MPI call that failed in a rank, mostly since its peer is gone: Open MPI names the rank behind the comma.
_FATAL = re.compile(r"\[[^\]]+:\d+\] \*\*\* ")
_FATAL_RANK = re.compile(r".*reported by process \[\d+,(\d+)\]")
_STRAY = re.compile(r"Abort is in progress|\s*$")


def command(plan: Plan, launcher: Launcher) -> list[str]:
    """Return the command line that starts the plan's ranks."""
    line = [launcher.path, "-np", str(plan.np)]
    if plan.root:
        line.append("--allow-run-as-root")
    # Binding would put all threads of a rank on one core; more ranks than cores is the user's choice.
    line += ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
    if plan.hosts:
        line += ["--host", ",".join(f"{host.name}:{host.slots}" for host in plan.hosts)]
    if plan.remote:
        for name in plan.forward:
            line += ["-x", name]
    return [*line, *plan.command]


def environment(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add for mpirun; what the user has set stays."""
    wanted = {
        # The wheel's libfabric looks for hardware for a whole second at every start; this module serves
        # one-sided transfers only, and the one for Omni-Path and EFA messages (mtl) is another.
        "OMPI_MCA_btl": "^ofi",
        # Nothing in hvdx is one-sided; the UCX module prints an error where no device is.
        "OMPI_MCA_osc": "^ucx",
        "PRTE_MCA_prte_silence_shared_fs": "1",
    }
    if plan.ssh_arguments:
        # Open MPI 5 (PRRTE) and 4 read different names.
        text = " ".join(plan.ssh_arguments)
        wanted |= {"PRTE_MCA_plm_ssh_args": text, "OMPI_MCA_plm_rsh_args": text}
    if plan.interfaces:
        text = ",".join(plan.interfaces)
        wanted |= {
            "OMPI_MCA_btl_tcp_if_include": text,
            "OMPI_MCA_oob_tcp_if_include": text,
            "PRTE_MCA_prte_if_include": text,
        }
    return {name: value for name, value in wanted.items() if name not in environ}


class Filter:
    """Holds back mpirun's banner about a rank that ended badly; everything else passes."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.followers: set[int] = set()
        self._block: list[str] = []

    def feed(self, line: str) -> list[str]:
        """Take a line that mpirun itself printed; return the lines to show now."""
        if _RULE.fullmatch(line):
            self._block.append(line)
            return [] if len(self._block) == 1 else self._close()
        if self._block:
            self._block.append(line)
            return []
        if match := _FATAL_RANK.match(line):
            self.followers.add(int(match[1]))
        if _STRAY.match(line) or _FATAL.match(line):
            self.held.append(line)
            return []
        return [line]

    def finish(self) -> list[str]:
        """Return what an unfinished banner still holds."""
        return self._close()

    def _close(self) -> list[str]:
        block, self._block = self._block, []
        if any(_ENDED.match(line) for line in block):
            self.held += block
            return []
        return block
