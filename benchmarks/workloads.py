"""What is reduced: tensors of one size, and the gradient sets of models.

The shapes come from models that are really built. That takes TensorFlow, which the driver does not load: it asks a
process of its own for them (`python -m benchmarks.workloads NAME...`).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHAPES_SECONDS = 300
SIZES = tuple(4 * 4**step for step in range(14))
"""Bytes of the single tensors: 4 B to 256 MB."""
GRADIENT_SETS = ("ResNet-50", "VGG-16", "MobileNetV2", "Transformer", "small CNN")

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Workload:
    """Tensors of 32-bit floats that are reduced together."""

    name: str
    shapes: Shapes

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return 4 * sum(math.prod(shape) for shape in self.shapes)


def size_name(count: int) -> str:
    """Return bytes in words: 4 B, 64 KB, 256 MB (of 1024)."""
    for unit in ("B", "KB", "MB"):
        if count < 1024 or unit == "MB":
            return f"{count:g} {unit}"
        count //= 1024
    raise AssertionError("unreachable")


def sizes() -> list[Workload]:
    """Return one tensor of each size."""
    return [Workload(size_name(count), ((count // 4,),)) for count in SIZES]


def gradient_sets(names: Sequence[str]) -> list[Workload]:
    """Return the gradients of models, which a process of its own builds.

    Raises:
        RuntimeError: it could not.
    """
    if not names:
        return []
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    environ.pop("TF_USE_LEGACY_KERAS", None)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.workloads", *names],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=SHAPES_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the models cannot be built by {sys.executable}: {done.stderr.strip()[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return [Workload(name, tuple(map(tuple, found[name]))) for name in names]


def model_shapes(name: str) -> list[tuple[int, ...]]:
    """Return the shapes of a model's gradients."""
    import keras

    if name == "small CNN":
        variables = small_cnn(keras).trainable_variables
    elif name == "Transformer":
        variables = _transformer(keras).trainable_variables
    else:
        build = {"ResNet-50": "ResNet50", "VGG-16": "VGG16", "MobileNetV2": "MobileNetV2"}[name]
        model = getattr(keras.applications, build)(weights=None)
        normalized = any(isinstance(layer, keras.layers.BatchNormalization) for layer in model.layers)
        # Keras gives ResNet's convolutions biases, which the normalization after them cancels; ResNet-50 has none.
        variables = [
            variable
            for layer in model.layers
            for variable in layer.trainable_variables
            if not (normalized and isinstance(layer, keras.layers.Conv2D) and len(variable.shape) == 1)
        ]
    return [tuple(int(n) for n in variable.shape) for variable in variables]


def small_cnn(keras: Any) -> Any:
    """Return a network for images of 8 x 8 with 8 gradients, of the Keras that is given."""
    layers = keras.layers
    return keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(84, activation="relu"),
        layers.Dense(10, activation="softmax"),
    ])  # fmt: skip


def _transformer(keras: Any, depth: int = 6, width: int = 512, heads: int = 8, inner: int = 2048) -> Any:
    """Return the encoder of "Attention Is All You Need" (base), without its embedding, whose gradient is sparse."""
    layers = keras.layers
    inputs = state = keras.Input((64, width))
    for _ in range(depth):
        attended = layers.MultiHeadAttention(heads, width // heads)(state, state)
        state = layers.LayerNormalization()(layers.Add()([state, attended]))
        changed = layers.Dense(width)(layers.Dense(inner, activation="relu")(state))
        state = layers.LayerNormalization()(layers.Add()([state, changed]))
    return keras.Model(inputs, state)


if __name__ == "__main__":
    print(json.dumps({name: model_shapes(name) for name in sys.argv[1:]}))
