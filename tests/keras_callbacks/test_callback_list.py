"""Callbacks of no Keras in the lists of every Keras: all hooks are called, and the order is the right one."""

from __future__ import annotations

from typing import Any

import numpy as np

import hvdx as hvd
from keras_callbacks import callback_list
from keras_callbacks.base import FIRST, LAST, Callback


class Notes(Callback):
    def __init__(self, batches: bool) -> None:
        super().__init__()
        self.seen: list[str] = []
        hooks = [name for name in dir(Callback) if name.startswith("on_") and (batches or "batch" not in name)]
        for name in hooks:
            setattr(self, name, lambda *args, name=name, **kwargs: self.seen.append(name))


def test_every_hook_is_called(keras: Any) -> None:
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((4, 1))
    for batches in (True, False):
        notes = Notes(batches)
        model.fit(x, x, validation_data=(x, x), verbose=0, batch_size=4, callbacks=[notes])
        model.predict(x, verbose=0, callbacks=[notes])
        want = {name for name in dir(Callback) if name.startswith("on_") and (batches or "batch" not in name)}
        assert set(notes.seen) == want - {"on_batch_begin", "on_batch_end"}
        assert notes.params["epochs"] == 1
        assert notes.model is model


def test_only_callbacks_that_want_batches_are_asked_for_them() -> None:
    assert Notes(True)._implements_train_batch_hooks()
    assert not Notes(False)._implements_train_batch_hooks()
    assert not hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)._implements_train_batch_hooks()
    assert hvd.callbacks.LearningRateWarmupCallback(0.1)._implements_train_batch_hooks()


class Container:
    def __init__(self, *callbacks: Any) -> None:
        self.callbacks = list(callbacks)

    def on_train_begin(self) -> None:
        for callback in self.callbacks:
            callback.on_train_begin()


def test_arrange_keeps_the_order_of_the_rest() -> None:
    def at(position: int) -> Callback:
        callback = Callback()
        callback.position = position
        return callback

    last, first, one, extra = at(LAST), at(FIRST), at(1), at(3)
    foreign = [object(), object()]
    container = Container(last, foreign[0], one, first, foreign[1])
    before = container.callbacks
    callback_list.arrange(container, extra, one)
    assert container.callbacks == [first, foreign[0], one, foreign[1], extra, last]
    assert before == [last, foreign[0], one, first, foreign[1]]  # whoever iterates over it is not disturbed


def test_find() -> None:
    found: list[Any] = []

    class Finds(Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            found.append(callback_list.find(self))

    callback = Finds()
    container = Container(callback)
    container.on_train_begin()
    Container(Callback()).on_train_begin()
    callback.on_train_begin()
    assert found == [container, None]
