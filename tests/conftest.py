"""What all tests share: the world is joined once per launch, and tests are chosen by the number of ranks."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

NP = int(os.environ.get("HVDX_TEST_NP", "1"))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("HVDX_TIMEOUT", "60")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Two mpirun that start at the same moment disturb each other in the folder of Open MPI's sessions, once in 1500
    # times ("The PMIx server's listener thread failed to start"); those of each worker get a folder of their own.
    _sessions = tempfile.TemporaryDirectory(prefix="hvdx-")  # short: there are sockets in it
    os.environ["TMPDIR"] = _sessions.name

import hvdx as hvd  # noqa: E402

if NP > 1:
    hvd.init()  # before anything else of TensorFlow: the tensorflow communicator starts its servers here


def pytest_report_header() -> list[str]:
    """Say who takes part."""
    import tensorflow as tf

    lines = [f"tensorflow {tf.__version__}, {NP} rank(s), communicator {os.environ.get('HVDX_COMM', 'auto')}"]
    if os.environ.get("HVDX_COMM") in {"mpi", "shared_memory"} and NP > 1:
        from mpi4py import MPI

        lines.append(f"{MPI.Get_library_version().splitlines()[0]}, rank {hvd.rank()} of {hvd.size()}")
    return lines


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests for this number of ranks: `np(2, 3)` adds runs under MPI, `plain=False` drops the plain run."""
    kept, dropped = [], []
    for item in items:
        marker = item.get_closest_marker("np")
        if NP == 1:
            wanted = marker is None or marker.kwargs.get("plain", True)
        else:
            wanted = marker is not None and NP in marker.args
        comms = marker.kwargs.get("comm") if marker is not None else None
        if wanted and NP > 1 and comms is not None and os.environ.get("HVDX_COMM", "mpi") not in comms:
            wanted = False
        (kept if wanted else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


@pytest.fixture
def world() -> Iterator[Any]:
    """The initialized module; in the plain run, a world of one rank."""
    was = hvd.is_initialized()
    if not was:
        hvd.init("single")
    yield hvd
    if not was:
        hvd.shutdown()


def installed_kerases() -> list[str]:
    """Return which of keras3, tf_keras and keras2 can be imported here."""
    found = []
    try:
        found.append("keras3" if importlib.import_module("keras").__version__ >= "3" else "keras2")
    except ImportError:
        pass
    try:
        importlib.import_module("tf_keras")
        found.append("tf_keras")
    except ImportError:
        pass
    return found


def load_keras(name: str) -> Any:
    """Return the module of a Keras named as `installed_kerases` does."""
    return importlib.import_module("tf_keras" if name == "tf_keras" else "keras")


@pytest.fixture(params=installed_kerases())
def keras(request: pytest.FixtureRequest, world: Any) -> Any:
    """Each installed Keras in turn, with the seed set."""
    module = load_keras(request.param)
    module.utils.set_random_seed(1)
    return module


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two hosts with ssh between them, which are gone afterwards."""
    from tests.launch.two_hosts import missing, two_hosts

    reason = missing()
    if reason:
        pytest.skip(reason)
    with two_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made
