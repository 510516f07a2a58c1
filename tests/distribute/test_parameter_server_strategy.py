"""`strategy("parameter_server")` under hvdxrun --servers: two workers, two servers, the same program on all."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import hvdx as hvd
from hvdx.comm import slurm
from hvdx.comm.addresses import free_port
from hvdx.distribute import strategy
from hvdx.distribute.parameter_server import ParameterServerOptimizer
from hvdx.launch.line_server import listen
from tests.distribute.parameter_server_recipes import cases, name_of
from tests.support.jobs import Job, run_by_hand, run_ranks
from tests.training.support import FAMILIES, LEGACY, Family, every_keras

PROGRAM = Path(__file__).with_name("parameter_server_strategy_program.py")
SCENES = ["horovod", "loops", "saved", "asynchronous"]
NAMES = ["world", *(f"{scene}-{family}" for scene in SCENES for family in FAMILIES)]
REFUSED = [f"refused-{family}" for family in FAMILIES + LEGACY]
RECIPES = [name_of(recipe, family) for recipe, family in cases()]


@dataclass(frozen=True)
class Played:
    """A job that has ended, and what each worker wrote."""

    job: Job
    workers: tuple[dict[str, str], dict[str, str]]


def play(folder: Path, *scenes: str, servers: int = 2, options: tuple[str, ...] = (), limit: float = 120) -> Played:
    """Run two workers that play scenes."""
    command = [str(PROGRAM), str(folder), *scenes]
    environ = {"HVDX_TIMEOUT": "60", "TF_CPP_MIN_LOG_LEVEL": "3"}
    job = run_ranks(2, command, limit=limit, environ=environ, options=["--servers", str(servers), *options])
    paths = [folder / f"worker-{worker}.json" for worker in (0, 1)]
    one, two = (json.loads(path.read_text()) if path.exists() else {} for path in paths)
    return Played(job, (one, two))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """A job in which all scenes have been played."""
    result = play(tmp_path_factory.mktemp("played"), "world", *SCENES, "refused", "recipes", limit=900)
    assert result.job.code == 0, result.job.output
    return result


@pytest.mark.timeout(960)
@pytest.mark.parametrize("name", NAMES + REFUSED + RECIPES)
def test_scene(played: Played, name: str) -> None:
    for worker, outcomes in enumerate(played.workers):
        outcome = outcomes.get(name, "was not played")
        assert not outcome, f"worker {worker}:\n{outcome}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("go_on", [False, True])
def test_a_worker_dies_in_asynchronous_training(tmp_path: Path, go_on: bool) -> None:
    options = ("--on-worker-failure", "continue") if go_on else ()
    played = play(tmp_path, "dying", options=options)
    assert "worker 1 on " in played.job.output
    assert "was ended by signal 9 (SIGKILL)" in played.job.output
    if go_on:
        assert played.job.code == 0, played.job.output
        assert played.workers[0] == {"dying": ""}, played.job.output
    else:
        assert played.job.code == 137, played.job.output
        assert played.job.seconds < 60


@pytest.mark.timeout(300)
def test_a_server_dies_and_three_go_on_from_the_last_checkpoint_and_from_a_backup(tmp_path: Path) -> None:
    first = play(tmp_path, "restarted")
    assert first.job.code == 137, first.job.output
    assert re.search(r"server 1 on \S+ was ended by signal 9 \(SIGKILL\)", first.job.output)
    assert first.job.seconds < 60
    second = play(tmp_path, "restarted", servers=3)
    assert second.job.code == 0, second.job.output
    assert second.workers == ({"restarted": ""}, {"restarted": ""}), second.job.output


def by_dmlc() -> list[dict[str, str]]:
    """Return the variables of BytePS for each member of a job with two workers and a server."""
    common = {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1",
              "DMLC_PS_ROOT_PORT": str(free_port())}  # fmt: skip
    workers = [{"DMLC_ROLE": "worker", "DMLC_WORKER_ID": number} for number in "01"]
    return [{**common, **own} for own in [{"DMLC_ROLE": "scheduler"}, {"DMLC_ROLE": "server"}, *workers]]


def by_tf_config() -> list[dict[str, str]]:
    """Return TF_CONFIG, and where the members meet, for each of them."""
    cluster = {job: [f"127.0.0.1:{free_port()}" for _ in range(count)] for job, count in (("ps", 1), ("worker", 2))}
    root = f"127.0.0.1:{free_port()}"
    tasks = [("ps", 0), ("worker", 0), ("worker", 1)]
    texts = [json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}) for job, index in tasks]
    return [{"TF_CONFIG": text, "HVDX_ROOT": root} for text in texts]


def by_slurm_without_slurm() -> list[dict[str, str]]:
    """Return what srun --mpi=pmi2 sets for three tasks on this host; this stands in for Slurm, which is not here."""
    host = socket.gethostname()
    numbers = ({"SLURM_JOB_ID": str(number), "SLURM_STEP_ID": "0"} for number in itertools.count(os.getpid()))
    step = next(names for names in numbers if is_free(slurm.port(names, 2)))  # where the server, task 2, listens
    step |= {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": host, "SLURM_STEP_TASKS_PER_NODE": "3",
             "SLURM_DISTRIBUTION": "block", "PMI_SIZE": "3", "HVDX_SERVERS": "1"}  # fmt: skip
    return [{**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "PMI_RANK": rank} for rank in "012"]


def is_free(port: int) -> bool:
    with contextlib.suppress(OSError), listen(port):
        return True
    return False


@pytest.mark.timeout(300)
@pytest.mark.parametrize("variables", [by_dmlc, by_tf_config, by_slurm_without_slurm])
def test_members_started_by_hand(tmp_path: Path, variables: Callable[[], list[dict[str, str]]]) -> None:
    jobs = run_by_hand(variables(), [str(PROGRAM), str(tmp_path), "loop"], limit=200)
    assert [job.code for job in jobs] == [0] * len(jobs), jobs
    for worker in (0, 1):
        assert json.loads((tmp_path / f"worker-{worker}.json").read_text()) == {"loop": ""}, jobs


def test_what_makes_no_sense_is_refused_without_servers() -> None:
    for mode, options, sentence in (
        ("parameter_server", {}, "needs parameter servers, but by this process alone there are none"),
        (
            "multi_worker",
            {"staleness": 2},
            r'strategy\("multi_worker"\) has no options of its own. Received: staleness',
        ),
        ("parameter_server", {"stale": 2}, r"has the options updates, staleness, gather.* Received: stale"),
        (
            "parameter_server",
            {"communicator": "ring"},
            r"its gradients go to servers. Received: .*communicator=\"ring\"",
        ),
    ):
        given: dict[str, Any] = options
        with pytest.raises(hvd.ConfigurationError, match=sentence):
            strategy(mode, **given)


@every_keras
def test_a_distributed_optimizer_is_not_put_around_servers(family: Family) -> None:
    served: Any = ParameterServerOptimizer(family.optimizers.SGD(0.1), None)  # type: ignore[arg-type]
    with pytest.raises(hvd.OptimizerError, match="The updates of this SGD are made by parameter servers"):
        hvd.DistributedOptimizer(served)


@pytest.mark.timeout(300)
@every_keras
def test_stock_servers_train_where_keras_can(family: Family) -> None:
    module = family.keras.__name__.split(".")[0]
    command = [str(PROGRAM.with_name("stock_servers_program.py")), module]
    job = run_ranks(2, command, environ={"TF_CPP_MIN_LOG_LEVEL": "3"}, options=["--servers", "2"])
    assert "gradients move by: TensorFlow's gRPC between 2 worker(s) and 2 parameter server(s)" in job.output
    if family.keras_name == "keras3":
        assert job.code == 1, job.output
        assert (
            "Keras 3 does not train under TensorFlow's own ParameterServerStrategyV2. Use tf_keras, or leave"
            in job.output
        )
    else:
        assert job.code == 0, job.output
        assert "trained: variables on servers [0, 1], computed by workers [0, 1]" in job.output
