"""What this project wants to reach, in one table, and what a run says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from benchmarks.summary import Quartiles, Section, quartiles

SUBJECTS = ("hvdx shared_memory", "hvdx mpi")
"""What is judged: the default communicator under MPI, else the one that was there before it."""
OPEN_MPI = ("Horovod Open MPI",)
ANY_MPI = ("Horovod Open MPI", "Horovod MPICH", "Horovod Intel MPI")


class What(Enum):
    """What is compared with the limit."""

    SPEED = "times the speed of"
    TIME = "of the time of"
    EXTRA = "of the time above an empty tf.function, against"
    TRAFFIC = "of the bytes that must go over the link"


@dataclass(frozen=True)
class Target:
    """One number to reach.

    Args:
        setting, workload: the section.
        what: how it is compared.
        against: the peers; the fastest way of all of them counts.
        limit: the least speed, or the most of the rest.
        subjects: what is judged; the first that was measured.
    """

    setting: str
    workload: str
    what: What
    against: tuple[str, ...]
    limit: float
    subjects: tuple[str, ...] = SUBJECTS

    def wording(self) -> str:
        """Return the target in words."""
        rival = "Horovod on its fastest MPI" if self.against == ANY_MPI else " ".join(self.against)
        rival = rival.removeprefix("fit: ")
        if self.what is What.TRAFFIC:
            return f"within {100 * (self.limit - 1):.0f} % {self.what.value}"
        if self.what is What.SPEED:
            return f"at least {self.limit:g} {self.what.value} {rival}" if self.limit != 1 else f"faster than {rival}"
        return f"at most {self.limit:g} {self.what.value} {rival}"


_TWO, _FOUR, _HOSTS, _FIT = "2 ranks", "4 ranks", "2 hosts x 2 ranks", "fit, 2 ranks"
_RESNET, _SMALL = "ResNet-50", "small CNN"
_TRAINED = ("fit: hvdx, Keras 3",)

TARGETS = (
    Target(_TWO, _RESNET, What.SPEED, OPEN_MPI, 2.5),
    Target(_TWO, _RESNET, What.SPEED, ANY_MPI, 1.8),
    Target(_TWO, _RESNET, What.SPEED, ("Horovod Gloo",), 3.5),
    Target(_TWO, _RESNET, What.SPEED, ("TensorFlow RING",), 10),
    Target(_TWO, _RESNET, What.TIME, ("memory floor",), 1.2),
    Target(_TWO, _SMALL, What.EXTRA, ANY_MPI, 0.25),
    Target(_TWO, "VGG-16", What.SPEED, OPEN_MPI, 2.5),
    Target(_TWO, "Transformer", What.SPEED, OPEN_MPI, 2.5),
    Target(_FOUR, _RESNET, What.SPEED, OPEN_MPI, 2.5),
    Target(_HOSTS, _RESNET, What.TRAFFIC, (), 1.02),
    Target(_HOSTS, _RESNET, What.SPEED, OPEN_MPI, 1.5),
    Target(_FIT, _SMALL, What.SPEED, ("fit: Horovod, tf_keras",), 1, _TRAINED),
    Target(_FIT, _SMALL, What.SPEED, ("fit: MultiWorkerMirrored, tf_keras",), 1, _TRAINED),
)


@dataclass(frozen=True)
class Verdict:
    """What a run says of a target.

    Args:
        target: the target.
        verdict: "met", "NOT met", "not judged: ..." or "not measured: ...".
        subject, rival: the ways that were compared, where they were.
        ratio: what was found, where it was.
        unsteady: those of the two whose rounds differ too much to tell.
    """

    target: Target
    verdict: str
    subject: str | None = None
    rival: str | None = None
    ratio: Quartiles | None = None
    unsteady: tuple[str, ...] = ()


def judge(target: Target, sections: Sequence[Section], noise: Sequence[str] = ()) -> Verdict:
    """Return what a run says of a target.

    Args:
        target: the target.
        sections: all that was measured.
        noise: why the whole run is not to be trusted.
    """
    section = next((s for s in sections if (s.setting, s.workload) == (target.setting, target.workload)), None)
    if section is None:
        return Verdict(target, "not measured: not part of the run")
    subject = next((way for way in target.subjects if way in section.seconds), None)
    if subject is None:
        return Verdict(target, f"not measured: {' and '.join(target.subjects)} did not run")
    rival = section.best(*target.against)
    absent = [] if target.what is What.TRAFFIC or rival else [" or ".join(target.against)]
    if target.what is What.EXTRA and not section.ways("empty tf.function"):
        absent.append("empty tf.function")
    if target.what is What.TRAFFIC and subject not in section.sent:
        absent.append("the link's counter")
    if absent:
        return Verdict(target, f"not measured: {' and '.join(absent)} is missing", subject)
    ratio = _ratio(target, section, subject, rival)
    # Where even the quartiles of the ratio are on one side of the limit, it does not matter how unsteady a peer is.
    doubtful = len({_reached(target, value) for value in ratio}) > 1
    unsteady = tuple(section.unsteady(*filter(None, (subject, rival)))) if doubtful else ()
    reasons = [*noise, *section.noise(), *(f"{way} is unsteady" for way in unsteady)]
    verdict = "met" if _reached(target, ratio.middle) else "NOT met"
    if reasons:
        verdict = f"not judged: {'; '.join(reasons)}"
    return Verdict(target, verdict, subject, rival, ratio, unsteady)


def _ratio(target: Target, section: Section, subject: str, rival: str | None) -> Quartiles:
    if target.what is What.TRAFFIC:
        needed = 2 * (section.hosts - 1) / section.hosts * section.bytes
        return quartiles([max(hosts) / needed for hosts in section.sent[subject]])
    assert rival is not None
    if target.what is What.SPEED:
        return section.ratio(rival, subject)
    if target.what is What.EXTRA:
        return section.ratio(subject, rival, minus="empty tf.function")
    return section.ratio(subject, rival)


def _reached(target: Target, found: float) -> bool:
    if target.what is What.SPEED:
        return found >= target.limit if target.limit != 1 else found > 1
    if target.what is What.TRAFFIC:
        return abs(found - 1) <= target.limit - 1
    return found <= target.limit
