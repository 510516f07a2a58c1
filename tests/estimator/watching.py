"""What tests of Estimators on several ranks look at: losses and weights of a training, in a folder that rank 0 has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1


class Watch(v1.train.SessionRunHook):  # type: ignore[name-defined]
    """Keeps the loss of every step and the weights at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.weights: dict[str, np.ndarray] = {}

    def begin(self) -> None:
        self._variables = {variable.name: variable for variable in v1.trainable_variables()}

    def before_run(self, run_context: Any) -> Any:
        return v1.train.SessionRunArgs(v1.get_collection(v1.GraphKeys.LOSSES)[-1])

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.losses.append(float(run_values.results))

    def end(self, session: Any) -> None:
        self.weights = session.run(self._variables)

    def check_same_as(self, expected: dict[str, np.ndarray], world: Any) -> None:
        """Assert that the weights are those of another training, and the same bits on all ranks."""
        assert set(self.weights) == set(expected) != set()
        for name, value in expected.items():
            np.testing.assert_allclose(self.weights[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
        everybody = world.allgather_object([value.tobytes() for value in self.weights.values()])
        assert all(other == everybody[0] for other in everybody)


def shared_folder(world: Any, tmp_path: Path) -> Path:
    """Return the directory of rank 0, on every rank; it does not exist yet, and pytest of rank 0 removes it."""
    return Path(world.allgather_object(str(tmp_path / "model"))[0])
