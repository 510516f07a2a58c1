"""The Estimator: a model_fn with its directory, to train, evaluate, predict and export."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvdx.errors import ConfigurationError, UnsupportedError

from . import evaluation, prediction, saved_model, training
from .checks import check_hooks, check_listeners, check_positive, parameters_of
from .model_fn import EstimatorSpec, ModeKeys, check_model_fn
from .run_config import RunConfig, config_with_model_dir, path_string
from .warm_start import WarmStartSettings, warm_start_checkpoint, warm_start_settings

_log = tf.compat.v1.logging
_MAY_BE_OVERRIDDEN = {"model_fn", "latest_checkpoint"}


class Estimator:
    """A model in a function, run as tf.estimator.Estimator runs it, on what TensorFlow still ships.

    Args:
        model_fn: function of features, labels and, if it takes them, mode, params and config; returns `EstimatorSpec`.
        model_dir: directory of checkpoints and summaries; the config's, or a temporary one, if None.
        config: a `RunConfig`.
        params: dict that model_fn and input_fn get if they take `params`.
        warm_start_from: path of a checkpoint, a directory of them or a SavedModel whose trainable variables the model
            starts from, or `WarmStartSettings`.

    Raises:
        ConfigurationError: one of them is not usable, or a subclass overrides a method.
    """

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: str | WarmStartSettings | None = None,
    ) -> None:
        self._check_nothing_overridden()
        check_model_fn(model_fn, params)
        self._config = config_with_model_dir(config, path_string(model_dir))
        self._model_dir: str = self._config.model_dir
        self._session_config = self._config.session_config
        self._device_fn = self._config.device_fn
        self._model_fn = model_fn
        self._params = copy.deepcopy(params or {})
        self._warm_start_settings = warm_start_settings(warm_start_from)

    @classmethod
    def from_keras(
        cls,
        keras_model: Any,
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        metric_names_map: Mapping[str, str] | None = None,
    ) -> Estimator:
        """Return an Estimator of a compiled Keras model; see `hvdx.estimator.own.from_keras`."""
        from .from_keras import estimator_from_keras

        return estimator_from_keras(cls, keras_model, model_dir, config, custom_objects, metric_names_map)

    @property
    def model_dir(self) -> str:
        """The directory of checkpoints and summaries."""
        return self._model_dir

    @property
    def config(self) -> RunConfig:
        """A copy of the config."""
        return copy.deepcopy(self._config)

    @property
    def params(self) -> Any:
        """A copy of the params."""
        return copy.deepcopy(self._params)

    @property
    def model_fn(self) -> Callable[..., EstimatorSpec]:
        """The model function with the params bound: a function of features, labels, mode and config."""

        def bound_model_fn(features: Any, labels: Any, mode: str, config: RunConfig) -> EstimatorSpec:
            return self._call_model_fn(features, labels, mode, config)

        return bound_model_fn

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Iterable[Any] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Iterable[Any] | None = None,
    ) -> Estimator:
        """Train until so many steps are done, a hook stops it, or the input ends; then save.

        Args:
            input_fn: returns a tf.data.Dataset of (features, labels), or such tensors.
            hooks: session hooks.
            steps: how many steps more; not together with max_steps.
            max_steps: the global step to end at; nothing happens if the last checkpoint is there already.
            saving_listeners: told about each checkpoint.

        Returns:
            The Estimator itself.

        Raises:
            ConfigurationError: an argument that cannot be used.
        """
        if steps is not None and max_steps is not None:
            raise ConfigurationError(f"Give steps or max_steps, not both; received {steps} and {max_steps}.")
        check_positive(steps, "steps")
        check_positive(max_steps, "max_steps")
        if max_steps is not None and max_steps <= self._saved_global_step():
            _log.info("No training: the checkpoint in %s is at max_steps already.", self._model_dir)
            return self
        all_hooks = list(check_hooks(hooks, "train"))
        if steps is not None or max_steps is not None:
            all_hooks.append(tf.compat.v1.train.StopAtStepHook(steps, max_steps))
        loss = training.train_model(self, input_fn, all_hooks, check_listeners(saving_listeners, "train"))
        _log.info("Loss of the last step: %s.", loss)
        return self

    def eval_dir(self, name: str | None = None) -> str:
        """Return the directory of the summaries of the evaluation with this name."""
        return os.path.join(self._model_dir, f"eval_{name}" if name else "eval")

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Iterable[Any] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Evaluate the model and write the values as summaries.

        Args:
            input_fn: returns a tf.data.Dataset of (features, labels), or such tensors.
            steps: how many batches; None for all of the input.
            hooks: session hooks; what they change in end() is in the values.
            checkpoint_path: which checkpoint; None for the latest, or for initial variables if there is none.
            name: of this evaluation, when there are several.

        Returns:
            The metrics by name, with `loss`, the mean over batches, and `global_step`.

        Raises:
            ConfigurationError: an argument that cannot be used.
        """
        checked = check_hooks(hooks, "evaluate")
        check_positive(steps, "steps")
        path = self._checkpoint_to_use(checkpoint_path, "evaluated")
        return evaluation.evaluate_model(self, input_fn, steps, checked, path, self.eval_dir(name))

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | None = None,
        hooks: Iterable[Any] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yield predictions until the input ends.

        Args:
            input_fn: returns a tf.data.Dataset of features, or features with labels, which are ignored.
            predict_keys: which of a dict of predictions; None for all.
            hooks: session hooks.
            checkpoint_path: which checkpoint; None for the latest, or for initial variables if there is none.
            yield_single_examples: yield examples; False yields whole batches.

        Raises:
            ConfigurationError: an argument that cannot be used, or predictions of different lengths.
        """
        checked = check_hooks(hooks, "predict")
        path = self._checkpoint_to_use(checkpoint_path, "predicted with")
        batches = prediction.predict_batches(self, input_fn, predict_keys, checked, path)
        yield from prediction.single_examples(batches) if yield_single_examples else batches

    def export_saved_model(
        self,
        export_dir_base: str | os.PathLike[str],
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
        experimental_mode: str = ModeKeys.PREDICT,
    ) -> bytes:
        """Write the model for serving into a new directory below `export_dir_base`, named by the time in seconds.

        Args:
            export_dir_base: the directory of all exports.
            serving_input_receiver_fn: returns a `ServingInputReceiver`.
            assets_extra: dict of paths below `assets.extra` to the files to copy there.
            as_text: write the graph as text.
            checkpoint_path: which checkpoint; None for the latest.
            experimental_mode: `ModeKeys.PREDICT`; graphs of the other modes are not exported.

        Returns:
            The path of the new directory, as bytes.

        Raises:
            ConfigurationError: no checkpoint, no receiver function, or outputs that cannot be served.
            UnsupportedError: another mode.
            CheckpointError: the checkpoint lacks variables of the model.
        """
        if experimental_mode != ModeKeys.PREDICT:
            raise UnsupportedError(
                f"export_saved_model(experimental_mode={experimental_mode!r}) needs the tf.estimator of TensorFlow "
                "2.15; here a model is exported for prediction only. The checkpoints hold what training needs."
            )
        if not callable(serving_input_receiver_fn):
            raise ConfigurationError(f"serving_input_receiver_fn must be a function: {serving_input_receiver_fn!r}.")
        path = checkpoint_path or self.latest_checkpoint() or warm_start_checkpoint(self._warm_start_settings)
        if not path:
            raise ConfigurationError(f"There is no checkpoint in {self._model_dir!r} to export; train first.")
        base = os.fsdecode(export_dir_base)
        return saved_model.export(self, base, serving_input_receiver_fn, assets_extra, as_text, path)

    def latest_checkpoint(self) -> str | None:
        """Return the path of the latest checkpoint, None if there is none."""
        return tf.train.latest_checkpoint(self._model_dir)

    def get_variable_names(self) -> list[str]:
        """Return the names of all variables in the latest checkpoint.

        Raises:
            ConfigurationError: there is no checkpoint.
        """
        return [name for name, _ in tf.train.list_variables(self._required_checkpoint())]

    def get_variable_value(self, name: str) -> Any:
        """Return the value of a variable in the latest checkpoint, a NumPy array.

        Raises:
            ConfigurationError: there is no checkpoint.
        """
        return tf.train.load_variable(self._required_checkpoint(), name)

    def _required_checkpoint(self) -> str:
        path = tf.train.latest_checkpoint(self._model_dir)
        if not path:
            raise ConfigurationError(f"There is no checkpoint in {self._model_dir!r}; train first.")
        return path

    def _checkpoint_to_use(self, given: str | None, purpose: str) -> str | None:
        path = given or tf.train.latest_checkpoint(self._model_dir)
        if not path:
            _log.info("No checkpoint in %s: the model is %s as initialized.", self._model_dir, purpose)
        return path

    def _saved_global_step(self) -> int:
        path = tf.train.latest_checkpoint(self._model_dir)
        if not path:
            return 0
        reader = tf.train.load_checkpoint(path)
        name = tf.compat.v1.GraphKeys.GLOBAL_STEP
        return int(reader.get_tensor(name)) if reader.has_tensor(name) else 0

    def _call_model_fn(self, features: Any, labels: Any, mode: str, config: RunConfig) -> EstimatorSpec:
        parameters = parameters_of(self._model_fn)
        if "labels" not in parameters and labels is not None:
            raise ConfigurationError(f"input_fn gives labels, but model_fn {self._model_fn!r} does not take `labels`.")
        offered = {"labels": labels, "mode": mode, "params": self.params, "config": config}
        arguments = {name: value for name, value in offered.items() if name in parameters}
        spec = self._model_fn(features=features, **arguments)
        if not isinstance(spec, EstimatorSpec):
            raise ConfigurationError(
                f"model_fn {self._model_fn!r} must return an EstimatorSpec of hvdx.estimator; received {spec!r}."
            )
        return spec

    def _check_nothing_overridden(self) -> None:
        members = {name for name in vars(Estimator) if not name.startswith("__")} - _MAY_BE_OVERRIDDEN
        overridden = sorted(
            {name for c in type(self).__mro__ if c not in Estimator.__mro__ for name in vars(c)} & members
        )
        if overridden:
            raise ConfigurationError(
                f"{type(self).__name__} overrides {', '.join(overridden)} of Estimator, which train_and_evaluate "
                "relies on; put what differs into the model_fn or into hooks."
            )
