"""`strategy(mode)`: the modes by name, TensorFlow's own names for them, and what each needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdx import environment
from hvdx.errors import ConfigurationError

_ALIASES = {
    "mirrored": "mirrored",
    "multi_worker": "multi_worker",
    "multi_worker_mirrored": "multi_worker",
    "collective_all_reduce": "multi_worker",
    "parameter_server": "parameter_server",
    "central_storage": "central_storage",
    "one_device": "one_device",
    "tpu": "tpu",
}
MODES = tuple(dict.fromkeys(_ALIASES.values()))
"""The modes, without aliases."""
_OPTIONS = {"parameter_server": ("updates", "staleness", "gather", "piece_bytes", "backend")}
_BETWEEN_DEVICES = ("hvdx-ring", "hvdx-hierarchical", "hvdx-nccl")
COMMUNICATORS = ("hvdx", *_BETWEEN_DEVICES, "tensorflow", "auto", "ring", "nccl")
"""`communicator=`: hvdx's own way, or the stock strategy with one of TensorFlow's implementations."""


def strategy(
    mode: str,
    *,
    devices: Sequence[str] | str | None = None,
    communicator: str = "hvdx",
    bytes_per_pack: int | None = None,
    cluster: Any = None,
    **options: Any,
) -> Any:
    """Return a `tf.distribute.Strategy`; collective where there are several ranks, and joins the world if need be.

    Args:
        mode: "mirrored" (one replica a device of this process, and of each rank where there are several),
            "multi_worker" (one replica a rank; also by TensorFlow's names "multi_worker_mirrored" and
            "collective_all_reduce"), "parameter_server" (the servers of `hvdxrun --servers` update; on a server this
            call does not return), or one that TensorFlow does alone: "central_storage", "one_device", "tpu".
        devices: this rank's devices, such as "GPU:0". Default: its GPU, or CPU:0; for "mirrored" all its GPUs, or all
            logical CPUs.
        communicator: "hvdx" (default); for "mirrored" also "hvdx-ring", "hvdx-hierarchical" or "hvdx-nccl", which say
            how the devices exchange; or "tensorflow" ("auto", "ring", "nccl") for TensorFlow's own strategy, which is
            configured from the launcher's ranks.
        bytes_per_pack: largest fusion buffer in bytes; HVDX_FUSION_THRESHOLD where it is None.
        cluster: a tf.train.ClusterSpec or a dictionary of host:port, where nothing else lists them.
        options: of "parameter_server" only. `updates`: "synchronous" (default) or "asynchronous"; `staleness`, `gather`
            and `piece_bytes` as `ParameterClient` has them; `backend`: "hvdx" (default), or "tensorflow" for
            TensorFlow's own strategy with its coordinator.

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
    if kind in _BETWEEN_DEVICES and name != "mirrored":
        raise ConfigurationError(
            f'communicator="{kind}" says how the devices of one process exchange, in the mode "mirrored". Received: '
            f'mode "{name}".'
        )
    environment.check_threshold(bytes_per_pack)
    known = _OPTIONS.get(name, ())
    unknown = sorted(set(options) - set(known))
    if unknown:
        has = f"has the options {', '.join(known)}" if known else "has no options of its own"
        raise ConfigurationError(f'strategy("{name}") {has}. Received: {", ".join(unknown)}.')
    made: Callable[..., Any] = getattr(build, name)
    return made(_listed(devices), kind, bytes_per_pack, cluster, **options)


def _listed(devices: Sequence[str] | str | None) -> tuple[str, ...]:
    given = (devices,) if isinstance(devices, str) else tuple(devices or ())
    if any(not isinstance(device, str) or not device.strip() for device in given):
        raise ConfigurationError(f'devices= is a list of names such as "GPU:0". Received: {devices!r}.')
    if len(set(given)) != len(given):
        raise ConfigurationError(f"devices= names a device twice. Received: {devices!r}.")
    return given
