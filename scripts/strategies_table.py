"""Writes the table in docs/strategies.md by running it: each mode under each Keras, against one process.

    .venv/bin/python scripts/strategies_table.py
    .venv/bin/python scripts/strategies_table.py --only tpu

Needs the environments of `make test` (.venv and .venv-tf215). Each cell is a job of its own: it trains some recipes of
the tests under the strategy and in one process on the same batches, and compares the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "strategies.md"
BEGIN, END = "<!-- table, written by scripts/strategies_table.py -->", "<!-- end of the table -->"
RECIPES = {
    "sgd": "SGD",
    "adam": "Adam",
    "clipnorm": "clipnorm",
    "global_clipnorm": "global_clipnorm",
    "accumulation": "accumulation",
    "ema": "EMA",
    "loss-scale-inside": "loss scaling with an overflow in one replica",
    "embedding-auto-rows": "embeddings",
    "steps_per_execution": "steps_per_execution",
}
KERASES = {"keras3": (".venv", "Keras 3"), "tf_keras": (".venv", "tf_keras"), "keras2": (".venv-tf215", "Keras 2.15")}


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Args:
        name: what it is called there.
        mode: of `strategy`.
        options: further arguments of `strategy`.
        launch: options of hvdxrun, or none for one process.
        devices: logical CPUs of each process.
    """

    name: str
    mode: str
    options: dict[str, Any]
    launch: tuple[str, ...] = ()
    devices: int = 1


TWO = ("-np", "2")
SERVERS = (*TWO, "--servers", "2")
ROWS = (
    Row("`mirrored`, 2 devices", "mirrored", {}, devices=2),
    Row("`mirrored`, 2 devices, stock", "mirrored", {"communicator": "tensorflow"}, devices=2),
    Row("`multi_worker`, 2 ranks", "multi_worker", {}, TWO),
    Row("`multi_worker`, 2 ranks, stock", "multi_worker", {"communicator": "tensorflow"}, TWO),
    Row("`mirrored`, 2 ranks with 2 devices", "mirrored", {}, TWO, 2),
    Row("`parameter_server`, synchronous, 2 workers, 2 servers", "parameter_server", {}, SERVERS),
    Row("`parameter_server`, asynchronous", "parameter_server", {"updates": "asynchronous"}, SERVERS),
    Row("`parameter_server`, stock (asynchronous)", "parameter_server", {"backend": "tensorflow"}, SERVERS),
    Row("`central_storage`, 2 devices (stock)", "central_storage", {"devices": ["CPU:0", "CPU:1"]}, devices=2),
    Row("`one_device` (stock)", "one_device", {}),
    Row("`tpu` (stock)", "tpu", {}),
)
ASYNCHRONOUS = [row for row in ROWS if "asynchronous" in row.name]


def probe(row: Row, keras_name: str) -> None:
    """Train the recipes under the strategy and in one process; rank 0 prints what came out."""
    import tensorflow as tf

    if row.devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * row.devices)
    import hvdx as hvd
    from hvdx.distribute import strategy
    from tests.training.recipes import RECIPES as ALL
    from tests.training.support import Family

    try:
        made = strategy(row.mode, **row.options)
    except hvd.UnsupportedError:
        print('FOUND ["sgd", "refused"]', flush=True)
        return
    family = Family(keras_name)
    recipes = {recipe.name: recipe for recipe in ALL if recipe.name in RECIPES and family in recipe.families}
    names = ["sgd"] if row in ASYNCHRONOUS else [name for name in RECIPES if name in recipes]
    for name in names:
        found: bool | float | str
        try:
            found = _learns(made, family) if row in ASYNCHRONOUS else _difference(made, family, recipes[name])
        except (hvd.UnsupportedError, hvd.ConfigurationError):
            found = "refused"
        except Exception as error:  # whatever it is, it is what a user would see
            found = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if not hvd.is_initialized() or hvd.rank() == 0:
            print("FOUND " + json.dumps([name, found]), flush=True)
        if isinstance(found, str) and (row.launch or found == "refused"):
            if found != "refused":
                raise SystemExit(f"{name}: {found}")  # the ranks may be at different places now
            break


def _difference(made: Any, family: Any, recipe: Any) -> float:
    """Return by how many times the tolerance the weights differ from those of one process."""
    import numpy as np

    from tests.training.models import BATCH
    from tests.training.support import arrays, policy, union

    replicas = made.num_replicas_in_sync
    data = union(recipe.data(replicas))
    weights = []
    with policy(family.keras, recipe.policy):
        for inside in (False, True):
            family.keras.utils.set_random_seed(7)
            change = (lambda optimizer: optimizer) if inside else recipe.reference
            if inside:
                with made.scope():
                    model = recipe.model(family.keras)
                    model.compile(recipe.optimizer(family, change), **recipe.compile)
            else:
                model = recipe.model(family.keras)
                model.compile(recipe.optimizer(family, change), **recipe.compile)
            recipe.train(model, data, BATCH * replicas)
            if inside and hasattr(made, "pull"):
                made.pull(model)
            weights.append(arrays(model.weights))
    pairs = zip(*weights, strict=True)
    # np.max of all: it keeps what is no number
    return float(np.max([np.max(np.abs(b - a) / (recipe.atol + recipe.rtol * np.abs(a))) for a, b in pairs]))


def _learns(made: Any, family: Any) -> bool:
    """Return whether a model learns where no numbers can be foretold."""
    import tensorflow as tf

    from tests.training.models import BATCH, dense, linear_data
    from tests.training.support import union

    data = tf.data.Dataset.from_tensor_slices(union(linear_data(2))).repeat().batch(BATCH)
    family.keras.utils.set_random_seed(7)
    with made.scope():
        model = dense(family.keras)
        model.compile(family.optimizers.SGD(0.05), loss="mse")
    losses = model.fit(data, epochs=6, steps_per_epoch=8, verbose=0).history["loss"]
    return bool(losses[-1] < 0.9 * losses[0])


def cell(number: int, keras_name: str) -> str:
    """Run one cell of the table and return what stands in it."""
    row, (environment, _) = ROWS[number], KERASES[keras_name]
    python = str(ROOT / environment / "bin" / "python")
    launcher = [python, "-m", "hvdx.launch.hvdxrun", *row.launch] if row.launch else []
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", "HVDX_TIMEOUT": "60"}
    command = [*launcher, python, str(Path(__file__).resolve()), "--probe", str(number), keras_name]
    try:
        ended = subprocess.run(command, env=environ, cwd=ROOT, text=True, capture_output=True, timeout=400)
    except subprocess.TimeoutExpired:
        return "hangs"
    found = dict(json.loads(text) for text in re.findall(r"^(?:\[0\] )?FOUND (.*)$", ended.stdout, re.MULTILINE))
    print(f"{row.name} {keras_name}: code {ended.returncode}, {found}", flush=True)
    if not found:
        print(ended.stdout[-2000:] + ended.stderr[-2000:], flush=True)
    refused = found.get("sgd") == "refused"
    return words(found) if refused or ended.returncode == 0 else "fails"


def words(found: dict[str, Any]) -> str:
    """Return a cell's words for what came out of its recipes."""
    first = found.get("sgd", "fails")
    if isinstance(first, str):
        return "refused" if first == "refused" else "fails"
    if isinstance(first, bool):
        return "learns" if first else "does not learn"
    if all(not isinstance(value, str) and not value <= 1 for value in found.values()):
        return "wrong numbers"
    wrong = [RECIPES[name] for name, value in found.items() if not isinstance(value, str) and not value <= 1]
    raising = [RECIPES[name] for name, value in found.items() if isinstance(value, str)]
    parts = ["as one process", *([f"wrong numbers with {', '.join(wrong)}"] if wrong else [])]
    return "; ".join([*parts, *([f"error with {', '.join(raising)}"] if raising else [])])


def main() -> None:
    """Write the table, or run a cell's job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probe", nargs=2, metavar=("ROW", "KERAS"), help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="run and write only the rows whose name has this text")
    options = parser.parse_args()
    if options.probe:
        probe(ROWS[int(options.probe[0])], options.probe[1])
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines() if line.startswith("| ")}
    for number, row in enumerate(ROWS):
        if options.only in row.name:
            rows[row.name] = f"| {row.name} | " + " | ".join(cell(number, name) for name in KERASES) + " |"
    lines = ["| mode | " + " | ".join(name for _, name in KERASES.values()) + " |", "|---" * (1 + len(KERASES)) + "|"]
    lines += [rows[row.name] for row in ROWS if row.name in rows]
    print("\n".join(lines))
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
