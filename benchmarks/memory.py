"""Which jobs can live side by side: what their ranks hold, measured, against the memory that there is.

A rank with TensorFlow takes 0.45 GB, and its libraries keep about twice the bytes of the largest workload that they
have seen (fusion buffers, and results in TensorFlow's allocator, which gives nothing back); the job that has its turn
needs as much again. Where not all jobs fit, those that matter most are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.catalogue import Kind
from benchmarks.settings import PRIORITY, Setting
from benchmarks.workloads import Workload

RANK_BYTES = 500_000_000
COPIES = 2.2
"""Times a workload's bytes that a rank keeps, and that it needs in its turn besides."""
SHARE = 0.7
"""Of the memory that is available, what the benchmark may plan with."""


def needed(setting: Setting, kinds: Sequence[Kind], workload: Workload) -> float:
    """Return the bytes that some jobs need for a workload."""
    moved = 0 if setting.images else workload.bytes
    kept = sum(RANK_BYTES + (COPIES * moved if kind.keeps else 0) for kind in kinds for _ in range(setting.ranks))
    return kept + setting.ranks * COPIES * moved


def parts(setting: Setting, available: float) -> tuple[list[Setting], dict[str, str]]:
    """Return a setting in parts whose jobs fit into memory, and which jobs are left out, by name with the reason.

    Args:
        setting: all workloads and jobs that are wanted.
        available: bytes that programs can take.
    """
    room = SHARE * available
    groups: dict[tuple[Kind, ...], list[Workload]] = {}
    left_out = {}
    for workload in setting.workloads:
        taken: list[Kind] = []
        for kind in sorted(setting.kinds, key=lambda kind: PRIORITY.get(kind.name, len(PRIORITY))):
            if needed(setting, [*taken, kind], workload) <= room:
                taken.append(kind)
            else:
                left_out[f"{kind.name} ({setting.name}, {workload.name})"] = (
                    f"with it {needed(setting, [*taken, kind], workload) / 1e9:.0f} GB of memory would be needed and "
                    f"{room / 1e9:.0f} GB can be had; --peers chooses which take part"
                )
        groups.setdefault(tuple(kind for kind in setting.kinds if kind in taken), []).append(workload)
    return [replace(setting, kinds=kinds, workloads=tuple(works)) for kinds, works in groups.items() if kinds], left_out
