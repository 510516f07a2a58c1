"""The barrier of every communicator whose calls begin with an agreement: the agreement alone is one."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdx.comm.agreement import Agreement
from hvdx.comm.communicator import Label
from hvdx.comm.operation import as_written, in_turn
from hvdx.comm.order import in_order
from hvdx.comm.signature import Signature


@as_written
def barrier(agreement: Agreement, label: Label) -> Any:
    """Wait for all ranks; return None where TensorFlow is eager, else the operation that waits."""
    signature = Signature("barrier", label.what)

    def wait() -> list[np.ndarray]:
        with agreement.lock:
            agreement.agree(signature)
        return [np.zeros((), np.int8)]

    if tf.executing_eagerly():
        wait()
        return None

    def build() -> list[Any]:
        return [tf.group(in_turn(wait, [], [tf.int8]))]

    [done] = in_order(build, about=signature.describe())
    return done
