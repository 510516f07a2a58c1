"""Walking a v1 graph backwards: what must run before something can be computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf


def operations_behind(outputs: Iterable[Any], fed: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield each operation that tensors, variables and operations of one graph need, themselves included, once.

    Args:
        outputs: where to start.
        fed: tensors that are known, behind which nothing is looked at.
    """
    known = {tensor.ref() for tensor in fed}
    waiting = list(outputs)
    seen: set[str] = set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, tf.Tensor) and item.ref() in known:
            continue
        operation = item if isinstance(item, tf.Operation) else item.op
        if operation.name in seen:
            continue
        seen.add(operation.name)
        yield operation
        waiting.extend(operation.inputs)
        waiting.extend(operation.control_inputs)
