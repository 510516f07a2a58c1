"""once_per_host: one rank of the host works, the others wait and get the result or the error."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import hvdx as hvd

pytestmark = [pytest.mark.np(2, 3), pytest.mark.usefixtures("world")]


def test_it_runs_once_and_all_get_the_result(tmp_path: Path) -> None:
    shared = Path(hvd.broadcast_object(str(tmp_path)))

    def fetch() -> Path:
        with (shared / "data").open("a") as file:
            file.write("fetched\n")
        return shared / "data"

    path = hvd.once_per_host(fetch)
    assert path.read_text() == "fetched\n"
    hvd.barrier()


def test_its_error_reaches_every_rank() -> None:
    def fetch() -> None:
        raise OSError("no route to host")

    expected: type[Exception] = OSError if hvd.local_rank() == 0 else hvd.CollectiveError
    words = (
        r"no route" if hvd.local_rank() == 0 else r"once_per_host\(fetch\) failed on rank 0: OSError: no route to host"
    )
    with pytest.raises(expected, match=words):
        hvd.once_per_host(fetch)
    assert hvd.once_per_host(lambda: 7) == 7, "the ranks go on together"


def test_what_cannot_travel() -> None:
    if hvd.size() == 1:
        assert hvd.once_per_host(threading.Lock) is not None
        return
    kind = hvd.ConfigurationError if hvd.local_rank() == 0 else hvd.CollectiveError
    with pytest.raises(kind, match=r"returned a lock.*Return something picklable"):
        hvd.once_per_host(threading.Lock, name="lock")


@pytest.mark.parametrize("value", ["a path", None])
def test_no_function(value: Any) -> None:
    with pytest.raises(hvd.ConfigurationError, match=r"takes a function without arguments.*Received"):
        hvd.once_per_host(value)
