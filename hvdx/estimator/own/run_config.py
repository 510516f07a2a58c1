"""How an Estimator runs: directories, seeds, checkpoints, summaries and the session."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdx.errors import ConfigurationError, UnsupportedError

from .checks import parameters_of

_DEFAULT: Any = object()
_REPLACEABLE = (
    "model_dir", "tf_random_seed", "save_summary_steps", "save_checkpoints_steps", "save_checkpoints_secs",
    "session_config", "keep_checkpoint_max", "keep_checkpoint_every_n_hours", "log_step_count_steps",
    "train_distribute", "device_fn", "protocol", "eval_distribute", "experimental_distribute",
    "experimental_max_worker_delay_secs", "session_creation_timeout_secs", "checkpoint_save_graph_def",
)  # fmt: skip
_AT_LEAST_ZERO = ("save_summary_steps", "save_checkpoints_steps", "save_checkpoints_secs", "keep_checkpoint_max")
_ABOVE_ZERO = ("keep_checkpoint_every_n_hours", "log_step_count_steps", "session_creation_timeout_secs")
_WAY_OUT = "For several processes, start them with hvdxrun and wrap the optimizer in hvd.DistributedOptimizer."


class RunConfig:
    """The settings of an Estimator.

    Args:
        model_dir: directory of checkpoints and summaries; None lets the Estimator choose a temporary one.
        tf_random_seed: seed of every graph; None for a different start each time.
        save_summary_steps: steps between summaries; 0 or None for none.
        save_checkpoints_steps: steps between checkpoints; not together with seconds.
        save_checkpoints_secs: seconds between checkpoints, 600 if neither is given. Both None: no checkpoints.
        session_config: a `tf.compat.v1.ConfigProto`.
        keep_checkpoint_max: how many of the last checkpoints stay; 0 or None for all.
        keep_checkpoint_every_n_hours: one in so many hours stays for good.
        log_step_count_steps: steps between lines about loss and speed; None for none.
        train_distribute: refused, as are eval_distribute and experimental_distribute.
        device_fn: function of `op` that returns the device of an operation in the training graph.
        protocol: accepted for old programs, `grpc` or None; there is no server here that could use it.
        experimental_max_worker_delay_secs: accepted for old programs; there are no workers to delay.
        session_creation_timeout_secs: how long the creation of a session may take.
        checkpoint_save_graph_def: whether the graph is saved beside the checkpoints.

    Raises:
        ConfigurationError: a value that cannot be used, or steps and seconds together.
        UnsupportedError: a distribution strategy, or a TF_CONFIG that describes a cluster.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        tf_random_seed: int | None = None,
        save_summary_steps: int | None = 100,
        save_checkpoints_steps: int | None = _DEFAULT,
        save_checkpoints_secs: int | None = _DEFAULT,
        session_config: Any = None,
        keep_checkpoint_max: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = 10000,
        log_step_count_steps: int | None = 100,
        train_distribute: Any = None,
        device_fn: Callable[[Any], Any] | None = None,
        protocol: str | None = None,
        eval_distribute: Any = None,
        experimental_distribute: Any = None,
        experimental_max_worker_delay_secs: int | None = None,
        session_creation_timeout_secs: int | None = 7200,
        checkpoint_save_graph_def: bool = True,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in _REPLACEABLE}
        if save_checkpoints_steps is _DEFAULT:
            given["save_checkpoints_steps"] = None
        if save_checkpoints_secs is _DEFAULT:
            given["save_checkpoints_secs"] = 600 if save_checkpoints_steps is _DEFAULT else None
        given["model_dir"] = _model_dir(model_dir, _read_tf_config())
        self._set(given)

    def replace(self, **changed: Any) -> RunConfig:
        """Return a copy with some settings changed.

        Raises:
            ConfigurationError: an unknown setting, or one with a value that cannot be used.
            UnsupportedError: a distribution strategy.
        """
        unknown = sorted(set(changed) - set(_REPLACEABLE))
        if unknown:
            raise ConfigurationError(f"RunConfig has no settings {unknown}; it has {', '.join(_REPLACEABLE)}.")
        new = copy.deepcopy(self)
        if "model_dir" in changed:
            changed["model_dir"] = path_string(changed["model_dir"])
        for one, other in (
            ("save_checkpoints_steps", "save_checkpoints_secs"),
            ("save_checkpoints_secs", "save_checkpoints_steps"),
        ):
            if changed.get(one) is not None and other not in changed:
                changed[other] = None
        new._set(changed)
        return new

    def __getattr__(self, name: str) -> Any:
        # Only reached by names without an attribute: each setting is kept below its name with an underscore.
        if name in _REPLACEABLE and f"_{name}" in self.__dict__:
            return self.__dict__[f"_{name}"]
        raise AttributeError(f"RunConfig has no attribute {name!r}.")

    @property
    def is_chief(self) -> bool:
        """Whether this process saves: always, for there is one."""
        return True

    @property
    def task_type(self) -> str:
        """The role of this process."""
        return "worker"

    @property
    def task_id(self) -> int:
        """The number of this process in its role."""
        return 0

    @property
    def global_id_in_cluster(self) -> int:
        """The number of this process among all."""
        return 0

    @property
    def num_ps_replicas(self) -> int:
        """How many parameter servers there are: none."""
        return 0

    @property
    def num_worker_replicas(self) -> int:
        """How many processes train: one."""
        return 1

    @property
    def cluster_spec(self) -> Any:
        """The cluster, which is empty."""
        return tf.train.ClusterSpec({})

    @property
    def master(self) -> str:
        """The address of the session's server: none."""
        return ""

    @property
    def evaluation_master(self) -> str:
        """The address of the server of evaluations: none."""
        return ""

    @property
    def service(self) -> None:
        """What TF_CONFIG says of a service: nothing."""
        return

    def _set(self, settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            _check(name, value)
            setattr(self, f"_{name}", value)
        if self._save_checkpoints_steps is not None and self._save_checkpoints_secs is not None:
            raise ConfigurationError(
                "save_checkpoints_steps and save_checkpoints_secs cannot be given both; received "
                f"{self._save_checkpoints_steps} and {self._save_checkpoints_secs}."
            )


def path_string(path: Any) -> Any:
    """Return a path object as the string it stands for, and anything else as it is."""
    return os.fspath(path) if hasattr(path, "__fspath__") else path


def config_with_model_dir(config: RunConfig | None, model_dir: str | None) -> RunConfig:
    """Return the config with a directory and the settings of a session, both of which it may lack.

    Raises:
        ConfigurationError: no RunConfig, or another directory in it than the one given.
    """
    config = RunConfig() if config is None else config
    if not isinstance(config, RunConfig):
        raise ConfigurationError(f"config must be a RunConfig of hvdx.estimator; received {config!r}.")
    if model_dir is not None and config.model_dir is not None and model_dir != config.model_dir:
        raise ConfigurationError(
            f"model_dir is {model_dir!r}, but config.model_dir is {config.model_dir!r}; give one of them."
        )
    if config.session_config is None:
        config = config.replace(session_config=_default_session_config())
    if model_dir is None and config.model_dir is None:
        model_dir = tempfile.mkdtemp()
        tf.compat.v1.logging.warn("No model_dir given: checkpoints and summaries go to %s.", model_dir)
    return config if model_dir is None else config.replace(model_dir=model_dir)


def _default_session_config() -> Any:
    """Return the session's settings when none are given: soft placement and one pass of the graph optimizer."""
    config = tf.compat.v1.ConfigProto(allow_soft_placement=True)
    options = config.graph_options.rewrite_options
    options.meta_optimizer_iterations = options.ONE
    return config


def _check(name: str, value: Any) -> None:
    """Refuse a setting that cannot be used; None is a setting everywhere."""
    if value is None:
        return
    if name in ("train_distribute", "eval_distribute", "experimental_distribute"):
        raise UnsupportedError(f"RunConfig({name}=...) needs the tf.estimator of TensorFlow 2.15. {_WAY_OUT}")
    if name == "model_dir" and not value:
        raise ConfigurationError("model_dir must not be empty; give a path, or None for a temporary directory.")
    if name in _AT_LEAST_ZERO and value < 0:
        raise ConfigurationError(f"{name} must be at least 0; received {value!r}.")
    if name in _ABOVE_ZERO and value <= 0:
        raise ConfigurationError(f"{name} must be above 0; received {value!r}.")
    if name in ("tf_random_seed", "experimental_max_worker_delay_secs") and not isinstance(value, int):
        raise ConfigurationError(f"{name} must be an integer; received {value!r} of type {type(value).__name__}.")
    if name == "session_config" and not isinstance(value, tf.compat.v1.ConfigProto):
        raise ConfigurationError(f"session_config must be a tf.compat.v1.ConfigProto; received {value!r}.")
    if name == "device_fn" and not (callable(value) and list(parameters_of(value)) == ["op"]):
        raise ConfigurationError(f"device_fn must be a function of one argument `op`; received {value!r}.")
    if name == "protocol" and value not in ("grpc", "grpc+verbs"):
        raise ConfigurationError(f"protocol must be 'grpc' or 'grpc+verbs'; received {value!r}.")


def _read_tf_config() -> dict[str, Any]:
    """Return TF_CONFIG, in which only a directory and a cluster of this process alone have a meaning here."""
    text = os.environ.get("TF_CONFIG") or "{}"
    try:
        settings = json.loads(text)
        tasks = [address for addresses in settings.get("cluster", {}).values() for address in addresses]
        role = settings.get("task", {}).get("type", "worker")
    except (ValueError, AttributeError, TypeError):
        raise ConfigurationError(f"The environment variable TF_CONFIG is no JSON object: {text!r}.") from None
    if len(tasks) > 1 or role in ("ps", "evaluator"):
        raise UnsupportedError(
            f"TF_CONFIG describes a cluster of {len(tasks)} tasks in which this process is {role!r}; parameter servers "
            f"and separate evaluators need the tf.estimator of TensorFlow 2.15. {_WAY_OUT} Then unset TF_CONFIG."
        )
    return settings


def _model_dir(model_dir: Any, tf_config: dict[str, Any]) -> Any:
    """Return the directory given here or by TF_CONFIG, which must not contradict each other."""
    path, configured = path_string(model_dir), tf_config.get("model_dir")
    if configured and path is not None and path != configured:
        raise ConfigurationError(f"model_dir is {path!r}, but TF_CONFIG says {configured!r}; give one of them.")
    return path if path is not None else configured
