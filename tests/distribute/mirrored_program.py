"""One rank of a job that plays the scenes of the mirrored strategy: TensorFlow's devices are cut when it starts.

Arguments: a folder, the number of logical CPUs, and names of scenes with commas. Writes what each scene came to, "" or
a traceback, to the folder, in a file for each rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FOLDER, DEVICES, SCENES = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")


def main() -> None:
    """Play the scenes."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)

    import hvdx as hvd
    from tests.distribute import mirrored_scenes

    hvd.init()
    path = FOLDER / f"rank-{hvd.rank()}.json"
    outcomes: dict[str, str] = {}
    for name in SCENES:
        outcomes.update(mirrored_scenes.play(name))
        path.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
