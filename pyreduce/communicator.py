"""The front door: `Communicator`, and the one path that every collective call takes.

A blocking call on plain contiguous arrays that has been here before goes through a door of the shared-memory engine:
one step (`_door_call`). Everything else goes: arguments are checked on this rank alone, before any communication
(`pyreduce.arguments`); its plan is looked up or made (`pyreduce.plans`); it is put into the queue of calls and waited
for (`pyreduce.pending`), or handed out as a request (`pyreduce.requests`); strided results are unpacked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from types import TracebackType
from typing import Any, TypeGuard

import numpy as np
from mpi4py import MPI

from pyreduce import algorithms, arrays
from pyreduce._core import ffi, lib
from pyreduce.algorithms.shared import Engine, SharedPlan
from pyreduce.arena import Arena
from pyreduce.arguments import IN_PLACE, Arguments, check_arguments, check_block
from pyreduce.arrays import Array
from pyreduce.calls import Call
from pyreduce.execute import Plan, Room, Tags
from pyreduce.launcher import check_comm, largest_tag, virtual_nodes_of, warn_if_foreign_launcher
from pyreduce.memory import SharedArrays
from pyreduce.onesided import OneSided, check_shape, check_size
from pyreduce.ops import SUM, Op, resolve_op
from pyreduce.peers import Peers, compare_clocks, duplicate, keep_for_ever
from pyreduce.pending import AnyPlan, Operation, Pending, Staging, Stats
from pyreduce.plans import Plans
from pyreduce.profiles import find
from pyreduce.progress import Progress
from pyreduce.requests import PersistentRequest, Request
from pyreduce.selection import check_algorithm
from pyreduce.settings import check_seconds, read_settings, trace_directory
from pyreduce.signals import Signal, make_signal
from pyreduce.trace import EVENTS_KEPT, Trace, TraceFile, open_file
from pyreduce.windows import Window, make_window

__all__ = ["IN_PLACE", "Communicator", "Stats"]

MPI_IN_PLACE = MPI.IN_PLACE
DOORS_KEPT = 256
AGAIN_SECONDS = 10.0  # at least, for ranks that have come to say so
PROGRESS = (None, "thread")

_door_call, OK, SHUT = lib.pr_door_call, lib.PR_OK, lib.PR_SHUT


class _Doors(dict[Any, Any]):
    """Doors by op and algorithm; where there is none, one that is shut."""

    def __missing__(self, key: object) -> Any:
        return ffi.NULL


class Communicator:
    """Collectives over the ranks of an mpi4py communicator.

    Made collectively: every rank of `comm` makes it at the same point of its program. It works on its own duplicate
    of `comm`, so its messages never meet the user's. Use it as a context manager or call `close`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Default ``COMM_WORLD``.
    algorithm : str, optional
        What calls use that name none themselves; default: chosen by what was measured (see `pyreduce.selection`).
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
    progress : {"thread"}, optional
        Advance nonblocking calls in a thread of its own while the program computes (see `pyreduce.progress`); default:
        they advance inside calls, `Request.test` and `Request.wait`. Programs of messages then need an MPI that was
        initialised with ``MPI.THREAD_MULTIPLE``, mpi4py's default.
    nodes : str, optional
        Nodes to take instead of those that the ranks are on, for rehearsals on one machine: ``"2x2"`` and other forms
        of `pyreduce.topology.virtual_nodes`. Default ``PYREDUCE_NODES``, which speaks of the ranks of ``COMM_WORLD``.
    trace : path, optional
        A directory in which every rank writes what it did (see `pyreduce.trace`); default ``PYREDUCE_TRACE`` or none,
        which an empty path means as well. Ranks that are not traced harm nobody.
    segment_bytes, in_flight, message_bytes, warn_seconds, arena_bytes : optional
        See `pyreduce.settings`.

    Attributes
    ----------
    rank, size : int
    stats : dict
        `Stats` by ``(collective, algorithm)``, brought up to date when it is looked up.

    Raises
    ------
    TypeError, ValueError
        `comm` is no intracommunicator, a setting is out of range, or a profile is broken (`pyreduce.profiles`).
    CollectiveTimeout
        Not all ranks came to make it in `timeout` seconds.
    OSError
        The trace cannot be written.
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
        arena_bytes: int | None = None,
        progress: str | None = None,
        nodes: str | None = None,
        trace: str | os.PathLike[str] | None = None,
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
            arena_bytes=arena_bytes,
            nodes=nodes,
        )
        virtual = virtual_nodes_of(comm, nodes)
        if algorithm is not None and algorithm not in algorithms.names():
            algorithms.get(algorithm)
        if progress not in PROGRESS:
            raise ValueError(f"progress is {progress!r}, needs to be 'thread' or None")
        if progress == "thread" and MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise ValueError("progress='thread' needs an MPI that was initialised with MPI.THREAD_MULTIPLE")
        shelf = find(comm.size)
        warn_if_foreign_launcher()
        directory, world = trace_directory(trace), MPI.COMM_WORLD
        file = None if directory is None else open_file(directory, world.rank, world.size)
        self._comm: MPI.Intracomm | None = duplicate(comm, self._settings.timeout, self._settings.warn_seconds)
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._peers = Peers(self._comm, self._settings.warn_seconds)
        self._pending = Pending(self._comm, self._peers, Tags(largest_tag()), self._settings)
        self._plans = Plans(
            self._comm,
            self._settings,
            algorithm,
            bool(deterministic),
            self._agree,
            self._shut_doors,
            self._pending.count,
            shelf,
            virtual,
        )
        self._peers.tell_when_broken(self._plans)
        # The plans of calls that have been here before, by everything but where the data lie.
        self._known: dict[Any, tuple[AnyPlan, int | None]] = {}
        self._registrations = algorithms.registrations()
        self._doors = {"reduce_scatter": _Doors(), "allgather": _Doors(), "allreduce": _Doors()}
        self._shut_doors()
        self._words: Plan | None = None
        limit = self._settings.message_bytes
        count = self._pending.count
        self._arena = Arena(self._comm, self._settings.transport, limit, self._agree, count)
        self._one_sided = OneSided(self.rank, self.size, self._settings, self._peers, self._arena, self)
        self._arrays = SharedArrays(Arena(self._comm, "shared", limit, self._agree, count), self._agree)
        if progress == "thread":
            self._pending.progress = Progress(self._pending.push_on)
        self._trace = self._begin_trace(file)
        self._pending.trace = self._peers.trace = self._trace
        if self._trace is not None:
            for collective in self._doors:
                setattr(self, collective, self._tell_short_way(collective, self._trace))

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if value is not None and self._comm is not None:
            self._peers.quit(value, self.next_call())
        self.close()

    def __repr__(self) -> str:
        state = (
            "closed"
            if self._comm is None
            else "broken"
            if self._peers.broken
            else f"{sum(s.calls for s in self.stats.values())} calls"
        )
        return f"<pyreduce.Communicator rank {self.rank} of {self.size}, {state}>"

    @property
    def stats(self) -> dict[tuple[str, str], Stats]:
        """`Stats` by ``(collective, algorithm)``."""
        return self._pending.stats

    def _begin_trace(self, file: TraceFile | None) -> Trace | None:
        """All ranks compare their clocks, also if this one is not traced."""
        assert self._comm is not None
        world = MPI.COMM_WORLD.rank
        own = (world, 0, 0) if file is None else (world, file.stamp, file.count_communicator())
        members, offset, round_trip = compare_clocks(self._comm, own, self._settings.timeout)
        if file is None:
            return None
        return Trace(file, self.rank, self.size, self._settings.in_flight, members, offset, round_trip)

    def _tell_short_way(self, collective: str, trace: Trace) -> Callable[..., Array]:
        """The method of a traced communicator: a call that the queue has not seen went through a door."""
        method = getattr(type(self), collective).__get__(self)
        pending, append, tid, sends = self._pending, trace.append, trace.tid, collective == "reduce_scatter"

        def call(sendbuf: Any, recvbuf: Any = None, **options: Any) -> Array:
            before, begun = trace.begun, perf_counter()
            trace.arrived = begun
            result: Array = method(sendbuf, recvbuf, **options)
            if trace.begun == before:
                now = perf_counter()
                trace.doors = doors = trace.doors + 1
                array = sendbuf if sends and type(sendbuf) is np.ndarray else recvbuf
                number = pending.numbered + doors
                append(("door", tid, begun, now, number, collective, array.nbytes, array.dtype, options))
                if not doors & 1023 and len(trace.events) > EVENTS_KEPT:
                    trace.write()
            return result

        return call

    def close(self) -> None:
        """Complete what is outstanding and free the duplicate communicator; collective, and harmless when repeated.

        A broken communicator's duplicate is kept instead: peers may not come to free it, and late messages must find
        it.
        """
        if self._comm is not None and not MPI.Is_finalized():
            self._pending.close(self._settings.timeout)
            if self._trace is not None:
                waited = {"/".join(key): stats.wait_seconds for key, stats in self.stats.items()}
                self._trace.tell("waited", waited)
            self._one_sided.close()
            if self._peers.drain(self._settings.timeout):
                self._arena.close()
                self._arrays.close()
                self._plans.close()
                self._comm.Free()
            else:
                keep_for_ever((self._arena, self._arrays, self._plans))
        if self._trace is not None:
            self._trace.close()
        self._comm = None
        self._shut_doors()

    def forget_timeout(self) -> None:
        """Wait as long as ``PYREDUCE_TIMEOUT`` says from now on."""
        self._settings = replace(self._settings, timeout=read_settings().timeout)
        self._pending.settings = self._settings

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
        if timeout is None and counts is None:
            if sendbuf is IN_PLACE or sendbuf is MPI_IN_PLACE:
                sendbuf = sendbuf if recvbuf is None else recvbuf
            try:
                door = (
                    self._reduce_scatter_door
                    if op is SUM and algorithm is None
                    else self._doors["reduce_scatter"][op, algorithm]
                )
                code = _door_call(door, id(sendbuf), id(recvbuf))
                if code != SHUT:
                    block = recvbuf if code == OK else self._go_on(sendbuf, recvbuf)
                    return self._front(block) if sendbuf is recvbuf else block
            except BaseException as error:
                self._torn(error, op, algorithm)
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
        if timeout is None and counts is None:
            if sendbuf is IN_PLACE or sendbuf is MPI_IN_PLACE:
                sendbuf = sendbuf if recvbuf is None else recvbuf
            try:
                door = self._allgather_door if algorithm is None else self._doors["allgather"][None, algorithm]
                code = _door_call(door, id(sendbuf), id(recvbuf))
                if code == OK:
                    return recvbuf  # type: ignore[no-any-return]
                if code != SHUT:
                    return self._go_on(sendbuf, recvbuf)
            except BaseException as error:
                self._torn(error, None, algorithm)
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
        if timeout is None:
            if sendbuf is IN_PLACE or sendbuf is MPI_IN_PLACE:
                sendbuf = sendbuf if recvbuf is None else recvbuf
            try:
                door = (
                    self._allreduce_door if op is SUM and algorithm is None else self._doors["allreduce"][op, algorithm]
                )
                code = _door_call(door, id(sendbuf), id(recvbuf))
                if code == OK:
                    return recvbuf  # type: ignore[no-any-return]
                if code != SHUT:
                    return self._go_on(sendbuf, recvbuf)
            except BaseException as error:
                self._torn(error, op, algorithm)
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

    def ireduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        *,
        op: Op | str = SUM,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
    ) -> Request:
        """`reduce_scatter` that only begins: returns a `Request`, whose ``wait()`` returns the block.

        The buffers must be left alone until the request is complete. Calls of a communicator complete in the order in
        which they were started; every rank must start the same ones in the same order, and may wait in any.
        """
        return self._start("reduce_scatter", sendbuf, recvbuf, op, counts, algorithm)

    def iallgather(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        *,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
    ) -> Request:
        """`allgather` that only begins, see `ireduce_scatter`. Without `recvbuf` and `counts` it waits for all
        lengths."""
        return self._start("allgather", sendbuf, recvbuf, None, counts, algorithm)

    def iallreduce(
        self, sendbuf: Any, recvbuf: Any = None, *, op: Op | str = SUM, algorithm: str | None = None
    ) -> Request:
        """`allreduce` that only begins, see `ireduce_scatter`."""
        return self._start("allreduce", sendbuf, recvbuf, op, None, algorithm)

    def reduce_scatter_init(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        *,
        op: Op | str = SUM,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
    ) -> PersistentRequest:
        """`reduce_scatter` with its arguments settled once: ``start()`` and ``wait()`` it again and again, or call it.

        Contents are read at each start. Made by all ranks, as the first call may have to get memory.
        """
        return self._settle("reduce_scatter", sendbuf, recvbuf, op, counts, algorithm)

    def allgather_init(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        *,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
    ) -> PersistentRequest:
        """`allgather` with its arguments settled once, see `reduce_scatter_init`."""
        return self._settle("allgather", sendbuf, recvbuf, None, counts, algorithm)

    def allreduce_init(
        self, sendbuf: Any, recvbuf: Any = None, *, op: Op | str = SUM, algorithm: str | None = None
    ) -> PersistentRequest:
        """`allreduce` with its arguments settled once, see `reduce_scatter_init`."""
        return self._settle("allreduce", sendbuf, recvbuf, op, None, algorithm)

    def empty(self, shape: Any, dtype: Any = np.float64, *, timeout: float | None = None) -> Array:
        """An array, not initialised, that lies in memory which all ranks of a node share; collective.

        Given as the input of a call, whole or as a contiguous slice, it is read by the peers where it lies, so that
        ``shared`` copies nothing. Shapes may differ from rank to rank. The memory is used again when the last reference
        has gone on all ranks and another such array is made. Where the ranks have no shared memory, an ordinary array.

        Parameters
        ----------
        shape : int or tuple of int
        dtype : dtype
            Any that holds no Python objects.
        timeout : float, optional
            Seconds to wait for all ranks to come and make theirs.

        Returns
        -------
        ndarray

        Raises
        ------
        TypeError, ValueError
            This rank's arguments are wrong.
        WindowMemoryError
            Some rank has no memory for it; on all ranks.
        MismatchError, CollectiveTimeout, BrokenCommunicatorError
        """
        where = f"empty (rank {self.rank} of {self.size})"
        dims, kind = check_shape(shape, where), np.dtype(dtype)
        if kind.hasobject:
            raise TypeError(f"{where}: dtype {kind} holds Python objects, which other ranks cannot read")
        check_size(where, int(np.prod(dims, dtype=object)) * kind.itemsize)
        self._check_open("empty")
        seconds = self._settings.timeout if timeout is None else check_seconds("timeout", timeout)
        call = Call(
            "empty",
            "shared",
            None,
            np.dtype(np.uint8),
            (1,) * self.size,
            self._arrays.facts(),
            self.rank,
            self._settings,
        )
        self._plans.open_engine(call, seconds)
        engine = self._engine()
        if engine is None:
            return np.empty(dims, kind)
        try:
            return self._arrays.make(dims, kind, call, seconds)
        finally:  # whatever has become of it, memory may have come or gone
            self._pending.enter("empty")
            engine.know_chunks(self._arrays.chunks)
            self._pending.leave()

    def _check_open(self, what: str) -> None:
        if self._comm is None:
            raise ValueError(f"{what}: this communicator is closed (rank {self.rank} of {self.size})")
        self._peers.check_usable()

    def _engine(self) -> Engine | None:
        """The engine, which the queue is told of as soon as there is one."""
        self._pending.engine = self._plans.engine
        return self._plans.engine

    def _shut_doors(self) -> None:
        """Every call takes the long way, until doors are opened again."""
        for doors in self._doors.values():
            doors.clear()
        self._known.clear()
        self._in_doors = 0
        # Those of the most common calls, at hand.
        self._reduce_scatter_door = self._allgather_door = self._allreduce_door = ffi.NULL

    def _prepare(
        self,
        collective: str,
        sendbuf: Any,
        recvbuf: Any,
        op: Op | str | None,
        counts: Sequence[int] | None,
        algorithm: str | None,
        timeout: float | None,
        fresh: bool = False,
    ) -> tuple[AnyPlan, int | None, Staging]:
        """Check the arguments, find the plan, and say where the data will lie."""
        self._check_open(collective)
        try:
            if algorithm is not None and not isinstance(algorithm, str):
                algorithms.get(algorithm)  # type: ignore[unreachable]
            resolved = None if collective == "allgather" else resolve_op(op)
            if collective == "allgather" and recvbuf is None and counts is None:
                counts = self._agree_on_counts(sendbuf, algorithm, timeout)
            arguments = check_arguments(collective, sendbuf, recvbuf, counts, self.size, self.rank)
            plan, digest = self._plans.find(collective, arguments, resolved, algorithm, timeout, fresh=fresh)
        except (TypeError, ValueError) as error:
            raise self._worded(collective, error) from None
        self._engine()
        staging = Staging(plan, arguments)
        if staging.direct and type(plan) is SharedPlan and counts is None and not fresh:
            self._open_door(collective, op, algorithm, plan, sendbuf, recvbuf)
        return plan, digest, staging

    def _open_door(
        self, collective: str, op: object, algorithm: str | None, plan: SharedPlan, sendbuf: Any, recvbuf: Any
    ) -> None:
        """Next time a call with such arrays goes the short way."""
        if self._settings.check == "full" or type(sendbuf) is not np.ndarray or type(recvbuf) is not np.ndarray:
            return
        if _is_unhashable((op, algorithm)):  # mpi4py's constants are
            return
        if self._in_doors >= DOORS_KEPT:
            self._shut_doors()
        key = (op if collective != "allgather" else None, algorithm)
        door = self._doors[collective].get(key)
        if door is None:
            door = self._doors[collective][key] = plan.engine.make_door()
            if key in ((SUM, None), (None, None)):
                setattr(self, f"_{collective}_door", door)
        if plan.enter_door(door, sendbuf, recvbuf):
            self._in_doors += 1

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
        """A blocking call that no door is open for."""
        key: Any = None
        if counts is None and type(sendbuf) is np.ndarray and type(recvbuf) is np.ndarray:
            in_place = sendbuf is recvbuf
            key = (collective, op, algorithm, in_place, sendbuf.dtype, sendbuf.shape, recvbuf.dtype, recvbuf.shape)
            known = self._find_known(key)
            if known is not None and sendbuf.flags.c_contiguous and sendbuf.flags.aligned and recvbuf.flags.carray:
                source, target = arrays.address(sendbuf), arrays.address(recvbuf)
                if in_place or source + sendbuf.nbytes <= target or target + recvbuf.nbytes <= source:
                    plan, digest = known
                    seconds = self._settings.timeout if timeout is None else self._seconds(collective, timeout)
                    self._pending.run(Operation(plan, digest, source, target, (sendbuf, recvbuf)), seconds)
                    return recvbuf
        seconds = self._seconds(collective, timeout)
        plan, digest, staging = self._prepare(collective, sendbuf, recvbuf, op, counts, algorithm, seconds)
        # In place, it is for an allreduce alone that input and output begin where the array does.
        plain = key is not None and staging.direct and (not in_place or collective == "allreduce")
        if plain and not _needs_room(plan):
            with suppress(TypeError):  # mpi4py's constants have no hash
                self._known[key] = plan, digest
        return self._run(plan, digest, staging, seconds)

    def _find_known(self, key: Any) -> tuple[AnyPlan, int | None] | None:
        """The plan of such a call, if this rank has made one: nothing is left to look at but where the arrays lie."""
        if self._registrations != algorithms.registrations():
            self._registrations = algorithms.registrations()
            self._known.clear()
        try:
            return self._known.get(key) if self._comm is not None else None
        except TypeError:  # mpi4py's constants have no hash
            return None

    def _run(self, plan: AnyPlan, digest: int | None, staging: Staging, timeout: float | None) -> Array:
        staging.read()
        self._pending.run(self._operation(plan, digest, staging, timeout), timeout)
        return staging.write()

    def _operation(self, plan: AnyPlan, digest: int | None, staging: Staging, timeout: float | None) -> Operation:
        room = self._plans.room_for(plan, timeout) if _needs_room(plan) else None
        source, target = staging.source, staging.target
        return Operation(plan, digest, arrays.address(source), arrays.address(target), (source, target), room)

    def _start(
        self,
        collective: str,
        sendbuf: Any,
        recvbuf: Any,
        op: Op | str | None,
        counts: Sequence[int] | None,
        algorithm: str | None,
    ) -> Request:
        seconds = self._settings.timeout
        plan, digest, staging = self._prepare(collective, sendbuf, recvbuf, op, counts, algorithm, seconds)
        staging.read()
        operation = self._operation(plan, digest, staging, seconds)
        self._pending.start(operation)
        return Request(self._pending, operation, staging)

    def _settle(
        self,
        collective: str,
        sendbuf: Any,
        recvbuf: Any,
        op: Op | str | None,
        counts: Sequence[int] | None,
        algorithm: str | None,
    ) -> PersistentRequest:
        seconds = self._settings.timeout
        plan, digest, staging = self._prepare(collective, sendbuf, recvbuf, op, counts, algorithm, seconds, fresh=True)
        return PersistentRequest(self._pending, self._plans, plan, digest, staging)

    def _front(self, vector: Array) -> Array:
        """The rows of a reduce_scatter in place that are this rank's block."""
        each, more = divmod(len(vector), self.size)
        return vector[: each + (self.rank < more)]

    def _go_on(self, sendbuf: Array, recvbuf: Array) -> Array:
        """A door has begun a call that could not be completed within a moment: wait for it."""
        self._pending.complete_light((sendbuf, recvbuf))
        return recvbuf

    def _torn(self, error: BaseException, op: object, algorithm: object) -> None:
        """An exception on the short way: raise it, unless it only says that a door cannot be looked up."""
        if isinstance(error, TypeError) and _is_unhashable((op, algorithm)):
            return
        self._pending.leave_light(error)
        raise error

    def _seconds(self, collective: str, timeout: float | None) -> float | None:
        try:
            return self._settings.timeout if timeout is None else check_seconds("timeout", timeout)
        except (TypeError, ValueError) as error:
            raise self._worded(collective, error) from None

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
        plan, digest = self._plans.find("allgather", ones, None, algorithm, timeout, facts, vector.dtype)
        self._engine()
        return tuple(self._run(plan, digest, Staging(plan, ones), timeout).tolist())

    def next_call(self) -> int:
        """The number of the next call."""
        return self._pending.number + 1

    def run_call(self, plan: Plan, room: Room, scratch_for: tuple[Array, ...], timeout: float | None) -> None:
        """Run a call of the one-sided layer, which has neither input nor output."""
        digest = None if self._settings.check == "off" else plan.call.digest()
        plan.bind(room.shared)
        self._pending.run(Operation(plan, digest, 0, 0, scratch_for, room), timeout)

    def _agree(self, call: Call, word: int, timeout: float | None) -> list[int]:
        """Every rank's word, when all have come with the same call.

        Once more around: who then has all words again knows that all ranks have had them the first time. So nobody has
        given up, and what follows may be a collective of the MPI's own, which has no deadline.
        """
        if self._words is None:
            told = call.like(counts=(1,) * self.size, op=None, dtype=np.dtype(np.int64))
            self._words = Plan(algorithms.get("naive").program("allgather", self.size, self.rank), told)
            self._pending.silent.add(self._words)
        self._words.call = call
        digest = None if self._settings.check == "off" else call.digest()
        for _ in range(2):
            sent, words = np.array([word]), np.zeros(self.size, np.int64)
            operation = Operation(self._words, digest, arrays.address(sent), arrays.address(words), (sent, words))
            self._pending.run(operation, timeout)
            timeout = None if timeout is None else max(timeout, AGAIN_SECONDS)
        return [int(told) for told in words]


def _needs_room(plan: AnyPlan) -> TypeGuard[Plan]:
    """Whether a plan has one-sided steps."""
    return isinstance(plan, Plan) and plan.one_sided


def _is_unhashable(key: object) -> bool:
    try:
        hash(key)
    except TypeError:
        return True
    return False
