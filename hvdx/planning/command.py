"""`hvdx plan`: its options, and the table it prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rich.table import Table

from hvdx.comm.algorithms import ALGORITHMS
from hvdx.comm.algorithms.costs import Cluster, Link
from hvdx.errors import ConfigurationError
from hvdx.planning import units
from hvdx.planning.predict import Job, Prediction, best_all_reduce

DESCRIPTION = """Predicts the time of a training step on many ranks, its efficiency, and the best way to reduce the
gradients, from the cost models of the reduction algorithms. docs/scaling.md says what the model knows and what not."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    need = parser.add_argument_group("what must be told")
    need.add_argument("--params", type=_unit(units.count), required=True, help="trainable parameters: 25.6M")
    need.add_argument("--ranks", type=_unit(units.count), required=True, help="processes that train: 512")
    need.add_argument("--hosts", type=_unit(units.count), required=True, help="machines they are on: 64")
    need.add_argument(
        "--bandwidth", type=_unit(units.bandwidth), required=True, help="of each host's link, one way: 25Gbit, 3GB/s"
    )
    need.add_argument("--step-time", type=_unit(units.seconds), required=True, help="of one rank alone: 120ms")
    more = parser.add_argument_group("what may be told")
    defaults: list[tuple[str, Callable[[str], Any], str, str]] = [
        ("--latency", units.seconds, "20us", "of a message between hosts, software included"),
        ("--bytes-per-param", units.count, "4", "of a gradient on its way; 2 with fp16 or bf16 compression"),
        ("--overlap", units.share, "0", "share of the step in which gradients can travel while others are computed"),
        ("--local-bandwidth", units.bandwidth, "10GB/s", "between ranks of one host"),
        ("--local-latency", units.seconds, "2us", "of a message between ranks of one host"),
        ("--add-bandwidth", units.bandwidth, "10GB/s", "bytes of gradients that a rank, or a server, adds in a second"),
        ("--fusion-threshold", units.size, "128MiB", "largest buffer that is reduced at once"),
    ]
    for name, parse, default, meaning in defaults:
        more.add_argument(name, type=_unit(parse), default=default, help=f"{meaning} (default {default})")
    more.add_argument("--servers", type=_unit(units.count), help="machines with parameter servers (default: as hosts)")


def _unit(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse print what a parser says, with the option's name in front."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def job_of(options: argparse.Namespace) -> Job:
    """Return the job that the options describe.

    Raises:
        ConfigurationError: they do not fit together; names the culprit.
    """
    if options.ranks % options.hosts:
        raise ConfigurationError(
            f"--ranks {options.ranks} cannot be divided evenly over --hosts {options.hosts}: the model knows only "
            "hosts with equal numbers of ranks."
        )
    if not options.step_time > 0:
        raise ConfigurationError("--step-time must be above 0.")
    cluster = Cluster(
        hosts=options.hosts,
        ranks_per_host=options.ranks // options.hosts,
        between=Link(options.latency, 1 / options.bandwidth),
        within=Link(options.local_latency, 1 / options.local_bandwidth),
        per_byte_added=1 / options.add_bandwidth,
    )
    return Job(
        options.params,
        options.bytes_per_param,
        cluster,
        options.step_time,
        options.overlap,
        options.servers or options.hosts,
        options.fusion_threshold,
    )


def table(job: Job, predictions: list[Prediction]) -> Table:
    """Return the predictions as a table, the fastest first."""
    title = (
        f"{job.parameters:,} parameters x {job.bytes_per_parameter} B = {job.nbytes / 1e6:,.1f} MB a step, "
        f"{job.cluster.ranks} ranks on {job.cluster.hosts} host(s)"
    )
    result = Table("way", "MB a rank sends", "exchange", "not hidden", "step", "efficiency", title=title)
    for column in result.columns[1:]:
        column.justify = "right"
    for one in predictions:
        hidden = one.step_seconds - job.step_seconds
        cells = [
            _megabytes(job, one.way),
            _time(one.exchange_seconds),
            _time(hidden),
            _time(one.step_seconds),
            f"{100 * one.efficiency:.1f} %",
        ]
        result.add_row(one.way, *cells)
    return result


def closing(job: Job, predictions: list[Prediction]) -> str:
    """Return what follows from the table, and what was assumed."""
    best = best_all_reduce(predictions)
    cluster, servers = job.cluster, f"{job.servers} server machine(s)"
    lines = [
        f"Best all-reduce: {best.way} (HVDX_ALLREDUCE={best.way}), {_time(best.step_seconds)} a step, "
        f"{100 * best.efficiency:.1f} % of {cluster.ranks} times one rank."
    ]
    if predictions[0] is not best and predictions[0].step_seconds < best.step_seconds:
        lines.append(f"With {servers} more, {predictions[0].way!r}: {_time(predictions[0].step_seconds)} a step.")
    lines.append(
        f"Assumed: {job.buffers} buffer(s) a step, {100 * job.overlap:.0f} % of the step hides the exchange, latency "
        f"{_time(cluster.between.latency)} between hosts and {_time(cluster.within.latency)} within, "
        f"{1e-9 / cluster.between.per_byte:g} and {1e-9 / cluster.within.per_byte:g} GB/s, {servers}; no rank waits "
        "for a slower one, no link is shared with other jobs."
    )
    return "\n".join(lines)


def _megabytes(job: Job, way: str) -> str:
    """Return what the rank that sends most sends in one step, by the algorithm's exact formula.

    It is among the first ones, but for a number or two: there are the root of the tree and the pairs of the fold.
    """
    if way not in ALGORITHMS:
        return ""
    hosts = [rank // job.cluster.ranks_per_host for rank in range(job.cluster.ranks)]
    of = ALGORITHMS[way]
    most = max(
        of.bytes_sent(rank, hosts, job.parameters, job.bytes_per_parameter) for rank in range(min(len(hosts), 64))
    )
    return f"{most / 1e6:,.1f}"


def _time(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit:
            value = seconds / unit
            return f"{value:.0f} {name}" if value >= 100 else f"{value:.3g} {name}"
    return "0" if seconds == 0 else f"{seconds * 1e9:.3g} ns"
