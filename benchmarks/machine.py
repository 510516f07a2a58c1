"""What the numbers depend on, and how busy the machine is."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

SETTINGS = ("HOROVOD_", "HVDX_", "OMPI_MCA_", "I_MPI_", "MPICH_", "FI_", "UCX_", "TF_", "OMP_", "KERAS_")
OTHERS = ("TF_CLI_", "TF_VAR_", "TF_CONFIG")  # Terraform's; and what each job gets of its own
QUIET_SECONDS = 3.0
BUSY_LIMIT = 0.1
"""Share of the machine that may be in use before anything is started."""
_BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal


def busy_seconds() -> float:
    """Return the seconds that all CPUs have worked since the machine started, for anybody."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    ticks = float(os.sysconf("SC_CLK_TCK"))
    return sum(int(first[index]) for index in _BUSY) / ticks


def busy_before(seconds: float = QUIET_SECONDS) -> float:
    """Return the share of the machine that is in use while nothing is measured; watches for some seconds.

    The load average would be the wrong measure: it remembers a build that ended minutes ago.
    """
    busy, began = busy_seconds(), time.monotonic()
    time.sleep(seconds)
    return (busy_seconds() - busy) / (time.monotonic() - began) / cores_of_machine()


def cores_of_machine() -> int:
    """Return the number of CPUs that /proc/stat counts."""
    return os.cpu_count() or 1


def available_bytes() -> int:
    """Return the memory that programs could still take."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def facts() -> dict[str, object]:
    """Return date, processor, cores, memory, system, load and the settings that change how libraries work."""
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory": memory,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load before": list(os.getloadavg()),
        "settings": {name: value for name, value in sorted(os.environ.items()) if is_setting(name)},
    }


def is_setting(name: str) -> bool:
    """Return whether an environment variable changes how the libraries work."""
    return name.startswith(SETTINGS) and not name.startswith(OTHERS)
