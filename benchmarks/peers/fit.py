"""Training the small CNN by `fit`: hvdx, Horovod, TensorFlow's strategy, or no exchange at all, on Keras 3 or tf_keras.

A call is one `fit` of as many steps as the workload says; every rank takes batches of BATCH images in each. With no
exchange the ranks train by themselves, side by side: what a step takes more with an exchange is what that costs,
waiting included, with the same load on the cores and the memory. They are not compiled by XLA, as a step that talks to
other ranks cannot be; the one process is, where its Keras does so by itself.
"""

from __future__ import annotations

import hashlib
import importlib
from typing import Any

import numpy as np

from benchmarks.session import Session, Way
from benchmarks.workloads import Shapes, small_cnn

BATCH = 32
LEARNING_RATE = 1e-3


def start(argument: str) -> Session:
    """Join; the argument is who reduces the gradients and which Keras trains ("hvdx keras", "stock tf_keras")."""
    by, family = argument.split()
    return {"hvdx": _hvdx, "horovod": _horovod, "stock": _stock, "none": _none}[by](family)


def _hvdx(family: str) -> Session:
    import hvdx as hvd
    from hvdx import world

    hvd.init()
    keras = importlib.import_module(family)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(LEARNING_RATE))
    model = _compiled(keras, optimizer)
    hvd.broadcast_variables(model.variables, root_rank=0)
    name = f"fit: hvdx, {_title(family)}"
    used = {"communicator": world.communicator().name}
    return Session(hvd.rank(), hvd.size(), _ways(name, model, hvd.rank()), hvd.shutdown, used)


def _horovod(family: str) -> Session:
    import horovod.tensorflow as ops
    import horovod.tensorflow.keras as horovod

    keras = importlib.import_module(family)
    horovod.init()
    # Horovod 0.28.1 knows the optimizers of before Keras 2.11 only.
    optimizer = horovod.DistributedOptimizer(keras.optimizers.legacy.Adam(LEARNING_RATE))
    model = _compiled(keras, optimizer)
    ops.broadcast_variables(model.variables, root_rank=0)
    ways = _ways(f"fit: Horovod, {_title(family)}", model, horovod.rank())
    return Session(horovod.rank(), horovod.size(), ways, horovod.shutdown)


def _stock(family: str) -> Session:
    from benchmarks.peers.tensorflow_ring import make_strategy, place

    strategy = make_strategy()
    keras = importlib.import_module(family)
    workers, rank = place()
    with strategy.scope():
        model = _compiled(keras, keras.optimizers.Adam(LEARNING_RATE))
    ways = _ways(f"fit: MultiWorkerMirrored, {_title(family)}", model, rank, workers=workers)
    return Session(rank, workers, ways)


def _none(family: str) -> Session:
    from mpi4py import MPI

    keras = importlib.import_module(family)
    world = MPI.COMM_WORLD
    compiled = {"jit_compile": False} if world.size > 1 else {}
    model = _compiled(keras, keras.optimizers.Adam(LEARNING_RATE), **compiled)
    what = "no exchange" if world.size > 1 else "one process"
    ways = _ways(f"fit: {what}, {_title(family)}", model, world.rank, check=False)
    return Session(world.rank, world.size, ways, MPI.Finalize)


def _compiled(keras: Any, optimizer: Any, **options: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = small_cnn(keras)
    model.compile(optimizer, "sparse_categorical_crossentropy", **options)
    return model


def _title(family: str) -> str:
    return {"keras": "Keras 3"}.get(family, family)


def _ways(name: str, model: Any, rank: int, workers: int = 1, check: bool = True) -> Any:
    """Return what makes the way to train for as many steps as the only shape says.

    Args:
        name: of the way.
        model: compiled.
        rank: this rank, whose images are its own.
        workers: by how many TensorFlow divides each batch of the dataset.
        check: whether all ranks must have the same weights after each call.
    """

    def ways(shapes: Shapes) -> dict[str, Way]:
        ((steps,),) = shapes
        data = _images(steps, rank, workers)

        def train() -> None:
            model.fit(data, verbose=0)

        return {name: Way(train, fingerprint=(lambda: _fingerprint(model)) if check else None)}

    return ways


def _images(steps: int, rank: int, workers: int) -> Any:
    """Return a dataset of `steps` batches that are made before, so that reading costs all the same."""
    import tensorflow as tf

    random = np.random.default_rng(rank)
    count = BATCH * workers
    images = random.standard_normal((count * steps, 8, 8, 1)).astype(np.float32)
    labels = random.integers(0, 10, count * steps)
    options = tf.data.Options()
    # Its thread sleeps for 10, 20, 40 ... ms, and who ends an iterator waits for it: calls would take 150 or 310 ms.
    options.autotune.enabled = False
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(count, drop_remainder=True).with_options(options)


def _fingerprint(model: Any) -> str:
    return hashlib.sha256(b"".join(np.asarray(weight).tobytes() for weight in model.get_weights())).hexdigest()[:12]
