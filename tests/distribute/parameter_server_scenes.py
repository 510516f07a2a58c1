"""What workers do in the tests of the parameter server: each scene is played by all workers of a job."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx.distribute.parameter_server import ParameterClient, ParameterServerOptimizer
from hvdx.errors import GradientError, HvdxError, MismatchError, StallError
from tests.distribute import parameter_server_recipes as recipes
from tests.distribute.parameter_server_workers import Worker
from tests.training.support import FAMILIES, arrays

Scene = Callable[[Worker], Any]
FAMILY = FAMILIES[0]
RATE = 0.125
"""With gradients of whole numbers every sum is exact, so that a lost or doubled update shows."""


def scene(name: str) -> Scene:
    """Return a scene by its name."""
    found: Scene = globals()[f"play_{name}"]
    return found


def variables(rows: int = 6) -> list[Any]:
    """Return a matrix and a vector of zeros."""
    make = FAMILY.keras.Variable if FAMILY.keras_name == "keras3" else tf.Variable
    return [make(np.zeros((rows, 2), "float32"), name="matrix"), make(np.zeros(3, "float32"), name="vector")]


def gradients(value: float) -> list[np.ndarray]:
    """Return gradients that are all of one value."""
    return [np.full((6, 2), value, "float32"), np.full(3, value, "float32")]


def plain(worker: Worker, group: str, **options: Any) -> ParameterClient:
    """Return a client of which matrix and vector are registered, with SGD."""
    client = worker.client(group, piece_bytes=16, **options)
    client.register(variables(), FAMILY.optimizers.SGD(RATE))
    return client


def refused(kind: type[HvdxError], function: Callable[[], Any]) -> str:
    """Return the message of the error that the function must raise."""
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


# -- synchronous -------------------------------------------------------------------------------------------------------


def play_recipes(worker: Worker) -> dict[str, str]:
    """A few recipes, each to its own outcome."""
    return {
        recipes.name_of(recipe, family): _outcome(lambda r=recipe, f=family: recipes.train(worker, r, f))
        for recipe, family in recipes.cases(few=True)
    }


def play_optimizers(worker: Worker) -> dict[str, str]:
    """All optimizer classes, each to its own outcome."""
    return {
        f"{name}-{family}": _outcome(lambda n=name, f=family: recipes.update(worker, f, n))
        for family in FAMILIES
        for name in recipes.classes(family)
    }


def _outcome(play: Callable[[], None]) -> str:
    try:
        play()
    except Exception:
        return traceback.format_exc()
    return ""


def play_reductions(worker: Worker) -> None:
    """`push_pull` in all operations, several dtypes, and different calls refused."""
    client = worker.client("reductions")
    own = [np.array([1, 2], np.int32) + worker.index, np.full(3, 2.0 - worker.index, "float16")]
    expected = {"sum": ([3, 5], 3.0), "average": ([1, 2], 1.5), "max": ([2, 3], 2.0), "product": ([2, 6], 2.0)}
    for op, (integers, number) in expected.items():
        results = client.push_pull(own, op, op)
        np.testing.assert_array_equal(results[0], integers)
        np.testing.assert_array_equal(results[1], np.full(3, number, "float16"))
        assert [result.dtype for result in results] == [array.dtype for array in own]
    message = refused(MismatchError, lambda: client.push_pull([np.zeros(2 + worker.index)], "sum", "unequal"))
    assert "float64[2]'] on worker 0" in message and "float64[3]'] on worker 1" in message, message  # noqa: PT018
    client.close(done=False)


def play_rows(worker: Worker) -> None:
    """Of sparse gradients the touched rows travel, and of a pull the rows that are asked for."""
    client = plain(worker, "rows")
    slices = tf.IndexedSlices(
        tf.ones([3, 2]), tf.constant([worker.index, 5, 5], tf.int64), tf.constant([6, 2], tf.int64)
    )
    client.push([slices, None])
    [matrix, vector] = client.pull({0: [5, 0, 3]})
    np.testing.assert_array_equal(matrix, [[-2 * RATE] * 2, [-0.5 * RATE] * 2, [0, 0]])
    np.testing.assert_array_equal(vector, np.zeros(3))
    np.testing.assert_array_equal(client.pull()[0][:, 0] / -RATE, [0.5, 0.5, 0, 0, 0, 2])
    client.close(done=False)


def play_refusals(worker: Worker) -> None:
    """Contradictions between the workers end with the same sentence on both, at once."""
    client = worker.client("unequal shapes")
    message = refused(MismatchError, lambda: client.register(variables(6 + worker.index), FAMILY.optimizers.SGD(RATE)))
    assert "matrix" in message, message
    assert "worker 0" in message and "worker 1" in message, message  # noqa: PT018
    client = worker.client("unequal optimizers")
    momentum = 0.5 + worker.index / 4
    message = refused(MismatchError, lambda: client.register(variables(), FAMILY.optimizers.SGD(RATE, momentum)))
    assert "momentum=0.5" in message and "momentum=0.75" in message, message  # noqa: PT018
    client = plain(worker, "unequal gradients")
    message = refused(GradientError, lambda: client.push([gradients(1.0)[0], None if worker.index else np.ones(3)]))
    assert "vector" in message and "worker(s) 1" in message, message  # noqa: PT018
    client = plain(worker, "unequal steps")
    client.push(gradients(1.0))
    if worker.index:
        client.close(done=False)
    else:
        assert "worker 1 finished before" in refused(MismatchError, lambda: client.push(gradients(1.0)))


def play_strangers(worker: Worker) -> None:
    """Who does not know the token is not answered, within a finite time."""
    stranger = ParameterClient(worker.addresses, worker.index, worker.count, "of another job", group="strange")
    os.environ["HVDX_TIMEOUT"], before = "2", os.environ["HVDX_TIMEOUT"]
    try:
        assert "Parameter server 0" in refused(StallError, stranger.stats)
    finally:
        os.environ["HVDX_TIMEOUT"] = before
        stranger._link.close()


# -- asynchronous ------------------------------------------------------------------------------------------------------

PUSHES = 20


def play_counted(worker: Worker) -> None:
    """No update is lost, none is doubled, and nobody leads by more than the bound."""
    bound = 2
    client = plain(worker, "counted", updates="asynchronous", staleness=bound)
    for step in range(PUSHES):
        client.step(gradients(1.0 + worker.index))
        if worker.index and step < PUSHES // 2:
            time.sleep(0.02)
    client.barrier()
    for value in client.pull():
        np.testing.assert_array_equal(value, np.full(value.shape, -RATE * PUSHES * 3))
    for stats in client.stats():
        assert stats["pushes"] == stats["updates"] == stats["gradients_applied"] == 2 * PUSHES
        assert stats["duplicates"] == stats["dropped"] == 0
        assert 1 <= stats["greatest_staleness"] <= bound, stats
    client.close(done=False)


def play_again(worker: Worker) -> None:
    """A push that comes again after a broken connection is not applied again; one that is not finite, not at all."""
    client = plain(worker, "again", updates="asynchronous")
    request = client._link.request
    kept: list[Any] = []

    def twice(server: int, operation: str, header: dict[str, Any], parts: Any = ()) -> Any:
        first = request(server, operation, header, parts)
        if operation == "push":
            kept.append(request(server, operation, header, parts))
        return first

    client._link.request = twice  # type: ignore[method-assign]
    client.push(gradients(1.0))
    client._link.wait(kept)
    client._link.request = request  # type: ignore[method-assign]
    assert client.all_finite(worker.index == 0) is (worker.index == 0)
    if worker.index == 0:
        client.push(gradients(1.0))
    client.barrier()
    np.testing.assert_array_equal(client.pull()[1], np.full(3, -3 * RATE))
    for stats in client.stats():
        assert (stats["pushes"], stats["duplicates"], stats["dropped"], stats["updates"]) == (4, 2, 1, 3), stats
    client.close(done=False)


def play_lost(worker: Worker) -> None:
    """A push that never arrives, since the connection broke, is sent again after the server has been asked about it."""
    client = plain(worker, "lost")
    send = client._link._send

    def lose(server: int, frames: list[Any]) -> None:
        client._link._send = send  # type: ignore[method-assign]

    if worker.index:
        client._link._send = lose  # type: ignore[method-assign]
    client.push(gradients(1.0))
    np.testing.assert_array_equal(client.pull()[1], np.full(3, -RATE))
    assert {(stats["updates"], stats["duplicates"]) for stats in client.stats()} == {(1, 0)}
    client.close(done=False)


def play_continued(worker: Worker) -> dict[str, str]:
    """An optimizer that has trained before brings its slots to the servers."""
    return {f"continued-{family}": _outcome(lambda f=family: recipes.go_on(worker, f)) for family in FAMILIES}


def play_gathered(worker: Worker) -> None:
    """With `gather` the average of some is applied; what remains at the end is not lost."""
    client = plain(worker, "gathered", updates="asynchronous", gather=2)
    for _ in range(5 + worker.index):
        client.push(gradients(2.0))
    client.barrier()
    assert {stats["updates"] for stats in client.stats()} == {5}
    client.barrier()
    if worker.index == 0:
        client.state()
    client.barrier()
    np.testing.assert_array_equal(client.pull()[1], np.full(3, -6 * 2.0 * RATE))
    assert {(stats["updates"], stats["gradients_applied"]) for stats in client.stats()} == {(6, 11)}
    client.close(done=False)


def play_converging(worker: Worker) -> dict[str, str]:
    """`fit` in asynchronous mode with every Keras."""
    return {f"converging-{family}": _outcome(lambda f=family: _converge(worker, f)) for family in FAMILIES}


def _converge(worker: Worker, family: Any) -> None:
    keras = family.keras
    keras.utils.set_random_seed(worker.index)
    client = worker.client(f"converging-{family}", updates="asynchronous", staleness=4)
    model = keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)]
    )
    optimizer = ParameterServerOptimizer(family.optimizers.Adam(0.01, global_clipnorm=5.0), client)
    model.compile(optimizer, "mse")
    x = np.random.default_rng(worker.index).normal(size=(256, 4)).astype("float32")
    y = np.abs(x).sum(1, keepdims=True)
    losses = model.fit(x, y, 16, epochs=8, verbose=0).history["loss"]
    client.barrier()
    for variable, value in zip(model.trainable_variables, client.pull(), strict=True):
        variable.assign(value)
    assert model.evaluate(x, y, verbose=0) < 0.2 * losses[0], losses
    for stats in client.stats():
        assert stats["updates"] == stats["pushes"] == 2 * 8 * 16
        assert stats["greatest_staleness"] <= 4
    client.close(done=False)


# -- faults ------------------------------------------------------------------------------------------------------------


def play_killed(worker: Worker) -> None:
    """Worker 1 dies; worker 0, which it holds back at first, finishes."""
    client = plain(worker, "killed", updates="asynchronous", staleness=1, gather=2)
    for step in range(8):
        if worker.index and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        client.push(gradients(1.0))
    for stats in client.stats():
        assert stats["workers"][1]["gone"].startswith("no sign of life"), stats
        assert stats["gradients_applied"] == 8 + stats["workers"][1]["clock"], stats
    client.close(done=False)


def play_until_saved(worker: Worker) -> None:
    """Three updates, which are saved; then updates until a server is gone, which both workers say within the limit."""
    client, optimizer, held = _momentum(worker)
    for step in range(3):
        _apply(optimizer, held, step, worker)
    client.save(worker.folder / "state.npz")
    client.barrier()
    (worker.folder / f"saved-{worker.index}").touch()
    start = time.monotonic()

    def on() -> None:
        for _ in range(3000):
            client.push(gradients(0.0))

    message = refused(StallError, on)
    assert "Parameter server 1" in message and "is gone" in message, message  # noqa: PT018
    assert time.monotonic() - start < 30


def play_from_saved(worker: Worker) -> None:
    """Three more updates, from the saved state: those of one process that made all six."""
    client, optimizer, held = _momentum(worker)
    optimizer.hvdx_restore(worker.folder / "state.npz")
    for step in range(3, 6):
        _apply(optimizer, held, step, worker)
    optimizer.finalize_variable_values(held)
    reference, own = FAMILY.optimizers.Adam(RATE, use_ema=True), variables()
    for step in range(6):
        _apply(reference, own, step, None)
    reference.finalize_variable_values(own)
    for value, expected in zip(arrays(held), arrays(own), strict=True):
        np.testing.assert_allclose(value, expected, 1e-5, 1e-6)
    assert int(optimizer.iterations) == 6
    client.close(done=False)


def _momentum(worker: Worker) -> tuple[ParameterClient, Any, list[Any]]:
    client = worker.client("saved", piece_bytes=16 if len(worker.addresses) == 2 else 32)
    held = variables()
    optimizer = ParameterServerOptimizer(FAMILY.optimizers.Adam(RATE, use_ema=True), client)
    optimizer.build(held)
    return client, optimizer, held


def _apply(optimizer: Any, held: list[Any], step: int, worker: Worker | None) -> None:
    parts = np.random.default_rng(step).normal(size=(2, 15)).astype("float32")
    part = parts.mean(0, dtype="float32") if worker is None else parts[worker.index]
    optimizer.apply_gradients(zip([tf.constant(part[:12].reshape(6, 2)), tf.constant(part[12:])], held, strict=True))
