"""Checkpoint files of one process: each appears whole or not at all, and a damaged one is recognised. No collectives.

A file is a zip of .npy arrays with a checksum each (numpy's .npz) and a JSON description; nothing in it is code.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdx.errors import CheckpointError
from hvdx.logs import log

FORMAT = 1
_NAME = re.compile(r"epoch-(\d+)\.npz")
_LEFTOVER = re.compile(r"\.epoch-\d+\.npz\.\d+\.tmp")


def path_of(directory: Path, epoch: int) -> Path:
    """Return where the checkpoint lies that was written after `epoch` epochs."""
    return directory / f"epoch-{epoch:05d}.npz"


def listed(directory: Path) -> list[Path]:
    """Return the checkpoints of a directory, newest first."""
    if not directory.exists():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def prepare(directory: Path) -> None:
    """Make the directory, check that files can be made in it, and remove what a killed run left half-written.

    Raises:
        OSError: it cannot be made or written to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            path.unlink(missing_ok=True)
    probe = directory / f".writable.{os.getpid()}"
    probe.touch()
    probe.unlink()


def write(path: Path, arrays: Sequence[np.ndarray], description: dict[str, Any]) -> None:
    """Write a checkpoint: beside its place, through to the disk, and only then under its name.

    Args:
        path: its place.
        arrays: what it holds, in order.
        description: what JSON can hold.

    Raises:
        OSError: it cannot be written; what was at `path` is still there.
    """
    text = json.dumps({**description, "format": FORMAT, "dtypes": [array.dtype.name for array in arrays]})
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            members = {f"{index}": _plain(array) for index, array in enumerate(arrays)}
            np.savez(file, description=np.frombuffer(text.encode(), np.uint8), **members)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    _flush_directory(path.parent)


def read(path: Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return the description and the arrays of a checkpoint.

    Raises:
        CheckpointError: the file cannot be read or is damaged; names it and what is wrong.
    """
    try:
        # Read at once: a file that another process replaces meanwhile stays what it was.
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            description = json.loads(file["description"].tobytes().decode())
            if description["format"] != FORMAT:
                raise ValueError(f"its format is {description['format']}, this version reads {FORMAT}")
            arrays = [
                _typed(file[str(index)], dtype, shape)
                for index, (dtype, shape) in enumerate(zip(description["dtypes"], description["shapes"], strict=True))
            ]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # zlib and struct have errors of their own
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return description, arrays


def newest(directory: Path) -> tuple[Path, dict[str, Any], list[np.ndarray]] | None:
    """Return the newest whole checkpoint, or None where there is none yet; a line tells of damaged ones.

    Raises:
        CheckpointError: there are checkpoints, and none is whole.
    """
    paths = listed(directory)
    damaged = []
    for path in paths:
        try:
            description, arrays = read(path)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        for line in damaged:
            log.warning("%s; going on from %s, the last whole one.", line, path.name)
        return path, description, arrays
    if damaged:
        raise CheckpointError(
            f"None of the {len(paths)} checkpoints in {directory} is whole ({damaged[0]}). Move them away to start "
            "anew."
        )
    return None


def prune(directory: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    for path in listed(directory)[keep:]:
        path.unlink(missing_ok=True)


def _plain(array: np.ndarray) -> np.ndarray:
    """Return an array of a dtype that .npy knows; bfloat16 and its like go as integers."""
    if array.dtype.kind in "biufc" and array.dtype.isbuiltin == 1:
        return array
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def _typed(array: np.ndarray, dtype: str, shape: Sequence[int]) -> np.ndarray:
    from tensorflow import as_dtype

    return array.view(as_dtype(dtype).as_numpy_dtype).reshape(shape)


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems cannot; they write names through by themselves
    finally:
        os.close(descriptor)
