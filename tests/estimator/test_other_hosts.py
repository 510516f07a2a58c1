"""A job on two hosts is killed after a checkpoint and resumes with its ranks elsewhere; one rank sees the model_dir."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from tests.launch.two_hosts import PORT, TwoHosts
from tests.support.jobs import ROOT, processes_with

PROGRAM = str(Path(__file__).with_name("fault_program.py"))
# Every rank but 0 is given an empty file system over the directory: a checkpoint of rank 0 is not there for it.
HIDE = """
if [ "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = 0 ]; then exec "$@"; fi
exec unshare --mount sh -c 'mount -t tmpfs none "$0" && exec "$@"' FOLDER "$@"
"""


def run(hosts: TwoHosts, folder: Path, where: str, scene: str) -> tuple[int, str]:
    """Start two ranks from hosta on the hosts `where`; return exit code and output, which has ended everywhere."""
    script = folder.parents[1] / "hide.sh"
    script.write_text(HIDE.replace("FOLDER", str(folder.parent)))
    command = ["sh", str(script), sys.executable, PROGRAM, str(folder), scene]
    by_ssh = ["-p", str(PORT), "-i", hosts.key]
    line = [sys.executable, "-m", "hvdx.launch.hvdxrun", *by_ssh, "-np", "2", "-H", where, *command]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PMI_"))}
    done = subprocess.run(
        hosts.on("hosta", line), env=clean | {"PYTHONPATH": str(ROOT), "HVDX_TIMEOUT": "60"}, cwd=ROOT,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert processes_with(str(folder)) == []
    return done.returncode, done.stdout


def test_resumes_on_other_hosts(hosts: TwoHosts, tmp_path: Path) -> None:
    """Killed at step 2 and again at step 4, with the hosts swapped in between, and at last on one host only."""
    folder = tmp_path / "shared" / "model"
    folder.parent.mkdir()
    code, output = run(hosts, folder, "hosta:1,hostb:1", "rank 1 dies at step 2")
    assert code == 137, output
    assert re.search(r"\[hvdxrun\] rank 1 on hostb .*SIGKILL", output), output
    step = 2
    for where, scene in (("hostb:1,hosta:1", "rank 0 dies at step 4"), ("hosta:2", "whole")):
        saved = tf.train.load_variable(str(folder), "linear/kernel").ravel()
        code, output = run(hosts, folder, where, scene)
        assert (code == 0) == (scene == "whole"), output
        places = {0: "hostb", 1: "hosta"} if where.startswith("hostb") else {0: "hosta", 1: "hosta"}
        for rank in range(2):
            found = re.search(rf"rank {rank} on (\w+) begins at step (\d+) with (\[.*\])", output)
            assert found, output
            assert (found[1], int(found[2])) == (places[rank], step)
            np.testing.assert_array_equal(np.array(json.loads(found[3]), "float32"), saved)
        step += 2
