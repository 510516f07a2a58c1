"""Who takes part in the job and which of them this process is: every source is read, and they must agree."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from hvdx import environment
from hvdx.comm.launchers import Launcher, by_srun, detect
from hvdx.distribute.claims import (
    Claim,
    Role,
    addresses_in,
    by_argument,
    by_dmlc,
    by_hvdxrun,
    by_slurm,
    by_tf_config,
)  # fmt: skip
from hvdx.errors import ConfigurationError, WorldError

__all__ = ["UNNUMBERED", "Cluster", "Role", "resolve"]

UNNUMBERED = -1


@dataclass(frozen=True)
class Cluster:
    """A job as this process sees it.

    Args:
        source: what told it, in words, such as "hvdxrun", "TF_CONFIG" or "this process alone".
        role: what this process is.
        index: its number among those of its role; UNNUMBERED where the scheduler gives it one when the members meet.
        workers: how many workers there are.
        servers: how many parameter servers there are.
        root: host:port candidates of the scheduler, where the members meet; empty in a job without servers.
        addresses: host:port of every task by job ("chief", "worker", "ps"), where the source lists them.
        scheduler_apart: whether the scheduler is in a process of its own; else server 0 is it as well.
        token: what a connection must present to count as one of this job.
    """

    source: str
    role: Role
    index: int
    workers: int
    servers: int
    root: tuple[str, ...] = ()
    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    scheduler_apart: bool = False
    token: str = field(default="", repr=False)


def resolve(environ: Mapping[str, str] = os.environ, cluster: Any = None) -> Cluster:
    """Return who takes part: from cluster=, hvdxrun, the DMLC variables, TF_CONFIG, or the launcher's ranks.

    Args:
        environ: the environment.
        cluster: a tf.train.ClusterSpec, or a dictionary of jobs ("worker", "ps", "chief") with their host:port; this
            process's own place then comes from the launcher, the DMLC variables or TF_CONFIG's task.

    Raises:
        ConfigurationError: a source is malformed.
        WorldError: two sources contradict each other, or nothing says which of the members this process is.
    """
    configured = by_tf_config(environ)
    if configured is not None and configured.source != "TF_CONFIG":
        return _made(configured, environ)  # an evaluator, which is in no cluster
    readers = (by_argument(cluster), by_hvdxrun(environ), by_dmlc(environ), configured)
    claims = [claim for claim in readers if claim is not None]
    launcher = None if environ.get("HVDX_ROLE") else detect(environ)
    if launcher is not None:
        launcher = _checked(launcher, environ)
    if claims:
        merged = _merged(claims)
        return _made(merged if launcher is None else _placed(merged, launcher), environ)
    if launcher is None:
        return _made(Claim("this process alone", "", 1, 0, Role.WORKER, 0), environ)
    servers = environment.SERVERS.read(environ)
    step = by_srun(environ) if servers or launcher.variable.startswith("SLURM") else None
    if step is not None:
        return _made(by_slurm(environ, step), environ)
    if servers:
        raise ConfigurationError(
            f"HVDX_SERVERS={environ['HVDX_SERVERS']} asks for parameter servers, but {launcher.name} started this "
            "process and starts none. Write: hvdxrun -np 2 --servers 1 python train.py"
        )
    return _made(Claim(launcher.name, "", launcher.size, 0, Role.WORKER, launcher.rank), environ)


def _checked(launcher: Launcher, environ: Mapping[str, str]) -> Launcher:
    """Return the launcher under the name of hvdxrun where hvdxrun used it, its rank within its size."""
    expected = environment.EXPECTED_SIZE.read(environ)
    if expected is not None and not launcher.variable.startswith("HOROVOD"):
        if expected != launcher.size:
            raise WorldError(
                f"hvdxrun started {expected} rank(s) (HVDX_EXPECTED_SIZE={expected}), but {launcher.name} says "
                f"{launcher.size} ({launcher.variable}={launcher.size}). Unset what is left of another start."
            )
        launcher = replace(launcher, name="hvdxrun")
    if not 0 <= launcher.rank < launcher.size:
        raise WorldError(
            f"{launcher.name} says that this is rank {launcher.rank} of {launcher.size} ({launcher.variable}="
            f"{launcher.size}); ranks go from 0 to {launcher.size - 1}."
        )
    return launcher


def _merged(claims: Sequence[Claim]) -> Claim:
    """Return the first claim, with this process's place from the first that tells it; refuse a contradiction."""
    first = claims[0]
    for other in claims[1:]:
        for what, mine, its in (
            ("workers", first.workers, other.workers),
            ("servers", first.servers, other.servers),
            ("role", first.role, other.role),
            ("index", first.index, other.index),
        ):
            if mine is not None and its is not None and mine != its:
                one, two = (_words(what, value) for value in (mine, its))
                raise WorldError(
                    f"{first.source} and {other.source} contradict each other: {one} by {first.source} ({first.said}), "
                    f"{two} by {other.source} ({other.said}). Correct one of them or remove it."
                )
        same_role = first.role is None or other.role is None or first.role is other.role
        index = other.index if first.index is None and same_role else first.index
        first = replace(
            first, role=first.role or other.role, index=index, apart=first.apart or other.apart,
            root=other.root if other.apart and not first.apart else first.root,
            addresses=first.addresses or other.addresses,
        )  # fmt: skip
    return first


def _words(what: str, value: Any) -> str:
    if what == "role":
        return f"this process is a {value.value}"
    return f"its index is {value}" if what == "index" else f"{value} {what[:-1] if value == 1 else what}"


def _placed(claim: Claim, launcher: Launcher) -> Claim:
    """Return the claim with the launcher's word on which member this is: one rank a member, or a member of the role."""
    total = claim.workers + claim.servers
    places: list[tuple[Role, int]] = []
    if launcher.size == total:
        worker = launcher.rank < claim.workers
        places.append((Role.WORKER, launcher.rank) if worker else (Role.SERVER, launcher.rank - claim.workers))
    if launcher.size == {Role.WORKER: claim.workers, Role.SERVER: claim.servers, None: None}.get(claim.role, 1):
        places.append((claim.role or Role.WORKER, launcher.rank))
    if not places:
        servers = f" and {claim.servers} server(s)" if claim.servers else ""
        raise WorldError(
            f"{claim.source} says {claim.workers} worker(s){servers} ({claim.said}), but {launcher.name} started "
            f"{launcher.size} process(es) ({launcher.variable}={launcher.size}). Correct one of them or remove it."
        )
    for role, index in places:
        if claim.role in (None, role) and claim.index in (None, index):
            return replace(claim, role=role, index=index)
    role, index = places[-1]
    assert claim.role is not None
    raise WorldError(
        f"{claim.source} says that this is {claim.role.value} {claim.index} ({claim.said}), but by "
        f"{launcher.name} it is {role.value} {index} (rank {launcher.rank}). Start them in that order."
    )


def _made(claim: Claim, environ: Mapping[str, str]) -> Cluster:
    """Return the cluster of a claim, with its place checked."""
    role, index = claim.role, claim.index
    total = {Role.WORKER: claim.workers, Role.SERVER: claim.servers, Role.SCHEDULER: 1}
    if role is None and claim.workers + claim.servers == 1:
        role, index = Role.WORKER, 0
    if role is None or (index is None and role is Role.WORKER and not claim.apart):
        raise WorldError(
            f"{claim.source} lists {claim.workers} worker(s) and {claim.servers} server(s), but nothing says which of "
            f"them this process is. Start the program with hvdxrun, or give every process TF_CONFIG with a `task`."
        )
    if index is None and role is Role.WORKER:
        raise WorldError(
            f"{claim.source} name no DMLC_WORKER_ID, and there are {claim.workers} workers. Received: {claim.said}."
        )
    if index is not None and index >= total[role]:
        raise WorldError(
            f"{claim.source} says that this is {role.value} {index}, but of {total[role]} {role.value}(s) the last is "
            f"{role.value} {total[role] - 1}. Received: {claim.said}."
        )
    root: tuple[str, ...] = ()
    if claim.servers or role is Role.SCHEDULER:
        root = addresses_in(environ, "HVDX_ROOT") or claim.root
        if not root:
            raise ConfigurationError(
                f"{claim.source} does not tell where workers and servers can meet. Set HVDX_ROOT=host:port, the host "
                "being that of server 0."
            )
    token = environment.TOKEN.read(environ) or _derived_token(claim, root)
    return Cluster(
        claim.source, role, UNNUMBERED if index is None else index, claim.workers, claim.servers, root,
        MappingProxyType(dict(claim.addresses)), claim.apart, token if root else "",
    )  # fmt: skip


def _derived_token(claim: Claim, root: Sequence[str]) -> str:
    # Keeps the members of different jobs apart. Whoever knows the variables can work it out: HVDX_TOKEN is a secret.
    return hashlib.sha256(json.dumps([claim.workers, claim.servers, list(root)]).encode()).hexdigest()
