"""shared: reduce_scatter, allgather and allreduce through memory that all ranks of a node share.

Source
    The engine of csrc/shared_engine.c, where the protocol and its proof stand.
Cost
    The vector passes through a fixed arena in pieces that stay in the caches: a rank reads its input once and writes
    its result once, and reads of each peer what it needs. One exchange of cache lines for what is small, a few per
    piece otherwise. No messages.
Restrictions
    All ranks on one node, and memory for the arena (`arena_bytes` a rank).
Best for
    Every size within a node. Folds in rank order.

How calls that differ are found: what a rank publishes carries the digest of its call; every peer compares before it
uses the data. A rank that has given up spoils its own digest, so that one who comes later is told.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from pyreduce import ops
from pyreduce._core import ffi, lib
from pyreduce.arrays import Array
from pyreduce.calls import Call
from pyreduce.errors import CoreError

if TYPE_CHECKING:  # so that explain can read this file where there is no MPI
    from pyreduce.arena import Arena, Region
    from pyreduce.transports import Chunk

__all__ = ["Engine", "SharedExecution", "SharedPlan"]

COLLECTIVES = {
    "reduce_scatter": lib.PR_REDUCE_SCATTER,
    "allgather": lib.PR_ALLGATHER,
    "allreduce": lib.PR_ALLREDUCE,
}
HEAD_BYTES = lib.pr_shared_bytes(0)
SLOTS = 4
SLOT_MULTIPLE = 128
LEAST_SHARE = 512  # bytes of a slot for each peer
LINGER_NS = 1_000_000
# Measured with 2 to 4 ranks on 2 cores: up to here an allreduce is faster in one phase, each rank folding all of it.
SMALL_BYTES = 16 << 10


class Engine:
    """One rank's end of the engine.

    Parameters
    ----------
    region : Region
        The arena: zeroed memory that all ranks reach.
    nranks, rank : int
    looks : int
        How often a waiting loop looks before it yields its core.
    counted : bool
        Keep the counts of plans that are gone.
    """

    def __init__(self, region: Region, nranks: int, rank: int, looks: int, counted: bool = True) -> None:
        self.region = region
        self.nranks = nranks
        self.rank = rank
        slot = (region.nbytes - HEAD_BYTES) // SLOTS // SLOT_MULTIPLE * SLOT_MULTIPLE
        parts = [region.chunk.peer_base(peer) + region.offset for peer in range(nranks)]
        handle = lib.pr_shared_open(nranks, rank, parts, slot, looks, cache_bytes())
        if handle == ffi.NULL:
            raise MemoryError("no memory for the shared-memory engine")
        self.handle: Any = ffi.gc(handle, lib.pr_shared_close)
        self._missing: Any = ffi.new("unsigned char[]", nranks)
        self.plans: WeakValueDictionary[int, SharedPlan] = WeakValueDictionary()  # by address
        # Counts of plans that are gone; not of an engine that works for somebody who counts for himself.
        self.retired: deque[tuple[SharedCounts, int, float]] = deque(maxlen=None if counted else 0)
        self._slot = slot

    def holds(self, nranks: int) -> bool:
        """Whether the arena is large enough for so many ranks."""
        return self._slot // max(nranks - 1, 1) >= LEAST_SHARE

    def know_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Inputs that lie in these are read in place by peers; the same on all ranks, between two calls."""
        lib.pr_shared_forget_chunks(self.handle)
        for chunk in chunks:
            parts = [chunk.peer_base(peer) for peer in range(self.nranks)]
            lib.pr_shared_add_chunk(self.handle, parts, chunk.nbytes)  # one too many is staged as if it were private

    def make_door(self) -> Any:
        """A short way in for one collective, op and algorithm."""
        door = lib.pr_door_make(self.handle)
        if door == ffi.NULL:
            raise MemoryError("no memory for a door")
        return ffi.gc(door, lib.pr_door_free)

    def shut(self) -> bool:
        """Shut the doors; whether nobody is inside."""
        return lib.pr_door_shut(self.handle) == lib.PR_OK

    def open(self) -> None:
        """Open them."""
        lib.pr_door_open(self.handle)

    def give_up(self) -> None:
        """Tell whoever comes later."""
        self.shut()
        lib.pr_shared_poison(self.handle)

    def missing(self) -> list[int]:
        """Peers that are waited for."""
        lib.pr_shared_missing(self.handle, self._missing)
        return [rank for rank in range(self.nranks) if self._missing[rank]]

    def current(self) -> SharedPlan | None:
        """The plan of the call under way."""
        handle = lib.pr_shared_current(self.handle)
        return None if handle == ffi.NULL else self.plans.get(_address(handle))

    @property
    def round(self) -> int:
        """Pieces of the call under way that have been begun."""
        return int(lib.pr_shared_rounds(self.handle))


class SharedCounts(NamedTuple):
    """What a call of a plan counts for."""

    collective: str
    pieces: int
    sent: int
    received: int
    why: str


def _address(handle: Any) -> int:
    return int(ffi.cast("uintptr_t", handle))


def _free_plan(engine: Any, handle: Any) -> None:
    """Free a plan before its engine, whichever of the two Python lets go first."""
    lib.pr_shared_plan_free(handle)


class SharedPlan:
    """A collective through the engine, prepared for the sizes of one call; the face of `pyreduce.execute.Plan`."""

    def __init__(self, call: Call, engine: Engine) -> None:
        self.call = call
        self.engine = engine
        self.why = ""
        self.work_dtype = call.dtype
        self.scratch_bytes = 0
        self.in_place_safe = call.collective != "reduce_scatter" or call.counts[0] >= call.counts[call.rank]
        self.kernel = ops.kernel(call.op, call.dtype) if call.op is not None else (0, 0)
        code = ffi.new("int *")
        handle = lib.pr_shared_plan(
            engine.handle, COLLECTIVES[call.collective], *self.kernel, call.nranks if call.divides else 0,
            call.dtype.itemsize, list(call.counts), call.digest(), SMALL_BYTES, code,
        )  # fmt: skip
        if handle == ffi.NULL:
            ops.check(code[0])
        self.handle: Any = ffi.gc(handle, partial(_free_plan, engine.handle))
        self.pieces = int(lib.pr_shared_plan_pieces(handle))
        own, total = call.counts[call.rank], sum(call.counts)
        size = call.dtype.itemsize
        moved = {"reduce_scatter": total - own, "allgather": own, "allreduce": total}[call.collective]
        read = {"reduce_scatter": own * (call.nranks - 1), "allgather": total - own}.get(call.collective)
        if read is None:
            read = total - own + own * (call.nranks - 1)
        self.sent, self.received = moved * size * (call.nranks > 1), read * size
        self._counted = (0, 0)
        self.kept: list[object] = []  # what doors know by address
        engine.plans[_address(self.handle)] = self

    def enter_door(self, door: Any, sendbuf: Array, recvbuf: Array) -> bool:
        """Have a door know this plan, for arrays like these; whether that is new to it."""
        if lib.pr_door_add(door, self.handle, id(sendbuf), id(recvbuf)) != lib.PR_OK:
            return False
        self.kept.append(sendbuf.dtype)
        return True

    def __del__(self) -> None:
        if hasattr(self, "kept"):
            calls, waited = self.take_counts()
            if calls:
                self.engine.retired.append((self.counts, calls, waited))

    @property
    def counts(self) -> SharedCounts:
        """What one call counts for."""
        return SharedCounts(self.call.collective, self.pieces, self.sent, self.received, self.why)

    def take_counts(self) -> tuple[int, float]:
        """Calls, and seconds of waiting for peers, since the last time."""
        calls, waited = int(lib.pr_shared_plan_calls(self.handle)), int(lib.pr_shared_plan_waited(self.handle))
        before, self._counted = self._counted, (calls, waited)
        return calls - before[0], (waited - before[1]) * 1e-9

    def start(self, comm: object, bases: tuple[int, int, int], tag: int) -> SharedExecution:
        """Publish the first piece of a call; see `pyreduce.execute.Plan.start`."""
        if lib.pr_shared_begin(self.handle, bases[0], bases[1]) == lib.PR_BUSY:
            raise CoreError("the shared-memory engine is in another call")
        return SharedExecution(self)


class SharedExecution:
    """A call through the engine under way."""

    sent = received = talking = 0  # counted by plan, see Communicator.stats

    def __init__(self, plan: SharedPlan) -> None:
        self._plan = plan
        self._handle = plan.engine.handle
        self.moves = 0
        self.mismatched = ""
        self._done = False

    def _note(self, code: int) -> bool:
        if code == lib.PR_MISMATCH:
            self.mismatched = "a peer has come with another call, or has given up"
        self._done = code == lib.PR_OK
        return self._done

    def advance(self) -> bool:
        """Do what can be done; True when done."""
        return self._done or self._note(lib.pr_shared_advance(self._handle, 0))

    def linger(self, nanoseconds: int = LINGER_NS) -> None:
        """Wait a little for peers, giving way."""
        if not self._done and not self.mismatched:
            self._note(lib.pr_shared_advance(self._handle, nanoseconds))

    def waited_seconds(self) -> float:
        """Seconds in which calls of this plan could only wait."""
        return int(lib.pr_shared_plan_waited(self._plan.handle)) * 1e-9

    def sample(self) -> tuple[int, ...]:
        """Peers that are waited for."""
        return tuple(self._plan.engine.missing())

    def awaited(self) -> tuple[list[int], int]:
        """Peers that are waited for, and the piece."""
        return self._plan.engine.missing(), self._plan.engine.round


def cache_bytes() -> int:
    """Bytes of the last-level cache; a guess where the system does not say."""
    try:
        cache = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (OSError, ValueError):
        cache = 0
    return cache if cache > 0 else 32 << 20


def open_engine(
    arena: Arena, nbytes: int, call: Call, ranks: Sequence[int], timeout: float | None, counted: bool = True
) -> Engine:
    """Make the engine of some ranks of a communicator, one's own among them; collective.

    Raises
    ------
    WindowMemoryError, ValueError
        On all ranks: no memory; or they are on several nodes.
    MismatchError, CollectiveTimeout, BrokenCommunicatorError
    """
    region = arena.allocate(nbytes, call, timeout)
    return Engine(region, len(ranks), ranks.index(call.rank), arena.looks, counted)
