"""The names of `horovod.tensorflow`, for programs that change one import; everything is hvdx's own, see the package `hvdx`."""

from hvdx import *  # noqa: F403
from hvdx import __all__ as __all__
from hvdx import callbacks as callbacks
