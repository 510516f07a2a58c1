"""PyTorch's gloo all-reduce as DistributedDataParallel uses it: buckets of 25 MB, sent one behind the other.

Given its best case, gradients that are views of the buckets: they are copied in (where DDP computes them in place) and
not copied out.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.session import Session, Way, gradient
from benchmarks.workloads import Shapes

FIRST_BUCKET = 1024 * 1024
BUCKET = 25 * 1024 * 1024


def start(argument: str) -> Session:
    """Join the processes that MASTER_ADDR, RANK and WORLD_SIZE describe."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")

    def ways(shapes: Shapes) -> dict[str, Way]:
        return {"PyTorch DDP gloo": Way(_reduction(shapes), lambda places: (place.numpy() for place in places))}

    return Session(dist.get_rank(), dist.get_world_size(), ways, dist.destroy_process_group)


def buckets(shapes: Shapes) -> list[list[int]]:
    """Return the indices of the tensors of each bucket: in reverse order, the first bucket small, as DDP does."""
    made: list[list[int]] = []
    filled, limit = 0, FIRST_BUCKET
    for index in reversed(range(len(shapes))):
        if not made or filled >= limit:
            limit = BUCKET if made else FIRST_BUCKET
            made.append([])
            filled = 0
        made[-1].append(index)
        filled += 4 * math.prod(shapes[index])
    return made


def _reduction(shapes: Shapes) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    gradients = [torch.from_numpy(gradient(index, shape, rank)) for index, shape in enumerate(shapes)]
    places: list[Any] = [None] * len(shapes)
    flats = []
    for indices in buckets(shapes):
        flat = torch.zeros(sum(math.prod(shapes[index]) for index in indices))
        for index, part in zip(indices, flat.split([math.prod(shapes[i]) for i in indices]), strict=True):
            places[index] = part.view(shapes[index])
        flats.append((indices, flat))

    def reduce() -> Any:
        sent = []
        for indices, flat in flats:
            torch._foreach_copy_([places[index] for index in indices], [gradients[index] for index in indices])
            flat.div_(size)
            sent.append(dist.all_reduce(flat, async_op=True))
        for work in sent:
            work.wait()
        return places

    return reduce
