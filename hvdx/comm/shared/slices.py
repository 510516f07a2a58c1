"""Which rank adds which slice of a fusion buffer, and which pieces of which tensors lie in it: pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from hvdx.fusion import ALIGNMENT, Bucket


@dataclass(frozen=True)
class Piece:
    """A run of numbers of one tensor.

    Args:
        index: the tensor's place in the caller's list.
        first, last: the run within the flat tensor; `whole` where it is all of it.
        start: byte in the buffer.
    """

    index: int
    first: int
    last: int
    whole: bool
    start: int


def cut(nbytes: int, places: int) -> list[tuple[int, int]]:
    """Return for each place the bytes of its slice, nearly equal and at aligned boundaries; small buffers leave some
    places without any."""
    lines = -(-nbytes // ALIGNMENT)
    edges = [min(nbytes, lines * place // places * ALIGNMENT) for place in range(places + 1)]
    edges[-1] = nbytes
    return list(itertools.pairwise(edges))


def pieces(bucket: Bucket, start: int, stop: int) -> Iterator[Piece]:
    """Yield what lies between two aligned bytes of a bucket, in order."""
    size = bucket.dtype.itemsize
    for slot in bucket.slots:
        count = prod(slot.shape)
        first = max(0, (start - slot.offset) // size)
        last = min(count, (stop - slot.offset) // size)
        if first < last:
            yield Piece(slot.index, first, last, (first, last) == (0, count), slot.offset + first * size)


def chunks(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the bytes from `start` to `stop` in runs of at most `step`."""
    for begin in range(start, stop, step):
        yield begin, min(stop, begin + step)
