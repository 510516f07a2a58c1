"""Keras callbacks for training on several ranks; also reachable as `hvdx.callbacks`. One callback a file."""

from keras_callbacks.broadcast import BroadcastGlobalVariablesCallback
from keras_callbacks.checkpoint import CheckpointCallback
from keras_callbacks.learning_rate_schedule import LearningRateScheduleCallback
from keras_callbacks.learning_rate_warmup import LearningRateWarmupCallback
from keras_callbacks.metric_average import MetricAverageCallback
from keras_callbacks.progress import ProgressCallback
from keras_callbacks.warmup_schedule import warmup_schedule

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "CheckpointCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "ProgressCallback",
    "warmup_schedule",
]
