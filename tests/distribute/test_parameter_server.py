"""The parameter server with real processes: two servers, two workers, many scenes in one start."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

import hvdx as hvd
from hvdx.comm.addresses import free_port
from hvdx.distribute.parameter_server import ParameterClient, ParameterServerOptimizer, Server
from tests.distribute.parameter_server_jobs import Job, job
from tests.distribute.parameter_server_recipes import cases, classes, name_of
from tests.training.support import FAMILIES, Family, every_family

SCENES = ["reductions", "rows", "refusals", "strangers", "counted", "again", "lost", "gathered"]
FITS = [f"{name}-{family}" for name in ("converging", "continued") for family in FAMILIES]
RECIPES = [name_of(recipe, family) for recipe, family in cases(few=True)]
CLASSES = [f"{name}-{family}" for family in FAMILIES for name in classes(family)]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job in which all scenes have been played."""
    scenes = [*SCENES, "converging", "continued", "optimizers", "recipes"]
    with job(tmp_path_factory.mktemp("played"), scenes) as running:
        codes = running.wait([*running.workers, *running.servers], 900)
        assert codes == [0, 0, 0, 0], running.everything()
        yield running


@pytest.mark.timeout(960)
@pytest.mark.parametrize("name", SCENES + FITS + CLASSES + RECIPES)
def test_scene(played: Job, name: str) -> None:
    for worker in (0, 1):
        outcome = played.outcomes(worker).get(name, "was not played")
        assert not outcome, f"worker {worker}:\n{outcome}"


@every_family
def test_what_the_servers_cannot_run_is_refused(family: Family) -> None:
    client = cast(ParameterClient, None)
    sgd = family.optimizers.SGD(0.1)
    if family.legacy:
        with pytest.raises(hvd.HvdxError, match=r"does not run legacy optimizers. Take keras.optimizers.SGD"):
            ParameterServerOptimizer(sgd, client)
        return
    ParameterServerOptimizer(sgd, client)
    with pytest.raises(hvd.HvdxError, match="This SGD has been wrapped already"):
        ParameterServerOptimizer(sgd, client)
    if family.keras_name == "keras3":
        both = family.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2, gradient_accumulation_steps=2)
        with pytest.raises(hvd.HvdxError, match="ema_overwrite_frequency together with gradient_accumulation_steps"):
            ParameterServerOptimizer(both, client)


def test_without_servers_a_client_ends_with_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDX_TIMEOUT", "3")
    address = f"127.0.0.1:{free_port()}"
    client = ParameterClient([address], 0, 1, "token")
    try:
        with pytest.raises(hvd.StallError, match=f"Parameter server 0 at {address}"):
            client.barrier()
    finally:
        client._link.close()
    with pytest.raises(hvd.ConfigurationError, match="at least one server"):
        ParameterClient([], 0, 1, "token")


def test_without_workers_a_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDX_START_TIMEOUT", "1")
    server = Server(3, 2, "token")
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(hvd.ConfigurationError, match=f"Parameter server 4 cannot listen at 127.0.0.1:{port}"):
        Server(4, 2, "token", port=port)
    with pytest.raises(hvd.StallError, match=r"Parameter server 3 at .* waited 1 s"):
        server.serve()


@pytest.mark.parametrize(("package", "module"), [("zmq", "protocol"), ("uhashring", "placement")])
def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch, package: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"hvdx.distribute.parameter_server.{module}")
    with pytest.raises(hvd.HvdxError, match=r"hvdx\[parameter-server\]"):
        importlib.import_module(f"hvdx.distribute.parameter_server.{module}")


def test_a_worker_that_dies_holds_nobody_back_for_long(tmp_path: Path) -> None:
    with job(tmp_path, ["killed"], TEST_SILENCE="8") as running:
        assert running.wait(running.workers, 120) == [0, -9], running.everything()
        assert running.wait(running.servers, 30) == [0, 0], running.everything()
        assert running.outcomes(0) == {"killed": ""}
        assert "worker 1 is gone: no sign of life" in running.output(running.servers[0])


def test_a_server_dies_and_three_go_on_from_the_saved_state(tmp_path: Path) -> None:
    with job(tmp_path, ["until_saved"]) as running:
        end = time.monotonic() + 120
        while not all((tmp_path / f"saved-{worker}").exists() for worker in (0, 1)):
            assert time.monotonic() < end, running.everything()
            time.sleep(0.1)
        running.servers[1].kill()
        while len(running.outcomes(0)) + len(running.outcomes(1)) < 2:
            assert time.monotonic() < end, running.everything()
            time.sleep(0.1)
        for worker in (0, 1):
            assert running.outcomes(worker) == {"until_saved": ""}
    with np.load(tmp_path / "state.npz") as file:  # numpy alone reads it
        assert file["0"].shape == (6, 2)
    for path in tmp_path.glob("*.address"):
        path.unlink()
    with job(tmp_path, ["from_saved"], servers=3) as running:
        assert running.wait([*running.workers, *running.servers], 120) == [0] * 5, running.everything()
        for worker in (0, 1):
            assert running.outcomes(worker) == {"from_saved": ""}
