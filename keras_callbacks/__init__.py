"""Keras callbacks for training on several ranks; also reachable as `hvdx.callbacks`. One callback a file."""

from keras_callbacks.broadcast import BroadcastGlobalVariablesCallback
from keras_callbacks.metric_average import MetricAverageCallback

__all__ = ["BroadcastGlobalVariablesCallback", "MetricAverageCallback"]
