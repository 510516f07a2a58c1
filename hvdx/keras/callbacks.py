"""The callbacks under Horovod's import path; they live in `keras_callbacks`."""

from keras_callbacks import *  # noqa: F403
