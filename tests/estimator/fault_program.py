"""Trains and evaluates on several ranks; started by test_faults.py: `fault_program.py MODEL_DIR SCENE`."""

from __future__ import annotations

import os
import signal
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
    """In the scenes, the second evaluation is fatal to one rank."""
    if SCENE != "whole" and len(list((FOLDER / "eval").glob("events*"))) and has_step(4):
        if SCENE == "rank 0 dies":
            die()
        (FOLDER / "evaluating").touch()
        time.sleep(30)
    return models.eval_input()


def has_step(step: int) -> bool:
    latest = tf.train.latest_checkpoint(FOLDER)
    return latest is not None and latest.endswith(f"-{step}")


def main() -> None:
    hvd.init()
    if SCENE == "rank 1 dies" and hvd.rank() == 1:
        threading.Thread(target=die_when_evaluated, daemon=True).start()
    steps: list[int] = []

    class First(tf.compat.v1.train.SessionRunHook):  # type: ignore[name-defined]
        def after_create_session(self, session: Any, coord: Any) -> None:
            steps.append(int(session.run(tf.compat.v1.train.get_global_step())))

    train, evaluate = models.specs(hooks=[First()])
    evaluate = evaluate._replace(input_fn=evaluation_input)
    metrics, _ = estimator.train_and_evaluate(models.make(FOLDER, seed=hvd.rank()), train, evaluate)
    print(f"rank {hvd.rank()} began at step {steps}, ended with {metrics}", flush=True)


if __name__ == "__main__":
    main()
