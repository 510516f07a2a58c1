"""What a hooked optimizer does where it is saved, restored or at the end of its training: servers hold its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx.distribute.parameter_server import optimizers, states
from hvdx.distribute.parameter_server.client import ParameterClient


class Saving:
    """A part of the hook. What changes is kept in the object's own dictionary, past Keras's tracking."""

    hvdx_client: ParameterClient

    def finalize_variable_values(self, var_list: Any) -> None:
        """Take over what the servers have: parameters, averages and slots; called by Keras after the last epoch."""
        variables = self.__dict__.get("hvdx_variables")
        if variables is None or self.__dict__.get("hvdx_loaded"):
            return  # what has been loaded last counts
        client = self.hvdx_client
        if self.use_ema and client.synchronous:  # type: ignore[attr-defined]
            client.finalize()
        self.hvdx_fill()
        self.__dict__["hvdx_ended"] = True
        if self.use_ema and not client.synchronous:  # type: ignore[attr-defined]
            super()._overwrite_model_variables_with_average_value(variables)  # type: ignore[misc]

    def hvdx_fill(self) -> None:
        """Take over the servers' parameters and slots: before a model is saved in the midst of training."""
        client = self.hvdx_client
        self._hvdx_assign(client.pull())
        held = client.state()
        held.fill(self, self.__dict__["hvdx_variables"])
        if not client.synchronous:
            self._iterations.assign(held.updates * optimizers.steps_per_update(self))  # type: ignore[attr-defined]

    def hvdx_restore(self, path: Any) -> None:
        """Let servers and worker go on from a state that `ParameterClient.save` wrote; all workers call it."""
        for mark in ("hvdx_loaded", "hvdx_ended"):
            self.__dict__.pop(mark, None)
        self._hvdx_assign(self.hvdx_client.restore(path))
        held = self.hvdx_client.state()
        held.fill(self, self.__dict__["hvdx_variables"])
        self._iterations.assign(held.updates * optimizers.steps_per_update(self))  # type: ignore[attr-defined]

    # -- saving and restoring by Keras and TensorFlow --------------------------------------------------------------

    def save_own_variables(self, store: Any) -> None:
        """Called by Keras where it saves a model."""
        self._hvdx_fill_if_served()
        super().save_own_variables(store)  # type: ignore[misc]

    def load_own_variables(self, store: Any) -> None:
        """Called by Keras where it restores a model, whose variables may follow only after this."""
        super().load_own_variables(store)  # type: ignore[misc]
        self.__dict__["hvdx_loaded"] = True

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        """Called by TensorFlow where it saves or restores a checkpoint."""
        if save_type == "checkpoint" and tf.executing_eagerly():
            self._hvdx_fill_if_served()
        return super()._trackable_children(save_type, **kwargs)  # type: ignore[misc]

    def _hvdx_fill_if_served(self) -> None:
        known = "hvdx_variables" in self.__dict__ and not self.__dict__.get("hvdx_loaded")
        if known and not self.hvdx_client.closed:
            self.hvdx_fill()

    def _hvdx_give(self, updates: int) -> None:
        """Let the servers go on from what this worker holds, where that has been changed between two trainings.

        Worker 0 does it in its first step afterwards. In synchronous mode no update is made before.
        """
        loaded, ended = self.__dict__.pop("hvdx_loaded", False), self.__dict__.pop("hvdx_ended", False)
        if self.hvdx_client.worker or not (loaded or ended):
            return
        variables = self.__dict__["hvdx_variables"]
        pairs = zip(variables, self.__dict__["hvdx_last"], strict=True)
        if loaded or any(not np.array_equal(variable.numpy(), value) for variable, value in pairs):
            self.hvdx_client.give(states.of_optimizer(self, variables, updates))

    def _hvdx_assign(self, values: Sequence[Any]) -> None:
        self.__dict__["hvdx_last"] = values
        for variable, value in zip(self.__dict__["hvdx_variables"], values, strict=True):
            variable.assign(value)
