"""The calls of a communicator, one after the other: a queue, whose head is under way.

Every call, blocking or not, is an `Operation` in the queue of its communicator. All ranks put the same calls into it in
the same order, so that they run in the same order everywhere, whatever is waited for first: to complete one is to
complete those before it. Only the head moves data. So algorithms need not know of each other: they take turns in
scratch, windows and the arena.

The one exception are calls that come through a door of the shared-memory engine (csrc/shared_door.c): those run at
once, because the doors are open only while the queue is empty. If one cannot be completed within a moment, it becomes
the head of the queue (`Pending.adopt`).

Whoever waits also pushes the queues of other communicators from time to time: a peer may be waiting for this rank
there.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias
from weakref import WeakSet

import numpy as np
from mpi4py import MPI

from pyreduce import algorithms, arrays
from pyreduce._core import lib
from pyreduce.algorithms.hierarchical import HierarchicalExecution, HierarchicalPlan
from pyreduce.algorithms.native import NativeExecution, NativePlan
from pyreduce.algorithms.shared import Engine, SharedCounts, SharedExecution, SharedPlan
from pyreduce.arguments import Arguments
from pyreduce.arrays import Array
from pyreduce.calls import Call
from pyreduce.execute import Execution, Plan, Room, ShortExecution, Tags, TracedShortExecution
from pyreduce.peers import Peers, Watch, log
from pyreduce.settings import Settings
from pyreduce.trace import Trace

__all__ = ["AnyPlan", "Operation", "Pending", "Staging", "Stats"]

AnyPlan: TypeAlias = "Plan | NativePlan | SharedPlan | HierarchicalPlan"

SCRATCH_KEPT = 64 << 20
AWAY_SECONDS = 0.05  # after a longer pause a rank looks for notices before it joins a call
RECORD_BYTES = 512  # what check="full" exchanges: digest and call site


@dataclass(slots=True)
class Stats:
    """What the calls of one collective by one algorithm have cost this rank so far.

    Attributes
    ----------
    calls : int
        Calls completed. An allgather that is given neither `recvbuf` nor `counts` counts twice: it gathers the lengths
        first.
    rounds : int
        Rounds of messages in them (a round counts once a call, however many segments run it); for ``shared``, pieces.
    bytes_sent, bytes_received : int
        Bytes of point-to-point messages, and of what was put into and got from peers' windows; for ``shared``, of what
        was laid out for peers and read of theirs. What ``native`` moves inside the MPI cannot be seen, and counts 0.
    wait_seconds : float
        Time in which nothing could be done but wait for peers.
    why : str
        Why the last of these calls ran by this algorithm.
    """

    calls: int = 0
    rounds: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    wait_seconds: float = 0.0
    why: str = ""


class Staging:
    """Where the data of a call lie while it runs, if not in the user's arrays.

    Attributes
    ----------
    source, target : ndarray
        Contiguous, of the dtype that the plan works in.
    """

    def __init__(self, plan: AnyPlan, arguments: Arguments) -> None:
        vector, result, work = arguments.vector, arguments.result, plan.work_dtype
        self.vector = vector
        self.result = result
        source, target = vector, result
        if vector.dtype != work or not vector.flags.c_contiguous:
            source = np.empty(vector.shape, work)
        if result is not None and (result.dtype != work or not result.flags.c_contiguous):
            target = None
        if arguments.in_place and source is vector and not plan.in_place_safe:
            if plan.call.collective == "reduce_scatter":
                target = None
            else:
                source = np.empty(vector.shape, work)
        self.source: Array = source
        self.target: Array = np.empty(arguments.shape, work) if target is None else target
        self.direct = self.source is vector and self.target is result

    def read(self) -> None:
        """Take in the user's input."""
        if self.source is not self.vector:
            self.source[...] = self.vector

    def write(self) -> Array:
        """Put the result where it belongs."""
        if self.result is None:
            return self.target if self.target.dtype == self.vector.dtype else self.target.astype(self.vector.dtype)
        if self.target is not self.result:
            self.result[...] = self.target
        return self.result


class Operation:
    """One call on its way.

    Attributes
    ----------
    number : int
        The call's number on its communicator.
    started : Execution, NativeExecution, SharedExecution or None
        None until it is the head of the queue.
    done : bool
    error : BaseException or None
        What ended it, if it could not be completed.
    """

    __slots__ = (
        "buffers", "digest", "done", "error", "number", "plan", "room", "scratch", "source", "started", "tag", "target",
        "waited", "watch",
    )  # fmt: skip

    def __init__(
        self,
        plan: AnyPlan,
        digest: int | None,
        source: int,
        target: int,
        buffers: object,
        room: Room | None = None,
    ) -> None:
        self.plan = plan
        self.digest = digest
        self.source = source
        self.target = target
        self.buffers = buffers  # kept alive until it is done
        self.room = room
        self.number = self.tag = 0
        self.scratch: Array | None = None
        self.started: Execution | ShortExecution | NativeExecution | SharedExecution | HierarchicalExecution | None = (
            None
        )
        self.watch: Watch | None = None
        self.waited = 0.0
        self.done = False
        self.error: BaseException | None = None


_active: dict[int, Pending] = {}  # queues that are not empty, by id


class Pending:
    """The queue of one communicator.

    Parameters
    ----------
    comm : MPI.Intracomm
        The library's own.
    peers : Peers
    tags : Tags
    settings : Settings
    """

    def __init__(self, comm: MPI.Intracomm, peers: Peers, tags: Tags, settings: Settings) -> None:
        self.comm = comm
        self.peers = peers
        self.tags = tags
        self.settings = settings
        self.engine: Engine | None = None
        self.progress: Any = None  # pyreduce.progress.Progress, if there is one
        self.trace: Trace | None = None
        self.lock = threading.RLock()  # which knows whose it is
        self.inside = 0  # the thread that works on a call
        self.silent: set[AnyPlan] = set()  # plans of exchanges that belong to the call that follows them
        self._queue: deque[Operation] = deque()
        self.numbered = 0
        self._stats: dict[tuple[str, str], Stats] = {}
        self._last = perf_counter()
        self._scratch = np.empty(0, np.uint8)
        self._scratch_address = 0
        self._sites: set[tuple[str, ...]] = set()
        self._unused: list[Plan] = []  # persistent plans that nobody will start again
        self.closed = False
        self.lent = False  # the lock is held by a thread that only pushes this queue on, and will soon let go
        self.persistent: WeakSet[Plan] = WeakSet()
        peers.tell_when_broken(self)

    # ---- who may work on it

    def enter(self, what: str, own_light: bool = False) -> None:
        """Take the communicator for this thread; a call that came through a door and is not done joins the queue.

        `own_light` says that it is this thread's; another's, which is blocked in it, must not be touched.
        """
        if self.closed:
            raise ValueError(f"{what}: this communicator is closed (rank {self.peers.rank} of {self.peers.size})")
        if self.inside == threading.get_ident() and self._in_a_call():  # a signal handler, in the middle of one
            raise RuntimeError(self._crossed(what))
        # A signal may raise anywhere here, also just after a lock was acquired: what has been taken is found by asking.
        try:
            if not self.lock.acquire(blocking=own_light or self.lent):
                raise RuntimeError(self._crossed(what))
            if self.progress is not None:
                self.progress.hold()
            engine = self.engine
            if engine is not None:
                if not engine.shut() or (lib.pr_door_waiting(engine.handle) and not own_light):
                    raise RuntimeError(self._crossed(what))
                if not self._queue:
                    self.adopt()
                lib.pr_door_taken_over(engine.handle)
            while self._unused and self.peers.broken is None and not self._queue:
                self._unused.pop().free()
            self.inside = threading.get_ident()
        except BaseException:
            self._release()
            raise

    def leave(self) -> None:
        """Give it back; doors open if nothing is outstanding."""
        if self.engine is not None and not self._queue and self.peers.broken is None:
            self.engine.open()
        self.inside = 0
        self._release()

    def _at_work(self, what: str, operation: Operation | None = None, own_light: bool = False) -> _Work:
        """What works on the queue: between `enter` and `leave`; if it raises, nothing of the queue can be completed."""
        return _Work(self, what, operation, own_light)

    def _release(self) -> None:
        if self.progress is not None:
            self.progress.release(bool(self._queue))
        while self.lock._is_owned():  # type: ignore[attr-defined]  # a signal may have kept earlier calls from this
            self.lock.release()

    def _in_a_call(self) -> bool:
        """Whether this thread, which is at the beginning of a call, is in the middle of another.

        It is not if a signal's handler raised just before that other one gave the communicator back.
        """
        frames = (frame for frame, _ in traceback.walk_stack(None))
        return sum(frame.f_code in _CALLS and frame.f_locals["self"] is self for frame in frames) > 1

    def _crossed(self, what: str) -> str:
        return (
            f"{what}: another thread is in a call on this communicator (rank {self.peers.rank} of {self.peers.size}); "
            "let each thread make a Communicator of its own"
        )

    def forget(self) -> None:
        """The communicator is broken: nothing goes the short way, and who comes late finds out."""
        if self.engine is not None:
            self.engine.give_up()

    # ---- the queue

    @property
    def number(self) -> int:
        """Of the last call."""
        return self.numbered + (int(lib.pr_door_calls(self.engine.handle)) if self.engine is not None else 0)

    def count(self) -> None:
        """What was agreed on was not for a call that follows, but something of its own."""
        self.numbered += 1

    def adopt(self) -> Operation | None:
        """Make a call that has come in through a door, and is not done, the head of the queue."""
        assert self.engine is not None
        plan = self.engine.current()
        if plan is None:
            return None
        operation = Operation(plan, None, 0, 0, None)
        operation.number = self.number
        operation.started = SharedExecution(plan)
        if self.trace is not None:
            self.trace.doors += 1
            self.trace.begin(operation.number, plan.call, plan.why, False)
        self._queue.append(operation)
        _active[id(self)] = self
        return operation

    def complete_light(self, buffers: object) -> None:
        """Wait for the call that a door has begun; `buffers` are its."""
        with self._at_work("a call", own_light=True):
            if self._queue:
                head = self._queue[0]
                head.buffers = buffers
                self._complete(head, self.settings.timeout)

    def leave_light(self, error: BaseException, plan: AnyPlan | None = None) -> None:
        """An exception has come while a door was being used; a call that it has begun (with `plan`) is torn."""
        if self.engine is None or self.peers.broken is not None:
            return
        begun = lib.pr_door_waiting(self.engine.handle) or (plan is not None and self.engine.current() is plan)
        if begun or (self._queue and self._queue[0].buffers is None):  # adopted, and no more
            self.enter("a call", own_light=True)
            try:
                if self._queue:
                    self._fail(error, None)
            finally:
                self.leave()

    def find_light(self, plan: AnyPlan) -> Operation | None:
        """The call of a persistent request that was started through a door; None if it is done."""
        found = None
        if not self.closed:  # to close completes everything
            self.enter(plan.call.collective)  # which adopts what is not done
            try:
                found = next((operation for operation in self._queue if operation.plan is plan), None)
            finally:
                self.leave()
        if found is None:
            self.peers.check_usable()
        return found

    def free_later(self, plan: AnyPlan) -> None:
        """A persistent plan is not used again: what the MPI keeps for it is given back at the next call."""
        if isinstance(plan, Plan) and plan.kept is not None:
            self._unused.append(plan)

    def run(self, operation: Operation, timeout: float | None) -> None:
        """A blocking call."""
        if self._run_short(operation, timeout):
            return
        with self._at_work(operation.plan.call.collective, operation):
            self._push(operation, timeout)
            self._complete(operation, timeout)

    def _run_short(self, operation: Operation, timeout: float | None) -> bool:
        """`run`, in fewer steps, of a call that is alone here and that the C core makes; False if this is none."""
        plan, peers = operation.plan, self.peers
        if type(plan) is not Plan or plan.short is None or self.inside or self.settings.check == "full":
            return False
        mine = False  # nothing of another thread's is touched
        try:
            if not self.lock.acquire(blocking=False):
                return False
            mine = True
            if (
                self._queue
                or self.inside
                or self.closed
                or self.engine is not None
                or self.progress is not None
                or self._unused
                or plan in self.silent
                or peers.broken is not None
                or (plan.own_scratch is None and plan.scratch_bytes > self._scratch.nbytes)
                or perf_counter() - self._last > AWAY_SECONDS
            ):
                return False
            self.inside = threading.get_ident()
            self.numbered = operation.number = number = self.numbered + 1
            operation.tag = self.tags.tag(operation.digest, number)
            trace = self.trace
            if trace is not None:
                trace.arrived = perf_counter()
                trace.begin(number, plan.call, plan.why, False)
            self._queue.append(operation)
            own, operation.waited = plan.own_scratch, peers.waited
            scratch = self._scratch_address if own is None else arrays.address(own)
            bases = (operation.source, operation.target, scratch)
            operation.started = started = plan.start(self.comm, bases, operation.tag, None, trace)
            if not started.advance():
                idle_since = perf_counter()
                if trace is not None:
                    trace.pause(started, idle_since)
                started.linger()
                now = perf_counter()
                peers.waited += now - idle_since
                if trace is not None:
                    trace.resume(now, started)
                if not started.advance():
                    _active[id(self)] = self
                    self._complete(operation, timeout)
                    return True
            self._finish(operation)
        except BaseException as error:
            if operation.number:
                self._fail(error, operation)
            raise
        finally:
            if mine or self.lock._is_owned():  # type: ignore[attr-defined]
                self.inside = 0
                self._release()
        return True

    def start(self, operation: Operation) -> None:
        """A nonblocking call: put it into the queue, and do what can be done at once, or leave that to the thread."""
        with self._at_work(operation.plan.call.collective, operation):
            self._push(operation, self.settings.timeout)
            if self.progress is None:
                self._advance()

    def complete(self, operation: Operation, timeout: float | None) -> None:
        """Wait until a call of the queue is done.

        Raises
        ------
        MismatchError, CollectiveTimeout, BrokenCommunicatorError
            Of this call, or of one before it.
        """
        if operation.done:
            return
        self._raise_for(operation)
        with self._at_work(operation.plan.call.collective, operation):
            if not operation.done:  # nor has a thread ended it meanwhile
                self._raise_for(operation)
                self._complete(operation, timeout)

    def test(self, operation: Operation) -> bool:
        """Do what can be done, and say whether a call of the queue is done."""
        if operation.done:
            return True
        self._raise_for(operation)
        with self._at_work(operation.plan.call.collective, operation):
            self._advance()
            if not operation.done:
                self._raise_for(operation)
                self._watch(self._queue[0]).glance()
        return operation.done

    def push_on(self, linger: bool) -> bool:
        """Do what can be done, for others than the owner of the queue; whether anything is left to do.

        What goes wrong is kept for whoever waits for the call.
        """
        try:
            self._advance()
            if self._queue:
                head = self._queue[0]
                assert head.started is not None
                if linger:
                    head.started.linger()
                self._watch(head).glance()
        except Exception as error:
            self._fail(error, self._queue[0] if self._queue else None)
        return bool(self._queue)

    def close(self, timeout: float | None) -> None:
        """Complete everything; nothing is called afterwards."""
        if self.peers.broken is None and not self.closed:
            with self._at_work("close"):
                while self._queue:
                    self._complete(self._queue[-1], timeout)
                for plan in list(self.persistent):
                    plan.free()
        if self.progress is not None:
            self.progress.stop()
        self.closed = True
        if self.engine is not None:
            self.engine.shut()

    def _raise_for(self, operation: Operation) -> None:
        if operation.error is not None:
            raise operation.error
        self.peers.check_usable()

    def _push(self, operation: Operation, timeout: float | None) -> None:
        if self.peers.broken is not None:
            self.peers.check_usable()
        call = operation.plan.call
        if self.trace is not None:
            self.trace.arrived = perf_counter()
        if self.settings.check == "full" and self.peers.size > 1:
            while self._queue:
                self._complete(self._queue[-1], timeout)
            self._compare_calls(call, self.number + 1, timeout)
            self.numbered += 1  # the comparison was a call of its own
        operation.number = self.number + 1
        if operation.plan not in self.silent or self.settings.check == "full":  # full compares every message's call
            self.numbered += 1
        operation.tag = self.tags.tag(operation.digest, operation.number)
        self._queue.append(operation)
        _active[id(self)] = self
        if len(self._queue) == 1:
            if perf_counter() - self._last > AWAY_SECONDS:
                self.peers.check_notices(call, operation.number)
            self._begin(operation)

    def _begin(self, operation: Operation) -> None:
        """Start the head of the queue."""
        plan = operation.plan
        scratch = plan.own_scratch if isinstance(plan, Plan) else None
        operation.scratch = scratch = self._scratch_of(plan.scratch_bytes) if scratch is None else scratch
        address = self._scratch_address if scratch is self._scratch else arrays.address(scratch)
        bases = (operation.source, operation.target, address)
        operation.waited = self.peers.waited
        if self.trace is not None:
            self.trace.begin(operation.number, plan.call, plan.why, plan in self.silent)
        if isinstance(plan, Plan):
            operation.started = plan.start(self.comm, bases, operation.tag, operation.room, self.trace)
        else:
            operation.started = plan.start(self.comm, bases, operation.tag)

    def _finish(self, operation: Operation) -> None:
        """The head is done: count it, and start the next."""
        self._queue.popleft()
        operation.done = True
        operation.buffers = operation.scratch = None
        self._last = perf_counter()
        if self.trace is not None:
            self.trace.finish(self._last)
        plan, started = operation.plan, operation.started
        assert started is not None
        if not isinstance(plan, SharedPlan) and plan not in self.silent:
            stats = self._stats_of(plan.call.collective, plan.call.algorithm, plan.why)
            stats.calls += 1
            stats.rounds += started.talking
            stats.bytes_sent += started.sent
            stats.bytes_received += started.received
            stats.wait_seconds += self.peers.waited - operation.waited
        if self._queue:
            self._begin(self._queue[0])
        else:
            _active.pop(id(self), None)

    def _advance(self) -> None:
        """Everything that can be done without waiting."""
        while self._queue:
            head = self._queue[0]
            assert head.started is not None
            if not head.started.advance():
                return
            self._finish(head)

    def _complete(self, operation: Operation, timeout: float | None) -> None:
        end = None if timeout is None else perf_counter() + timeout
        while not operation.done:
            head = self._queue[0]
            assert head.started is not None
            left = timeout if head is operation or end is None else max(end - perf_counter(), 0.0)
            self.peers.wait(head.started, head.plan.call, head.number, head.tag, left, self._push_others)
            self._finish(head)

    def _push_others(self) -> None:
        """Let other communicators' calls go on meanwhile."""
        for other in list(_active.values()):
            if other is not self and other.progress is None and other.lock.acquire(blocking=False):
                other.lent = True
                try:
                    if not other.inside:
                        other.push_on(linger=False)
                finally:
                    other.lent = False
                    other.lock.release()

    def _watch(self, head: Operation) -> Watch:
        if head.watch is None:
            assert head.started is not None
            head.watch = Watch(self.peers, head.started, head.plan.call, head.number, head.tag, None)
        return head.watch

    def _fail(self, error: BaseException, operation: Operation | None) -> None:
        """Nothing of the queue can be completed any more."""
        if operation is not None and operation.number == 0 and self.peers.broken is not None:
            operation.error = error  # it came too late to be part of it
            return
        ended = list(self._queue)
        if operation is not None and operation not in ended and not operation.done:
            ended.append(operation)
        head = ended[0] if ended else operation
        if head is not None:
            self.peers.leave(error, head.plan.call, head.number, [(op.buffers, op.scratch, op.started) for op in ended])
        if self.trace is not None:
            if head is not None and isinstance(head.started, TracedShortExecution):
                head.started.tell()
            self.trace.torn(error)
        for op in ended:
            op.error = error
        self._queue.clear()
        _active.pop(id(self), None)

    # ---- what it works with

    @property
    def stats(self) -> dict[tuple[str, str], Stats]:
        """By collective and algorithm; brought up to date."""
        if self.engine is not None:
            for plan in list(self.engine.plans.values()):
                self._count(plan.counts, *plan.take_counts())
            while self.engine.retired:
                self._count(*self.engine.retired.pop())
        return self._stats

    def _stats_of(self, collective: str, algorithm: str, why: str) -> Stats:
        key = (collective, algorithm)
        stats = self._stats.get(key)
        if stats is None:
            stats = self._stats[key] = Stats()
        stats.why = why or stats.why
        return stats

    def _count(self, each: SharedCounts, calls: int, waited: float) -> None:
        """What the engine has counted since the last look."""
        if calls:
            stats = self._stats_of(each.collective, algorithms.SHARED, each.why)
            stats.calls += calls
            stats.rounds += calls * each.pieces
            stats.bytes_sent += calls * each.sent
            stats.bytes_received += calls * each.received
            stats.wait_seconds += waited

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
        site = _call_site()
        record = np.zeros(RECORD_BYTES, np.uint8)
        text = f"{call.digest()} {site}".encode()[:RECORD_BYTES]
        record[: len(text)] = np.frombuffer(text, np.uint8)
        told = call.like(collective="allgather", op=None, dtype=record.dtype, counts=(RECORD_BYTES,) * self.peers.size)
        plan = Plan(algorithms.get("naive").program("allgather", self.peers.size, self.peers.rank), told)
        gathered = np.zeros((self.peers.size, RECORD_BYTES), np.uint8)
        tag = self.tags.neutral(number)
        started = plan.start(self.comm, (arrays.address(record), arrays.address(gathered), 0), tag)
        self.peers.wait(started, call, number, tag, timeout, self._push_others)
        records = [bytes(row).rstrip(b"\0").decode(errors="replace").partition(" ") for row in gathered]
        if len({digest for digest, _, _ in records}) > 1:
            try:
                self.peers.fail("mismatch", call, number, started, "")
            except Exception as error:
                sites = "".join(f"\n  rank {rank} called it at {where}" for rank, (_, _, where) in enumerate(records))
                error.args = (f"{error}{sites}",)
                raise
        sites_seen = tuple(sorted({where for _, _, where in records}))
        if len(sites_seen) > 1 and sites_seen not in self._sites:
            self._sites.add(sites_seen)
            log.warning("%s (call %d): ranks call it from different places: %s", call.collective, number,
                        "; ".join(sites_seen))  # fmt: skip


# The methods that enter.
_CALLS = {
    method.__code__
    for method in (
        Pending.complete_light, Pending.leave_light, Pending.find_light, Pending.run, Pending.start, Pending.complete,
        Pending.test, Pending.close,
    )
}  # fmt: skip


class _Work:
    """The context of `Pending._at_work`.

    Not a generator: a signal's handler may raise between its ``yield`` and the body of the ``with`` statement, and the
    traceback would keep it, with all that it has taken.
    """

    __slots__ = ("arguments", "operation", "pending")

    def __init__(self, pending: Pending, what: str, operation: Operation | None, own_light: bool) -> None:
        self.pending = pending
        self.arguments = (what, own_light)
        self.operation = operation

    def __enter__(self) -> None:
        self.pending.enter(*self.arguments)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self.pending._fail(error, self.operation)
        finally:
            self.pending.leave()


def _call_site() -> str:
    """File and line of the first frame outside this package."""
    package = os.path.dirname(__file__)
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(package):
            return f"{frame.filename}:{frame.lineno}"
    return "unknown"
