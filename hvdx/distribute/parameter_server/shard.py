"""What one server keeps of one model: its pieces as variables, and a real Keras optimizer that updates them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx.comm.host import as_array
from hvdx.distribute.parameter_server import optimizers
from hvdx.distribute.parameter_server.clipping import shared_clip
from hvdx.distribute.parameter_server.placement import Placement
from hvdx.distribute.parameter_server.reduction import Gradient, Rows
from hvdx.errors import CheckpointError


class Shard:
    """The pieces of one model on one server.

    A shard has one more variable, without any numbers: an update in which none of the shard's variables has a gradient
    still counts for its optimizer, as it would in one process.

    Args:
        placement: where all pieces are.
        server: which server this is.
        spec: what the workers registered.
        values: the pieces' first values.
    """

    def __init__(self, placement: Placement, server: int, spec: dict[str, Any], values: Sequence[np.ndarray]) -> None:
        self.pieces = placement.of_server(server)
        description = spec["optimizer"]
        config = description["saved"]["config"]
        clip = shared_clip(config.get("clipnorm"), config.get("global_clipnorm"), placement)
        self._optimizer, self._schedule = optimizers.for_server(description, clips=clip is None)
        self._steps = int(description["steps"])
        self._counts_skipped = not hasattr(self._optimizer, "apply")  # tf_keras and Keras 2
        about = [spec["variables"][piece.entry] for piece in self.pieces]
        self._variables = [
            optimizers.stand_in(number, info["key"], value, description["keras"], info["constraint"])
            for number, (info, value) in enumerate(zip(about, values, strict=True))
        ]
        self._empty = optimizers.stand_in(
            len(self._variables), "hvdx/empty", np.zeros(0, np.float32), description["keras"]
        )
        everything = [*self._variables, self._empty]
        undecayed = [v for v, info in zip(everything, [*about, {"decay": False}], strict=True) if not info["decay"]]
        self._optimizer.exclude_from_weight_decay(var_list=undecayed)
        self._optimizer.build(everything)
        self._values: list[np.ndarray] | None = None
        self._slots = optimizers.slots(self._optimizer, everything)
        # Nadam of tf_keras and Keras 2 counts its updates in Python, which goes wrong in a graph.
        eager = self._counts_skipped and type(self._optimizer).__name__ == "Nadam"
        self._update = self._apply if eager else tf.function(self._apply, reduce_retracing=True)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the pieces."""
        return [tuple(variable.shape) for variable in self._variables]

    def read(self) -> list[np.ndarray]:
        """Return the pieces; later updates do not change what was returned."""
        if self._values is None:
            self._values = [as_array(tf.convert_to_tensor(variable)) for variable in self._variables]
        return list(self._values)

    def apply(self, gradients: Sequence[Gradient | None], rate: float | None) -> None:
        """Make one update.

        Args:
            gradients: one for each piece, or None.
            rate: the learning rate, where the worker decides it.
        """
        self._values = None  # what nobody is being sent can be overwritten in place
        if self._schedule is not None:
            step = int(self._optimizer.iterations) * self._steps + self._steps - 1
            rate = float(self._schedule(tf.constant(step, tf.int64)))
        if rate is not None:
            self._optimizer.learning_rate = rate
        if getattr(self._optimizer, "use_ema", False):
            for _ in range(self._steps - 1):  # Keras averages after every batch, also where it only accumulates
                self._optimizer._update_model_variables_moving_average([*self._variables, self._empty])
        given = [
            _tensor(gradient, tuple(variable.shape))
            for gradient, variable in zip(gradients, self._variables, strict=True)
        ]
        self._update([*given, tf.zeros([0])])

    def _apply(self, gradients: list[Any]) -> None:
        pairs = zip(gradients, [*self._variables, self._empty], strict=True)
        self._optimizer.apply_gradients([(gradient, variable) for gradient, variable in pairs if gradient is not None])

    def skip(self) -> None:
        """Count an update that was skipped because of an infinity, where the optimizer's Keras counts it."""
        if self._counts_skipped:
            self._optimizer.iterations.assign_add(1)

    def finalize(self) -> None:
        """Do what Keras does after the last epoch: the averages become the values, where there are averages."""
        self._values = None
        self._optimizer.finalize_variable_values([*self._variables, self._empty])

    def state(self) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
        """Return what belongs to what, and all arrays: pieces, slots, and what the optimizer has as a whole."""
        about: list[dict[str, Any]] = [{"piece": number, "label": None} for number in range(len(self.pieces))]
        arrays = self.read()
        for slot in self._kept():
            about.append({"piece": slot.owner, "label": slot.label})
            arrays.append(as_array(tf.convert_to_tensor(slot.variable)))
        return about, arrays

    def load(self, about: Sequence[dict[str, Any]], arrays: Sequence[np.ndarray]) -> None:
        """Overwrite everything that `state` returns.

        Raises:
            CheckpointError: something is missing or has another shape.
        """
        self._values = None
        given = {(info["piece"], info["label"]): array for info, array in zip(about, arrays, strict=True)}
        targets: list[tuple[Any, Any]] = [((number, None), v) for number, v in enumerate(self._variables)]
        targets += [((slot.owner, slot.label), slot.variable) for slot in self._kept()]
        for key, variable in targets:
            if key not in given or tuple(given[key].shape) != tuple(variable.shape):
                raise CheckpointError(
                    f"The saved state has no {key[1] or 'value'} of shape {tuple(variable.shape)} for {variable.name}: "
                    "it was saved with another model or optimizer."
                )
            variable.assign(given[key])

    def _kept(self) -> list[optimizers.Slot]:
        """Return the slots that belong to the state: not those of the empty variable, nor the learning rate."""
        empty = len(self._variables)
        return [
            slot for slot in self._slots if slot.owner != empty and (slot.owner, slot.label) != (None, "learning_rate")
        ]


def _tensor(gradient: Gradient | None, shape: tuple[int, ...]) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, Rows):
        return tf.IndexedSlices(
            tf.convert_to_tensor(gradient.values), tf.constant(gradient.indices, tf.int64), tf.constant(shape, tf.int64)
        )
    return tf.convert_to_tensor(gradient)
