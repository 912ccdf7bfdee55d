"""What windows and signals need of their communicator, and the waiting loop of this layer."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np

from pyreduce.arena import Arena, Region
from pyreduce.arrays import Array
from pyreduce.calls import Call
from pyreduce.errors import CollectiveTimeout
from pyreduce.execute import Plan, Room
from pyreduce.peers import ATTEND_SECONDS, Peers, log
from pyreduce.settings import Settings, check_seconds

__all__ = ["Calls", "Closable", "OneSided", "check_shape", "check_size"]

MOST_BYTES = 1 << 48

Missing = Callable[[], tuple[str, list[int]]]  # what is the matter, in words, and which ranks it wants


def check_shape(shape: Any, what: str) -> tuple[int, ...]:
    """`shape` as a tuple of non-negative ints."""
    try:
        dims = tuple(n.__index__() for n in (shape if isinstance(shape, tuple | list) else (shape,)))
    except AttributeError:
        raise TypeError(f"{what}: shape must be an int or a tuple of ints, got {shape!r}") from None
    if any(n < 0 for n in dims):
        raise ValueError(f"{what}: shape {dims} has a negative length")
    return dims


def check_size(what: str, nbytes: int) -> None:
    """Refuse what no machine has, before it is asked for."""
    if nbytes >= MOST_BYTES:
        raise ValueError(f"{what}: {nbytes} bytes a rank are more than there can be")


class Calls(Protocol):
    """A communicator as this layer sees it: whoever numbers and runs calls."""

    def next_call(self) -> int:
        """The number of the next call."""

    def run_call(self, plan: Plan, room: Room, scratch_for: tuple[Array, ...], timeout: float | None) -> None:
        """Run a collective call whose steps happen in a room."""


class Closable(Protocol):
    """A window or a signal."""

    def close(self) -> None:
        """Give its memory back."""


class OneSided:
    """The one-sided side of a communicator.

    Parameters
    ----------
    rank, size : int
    settings : Settings
    peers : Peers
    arena : Arena
    calls : Calls
    """

    def __init__(self, rank: int, size: int, settings: Settings, peers: Peers, arena: Arena, calls: Calls) -> None:
        self.rank = rank
        self.size = size
        self.settings = settings
        self.peers = peers
        self.arena = arena
        self.calls = calls
        self.closed = False
        self._open: WeakSet[Closable] = WeakSet()

    def allocate(self, nbytes: int, call: Call, timeout: float | None) -> Region:
        """A region for a window or signal; collective."""
        if self.closed:
            raise ValueError(f"{call.collective}: this communicator is closed (rank {self.rank} of {self.size})")
        self.peers.check_usable()
        return self.arena.allocate(nbytes, call, self.deadline(timeout))

    def deadline(self, timeout: float | None) -> float | None:
        """Seconds that a wait may take."""
        return self.settings.timeout if timeout is None else check_seconds("timeout", timeout)

    def check_peer(self, peer: Any, worded: Callable[[str, str], str], what: str) -> None:
        """Raise unless `peer` is a rank."""
        if type(peer) is not int and not isinstance(peer, int | np.integer):
            raise TypeError(worded(what, f"peer must be a rank, an int, got {peer!r}"))
        if not 0 <= peer < self.size:
            raise ValueError(worded(what, f"there is no rank {peer}; ranks are 0..{self.size - 1}"))

    def keep(self, made: Closable) -> None:
        """Close it with the communicator, if nobody does before."""
        self._open.add(made)

    def close(self) -> None:
        """Close every window and signal."""
        for made in list(self._open):
            made.close()
        self.closed = True

    def wait(self, where: str, poll: Callable[[], bool], missing: Missing, timeout: float | None) -> None:
        """The waiting loop of this layer: until `poll`, which waits a little and yields the core, says True.

        Every millisecond it lets the MPI make progress, looks for peers that have given up, and at the clock.

        Raises
        ------
        CollectiveTimeout, BrokenCommunicatorError
        """
        peers, begun, warned = self.peers, perf_counter(), False
        attend_at = begun + ATTEND_SECONDS
        while not poll():
            now = perf_counter()
            if now < attend_at:
                continue
            attend_at = now + ATTEND_SECONDS
            number = self.calls.next_call()
            peers.listen(where, number)
            if timeout is not None and now - begun >= timeout:
                if poll():  # its last chance: a deadline of 0 is a look
                    break
                text, ranks = missing()
                error = CollectiveTimeout(f"{where}: gave up after {timeout:g} s: {text}", ranks)
                peers.quit(error, number)
                raise error
            if timeout is None and not warned and now - begun > peers.warn_seconds:
                warned = True
                log.warning("%s has waited %.0f s: %s", where, now - begun, missing()[0])
        peers.waited += perf_counter() - begun
