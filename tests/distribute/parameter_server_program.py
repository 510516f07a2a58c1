"""One server or worker of a job that a test starts: see `parameter_server_jobs.job`."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

ROLE, INDEX, WORKERS, SERVERS, FOLDER = sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5])
TOKEN = "of this test"


def serve() -> None:
    """Be a server, and write down where and what it counted."""
    from hvdx.distribute.parameter_server import Server

    server = Server(INDEX, WORKERS, TOKEN, silence=float(os.environ.get("TEST_SILENCE", "60")))
    beside = FOLDER / f".server-{INDEX}"
    beside.write_text(server.address)
    beside.rename(FOLDER / f"server-{INDEX}.address")
    stats = server.serve()
    (FOLDER / f"server-{INDEX}.json").write_text(json.dumps(stats))


def addresses() -> list[str]:
    """Return where the servers are, when all have started."""
    end = time.monotonic() + 90
    paths = [FOLDER / f"server-{index}.address" for index in range(SERVERS)]
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, "the servers have not started"
        time.sleep(0.05)
    return [path.read_text() for path in paths]


def work() -> None:
    """Play the scenes, and write down what each came to: "" or a traceback."""
    from tests.distribute.parameter_server_scenes import Worker, scene

    worker = Worker(INDEX, WORKERS, addresses(), TOKEN, FOLDER)
    outcomes: dict[str, str] = {}
    for name in sys.argv[6].split(","):
        try:
            outcomes.update(scene(name)(worker) or {name: ""})
        except Exception:
            outcomes[name] = traceback.format_exc()
        (FOLDER / f"worker-{INDEX}.json").write_text(json.dumps(outcomes))
    worker.goodbye()


if __name__ == "__main__":
    serve() if ROLE == "server" else work()
