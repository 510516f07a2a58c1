"""Where pieces go, what is clipped, averaged and counted: the parameter server's parts that need no process."""

from __future__ import annotations

import numpy as np
import pytest

import hvdx as hvd
from hvdx.distribute.parameter_server.clipping import factors, shared_clip
from hvdx.distribute.parameter_server.clocks import Clocks
from hvdx.distribute.parameter_server.gradients import assembled, cut
from hvdx.distribute.parameter_server.options import Options
from hvdx.distribute.parameter_server.placement import Entry, Placement, keys, place
from hvdx.distribute.parameter_server.reduction import Rows, combined, reduced, rows
from hvdx.distribute.parameter_server.states import State, joined, split

UNEVEN = 1.06
"""The most loaded server's bytes over the mean, at most."""


def resnet50() -> list[Entry]:
    """Return the trainable variables of ResNet-50: many small ones."""
    found = {"conv1/kernel": (7, 7, 3, 64)}
    channels = 64
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for block in range(blocks):
            name = f"stage{stage}/block{block}"
            shapes = [(1, 1, channels, width), (3, 3, width, width), (1, 1, width, 4 * width)]
            if block == 0:
                shapes.append((1, 1, channels, 4 * width))
            for number, shape in enumerate(shapes):
                found[f"{name}/conv{number}/kernel"] = shape
                for part in ("bias", "gamma", "beta"):
                    found[f"{name}/conv{number}/{part}"] = shape[-1:]  # type: ignore[assignment]
            channels = 4 * width
    found |= {"dense/kernel": (2048, 1000), "dense/bias": (1000,)}  # type: ignore[dict-item]
    return [Entry(name, shape, "float32") for name, shape in found.items()]


def vgg16() -> list[Entry]:
    """Return the variables of VGG-16: three quarters of all bytes are in one of them."""
    found: dict[str, tuple[int, ...]] = {}
    channels = 3
    for number, width in enumerate([64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]):
        found |= {f"conv{number}/kernel": (3, 3, channels, width), f"conv{number}/bias": (width,)}
        channels = width
    for number, shape in enumerate([(25088, 4096), (4096, 4096), (4096, 1000)]):
        found |= {f"fc{number}/kernel": shape, f"fc{number}/bias": shape[1:]}
    return [Entry(name, shape, "float32") for name, shape in found.items()]


MODELS = pytest.mark.parametrize("entries", [resnet50(), vgg16()], ids=["resnet50", "vgg16"])


@MODELS
@pytest.mark.parametrize("servers", [1, 2, 3, 5, 8])
def test_servers_keep_equally_many_bytes(entries: list[Entry], servers: int) -> None:
    placed = place(entries, servers)
    assert sum(placed.balance()) == sum(entry.nbytes for entry in entries)
    assert max(placed.balance()) <= UNEVEN * sum(placed.balance()) / servers
    assert place(entries, servers) == placed


@MODELS
@pytest.mark.parametrize("servers", [1, 2, 3, 4, 8])
def test_a_new_server_takes_little_more_than_its_share(entries: list[Entry], servers: int) -> None:
    before, after = place(entries, servers), place(entries, servers + 1)
    new_owners = after.owners()
    moved = sum(
        before.nbytes(piece)
        for piece in before.pieces
        if new_owners[entries[piece.entry].key, piece.start] != piece.server
    )
    share = sum(before.balance()) / (servers + 1)
    # Placed by number modulo servers, 8 shares would move from 8 to 9. ResNet-50 has few pieces a server.
    assert 0.9 * share <= moved <= 2.7 * share


def test_big_variables_are_cut_along_the_first_dimension_and_others_are_not() -> None:
    entries = [Entry("big", (10, 4), "float32"), Entry("scalar", (), "float32"), Entry("wide", (1, 99), "float64"),
               Entry("kept", (10, 4), "bfloat16")]  # fmt: skip
    placed = place(entries, 2, 64, whole=[3])
    assert [(p.entry, p.start, p.stop, p.whole) for p in placed.pieces] == [
        (0, 0, 3, False), (0, 3, 6, False), (0, 6, 10, False), (1, 0, 1, True), (2, 0, 1, True), (3, 0, 10, True),
    ]  # fmt: skip
    assert all(placed.nbytes(piece) <= 64 for piece in placed.pieces if piece.entry == 0)
    with pytest.raises(hvd.HvdxError, match="servers is an integer"):
        place(entries, 0)


def test_keys_leave_out_counters_and_tell_namesakes_apart() -> None:
    names = ["dense/kernel", "dense_1/kernel:0", "out_2/bias", "layer_norm/gamma"]
    assert keys(names) == ["dense/kernel", "dense/kernel#2", "out/bias", "layer_norm/gamma"]
    assert keys(names) == keys([name.replace("_1", "_7").replace("_2", "_9") for name in names])


@pytest.fixture
def placed() -> Placement:
    """Three variables in pieces of two rows on three servers."""
    return place([Entry("a", (7, 2), "float32"), Entry("b", (), "float32"), Entry("c", (5, 2), "float32")], 3, 16)


def test_gradients_are_cut_and_put_together_again(placed: Placement) -> None:
    a, b, c = np.arange(14.0, dtype="float32").reshape(7, 2), np.float32(3) * np.ones(()), rows(
        np.array([4, 1, 4]), np.array([[1, 1], [2, 2], [3, 3]], "float32")
    )  # fmt: skip
    parts = cut(placed, [a, b, c])
    values = []
    for server, (kinds, arrays) in enumerate(parts):
        rest = iter(arrays)
        own = []
        for piece, kind in zip(placed.of_server(server), kinds or (), strict=True):
            shape = piece.shape_of(placed.entries[piece.entry].shape)
            own.append(Rows(next(rest), next(rest)).dense(shape) if kind == "rows" else next(rest))
        values.append(own)
    together = assembled(placed, values, {})
    np.testing.assert_array_equal(together[0], a)
    np.testing.assert_array_equal(together[1], b)
    np.testing.assert_array_equal(together[2], [[0, 0], [2, 2], [0, 0], [0, 0], [4, 4]])


def test_a_state_survives_another_number_of_servers_and_other_pieces(placed: Placement) -> None:
    rng = np.random.default_rng(0)
    values = [rng.normal(size=entry.shape).astype("float32") for entry in placed.entries]
    slots = {(number, label): value + len(label) for number, value in enumerate(values) for label in ("m", "velocity")}
    state = State(values, slots, {"iteration": np.array(7)})
    other = place(placed.entries, 2, 24)
    again = joined(other, split(other, joined(placed, split(placed, state))))
    assert again.updates == 7
    assert again.slots.keys() == slots.keys()
    for value, expected in zip(
        again.parameters + list(again.slots.values()), values + list(slots.values()), strict=True
    ):
        np.testing.assert_array_equal(value, expected)


def test_norms_of_parts_clip_as_the_whole_would(placed: Placement) -> None:
    rng = np.random.default_rng(1)
    gradients = [rng.normal(size=entry.shape) for entry in placed.entries]
    norms = [
        [float((piece.of(gradients[piece.entry]) ** 2).sum()) for piece in placed.of_server(server)]
        for server in range(3)
    ]
    whole = np.sqrt(sum((g**2).sum() for g in gradients))
    for clipnorm, global_clipnorm in ((0.5, None), (None, 0.5)):
        clip = shared_clip(clipnorm, global_clipnorm, placed)
        assert clip is not None
        for server, scales in enumerate(factors(clip, placed, norms)):
            for piece, scale in zip(placed.of_server(server), scales, strict=True):
                norm = np.sqrt((gradients[piece.entry] ** 2).sum()) if clipnorm else whole
                assert scale == pytest.approx(min(1.0, 0.5 / norm))
    assert shared_clip(0.5, None, place(placed.entries, 3)) is None  # nothing is cut: each server clips by itself
    infinite = factors(shared_clip(None, 0.5, placed), placed, [[np.inf] * len(own) for own in norms])  # type: ignore[arg-type]
    assert all(np.isnan(scale) for own in infinite for scale in own)


def test_the_mean_is_that_of_the_dense_gradients_in_the_order_of_workers() -> None:
    one, two = rows(np.array([3, 0, 3]), np.ones((3, 2), "float32")), rows(np.array([3]), np.full((1, 2), 4, "float32"))
    np.testing.assert_array_equal(one.indices, [0, 3])
    found = combined([one, two], (5, 2), "w", [0, 1])
    np.testing.assert_array_equal(found.dense((5, 2))[:, 0], [0.5, 0, 0, 3, 0])
    mixed = combined([one.dense((5, 2)), two], (5, 2), "w", [0, 1])
    np.testing.assert_array_equal(mixed, found.dense((5, 2)))
    with pytest.raises(hvd.GradientError, match=r"w, none on worker\(s\) 4"):
        combined([one, None], (5, 2), "w", [2, 4])
    halves = [np.full(2, 60000, "float16")] * 3
    np.testing.assert_allclose(reduced(halves, hvd.Average).astype("float32"), 60000)
    np.testing.assert_array_equal(reduced([np.array([-7, 7]), np.array([0, 0])], hvd.Average), [-3, 3])


def test_clocks_count_duplicates_staleness_and_who_is_gone() -> None:
    clocks = Clocks.of(3)
    for worker, clock in ((0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)):
        assert clocks.accept(worker, clock, version=clock, now=clock + worker)
    assert not clocks.accept(0, 2, 2, 2)
    assert (clocks.slowest(), clocks.lead(0), clocks.behind(2)) == (1, 2, [1])
    with pytest.raises(ValueError, match="number 3 has not come"):
        clocks.accept(0, 4, 2, 2)
    assert clocks.leave(1, "killed")
    assert not clocks.leave(1, "finished")
    assert (clocks.slowest(), clocks.lead(0), clocks.live()) == (2, 1, [0, 2])
    stats = clocks.stats()
    assert (stats["pushes"], stats["duplicates"], stats["greatest_staleness"], stats["greatest_lag"]) == (6, 1, 2, 2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"updates": "sync"}, "synchronous, asynchronous. Received: 'sync'"),
        ({"updates": "synchronous", "staleness": 1}, "options of the asynchronous mode"),
        ({"staleness": -1}, "staleness is an integer of 0 or more. Received: -1"),
        ({"gather": 0}, "gather is an integer of 1 or more. Received: 0"),
        ({"gather": 3}, "gather=3 gradients, and there are 2 worker"),
        ({"piece_bytes": True}, "piece_bytes is an integer"),
    ],
)
def test_options_without_a_meaning_are_refused(changed: dict[str, object], message: str) -> None:
    given: dict[str, object] = {
        "updates": "asynchronous", "workers": 2, "servers": 2, "staleness": None, "gather": 1, "piece_bytes": 64,
        **changed,
    }  # fmt: skip
    with pytest.raises(hvd.ConfigurationError, match=message):
        Options(**given)  # type: ignore[arg-type]
