"""Trains and evaluates on several ranks, until one dies where the scene says: `fault_program.py MODEL_DIR SCENE`."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import tensorflow as tf

import hvdx as hvd
from hvdx import estimator
from tests.estimator import distributed_models as models

FOLDER, SCENE = Path(sys.argv[1]), sys.argv[2]


def die() -> None:
    print(f"rank {hvd.rank()} pid {os.getpid()} dies", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def die_when_evaluated() -> None:
    while not (FOLDER / "evaluating").exists():
        time.sleep(0.05)
    die()


def evaluation_input() -> Any:
    """In the scenes of rank 0's evaluation, the second one is fatal to one rank."""
    if SCENE in ("rank 0 dies", "rank 1 dies") and len(list((FOLDER / "eval").glob("events*"))) and has_step(4):
        if SCENE == "rank 0 dies":
            die()
        (FOLDER / "evaluating").touch()
        time.sleep(30)
    return models.eval_input()


def has_step(step: int) -> bool:
    latest = tf.train.latest_checkpoint(FOLDER)
    return latest is not None and latest.endswith(f"-{step}")


class Watch(tf.compat.v1.train.SessionRunHook):  # type: ignore[name-defined]
    """Says from where the training goes on, and dies before the step after that of "rank R dies at step S"."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[int] = []
        self._step = 0

    def begin(self) -> None:
        self._global_step = tf.compat.v1.train.get_global_step()
        self._weights = tf.compat.v1.trainable_variables()[0]

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._step, weights = session.run([self._global_step, self._weights])
        self.began.append(int(self._step))
        host, values = socket.gethostname(), json.dumps(weights.ravel().tolist())
        print(f"rank {hvd.rank()} on {host} begins at step {self._step} with {values}", flush=True)

    def before_run(self, run_context: Any) -> Any:
        if f"rank {hvd.rank()} dies at step {self._step}" == SCENE:  # all ranks have met, so rank 0 has saved
            die()
        return None

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._step += 1


class DieInside(tf.compat.v1.train.SessionRunHook):  # type: ignore[name-defined]
    """Dies inside the second evaluation of "rank R dies in its part"."""

    evaluations = 0

    def begin(self) -> None:
        self.evaluations += 1

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if f"rank {hvd.rank()} dies in its part" == SCENE and self.evaluations == 2:
            die()


def main() -> None:
    hvd.init()
    if SCENE == "rank 1 dies" and hvd.rank() == 1:
        threading.Thread(target=die_when_evaluated, daemon=True).start()
    watch = Watch()
    train, evaluate = models.specs(hooks=[watch])
    evaluate = evaluate._replace(input_fn=evaluation_input, hooks=(DieInside(),))
    how = "sharded" if SCENE.endswith("part") else "rank 0"
    mine = models.make(FOLDER, seed=hvd.rank())
    metrics, _ = estimator.train_and_evaluate(mine, train, evaluate, evaluation=how)
    print(f"rank {hvd.rank()} began at step {watch.began}, ended with {metrics}", flush=True)


if __name__ == "__main__":
    main()
