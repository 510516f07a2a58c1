"""`load_model`: a saved Keras model whose optimizer reduces its gradients again."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

from hvdx import keras_api, world
from hvdx.comm.reduce_op import ReduceOp
from hvdx.compression import Codec, Compression
from hvdx.errors import CheckpointError, MissingDependencyError
from hvdx.keras_api import Family
from hvdx.logs import log
from hvdx.training.optimizer import DistributedOptimizer


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: list[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Codec | Any = Compression.none,
    *,
    keras: Any = None,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    fusion_threshold: int | None = None,
    sparse_as_dense: bool | str = "auto",
    missing_gradients: str = "error",
    backward_passes_per_step: int = 1,
    **kwargs: Any,
) -> Any:
    """Load a model and make its optimizer reduce its gradients over all ranks; slots and iterations are kept.

    A line says so where the Keras that saved the model does not restore them. Not collective: where only one rank can
    read the file, that rank loads it, the others build the model, and
    `hvd.callbacks.BroadcastGlobalVariablesCallback` makes them equal.

    Args:
        filepath: a `.keras` or `.h5` file, or a directory that tf_keras or Keras 2 has saved.
        custom_optimizers: optimizer classes of your own that the file names.
        custom_objects: other classes and functions of your own, by name.
        compression, op, fusion_threshold, sparse_as_dense, missing_gradients, backward_passes_per_step: as for
            `hvd.DistributedOptimizer`. The last is not in the file, but for Keras 3.
        keras: the module that loads, `keras` or `tf_keras`; the one that wrote the file where it is None.
        kwargs: further arguments of the `load_model` of that Keras (`compile`, `safe_mode`, ...).

    Returns:
        The model. One that was saved without an optimizer, or is loaded with `compile=False`, has none to wrap; wrap
        the one you compile it with.

    Raises:
        CheckpointError: there is no such file, or it is no saved model.
        MissingDependencyError: the Keras that wrote the file is not installed.
        ConfigurationError: an option has no meaning.
    """
    module = keras if keras is not None else _keras_of(Path(filepath))
    objects: dict[str, Any] = {cls.__name__: cls for cls in custom_optimizers or []}
    objects.update(custom_objects or {})
    try:
        model = module.models.load_model(os.fspath(filepath), custom_objects=objects, **kwargs)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, KeyError) as error:
        raise CheckpointError(f"The saved model at {filepath} is damaged: {type(error).__name__}: {error}.") from error
    if getattr(model, "optimizer", None) is None:
        log.info("%s holds no optimizer; nothing was wrapped.", filepath)
        return model
    DistributedOptimizer(
        model.optimizer,
        op,
        fusion_threshold=fusion_threshold,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        missing_gradients=missing_gradients,
        backward_passes_per_step=backward_passes_per_step,
    )
    _switch_auto_off(model)
    _warn_of_lost_state(Path(filepath), model.optimizer)
    return model


def _warn_of_lost_state(path: Path, optimizer: Any) -> None:
    """Say where tf_keras and Keras 2 do not restore an optimizer: from directories, and a legacy one from .keras."""
    legacy = keras_api.family(keras_api.inner_optimizer(optimizer)) is Family.LEGACY
    if path.is_dir() or (legacy and zipfile.is_zipfile(path)):
        log.warning(
            "%s: this Keras restores no slots and iterations of %s from this format, so training starts anew with the "
            "saved weights. Save the model as .h5%s to go on.",
            path,
            type(optimizer).__name__,
            "" if legacy else " or .keras",
        )


def _switch_auto_off(model: Any) -> None:
    """Undo what `jit_compile="auto"` meant while the model was loaded: its optimizer was not wrapped yet."""
    config = getattr(getattr(model, "_compile_config", None), "config", None) or {}
    automatic = config.get("jit_compile", "auto") == "auto"
    if automatic and getattr(model, "jit_compile", None) and world.is_initialized() and world.size() > 1:
        model.jit_compile = False


def _keras_of(path: Path) -> Any:
    """Return the module of the Keras that wrote the file."""
    version = _version_in(path)
    if version.startswith("2."):
        if "tf_keras" in sys.modules or importlib.util.find_spec("tf_keras") is not None:
            return importlib.import_module("tf_keras")
        return importlib.import_module("keras")  # Keras 2 itself; Keras 3 reads many of its files
    installed = importlib.import_module("keras")
    if installed.__version__.startswith("2."):
        raise MissingDependencyError(
            f"{path} was written by Keras {version}, and Keras {installed.__version__} is installed. "
            "Load it where Keras 3 is installed (TensorFlow 2.16 or newer)."
        )
    return installed


def _version_in(path: Path) -> str:
    """Return the version of Keras that a saved model names.

    Raises:
        CheckpointError: there is no such file, or it is no saved model.
    """
    if not path.exists():
        raise CheckpointError(f"There is no saved model at {path}.")
    if path.is_dir():
        if not (path / "saved_model.pb").exists():
            raise CheckpointError(f"The directory {path} is no saved model: it holds no saved_model.pb.")
        return "2."
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return str(json.loads(archive.read("metadata.json"))["keras_version"])
        import h5py

        with h5py.File(path, "r") as file:
            version = file.attrs["keras_version"]
            return version.decode() if isinstance(version, bytes) else str(version)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{path} is no model saved by Keras, or it is damaged: {error}. A model is saved as .keras or .h5."
        ) from None
