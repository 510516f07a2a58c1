"""Knowing before a step whether the input has a batch for it: ranks whose data end early say so before the others wait.

A dataset is read one element ahead inside its own pipeline. Tensors (of an iterator or a queue that the input_fn made
itself) are computed in a run of their own before the step, and fed into it: what the graph derives from them then reads
the batch that was found, and no further one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdx import world
from hvdx.estimator.inputs import asking_like
from hvdx.graph import operations_behind
from hvdx.logs import log

v1 = tf.compat.v1


class Lookahead:
    """What is known of the next batch; this one is of an input whose end cannot be seen: it has always another."""

    def has_another(self, session: Any, coord: Any) -> bool:
        """Return whether there is a batch for the next step; called once before each."""
        return True

    def arguments(self) -> Any:
        """Return the SessionRunArgs of the step that takes that batch."""
        return None

    def after(self, results: Any) -> None:
        """Take what the step fetched for `arguments`."""


class _OfDataset(Lookahead):
    """The pipeline says with each batch whether another follows, and alone, before the first, whether there is one."""

    def __init__(self, follows: Any) -> None:
        self._tensor = follows
        self._follows: bool | None = None

    def has_another(self, session: Any, coord: Any) -> bool:
        if self._follows is None:
            self._follows = bool(session.run(self._tensor))
        return self._follows

    def arguments(self) -> Any:
        return v1.train.SessionRunArgs(self._tensor)

    def after(self, results: Any) -> None:
        self._follows = bool(results)


class _OfTensors(Lookahead):
    """The tensors are run before the step, and what they were is fed into it."""

    def __init__(self, tensors: list[Any]) -> None:
        self._tensors = tensors
        self._batch: list[Any] = []

    def has_another(self, session: Any, coord: Any) -> bool:
        try:
            self._batch = session.run(self._tensors)
        except tf.errors.OutOfRangeError:
            coord.raise_requested_exception()  # a queue ends also because the thread that filled it has failed
            return False
        return True

    def arguments(self) -> Any:
        return v1.train.SessionRunArgs(None, feed_dict=dict(zip(self._tensors, self._batch, strict=True)))


def with_lookahead(input_fn: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[[], Lookahead]]:
    """Return an input_fn in place of the user's, and a function that returns what is known of its next batch."""
    found = [Lookahead()]

    @asking_like(input_fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = input_fn(*args, **kwargs)
        if isinstance(result, tf.data.Dataset | v1.data.Dataset):
            result, found[0] = _look_ahead(result)
        elif world.size() > 1:  # one rank has nobody to agree with, and is spared the way through the host
            found[0] = _of_tensors(result)
        return result

    return call, lambda: found[0]


def _of_tensors(result: Any) -> Lookahead:
    """Return the look-ahead of what an input_fn returned; what never changes (constants) has no end to look for."""
    tensors = [part for part in tf.nest.flatten(result, expand_composites=True) if isinstance(part, tf.Tensor)]
    changing = {
        tensor.name: tensor
        for tensor in tensors
        if any(operation.op_def.is_stateful for operation in operations_behind([tensor]))
    }
    graph = v1.get_default_graph()
    for name, tensor in changing.items():
        if tensor.dtype in (tf.variant, tf.resource) or not (graph.is_feedable(tensor) and graph.is_fetchable(tensor)):
            log.warning(
                "input_fn returns %s of type %s, which cannot be read ahead of a step: data that end early on one rank "
                "will be an error. Return a tf.data.Dataset.", name, tensor.dtype.name,
            )  # fmt: skip
            return Lookahead()
    return _OfTensors(list(changing.values())) if changing else Lookahead()


def _look_ahead(dataset: Any) -> tuple[Any, Lookahead]:
    """Return the tensors of the next batch, and what is known of it.

    The dataset is read one element ahead. The first element that comes out is none, and says whether there is a first
    batch: what says so is run alone once before the training.
    """
    spec = dataset.element_spec
    optional = tf.OptionalSpec(spec)

    def flat(value: Any) -> Any:  # an optional is no state that a scan can have, the variant in it is
        return tf.nest.flatten(value, expand_composites=True)[0]

    @tf.autograph.experimental.do_not_convert
    def some(*element: Any) -> Any:
        whole = element if isinstance(spec, tuple) else element[0]
        return flat(tf.experimental.Optional.from_value(whole)), True

    @tf.autograph.experimental.do_not_convert
    def none(_: Any) -> Any:
        return flat(tf.experimental.Optional.empty(spec)), False

    @tf.autograph.experimental.do_not_convert
    def shift(previous: Any, now: Any) -> Any:
        variant, exists = now
        return variant, (previous, exists)

    ending = tf.data.Dataset.from_tensors(0).map(none)
    pairs = dataset.map(some).concatenate(ending).scan(flat(tf.experimental.Optional.empty(spec)), shift)
    iterator = v1.data.make_initializable_iterator(pairs.prefetch(1))
    v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    variant, follows = iterator.get_next()
    batch = tf.nest.pack_sequence_as(optional, [variant], expand_composites=True).get_value()
    return batch, _OfDataset(follows)
