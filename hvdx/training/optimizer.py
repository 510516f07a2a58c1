"""`DistributedOptimizer`: the optimizer a user already has, changed in place so that its gradients become global."""

from __future__ import annotations

from typing import Any, TypeVar

from hvdx import environment, keras_api
from hvdx.comm.reduce_op import ReduceOp
from hvdx.compression import Codec, Compression
from hvdx.errors import ConfigurationError, OptimizerError, UnsupportedError
from hvdx.keras_api import Family
from hvdx.training.autotune import Tuner
from hvdx.training.compile import check_in_compile
from hvdx.training.hooks import Keras2Hook, Keras3Hook, LegacyHook, MultiHook
from hvdx.training.loss_scale import adapt_loss_scaling
from hvdx.training.reducer import GradientReducer
from hvdx.training.v1 import V1Hook
from hvdx.training.xla import is_distributed, switch_auto_off

T = TypeVar("T")
_HOOKS = {
    Family.KERAS_3: Keras3Hook,
    Family.KERAS_3_MULTI: MultiHook,
    Family.KERAS_2: Keras2Hook,
    Family.LEGACY: LegacyHook,
    Family.V1: V1Hook,
}


def DistributedOptimizer(
    optimizer: T,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    *,
    fusion_threshold: int | None = None,
    compression: Codec | Any = Compression.none,
    sparse_as_dense: bool | str = "auto",
    missing_gradients: str = "error",
    backward_passes_per_step: int = 1,
    autotune: bool | None = None,
) -> T:
    """Make an optimizer reduce its gradients over all ranks before it clips and applies them.

    The object is changed in place and returned: slots, iterations, schedules and references to it stay as they are, and
    a model saved with it names the plain optimizer. Not collective; each update of the optimizer then is.

    Args:
        optimizer: an optimizer of Keras 3, tf_keras or Keras 2 (new or legacy), also inside a LossScaleOptimizer; or a
            `tf.compat.v1.train.Optimizer`.
        op: how gradients are reduced; hvd.Average (default), Sum, Min, Max or Product.
        fusion_threshold: largest fusion buffer in bytes; HVDX_FUSION_THRESHOLD (128 MiB) where it is None.
        compression: hvd.Compression.none (default), fp16 or bf16, or an object with `compress` and `decompress`.
        sparse_as_dense: whether `tf.IndexedSlices` travel as dense tensors: True, False, or "auto" (default), which
            takes whichever is fewer bytes.
        missing_gradients: "error" (default) raises where a gradient is None on some ranks only; "zeros" counts it as
            zeros.
        backward_passes_per_step: after how many backward passes one update is made, with the mean of their gradients;
            iterations and the global step count updates. Keras 3 does it itself: this is another name for its
            `gradient_accumulation_steps`. The others sum up dense gradients, which no checkpoint holds.
        autotune: whether the first updates try in what buckets gradients travel (so that they can leave while others
            are still computed) and by which of the communicator's algorithms; the fastest way stays, the same on every
            rank, and rank 0 logs it. HVDX_AUTOTUNE (`hvdxrun --autotune`) where it is None. Not in v1 sessions.

    Raises:
        OptimizerError: `optimizer` is none of these, or is already wrapped.
        ConfigurationError: an option has no meaning, or contradicts what the optimizer was made with.
        UnsupportedError: `backward_passes_per_step` above 1 for a MultiOptimizer of Keras 3.
    """
    inner = keras_api.inner_optimizer(optimizer)
    kind = keras_api.family(inner)
    if is_distributed(inner):
        raise OptimizerError(
            f"This {type(inner).__name__} is already a DistributedOptimizer; wrapped twice it would reduce twice. "
            "Wrap it once."
        )
    if hasattr(type(inner), "hvdx_client"):
        raise OptimizerError(
            f"The updates of this {type(inner).__name__} are made by parameter servers, which average the gradients of "
            "all workers: a DistributedOptimizer around it would do so twice. Leave it out."
        )
    reducer = GradientReducer(
        op,  # type: ignore[arg-type]
        fusion_threshold,
        compression,
        sparse_as_dense,
        missing_gradients,
        tuner=Tuner() if _wants_search(autotune) else None,
    )
    _check_passes(backward_passes_per_step, kind, inner)
    by_keras = kind is Family.KERAS_3
    try:
        passes = 1 if by_keras else backward_passes_per_step
        inner.__class__ = keras_api.hooked_class(type(inner), _HOOKS[kind], hvdx_reducer=reducer, hvdx_passes=passes)
    except TypeError as error:
        raise OptimizerError(f"{type(inner).__name__} cannot be wrapped: {error}. Received: {optimizer!r}.") from None
    if by_keras and backward_passes_per_step > 1:
        inner.gradient_accumulation_steps = backward_passes_per_step
    adapt_loss_scaling()
    switch_auto_off()
    check_in_compile()
    return optimizer


def _wants_search(autotune: Any) -> bool:
    if autotune not in (None, True, False):
        raise ConfigurationError(f"autotune is True, False or None (HVDX_AUTOTUNE). Received: {autotune!r}.")
    return bool(environment.AUTOTUNE.read()) if autotune is None else bool(autotune)


def _check_passes(passes: Any, kind: Family, optimizer: Any) -> None:
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ConfigurationError(f"backward_passes_per_step is an integer of 1 or more. Received: {passes!r}.")
    if passes == 1 or kind not in (Family.KERAS_3, Family.KERAS_3_MULTI):
        return
    name = type(optimizer).__name__
    if kind is Family.KERAS_3_MULTI or not hasattr(optimizer, "gradient_accumulation_steps"):
        raise UnsupportedError(
            f"{name} does not accumulate gradients. Received: backward_passes_per_step={passes}. Give "
            "gradient_accumulation_steps to the optimizers inside it, or use larger batches."
        )
    own = optimizer.gradient_accumulation_steps
    if own and own != passes:
        raise ConfigurationError(
            f"{name} has gradient_accumulation_steps={own}. Received: backward_passes_per_step={passes}, which is "
            "another name for it. Give one of them."
        )
    if not own and optimizer.built:
        raise ConfigurationError(
            f"{name} has made its variables already, without any for sums of gradients. Received: "
            f"backward_passes_per_step={passes}. Wrap it before it is used or loaded, or make it with "
            f"gradient_accumulation_steps={passes}."
        )
