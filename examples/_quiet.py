"""Imports TensorFlow without the lines it prints at start-up. The examples import this first; your program need not.

TF_CPP_MIN_LOG_LEVEL=0 shows them.
"""

from __future__ import annotations

import os
import sys
import tempfile

level = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # some lines come before TensorFlow reads this

stderr = os.dup(2)
with tempfile.TemporaryFile() as held:
    sys.stderr.flush()
    if level not in {"0", "1"}:
        os.dup2(held.fileno(), 2)
    try:
        import tensorflow

        tensorflow.config.list_physical_devices("GPU")
    except BaseException:
        held.seek(0)
        os.write(stderr, held.read())
        raise
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
