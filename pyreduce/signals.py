"""Signals: cells on every rank that peers raise (`Signal.notify`) and their owner waits for (`Signal.wait`).

What is promised: whatever a rank has written, to its own windows or by put to a peer's, before it notifies is seen by
the rank whose wait that notify satisfies. docs/signals.md tells the whole memory model.
"""

from __future__ import annotations

import enum
import math
from typing import Any

import numpy as np

from pyreduce._core import lib
from pyreduce.algorithms.mesh import barrier_rounds
from pyreduce.arena import LINE, Region
from pyreduce.calls import Call
from pyreduce.errors import name_ranks
from pyreduce.execute import CELL, LEAST_CREDIT, Plan, Room, Turn
from pyreduce.onesided import OneSided, check_shape, check_size
from pyreduce.programs import build

__all__ = ["NotifyOp", "Signal", "WaitCmp", "make_signal"]

RECORDS = 1 << 16  # counters of notifies that a signal keeps at most, one for each peer and cell
ASK_SECONDS = 0.5  # for peers' records, when a wait has failed
LEAST, MOST = -(1 << 63), (1 << 63) - 1
Cell = int | tuple[int, ...]


class NotifyOp(enum.Enum):
    """What a notify does to a cell."""

    ADD = "add"
    SET = "set"


class WaitCmp(enum.Enum):
    """When a wait is satisfied: the cell is at least the value expected, or equal to it."""

    GE = ">="
    EQ = "=="


# Looked up once: these are on the way of every notify and wait.
_ADD, _GE = NotifyOp.ADD, WaitCmp.GE
_add, _set, _look, _look_equal = lib.pr_cell_add, lib.pr_cell_set, lib.pr_cell_look, lib.pr_cell_look_equal


def make_signal(owner: OneSided, shape: Any, timeout: float | None) -> Signal:
    """See `Communicator.signal`."""
    dims = check_shape(shape, "signal")
    if not math.prod(dims):
        raise ValueError(f"signal: shape {dims} has no cells")
    words = (("shape", str(dims)), *owner.arena.facts())
    call = Call(
        "signal", "one-sided", None, np.dtype(np.int64), (math.prod(dims),) * owner.size, words, owner.rank,
        owner.settings,
    )  # fmt: skip
    ncells = math.prod(dims)
    check_size("signal", ncells * CELL)
    recorded = ncells if ncells * owner.size <= RECORDS else 0
    nbytes = (ncells + owner.size) * CELL + -(-recorded * owner.size * 8 // LINE) * LINE
    return Signal(owner, owner.allocate(nbytes, call, timeout), dims, recorded)


class Signal:
    """Cells of 64 bits, the same on every rank; made by `Communicator.signal`, a context manager.

    Attributes
    ----------
    shape : tuple of int
    transport : str
        ``"shared"`` or ``"rma"``.
    """

    # Layout of the region: user cells, a line each; one cell a rank for barrier(); then, for every peer and cell, how
    # often this rank has notified it there, which peers look at when a wait of theirs has failed.

    def __init__(self, owner: OneSided, region: Region, shape: tuple[int, ...], recorded: int) -> None:
        self._region: Region | None = region
        self._chunk = region.chunk
        self._peers = owner.peers
        self.owner = owner
        self.number = region.number
        self.shape = shape
        self.size = math.prod(shape)
        self.transport = region.chunk.name
        self._recorded = recorded
        self._records = region.offset + (self.size + owner.size) * CELL
        # By (peer, cell) and by cell as they were given: what the quick way needs. Filled by `_find` and `_find_own`,
        # and empty when the signal is closed or the communicator broken, which they find out.
        self._targets: dict[Any, tuple[Any, int]] = {}
        self._own: dict[Any, int] = {}
        self._barrier: tuple[Plan, Room] | None = None
        self._shared = self._chunk.shared
        self._looks = self._chunk.looks
        self._counts = self._chunk.memory.cast("B").cast("q")
        owner.keep(self)
        owner.peers.tell_when_broken(self)

    def __enter__(self) -> Signal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._region is None else self.transport
        return f"<pyreduce.Signal {self.number} of shape {self.shape}, rank {self.owner.rank}, {state}>"

    def close(self) -> None:
        """Give the cells back; harmless when repeated. All ranks must close it before they make another."""
        if self._region is not None:
            self.owner.arena.give_back(self._region)
            self._region = None
            self.forget()

    def forget(self) -> None:
        """Take no short ways any more: the communicator is broken."""
        self._targets.clear()
        self._own.clear()

    def notify(self, peer: int, cell: Cell, value: int = 1, op: NotifyOp = _ADD) -> None:
        """Raise a peer's cell, after everything this rank has written before.

        When it returns, the cell has changed. A cell takes either ADD from any number of ranks, or SET, never both.

        Parameters
        ----------
        peer : int
            Which rank's cell; one's own too.
        cell : int or tuple of int
        value : int
            What to add, not 0 (which no wait could see), or to set.
        op : NotifyOp

        Raises
        ------
        TypeError, ValueError, IndexError
            Nothing was changed.
        BrokenCommunicatorError
        """
        try:
            target = self._targets.get((peer, cell))
        except TypeError:
            target = None
        if target is None:
            target = self._find(peer, cell)
        replace = False
        if type(value) is not int:
            value = self._checked_value("notify", value)
        if op is not _ADD:
            replace = self._check_op(op)
        elif value == 0:
            raise ValueError(self._worded("notify", "adding 0 changes nothing, so no wait could ever see it"))
        if self._shared:
            try:
                (_set if replace else _add)(target[0], value, target[1])
            except OverflowError:
                raise self._bad_value("notify", value) from None
            return
        if not LEAST <= value <= MOST:
            raise self._bad_value("notify", value)
        self._chunk.notify_now(peer, target[0], value, replace)
        if target[1]:
            self._counts[target[1]] += 1

    def wait(self, cell: Cell, expected: int, cmp: WaitCmp = _GE, timeout: float | None = None) -> None:
        """Wait until this rank's cell is at least (or exactly) `expected`.

        Parameters
        ----------
        cell : int or tuple of int
        expected : int
        cmp : WaitCmp
        timeout : float, optional
            Seconds; default the communicator's.

        Raises
        ------
        TypeError, ValueError, IndexError
            The arguments are wrong; or the wait could never end: there is no other rank to notify the cell.
        CollectiveTimeout
            Naming the cell, its value and who has not notified it. The communicator is broken.
        BrokenCommunicatorError
        """
        try:
            address = self._own.get(cell)
        except TypeError:
            address = None
        if address is None:
            address = self._find_own(cell, "wait")
        equal = cmp is not _GE and self._check_cmp(cmp)
        if type(expected) is not int:
            expected = self._checked_value("wait", expected)
        if self._shared:
            try:
                if (_look_equal if equal else _look)(address, expected, self._looks):
                    return
            except OverflowError:
                raise self._bad_value("wait", expected) from None
        elif not LEAST <= expected <= MOST:
            raise self._bad_value("wait", expected)
        elif self._chunk.wait(address, expected, equal):
            return
        self._wait_long(cell, address, expected, equal, timeout)

    def test(self, cell: Cell, expected: int, cmp: WaitCmp = _GE) -> bool:
        """Whether `wait` would return at once; a look that lets the MPI make progress."""
        address = self._find_own(cell, "test")
        value = self._checked_value("test", expected)
        equal = cmp is not _GE and self._check_cmp(cmp)
        self._chunk.poke()
        held = self._chunk.read(address)
        return held == value if equal else held >= value

    def read(self, cell: Cell) -> int:
        """The value of this rank's cell; what was written before the notifies it shows is visible."""
        return self._chunk.read(self._find_own(cell, "read"))

    def barrier(self, timeout: float | None = None) -> None:
        """Wait for all ranks: what any of them has written before is seen by all after. No cell of the user's changes.

        Raises
        ------
        MismatchError, CollectiveTimeout, BrokenCommunicatorError
        """
        self.check_open("barrier")
        owner, offset = self.owner, self._offset + self.size * CELL
        if self._barrier is None:
            words = (("signal", str(self.number)),)
            call = Call(
                "signal.barrier", "mesh", None, np.dtype(np.uint8), (0,) * owner.size, words, owner.rank, owner.settings
            )
            program = build("barrier", barrier_rounds, "allgather", owner.size, owner.rank)
            turn = Turn(self._chunk, offset, self._chunk, offset, owner.size, owner.size)
            self._barrier = Plan(program, call), Room([[turn]], owner.size, 0)
        plan, room = self._barrier
        owner.calls.run_call(plan, room, (), owner.deadline(timeout))

    # ------------------------------------------------------------------------------------------------------ the inside

    @property
    def _offset(self) -> int:
        assert self._region is not None
        return self._region.offset

    def check_clear(self, what: str) -> None:
        """Raise unless all cells are 0, but for credits of a call that peers have begun already."""
        for number in range(self.size):
            held = self._chunk.read(self._chunk.base + self._offset + number * CELL)
            if held and abs(held) < LEAST_CREDIT:
                cell = tuple(int(i) for i in np.unravel_index(number, self.shape)) if self.shape else ()
                raise ValueError(
                    self._worded(what, f"all cells must be 0, and cell {cell} holds {held}; take back what was waited "
                                 "for, or give the call a signal of its own")
                )  # fmt: skip

    def cells(self) -> tuple[Any, int]:
        """The chunk and the offset of the first cell, for `pyreduce.windows`."""
        return self._chunk, self._offset

    def check_notify(self, peer: int, cell: Cell, value: int, op: NotifyOp) -> None:
        """Raise what `notify` would raise, and do nothing."""
        try:
            known = (peer, cell) in self._targets
        except TypeError:
            known = False
        if not known:
            self._find(peer, cell)
        replaces = op is not _ADD and self._check_op(op)
        if not (type(value) is int and LEAST <= value <= MOST):
            self._checked_value("notify", value)
        if value == 0 and not replaces:
            raise ValueError(self._worded("notify", "adding 0 changes nothing, so no wait could ever see it"))

    def check_open(self, what: str) -> None:
        """Raise unless the signal can be used."""
        if self._region is None:
            raise ValueError(self._worded(what, "this signal is closed"))
        self._peers.check_usable()

    def _worded(self, what: str, text: str) -> str:
        return f"signal.{what}: {text} (rank {self.owner.rank} of {self.owner.size})"

    def _bad_value(self, what: str, value: object) -> Exception:
        if isinstance(value, int | np.integer):
            return ValueError(self._worded(what, f"{value} does not fit in the 64 bits of a cell"))
        kind = type(value).__name__
        hint = " (an op or a comparison goes in its own argument)" if isinstance(value, enum.Enum) else ""
        return TypeError(self._worded(what, f"a cell holds integers, got a {kind}{hint}"))

    def _checked_value(self, what: str, value: Any) -> int:
        if not isinstance(value, int | np.integer) or not LEAST <= value <= MOST:
            raise self._bad_value(what, value)
        return int(value)

    def _check_op(self, op: object) -> bool:
        if not isinstance(op, NotifyOp):
            hint = "; a WaitCmp belongs in wait" if isinstance(op, WaitCmp) else ""
            raise TypeError(self._worded("notify", f"op must be NotifyOp.ADD or NotifyOp.SET, got {op!r}{hint}"))
        return op is NotifyOp.SET

    def _check_cmp(self, cmp: object) -> bool:
        if not isinstance(cmp, WaitCmp):
            hint = "; a NotifyOp belongs in notify" if isinstance(cmp, NotifyOp) else ""
            raise TypeError(self._worded("wait", f"cmp must be WaitCmp.GE or WaitCmp.EQ, got {cmp!r}{hint}"))
        return cmp is WaitCmp.EQ

    def _cell_number(self, cell: Any, what: str) -> int:
        """The flat number of a cell."""
        index = cell if isinstance(cell, tuple) else (cell,)
        if not all(isinstance(i, int | np.integer) for i in index):
            raise TypeError(
                self._worded(what, f"a cell is named by ints, one a dimension of {self.shape}, got {cell!r}")
            )
        if len(index) != len(self.shape):
            raise IndexError(
                self._worded(
                    what,
                    f"cell {cell!r} does not name one cell of a signal of shape {self.shape}: one index a dimension",
                )
            )
        for i, n in zip(index, self.shape, strict=True):
            if not -n <= i < n:
                raise IndexError(
                    self._worded(what, f"cell {cell!r} is out of range for a signal of shape {self.shape}")
                )
        return (
            int(np.ravel_multi_index([int(i) % n for i, n in zip(index, self.shape, strict=True)], self.shape))
            if index
            else 0
        )

    def _find_own(self, cell: Any, what: str) -> int:
        """Address of one of this rank's cells, remembered for the next time."""
        self.check_open(what)
        address = self._chunk.base + self._offset + self._cell_number(cell, what) * CELL
        self._own[cell] = address
        return address

    def _find(self, peer: Any, cell: Any) -> tuple[Any, int]:
        """Where a peer's cell lies, and this rank's record of it, 0 if there is none.

        Addresses if shared, else an offset, and the record's number among the words of this rank's part.
        """
        self.check_open("notify")
        owner = self.owner
        owner.check_peer(peer, self._worded, "notify")
        number = self._cell_number(cell, "notify")
        offset = self._offset + number * CELL
        record = self._records + (int(peer) * self.size + number) * 8 if self._recorded else 0
        target = (
            self._chunk.target(int(peer), offset),
            (self._chunk.base + record if self._shared else record // 8) if record else 0,
        )
        self._targets[peer, cell] = target
        return target

    def _wait_long(self, cell: Cell, address: int, expected: int, equal: bool, timeout: float | None) -> None:
        owner, chunk = self.owner, self._chunk
        seconds = owner.deadline(timeout)
        held = chunk.read(address)
        text = f"cell {cell!r} to be {'==' if equal else '>='} {expected}"
        if owner.size == 1 and not (held == expected if equal else held >= expected):
            raise ValueError(
                self._worded("wait", f"waits for {text}; it holds {held}, and there is no other rank to notify it")
            )

        def missing() -> tuple[str, list[int]]:
            counts = self._ask_records(cell)
            ranks, told = self._blame(cell, counts)
            held = chunk.read(address)
            past = ", which is past it: with ADD, wait for GE" if equal and held > expected else ""
            return f"waits for {text}; it holds {held}{past}; {told}", ranks

        where = f"signal.wait (signal {self.number}, rank {owner.rank} of {owner.size})"
        owner.wait(where, lambda: chunk.wait(address, expected, equal), missing, seconds)

    def _ask_records(self, cell: Cell) -> list[int | None]:
        """How often each rank has notified a cell here; None where that cannot be known in time."""
        owner, chunk = self.owner, self._chunk
        if not self._recorded:
            return [None] * owner.size
        offset = self._records + (owner.rank * self.size + self._cell_number(cell, "wait")) * 8
        counts = np.zeros(owner.size, np.int64)
        known = chunk.try_get(range(owner.size), offset, counts, ASK_SECONDS)
        return [int(count) if there else None for count, there in zip(counts, known, strict=True)]

    def _blame(self, cell: Cell, counts: list[int | None]) -> tuple[list[int], str]:
        """Which ranks a wait misses, and in words.

        If the signal has a cell, or a row of cells, for each rank: that rank. Else those that have notified it least.
        """
        owner = self.owner
        others = [rank for rank in range(owner.size) if rank != owner.rank]
        first = cell[0] if isinstance(cell, tuple) and cell else cell
        if self.shape and self.shape[0] == owner.size and isinstance(first, int) and first % owner.size != owner.rank:
            missing = [first % owner.size]
        else:
            known = {rank: count for rank in others if (count := counts[rank]) is not None}
            if len(known) < len(others):
                return others, f"how often {name_ranks(others)} have notified it is not known"
            least = min(known.values(), default=0)
            missing = [rank for rank, count in known.items() if count == least]
        told = ", ".join(f"rank {r} {'an unknown number of' if counts[r] is None else counts[r]} times" for r in others)
        if any(counts[rank] for rank in missing):
            who = f"more is to come from {name_ranks(missing)}"
        else:
            who = f"{name_ranks(missing)} {'has' if len(missing) == 1 else 'have'} not notified it"
        return missing, f"{who} (so far: {told})"
