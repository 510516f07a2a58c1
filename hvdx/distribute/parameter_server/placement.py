"""Which server keeps what: keys of variables, big variables in pieces, a consistent-hash ring. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np

from hvdx.comm.signature import without_counters
from hvdx.errors import ConfigurationError, MissingDependencyError

try:
    from uhashring import HashRing
except ImportError:
    raise MissingDependencyError(
        "The parameter server needs the package uhashring: install hvdx with its extra, hvdx[parameter-server]."
    ) from None

PIECE_BYTES = 4 << 20
"""Bytes of a piece, at most; a single row is never cut."""

SLACK = 0.05
"""How much more than its share a server may get, as a part of the share."""


@dataclass(frozen=True)
class Entry:
    """One variable as all members know it."""

    key: str
    shape: tuple[int, ...]
    dtype: str

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row along the first dimension; all bytes of a scalar."""
        return prod(self.shape[1:]) * itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole variable."""
        return prod(self.shape) * itemsize(self.dtype)

    def describe(self) -> str:
        """Return for example `3x4 float32`."""
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype}"


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of a variable, or all of it.

    Args:
        entry: number of the variable.
        server: who keeps it.
        start: first row.
        stop: the row after the last one.
        whole: whether that is the whole variable, which may have no rows (a scalar).
    """

    entry: int
    server: int
    start: int
    stop: int
    whole: bool

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the piece of something that has the variable's rows."""
        return tuple(shape) if self.whole else (self.stop - self.start, *shape[1:])

    def of(self, array: np.ndarray) -> np.ndarray:
        """Return the piece of an array that has the variable's rows, without a copy."""
        return array if self.whole else array[self.start : self.stop]


@dataclass(frozen=True)
class Placement:
    """Where every piece of every variable is.

    Args:
        entries: the variables.
        pieces: all pieces, in the order of variables and rows.
        servers: how many servers there are.
    """

    entries: tuple[Entry, ...]
    pieces: tuple[Piece, ...]
    servers: int

    def of_server(self, server: int) -> list[Piece]:
        """Return the pieces that a server keeps, in the order of variables and rows."""
        return [piece for piece in self.pieces if piece.server == server]

    @cached_property
    def of_entry(self) -> list[list[Piece]]:
        """The pieces of every variable, in the order of rows."""
        found: list[list[Piece]] = [[] for _ in self.entries]
        for piece in self.pieces:
            found[piece.entry].append(piece)
        return found

    @cached_property
    def cut(self) -> frozenset[int]:
        """The numbers of the variables that are in more than one piece."""
        return frozenset(piece.entry for piece in self.pieces if not piece.whole)

    def nbytes(self, piece: Piece) -> int:
        """Return the bytes of a piece."""
        entry = self.entries[piece.entry]
        return entry.nbytes if piece.whole else (piece.stop - piece.start) * entry.row_bytes

    def balance(self) -> list[int]:
        """Return the bytes that each server keeps."""
        totals = [0] * self.servers
        for piece in self.pieces:
            totals[piece.server] += self.nbytes(piece)
        return totals

    def owners(self) -> dict[tuple[str, int], int]:
        """Return the server of every piece, by the variable's key and the first row."""
        return {(self.entries[piece.entry].key, piece.start): piece.server for piece in self.pieces}


def keys(names: Iterable[str]) -> list[str]:
    """Return one key for each variable name, the same on all workers.

    Counters ("dense_3/kernel") depend on what else a worker has built, so they are left out; what is then named twice
    gets its place among its namesakes.
    """
    seen: dict[str, int] = {}
    result = []
    for name in names:
        plain = without_counters(name.partition(":")[0])
        seen[plain] = seen.get(plain, 0) + 1
        result.append(plain if seen[plain] == 1 else f"{plain}#{seen[plain]}")
    return result


def place(
    entries: Sequence[Entry], servers: int, piece_bytes: int = PIECE_BYTES, whole: Iterable[int] = ()
) -> Placement:
    """Return where every variable's pieces go.

    Each piece belongs to the first server clockwise of its key on the ring that still has room, where each server's
    room is its share of all bytes and a little more. So the load is even and a new server takes its share from all
    others, while most keys stay. Source: Mirrokni, Thorup and
    Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2016.

    Args:
        entries: the variables.
        servers: how many servers there are.
        piece_bytes: the largest piece.
        whole: numbers of variables that are not cut.

    Raises:
        ConfigurationError: `servers` or `piece_bytes` is no number above 0.
    """
    for name, value in (("servers", servers), ("piece_bytes", piece_bytes)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"{name} is an integer of 1 or more. Received: {value!r}.")
    uncut = frozenset(whole)
    cuts = [
        (number, start, stop, len(rows) == 1)
        for number, entry in enumerate(entries)
        for rows in [_rows(entry, piece_bytes, number in uncut)]
        for start, stop in rows
    ]
    names = [f"{entries[number].key}@{start}" for number, start, _, _ in cuts]
    sizes = [
        entries[number].nbytes if whole else (stop - start) * entries[number].row_bytes
        for number, start, stop, whole in cuts
    ]
    owners = assign(names, sizes, servers)
    pieces = tuple(
        Piece(number, owner, start, stop, whole)
        for (number, start, stop, whole), owner in zip(cuts, owners, strict=True)
    )
    return Placement(tuple(entries), pieces, servers)


def assign(names: Sequence[str], sizes: Sequence[int], servers: int) -> list[int]:
    """Return the server of each named thing of a size, by the ring; see `place`."""
    if servers == 1:
        return [0] * len(names)
    ring = HashRing([str(server) for server in range(servers)])
    room = (1 + SLACK) * sum(sizes) / servers
    loads = [0] * servers
    owners = [0] * len(names)
    # The largest first, while there is room everywhere.
    for index in sorted(range(len(names)), key=lambda index: (-sizes[index], names[index])):
        order = [int(node["nodename"]) for node in ring.range(names[index])]
        fitting = [server for server in order if loads[server] + sizes[index] <= room]
        owners[index] = fitting[0] if fitting else min(order, key=lambda server: loads[server])
        loads[owners[index]] += sizes[index]
    return owners


def itemsize(dtype: str) -> int:
    """Return the bytes of one number."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _rows(entry: Entry, piece_bytes: int, uncut: bool) -> list[tuple[int, int]]:
    count = entry.shape[0] if entry.shape else 1
    if uncut or entry.nbytes <= piece_bytes or count < 2:
        return [(0, count)]
    parts = -(-count // max(1, piece_bytes // entry.row_bytes))
    edges = [count * part // parts for part in range(parts + 1)]
    return list(pairwise(edges))
