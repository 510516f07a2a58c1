"""The shared-memory communicator: ranks of one host add in memory they share, hosts exchange by MPI.

An all-reduce within a host: each rank copies its tensors to where the others see them; the ranks meet (and compare
signatures); each adds its slice of everybody's numbers, its own straight from the tensors; they meet again, and
TensorFlow gets views of the result, which is there once for all. What is small is added by every rank for itself, so
that meeting once is enough. Between hosts the ranks of equal place exchange their slices in between.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from hvdx.comm.agreement import Waiting
from hvdx.comm.algorithms.over_mpi import TUNABLE
from hvdx.comm.halves import PIECE, reduce_halves
from hvdx.comm.host import Planned
from hvdx.comm.mpi import MpiCommunicator
from hvdx.comm.mpi_buffers import MpiBuffers
from hvdx.comm.mpi_library import MPI
from hvdx.comm.reduce_op import ReduceOp, is_half
from hvdx.comm.shared.adding import Adding
from hvdx.comm.shared.memory import RESULTS, SMALL, HostMemory, share
from hvdx.comm.shared.work import Chunk, Work, copy
from hvdx.comm.signature import Signature
from hvdx.logs import log

_SPIN_SECONDS = 50e-6
_LONGEST_SLEEP = 0.1
"""Seconds after which a rank that nobody woke looks whether something is wrong."""
_CANNOT = -1
_LAST = RESULTS - 1


class SharedMemoryCommunicator(MpiCommunicator):
    """All ranks of an mpi4py communicator (COMM_WORLD by default).

    Args:
        comm: as for MpiCommunicator.
    """

    name: ClassVar[str] = "shared_memory"

    def __init__(self, comm: Any = None) -> None:
        super().__init__(comm)
        counts: Counter[str] = Counter(self._hosts)
        self._places = min(counts.values())
        self._several_hosts = len(counts) > 1
        self._reserved = [0] * RESULTS
        self._told_why_not = False
        self._memory: HostMemory | None = None
        self._local: Any = None
        self._across: MpiBuffers | None = None
        self.problem = ""
        """Why nothing is shared, where something should be."""
        if max(counts.values()) > 1:
            self._share()
        self._spin_seconds = 0.0 if self.topology.local_size > len(os.sched_getaffinity(0)) else _SPIN_SECONDS

    @property
    def shares(self) -> bool:
        """Whether ranks share memory."""
        return self._memory is not None

    @property
    def algorithms(self) -> tuple[str, ...]:
        # ranks that have no place between hosts must answer the same
        return tuple(name for name in TUNABLE if name != "hierarchical") if self._several_hosts else ()

    def use_algorithm(self, name: str) -> None:
        super().use_algorithm(name)
        if self._across is not None:
            self._across.algorithm = name

    def _share(self) -> None:
        place = self.topology.local_rank
        self._local = self._comm.Split(self._hosts.index(self._hosts[self.topology.rank]), place)
        if self._several_hosts:
            across = self._comm.Split(place if place < self._places else MPI.UNDEFINED, self.topology.rank)
            if across != MPI.COMM_NULL:
                across.Set_errhandler(MPI.ERRORS_RETURN)
                hosts = across.allgather(self._hosts[self.topology.rank])
                self._across = MpiBuffers(across, self._payload, hosts, self._algorithm)
        memory, problem = share(self._local)
        problems = self._comm.allgather(problem)
        for rank, text in enumerate(problems):
            if text:
                self.problem = f"on {self._hosts[rank]}: {text}"
                if memory is not None:
                    memory.close()
                return
        self._memory = memory

    # -- meeting -----------------------------------------------------------------------------------------------------

    def _exchange(self, row: np.ndarray, waiting: Waiting) -> np.ndarray:
        if self._memory is None or self._several_hosts:
            return super()._exchange(row, waiting)
        board = self._memory.board
        board.post(row)
        self._wait_until(board.all_here, board.sleep, waiting, longest=_LONGEST_SLEEP)
        return board.rows(row.dtype, row.size)

    def _meet_again(self, memory: HostMemory) -> None:
        """Wait for the ranks of this host in the middle of a call on which all have agreed."""
        memory.board.post()
        with self._agreement.middle() as waiting:
            self._wait_until(memory.board.all_here, memory.board.sleep, waiting, longest=_LONGEST_SLEEP)

    # -- all-reduce --------------------------------------------------------------------------------------------------

    def _work(self, planned: Planned, op: ReduceOp) -> Work | None:
        """Return what is to be done for a plan in shared memory, or None where it goes by MPI alone."""
        if self._memory is None:
            return None
        if "work" not in planned.notes:
            work = Work(planned.plan, op, self.topology.size, self._places, self.topology.local_rank)
            # what is small costs MPI no more between hosts than it would cost here
            planned.notes["work"] = None if work.small and self._several_hosts else work
        found: Work | None = planned.notes["work"]
        return found

    def _prepare(self, planned: Planned, arrays: list[np.ndarray], op: ReduceOp) -> int:
        work, memory = self._work(planned, op), self._memory
        if work is None or memory is None:
            return 0
        with np.errstate(all="ignore"):
            if work.small:
                copy(work.copies(memory.next_half(), bool(memory.board.half)), arrays)
                return 0
            try:
                memory.own.reserve(2 * SMALL + work.nbytes)
                own = _behind_halves(memory, memory.rank, work)
            except OSError as error:
                planned.notes["why not"] = str(error)
                return _CANNOT
            copy(work.copies(own, False), arrays)
        return sum(1 << number for number in range(_LAST) if memory.results[number].is_idle)

    def _reduce_plan(
        self, planned: Planned, arrays: list[np.ndarray], op: ReduceOp, told: np.ndarray
    ) -> list[np.ndarray]:
        work, memory = self._work(planned, op), self._memory
        if work is None or memory is None:
            return super()._reduce_plan(planned, arrays, op, told)
        with np.errstate(all="ignore"):
            if work.small:
                return self._add_all(work, memory)
            number = self._result_for(work, planned, told)
            if number is None:
                return super()._reduce_plan(planned, arrays, op, told)
            self._add_slice(work, memory, arrays, number)
        self._meet_again(memory)
        return self._take(work, memory, number)

    def _add_all(self, work: Work, memory: HostMemory) -> list[np.ndarray]:
        """Add everything for this rank alone."""
        halves = [memory.half(rank) for rank in range(len(memory.buffers))]
        found = []
        for number, (start, bucket) in enumerate(zip(work.starts, work.plan.buckets, strict=True)):
            buffer = self._pool.take(bucket.nbytes)
            parts = [half[start : start + bucket.nbytes].view(bucket.dtype) for half in halves]
            work.addings[number].together(parts, buffer.view(bucket.dtype))
            found.append(buffer)
        return found

    def _add_slice(self, work: Work, memory: HostMemory, arrays: list[np.ndarray], number: int) -> None:
        """Put this rank's slice of everybody's numbers into a result, and what the other hosts have for it."""
        result = memory.results[number].writable(work.nbytes)
        others = [_behind_halves(memory, rank, work) for rank in range(len(memory.buffers)) if rank != memory.rank]
        for index, runs in enumerate(work.chunks(number, result, others)):
            adding = work.addings[index]
            for run in runs:
                copy(run.copies, arrays)
                self._add_run(adding, run)
            if self._across is not None:
                start, stop = (work.starts[index] + byte for byte in work.slice(index))
                self._exchange_slice(adding, result[start:stop].view(adding.dtype), self._across)

    def _add_run(self, adding: Adding, run: Chunk) -> None:
        if self._across is None or not adding.divides_last:
            adding.together([run.out, *run.others], run.out)
            return
        total = adding.accumulate([run.out, *run.others])
        self._across.reduce(total, ReduceOp.SUM)
        run.out[:] = adding.narrow(total)

    def _exchange_slice(self, adding: Adding, values: np.ndarray, across: MpiBuffers) -> None:
        """Reduce a slice over the hosts, in place."""
        op = ReduceOp.SUM if adding.op is ReduceOp.AVERAGE else adding.op
        if adding.divides_last:
            return  # done run by run, before the division
        if is_half(adding.dtype):
            for start in range(0, values.size, PIECE):
                piece = values[start : start + PIECE]
                reduce_halves(piece, op, across.size, across.reduce, across.alltoall, across.gather)
        else:
            across.reduce(values.view(np.uint8) if adding.dtype.kind == "b" else values, op)

    def _take(self, work: Work, memory: HostMemory, number: int) -> list[np.ndarray]:
        """Return the buckets of a result: views, or copies of that which is never lent."""
        result = memory.results[number].readable(work.nbytes)
        found = []
        for start, bucket in zip(work.starts, work.plan.buckets, strict=True):
            values = result[start : start + bucket.nbytes]
            if number == _LAST:
                buffer = self._pool.take(bucket.nbytes)
                np.copyto(buffer, values)
                values = buffer
            found.append(values)
        return found

    # -- memory ------------------------------------------------------------------------------------------------------

    def _result_for(self, work: Work, planned: Planned, told: np.ndarray) -> int | None:
        """Return the number of a result that nobody looks at, or None where there is not enough memory; collective."""
        if (told < 0).any():
            self._say_why_not(planned, int(np.argmax(told < 0)))
            return None
        free = int(np.bitwise_and.reduce(told))
        idle = [number for number in range(_LAST) if free >> number & 1] or [_LAST]
        for number in idle:
            if self._reserved[number] >= work.nbytes:
                return number
        return idle[0] if self._reserve(idle[0], work.nbytes, planned) else None

    def _reserve(self, number: int, nbytes: int, planned: Planned) -> bool:
        """Make room for a result; collective, and all ranks come to the same answer."""
        assert self._memory is not None
        fits = 1
        try:
            self._memory.results[number].reserve(nbytes)
            self._memory.results[number].readable(nbytes)
            self._memory.results[number].writable(nbytes)
        except OSError as error:
            fits, planned.notes["why not"] = 0, str(error)
        answers = self._agreement.agree(Signature("reserve", "shared memory", (), f"{nbytes} bytes"), fits)[:, 2]
        if not answers.all():
            self._say_why_not(planned, int(np.argmin(answers)))
            return False
        self._reserved[number] = nbytes
        log.debug(
            "fusion buffers in shared memory: this rank's %s bytes; results of this host %s bytes",
            f"{self._memory.own.held:,}", f"{sum(self._reserved):,}",
        )  # fmt: skip
        return True

    def _say_why_not(self, planned: Planned, rank: int) -> None:
        if rank == self.topology.rank and not self._told_why_not:
            self._told_why_not = True
            log.warning(
                "There is not enough shared memory for %s bytes of %s (%s): they travel by MPI, which is slower.",
                f"{planned.plan.nbytes:,}", planned.signature.what, planned.notes["why not"],
            )  # fmt: skip

    # -- other movements ---------------------------------------------------------------------------------------------

    def _gather(self, part: np.ndarray, counts: Sequence[int], result: np.ndarray) -> None:
        if self._memory is None or self._several_hosts:
            super()._gather(part, counts, result)
            return
        ends = np.cumsum(counts)
        for start in range(0, max(counts), SMALL):
            mine = part[start : start + SMALL]
            self._memory.next_half()[: mine.size] = mine
            self._meet_again(self._memory)
            for rank, (count, end) in enumerate(zip(counts, ends, strict=True)):
                size = min(SMALL, count - start)
                if size > 0:
                    begin = end - count + start
                    result[begin : begin + size] = self._memory.half(rank)[:size]

    def _bcast(self, buffer: np.ndarray, root: int) -> None:
        if self._memory is None or self._several_hosts:
            super()._bcast(buffer, root)
            return
        for start in range(0, buffer.size, SMALL):
            piece = buffer[start : start + SMALL]
            if root == self.topology.rank:
                self._memory.next_half()[: piece.size] = piece
            self._meet_again(self._memory)
            if root != self.topology.rank:
                piece[:] = self._memory.half(root)[: piece.size]

    def close(self, clean: bool) -> bool:
        left = super().close(clean)
        if left:
            for comm in (self._local, self._across.comm if self._across is not None else None):
                if comm is not None:
                    comm.Free()
        for plans in self._plans.values():
            plans.clear()  # they look at the memory, and functions that were traced for this world look at them
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        return left


def _behind_halves(memory: HostMemory, rank: int, work: Work) -> np.ndarray:
    """Return the part of a rank's buffer that has to be reserved."""
    return memory.buffers[rank].from_byte(2 * SMALL, work.nbytes)
