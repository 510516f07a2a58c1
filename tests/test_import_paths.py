"""Horovod's import paths give hvdx's own objects, and nothing in them differs."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import hvdx


@pytest.mark.parametrize("path", ["hvdx.tensorflow", "hvdx.keras", "hvdx.tensorflow.keras"])
def test_horovods_import_paths(path: str) -> None:
    module = importlib.import_module(path)
    for name in hvdx.__all__:
        assert getattr(module, name) is getattr(hvdx, name)


@pytest.mark.parametrize("path", ["hvdx.keras.callbacks", "hvdx.tensorflow.keras.callbacks"])
def test_callbacks_under_horovods_paths(path: str) -> None:
    module = importlib.import_module(path)
    assert module.BroadcastGlobalVariablesCallback is hvdx.callbacks.BroadcastGlobalVariablesCallback


def test_every_public_name_exists_and_has_a_docstring() -> None:
    for name in hvdx.__all__:
        value = getattr(hvdx, name)
        assert name == "__version__" or isinstance(value, hvdx.ReduceOp) or value.__doc__, name


def test_without_tensorflow_the_error_says_which_extra_to_install() -> None:
    program = (
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'tensorflow' else real(name, *a)\n"
        "import hvdx\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "MissingDependencyError" in done.stderr
    for extra in ("hvdx[cpu]", "hvdx[tensorflow]", "hvdx[gpu]"):
        assert extra in done.stderr


def test_before_init_every_call_says_what_to_do() -> None:
    program = (
        "import tensorflow as tf, hvdx as hvd\n"
        "calls = [hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size, hvd.barrier,\n"
        "         lambda: hvd.allreduce(tf.ones(1)), lambda: hvd.grouped_allreduce([tf.ones(1)]),\n"
        "         lambda: hvd.allgather(tf.ones(1)), lambda: hvd.broadcast(tf.ones(1)),\n"
        "         lambda: hvd.send(tf.ones(1), 0), lambda: hvd.recv(tf.ones(1), 0),\n"
        "         hvd.broadcast_object, lambda: hvd.allgather_object(1),\n"
        "         lambda: hvd.broadcast_variables([tf.Variable(1)])]\n"
        "for call in calls:\n"
        "    try: call()\n"
        "    except hvd.NotInitializedError as error: assert 'hvd.init()' in str(error)\n"
        "    else: raise SystemExit(f'no error from {call}')\n"
        "assert not hvd.is_initialized()\n"
        "hvd.init(); hvd.init(); assert hvd.is_initialized() and hvd.size() == 1 and hvd.rank() == 0\n"
        "import sys; assert 'mpi4py.MPI' not in sys.modules\n"
        "hvd.shutdown(); hvd.shutdown(); assert not hvd.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
