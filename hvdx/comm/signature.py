"""What a collective is, so that ranks can compare: every exchange starts with this, and a difference is an error.

A rank that calls another collective than its peers would otherwise wait for ever, or add numbers that do not belong
together. The signature travels as a few integers (the header); only when headers differ do the ranks exchange words.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdx.errors import GradientError, HvdxError, MismatchError

HEADER_LENGTH = 8
"""int64 numbers in a header: digest, sequence number, values that may differ between ranks, and a place (`header`)."""

WORDS_LENGTH = 2048
"""Bytes of description a rank sends when headers differ."""

FAILED = "failed"
"""The kind of the call with which a rank says why it cannot go on."""

_MISSING = re.compile(r"\[none for (.*?)(?:\] |$)")
_COUNTER = re.compile(r"_\d+(?=[/:_]|$)")  # also inside "adam_1/dense_3_kernel_momentum"


def without_counters(name: str) -> str:
    """Return a name without the numbers that depend on what else a process has built ("dense_3")."""
    return _COUNTER.sub("", name)


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of one tensor in a collective. A dimension of -1 may differ between ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def describe(self) -> str:
        """Return for example `dense/kernel 8x16 float32`."""
        shape = "x".join("?" if n < 0 else str(n) for n in self.shape) or "scalar"
        return f"{self.name} {shape} {self.dtype}"


@dataclass(frozen=True)
class Signature:
    """One call of a collective: what kind, on which tensors, with which operation or root.

    Args:
        kind: the collective's name ("allreduce").
        what: what the tensors are, in the user's words ("gradients", "metrics at the end of epoch 2").
        tensors: their names, shapes and dtypes.
        detail: the operation or the root rank ("Average", "root 0").
        missing: place and name of each tensor that this rank lacks.
    """

    kind: str
    what: str
    tensors: tuple[TensorSpec, ...] = ()
    detail: str = ""
    missing: tuple[tuple[int, str], ...] = ()
    digest: int = field(init=False, compare=False, default=0)
    _words: str = field(init=False, compare=False, repr=False, default="")

    def __post_init__(self) -> None:
        # Names carry counters that depend on what else a rank has built ("dense_3"); they do not count as different.
        parts = [self.kind, self.what, self.detail]
        parts += [f"no {place}|{without_counters(name)}" for place, name in self.missing]
        parts += [f"{without_counters(spec.name)}|{spec.shape}|{spec.dtype}" for spec in self.tensors]
        raw = hashlib.blake2b("\n".join(parts).encode(), digest_size=8).digest()
        object.__setattr__(self, "digest", int.from_bytes(raw, "little", signed=True))

    def describe(self) -> str:
        """Return the call in words, for example `allreduce (Average) of 2 gradients (a 3x4 float32, b 4 float32)`."""
        if not self._words:
            object.__setattr__(self, "_words", _describe(self))  # asked for at each call, so it is kept
        return self._words


def _describe(signature: Signature) -> str:
    head = signature.kind + (f" ({signature.detail})" if signature.detail else "")
    if signature.missing:
        head = f"[none for {', '.join(name for _, name in signature.missing)}] {head}"
    if not signature.tensors:
        return head + (f": {signature.what}" if signature.what else "")
    listed = ", ".join(spec.describe() for spec in signature.tensors[:24])
    if len(signature.tensors) > 24:
        listed += f", and {len(signature.tensors) - 24} more"
    return f"{head} of {len(signature.tensors)} {signature.what or 'tensor(s)'} ({listed})"


def header(signature: Signature, sequence: int, *extra: int, place: int = 0) -> np.ndarray:
    """Return the header of one call.

    Args:
        signature: what is called.
        sequence: its number.
        extra: up to six numbers that may differ between ranks; five where there is a place.
        place: the number of a collective that a graph leaves unordered, else 0.
    """
    result = np.zeros(HEADER_LENGTH, np.int64)
    result[0], result[1] = signature.digest, sequence
    result[2 : 2 + len(extra)] = extra
    if place:
        result[-1] = place
    return result


def agrees(headers: np.ndarray) -> bool:
    """Return whether all rows of `headers` (ranks x HEADER_LENGTH) name the same call."""
    return bool((headers[:, :2] == headers[0, :2]).all()) and not unordered(headers)


def unordered(headers: np.ndarray) -> bool:
    """Return whether the ranks are at different collectives, in places where a graph keeps no order."""
    return bool((headers[:, -1] != 0).all() and (headers[:, -1] != headers[0, -1]).any())


def places(headers: np.ndarray) -> np.ndarray:
    """Return the places that the ranks told instead of values."""
    return headers[:, 2:]


def words(signature: Signature) -> np.ndarray:
    """Return the description as a fixed number of bytes, cut where it is longer."""
    text = signature.describe().encode()[: WORDS_LENGTH - 1]
    result = np.zeros(WORDS_LENGTH, np.uint8)
    result[: len(text)] = np.frombuffer(text, np.uint8)
    return result


def mismatch(rows: np.ndarray, headers: np.ndarray) -> HvdxError:
    """Return the error that says what each rank called.

    Args:
        rows: ranks x WORDS_LENGTH bytes, what each rank's `words` gave.
        headers: ranks x HEADER_LENGTH, the headers that differed.
    """
    texts = [row.tobytes().split(b"\0", 1)[0].decode(errors="replace") for row in rows]
    missing = _missing_somewhere(texts)
    if missing is not None:
        return missing
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        by_text.setdefault(text, []).append(rank)
    lines = [f"  {_ranks(ranks)}: {text}" for text, ranks in by_text.items()]
    count = int(headers[:, 1].max())
    hint = (
        "Every rank must call the same collectives in the same order, with the same shapes and dtypes. Usual causes: "
        "a callback, validation or save that runs on one rank only, unequal numbers of steps, or a model that differs."
    )
    if any("leaving" in text for text in by_text):
        hint = "A rank left while others still worked: look at its own output above for the reason."
    if any(text.startswith(f"{FAILED}: ") for text in by_text):
        return MismatchError("A rank failed, and the others cannot go on without it.\n" + "\n".join(lines))
    return MismatchError(
        f"The ranks called different collectives (call {count} of this job).\n" + "\n".join(lines) + f"\n{hint}"
    )


def check_thresholds(thresholds: np.ndarray, signature: Signature) -> None:
    """Check that all ranks cut their fusion buffers alike.

    Args:
        thresholds: each rank's fusion threshold in bytes.
        signature: the call it is about.

    Raises:
        MismatchError: they differ; raised on every rank.
    """
    if (thresholds != thresholds[0]).any():
        raise MismatchError(
            f"The ranks' fusion thresholds differ: {thresholds.tolist()} bytes on ranks 0, 1, ... in "
            f"{signature.describe()}. Give all ranks the same HVDX_FUSION_THRESHOLD and fusion_threshold."
        )


def _missing_somewhere(texts: Sequence[str]) -> GradientError | None:
    """Return an error if all ranks reduce gradients and some lack some of them."""
    found = [_MISSING.match(text) for text in texts]
    if not any(found) or not all("gradients" in text for text in texts):
        return None
    lacks: dict[str, list[int]] = {}
    for rank, match in enumerate(found):
        for name in match.group(1).split(", ") if match else ():
            lacks.setdefault(name, []).append(rank)
    lines = []
    for name, ranks in lacks.items():
        others = [rank for rank in range(len(texts)) if rank not in ranks]
        if others:
            lines.append(f"  {name}: no gradient on {_ranks(ranks)}, a gradient on {_ranks(others)}")
    if not lines:
        return None
    return GradientError(
        "Some ranks have no gradient for a variable that has one on others.\n"
        + "\n".join(lines)
        + "\nLet the loss depend "
        "on the same variables on every rank, or pass missing_gradients='zeros' to count a missing one as zeros."
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"ranks {shown}"
