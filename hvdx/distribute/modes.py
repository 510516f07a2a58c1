"""`strategy(mode)`: the modes by name, TensorFlow's own names for them, and what each needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdx import environment
from hvdx.errors import ConfigurationError

_ALIASES = {
    "multi_worker": "multi_worker",
    "multi_worker_mirrored": "multi_worker",
    "collective_all_reduce": "multi_worker",
    "central_storage": "central_storage",
    "one_device": "one_device",
    "tpu": "tpu",
}
MODES = tuple(dict.fromkeys(_ALIASES.values()))
"""The modes, without aliases."""
COMMUNICATORS = ("hvdx", "tensorflow", "auto", "ring", "nccl")
"""`communicator=`: hvdx's own way, or the stock strategy with one of TensorFlow's implementations."""


def strategy(
    mode: str,
    *,
    devices: Sequence[str] | str | None = None,
    communicator: str = "hvdx",
    bytes_per_pack: int | None = None,
    cluster: Any = None,
) -> Any:
    """Return a `tf.distribute.Strategy`; collective where there are several ranks, and joins the world if need be.

    Args:
        mode: "multi_worker" (one replica a rank; also by TensorFlow's names "multi_worker_mirrored" and
            "collective_all_reduce"), or one that TensorFlow does alone: "central_storage", "one_device", "tpu".
        devices: this rank's devices, such as "GPU:0". Default: its GPU, or CPU:0.
        communicator: "hvdx" (default), or "tensorflow" ("auto", "ring", "nccl") for TensorFlow's own strategy, which is
            configured from the launcher's ranks.
        bytes_per_pack: largest fusion buffer in bytes; HVDX_FUSION_THRESHOLD where it is None.
        cluster: a tf.train.ClusterSpec or a dictionary of host:port, where nothing else lists them.

    Returns:
        A strategy with one more method, `describe()`, which says in words what it has resolved to.

    Raises:
        ConfigurationError: an argument has no meaning, or not in this mode.
        WorldError: the sources that say who takes part contradict each other.
        UnsupportedError: the mode needs what this machine does not have.
    """
    from hvdx.distribute import build

    name = _ALIASES.get(mode.strip().lower()) if isinstance(mode, str) else None
    if name is None:
        raise ConfigurationError(
            f"There is no strategy {mode!r}. Modes: {', '.join(MODES)}; TensorFlow's names "
            f"{', '.join(alias for alias in _ALIASES if alias not in MODES)} are understood too."
        )
    kind = communicator.strip().lower() if isinstance(communicator, str) else communicator
    if kind not in COMMUNICATORS:
        raise ConfigurationError(f"communicator= is one of {', '.join(COMMUNICATORS)}. Received: {communicator!r}.")
    environment.check_threshold(bytes_per_pack)
    made: Callable[..., Any] = getattr(build, name)
    return made(_listed(devices), kind, bytes_per_pack, cluster)


def _listed(devices: Sequence[str] | str | None) -> tuple[str, ...]:
    given = (devices,) if isinstance(devices, str) else tuple(devices or ())
    if any(not isinstance(device, str) or not device.strip() for device in given):
        raise ConfigurationError(f'devices= is a list of names such as "GPU:0". Received: {devices!r}.')
    if len(set(given)) != len(given):
        raise ConfigurationError(f"devices= names a device twice. Received: {devices!r}.")
    return given
