"""What a run measures: settings (how many ranks, where), the workloads of each, and the jobs that take part."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.catalogue import REDUCTIONS, TRAININGS, Homes, Kind
from benchmarks.workloads import GRADIENT_SETS, ROOT, SIZES, Workload, gradient_sets, size_name, sizes

RESULTS = ROOT / "benchmarks" / "results"
FIT_STEPS = 300
FIT_IMAGES = 32
JUDGED = ("ResNet-50", "small CNN", "VGG-16", "Transformer")
CORE = ("yardsticks", "hvdx shared_memory", "hvdx mpi", "Horovod Open MPI", "Horovod Gloo")
"""The jobs of the settings that start many processes, where a run is to be short."""
_ORDER = (*CORE, "PyTorch DDP gloo", "Horovod Intel MPI", "Horovod MPICH", "TensorFlow RING", "hvdx tensorflow")
PRIORITY = {name: place for place, name in enumerate(_ORDER)}
"""Which jobs are taken first where memory does not suffice for all."""
EVERY_SIZE = "sizes"


@dataclass(frozen=True)
class Setting:
    """Ranks in one place, and what they do there.

    Args:
        name: as in the tables.
        ranks, hosts: in all, and on how many hosts.
        workloads: one after the other.
        kinds: the jobs, which live side by side.
        images: how many images a rank takes in a call, where it trains.
    """

    name: str
    ranks: int
    hosts: int
    workloads: tuple[Workload, ...]
    kinds: tuple[Kind, ...]
    images: int = 0


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    made = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = made.add_argument
    add("--ranks", type=int, nargs="*", metavar="N", help="ranks on this machine (default: 2 for all workloads, and 4 "
        "for the first of them); none without a number")  # fmt: skip
    add("--workloads", nargs="+", choices=[*GRADIENT_SETS, EVERY_SIZE], help=f"default: {', '.join(JUDGED)}")
    add("--peers", nargs="+", metavar="NAME", help="only these jobs; --list shows the names")
    add("--hosts", action=argparse.BooleanOptionalAction, default=None, help="also two hosts (network namespaces) with "
        "2 ranks each on a link of 1 Gbit/s; default: where that is possible")  # fmt: skip
    add("--fit", action=argparse.BooleanOptionalAction, default=None, help="also `fit` of the small CNN (default)")
    add("--full", action="store_true", help="2, 3 and 4 ranks, all workloads and peers; takes an hour")
    add("--rounds", type=int, default=15, help="the most rounds, in each of which every way has a turn (default 15)")
    add("--minutes", type=float, help="time for measuring, starts not included (default 7, with --full 45); at least "
        "5 rounds are made")  # fmt: skip
    add("--output", type=Path, default=RESULTS, help="folder for benchmark.json, benchmark.md and the plots")
    add("--mpich-python", type=Path, default=ROOT / ".venv-mpich/bin/python", help="environment with MPICH and Horovod")
    add("--intel-mpi", type=Path, default=ROOT / ".venv-mpich/intel-mpi", help="folder of Intel MPI's wheel")
    add("--torch-python", type=Path, default=ROOT / ".venv-torch/bin/python", help="environment with PyTorch")
    add("--list", action="store_true", help="show the jobs, whether each can run here, and stop")
    return made


def homes(options: argparse.Namespace, main: str) -> Homes:
    """Return the environments."""
    return Homes(
        Path(main), options.mpich_python.absolute(), options.intel_mpi.absolute(), options.torch_python.absolute()
    )


def settings(options: argparse.Namespace) -> list[Setting]:
    """Return what the options ask for."""
    names = options.workloads or list(GRADIENT_SETS if options.full else JUDGED)
    chosen = gradient_sets([name for name in names if name != EVERY_SIZE])
    every = sizes() if EVERY_SIZE in names or options.full else []
    short = not options.full
    ranks = options.ranks if options.ranks is not None else ([2, 4] if short else [2, 3, 4])
    made = []
    for count in ranks:
        explicit = options.ranks is not None or options.full
        some = chosen if explicit or count == 2 else chosen[:1]
        few = short and count > 2 and not options.peers
        made.append(
            Setting(f"{count} ranks", count, 1, (*some, *every), _kinds(REDUCTIONS, options, CORE[:4] if few else None))
        )
    if options.hosts is not False:
        kinds = _kinds(REDUCTIONS, options, None if options.peers or options.full else CORE[1:])
        made.append(Setting("2 hosts x 2 ranks", 4, 2, tuple(chosen[:1]), kinds))
    if options.fit is not False:
        steps = Workload("small CNN", ((FIT_STEPS,),))
        kinds = _kinds(TRAININGS, options, None)
        made.append(Setting("fit, 2 ranks", 2, 1, (steps,), kinds, images=FIT_STEPS * FIT_IMAGES))
    return [setting for setting in made if setting.kinds and setting.workloads]


def _kinds(every: Sequence[Kind], options: argparse.Namespace, default: Sequence[str] | None) -> tuple[Kind, ...]:
    if options.peers:
        return tuple(kind for kind in every if kind.name in options.peers)
    if default is not None:
        return tuple(kind for kind in every if kind.name in default)
    return tuple(kind for kind in every if options.full or not kind.extra)


def check(options: argparse.Namespace) -> str | None:
    """Return what is wrong with the options, None if nothing."""
    known = [kind.name for kind in (*REDUCTIONS, *TRAININGS)]
    unknown = [name for name in options.peers or [] if name not in known]
    if unknown:
        return f"--peers: there is no {', '.join(map(repr, unknown))}; the names are {', '.join(map(repr, known))}"
    if any(count < 2 for count in options.ranks or []):
        return f"--ranks needs numbers of at least 2, not {options.ranks}"
    if options.rounds < 1:
        return f"--rounds needs at least 1, not {options.rounds}"
    return None


__all__ = ["SIZES", "Setting", "check", "homes", "parser", "settings", "size_name"]
