"""`hvd.load_model`: training goes on as if it had not been interrupted."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hvdx as hvd
from hvdx.logs import log
from hvdx.training.load import _switch_auto_off
from hvdx.training.xla import is_distributed
from tests.conftest import installed_kerases, load_keras
from tests.training.models import BATCH, dense, linear_data
from tests.training.recipes import fit
from tests.training.support import (
    FAMILIES,
    LEGACY,
    Family,
    arrays,
    assert_equal_everywhere,
    assert_same_bits,
    every_keras,
    optimizer_arrays,
    part,
    policy,
    together,
    union,
)

pytestmark = pytest.mark.np(2)


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that all ranks see."""
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp(prefix="hvdx-load-") if hvd.rank() == 0 else None))
    try:
        yield folder
    finally:
        hvd.barrier()
        if hvd.rank() == 0:
            shutil.rmtree(folder)


def _formats(family: Family) -> list[str]:
    """The formats from which stock Keras restores the optimizer; those of `LOSSY` keep the weights only.

    Keras 3 builds the optimizer for no variables when it loads .h5, so that `fit` raises, with and without hvdx.
    """
    if family.keras_name == "keras3":
        return [".keras"]
    return [".h5"] if family.legacy else [".keras", ".h5"]


LOSSY = [(family, "") for family in FAMILIES + LEGACY if family.keras_name != "keras3"]
LOSSY += [(family, ".keras") for family in LEGACY]
CASES = [(family, suffix) for family in FAMILIES + LEGACY for suffix in _formats(family)]


@pytest.mark.parametrize(("family", "suffix"), CASES, ids=[f"{f}{s}" for f, s in CASES])
def test_training_goes_on(world: Any, family: Family, suffix: str) -> None:
    """Two updates, a file, two more on all ranks, against four updates of one process."""
    data = linear_data(world.size())
    reference = _compiled(family, lambda optimizer: optimizer)
    fit(reference, union(data), BATCH * world.size())
    first, second = (data[0][:2], data[1][:2]), (data[0][2:], data[1][2:])

    def save_and_go_on(folder: Path) -> Any:
        model = _compiled(family, hvd.DistributedOptimizer)
        fit(model, part(first, world.rank()), BATCH)
        path = folder / f"model{suffix}"
        if world.rank() == 0:
            model.save(str(path))
        world.barrier()
        loaded = hvd.load_model(path)
        assert type(loaded).__module__.split(".")[0] == family.keras.__name__
        assert is_distributed(loaded.optimizer)
        fit(loaded, part(second, world.rank()), BATCH)
        return loaded

    with shared_folder() as folder:
        model = together(lambda: save_and_go_on(folder))
    state = arrays(model.weights) + optimizer_arrays(model.optimizer)
    assert_same_bits(state, "weights and slots")
    assert_equal_everywhere(arrays(model.weights), arrays(reference.weights), 1e-5, 1e-6)
    assert int(model.optimizer.iterations) == int(reference.optimizer.iterations) == 4


@pytest.mark.parametrize(("family", "suffix"), LOSSY, ids=[f"{f}{s or '.directory'}" for f, s in LOSSY])
def test_a_lost_optimizer_state_is_said(
    world: Any, family: Family, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(log, "warning", lambda text, *values: said.append(text % values))
    model = _compiled(family, hvd.DistributedOptimizer)
    together(lambda: fit(model, part(linear_data(world.size()), world.rank()), BATCH))
    model.save(str(tmp_path / f"model{suffix}"))
    loaded = hvd.load_model(tmp_path / f"model{suffix}")
    assert is_distributed(loaded.optimizer)
    assert int(loaded.optimizer.iterations) == 0, "if this Keras restores it now, the warning is wrong"
    assert all((a == b).all() for a, b in zip(model.get_weights(), loaded.get_weights(), strict=True))
    assert any(f"model{suffix}: this Keras restores no slots and iterations of Adam" in line for line in said)


@every_keras
def test_loss_scaling_is_loaded_too(world: Any, family: Family) -> None:
    """Under mixed_float16 the file holds a LossScaleOptimizer around the plain one."""
    data = linear_data(world.size())

    def load_and_train(folder: Path) -> Any:
        model = _compiled(family, hvd.DistributedOptimizer)
        fit(model, part(data, world.rank()), BATCH)
        if world.rank() == 0:
            model.save(str(folder / "model.keras"))
        world.barrier()
        loaded = hvd.load_model(folder / "model.keras")
        fit(loaded, part(data, world.rank()), BATCH)
        return loaded

    with policy(family.keras, "mixed_float16"), shared_folder() as folder:
        model = together(lambda: load_and_train(folder))
    assert "LossScaleOptimizer" in type(model.optimizer).__name__
    assert_same_bits(arrays(model.weights), "weights")
    assert int(model.optimizer.iterations) == 8


@every_keras
def test_options(world: Any, family: Family, tmp_path: Path) -> None:
    class Own(family.optimizers.SGD):  # type: ignore[name-defined,misc]
        pass

    model = _compiled(family, lambda optimizer: optimizer)
    model.compile(Own(0.1), "mse")
    model.save(str(tmp_path / "model.keras"))
    loaded = hvd.load_model(
        str(tmp_path / "model.keras"), [Own], compression=world.Compression.fp16, op="Sum", keras=family.keras
    )
    assert isinstance(loaded.optimizer, Own)
    assert loaded.optimizer.hvdx_reducer.op is world.Sum
    assert loaded.optimizer.hvdx_reducer.compression is world.Compression.fp16
    unwrapped = hvd.load_model(tmp_path / "model.keras", [Own], compile=False)
    assert getattr(unwrapped, "optimizer", None) is None
    with pytest.raises(world.ConfigurationError, match="'Median'"):
        hvd.load_model(tmp_path / "model.keras", [Own], op="Median")


def write_damaged(path: Path) -> None:
    """Write a model whose weights have lost their second half."""
    keras = load_keras("keras3")
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.save(path)
    with zipfile.ZipFile(path) as whole:
        members = {name: whole.read(name) for name in whole.namelist()}
    with zipfile.ZipFile(path, "w") as damaged:
        for name, data in members.items():
            damaged.writestr(name, data[: len(data) // 2] if name.endswith(".h5") else data)


def test_what_cannot_be_loaded(world: Any, tmp_path: Path) -> None:
    with pytest.raises(world.CheckpointError, match=r"no saved model at .*none\.keras"):
        hvd.load_model(tmp_path / "none.keras")
    with pytest.raises(world.CheckpointError, match=r"holds no saved_model\.pb"):
        hvd.load_model(tmp_path)
    (tmp_path / "damaged.keras").write_bytes(b"PK\x03\x04 and then nothing")
    with pytest.raises(world.CheckpointError, match="damaged"):
        hvd.load_model(tmp_path / "damaged.keras")
    if "keras3" in installed_kerases():
        write_damaged(tmp_path / "weights.keras")
        with pytest.raises(world.CheckpointError, match=r"weights\.keras is damaged"):
            hvd.load_model(tmp_path / "weights.keras")
    (tmp_path / "text.h5").write_text("no model")
    with pytest.raises(world.CheckpointError, match=r"text\.h5 is no model"):
        hvd.load_model(tmp_path / "text.h5")


def test_xla_that_was_chosen_while_the_model_was_loaded_is_undone(world: Any) -> None:
    """Only where Keras chose it ("auto", which is True on a GPU); a user's True is refused later, with a sentence."""

    class Model:
        def __init__(self, asked: Any) -> None:
            self.jit_compile = True
            self._compile_config = type("Config", (), {"config": {"jit_compile": asked}})

    for asked, kept in (("auto", world.size() == 1), (True, True)):
        model = Model(asked)
        _switch_auto_off(model)
        assert model.jit_compile is kept


def _compiled(family: Family, wrap: Any) -> Any:
    family.keras.utils.set_random_seed(7)
    model = dense(family.keras)
    model.compile(wrap(family.optimizers.Adam(0.01, epsilon=1e-3)), family.keras.losses.MeanSquaredError())
    return model
