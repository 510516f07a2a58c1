"""`BroadcastGlobalVariablesCallback`: all ranks start from the same weights and the same state of the optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdx import keras_api, world
from hvdx.errors import XlaError
from hvdx.logs import log
from hvdx.ops.broadcast import broadcast_variables
from hvdx.ops.convert import to_tensor
from hvdx.training.xla import is_distributed
from keras_callbacks import step_function
from keras_callbacks.base import Callback
from keras_callbacks.same_data import warn_of_same_data


class BroadcastGlobalVariablesCallback(Callback):
    """Give every rank the weights and the optimizer state of one rank before the first step; collective.

    Model and optimizer are built first if they are not. The optimizer's state is its slots, iterations, learning rate
    and loss scale. The state of random layers is made to differ between ranks on purpose, or all ranks would drop the
    same units; rank `root_rank` keeps its own. Variables that hold no numbers (lookup tables) are left alone, and a
    line says so. Before the first step of `fit` it warns where all ranks were given the same data.

    Args:
        root_rank: whose values the others get.

    Raises:
        ConfigurationError: `root_rank` is no rank of this world; or the model cannot be built.
        MismatchError: the ranks have different models.
        OptimizerError: model and optimizer belong to different Kerases.
        XlaError: the model was compiled with `jit_compile=True`.

    While `fit` runs, it raises hvdx's own errors, which TensorFlow otherwise hides in one of its own.
    """

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self.root_rank = root_rank

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        keras_api.check_optimizer_of_model(model, getattr(model, "optimizer", None))
        world.communicator().check_root(self.root_rank)
        if world.size() == 1:
            return
        if is_distributed(getattr(model, "optimizer", None)):
            _refuse_xla(model)
        elif getattr(model, "optimizer", None) is not None and not keras_api.overrides_train_step(model):
            log.warning(
                "the model's optimizer, %s, is not distributed: each of the %d ranks trains a model of its own. Wrap "
                "it with hvd.DistributedOptimizer before model.compile.",
                type(model.optimizer).__name__,
                world.size(),
            )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        function = step_function.install(self.model)
        if world.size() > 1:
            function.look_at_first = warn_of_same_data
        self._seed_layers()
        step_function.when_built(self.model, self._broadcast)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        step_function.remove(self.model)

    def _broadcast(self) -> None:
        variables = list(self.model.weights)
        for optimizer in keras_api.optimizers(self.model):
            variables += keras_api.optimizer_variables(optimizer)
        seeds = keras_api.seed_states(self.model)
        broadcast_variables([*variables, *(state for state, _ in seeds)], self.root_rank)
        for state, index in seeds:
            value = np.array(to_tensor(state))
            value[index] = keras_api.seed_of_rank(int(value[index]), self._distance)
            state.assign(value)

    @property
    def _distance(self) -> int:
        """How far this rank is from the root, which keeps its seeds."""
        return (world.rank() - self.root_rank) % world.size()

    def _seed_layers(self) -> None:
        """Keras 2 writes seeds into the graph of a step, so they must differ before it is traced."""
        if self._distance == 0:
            return

        def seed(layer: int, given: int | None) -> int:
            # A layer without a seed follows TensorFlow's global one, which is often set to the same on all ranks.
            return keras_api.seed_of_rank(layer + 1 if given is None else given, self._distance)

        keras_api.set_seeds_in_code(self.model, seed)


def _refuse_xla(model: Any) -> None:
    if getattr(model, "jit_compile", None) is True:
        raise XlaError(
            "The training step is compiled by XLA (jit_compile=True), and ranks cannot exchange gradients inside it. "
            "Pass jit_compile=False to model.compile."
        )
