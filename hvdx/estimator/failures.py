"""One rank's failure is told to the others, which else would wait for it; a failure that all have is not told again."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import tensorflow as tf

from hvdx import world
from hvdx.errors import CheckpointError

E = TypeVar("E", bound=BaseException)
_MARK = "hvdx_on_all_ranks"
_MISFIT = re.compile(
    r"Key \S+ not found in checkpoint|Assign requires shapes[^\n]*|[^\n]*Shape in shape_and_slice[^\n]*"
)


def on_all_ranks(error: E) -> E:
    """Return the error with the mark that every rank is about to raise one."""
    setattr(error, _MARK, True)
    return error


def marked_as(other: BaseException, error: E) -> E:
    """Return the error with the mark that the other one has, if it has one."""
    return on_all_ranks(error) if getattr(other, _MARK, False) else error


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """Tell the other ranks, which are inside such a block too, what is raised in this one.

    Raises:
        MismatchError: on the others; says which rank failed, and why.
    """
    before = world.last_error()
    try:
        yield
    except Exception as error:
        cause = world.last_error()
        if cause is not None and cause is not before:  # a collective has failed, which the others have noticed too
            if isinstance(error, tf.errors.OpError) and type(cause).__name__ in str(error):
                raise type(cause)(str(cause)) from error  # TensorFlow has put an error of its own around it
        elif not getattr(error, _MARK, False):
            world.say_failed(f"{type(error).__name__}: {first_paragraph(error)}")
        raise


@contextlib.contextmanager
def restoring(folder: Any) -> Iterator[None]:
    """Say in a sentence that a checkpoint does not fit the graph, where TensorFlow says it in a hundred lines.

    Raises:
        CheckpointError: names the directory and what does not fit.
    """
    try:
        yield
    except tf.errors.OpError as error:
        text = str(error)
        if "Restoring from checkpoint failed" not in text:
            raise
        found = _MISFIT.search(text)
        reason = found.group(0).strip() if found else first_paragraph(error)
        raise CheckpointError(
            f"The newest checkpoint in {os.fspath(folder)} is of another model: {reason}. Give this model a model_dir "
            "of its own, or make the model that the checkpoint is of."
        ) from error


def first_paragraph(error: BaseException) -> str:
    """Return what the error says, without the stack traces that TensorFlow appends."""
    return str(error).split("\n\n", 1)[0][:1000]
