"""Which devices of this machine a rank's replicas live on, and TensorFlow's own mirrored strategy over them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import device_util

from hvdx import world
from hvdx.errors import ConfigurationError
from hvdx.ops.objects import allgather_object


def devices_of_rank(wanted: Sequence[str]) -> list[str]:
    """Return the names of the devices of this rank, without job and task; collective where there are several ranks.

    Args:
        wanted: names such as "GPU:0"; where there are none, this rank's GPUs, or all logical CPUs.

    Raises:
        ConfigurationError: there is no such device, one is named twice, or the ranks have different numbers of them.
    """
    check_here(wanted)
    found = [f"/device:{_short(name)}" for name in wanted] or _own_gpus() or devices_here("CPU")
    if len(set(found)) != len(found):
        raise ConfigurationError(f"devices= names a device twice. Received: {list(wanted)}.")
    if world.is_initialized() and world.size() > 1:
        counts = allgather_object(len(found))
        if len(set(counts)) > 1:
            raise ConfigurationError(
                f'strategy("mirrored") has the same number of devices on every rank. Received: {counts}, in the order '
                "of ranks. Give the same number to each with devices=."
            )
    return found


def check_here(wanted: Sequence[str]) -> None:
    """Check that devices exist.

    Args:
        wanted: their names.

    Raises:
        ConfigurationError: there is no such device; names those there are.
    """
    known = [_short(name) for name in devices_here()]
    missing = [name for name in wanted if _short(name) not in known]
    if missing:
        raise ConfigurationError(
            f"devices= names {', '.join(missing)}, which is not here. Received: {list(wanted)}. TensorFlow sees "
            f"{', '.join(known)}."
        )


def devices_here(kind: str | None = None) -> list[str]:
    """Return the names, without job and task, of the devices of this process; not of other ranks'.

    Args:
        kind: "CPU" or "GPU", or None for all.
    """
    names = [device.name for device in tf.config.list_logical_devices(kind)]
    shorts = [(name, f"/device:{_short(name)}") for name in names]
    return [short for name, short in shorts if name in (short, device_util.resolve(short))]


def stock_mirrored(devices: Sequence[str], communicator: str, bytes_per_pack: int | None) -> tuple[Any, str]:
    """Return TensorFlow's own strategy, and in words how its gradients move.

    Args:
        devices: names without job and task.
        communicator: "tensorflow", "auto", "ring" or "nccl".
        bytes_per_pack: which it does not take.

    Raises:
        ConfigurationError: it does not do what is asked.
    """
    gpus = [device for device in devices if ":GPU:" in device.upper()]
    if bytes_per_pack is not None:
        raise ConfigurationError(
            f"TensorFlow's MirroredStrategy has no size of packs. Received: bytes_per_pack={bytes_per_pack}. Leave it "
            'out, or take communicator="hvdx".'
        )
    if communicator == "nccl" and len(gpus) < len(devices):
        raise ConfigurationError(
            f'communicator="nccl" moves values between GPUs only. Received: devices {", ".join(devices)}.'
        )
    if communicator == "ring" and gpus:
        raise ConfigurationError(
            'TensorFlow\'s MirroredStrategy has no ring between GPUs. Received: communicator="ring". Take '
            '"hvdx-ring", or "tensorflow".'
        )
    ops = tf.distribute.NcclAllReduce() if communicator == "nccl" else None
    made = tf.distribute.MirroredStrategy(list(devices), cross_device_ops=ops)
    within = f"TensorFlow's {communicator.upper()}" if communicator in ("ring", "nccl") else "TensorFlow"
    return made, f"{within} (Keras 3 clips before that)"


def _own_gpus() -> list[str]:
    """Return this rank's GPUs: all it sees, or its part of them where the ranks of this host see the same."""
    gpus = devices_here("GPU")
    local = world.local_size() if world.is_initialized() else 1
    pinned = "CUDA_VISIBLE_DEVICES" in os.environ or tf.config.get_visible_devices(
        "GPU"
    ) != tf.config.list_physical_devices("GPU")
    if pinned or local == 1 or len(gpus) < local:
        return gpus
    each = len(gpus) // local
    return gpus[world.local_rank() * each : (world.local_rank() + 1) * each]


def _short(name: str) -> str:
    """Return "GPU:0" for any of TensorFlow's ways to name that device."""
    kind, _, number = name.strip().rpartition("/")[2].removeprefix("device:").partition(":")
    return f"{kind.upper()}:{int(number) if number.isdigit() else number or 0}"
