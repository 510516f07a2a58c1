"""The version of hvdx."""

__version__ = "0.1.0"
