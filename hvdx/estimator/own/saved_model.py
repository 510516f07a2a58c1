"""One call of Estimator.export_saved_model: the serving graph, its signatures and their directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from hvdx.errors import CheckpointError, ConfigurationError

from .checks import needed_placeholders
from .model_fn import ModeKeys
from .training import create_global_step

_v1 = tf.compat.v1
_ATTEMPTS = 10


def export(
    estimator: Any,
    base: str,
    serving_input_receiver_fn: Callable[[], Any],
    assets_extra: Mapping[str, str] | None,
    as_text: bool,
    checkpoint_path: str,
) -> bytes:
    """Write the model as served into a new directory below `base`, named by the time in seconds; return its path.

    It is written beside and then renamed, so that whoever watches `base` sees whole exports only.

    Raises:
        ConfigurationError: an output or receiver that cannot be used, or no free directory name.
        CheckpointError: the checkpoint lacks variables of this model.
    """
    export_dir = _new_directory(base)
    beside = os.path.join(os.path.dirname(export_dir), "temp-" + os.path.basename(export_dir))
    try:
        builder = _v1.saved_model.Builder(beside)
        _add_serving_graph(estimator, builder, serving_input_receiver_fn, checkpoint_path)
        builder.save(as_text)
        for relative, source in (assets_extra or {}).items():
            destination = os.path.join(beside, "assets.extra", relative)
            tf.io.gfile.makedirs(os.path.dirname(destination))
            tf.io.gfile.copy(source, destination)
        tf.io.gfile.rename(beside, export_dir)
    except BaseException:
        if tf.io.gfile.exists(beside):
            tf.io.gfile.rmtree(beside)
        raise
    return os.fsencode(export_dir)


def _new_directory(base: str) -> str:
    for _ in range(_ATTEMPTS):
        path = os.path.join(base, str(int(time.time())))
        if not tf.io.gfile.exists(path):
            return path
        time.sleep(1)
    raise ConfigurationError(f"No free directory for an export below {base!r}, in {_ATTEMPTS} attempts of a second.")


def _add_serving_graph(
    estimator: Any, builder: Any, serving_input_receiver_fn: Callable[[], Any], checkpoint_path: str
) -> None:
    with tf.Graph().as_default() as graph:
        create_global_step(graph)
        _v1.set_random_seed(estimator._config.tf_random_seed)
        receiver = serving_input_receiver_fn()
        if not hasattr(receiver, "features") or not hasattr(receiver, "receiver_tensors"):
            raise ConfigurationError(
                f"serving_input_receiver_fn must return a ServingInputReceiver of hvdx.estimator.export; "
                f"received {receiver!r}."
            )
        spec = estimator._call_model_fn(receiver.features, None, ModeKeys.PREDICT, estimator.config)
        signatures = _signatures(receiver, spec.export_outputs)
        with _v1.Session(config=estimator._session_config) as session:
            saver = spec.scaffold.saver or _v1.train.Saver(sharded=True)
            try:
                saver.restore(session, checkpoint_path)
            except tf.errors.NotFoundError as error:
                raise CheckpointError(
                    f"Checkpoint {checkpoint_path!r} lacks variables that model_fn creates to predict: {error.message}"
                ) from error
            builder.add_meta_graph_and_variables(
                session,
                tags=[tf.saved_model.SERVING],
                signature_def_map=signatures,
                assets_collection=_v1.get_collection(_v1.GraphKeys.ASSET_FILEPATHS),
                main_op=spec.scaffold.local_init_op or _v1.train.Scaffold.default_local_init_op(),
                saver=saver,
                strip_default_attrs=True,
            )


def _signatures(receiver: Any, outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the signatures of all outputs; those that cannot be served are left out with a line in the log."""
    groups = {"": receiver.receiver_tensors}
    groups.update({f"{name}:": group for name, group in (receiver.receiver_tensors_alternatives or {}).items()})
    signatures = {}
    for prefix, inputs in groups.items():
        for name, output in outputs.items():
            try:
                signature = output.as_signature_def(inputs)
                _check_fed(inputs, signature)
            except ValueError as error:
                _v1.logging.info("Signature %r is left out of the export: %s", prefix + name, error)
                continue
            if _v1.saved_model.is_valid_signature(signature):
                signatures[prefix + name] = signature
    if tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY not in signatures:
        _v1.logging.warn("The export has no default signature; it has %s.", sorted(signatures))
    return signatures


def _check_fed(inputs: Mapping[str, Any], signature: Any) -> None:
    """Refuse a signature whose outputs need a placeholder that is none of its inputs."""
    parts = tf.nest.flatten(dict(inputs), expand_composites=True)
    graph = parts[0].graph
    outputs = [_v1.saved_model.get_tensor_from_tensor_info(info, graph) for info in signature.outputs.values()]
    missing = needed_placeholders(tf.nest.flatten(outputs, expand_composites=True), parts)
    if missing:
        raise ConfigurationError(f"its outputs need the placeholders {missing}, which are none of its inputs")
