"""The two transports of the one-sided layer: memory that every rank has a part of and all ranks reach.

A `Chunk` is one MPI window, held for long and carved up by `pyreduce.arena`. Two kinds behind one face:

`RmaChunk`
    ``Win.Allocate`` and MPI's one-sided calls, for any placement of ranks. One ``Lock_all`` for the chunk's life. MPI
    orders accumulates from one rank to one location, but nothing else: a Put is not ordered before an accumulate. So
    whoever wants data to be there before a signal flushes in between. Cells are touched by accumulates only (locks by
    Compare_and_swap), and read by ``Sync`` and a load, as the unified memory model allows; a window with another model
    is refused. Flush and Sync need not drive progress: who waits also pokes the MPI with an Iprobe.
`SharedChunk`
    ``Win.Allocate_shared`` and plain loads and stores, and C11 atomics (csrc/cells.c) for cells, within a node.

Offsets are bytes from the start of a rank's part, the same on all ranks. A rank's own part is never reached through
MPI, but for cells, which must see one kind of access only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from pyreduce import ops
from pyreduce._core import lib
from pyreduce.arrays import Array, address
from pyreduce.errors import Unsupported

__all__ = ["Chunk", "RmaChunk", "SharedChunk", "looks_for"]

PAGE = 4096
ROOT_REFERENCES = 2  # of a chunk that nobody has a view of: the attribute, and the argument of getrefcount
LOOKS_WITH_A_CORE = 1000  # looks at a cell before the core is yielded, when every rank has one
LOOKS_CROWDED = 20
POKES_WITH_A_CORE = 50  # the same over MPI, where a look goes with a poke: the notify may need the MPI's progress
SHARED_WAIT_NS = 1_000_000
VALUES_KEPT = 64


_WORD, _BYTE, _SUM, _REPLACE, _memory = MPI.INT64_T, MPI.BYTE, MPI.SUM, MPI.REPLACE, MPI.buffer.fromaddress


def looks_for(crowded: bool) -> int:
    """How often a waiting loop looks before it yields its core."""
    return LOOKS_CROWDED if crowded else LOOKS_WITH_A_CORE


class Chunk(Protocol):
    """What both transports offer. `put`, `get` and `notify` only start; `flush` completes them."""

    name: str
    shared: bool
    base: int
    nbytes: int
    memory: memoryview  # this rank's part; `root` is the array that users' arrays are views of
    root: Array
    looks: int

    def peer_base(self, peer: int) -> int:
        """Where a peer's part lies: an address that can be read and written if `shared`, else 0."""

    def put(self, peer: int, offset: int, source: int, nbytes: int) -> None:
        """Copy `nbytes` from address `source` to a peer's part."""

    def get(self, peer: int, offset: int, target: int, nbytes: int) -> None:
        """Copy `nbytes` from a peer's part to address `target`."""

    def target(self, peer: int, offset: int) -> Any:
        """A peer's cell as `notify` wants it."""

    def notify(self, peer: int, target: Any, value: int, replace: bool = False) -> None:
        """Add to a peer's cell, or set it, after this rank's stores to its own part; one at a time to a peer."""

    def notify_now(self, peer: int, target: Any, value: int, replace: bool = False) -> None:
        """`notify` and `flush` in one."""

    def flush(self, peer: int) -> None:
        """Complete everything that has been started with a peer."""

    def compare_and_swap(self, peer: int, offset: int, expected: int, desired: int) -> int:
        """Atomically replace `expected` by `desired` in a peer's lock; what was there."""

    def try_get(self, peers: Sequence[int], offset: int, words: Array, seconds: float) -> list[bool]:
        """Get a 64-bit word from each of some peers, into `words[peer]`, within some time; which have come."""

    def read(self, cell: int) -> int:
        """The value of the cell at an address here; what was written before the notifies it shows is visible then."""

    def wait(self, cell: int, expected: int, equal: bool) -> bool:
        """Wait a little for the cell at an address here to be at least (exactly) `expected`, yielding the core."""

    def poke(self) -> None:
        """Let the MPI make progress."""

    def fence(self) -> None:
        """Order this rank's loads and stores before with those after, as peers see them; in all chunks, see `join`."""

    def join(self, chunks: Sequence[Any]) -> None:
        """These are all chunks of the arena: what a notify or wait in one orders, lies in any."""

    def free(self) -> None:
        """Give the memory back; collective."""


class _Window:
    """What the kinds have in common: the MPI window, and this rank's part as bytes."""

    def __init__(self, window: MPI.Win, comm: MPI.Intracomm, nbytes: int, crowded: bool) -> None:
        self._win = window
        self.looks = looks_for(crowded)
        self._comm = comm
        self._rank = comm.rank
        self.nbytes = nbytes
        self.memory = memoryview(window.tomemory())  # type: ignore[arg-type]
        self.root: Array = np.frombuffer(self.memory, np.uint8, nbytes)
        self.base = address(self.root)
        window.Lock_all(MPI.MODE_NOCHECK)

    def has_views(self) -> bool:
        """Whether an array of a user still lies over this rank's part."""
        return sys.getrefcount(self.root) > ROOT_REFERENCES

    def free(self) -> None:
        self._win.Unlock_all()
        self._win.Free()


class SharedChunk(_Window):
    """See the module."""

    name = "shared"
    shared = True

    def __init__(self, comm: MPI.Intracomm, nbytes: int, limit: int, crowded: bool) -> None:
        nbytes = -(-nbytes // PAGE) * PAGE
        super().__init__(MPI.Win.Allocate_shared(nbytes, 1, comm=comm), comm, nbytes, crowded)
        parts = [self._win.Shared_query(peer)[0] for peer in range(comm.size)]
        self._bases = [part.address for part in parts]
        self._bases[comm.rank] = self.base

    def peer_base(self, peer: int) -> int:
        return self._bases[peer]

    def put(self, peer: int, offset: int, source: int, nbytes: int) -> None:
        ops.copy(nbytes, self._bases[peer] + offset, source)

    def get(self, peer: int, offset: int, target: int, nbytes: int) -> None:
        ops.copy(nbytes, target, self._bases[peer] + offset)

    def target(self, peer: int, offset: int) -> int:
        return self._bases[peer] + offset

    def notify(self, peer: int, target: int, value: int, replace: bool = False) -> None:
        (lib.pr_cell_set if replace else lib.pr_cell_add)(target, value, 0)

    notify_now = notify

    def flush(self, peer: int) -> None:
        """Loads and stores are complete as they are."""

    def compare_and_swap(self, peer: int, offset: int, expected: int, desired: int) -> int:
        return lib.pr_cell_compare_and_swap(self._bases[peer] + offset, expected, desired)

    def try_get(self, peers: Sequence[int], offset: int, words: Array, seconds: float) -> list[bool]:
        for peer in peers:
            words[peer] = lib.pr_cell_read(self._bases[peer] + offset)
        return [True] * len(peers)

    def read(self, cell: int) -> int:
        return lib.pr_cell_read(cell)

    def wait(self, cell: int, expected: int, equal: bool) -> bool:
        return bool(lib.pr_cell_wait(cell, expected, equal, self.looks, SHARED_WAIT_NS))

    def poke(self) -> None:
        """Shared memory needs nobody's help."""

    def fence(self) -> None:
        """Cells are acquired and released."""

    def join(self, chunks: Sequence[Any]) -> None:
        """An acquire or release is of all memory."""


class RmaChunk(_Window):
    """See the module."""

    name = "rma"
    shared = False

    def __init__(self, comm: MPI.Intracomm, nbytes: int, limit: int, crowded: bool) -> None:
        nbytes = -(-nbytes // PAGE) * PAGE
        super().__init__(MPI.Win.Allocate(nbytes, 1, comm=comm), comm, nbytes, crowded)
        if self._win.Get_attr(MPI.WIN_MODEL) != MPI.WIN_UNIFIED:
            raise Unsupported("transport 'rma' needs an MPI whose windows have the unified memory model")
        self._limit = limit
        self._values: dict[int, tuple[Any, int, MPI.Datatype]] = {}
        self._swapped = [np.zeros(1, np.int64) for _ in range(3)]
        self._pokes = range(1 if crowded else POKES_WITH_A_CORE)
        self._poke, self._words = comm.Iprobe, self.memory.cast("B").cast("q")
        self._late: list[object] = []  # gets that may still come
        self._fence: Callable[[], None] = self._win.Sync
        self.flush = self._win.Flush
        self._leaks = MPI.Get_library_version().startswith("MPICH")
        self._accumulate = self._fetch_and_op if self._leaks else self._win.Accumulate
        fetched = np.zeros(comm.size, np.int64)
        self._fetched = [(fetched[peer : peer + 1], 1, _WORD) for peer in range(comm.size)]

    def peer_base(self, peer: int) -> int:
        return self.base if peer == self._rank else 0

    def put(self, peer: int, offset: int, source: int, nbytes: int) -> None:
        if peer == self._rank:
            ops.copy(nbytes, self.base + offset, source)
        elif nbytes <= self._limit:
            self._win.Put(_memory(source, nbytes), peer, (offset, nbytes, _BYTE))
        else:
            for at, n in self._cut(nbytes):
                self._win.Put(_memory(source + at, n), peer, (offset + at, n, _BYTE))

    def get(self, peer: int, offset: int, target: int, nbytes: int) -> None:
        if peer == self._rank:
            ops.copy(nbytes, target, self.base + offset)
        else:
            for at, n in self._cut(nbytes):
                self._win.Get(_memory(target + at, n), peer, (offset + at, n, _BYTE))

    def _cut(self, nbytes: int) -> list[tuple[int, int]]:
        """Pieces of at most the message limit: where each begins, and its bytes."""
        return [(at, min(nbytes - at, self._limit)) for at in range(0, nbytes, self._limit)]

    def target(self, peer: int, offset: int) -> Any:
        return offset if self._leaks else (offset, 1, _WORD)

    def notify(self, peer: int, target: Any, value: int, replace: bool = False) -> None:
        buffer = self._values.get(value)
        if buffer is None:
            buffer = self._keep(value)
        self._fence()
        self._accumulate(buffer, peer, target, _REPLACE if replace else _SUM)

    def notify_now(self, peer: int, target: Any, value: int, replace: bool = False) -> None:
        buffer = self._values.get(value)
        if buffer is None:
            buffer = self._keep(value)
        self._fence()
        self._accumulate(buffer, peer, target, _REPLACE if replace else _SUM)
        self.flush(peer)

    def _fetch_and_op(self, buffer: Any, peer: int, offset: int, op: MPI.Op) -> None:
        """An accumulate, for MPICH (5.0.2), whose Accumulate leaks 125 bytes a call.

        What is fetched is not looked at; every peer has a word of its own for it, and at most one notify under way.
        """
        self._win.Fetch_and_op(buffer, self._fetched[peer], peer, offset, op)

    def _keep(self, value: int) -> tuple[Any, int, MPI.Datatype]:
        """A buffer that holds a value, and is not written again: MPI reads it until the flush."""
        if len(self._values) >= VALUES_KEPT:
            self._win.Flush_local_all()
            self._values.clear()
        words = np.array([value], np.int64)
        buffer = (words, 1, _WORD)
        self._values[value] = buffer
        return buffer

    def compare_and_swap(self, peer: int, offset: int, expected: int, desired: int) -> int:
        new, old, found = self._swapped
        new[0], old[0] = desired, expected
        self._win.Compare_and_swap([new, MPI.INT64_T], [old, MPI.INT64_T], [found, MPI.INT64_T], peer, offset)
        self._win.Flush(peer)
        return int(found[0])

    def try_get(self, peers: Sequence[int], offset: int, words: Array, seconds: float) -> list[bool]:
        requests = []
        for peer in peers:
            if peer == self._rank:
                words[peer] = lib.pr_cell_read(self.base + offset)
            else:
                word = [words[peer : peer + 1], 1, MPI.INT64_T]
                requests.append((peer, self._win.Rget(word, peer, (offset, 1, MPI.INT64_T))))
        end = perf_counter() + seconds
        late = requests
        while late and perf_counter() < end:
            late = [(peer, request) for peer, request in late if not request.Test()]
            os.sched_yield()
        if late:
            self._late.append((words, late))
        silent = {peer for peer, _ in late}
        return [peer not in silent for peer in peers]

    def read(self, cell: int) -> int:
        self._fence()
        return lib.pr_cell_read(cell)

    def wait(self, cell: int, expected: int, equal: bool) -> bool:
        # An aligned word of a memoryview is loaded in one piece; what it orders, the fence after it does.
        words, number, poke = self._words, (cell - self.base) >> 3, self._poke
        for _ in self._pokes:
            held = words[number]
            if held == expected or (held > expected and not equal):
                self._fence()
                return True
            poke()
        os.sched_yield()
        return False

    def poke(self) -> None:
        self._poke()

    def fence(self) -> None:
        self._fence()

    def join(self, chunks: Sequence[Any]) -> None:
        syncs = [chunk._win.Sync for chunk in chunks]

        def all_of_them() -> None:
            for sync in syncs:
                sync()

        self._fence = syncs[0] if len(syncs) == 1 else all_of_them
