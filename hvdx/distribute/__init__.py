"""The `tf.distribute` adapter: one call gives a strategy that is right under every Keras."""

from __future__ import annotations

from hvdx.distribute.modes import MODES, strategy

__all__ = ["MODES", "strategy"]
