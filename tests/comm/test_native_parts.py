"""The parts of native communicators that need no second process."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from hvdx.comm import choose
from hvdx.comm.addresses import Contact, contact, free_port, reachable
from hvdx.comm.call import Keys
from hvdx.comm.deadline import DeadlineThread
from hvdx.comm.launchers import Launcher, by_horovodrun
from hvdx.comm.monitor import ranks
from hvdx.comm.native import rounded
from hvdx.comm.reduce_op import ReduceOp
from hvdx.comm.rendezvous import Meeting, from_contacts, from_list, from_tf_config, meet
from hvdx.comm.roll_call import roll_call
from hvdx.comm.roster import TOKEN_BYTES, Roster
from hvdx.comm.wire import from_words, moving, reducible, to_words
from hvdx.errors import ConfigurationError, StallError, WorldError

TAKEN = frozenset({tf.float16, tf.float32, tf.float64, tf.int32, tf.int64})


# -- who reaches whom ----------------------------------------------------------------------------------------------


def test_ranks_of_one_host_use_the_loopback() -> None:
    assert reachable([Contact("a", ("10.0.0.1/24",), (1,)), Contact("a", (), (2,))]) == ["127.0.0.1"] * 2


def test_several_hosts_use_a_network_that_all_are_on() -> None:
    docker = "172.17.0.1/16"
    contacts = [
        Contact("a", (docker, "192.168.5.1/24", "10.0.0.1/24"), (1,)),
        Contact("b", (docker, "10.0.0.2/24"), (2,)),
        Contact("a", (docker, "192.168.5.1/24", "10.0.0.1/24"), (3,)),
    ]
    assert reachable(contacts) == ["10.0.0.1", "10.0.0.2", "10.0.0.1"]


def test_hosts_without_a_common_network_use_their_names() -> None:
    assert reachable([Contact("a", ("10.0.0.1/24",), ()), Contact("b", ("10.1.0.1/24",), ())]) == ["a", "b"]


def test_a_contact_travels_as_bytes() -> None:
    own = contact(4711)
    assert Contact.unpack(own.pack()) == own
    assert own.ports == (4711,)


# -- rendezvous ----------------------------------------------------------------------------------------------------


def test_tf_config_with_a_chief() -> None:
    cluster = {"chief": ["h0:1"], "worker": ["h0:2", "h1:1"]}
    meeting = from_tf_config(json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    assert (meeting.rank, meeting.addresses, meeting.task) == (1, ("h0:1", "h0:2", "h1:1"), ("worker", 0))
    assert meeting.local_rank == 1
    assert Meeting(0, meeting.cluster, meeting.hosts).task == ("chief", 0)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"cluster": {"worker": ["a:1"]}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "ps", "index": 0}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "x"}}',
    ],
)
def test_a_useless_tf_config_is_shown(text: str) -> None:
    with pytest.raises(ConfigurationError, match="TF_CONFIG cannot be used"):
        from_tf_config(text)


def test_a_list_of_addresses_needs_a_launcher_that_agrees() -> None:
    launcher = Launcher("mpirun", 2, 1, "PMI_SIZE")
    meeting = from_list("a:1, b:2", launcher)
    assert (meeting.rank, meeting.cluster, meeting.hosts) == (1, {"worker": ("a:1", "b:2")}, ("a", "b"))
    with pytest.raises(WorldError, match=r"lists 1 rank.*started 2"):
        from_list("a:1", launcher)
    with pytest.raises(WorldError, match="no launcher says"):
        from_list("a:1,b:2", None)
    with pytest.raises(ConfigurationError, match="host:port"):
        from_list("a,b", launcher)


def test_without_any_sign_of_others_it_says_what_is_missing() -> None:
    with pytest.raises(WorldError, match=r"hvdxrun.*TF_CONFIG"):
        meet({})


def test_contacts_become_a_cluster() -> None:
    meeting = from_contacts(1, [Contact("a", (), (5,)), Contact("a", (), (6,))])
    assert meeting.cluster == {"worker": ("127.0.0.1:5", "127.0.0.1:6")}
    assert meeting.local_rank == 1


@pytest.mark.parametrize(
    ("environ", "controller"),
    [
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, "gloo"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "NCCL_SOCKET_IFNAME": "lo"}, "mpi"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0", "NCCL_SOCKET_IFNAME": "lo"}, "mpi"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "NCCL_SOCKET_IFNAME": "lo", "HVDX_EXPECTED_SIZE": "2"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2", "HOROVOD_FUSION_THRESHOLD": "1"}, None),
        ({"NCCL_SOCKET_IFNAME": "lo"}, None),
    ],
)
def test_horovodrun_is_told_from_other_launchers(environ: dict[str, str], controller: str | None) -> None:
    assert by_horovodrun(environ) == controller


def test_automatic_choice_without_gpus() -> None:
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    assert choose.automatic({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"} | no_gpu) == "horovod"
    assert choose.automatic({"OMPI_COMM_WORLD_SIZE": "2", "HVDX_EXPECTED_SIZE": "2"} | no_gpu) not in (
        "horovod",
        "tensorflow",
        "single",
    )


def test_the_roll_call_waits_for_everybody_and_frees_the_port() -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(4)]
    for _ in range(2):
        callers = [threading.Thread(target=roll_call, args=(rank, addresses, 30)) for rank in (3, 1, 0, 2)]
        for caller in callers:
            caller.start()
            time.sleep(0.05)
        for caller in callers:
            caller.join(30)
            assert not caller.is_alive()


def test_a_rank_that_misses_the_roll_call_is_named_on_all_ranks() -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    said: dict[int, str] = {}

    def call(rank: int) -> None:
        with pytest.raises(StallError) as caught:
            roll_call(rank, addresses, 1)
        said[rank] = str(caught.value)

    callers = [threading.Thread(target=call, args=(rank,)) for rank in (0, 2)]
    for caller in callers:
        caller.start()
    # a stranger who knows nothing does not count
    host, _, port = addresses[0].rpartition(":")
    time.sleep(0.2)
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"hvdx1000")
        for caller in callers:
            caller.join(30)
    assert f"Missing: rank 1 at {addresses[1]}." in said[0]
    assert said[2] == said[0]


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(WorldError, match=f"cannot use its address {address}"):
            roll_call(0, [address, "127.0.0.1:1"], 5)


# -- who is missing ------------------------------------------------------------------------------------------------


def test_the_roster_tells_who_is_behind_who_is_silent_and_who_is_gone() -> None:
    rosters = [Roster() for _ in range(5)]
    token = bytes(range(TOKEN_BYTES))
    peers = [("127.0.0.1", roster.port) for roster in rosters]
    for rank, roster in enumerate(rosters):
        roster.sequence = 7
        if rank != 3:  # listens, as a stopped process does, and never answers
            roster.join(rank, peers, token if rank != 4 else bytes(TOKEN_BYTES))
    try:
        rosters[1].sequence = 6
        assert rosters[0].missing(7) == [1, 3, 4]
        rosters[1].sequence = 8
        rosters[2].close()
        assert rosters[0].missing(7) == [2, 3, 4]
        assert rosters[4].missing(7) == []  # it cannot ask anybody, so it knows nothing
    finally:
        for roster in rosters:
            roster.close()


def test_ranks_in_words() -> None:
    assert [ranks([]), ranks([3]), ranks([1, 2])] == ["a rank", "rank 3", "ranks 1, 2"]


def test_a_deadline_returns_raises_or_gives_up() -> None:
    thread = DeadlineThread("test")
    assert thread.call(lambda: 5, 10) == 5
    with pytest.raises(KeyError):
        thread.call(lambda: {}["x"], 10)
    release = threading.Event()
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        thread.call(release.wait, 0.1)
    assert time.monotonic() - start < 5
    release.set()
    assert thread.call(lambda: 6, 10) == 6


def test_keys_count_the_calls_and_their_buffers() -> None:
    keys = Keys()
    first = keys.of(("a",), 3)
    second = keys.of(("b",), 0)
    assert (second, keys.of(("c",), 1), keys.of(("a",), 3)) == (first + 3, first + 4, first)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 17, 1000, 12345, 2**40 + 1])
def test_sizes_are_rounded_up_by_an_eighth_at_most(count: int) -> None:
    assert max(1, count) <= rounded(count) <= max(1, count * 9 / 8)
    assert rounded(rounded(count)) == rounded(count)


# -- dtypes --------------------------------------------------------------------------------------------------------


def values(dtype: str) -> np.ndarray:
    """Return extreme values of a dtype."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if kind.kind in "iu":
        info = np.iinfo(kind)
        return np.array([info.min, info.max, 0, 1, 7], kind)
    return np.array([0, 1, 0, 1, 1]).astype(kind) if kind.kind == "b" else np.array([-1.5, 2, 0, 1, 7]).astype(kind)


ALL = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]


@pytest.mark.parametrize("dtype", ALL)
def test_what_moves_comes_back_with_all_its_bits(dtype: str) -> None:
    array = values(dtype)
    wired = moving(tf.constant(array), TAKEN | {tf.uint8, tf.int8, tf.uint16, tf.int16})
    assert wired.tensor.shape[0] == len(array)
    back = wired.restore(wired.tensor).numpy()
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5])
def test_words_hold_small_numbers(dtype: str, count: int) -> None:
    array = np.arange(count).astype(dtype) * 50
    words = to_words(tf.constant(array))
    assert words.dtype == tf.int32
    assert from_words(words, tf.as_dtype(dtype)).numpy()[:count].tolist() == array.tolist()


def combine(op: ReduceOp, parts: list[Any]) -> Any:
    """Reduce as a library would, in the dtype that travels."""
    merge = {ReduceOp.MIN: tf.minimum, ReduceOp.MAX: tf.maximum, ReduceOp.PRODUCT: tf.multiply}.get(op, tf.add)
    result = parts[0]
    for part in parts[1:]:
        result = merge(result, part)
    return result


@pytest.mark.parametrize("op", list(ReduceOp))
@pytest.mark.parametrize("dtype", [name for name in ALL if "int" in name])
def test_extreme_integers_are_reduced_exactly(dtype: str, op: ReduceOp) -> None:
    one, two = values(dtype), values(dtype)[::-1].copy()
    wired = [reducible(tf.constant(array), op, TAKEN, 2) for array in (one, two)]
    assert wired[0].tensor.dtype in TAKEN
    assert not wired[0].divide
    result = wired[0].restore(combine(op, [w.tensor for w in wired])).numpy()
    exact = [(int(a), int(b)) for a, b in zip(one, two, strict=True)]
    bits = np.dtype(dtype).itemsize * 8

    def wrap(n: int) -> int:
        n &= (1 << bits) - 1
        return n - (1 << bits) if dtype[0] == "i" and n >> (bits - 1) else n

    def half(n: int) -> int:
        if bits == 64:  # the sum itself is taken in 64 bits
            n = wrap(n)
        return -(-n // 2) if n < 0 else n // 2

    expected = {
        ReduceOp.SUM: [wrap(a + b) for a, b in exact],
        ReduceOp.AVERAGE: [half(a + b) for a, b in exact],
        ReduceOp.MIN: [min(a, b) for a, b in exact],
        ReduceOp.MAX: [max(a, b) for a, b in exact],
        ReduceOp.PRODUCT: [wrap(a * b) for a, b in exact],
    }[op]
    assert result.dtype == np.dtype(dtype)
    assert result.tolist() == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_averages_of_floating_point_numbers_are_divided_on_the_way(dtype: str) -> None:
    array = values(dtype)
    wired = reducible(tf.constant(array), ReduceOp.AVERAGE, TAKEN, 2)
    assert wired.divide
    assert wired.tensor.dtype in TAKEN
    np.testing.assert_array_equal(wired.restore(wired.tensor).numpy(), array)
