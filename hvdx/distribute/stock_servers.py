"""TensorFlow's own ParameterServerStrategyV2 between the members of a job that hvdxrun --servers started.

Every server is a `tf.distribute.Server` of job "ps", every worker one of job "worker". The coordinator is in the
process of worker 0, beside its worker: so `-np W` means W workers that compute, and only there the program goes on. In
all other processes the call serves until the coordinator has left, and then the process ends.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import tensorflow as tf

from hvdx import world
from hvdx.comm.addresses import contact, free_port
from hvdx.distribute.cluster import Cluster, Role
from hvdx.distribute.meeting import Departure, Members, meet, run_scheduler
from hvdx.distribute.stock import described, refuse_keras_3
from hvdx.errors import ConfigurationError, WorldError

_LOOK_SECONDS = 1.0


def stock_strategy(cluster: Cluster, options: dict[str, Any]) -> Any:
    """Return the strategy, in the process of worker 0; the others serve here, and end.

    Args:
        cluster: the job as this process sees it.
        options: of hvdx's own parameter servers, which this strategy does not have.

    Raises:
        ConfigurationError: options were given, or the world has been joined already.
        StallError, WorldError: the members could not meet.
    """
    _check(options)
    if cluster.role is Role.SCHEDULER:
        run_scheduler(cluster)
        sys.exit(0)
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")  # as TensorFlow's guide asks: who restarts is waited for
    members = meet(cluster, contact(free_port()))
    addresses = {"worker": list(members.workers), "ps": list(members.servers)}
    job = "worker" if members.role is Role.WORKER else "ps"
    server = tf.distribute.Server(addresses, job_name=job, task_index=members.index, protocol="grpc")
    if (job, members.index) != ("worker", 0):
        _serve(members)
    host = members.workers[0].rpartition(":")[0]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({**addresses, "chief": [f"{host}:{free_port()}"]}),
        task_type="chief",
        task_id=0,
        rpc_layer="grpc",
    )
    made = tf.distribute.ParameterServerStrategy(resolver)
    made.hvdx_server = server  # lives as long as the strategy
    atexit.register(_leave, members)
    words = f"TensorFlow's gRPC between {cluster.workers} worker(s) and {cluster.servers} parameter server(s)"
    return described(
        refuse_keras_3(made, 'leave out backend="tensorflow": hvdx\'s servers train it'), "parameter_server", words
    )


def _leave(members: Members) -> None:
    """Say goodbye, unless an error ended the program: then the others see this process go without."""
    if getattr(sys, "last_value", None) is None:
        members.goodbye()


def _check(options: dict[str, Any]) -> None:
    given = {name: value for name, value in options.items() if (name, value) != ("updates", "asynchronous")}
    if given:
        raise ConfigurationError(
            "TensorFlow's own ParameterServerStrategy is asynchronous and has none of the options of hvdx's. Received: "
            f'{", ".join(f"{name}={value!r}" for name, value in given.items())}, with backend="tensorflow".'
        )
    if world.is_initialized():
        raise ConfigurationError(
            'strategy("parameter_server", backend="tensorflow") makes TensorFlow\'s servers of all processes but one, '
            f"but the world has already been joined with the {world.communicator().name} communicator. Leave out "
            "hvd.init()."
        )


def _serve(members: Members) -> NoReturn:
    """Let TensorFlow's threads work until the coordinator has left; the process ends here."""
    left: Departure | None = None
    while left is None:
        found = members.wait_for_departures(len(members.departures()), _LOOK_SECONDS)
        left = next(_of_coordinator(found), None)
    members.goodbye()
    if not left.orderly:
        raise WorldError(f"The coordinator, in the process of worker 0, is gone: {left.reason}.")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a tf.distribute.Server cannot be stopped, and its threads would be torn down under it


def _of_coordinator(departures: tuple[Departure, ...]) -> Iterator[Departure]:
    """Yield the end of worker 0, or of the scheduler, without which nobody would hear of it."""
    for one in departures:
        if (one.role, one.index) == (Role.WORKER, 0) or one.role is Role.SCHEDULER:
            yield one
