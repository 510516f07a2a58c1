"""Iterators over several devices that live a little longer than their last use.

TensorFlow's multi-device iterator fetches ahead in threads of its own. One that is dropped while such a thread fetches
at times ends the process with a segmentation fault (TensorFlow 2.21, its own strategies too). Keras 3 drops one right
after its first batch, at the start of every `fit` and `evaluate`. So a strategy keeps the last two: when a third is
made, the first has long had what it fetched, and its threads are idle.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

KEPT = 2


def keeping(dataset: Any, kept: deque[Any]) -> Any:
    """Return a distributed dataset whose iterators are put into `kept`.

    Args:
        dataset: what TensorFlow has made.
        kept: the strategy's, with KEPT places.
    """
    cls: Any = type(dataset)
    dataset.__class__ = _class_of(cls)
    dataset.hvdx_kept = kept
    return dataset


@functools.cache
def _class_of(cls: Any) -> Any:
    def __iter__(self: Any) -> Any:
        iterator = cls.__iter__(self)
        self.hvdx_kept.append(iterator)
        return iterator

    return type(cls)(cls.__name__, (cls,), {"__iter__": __iter__, "__module__": cls.__module__})
