"""The names of `horovod.tensorflow`, for programs that change one import; all of it is hvdx's own."""

from hvdx import *  # noqa: F403
from hvdx import __all__ as __all__
from hvdx import callbacks as callbacks
