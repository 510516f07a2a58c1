"""What a rank copies and adds for one plan, worked out once: views into the shared memory, in the order of use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdx import fusion
from hvdx.comm.reduce_op import ReduceOp
from hvdx.comm.shared.adding import Adding
from hvdx.comm.shared.memory import SMALL
from hvdx.comm.shared.slices import Piece, chunks, cut, pieces

_CHUNK = 1 << 18
"""Bytes that are added at a time: what a rank has copied is still in its cache when the others' numbers come."""

Copy = tuple[int, int, int, bool, Any, np.ndarray]
"""Tensor, first and last number of it, whether that is all, factor or None, and where to."""


@dataclass
class Chunk:
    """A run of the slice that this rank adds.

    Args:
        copies: this rank's own numbers, straight into the result.
        out: the run in the result.
        others: the same run in the other ranks' buffers.
    """

    copies: list[Copy]
    out: np.ndarray
    others: list[np.ndarray]


@dataclass
class Work:
    """One plan, on one rank.

    Args:
        plan: the fusion plan.
        op: the operation.
        ranks: number of ranks in the world.
        places: how many slices a bucket is cut into.
        place: which of them this rank adds; one that does not exist for none.

    Attributes:
        starts: the byte at which each bucket begins, one after the other.
        addings: how the numbers of each are put together.
        nbytes: of all of them.
    """

    plan: fusion.Plan
    op: ReduceOp
    ranks: int
    places: int
    place: int
    starts: list[int] = field(init=False, default_factory=list)
    addings: list[Adding] = field(init=False, default_factory=list)
    nbytes: int = field(init=False, default=0)
    _copies: dict[bool, tuple[np.ndarray, list[Copy]]] = field(init=False, default_factory=dict)
    _chunks: dict[int, tuple[list[np.ndarray], list[list[Chunk]]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for bucket in self.plan.buckets:
            self.starts.append(self.nbytes)
            self.addings.append(Adding(self.op, bucket.dtype, self.ranks))
            self.nbytes += fusion.aligned(bucket.nbytes)

    @property
    def small(self) -> bool:
        """Whether every rank adds everything for itself."""
        return self.nbytes <= SMALL

    def slice(self, number: int) -> tuple[int, int]:
        """Return the bytes of a bucket that this rank adds."""
        if self.place >= self.places:
            return 0, 0
        return cut(self.plan.buckets[number].nbytes, self.places)[self.place]

    def copies(self, buffer: np.ndarray, half: bool) -> list[Copy]:
        """Return what this rank copies into its buffer: everything where that is small, else what others add.

        Args:
            buffer: where the first bucket begins.
            half: which of two; one that was given before must be the same memory, or it is worked out again.
        """
        known = self._copies.get(half)
        if known is not None and known[0] is buffer:
            return known[1]
        found: list[Copy] = []
        for number, (start, bucket) in enumerate(zip(self.starts, self.plan.buckets, strict=True)):
            memory = buffer[start : start + bucket.nbytes]
            mine = (0, 0) if self.small else self.slice(number)
            for begin, end in ((0, mine[0]), (mine[1], bucket.nbytes)):
                found += [self._copy(number, piece, memory) for piece in pieces(bucket, begin, end)]
        self._copies[half] = buffer, found
        return found

    def chunks(self, key: int, result: np.ndarray, others: Sequence[np.ndarray]) -> list[list[Chunk]]:
        """Return for each bucket the runs of this rank's slice.

        Args:
            key: which result this is.
            result: its memory.
            others: the other ranks' buffers, from where the first bucket begins.
        """
        known = self._chunks.get(key)
        bases = [result, *others]
        if known is not None and all(a is b for a, b in zip(known[0], bases, strict=True)):
            return known[1]
        found = []
        for number, (start, bucket) in enumerate(zip(self.starts, self.plan.buckets, strict=True)):
            memory, *theirs = (base[start : start + bucket.nbytes] for base in bases)
            runs = []
            for begin, end in chunks(*self.slice(number), _CHUNK):
                copies = [self._copy(number, piece, memory) for piece in pieces(bucket, begin, end)]
                views = [base[begin:end].view(bucket.dtype) for base in (memory, *theirs)]
                runs.append(Chunk(copies, views[0], views[1:]))
            found.append(runs)
        self._chunks[key] = bases, found
        return found

    def _copy(self, number: int, piece: Piece, memory: np.ndarray) -> Copy:
        bucket = self.plan.buckets[number]
        nbytes = (piece.last - piece.first) * bucket.dtype.itemsize
        view = memory[piece.start : piece.start + nbytes].view(bucket.dtype)
        if piece.whole:
            [shape] = (slot.shape for slot in bucket.slots if slot.index == piece.index)
            view = view.reshape(shape)
        return piece.index, piece.first, piece.last, piece.whole, self.addings[number].scale, view


def copy(copies: Sequence[Copy], arrays: Sequence[np.ndarray]) -> None:
    """Copy tensors, multiplied on the way where there is a factor."""
    for index, first, last, whole, scale, view in copies:
        source = arrays[index] if whole else arrays[index].reshape(-1)[first:last]
        if scale is None:
            np.copyto(view, source)
        else:
            np.multiply(source, scale, out=view)
