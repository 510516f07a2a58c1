"""Order in v1 graphs, where TensorFlow runs operations in any order that their inputs allow.

In a `tf.function` TensorFlow itself keeps stateful operations in the order of the program. A graph of
`tf.compat.v1.Session` has no such order, so there the collectives are tied to each other as the program makes them, the
same on every rank. But a session runs only what is asked for, and what that depends on: it must not be made to run
something for which other data would have to be fed. So each collective is tied to earlier ones that need the same
placeholders and input, or some of them, and to no others. Those that are not tied have a place, the same on every rank,
by which the ranks find together when they run (`turns.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hvdx.graph import in_bare_graph, operations_behind


@dataclass
class Chain:
    """Collectives tied to each other.

    Args:
        earlier: chains whose collectives need less than these.
        last: what was made last in each place of a graph: one cannot depend on what lies inside a tf.cond or a loop.
    """

    earlier: list[Chain] = field(default_factory=list)
    last: dict[Any, list[Any]] = field(default_factory=dict)

    def before(self, place: Any) -> list[Any]:
        """Return what comes before the next one in this place."""
        return [operation for chain in (self, *self.earlier) for operation in chain.last.get(place, [])]


_INPUTS = ("Placeholder", "IteratorGetNext", "QueueDequeue", "ReaderRead")
_state = threading.local()


@contextlib.contextmanager
def together(tensors: Sequence[Any] = ()) -> Iterator[None]:
    """Keep the collectives that are called inside in their order; inside another such block, it is that one's.

    Args:
        tensors: what they are about: they come after earlier ones that need the same inputs. If there are none, they
            are tied to each other only.
    """
    if getattr(_state, "chain", None) is not None:
        yield
        return
    _state.chain = _chain_of(tensors) if tensors else Chain()
    try:
        yield
    finally:
        _state.chain = None


def in_order(
    build: Callable[[], list[Any]], tensors: Sequence[Any] = (), among: str = "collectives", about: str = ""
) -> list[Any]:
    """Return what `build` makes; where TensorFlow keeps no order, it runs after what was made before.

    Args:
        build: makes operations, and returns them or their results.
        tensors: what they work on.
        among: which operations are tied to each other. What changes a variable must not be tied to what only reads.
        about: what they do, in words: the first with these words is at the same place on every rank, and so on.
    """
    if not in_bare_graph():
        return build()
    graph = tf.compat.v1.get_default_graph()
    chain: Chain | None = getattr(_state, "chain", None)
    if chain is None:
        chain = _chain_of(tensors, among)
    place = (graph, graph._get_control_flow_context())
    with tf.control_dependencies(chain.before(place)), _at(_number_of(graph, about)):
        results = build()
    chain.last[place] = results
    return results


def placed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as it is to run later, in the graph that is being built: it knows its place there."""
    place = current_place()
    if not place:
        return function

    @tf.autograph.experimental.do_not_convert
    def at_its_place(*arrays: Any) -> Any:
        with _at(place):
            return function(*arrays)

    return at_its_place


def current_place() -> int:
    """Return the place of the collective that this thread builds or runs; 0 where TensorFlow keeps the order."""
    return int(getattr(_state, "place", 0))


@contextlib.contextmanager
def _at(place: int) -> Iterator[None]:
    before, _state.place = current_place(), place
    try:
        yield
    finally:
        _state.place = before


def _number_of(graph: Any, about: str) -> int:
    """Return a number above 0 for one more collective of a graph: the same on ranks that build the same."""
    while getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    if not hasattr(graph, "_hvdx_places"):
        graph._hvdx_places = Counter()
    graph._hvdx_places[about] += 1
    digest = hashlib.blake2b(f"{about} {graph._hvdx_places[about]}".encode(), digest_size=8).digest()
    return max(1, int.from_bytes(digest, "little") >> 1)


def _chain_of(tensors: Sequence[Any], among: str = "collectives") -> Chain:
    """Return the chain of the collectives that need the same inputs as these tensors."""
    if not in_bare_graph():
        return Chain()
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, "_hvdx_chains"):
        graph._hvdx_chains = {}  # with the graph it goes
    chains: dict[tuple[str, frozenset[str]], Chain] = graph._hvdx_chains
    inputs = _inputs_of(tensors)
    chain = chains.setdefault((among, inputs), Chain())
    chain.earlier = [other for (kind, less), other in chains.items() if kind == among and less and less < inputs]
    return chain


def _inputs_of(tensors: Sequence[Any]) -> frozenset[str]:
    """Return the names of the placeholders and input operations that these tensors need."""
    parts = tf.nest.flatten(list(tensors), expand_composites=True)
    operations = operations_behind(part for part in parts if isinstance(part, tf.Tensor))
    return frozenset(operation.name for operation in operations if operation.type.startswith(_INPUTS))
