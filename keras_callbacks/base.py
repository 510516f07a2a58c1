"""The base of all callbacks here: what Keras 3, tf_keras and Keras 2 ask of a callback, without inheriting from any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

FIRST, ANYWHERE, AGREE, REPORT, LAST = range(5)
"""Places in the list of callbacks; see `callback_list.arrange`."""


def _default(method: F) -> F:
    """Mark a method that does nothing, so that no Keras calls it for every batch."""
    method._is_default = True  # type: ignore[attr-defined]
    return method


def _is_default(method: Any) -> bool:
    return getattr(method, "_is_default", False)


class Callback:
    """A callback of any Keras: it is passed to `fit`, `evaluate` or `predict` in the list `callbacks`."""

    position = ANYWHERE
    _supports_tf_logs = False
    _chief_worker_only = None
    validation_data = None

    def __init__(self) -> None:
        self.model: Any = None
        self.params: dict[str, Any] = {}

    def set_params(self, params: dict[str, Any]) -> None:
        """Receive verbosity, number of epochs and number of steps (None where Keras does not know it yet)."""
        self.params = params

    def set_model(self, model: Any) -> None:
        """Receive the model; runs before the model makes its train function."""
        self.model = model

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Run before the first step of an epoch, counted from 0."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Run after an epoch and its validation; `logs` is the same dictionary for all callbacks."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Run when `fit` starts; the model's train function exists."""

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Run when `fit` ends; not when it fails."""

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Run when `evaluate` or a validation starts, before metrics are reset."""

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Run when `evaluate` or a validation ends."""

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Run when `predict` starts."""

    def on_predict_end(self, logs: dict[str, Any] | None = None) -> None:
        """Run when `predict` ends."""

    @_default
    def on_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Do nothing: the old name of `on_train_batch_begin`."""

    @_default
    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Do nothing: the old name of `on_train_batch_end`."""

    @_default
    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Run before a step (or `steps_per_execution` steps), counted from 0 in each epoch."""

    @_default
    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Run after a step."""

    @_default
    def on_test_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Run before a step of a validation."""

    @_default
    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Run after a step of a validation."""

    @_default
    def on_predict_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Run before a step of a prediction."""

    @_default
    def on_predict_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Run after a step of a prediction."""

    # tf_keras and Keras 2 ask these before they call a hook for every batch.

    def _implements_train_batch_hooks(self) -> bool:
        return not (_is_default(self.on_train_batch_begin) and _is_default(self.on_train_batch_end))

    def _implements_test_batch_hooks(self) -> bool:
        return not (_is_default(self.on_test_batch_begin) and _is_default(self.on_test_batch_end))

    def _implements_predict_batch_hooks(self) -> bool:
        return not (_is_default(self.on_predict_batch_begin) and _is_default(self.on_predict_batch_end))
