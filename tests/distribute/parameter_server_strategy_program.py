"""What every member of a job runs in the tests of `strategy("parameter_server")`: `program.py FOLDER SCENE...`.

It is the same on workers and servers. A worker plays the scenes, and writes down what each came to: "" or a traceback.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import hvdx as hvd


def main() -> None:
    """Become a server, or play the scenes."""
    folder, *names = sys.argv[1:]
    if "HVDX_ROLE" in os.environ:
        pid = Path(folder) / f"{os.environ['HVDX_ROLE']}-{os.environ['HVDX_INDEX']}.pid"
        pid.write_text(str(os.getpid()))
    hvd.init()
    from tests.distribute import parameter_server_strategy_scenes as scenes
    from tests.distribute import parameter_server_strategy_training as training

    played = {**vars(scenes), **vars(training)}
    rank = hvd.rank()
    outcomes: dict[str, str] = {}
    for name in names:
        try:
            outcomes.update(played[f"play_{name}"](Path(folder)) or {name: ""})
        except BaseException:  # pytest's own are no Exception
            traceback.print_exc()
            outcomes[name] = traceback.format_exc()
        (Path(folder) / f"worker-{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
