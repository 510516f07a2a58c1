"""What each source in the environment says of this process and its job; one function a source, none decides."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdx import environment
from hvdx.comm import slurm, tf_config
from hvdx.comm.launchers import Launcher
from hvdx.errors import ConfigurationError
from hvdx.launch.plan import server_ranks


class Role(enum.Enum):
    """What a process is in its job."""

    WORKER = "worker"
    SERVER = "server"
    SCHEDULER = "scheduler"


@dataclass(frozen=True)
class Claim:
    """What one source says; None and empty where it says nothing.

    Args:
        source: its name, in words.
        said: the variables it was read from, with their values.
        apart: whether the scheduler is a process of its own.
    """

    source: str
    said: str
    workers: int
    servers: int
    role: Role | None = None
    index: int | None = None
    root: tuple[str, ...] = ()
    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    apart: bool = False


_DMLC = ("DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_WORKER_ID", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")


def by_hvdxrun(environ: Mapping[str, str]) -> Claim | None:
    """Return what hvdxrun says in a job with servers."""
    role = environment.ROLE.read(environ)
    if role is None:
        return None
    said = _said(environ, "HVDX_ROLE", "HVDX_INDEX", "HVDX_EXPECTED_SIZE", "HVDX_SERVERS")
    values = [environment.EXPECTED_SIZE.read(environ), environment.INDEX.read(environ)]
    servers, root = environment.SERVERS.read(environ), addresses_in(environ, "HVDX_ROOT")
    if None in values or not servers or not root:
        raise ConfigurationError(
            f"HVDX_ROLE is set, which hvdxrun sets together with HVDX_EXPECTED_SIZE, HVDX_INDEX, HVDX_SERVERS and "
            f"HVDX_ROOT, but not all of them are. Received: {said}. Start the program with hvdxrun --servers, or unset "
            "HVDX_ROLE."
        )
    return Claim("hvdxrun", said, values[0], servers, Role(role), values[1], root, apart=True)


def by_dmlc(environ: Mapping[str, str]) -> Claim | None:
    """Return what BytePS's variables say."""
    said = _said(environ, *_DMLC)
    if not said:
        return None
    text = environ.get("DMLC_ROLE", "")
    if text not in {role.value for role in Role}:
        raise ConfigurationError(f"DMLC_ROLE must be worker, server or scheduler. Received: {said}.")
    role = Role(text)
    workers, servers = _count(environ, "DMLC_NUM_WORKER", None), _count(environ, "DMLC_NUM_SERVER", 0)
    root: tuple[str, ...] = ()
    if servers or role is not Role.WORKER:
        root = (f"{environ.get('DMLC_PS_ROOT_URI', '')}:{environ.get('DMLC_PS_ROOT_PORT', '')}",)
        if not tf_config.is_address(root[0]):
            raise ConfigurationError(
                "The DMLC variables must say where the scheduler is: DMLC_PS_ROOT_URI its host, DMLC_PS_ROOT_PORT its "
                f"port. Received: {said}."
            )
    index = None
    if role is Role.SCHEDULER:
        index = 0
    elif role is Role.WORKER and (workers == 1 or "DMLC_WORKER_ID" in environ):
        index = _count(environ, "DMLC_WORKER_ID", 0)
    return Claim("the DMLC variables", said, workers, servers, role, index, root, apart=True)


def by_tf_config(environ: Mapping[str, str]) -> Claim | None:
    """Return what TF_CONFIG says; the chief is the first worker, and an evaluator works alone."""
    if not environ.get("TF_CONFIG"):
        return None
    config = tf_config.parse(environ["TF_CONFIG"])
    if config.job == "evaluator":
        return Claim("TF_CONFIG, an evaluator", _said(environ, "TF_CONFIG"), 1, 0, Role.WORKER, 0)
    if not config.cluster:
        return None
    claim = _listed("TF_CONFIG", _said(environ, "TF_CONFIG"), config.cluster)
    role = {None: None, "ps": Role.SERVER}.get(config.job, Role.WORKER)
    index = config.index if role is Role.SERVER else config.rank
    return Claim(
        claim.source, claim.said, claim.workers, claim.servers, role, index, claim.root, claim.addresses
    )  # fmt: skip


def by_argument(cluster: Any) -> Claim | None:
    """Return what the argument cluster= says: a tf.train.ClusterSpec or a dictionary."""
    if cluster is None:
        return None
    as_dict = getattr(cluster, "as_dict", None)
    try:
        listed = tf_config.addresses_by_job(as_dict() if callable(as_dict) else cluster)
        if not any(job in listed for job in tf_config.TRAINING_JOBS):
            raise ValueError("it names no worker")
    except ValueError as error:
        raise ConfigurationError(
            f"cluster= cannot be used: {error}. Give a tf.train.ClusterSpec or a dictionary such as "
            f'{{"worker": ["a:2222", "b:2222"], "ps": ["a:2223"]}}. Received: {cluster!r}.'
        ) from None
    return _listed("the argument cluster=", repr(listed), listed)


def by_slurm(environ: Mapping[str, str], launcher: Launcher) -> Claim:
    """Return what the variables of a Slurm job step say, with HVDX_SERVERS for how many tasks are servers."""
    servers = environment.SERVERS.read(environ)
    said = _said(environ, launcher.variable, "SLURM_PROCID", "HVDX_SERVERS")
    if servers >= launcher.size:
        raise ConfigurationError(f"Of {launcher.size} task(s) {servers} cannot be servers. Received: {said}.")
    serving = server_ranks(launcher.size, servers)
    hosts = slurm.hosts_of_ranks(environ, launcher.size)
    members: dict[Role, list[str]] = {Role.WORKER: [], Role.SERVER: []}
    place = {}
    for rank in range(launcher.size):
        role = Role.SERVER if rank in serving else Role.WORKER
        place[rank] = role, len(members[role])
        host = hosts[rank] if hosts else ""
        members[role].append(f"{host}:{slurm.port(environ, hosts[:rank].count(host))}")
    role, index = place[launcher.rank]
    listed = {"worker": tuple(members[Role.WORKER]), "ps": tuple(members[Role.SERVER])} if hosts else {}
    listed = {job: addresses for job, addresses in listed.items() if addresses}
    return Claim(
        launcher.name, said, launcher.size - servers, servers, role, index, listed.get("ps", ())[:1], listed
    )  # fmt: skip


def addresses_in(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return the host:port that a variable lists by comma."""
    addresses = tuple(part.strip() for part in environ.get(name, "").split(",") if part.strip())
    if not all(map(tf_config.is_address, addresses)):
        raise ConfigurationError(f"{name} must be host:port, or several by comma. Received: {environ[name]!r}.")
    return addresses


def _listed(source: str, said: str, cluster: Mapping[str, tuple[str, ...]]) -> Claim:
    workers = sum(len(cluster.get(job, ())) for job in tf_config.TRAINING_JOBS)
    servers = cluster.get("ps", ())
    return Claim(source, said, workers, len(servers), root=tuple(servers[:1]), addresses=cluster)


def _count(environ: Mapping[str, str], name: str, default: int | None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    least = 1 if default is None else 0
    if not text.isdecimal() or int(text) < least:
        raise ConfigurationError(
            f"{name} must be a whole number, {least} or more. Received: {_said(environ, *_DMLC)}."
        )  # fmt: skip
    return int(text)


def _said(environ: Mapping[str, str], *names: str) -> str:
    return ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name))
