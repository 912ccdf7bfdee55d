"""Symmetric memory: windows and signals are carved out of a few chunks, at the same offsets on every rank.

All ranks carve in the same order, so all come to the same offsets without being told; what they have carved so far is
part of what is compared when they carve again. Memory that was given back is used again by the next that is carved, and
that is when ranks meet: nobody gets it before every rank has given it back.

Before memory is handed out it is set to zero, by having the kernel write it: where the file behind shared memory
(/dev/shm, of whatever size a container has) is full, that write fails, where a store of ours would end the process with
a bus error. So a window that is there can be touched.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mpi4py import MPI

from pyreduce.calls import Call
from pyreduce.errors import Unsupported, WindowMemoryError, name_ranks
from pyreduce.transports import Chunk, RmaChunk, SharedChunk, looks_for

__all__ = ["LINE", "Arena", "FreeList", "Region"]

LINE = 128  # bytes that no two ranks' traffic should share: two cache lines, which come in pairs
LEAST_CHUNK = 1 << 20
READ_AT_ONCE = 1 << 30

# What ranks tell each other after they have tried to get memory.
GOT, NO_MEMORY, REFUSED, SEVERAL_NODES = range(4)
Agree = Callable[[Call, int, "float | None"], "list[int]"]


class FreeList:
    """Which bytes of a chunk are free: first fit, neighbours joined."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free = [(0, nbytes)]  # (offset, length), in order, no two touching

    @property
    def unused(self) -> bool:
        """Whether all of it is free."""
        return self._free == [(0, self.nbytes)]

    def take(self, nbytes: int) -> int | None:
        """Offset of `nbytes` that were free, or None."""
        for i, (offset, length) in enumerate(self._free):
            if length >= nbytes:
                self._free[i : i + 1] = [(offset + nbytes, length - nbytes)] if length > nbytes else []
                return offset
        return None

    def give_back(self, offset: int, nbytes: int) -> None:
        """Free what was taken."""
        self._free.append((offset, nbytes))
        self._free.sort()
        joined = self._free[:1]
        for start, length in self._free[1:]:
            before, reach = joined[-1]
            if start < before + reach:
                raise ValueError(f"bytes {start}..{before + reach - 1} are free already")
            if start == before + reach:
                joined[-1] = (before, reach + length)
            else:
                joined.append((start, length))
        self._free = joined


@dataclass(eq=False, slots=True)
class Region:
    """`nbytes` at `offset` of every rank's part of a chunk."""

    chunk: Chunk
    offset: int
    nbytes: int
    number: int


@dataclass(eq=False, slots=True)
class _Held:
    """A chunk, what is free in it, and its number."""

    chunk: SharedChunk | RmaChunk
    number: int
    free: FreeList = field(init=False)

    def __post_init__(self) -> None:
        self.free = FreeList(self.chunk.nbytes)


class Arena:
    """The symmetric memory of a communicator.

    Parameters
    ----------
    comm : MPI.Intracomm
        The library's own.
    transport : {"shared", "rma"} or None
        None: shared if all ranks are on one node.
    limit : int
        Bytes that MPI moves at once, at most.
    agree : callable
        ``agree(call, word, timeout)`` gives every rank's word, when all have come with the same call.
    settled : callable, optional
        Called when all ranks know how an allocation has ended.

    Attributes
    ----------
    crowded : bool
        Ranks of this node outnumber its cores; known once something has been allocated.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        transport: str | None,
        limit: int,
        agree: Agree,
        settled: Callable[[], None] | None = None,
    ) -> None:
        self._comm = comm
        self._wanted = transport
        self._limit = limit
        self._agree = agree
        self._settled = settled
        self._kind: type[SharedChunk | RmaChunk] | None = None
        self._held: list[_Held] = []
        self._made = self._open = self._state = 0
        self.crowded = False
        self._node_size = 1  # of the fullest node
        self._refusal = ""

    @property
    def looks(self) -> int:
        """How often a waiting loop looks before it yields its core."""
        return looks_for(self.crowded)

    @property
    def chunks(self) -> list[Chunk]:
        """The memory that has been carved, all of it."""
        return [held.chunk for held in self._held]

    def facts(self) -> tuple[tuple[str, str], ...]:
        """What all ranks must agree on before they carve."""
        return (("windows and signals so far", f"{self._made} made, {self._open} open ({self._state:08x})"),)

    def allocate(self, nbytes: int, call: Call, timeout: float | None) -> Region:
        """Zeroed memory, the same on every rank; collective.

        Raises
        ------
        WindowMemoryError
            On all ranks, if any cannot have it; nothing has been touched.
        ValueError
            On all ranks: shared memory was asked for, and they are on several nodes.
        MismatchError, CollectiveTimeout, BrokenCommunicatorError
        """
        nbytes = max(-(-nbytes // LINE), 1) * LINE
        rooms = self._agree(call, _free_bytes(), timeout)
        found, fresh, outcome = None, None, GOT
        if self._kind is None:
            outcome = self._choose_transport()
        if outcome == GOT:
            found = self._carve(nbytes)
            if found is None:
                outcome, fresh = self._grow(nbytes, rooms)
                found = self._carve(nbytes) if outcome == GOT else None
        if found is not None and not _zero(found):
            outcome = NO_MEMORY
        told = self._agree(call, outcome, timeout)
        if self._settled is not None:
            self._settled()
        if max(told) > GOT:
            self._undo(found, fresh, told)
            raise self._explain(told, nbytes)
        assert found is not None
        self._made += 1
        self._note(found, 1)
        return found

    def give_back(self, region: Region) -> None:
        """Free a region. Not collective: it is used again when all ranks have freed it and carve anew."""
        self._held_of(region).free.give_back(region.offset, region.nbytes)
        self._note(region, -1)

    def _held_of(self, region: Region) -> _Held:
        return next(held for held in self._held if held.chunk is region.chunk)

    def _note(self, region: Region, change: int) -> None:
        self._open += change
        place = f"{self._held_of(region).number} {region.offset} {region.nbytes}"
        self._state ^= zlib.crc32(place.encode())

    def _choose_transport(self) -> int:
        """Where the peers are decides, the same on all ranks: they all ask the MPI."""
        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        together = node.size == self._comm.size
        self._node_size = max(self._comm.allgather(node.size))
        cores = set().union(*node.allgather(os.sched_getaffinity(0)))
        self.crowded = node.size > len(cores)
        node.Free()
        if self._wanted == "shared" and not together:
            return SEVERAL_NODES
        self._kind = SharedChunk if self._wanted == "shared" or (self._wanted is None and together) else RmaChunk
        return GOT

    def _carve(self, nbytes: int) -> Region | None:
        for held in self._held:
            offset = held.free.take(nbytes)
            if offset is not None:
                return Region(held.chunk, offset, nbytes, self._made)
        return None

    def _grow(self, nbytes: int, rooms: Sequence[int]) -> tuple[int, _Held | None]:
        """A new chunk, twice the last, in the place of those that nobody uses; collective, the ranks have met.

        `rooms` is what each rank's node has free. To fill it to the brim would have the system kill processes, so
        what cannot fit is not tried; all ranks come to the same conclusion.
        """
        largest = max((held.chunk.nbytes for held in self._held), default=0)
        self._drop_unused()
        most = min(rooms) // self._node_size
        size = max(nbytes, LEAST_CHUNK)
        wished = max(size, min(2 * largest, nbytes + largest))
        if nbytes > most:
            return NO_MEMORY, None
        assert self._kind is not None
        try:
            chunk = self._kind(self._comm, wished if wished <= most // 2 else size, self._limit, self.crowded)
        except (MPI.Exception, MemoryError, Unsupported) as error:
            self._refusal = f"; the MPI says here: {error}"
            return REFUSED, None
        held = _Held(chunk, self._made)
        self._held.append(held)
        self._join()
        return GOT, held

    def _join(self) -> None:
        """Tell the chunks of each other: a signal in one orders data in another."""
        for held in self._held:
            held.chunk.join([other.chunk for other in self._held])

    def _drop_unused(self) -> None:
        """Free chunks that nothing lies in, unless a user, on any rank, still has an array over one."""
        for held in [held for held in self._held if held.free.unused]:
            if not self._comm.allreduce(held.chunk.has_views(), MPI.LOR):
                held.chunk.free()
                self._held.remove(held)
                self._join()

    def _undo(self, found: Region | None, fresh: _Held | None, told: list[int]) -> None:
        if found is not None:
            self._held_of(found).free.give_back(found.offset, found.nbytes)
        if fresh is not None:
            self._held.remove(fresh)
            self._join()
            if REFUSED not in told:  # then every rank has it, and all can free it
                fresh.chunk.free()

    def _explain(self, told: list[int], nbytes: int) -> Exception:
        size = self._comm.size
        if SEVERAL_NODES in told:
            return ValueError(
                f"transport 'shared' needs all {size} ranks on one node, and they are on several; use 'rma'"
            )
        short = name_ranks([rank for rank, word in enumerate(told) if word != GOT])
        needed = f"{nbytes} bytes a rank for windows and signals ({nbytes * size} on {size} ranks)"
        try:
            disk = os.statvfs("/dev/shm")
            free = f"; /dev/shm has {disk.f_bavail * disk.f_frsize} bytes free"
        except OSError:
            free = ""
        return WindowMemoryError(
            f"no memory for {needed} on {short}{self._refusal or '; shared memory is full'}{free}. Make room there "
            "(docker: --shm-size), or make smaller windows"
        )

    def close(self) -> None:
        """Free all chunks; collective, all ranks must be here. Those that a user still has an array over are kept."""
        for held in self._held:
            if not self._comm.allreduce(held.chunk.has_views(), MPI.LOR):
                held.chunk.free()
        self._held.clear()


def _free_bytes() -> int:
    """Memory that windows on this node can have: of the machine, and of the files that shared memory lies in."""
    free = 1 << 62
    try:
        disk = os.statvfs("/dev/shm")
        free = disk.f_bavail * disk.f_frsize
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    free = min(free, int(line.split()[1]) << 10)
    except OSError:
        pass  # a system without these: whoever fills memory to the brim is told by the MPI or the kernel
    return free


def _zero(region: Region) -> bool:
    """Have the kernel write zeros, which fails where there is no memory; whether all could be written."""
    memory = region.chunk.memory[region.offset : region.offset + region.nbytes]
    zeros = os.open("/dev/zero", os.O_RDONLY)
    try:
        at = 0
        while at < region.nbytes:
            at += os.readv(zeros, [memory[at : at + READ_AT_ONCE]])
    except OSError as error:
        if error.errno not in (errno.EFAULT, errno.ENOMEM):
            raise
        return False
    finally:
        os.close(zeros)
    region.chunk.fence()
    return True
