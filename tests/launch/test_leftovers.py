"""The sweep of shared memory takes what ended ranks left, and nothing that is in use, older or not MPI's."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from hvdx.launch.leftovers import sweep


def make(path: Path) -> Path:
    path.write_bytes(b"\0" * mmap.PAGESIZE)
    return path


def test_only_unused_new_files_of_mpi_go(tmp_path: Path) -> None:
    make(tmp_path / "mpich_shm_0000_0")  # made before the job
    time.sleep(0.3)
    began = time.time()
    stale = [make(tmp_path / name) for name in ("sm_segment.host.0.1", "mpich_shm_1234_0", "Intel_MPI_x")]
    make(tmp_path / "somebody_elses")
    opened, mapped = make(tmp_path / "sm_segment.host.0.2"), make(tmp_path / "sm_segment.host.0.3")
    with opened.open("rb"), mapped.open("r+b") as file:
        view = mmap.mmap(file.fileno(), 0)
        file.close()
        assert sorted(sweep(began, tmp_path, patience=0.1)) == sorted(stale)
        view.close()
    left = sorted(os.listdir(tmp_path))
    assert left == ["mpich_shm_0000_0", "sm_segment.host.0.2", "sm_segment.host.0.3", "somebody_elses"]


def test_a_file_whose_user_has_just_ended_is_waited_for(tmp_path: Path) -> None:
    began = time.time()
    path = make(tmp_path / "mpich_shm_1_0")
    with path.open("rb"):
        assert sweep(began, tmp_path, patience=0.1) == []
    assert sweep(began, tmp_path, patience=0.1) == [path]


def test_a_folder_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    assert sweep(0.0, tmp_path / "absent") == []
