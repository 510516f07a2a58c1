"""v1 graphs: whether operations go to one, and what must run before something in it can be computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf


def in_bare_graph() -> bool:
    """Return whether operations go to a v1 graph that is not that of a function, where nothing orders them."""
    return not tf.executing_eagerly() and not tf.compat.v1.get_default_graph()._add_control_dependencies


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
