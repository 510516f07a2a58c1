"""The optimizer on a worker: changed in place so that the servers update, and its variables get what they made of them.

Each Keras has one place where the gradients of an update are whole: accumulated, unscaled, not yet clipped. There they
are pushed. Clipping, decay, update and averaging are the servers' then, and are left out on the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from hvdx import keras_api
from hvdx.distribute.parameter_server import optimizers, states
from hvdx.distribute.parameter_server.client import ParameterClient
from hvdx.distribute.parameter_server.saving import Saving
from hvdx.errors import OptimizerError
from hvdx.keras_api import Family
from hvdx.logs import log
from hvdx.ops.sparse import times

T = TypeVar("T")


def ParameterServerOptimizer(optimizer: T, client: ParameterClient) -> T:
    """Make an optimizer let parameter servers do its updates.

    The object is changed in place and returned. The variables are registered when it is built, by all workers; they
    get the values of worker 0. After `fit` the optimizer has the servers' slots, so that the model is saved whole.

    Args:
        optimizer: an optimizer of Keras 3, tf_keras or Keras 2 (not legacy), also inside a LossScaleOptimizer.
        client: this worker's way to the servers; used for this optimizer only.

    Raises:
        OptimizerError: `optimizer` is none of these, or has been wrapped already.
    """
    inner = optimizers.check(optimizer)
    cls = type(inner)
    if hasattr(cls, "hvdx_client") or hasattr(cls, "hvdx_reducer"):
        raise OptimizerError(f"This {cls.__name__} has been wrapped already: its gradients would be reduced twice.")
    hook: type[_Hook] = _Keras3 if keras_api.family(inner) is Family.KERAS_3 else _Keras2
    missing = [name for name in hook.needed if not hasattr(cls, name)]
    if missing:
        raise OptimizerError(
            f"{cls.__name__} has no method {missing[0]}, where hvdx pushes the gradients. This version of Keras is not "
            "supported."
        )
    inner.__class__ = keras_api.hooked_class(cls, hook, hvdx_client=client)
    # `model.compile` puts a LossScaleOptimizer around optimizers by itself; no message can be sent from inside XLA.
    keras_api.change_method(keras_api.loss_scale_class_of_keras_3(), "check_finite", _common_finite_test)
    keras_api.change_method(keras_api.trainer_class_of_keras_3(), "_resolve_auto_jit_compile", _off_with_servers)
    if hook is _Keras3 and inner.built:  # tf_keras and Keras 2 call build again in each trace
        inner._hvdx_register(list(inner._trainable_variables))
    return optimizer


class _Slices(NamedTuple):
    """The rows of a `tf.IndexedSlices` as arrays."""

    indices: np.ndarray
    values: np.ndarray


class _Hook(Saving):
    """What both Kerases' optimizers get. What changes is kept in the object's own dictionary, past Keras's tracking."""

    needed: tuple[str, ...] = ()

    def build(self, var_list: Any) -> None:
        super().build(var_list)  # type: ignore[misc]
        self._hvdx_register(list(var_list))

    def _clip_gradients(self, grads: Any) -> Any:
        return grads

    def _apply_weight_decay(self, variables: Any) -> None:
        pass

    def _update_model_variables_moving_average(self, variables: Any) -> None:
        pass

    def _overwrite_model_variables_with_average_value(self, variables: Any) -> None:
        pass

    def _hvdx_during_step(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outer = self.__dict__.get("hvdx_applies", False)
        self.__dict__["hvdx_applies"] = True
        try:
            return function(*args, **kwargs)
        finally:
            self.__dict__["hvdx_applies"] = outer

    def _hvdx_register(self, variables: list[Any]) -> None:
        if "hvdx_variables" in self.__dict__:
            return
        late = tf.executing_eagerly() and self.__dict__.get("hvdx_applies", False)
        with tf.init_scope():
            client = self.hvdx_client
            values = client.register(variables, self)
            self.__dict__["hvdx_variables"] = variables
            if not client.rejoined:  # a model that was loaded brings slots, which the servers get from worker 0
                updates = int(self.iterations)  # type: ignore[attr-defined]
                values = client.load(lambda: states.of_optimizer(self, variables, updates) if updates else None)
            if late and any(not np.array_equal(v.numpy(), value) for v, value in zip(variables, values, strict=True)):
                log.warning(
                    "The first gradients of worker %d were computed with other weights than worker 0's: build the "
                    "optimizer before the first step, optimizer.build(model.trainable_variables).",
                    client.worker,
                )
            self._hvdx_assign(values)

    def _hvdx_exchange(self, pairs: Sequence[tuple[Any, Any]], rate: Any) -> None:
        """Push gradients, and overwrite the variables with the newest parameters."""
        variables = self.__dict__["hvdx_variables"]
        given = {self._var_key(variable): gradient for gradient, variable in pairs}  # type: ignore[attr-defined]
        gradients = [given.get(self._var_key(variable)) for variable in variables]  # type: ignore[attr-defined]
        if tf.executing_eagerly():
            self._hvdx_assign(self._hvdx_step(gradients, float(rate), int(self.iterations)))  # type: ignore[attr-defined]
            return
        tensors: list[Any] = []
        for gradient in gradients:
            if isinstance(gradient, tf.IndexedSlices):
                tensors += [gradient.indices, gradient.values]
            elif gradient is not None:
                tensors.append(gradient)

        def step(rate: np.ndarray, updates: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            rest = iter(arrays)
            own: list[Any] = []
            for gradient in gradients:
                if isinstance(gradient, tf.IndexedSlices):
                    own.append(_Slices(next(rest), next(rest)))
                else:
                    own.append(None if gradient is None else next(rest))
            return self._hvdx_step(own, float(rate), int(updates))

        dtypes = [tf.as_dtype(variable.dtype) for variable in variables]
        # read in the graph: by the time the function runs, TensorFlow may have counted this step
        updates = tf.convert_to_tensor(self.iterations)  # type: ignore[attr-defined]
        values = tf.numpy_function(step, [tf.cast(rate, tf.float32), updates, *tensors], dtypes, stateful=True)
        values = values if isinstance(values, list | tuple) else [values]
        for variable, value in zip(variables, values, strict=True):
            value.set_shape(variable.shape)
            variable.assign(value)

    def _hvdx_step(self, gradients: list[Any], rate: float, updates: int) -> list[Any]:
        self._hvdx_give(updates)
        newest = self.hvdx_client.step(gradients, rate)
        if newest is not None:
            self.__dict__["hvdx_last"] = newest
        return list(self.__dict__["hvdx_last"])

    def _hvdx_all_finite(self, finite: Any) -> Any:
        """Return whether the gradients are finite, of all workers if synchronous; where not, skip the step."""
        if tf.executing_eagerly():
            return tf.constant(self.hvdx_client.all_finite(bool(finite)))
        result = tf.numpy_function(lambda own: self.hvdx_client.all_finite(bool(own)), [finite], tf.bool, stateful=True)
        result.set_shape([])
        return result


class _Keras3(_Hook):
    needed = (
        "_backend_update_step",
        "_clip_gradients",
        "_apply_weight_decay",
        "_update_model_variables_moving_average",
        "_overwrite_model_variables_with_average_value",
        "finalize_variable_values",
    )

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        return self._hvdx_during_step(super().apply, *args, **kwargs)  # type: ignore[misc]

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        """Called once an update, on the averaged accumulation of all micro-batches."""
        self._hvdx_exchange(list(zip(grads, trainable_variables, strict=True)), learning_rate)


class _Keras2(_Hook):
    needed = ("_internal_apply_gradients", "aggregate_gradients", "_clip_gradients", "_apply_weight_decay",
              "finalize_variable_values")  # fmt: skip

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        return self._hvdx_during_step(super().apply_gradients, *args, **kwargs)  # type: ignore[misc]

    def aggregate_gradients(self, grads_and_vars: Any) -> Any:
        """Called from outside by a LossScaleOptimizer before its test: then all workers see any worker's infinity."""
        pairs = list(grads_and_vars)
        if self.__dict__.get("hvdx_applies") or not pairs:
            return pairs
        parts = [getattr(gradient, "values", gradient) for gradient, _ in pairs]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(part)) for part in parts])
        factor = tf.where(self._hvdx_all_finite(finite), 1.0, float("nan"))
        return [(times(gradient, factor), variable) for gradient, variable in pairs]

    def _internal_apply_gradients(self, grads_and_vars: Any) -> Any:
        self._hvdx_exchange(list(grads_and_vars), self.learning_rate)  # type: ignore[attr-defined]
        return self.iterations.assign_add(1)  # type: ignore[attr-defined]


def hooked(optimizer: Any) -> Any:
    """Return the optimizer inside if its updates are made by servers, else None."""
    inner = keras_api.inner_optimizer(optimizer) if optimizer is not None else None
    return inner if isinstance(inner, _Hook) else None


def _common_finite_test(original: Any) -> Any:
    def check_finite(self: Any, grads: Any) -> Any:
        inner = hooked(self)
        finite = original(self, grads)
        return finite if inner is None else inner._hvdx_all_finite(finite)

    return check_finite


def _off_with_servers(original: Any) -> Any:
    def resolve(self: Any) -> bool:
        return hooked(getattr(self, "optimizer", None)) is None and bool(original(self))

    return resolve
