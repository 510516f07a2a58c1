"""Session hooks for several ranks: equal variables at the start, exact metrics, learning-rate warm-up."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdx import environment, world
from hvdx.comm.communicator import Label
from hvdx.comm.reduce_op import ReduceOp
from hvdx.errors import CheckpointError, ConfigurationError
from hvdx.training.v1 import broadcast_global_variables
from keras_callbacks.schedules import warmup_multiplier

v1 = tf.compat.v1


class BroadcastGlobalVariablesHook(v1.train.SessionRunHook):  # type: ignore[name-defined]
    """Give every rank the global variables of one rank, right after they were initialized or restored; collective.

    Args:
        root_rank: whose variables the others get. Only this rank need have a checkpoint.
        device: taken so that Horovod's programs run; TensorFlow places the operation.

    Raises:
        ConfigurationError: `root_rank` is no rank of this world.
        CheckpointError: on rank `root_rank`, whose restored variables have other shapes than the model's; TensorFlow
            restores them without a word.
        MismatchError: the ranks' graphs have different variables; out of the session it comes in TensorFlow's clothes.
    """

    def __init__(self, root_rank: int = 0, device: str = "") -> None:
        super().__init__()
        self._root_rank = root_rank
        self._operation: Any = None
        self._wanted: dict[str, Any] = {}
        self._shapes: dict[str, Any] = {}

    def begin(self) -> None:
        world.communicator().check_root(self._root_rank)
        if world.rank() == self._root_rank:
            resources = [v for v in v1.global_variables() if getattr(v, "handle", None) is not None]
            self._wanted = {variable.name: variable.shape for variable in resources}
            # not tf.shape, which takes what the graph says
            self._shapes = {v.name: tf.raw_ops.VariableShape(input=v.handle) for v in resources}
        self._operation = broadcast_global_variables(self._root_rank) if world.size() > 1 else tf.no_op()

    def after_create_session(self, session: Any, coord: Any) -> None:
        for name, shape in session.run(self._shapes).items():
            if not self._wanted[name].is_compatible_with(shape):
                raise CheckpointError(
                    f"The checkpoint is of another model: {name} has shape {tuple(map(int, shape))} there and "
                    f"{tuple(self._wanted[name])} here. Give this model a model_dir of its own."
                )
        session.run(self._operation)


class MetricAverageHook(v1.train.SessionRunHook):  # type: ignore[name-defined]
    """Make the metrics of an evaluation those of all ranks' data: for `Estimator.evaluate(hooks=[...])`; collective.

    Each rank evaluates its own part. At the end the totals and counts of all metrics are added over the ranks in one
    exchange, before their values are computed, so that the result is that of one process on all the data.
    """

    def begin(self) -> None:
        unique = {variable.name: variable for variable in v1.get_collection(v1.GraphKeys.METRIC_VARIABLES)}
        self._variables = [unique[name] for name in sorted(unique)]
        self._values = [v1.placeholder(v.dtype.base_dtype, v.shape) for v in self._variables]
        self._assign = tf.group([v.assign(new) for v, new in zip(self._variables, self._values, strict=True)])
        label = Label("totals and counts of metrics", tuple(v.name for v in self._variables))
        self._sums = self._variables
        if self._variables and world.size() > 1:
            read = [tf.identity(variable) for variable in self._variables]
            threshold = environment.FUSION_THRESHOLD.read()
            self._sums = world.communicator().grouped_allreduce(read, ReduceOp.SUM, label, threshold)

    def end(self, session: Any) -> None:
        if self._variables and world.size() > 1:
            sums = session.run(self._sums)
            session.run(self._assign, dict(zip(self._values, sums, strict=True)))


class LearningRateWarmupHook(v1.train.SessionRunHook):  # type: ignore[name-defined]
    """Raise the learning rate from about 1 / size of its full value to the full one; not collective.

    The rate is a function of the global step alone, so that it is the same on every rank, and the same again in a run
    that is resumed. Pass `hook.learning_rate` to the optimizer inside the model_fn, and the hook to its EstimatorSpec
    (`training_hooks=[hook]`) or to the session.

    Args:
        initial_lr: the rate at the end of the warm-up; as a rule the rate of one process times hvd.size().
        warmup_steps: global steps until then; 0 means no warm-up.
        size: number of ranks; that of the world where it is None.

    Raises:
        ConfigurationError: an argument has no meaning.

    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.2 (gradual warm-up).
    """

    def __init__(self, initial_lr: float, warmup_steps: int, size: int | None = None) -> None:
        super().__init__()
        if not initial_lr > 0:
            raise ConfigurationError(f"initial_lr is a number above 0. Received: {initial_lr!r}.")
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
            raise ConfigurationError(f"warmup_steps is an integer of 0 or more. Received: {warmup_steps!r}.")
        self._initial_lr, self._steps, self._size = initial_lr, warmup_steps, size or world.size()
        local = [v1.GraphKeys.LOCAL_VARIABLES]
        self.learning_rate = v1.Variable(
            self.rate(0), trainable=False, collections=local, use_resource=True, name="learning_rate"
        )
        self._over = False
        self._given = v1.placeholder(tf.float32, [])
        self._assign = self.learning_rate.assign(self._given).op
        self._global_step = v1.train.get_or_create_global_step()

    def rate(self, step: int) -> float:
        """Return the rate of the step with this number, counted from 0."""
        if step >= self._steps:
            return self._initial_lr
        return self._initial_lr * warmup_multiplier(step / self._steps, self._size, 1, self._steps)

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._set(session, int(session.run(self._global_step)))

    def after_run(self, run_context: Any, run_values: Any) -> None:
        # Read anew: fetched with the step itself, it could be the number from before the update or after it.
        if not self._over:
            self._set(run_context.session, int(run_context.session.run(self._global_step)))

    def _set(self, session: Any, step: int) -> None:
        session.run(self._assign, {self._given: self.rate(step)})
        self._over = step >= self._steps
