"""What each mode makes: one function a mode, which takes this rank's devices, communicator, pack size and cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdx import environment, world
from hvdx.comm.choose import automatic
from hvdx.distribute.adopt import adapt_keras_3
from hvdx.distribute.cluster import Cluster, Role, resolve
from hvdx.distribute.devices import check_here, devices_here, devices_of_rank, stock_mirrored
from hvdx.distribute.stock import described, refuse_keras_3, warn_keras_3
from hvdx.errors import ConfigurationError, UnsupportedError, WorldError


def multi_worker(devices: Sequence[str], communicator: str, bytes_per_pack: int | None, cluster: Any) -> Any:
    """Return the strategy with one replica a rank."""
    if len(devices) > 1:
        raise ConfigurationError(f'"multi_worker" has one device a rank. Received: devices={list(devices)}.')
    found = resolve(cluster=cluster)
    _no_servers(found, "multi_worker")
    if communicator != "hvdx":
        if devices:
            raise ConfigurationError(
                "TensorFlow's own MultiWorkerMirroredStrategy takes the devices a rank sees. Received: "
                f'devices={list(devices)}, communicator="{communicator}". Use tf.config.set_visible_devices.'
            )
        return _stock_multi_worker(communicator, bytes_per_pack)
    _join(found)
    check_here(devices)
    from hvdx.distribute.multi_worker import MultiWorkerStrategy

    adapt_keras_3()
    return MultiWorkerStrategy(devices[0] if devices else _own_device(), bytes_per_pack)


def parameter_server(
    devices: Sequence[str],
    communicator: str,
    bytes_per_pack: int | None,
    cluster: Any,
    backend: str = "hvdx",
    **options: Any,
) -> Any:
    """Return a worker's strategy; a server serves here, and its process ends when the workers have finished."""
    if backend not in ("hvdx", "tensorflow"):
        raise ConfigurationError(f"backend= is hvdx or tensorflow. Received: {backend!r}.")
    if len(devices) > 1 or communicator != "hvdx":
        raise ConfigurationError(
            'strategy("parameter_server") has one device a worker, and its gradients go to servers. Received: '
            f'devices={list(devices)}, communicator="{communicator}". TensorFlow\'s own strategy is '
            'backend="tensorflow".'
        )
    found = resolve(cluster=cluster)
    if not found.servers and found.role is Role.WORKER:
        raise ConfigurationError(
            f'strategy("parameter_server") needs parameter servers, but by {found.source} there are none. Start the '
            "program with them: hvdxrun -np 2 --servers 1 python train.py"
        )
    if backend == "tensorflow":
        from hvdx.distribute.stock_servers import stock_strategy

        return stock_strategy(found, options)
    job = _join_with_servers(found)
    from hvdx.distribute.parameter_server.options import Options
    from hvdx.distribute.parameter_server.strategy import AsynchronousStrategy, SynchronousStrategy

    checked = Options(workers=job.workers, servers=job.servers, **options)
    device = devices[0] if devices else _own_device()
    if checked.updates == "asynchronous":
        return AsynchronousStrategy(job, checked, device)
    return SynchronousStrategy(job, checked, device, bytes_per_pack)


def mirrored(devices: Sequence[str], communicator: str, bytes_per_pack: int | None, cluster: Any) -> Any:
    """Return the strategy with one replica a device, in one process or in each rank."""
    found = resolve(cluster=cluster)
    _no_servers(found, "mirrored")
    if not communicator.startswith("hvdx"):
        _no_ranks("mirrored", cluster)
        made, within = stock_mirrored(devices_of_rank(devices), communicator, bytes_per_pack)
        return warn_keras_3(described(made, "mirrored", within))
    _join(found)
    from hvdx.distribute.mirrored import mirrored_strategy

    adapt_keras_3()
    algorithm = communicator.partition("-")[2] or "auto"
    return mirrored_strategy(devices_of_rank(devices), algorithm, bytes_per_pack)


def one_device(devices: Sequence[str], communicator: str, bytes_per_pack: int | None, cluster: Any) -> Any:
    """Return TensorFlow's strategy with one device."""
    _as_tensorflow_does("one_device", communicator, bytes_per_pack)
    if len(devices) > 1:
        raise ConfigurationError(f'"one_device" has one device. Received: devices={list(devices)}. Use "mirrored".')
    _no_ranks("one_device", cluster)
    check_here(devices)
    device = devices[0] if devices else _own_device()
    return described(tf.distribute.OneDeviceStrategy(device), "one_device")


def central_storage(devices: Sequence[str], communicator: str, bytes_per_pack: int | None, cluster: Any) -> Any:
    """Return TensorFlow's strategy with the variables in one place and replicas on several devices."""
    _as_tensorflow_does("central_storage", communicator, bytes_per_pack)
    _no_ranks("central_storage", cluster)
    check_here(devices)
    made = tf.distribute.experimental.CentralStorageStrategy(compute_devices=list(devices) or None)
    return warn_keras_3(described(made, "central_storage"))


def tpu(devices: Sequence[str], communicator: str, bytes_per_pack: int | None, cluster: Any) -> Any:
    """Return TensorFlow's strategy for TPUs."""
    _as_tensorflow_does("tpu", communicator, bytes_per_pack)
    _no_ranks("tpu", cluster)
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(devices[0] if devices else "")
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        made = tf.distribute.TPUStrategy(resolver)
    except Exception as error:  # TensorFlow raises many kinds, by where it notices that there is none
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise UnsupportedError(
            f'strategy("tpu") is TensorFlow\'s own TPUStrategy, and TensorFlow finds no TPU here: {reason}. Run it '
            'where there is one, or choose "multi_worker".'
        ) from error
    return described(made, "tpu")


def _stock_multi_worker(communicator: str, bytes_per_pack: int | None) -> Any:
    """Return TensorFlow's MultiWorkerMirroredStrategy between the ranks of this job."""
    if world.is_initialized() and world.communicator().name != "tensorflow":
        raise ConfigurationError(
            f'strategy("multi_worker", communicator="{communicator}") starts TensorFlow\'s servers, but the world '
            f"has already been joined with the {world.communicator().name} communicator. Leave hvd.init() to "
            'strategy(), or call hvd.init(comm="tensorflow").'
        )
    from hvdx.comm.tensorflow import stock_strategy

    world.init("tensorflow")
    implementation = "auto" if communicator == "tensorflow" else communicator
    made = described(
        stock_strategy(implementation, bytes_per_pack), "multi_worker", f"TensorFlow's {implementation.upper()}"
    )
    return refuse_keras_3(made, "leave out communicator=, so that hvdx reduces")


def _join(found: Cluster) -> None:
    """Join the world, and check that it is the one that the environment describes."""
    alone = not world.is_initialized() and automatic(os.environ) == "single"
    if alone and found.workers > 1 and found.addresses and environment.COMM.read() == "auto":
        world.init("tensorflow")  # no launcher, but addresses, as TF_CONFIG has them
    world.init()
    if world.size() != found.workers and found.workers > 1:
        raise WorldError(
            f"{found.source} says that there are {found.workers} workers, but the {world.communicator().name} "
            f"communicator sees {world.size()}. Start the program with hvdxrun or mpirun, or call "
            'hvd.init(comm="tensorflow"), which works with TF_CONFIG alone.'
        )


def _join_with_servers(found: Cluster) -> Any:
    """Join the world through the servers, and return this worker's part in the job; a server does not return."""
    if not world.is_initialized():
        from hvdx.distribute.server_job import join

        job = join(found)  # before the communicator is imported: a server ends here
        from hvdx.comm.servers import ServersCommunicator

        world.init(ServersCommunicator(job))
    communicator = world.communicator()
    if communicator.name != "servers":
        raise ConfigurationError(
            'strategy("parameter_server") joins the world through the servers, but it has already been joined with the '
            f"{communicator.name} communicator. Leave HVDX_COMM and hvd.init(comm=) at auto."
        )
    return communicator.job  # type: ignore[attr-defined]


def _no_servers(found: Cluster, mode: str) -> None:
    if found.role is not Role.WORKER or found.servers:
        raise ConfigurationError(
            f'strategy("{mode}") has no parameter servers, but {found.source} says {found.servers} of them. Start '
            "without --servers."
        )


def _as_tensorflow_does(mode: str, communicator: str, bytes_per_pack: int | None) -> None:
    """Refuse options that a mode of TensorFlow's has no use for."""
    if communicator not in ("hvdx", "tensorflow") or bytes_per_pack is not None:
        raise ConfigurationError(
            f'strategy("{mode}") is TensorFlow\'s own, which has neither communicator= nor bytes_per_pack=. Received: '
            f'communicator="{communicator}", bytes_per_pack={bytes_per_pack}.'
        )


def _no_ranks(mode: str, cluster: Any) -> None:
    """Refuse a mode of one process where there are more, and join the world of one."""
    found = resolve(cluster=cluster)
    if found.workers > 1:
        raise ConfigurationError(
            f'strategy("{mode}") trains in one process, but {found.source} says that there are {found.workers}: each '
            'would train alone. Use "multi_worker".'
        )
    world.init()


def _own_device() -> str:
    """Return this rank's GPU, or its CPU."""
    gpus = devices_here("GPU")
    local = world.local_rank() if world.is_initialized() else 0
    return f"GPU:{local % len(gpus)}" if gpus else "CPU:0"
