"""TF_CONFIG and lists of addresses by job, read and checked in one place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdx.errors import ConfigurationError

# In the order of ranks: the chief, which some programs call master, comes first.
TRAINING_JOBS = ("chief", "master", "worker")
_JOBS = (*TRAINING_JOBS, "ps", "evaluator")


@dataclass(frozen=True)
class TfConfig:
    """What TF_CONFIG says.

    Args:
        cluster: host:port of every task by job, the training jobs first; empty where none is described.
        job: this process's job, None where TF_CONFIG names no task.
        index: its number in the job.
    """

    cluster: Mapping[str, tuple[str, ...]]
    job: str | None
    index: int

    @property
    def training(self) -> dict[str, tuple[str, ...]]:
        """The jobs that train."""
        return {job: self.cluster[job] for job in TRAINING_JOBS if job in self.cluster}

    @property
    def rank(self) -> int | None:
        """This process's number among those that train, None for one of another job."""
        return training_rank(self.cluster, self.job, self.index)


def training_rank(cluster: Mapping[str, tuple[str, ...]], job: str | None, index: int) -> int | None:
    """Return a task's number among all that train, None for a task of another job."""
    before = 0
    for name in TRAINING_JOBS:
        if name == job:
            return before + index
        before += len(cluster.get(name, ()))
    return None


def parse(text: str) -> TfConfig:
    """Read TF_CONFIG.

    Raises:
        ConfigurationError: it is malformed; says where, and shows the text.
    """
    try:
        config = json.loads(text)
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
        cluster = addresses_by_job(config.get("cluster") or {})
        task = config.get("task")
        if task is None:
            return TfConfig(cluster, None, 0)
        if not isinstance(task, dict) or "type" not in task or not str(task.get("index", "")).isdecimal():
            raise ValueError(f"`task` is {task!r}, but must have a `type` and an `index` of 0 or more")
        job, index = str(task["type"]), int(task["index"])
        if cluster and job != "evaluator":
            if job not in cluster:
                raise ValueError(f"the task's type {job!r} is no job of `cluster`, which has {', '.join(cluster)}")
            if index >= len(cluster[job]):
                raise ValueError(f"the task's index {index} is beyond the {len(cluster[job])} task(s) of {job!r}")
    except ValueError as error:
        raise ConfigurationError(f"TF_CONFIG cannot be used: {error}. Received: {text!r}.") from None
    return TfConfig(cluster, job, index)


def addresses_by_job(cluster: Any) -> dict[str, tuple[str, ...]]:
    """Return host:port of every task by job, in the order of ranks, from a mapping as TF_CONFIG has it.

    Raises:
        ValueError: an unknown job, something that is no host:port, or an address that is named twice.
    """
    if not isinstance(cluster, Mapping):
        raise ValueError(f"the cluster is {cluster!r}, but must map jobs to lists of host:port")
    if unknown := [job for job in cluster if job not in _JOBS]:
        raise ValueError(f"{unknown[0]!r} is no job that takes part in training; there are {', '.join(_JOBS)}")
    result: dict[str, tuple[str, ...]] = {}
    seen: dict[str, str] = {}
    for job in (name for name in _JOBS if cluster.get(name)):
        tasks = cluster[job]
        if not isinstance(tasks, (list, tuple)):
            raise ValueError(f"the job {job!r} is {tasks!r}, but must be a list of host:port")
        for number, address in enumerate(tasks):
            if not is_address(address):
                raise ValueError(f"{job} {number} has the address {address!r}, which is no host:port")
            if address in seen:
                raise ValueError(f"{job} {number} and {seen[address]} have the same address {address}")
            seen[address] = f"{job} {number}"
        result[job] = tuple(tasks)
    return result


def is_address(text: Any) -> bool:
    """Return whether this is host:port."""
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536
