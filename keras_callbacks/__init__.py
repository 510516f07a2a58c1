"""Keras callbacks for training on several ranks; also reachable as `hvdx.callbacks`. One callback a file."""

from keras_callbacks.broadcast import BroadcastGlobalVariablesCallback

__all__ = ["BroadcastGlobalVariablesCallback"]
