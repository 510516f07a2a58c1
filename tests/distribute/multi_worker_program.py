"""Trains under `strategy("multi_worker")` in two processes: `program.py COMMUNICATOR`; who they are it is not told."""

from __future__ import annotations

import json
import os
import sys

import numpy as np

import hvdx as hvd
from hvdx.distribute import strategy
from tests.conftest import installed_kerases, load_keras
from tests.training.models import BATCH, dense, linear_data
from tests.training.support import arrays, union


def main() -> None:
    """Train with every Keras that the strategy supports, print how far one process is from it."""
    before = os.environ.get("TF_CONFIG")
    made = strategy("multi_worker", communicator=sys.argv[1])
    assert os.environ.get("TF_CONFIG") == before
    assert (made.num_replicas_in_sync, hvd.size()) == (2, 2)
    assert made.extended.should_checkpoint == (hvd.rank() == 0)
    x, y = union(linear_data(2))
    found = {}
    for name in installed_kerases():
        keras = load_keras(name)
        try:
            weights = []
            for scope in (made.scope(), None):
                keras.utils.set_random_seed(3)
                if scope is None:
                    model = dense(keras)
                    model.compile(keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05), loss="mse")
                else:
                    with scope:
                        model = dense(keras)
                        model.compile(keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05), loss="mse")
                model.fit(x, y, 2 * BATCH, epochs=1, verbose=0, shuffle=False)
                weights.append(arrays(model.weights))
            found[name] = float(np.max([np.abs(a - b).max() for a, b in zip(*weights, strict=True)]))
        except hvd.UnsupportedError as error:
            found[name] = str(error)
    print(made.describe())
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
