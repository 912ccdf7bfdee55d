"""The front door: `Communicator`, and the one path that every collective call takes.

A call goes through here in this order: arguments are checked on this rank alone, before any communication
(`pyreduce.arguments`); its plan is looked up or made (`_plan_for`); it gets its number and is run under the waiting
loop (`_run`); strided results are unpacked.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

from pyreduce import algorithms, arrays, ops
from pyreduce.algorithms.native import NativeExecution, NativePlan
from pyreduce.arena import Arena, Region
from pyreduce.arguments import IN_PLACE, Arguments, check_arguments, check_block
from pyreduce.arrays import Array
from pyreduce.calls import Call
from pyreduce.execute import Execution, Plan, Room, Tags
from pyreduce.launcher import check_comm, largest_tag, warn_if_foreign_launcher
from pyreduce.onesided import OneSided
from pyreduce.ops import SUM, Op, resolve_op
from pyreduce.peers import Peers, duplicate, keep_for_ever, log
from pyreduce.selection import check_algorithm, choose
from pyreduce.settings import check_seconds, read_settings
from pyreduce.signals import Signal, make_signal
from pyreduce.windows import Window, make_window

__all__ = ["IN_PLACE", "Communicator", "Stats"]

PLANS_KEPT = 256
SCRATCH_KEPT = 64 << 20
AWAY_SECONDS = 0.05  # after a longer pause a rank looks for notices before it joins a call
RECORD_BYTES = 512  # what check="full" exchanges: digest and call site


_Ready: TypeAlias = "tuple[Plan | NativePlan, int | None]"  # a plan, and the digest that its tags carry


@dataclass(slots=True)
class Stats:
    """What the calls of one collective by one algorithm have cost this rank so far.

    Attributes
    ----------
    calls : int
        Calls completed.
    rounds : int
        Rounds of messages in them (a round counts once a call, however many segments run it).
    bytes_sent, bytes_received : int
        Bytes of point-to-point messages, and of what was put into and got from peers' windows; what ``native`` moves
        inside the MPI cannot be seen and is not counted.
    wait_seconds : float
        Time in which nothing could be done but wait for peers.
    """

    calls: int = 0
    rounds: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    wait_seconds: float = 0.0


class Communicator:
    """Collectives over the ranks of an mpi4py communicator.

    Made collectively: every rank of `comm` makes it at the same point of its program. It works on its own duplicate
    of `comm`, so its messages never meet the user's. Use it as a context manager or call `close`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Default ``COMM_WORLD``.
    algorithm : str, optional
        What calls use that name none themselves; default: chosen by size (see `pyreduce.selection`).
    timeout : float, optional
        Seconds after which a waiting call raises `CollectiveTimeout`; default ``PYREDUCE_TIMEOUT`` or for ever (then
        a wait longer than `warn_seconds` logs one warning that names who is missing). 0 means at once.
    check : {"light", "full", "off"}, optional
        How calls that do not match are found: by the digest in every message's tag; by comparing all ranks' calls and
        call sites before data moves; or not at all. Default ``PYREDUCE_CHECK`` or ``"light"``.
    deterministic : bool
        Let reductions use only algorithms that fold in rank order.
    transport : {"shared", "rma"}, optional
        How windows, signals and ``mesh`` reach peers: through shared memory, which needs all ranks on one node, or
        through MPI's one-sided calls. Default ``PYREDUCE_TRANSPORT``, or shared where it can be.
    segment_bytes, in_flight, message_bytes, warn_seconds : optional
        See `pyreduce.settings`.

    Attributes
    ----------
    rank, size : int
    stats : dict
        `Stats` by ``(collective, algorithm)``.

    Raises
    ------
    TypeError, ValueError
        `comm` is no intracommunicator, or a setting is out of range.
    CollectiveTimeout
        Not all ranks came to make it in `timeout` seconds.
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
        check: str | None = None,
        deterministic: bool = False,
        segment_bytes: int | None = None,
        in_flight: int | None = None,
        message_bytes: int | None = None,
        warn_seconds: float | None = None,
        transport: str | None = None,
    ) -> None:
        comm = check_comm(comm)
        self._settings = read_settings(
            segment_bytes=segment_bytes,
            in_flight=in_flight,
            message_bytes=message_bytes,
            check=check,
            timeout=timeout,
            warn_seconds=warn_seconds,
            transport=transport,
        )
        if algorithm is not None and algorithm not in algorithms.names():
            algorithms.get(algorithm)
        self._algorithm = algorithm
        self._deterministic = bool(deterministic)
        warn_if_foreign_launcher()
        self._comm: MPI.Intracomm | None = duplicate(comm, self._settings.timeout, self._settings.warn_seconds)
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.stats: dict[tuple[str, str], Stats] = {}
        self._peers = Peers(self._comm, self._settings.warn_seconds)
        self._tags = Tags(largest_tag())
        self._number = 0
        self._last = perf_counter()
        self._registrations = algorithms.registrations()
        self._lock = threading.Lock()
        self._plans: dict[Any, _Ready] = {}
        self._ready: dict[Any, _Ready] = {}
        self._scratch = np.empty(0, np.uint8)
        self._scratch_address = 0
        self._sites: set[tuple[str, ...]] = set()
        self._words: Plan | None = None
        # Two: what users make and close, in an order of their own, does not move what the calls of ours carve.
        self._arena, self._room_arena = (
            Arena(self._comm, self._settings.transport, self._settings.message_bytes, self._agree) for _ in range(2)
        )
        self._room: Room | None = None
        self._room_region: Region | None = None
        self._one_sided = OneSided(self.rank, self.size, self._settings, self._peers, self._arena, self)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if value is not None and self._comm is not None:
            self._peers.quit(value, self._number + 1)
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._comm is None else "broken" if self._peers.broken else f"{self._number} calls"
        return f"<pyreduce.Communicator rank {self.rank} of {self.size}, {state}>"

    def close(self) -> None:
        """Free the duplicate communicator; collective, and harmless when repeated.

        A broken communicator's duplicate is kept instead: peers may not come to free it, and late messages must find
        it.
        """
        if self._comm is not None and not MPI.Is_finalized():
            self._one_sided.close()
            if self._peers.drain(self._settings.timeout):
                self._arena.close()
                self._room_arena.close()
                self._comm.Free()
            else:
                keep_for_ever((self._arena, self._room_arena))
        self._comm = None
        self._room = None
        self._plans.clear()
        self._ready.clear()
        self._scratch = np.empty(0, np.uint8)

    def forget_timeout(self) -> None:
        """Wait as long as ``PYREDUCE_TIMEOUT`` says from now on."""
        self._settings = replace(self._settings, timeout=read_settings().timeout)

    def reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        *,
        op: Op | str = SUM,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Reduce over all ranks; each rank keeps its block of the rows.

        Parameters
        ----------
        sendbuf : array, shape (rows, ...)
            This rank's vector, or `IN_PLACE`.
        recvbuf : array, shape (counts[rank], ...), optional
            Where the block goes; allocated if None. In place it holds the whole vector, and the block ends up at its
            front, the rest unchanged.
        op : Op or str
        counts : sequence of int, optional
            Rows of every rank's block. Default: as `numpy.array_split` cuts. With explicit counts the buffers may be
            longer than the counts cover.
        algorithm : str, optional
        timeout : float, optional
            Seconds.

        Returns
        -------
        ndarray
            The block: `recvbuf`, or the rows of it that were written.

        Raises
        ------
        TypeError, ValueError
            This rank's arguments are wrong; nothing has been sent.
        MismatchError, CollectiveTimeout, BrokenCommunicatorError
        """
        return self._call("reduce_scatter", sendbuf, recvbuf, op, counts, algorithm, timeout)

    def allgather(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        *,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Give every rank the blocks of all ranks, in rank order.

        Parameters
        ----------
        sendbuf : array, shape (counts[rank], ...)
            This rank's block, or `IN_PLACE`: the block lies at its place in `recvbuf`.
        recvbuf : array, shape (sum(counts), ...), optional
            Allocated if None.
        counts : sequence of int, optional
            Rows of every rank's block. Default: with `recvbuf`, its rows cut as `numpy.array_split` cuts; without, the
            ranks first agree on their lengths.
        algorithm : str, optional
        timeout : float, optional
            Seconds.

        Returns
        -------
        ndarray

        Raises
        ------
        TypeError, ValueError
            This rank's arguments are wrong; nothing has been sent.
        MismatchError, CollectiveTimeout, BrokenCommunicatorError
        """
        return self._call("allgather", sendbuf, recvbuf, None, counts, algorithm, timeout)

    def allreduce(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        *,
        op: Op | str = SUM,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Reduce over all ranks; every rank gets all of the result, the same bits.

        Parameters
        ----------
        sendbuf : array or number
            This rank's vector, any shape, or `IN_PLACE`.
        recvbuf : array, optional
            Of the same shape; allocated if None.
        op : Op or str
        algorithm : str, optional
        timeout : float, optional
            Seconds.

        Returns
        -------
        ndarray

        Raises
        ------
        TypeError, ValueError
            This rank's arguments are wrong; nothing has been sent.
        MismatchError, CollectiveTimeout, BrokenCommunicatorError
        """
        return self._call("allreduce", sendbuf, recvbuf, op, None, algorithm, timeout)

    def window(self, shape: Any, dtype: Any = np.float64, *, timeout: float | None = None) -> Window:
        """Symmetric memory: an array on every rank, of the same shape, that all ranks can read and write; collective.

        Parameters
        ----------
        shape : int or tuple of int
        dtype : dtype
            Any that holds no Python objects.
        timeout : float, optional
            Seconds to wait for all ranks to come and make it.

        Returns
        -------
        Window
            Zero everywhere.

        Raises
        ------
        TypeError, ValueError
            This rank's arguments are wrong; or, on all ranks, the transport asked for cannot reach them.
        WindowMemoryError
            Some rank has no memory for it; on all ranks.
        MismatchError, CollectiveTimeout, BrokenCommunicatorError
        """
        return make_window(self._one_sided, shape, dtype, timeout)

    def signal(self, shape: Any, *, timeout: float | None = None) -> Signal:
        """Signal cells: 64-bit counters on every rank, zero at the start, that peers raise and a rank waits for.

        Collective; parameters, result and errors as for `window`.
        """
        return make_signal(self._one_sided, shape, timeout)

    def _call(
        self,
        collective: str,
        sendbuf: Any,
        recvbuf: Any,
        op: Op | str | None,
        counts: Sequence[int] | None,
        algorithm: str | None,
        timeout: float | None,
    ) -> Array:
        if self._comm is None:
            raise ValueError(f"{collective}: this communicator is closed")
        self._peers.check_usable()
        if self._registrations != algorithms.registrations():
            self._registrations = algorithms.registrations()
            self._plans.clear()
            self._ready.clear()
        key: Any = None
        if timeout is None and counts is None and type(sendbuf) is np.ndarray and type(recvbuf) is np.ndarray:
            key = (collective, op, algorithm, sendbuf.dtype, sendbuf.shape, recvbuf.dtype, recvbuf.shape)
            try:
                ready = self._ready.get(key)
            except TypeError:  # an op or algorithm without a hash: refused below
                key, ready = None, None
            if ready is not None and self._run_ready(ready, sendbuf, recvbuf):
                return recvbuf
        try:
            timeout = self._settings.timeout if timeout is None else check_seconds("timeout", timeout)
            if algorithm is not None and not isinstance(algorithm, str):
                algorithms.get(algorithm)  # type: ignore[unreachable]
            resolved = None if collective == "allgather" else resolve_op(op)
            if collective == "allgather" and recvbuf is None and counts is None:
                counts = self._agree_on_counts(sendbuf, algorithm, timeout)
            arguments = check_arguments(collective, sendbuf, recvbuf, counts, self.size, self.rank)
            plan, digest = self._plan_for(collective, arguments, resolved, algorithm)
        except (TypeError, ValueError) as error:
            raise self._worded(collective, error) from None
        if key is not None and arguments.result is recvbuf and plan.work_dtype == arguments.vector.dtype:
            if len(self._ready) >= PLANS_KEPT:
                self._ready.clear()
            self._ready[key] = plan, digest
        return self._execute(plan, digest, arguments, timeout)

    def _run_ready(self, ready: _Ready, sendbuf: Array, recvbuf: Array) -> bool:
        """The short way of a call that has been here before, on arrays that need no staging; False if they do."""
        flags, into = sendbuf.flags, recvbuf.flags
        if not (flags.c_contiguous and into.c_contiguous and into.writeable):
            return False
        source, target = arrays.address(sendbuf), arrays.address(recvbuf)
        if source < target + recvbuf.nbytes and target < source + sendbuf.nbytes:
            return False
        self._run(*ready, source, target, (sendbuf, recvbuf), self._settings.timeout)
        return True

    def _worded(self, collective: str, error: Exception) -> Exception:
        """The same error, saying in which call on which rank."""
        text = str(error)
        if not text.startswith(f"{collective}: "):
            text = f"{collective}: {text}"
        return type(error)(f"{text} (rank {self.rank} of {self.size})")

    def _agree_on_counts(self, sendbuf: Any, algorithm: str | None, timeout: float | None) -> tuple[int, ...]:
        """An allgather without lengths: first gather everybody's rows."""
        vector = check_block(sendbuf)
        if algorithm is not None:
            check_algorithm(algorithm, "allgather", 0, self.size, self.rank, None, vector.dtype, 1)
        ones = Arguments(np.array([len(vector)]), None, (self.size,), (1,) * self.size, (), False)
        facts = (("rows", "to be agreed on"), ("row shape", str(vector.shape[1:])))
        plan, digest = self._plan_for("allgather", ones, None, algorithm, facts, vector.dtype)
        return tuple(self._execute(plan, digest, ones, timeout).tolist())

    def _plan_for(
        self,
        collective: str,
        arguments: Arguments,
        op: Op | None,
        algorithm: str | None,
        facts: tuple[tuple[str, str], ...] | None = None,
        told_dtype: np.dtype[Any] | None = None,
    ) -> _Ready:
        """The plan of a call and the digest that its tags carry, from the cache if it has been made before.

        `facts` and `told_dtype` are compared instead of the rows and dtype that move, when lengths are agreed on.
        """
        dtype = arguments.vector.dtype
        key = (collective, op, algorithm, dtype, arguments.shape, arguments.rows, facts, told_dtype)
        found = self._plans.get(key)
        if found is not None:
            return found
        row = int(np.prod(arguments.row_shape, dtype=np.int64))
        counts = tuple(count * row for count in arguments.rows)
        nbytes = sum(counts) * dtype.itemsize
        if op is not None:
            ops.kernel(op, dtype)
        name = algorithm if algorithm is not None else self._algorithm
        if name is None:
            name, _ = choose(
                collective, nbytes, self.size, op, dtype, self._deterministic, self._settings.message_bytes
            )
        check_algorithm(name, collective, nbytes, self.size, self.rank, op, dtype, self._settings.message_bytes)
        if (
            self._deterministic
            and op is not None
            and not (name != algorithms.NATIVE and algorithms.get(name).rank_order)
        ):
            raise ValueError(
                f"algorithm {name!r} does not fold in rank order, as deterministic=True demands; use 'naive'"
            )
        if facts is None:
            facts = (
                ("rows", str(sum(arguments.rows))),
                ("counts", str(arguments.rows)),
                ("row shape", str(arguments.row_shape)),
            )
            if collective == "allreduce":
                facts = (("shape", str(arguments.shape)),)
        program = "" if name == algorithms.NATIVE else algorithms.get(name).fingerprint(collective, self.size)
        if program:
            facts = (*facts, ("program", program))
        call = Call(collective, name, op, dtype, counts, facts, self.rank, self._settings)
        plan: Plan | NativePlan
        if name == algorithms.NATIVE:
            plan = NativePlan(call)
        else:
            plan = Plan(algorithms.get(name).program(collective, self.size, self.rank), call)
        if told_dtype is not None:
            plan.call = replace(call, dtype=told_dtype)
        if len(self._plans) >= PLANS_KEPT:
            self._plans.clear()
        self._ready.clear()
        digest = None if self._settings.check == "off" else plan.call.digest()
        self._plans[key] = plan, digest
        return plan, digest

    def _execute(
        self, plan: Plan | NativePlan, digest: int | None, arguments: Arguments, timeout: float | None
    ) -> Array:
        """Stage what cannot be used where it lies, run, and put the result where it belongs."""
        vector, result, in_place = arguments.vector, arguments.result, arguments.in_place
        work = plan.work_dtype
        packed = vector.dtype != work or not vector.flags.c_contiguous
        source = vector.astype(work, order="C") if packed else vector
        target = result
        if result is not None and (result.dtype != work or not result.flags.c_contiguous):
            target = None
        if in_place and not packed and not plan.in_place_safe:
            if plan.call.collective == "reduce_scatter":
                target = None
            else:
                source = source.copy()
        if target is None:
            target = np.empty(arguments.shape, work)
        self._run(plan, digest, arrays.address(source), arrays.address(target), (source, target), timeout)
        if result is None:
            return target if target.dtype == vector.dtype else target.astype(vector.dtype)
        if target is not result:
            result[...] = target
        return result

    def _run(
        self,
        plan: Plan | NativePlan,
        digest: int | None,
        source: int,
        target: int,
        buffers: tuple[Array, ...],
        timeout: float | None,
        room: Room | None = None,
    ) -> None:
        """Number the call, run it under the waiting loop, count it."""
        assert self._comm is not None
        call, peers = plan.call, self._peers
        if room is None and isinstance(plan, Plan) and plan.one_sided:
            room = self._room_for(plan, timeout)
        scratch = self._scratch_of(plan.scratch_bytes)
        bases = (source, target, self._scratch_address if scratch is self._scratch else arrays.address(scratch))
        waited = peers.waited
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"{call.collective}: another thread is in a call on this communicator (rank {self.rank} of "
                f"{self.size}); let each thread make a Communicator of its own"
            )
        self._number += 1
        try:
            if perf_counter() - self._last > AWAY_SECONDS:
                peers.check_notices(call, self._number)
            if self._settings.check == "full" and self.size > 1:
                self._compare_calls(call, self._number, timeout)
                self._number += 1  # the comparison was a call of its own
            tag = self._tags.tag(digest, self._number)
            if isinstance(plan, Plan):
                started: Execution | NativeExecution = plan.start(self._comm, bases, tag, room)
            else:
                started = plan.start(self._comm, bases, tag)
            peers.wait(started, call, self._number, tag, timeout)
        except BaseException as error:
            peers.leave(error, call, self._number, (buffers, scratch))
            raise
        finally:
            self._lock.release()
        self._last = perf_counter()
        if plan is self._words:
            return
        key = (call.collective, call.algorithm)
        stats = self.stats.get(key)
        if stats is None:
            stats = self.stats[key] = Stats()
        stats.calls += 1
        stats.rounds += started.talking
        stats.bytes_sent += started.sent
        stats.bytes_received += started.received
        stats.wait_seconds += peers.waited - waited

    def _room_for(self, plan: Plan, timeout: float | None) -> Room:
        """Windows and cells for a plan's one-sided steps: kept from call to call, replaced when they are too small."""
        room = self._room
        if room is None or not room.holds(plan):
            ncells, window_bytes = plan.program.cells, plan.window_bytes
            if room is not None and self._room_region is not None:
                ncells, window_bytes = max(ncells, room.ncells), max(window_bytes, room.window_bytes)
                self._room_arena.give_back(self._room_region)
                self._room = self._room_region = None
            lanes = self._settings.in_flight
            region = self._room_arena.allocate(Room.size(lanes, ncells, window_bytes), plan.call, timeout)
            room = Room.carve(region.chunk, region.offset, lanes, ncells, window_bytes, self.size)
            self._room, self._room_region = room, region
        plan.bind(room.shared)
        return room

    def next_call(self) -> int:
        """The number of the next call."""
        return self._number + 1

    def run_call(self, plan: Plan, room: Room, scratch_for: tuple[Array, ...], timeout: float | None) -> None:
        """Run a call of the one-sided layer, which has neither input nor output."""
        digest = None if self._settings.check == "off" else plan.call.digest()
        plan.bind(room.shared)
        self._run(plan, digest, 0, 0, scratch_for, timeout, room)

    def _agree(self, call: Call, word: int, timeout: float | None) -> list[int]:
        """Every rank's word, when all have come with the same call."""
        told = replace(call, counts=(1,) * self.size, op=None, dtype=np.dtype(np.int64))
        if self._words is None:
            self._words = Plan(algorithms.get("naive").program("allgather", self.size, self.rank), told)
        sent, words = np.array([word]), np.zeros(self.size, np.int64)
        self._words.call = call
        digest = None if self._settings.check == "off" else call.digest()
        self._run(self._words, digest, arrays.address(sent), arrays.address(words), (sent, words), timeout)
        return [int(told) for told in words]

    def _scratch_of(self, nbytes: int) -> Array:
        if nbytes <= self._scratch.nbytes:
            return self._scratch
        scratch = np.empty(nbytes, np.uint8)
        if nbytes <= SCRATCH_KEPT:
            self._scratch = scratch
            self._scratch_address = arrays.address(scratch)
        return scratch

    def _compare_calls(self, call: Call, number: int, timeout: float | None) -> None:
        """``check="full"``: gather every rank's digest and call site before data moves."""
        assert self._comm is not None
        site = _call_site()
        record = np.zeros(RECORD_BYTES, np.uint8)
        text = f"{call.digest()} {site}".encode()[:RECORD_BYTES]
        record[: len(text)] = np.frombuffer(text, np.uint8)
        told = replace(call, collective="allgather", op=None, dtype=record.dtype, counts=(RECORD_BYTES,) * self.size)
        plan = Plan(algorithms.get("naive").program("allgather", self.size, self.rank), told)
        gathered = np.zeros((self.size, RECORD_BYTES), np.uint8)
        tag = self._tags.neutral(number)
        started = plan.start(self._comm, (arrays.address(record), arrays.address(gathered), 0), tag)
        self._peers.wait(started, call, number, tag, timeout)
        records = [bytes(row).rstrip(b"\0").decode(errors="replace").partition(" ") for row in gathered]
        if len({digest for digest, _, _ in records}) > 1:
            try:
                self._peers.fail("mismatch", call, number, started, "")
            except Exception as error:
                sites = "".join(f"\n  rank {rank} called it at {where}" for rank, (_, _, where) in enumerate(records))
                error.args = (f"{error}{sites}",)
                raise
        sites_seen = tuple(sorted({where for _, _, where in records}))
        if len(sites_seen) > 1 and sites_seen not in self._sites:
            self._sites.add(sites_seen)
            log.warning("%s (call %d): ranks call it from different places: %s", call.collective, number,
                        "; ".join(sites_seen))  # fmt: skip


def _call_site() -> str:
    """File and line of the first frame outside this package."""
    package = os.path.dirname(__file__)
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(package):
            return f"{frame.filename}:{frame.lineno}"
    return "unknown"
