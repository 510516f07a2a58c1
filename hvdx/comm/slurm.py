"""On which node each task of a Slurm job step runs, from the step's variables alone; pure functions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from hvdx.errors import ConfigurationError

# Below the ports that systems give to outgoing connections.
_FIRST_PORT, _PORTS = 20000, 12000


def expand(text: str) -> tuple[str, ...]:
    """Return the nodes of a list as Slurm writes it, such as "node[01-03,7],gpu2".

    Raises:
        ValueError: the list is malformed.
    """
    nodes: list[str] = []
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+|,,|\[", text.strip()):
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        choices = [_numbers(piece) if at % 2 else [piece] for at, piece in enumerate(pieces)]
        names = ["".join(choice) for choice in itertools.product(*choices)]
        if not all(re.fullmatch(r"[A-Za-z0-9_.\-]+", name) for name in names):
            raise ValueError(f"{text!r} is no list of nodes such as node[1-3,7]")
        nodes += names
    if not nodes:
        raise ValueError("the list of nodes is empty")
    return tuple(nodes)


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Return the numbers in "2(x3),1".

    Raises:
        ValueError: the text is malformed.
    """
    result: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{text!r} is no list of tasks per node such as 2(x3),1")
        result += [int(match[1])] * int(match[2] or 1)
    return tuple(result)


def hosts_of_ranks(environ: Mapping[str, str], size: int) -> tuple[str, ...]:
    """Return the node of every rank; empty where Slurm's variables do not tell it.

    Raises:
        ConfigurationError: a variable is malformed, or they contradict each other.
    """
    node_list = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if not node_list or not counts:
        return ()
    try:
        nodes, tasks = expand(node_list), tasks_per_node(counts)
    except ValueError as error:
        raise ConfigurationError(f"Slurm's variables cannot be used: {error}.") from None
    if len(nodes) != len(tasks) or sum(tasks) != size:
        raise ConfigurationError(
            f"Slurm's variables contradict each other: {size} task(s) (SLURM_STEP_NUM_TASKS) on {len(nodes)} node(s) "
            f"({node_list}), but {sum(tasks)} by {len(tasks)} node(s) ({counts})."
        )
    order = _order(tasks, environ.get("SLURM_DISTRIBUTION", "block").split(":")[0].split(",")[0])
    return tuple(nodes[node] for node in order)


def port(environ: Mapping[str, str], local_rank: int) -> int:
    """Return a port for a task, which all tasks of the step can work out: apart for each step and each local rank."""
    job, step = (int(environ.get(name, "")) if environ.get(name, "").isdecimal() else 0
                 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))  # fmt: skip
    return _FIRST_PORT + (64 * job + 1024 * step + local_rank) % _PORTS


def _order(tasks: tuple[int, ...], distribution: str) -> list[int]:
    """Return the node of each rank, by number."""
    if distribution in {"block", "*", ""}:
        return [node for node, count in enumerate(tasks) for _ in range(count)]
    if distribution == "cyclic":
        return [node for turn in range(max(tasks)) for node, count in enumerate(tasks) if turn < count]
    return []  # plane, arbitrary: what their variables say of it differs between Slurm's versions


def _numbers(text: str) -> list[str]:
    result: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"[{text}] is no list of numbers such as [1-3,7]")
        first, last = match[1], match[2] or match[1]
        result += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return result
