"""Order in v1 graphs, where TensorFlow runs operations in any order that their inputs allow.

In a `tf.function` TensorFlow itself keeps stateful operations in the order of the program. A graph of
`tf.compat.v1.Session` has no such order, and a session runs only the part of it that is asked for; so collectives that
belong together, as those of one update do, are tied to each other here, and to nothing else.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

_state = threading.local()


@contextlib.contextmanager
def together(loss: Any = None) -> Iterator[None]:
    """Keep the collectives that are called inside in their order; inside another such block, it is that one's.

    Args:
        loss: the tensor whose gradients are reduced. Blocks of the same loss are one: where two optimizers share its
            variables, a step runs both, in any order.
    """
    if getattr(_state, "last", None) is not None:
        yield
        return
    _state.last = _blocks_of(loss)
    try:
        yield
    finally:
        _state.last = None


def _blocks_of(loss: Any) -> dict[Any, list[Any]]:
    """Return what was made so far in blocks of this loss; nothing where it is no tensor of a graph."""
    if loss is None or tf.executing_eagerly() or not isinstance(loss, tf.Tensor):
        return {}
    graph = loss.graph
    if not hasattr(graph, "_hvdx_blocks"):
        graph._hvdx_blocks = {}  # with the graph it goes
    blocks: dict[str, dict[Any, list[Any]]] = graph._hvdx_blocks
    return blocks.setdefault(loss.name, {})


def in_order(build: Callable[[], list[Any]]) -> list[Any]:
    """Return what `build` makes; where TensorFlow keeps no order, it runs after what the block made before."""
    last = getattr(_state, "last", None)
    if last is None or tf.executing_eagerly():
        return build()
    graph = tf.compat.v1.get_default_graph()
    if graph._add_control_dependencies:  # of a tf.function
        return build()
    place = (graph, graph._get_control_flow_context())  # one cannot depend on what lies inside a tf.cond
    with tf.control_dependencies(last.get(place, [])):
        results = build()
    last[place] = results
    return results
