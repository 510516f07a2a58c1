"""Every error hvdx raises; each is a HvdxError, so `except hvd.HvdxError` catches them all."""

from __future__ import annotations


class HvdxError(RuntimeError):
    """The base of all hvdx errors."""

    # TensorFlow lets an error out of the tracing of a tf.function under its own type only where it finds this one.
    __init__ = Exception.__init__


class ConfigurationError(HvdxError, ValueError):
    """An argument, option or environment variable that hvdx cannot use."""


class MissingDependencyError(HvdxError, ImportError):
    """TensorFlow, MPI, Horovod or another package is absent; the message says what to install."""


class NotInitializedError(HvdxError):
    """A function that needs the world was called before `hvd.init()`."""


class WorldError(HvdxError):
    """The launcher, the environment and the communicator disagree about who takes part."""


class UnsupportedError(HvdxError, NotImplementedError):
    """The communicator in use cannot do what was asked (a dtype, an operation); the message names both."""


class MismatchError(HvdxError):
    """The ranks called different collectives; the message says what each of them was doing."""


class StallError(HvdxError, TimeoutError):
    """A rank did not take part in a collective within the time limit; the message names it."""


class CollectiveError(HvdxError):
    """A collective failed below hvdx, in MPI, Horovod or TensorFlow."""


class OptimizerError(HvdxError, TypeError):
    """An object that cannot be wrapped, or a wrapped optimizer whose hook did not run."""


class GradientError(HvdxError):
    """A gradient that is missing on some ranks only, or has no usable shape or dtype."""


class XlaError(HvdxError):
    """A collective was asked for inside a step compiled by XLA."""


class CheckpointError(HvdxError):
    """A checkpoint that cannot be read, written or applied to this model."""


class LaunchError(HvdxError):
    """The launcher cannot start what was asked; the message says what was understood and what to write."""
