"""Dividing the cores of a host between its ranks; pure but for `cores_of_this_host`.

Only the standard library: `rank.py` runs this file by its path, without the package.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# TensorFlow's pool between operations needs a second thread: a host operation (an exchange) would else block
# the one thread on which the rest of the graph could run.
LEAST_INTEROP = 2

_INTRA = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
_INTER = "TF_NUM_INTEROP_THREADS"
_CHOSEN = "HVDX_THREADS_PER_RANK"


@dataclass(frozen=True)
class ThreadPlan:
    """What a rank's environment gets: `threads` each, `assign` to be set, `kept` as the user had set them."""

    threads: int
    assign: Mapping[str, str]
    kept: Mapping[str, str]
    chosen: bool


def divide(cores: int, local_size: int, environ: Mapping[str, str], threads: int | None = None) -> ThreadPlan:
    """Give each of `local_size` ranks its part of `cores`, at least one thread.

    Args:
        cores: cores of the host.
        local_size: ranks on the host.
        environ: the rank's environment; variables that it already has win.
        threads: threads per rank as asked on the command line; else HVDX_THREADS_PER_RANK, else cores / ranks.
    """
    asked = threads
    if asked is None:
        text = environ.get(_CHOSEN, "")
        asked = int(text) if text.isdecimal() and int(text) > 0 else None
    each = asked if asked is not None else max(1, cores // max(1, local_size))
    wanted = dict.fromkeys(_INTRA, str(each)) | {_INTER: str(max(LEAST_INTEROP, each))}
    kept = {name: environ[name] for name in wanted if environ.get(name)}
    assign = {name: value for name, value in wanted.items() if name not in kept} | {_CHOSEN: str(each)}
    return ThreadPlan(each, assign, kept, asked is not None)


def describe(plan: ThreadPlan, cores: int, local_size: int, servers: bool = False) -> str:
    """Return the sentence for the user, such as "2 ranks share 4 cores: 2 threads each"."""
    one, many = ("process", "processes") if servers else ("rank", "ranks")
    ranks = f"1 {one} has" if local_size == 1 else f"{local_size} {many} share"
    each = "" if local_size == 1 else " each"
    text = f"{ranks} {cores} core{'s' * (cores != 1)}: {plan.threads} thread{'s' * (plan.threads != 1)}{each}"
    if plan.chosen:
        text += " as asked"
    if plan.kept:
        text += "; kept as you set them: " + ", ".join(f"{name}={value}" for name, value in plan.kept.items())
    return text


def cores_of_this_host() -> int:
    """Return the cores this process may use: its affinity, or less where a container's quota says so."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    quota = quota_cores(_read("/sys/fs/cgroup/cpu.max")) or quota_cores(
        _read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") + " " + _read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    )
    return max(1, min(cores, quota)) if quota else cores


def quota_cores(text: str) -> int | None:
    """Return the whole cores in a cgroup's "quota period" (microseconds), None for no limit."""
    fields = text.split()
    if len(fields) != 2 or not (fields[0].isdecimal() and fields[1].isdecimal()) or fields[1] == "0":
        return None
    return max(1, int(fields[0]) // int(fields[1]))


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
