"""The memory that the ranks of one host share, set up through MPI: a board, a buffer of each rank, and results."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdx.comm.shared import board
from hvdx.comm.shared.board import Board
from hvdx.comm.shared.handout import Giver, Taker, new_address
from hvdx.comm.shared.region import Region, create

SMALL = 1 << 18
"""Bytes of each of the two halves of a rank's buffer that need no reservation; what fits is added by every rank."""
RESULTS = 4
"""Places for results. The last one is never lent to TensorFlow: what is put there is copied out."""


@dataclass
class HostMemory:
    """What one rank sees of it.

    Args:
        board: where the ranks of this host meet.
        buffers: of each rank of this host: two halves of SMALL bytes, then what has to be reserved.
        results: where sums lie.
        rank: this rank's place among those of the host.
        place: the memory of the board.
        bells: what wakes each of them.
    """

    board: Board
    buffers: list[Region]
    results: list[Region]
    rank: int
    place: Region
    bells: list[int]

    def __post_init__(self) -> None:
        whole = [region.writable(2 * SMALL) for region in self.buffers]
        self._halves = [(memory[:SMALL], memory[SMALL : 2 * SMALL]) for memory in whole]

    @property
    def own(self) -> Region:
        """This rank's buffer."""
        return self.buffers[self.rank]

    def half(self, rank: int) -> np.ndarray:
        """Return the half of a rank's buffer that belongs to the round this rank is in."""
        return self._halves[rank][self.board.round & 1]

    def next_half(self) -> np.ndarray:
        """Return the half of this rank's buffer that is written before the next round."""
        return self._halves[self.rank][self.board.half]

    def close(self) -> None:
        """Give the files up."""
        for region in (*self.buffers, *self.results, self.place):
            region.close()
        _close(self.bells)
        self.bells = []
        self._halves = []


def share(local: Any) -> tuple[HostMemory | None, str]:
    """Return the memory that the ranks of this host share, or why there is none; collective among them.

    Args:
        local: an mpi4py communicator of the ranks of this host.
    """
    rank, size = local.Get_rank(), local.Get_size()
    descriptors: list[int] = []
    end: Giver | Taker | None = None
    address = problem = ""
    if rank == 0:
        try:
            descriptors = _make(size)
            address = new_address()
            end = Giver(address, size - 1)
        except OSError as error:
            address, problem = "", f"it cannot be made: {error}"
    address = local.bcast(address)
    if rank != 0 and address:
        try:
            end = Taker(address)
        except OSError as error:
            problem = f"rank {rank} of this host cannot reach rank 0 of it: {error}"
    problem = _first(local.allgather(problem))
    memory: HostMemory | None = None
    if not problem:
        try:
            if isinstance(end, Giver):
                end.give(descriptors)
            elif end is not None:
                descriptors = end.take(1 + size + RESULTS + size)
            memory = _open(descriptors, rank, size)
        except OSError as error:
            problem = str(error)
        problem = _first(local.allgather(problem))
    if end is not None:
        end.close()
    if problem:
        if memory is not None:
            memory.close()
        else:
            _close(descriptors)
        return None, problem
    return memory, ""


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _first(problems: list[str]) -> str:
    return next((problem for problem in problems if problem), "")


def _make(size: int) -> list[int]:
    """Return the descriptors of everything; called on one rank of a host."""
    made: list[int] = []
    try:
        made.append(create("hvdx-board"))
        Region(made[0]).reserve(board.nbytes(size))
        made += [create(f"hvdx-buffer-{rank}") for rank in range(size)]
        made += [create(f"hvdx-result-{number}") for number in range(RESULTS)]
        made += [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(size)]
    except OSError:
        _close(made)
        raise
    return made


def _open(descriptors: list[int], rank: int, size: int) -> HostMemory:
    regions = [Region(descriptor) for descriptor in descriptors[: 1 + size + RESULTS]]
    bells = descriptors[1 + size + RESULTS :]
    place, buffers, results = regions[0], regions[1 : 1 + size], regions[1 + size :]
    for region in buffers:
        region.reserve(2 * SMALL)
    posted = Board(place.writable(board.nbytes(size)), rank, bells)
    return HostMemory(posted, buffers, results, rank, place, bells)
