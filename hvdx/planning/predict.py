"""The step time and the efficiency of a job, for every way of reducing its gradients; pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hvdx.comm.algorithms import ALGORITHMS
from hvdx.comm.algorithms.costs import Cluster
from hvdx.errors import ConfigurationError
from hvdx.planning import servers

_SERVERS: dict[str, Callable[[Cluster, int, float], float]] = {
    "servers, each rank": servers.each_rank,
    "servers, each host": servers.each_host,
    "servers and hosts (BytePS)": servers.byteps,
}


@dataclass(frozen=True)
class Job:
    """What is trained, on what.

    Args:
        parameters: trainable ones.
        bytes_per_parameter: of a gradient on its way: 4, or 2 with 16-bit compression.
        cluster: hosts, ranks and what lies between them.
        step_seconds: one step of one rank alone.
        overlap: which share of the step can hide the exchange: that in which gradients are ready and others are
            still being computed.
        servers: machines with parameter servers.
        buffer_bytes: gradients are reduced in buffers of at most this size, one after the other.
    """

    parameters: int
    bytes_per_parameter: int
    cluster: Cluster
    step_seconds: float
    overlap: float
    servers: int
    buffer_bytes: int

    def __post_init__(self) -> None:
        if not self.step_seconds > 0:
            raise ConfigurationError(f"A step must take longer than {self.step_seconds:g} s.")

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return self.parameters * self.bytes_per_parameter

    @property
    def buffers(self) -> int:
        """How many reductions a step makes."""
        return -(-self.nbytes // self.buffer_bytes)


@dataclass(frozen=True)
class Prediction:
    """What one way comes to.

    Args:
        way: a value of HVDX_ALLREDUCE, or a way of using servers.
        exchange_seconds: of one step, if nothing else happened meanwhile.
        step_seconds: of a whole step.
        efficiency: throughput as a share of what as many ranks would do that need no exchange.
    """

    way: str
    exchange_seconds: float
    step_seconds: float
    efficiency: float


def predict(job: Job) -> list[Prediction]:
    """Return every way, the fastest first."""
    part = job.nbytes / job.buffers
    exchanges = {name: job.buffers * of.seconds(job.cluster, part) for name, of in ALGORITHMS.items()}
    exchanges |= {name: of(job.cluster, job.servers, job.nbytes) for name, of in _SERVERS.items()}
    found = [_prediction(job, way, seconds) for way, seconds in exchanges.items()]
    return sorted(found, key=lambda one: one.exchange_seconds)


def _prediction(job: Job, way: str, exchange: float) -> Prediction:
    step = job.step_seconds + max(0.0, exchange - job.overlap * job.step_seconds)
    return Prediction(way, exchange, step, job.step_seconds / step)


def best_all_reduce(predictions: list[Prediction]) -> Prediction:
    """Return the fastest way that needs no servers."""
    return next(one for one in predictions if one.way in ALGORITHMS)
