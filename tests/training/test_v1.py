"""v1 programs: graphs, sessions and `tf.compat.v1.train` optimizers, several ranks against one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx.graph import operations_behind
from hvdx.training.xla import is_distributed

v1 = tf.compat.v1
pytestmark = pytest.mark.np(2, 3)

STEPS, ROWS, WIDTH, WORDS = 4, 12, 3, 7
X = np.random.default_rng(0).normal(size=(STEPS, ROWS, WIDTH)).astype("float32")
WORD = np.random.default_rng(1).integers(0, WORDS, size=(STEPS, ROWS))
Y = X.sum(-1, keepdims=True) + WORD[..., None].astype("float32")
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "adam": lambda: v1.train.AdamOptimizer(0.1),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.1),
    "rmsprop": lambda: v1.train.RMSPropOptimizer(0.1, momentum=0.5),
    "ftrl": lambda: v1.train.FtrlOptimizer(0.1),
}
Minimize = Callable[[Any, Any, Any], Any]


def minimize(optimizer: Any, loss: Any, step: Any) -> Any:
    return optimizer.minimize(loss, global_step=step)


def clip_then_apply(optimizer: Any, loss: Any, step: Any) -> Any:
    gradients, variables = zip(*optimizer.compute_gradients(loss), strict=True)
    # dense first: TensorFlow counts a word that occurs twice in a batch as two rows of the norm
    clipped, _ = tf.clip_by_global_norm([tf.convert_to_tensor(g) for g in gradients], 0.01)
    return optimizer.apply_gradients(list(zip(clipped, variables, strict=True)), global_step=step)


def train(
    optimizer: Any,
    batches: list[tuple[np.ndarray, ...]],
    how: Minimize = minimize,
    seed: int = 0,
    resource: bool = True,
) -> tuple[list[np.ndarray], int, list[float]]:
    """Train a linear model with an embedding; return weights, global step and losses."""
    with tf.Graph().as_default():
        x, word, y = (
            v1.placeholder(tf.float32, [None, WIDTH]),
            v1.placeholder(tf.int64, [None]),
            v1.placeholder(tf.float32),
        )
        with v1.variable_scope("model", use_resource=resource):
            initial = v1.random_normal_initializer(seed=seed)
            kernel = v1.get_variable("kernel", [WIDTH, 1], initializer=initial)
            table = v1.get_variable("table", [WORDS, 1], initializer=initial)
        loss = tf.reduce_mean(tf.square(tf.matmul(x, kernel) + tf.nn.embedding_lookup(table, word) - y))
        step = v1.train.get_or_create_global_step()
        update = how(optimizer, loss, step)
        start = hvd.broadcast_global_variables(0)
        losses = []
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            session.run(start)
            for batch in batches:
                losses.append(session.run([update, loss], dict(zip((x, word, y), batch, strict=True)))[1])
            return session.run([kernel, table]), int(session.run(step)), losses


def batches(rank: int, size: int) -> list[tuple[np.ndarray, ...]]:
    return [(X[s, rank::size], WORD[s, rank::size], Y[s, rank::size]) for s in range(STEPS)]


@pytest.mark.parametrize("resource", [True, False], ids=["resource", "ref"])
@pytest.mark.parametrize("how", [minimize, clip_then_apply])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_one_process(world: Any, name: str, how: Minimize, resource: bool) -> None:
    """The gradient of an embedding is sparse here, so several exchanges make one update."""
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name]())
    assert type(optimizer) is not type(OPTIMIZERS[name]())
    assert isinstance(optimizer, type(OPTIMIZERS[name]()))
    weights, step, _ = train(optimizer, batches(world.rank(), world.size()), how, world.rank(), resource)
    expected, _, _ = train(OPTIMIZERS[name](), batches(0, 1), how, 0, resource)
    assert step == STEPS
    for value, wanted in zip(weights, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=2e-4, atol=2e-5)
    everybody = world.allgather_object([value.tobytes() for value in weights])
    assert all(other == everybody[0] for other in everybody)


@pytest.mark.parametrize("how", [minimize, clip_then_apply])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_accumulation(world: Any, name: str, how: Minimize) -> None:
    """Two passes of half a batch are one update; what one process makes of the whole batch."""
    halves = []
    for batch in batches(world.rank(), world.size()):
        halves += [tuple(a[: len(a) // 2] for a in batch), tuple(a[len(a) // 2 :] for a in batch)]
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name](), backward_passes_per_step=2)
    weights, step, _ = train(optimizer, halves, how, world.rank())
    expected, _, _ = train(OPTIMIZERS[name](), batches(0, 1), how, 0)
    assert step == STEPS
    for value, wanted in zip(weights, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=2e-4, atol=2e-5)


def each_its_own(optimizers: Any, loss: Any, step: Any) -> Any:
    """One optimizer for the embedding and one for the kernel, neither waiting for the other."""
    kernel, table = v1.trainable_variables()
    first, second = optimizers
    return tf.group(first.minimize(loss, var_list=[table]), second.minimize(loss, step, var_list=[kernel]))


@pytest.mark.parametrize("passes", [1, 2])
def test_two_optimizers_of_one_loss(world: Any, passes: int) -> None:
    """Their reductions come in the same order on every rank, although nothing in the graph asks for one."""
    mine = [tuple(np.repeat(a, passes, 0) for a in batch) for batch in batches(world.rank(), world.size())] * 10
    halves = [tuple(a[half::passes] for a in batch) for batch in mine for half in range(passes)]
    both = [hvd.DistributedOptimizer(OPTIMIZERS[name](), backward_passes_per_step=passes) for name in ("sgd", "adam")]
    weights, step, _ = train(both, halves, each_its_own, world.rank())
    expected, _, _ = train([OPTIMIZERS["sgd"](), OPTIMIZERS["adam"]()], batches(0, 1) * 10, each_its_own, 0)
    assert step == 10 * STEPS
    for value, wanted in zip(weights, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-3, atol=1e-4)


def test_reductions_are_counted(world: Any) -> None:
    """One exchange of gradients an update, not one a pass."""
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](), backward_passes_per_step=4)
    before = getattr(getattr(hvd.world.communicator(), "_agreement", None), "sequence", 0)
    kernel = [(np.ones((1, WIDTH), "float32"), np.zeros(1, int), np.ones((1, 1), "float32"))] * 8
    with_dense = lambda opt, loss, step: opt.minimize(loss, global_step=step, var_list=v1.trainable_variables()[:1])  # noqa: E731
    _, step, _ = train(optimizer, kernel, with_dense)
    after = getattr(getattr(hvd.world.communicator(), "_agreement", None), "sequence", 0)
    assert step == 2
    if world.size() > 1:
        assert after - before == 3  # the broadcast and two updates


def test_wrap_once_and_in_place(world: Any) -> None:
    optimizer = OPTIMIZERS["adam"]()
    wrapped = hvd.DistributedOptimizer(optimizer)
    assert wrapped is optimizer
    assert is_distributed(wrapped)
    assert (type(wrapped).__name__, wrapped.get_name()) == ("AdamOptimizer", "Adam")
    with pytest.raises(hvd.OptimizerError, match="already"):
        hvd.DistributedOptimizer(wrapped)


def test_eager(world: Any) -> None:
    variable = tf.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"]())
    optimizer.minimize(lambda: variable * float(world.rank() + 1))
    mean = (world.size() + 1) / 2
    np.testing.assert_allclose(variable.numpy(), [1.0 - 0.1 * mean], rtol=1e-6)


def test_no_global_variables_in_eager_code(world: Any) -> None:
    with pytest.raises(hvd.UnsupportedError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


def test_root_out_of_range(world: Any) -> None:
    with tf.Graph().as_default(), pytest.raises(hvd.ConfigurationError, match="root rank"):
        hvd.broadcast_global_variables(world.size())


def test_a_missing_gradient_names_variable_and_rank(world: Any) -> None:
    """In a graph the error comes out of the session, in TensorFlow's clothes."""
    if world.size() == 1:
        pytest.skip("one rank lacks nothing that another has")
    with tf.Graph().as_default():
        used, other = v1.get_variable("used", [2]), v1.get_variable("other", [2])
        loss = tf.reduce_sum(used) + (tf.reduce_sum(other) if world.rank() == 0 else 0.0)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"]())
        update = optimizer.minimize(loss, var_list=[used, other])
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            with pytest.raises(tf.errors.OpError, match=r"GradientError: (?s:.)*other:0: no gradient on ranks? 1"):
                session.run(update)


def two_losses(distributed: bool, rank: int) -> tuple[list[Any], Any, Any, Any]:
    """Two models with optimizers of their own on the same inputs, and averages of their losses."""
    x, y = v1.placeholder(tf.float32, [None, WIDTH]), v1.placeholder(tf.float32, [None, 1])
    losses, updates = [], []
    for name in ("a", "b"):
        kernel = v1.get_variable(name, [WIDTH, 1], initializer=v1.random_normal_initializer(seed=rank))
        losses.append(tf.reduce_mean(tf.square(tf.matmul(x, kernel) - y)))
        optimizer = v1.train.AdamOptimizer(0.1)
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer)
        updates.append(optimizer.minimize(losses[-1], var_list=[kernel]))
    means = [hvd.allreduce(loss) for loss in losses] if distributed else losses
    return [updates, means], x, y, v1.trainable_variables()


def test_what_one_step_runs_meets_in_one_order(world: Any) -> None:
    """Four exchanges that do not depend on each other, in one call of the session, again and again."""
    with tf.Graph().as_default(), v1.Session() as session:
        fetches, x, y, variables = two_losses(True, world.rank())
        start = hvd.broadcast_global_variables(0)
        session.run(v1.global_variables_initializer())
        session.run(start)
        for step in range(25):
            b = batches(world.rank(), world.size())[step % STEPS]
            _, means = session.run(fetches, {x: b[0], y: b[2]})
            assert len({str(other) for other in world.allgather_object([float(mean) for mean in means])}) == 1
        found = session.run(variables)
    with tf.Graph().as_default(), v1.Session() as session:
        fetches, x, y, variables = two_losses(False, 0)
        session.run(v1.global_variables_initializer())
        for step in range(25):
            b = batches(0, 1)[step % STEPS]
            session.run(fetches, {x: b[0], y: b[2]})
        expected = session.run(variables)
    for value, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=2e-4, atol=2e-5)


def test_a_session_is_asked_for_nothing_more(world: Any) -> None:
    """The average of a number that is fed by itself runs neither the update before it nor the broadcast."""
    with tf.Graph().as_default(), v1.Session() as session:
        start = hvd.broadcast_global_variables(0)
        _, _, _, variables = two_losses(True, 0)
        number = v1.placeholder(tf.float32, [])
        average = hvd.allreduce(number)
        again = hvd.broadcast_global_variables(0)
        session.run(v1.global_variables_initializer())
        before = session.run(variables)
        assert session.run(average, {number: float(world.rank())}) == (world.size() - 1) / 2
        session.run([start])
        session.run(again)
        assert all((a == b).all() for a, b in zip(before, session.run(variables), strict=True))


def test_what_needs_more_comes_after_what_needs_less(world: Any) -> None:
    with tf.Graph().as_default():
        x, y = v1.placeholder(tf.float32, [2]), v1.placeholder(tf.float32, [2])
        first, second = hvd.allreduce(x), hvd.allreduce(x + y)
        if world.size() > 1:
            ancestors = {operation.name for operation in operations_behind([second])}
            assert first.op.inputs[0].op.name in ancestors or first.op.name in ancestors
        with v1.Session() as session:
            values = session.run([second, first], {x: [1.0, 2.0], y: [3.0, float(world.rank())]})
    np.testing.assert_allclose(values[1], [1.0, 2.0])
    np.testing.assert_allclose(values[0], [4.0, 2.0 + (world.size() - 1) / 2])


def late(tensor: Any, seconds: float) -> Any:
    """Return the tensor after a while."""

    def wait(value: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return value

    result = tf.numpy_function(wait, [tensor], tensor.dtype)
    result.set_shape(tensor.shape)
    return result


def test_what_nothing_ties_meets_at_run_time(world: Any) -> None:
    """Each rank comes to another collective first, of inputs that have nothing to do with each other."""
    with tf.Graph().as_default():
        inputs = [v1.placeholder(tf.float32, [2 + index]) for index in range(2)]
        results = [
            hvd.allreduce(late(value, 0.1 * float(world.rank() % 2 == index))) for index, value in enumerate(inputs)
        ]
        fed = {value: np.full(value.shape, world.rank(), "float32") for value in inputs}
        with v1.Session(config=v1.ConfigProto(inter_op_parallelism_threads=2)) as session:
            for _ in range(5):
                for value in session.run(results, fed):
                    np.testing.assert_allclose(value, (world.size() - 1) / 2)


def test_the_later_may_need_less(world: Any) -> None:
    with tf.Graph().as_default():
        x, y = v1.placeholder(tf.float32, [2]), v1.placeholder(tf.float32, [2])
        both = hvd.allreduce(late(x + y, 0.1 * (world.rank() % 2)))
        one = hvd.allreduce(late(x, 0.1 * ((world.rank() + 1) % 2)))
        with v1.Session(config=v1.ConfigProto(inter_op_parallelism_threads=2)) as session:
            for _ in range(3):
                values = session.run([both, one], {x: [1.0, 2.0], y: [3.0, float(world.rank())]})
                np.testing.assert_allclose(values[0], [4.0, 2.0 + (world.size() - 1) / 2])
                np.testing.assert_allclose(values[1], [1.0, 2.0])


def test_accumulation_beside_a_plain_collective(world: Any) -> None:
    """The exchange lies inside a tf.cond in some of the passes, the mean of the losses is asked for in all of them."""
    with tf.Graph().as_default(), v1.Session(config=v1.ConfigProto(inter_op_parallelism_threads=2)) as session:
        x = v1.placeholder(tf.float32, [None, WIDTH])
        kernel = v1.get_variable("kernel", [WIDTH, 1], initializer=v1.zeros_initializer())
        slow = late(x, 0.05 * (world.rank() % 2))
        loss = tf.reduce_mean(tf.matmul(slow, kernel)) + tf.reduce_mean(x)
        update = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](), backward_passes_per_step=2).minimize(loss)
        mean = hvd.allreduce(late(tf.reduce_mean(x), 0.05 * ((world.rank() + 1) % 2)))
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        for _ in range(6):
            _, value = session.run([update, mean], {x: np.full((2, WIDTH), world.rank(), "float32")})
            assert value == (world.size() - 1) / 2
        np.testing.assert_allclose(session.run(kernel), -0.1 * 3 * (world.size() - 1) / 2, rtol=1e-5)
