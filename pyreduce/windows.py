"""Windows: an array on every rank that all ranks can read and write (`Window.put`, `Window.get`); collectives on it.

Nothing but signals orders accesses: a rank reads what a peer has put only after a wait that the peer's notify
satisfied, and writes where a peer reads only after the peer has said that it is done. docs/signals.md tells the whole
memory model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from pyreduce import ops
from pyreduce.algorithms.mesh import window_rounds
from pyreduce.arena import LINE, Region
from pyreduce.arrays import Array, address, as_array
from pyreduce.calls import Call
from pyreduce.execute import Plan, Room, Turn
from pyreduce.onesided import OneSided, check_shape, check_size
from pyreduce.ops import SUM, Op, resolve_op
from pyreduce.programs import build, place_window
from pyreduce.signals import Cell, NotifyOp, Signal

__all__ = ["Window", "make_window"]

PLANS_KEPT = 16
REGIONS_KEPT = 1024


def make_window(owner: OneSided, shape: Any, dtype: Any, timeout: float | None) -> Window:
    """See `Communicator.window`."""
    dims = check_shape(shape, "window")
    kind = np.dtype(dtype)
    if kind.hasobject or not kind.itemsize or kind.subdtype is not None:
        raise TypeError(f"window: dtype {kind} cannot be a window's; use a numeric dtype, and more dimensions for more")
    nbytes = math.prod(dims) * kind.itemsize
    check_size("window", nbytes)
    words = (("shape", str(dims)), *owner.arena.facts())
    call = Call("window", "one-sided", None, kind, (nbytes,) * owner.size, words, owner.rank, owner.settings)
    return Window(owner, owner.allocate(LINE + nbytes, call, timeout), dims, kind)


class Window:
    """Symmetric memory; made by `Communicator.window`, a context manager.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    transport : str
        ``"shared"`` or ``"rma"``.
    """

    # Layout of the region: a line for the lock that accumulate takes, then the array.

    def __init__(self, owner: OneSided, region: Region, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._owner = owner
        self._region: Region | None = region
        self._chunk = region.chunk
        self._peers = owner.peers
        self._number = region.number
        self._start = region.offset + LINE
        self.shape = shape
        self.dtype = dtype
        self.transport = region.chunk.name
        nbytes = math.prod(shape) * dtype.itemsize
        self._local: Array = region.chunk.root[self._start : self._start + nbytes].view(dtype).reshape(shape)
        self._plans: dict[Any, tuple[Plan, Room]] = {}
        self._regions: dict[Any, tuple[int, tuple[int, ...]]] = {}
        owner.keep(self)

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._region is None else self.transport
        return f"<pyreduce.Window {self._number} of shape {self.shape}, {self.dtype}, rank {self._owner.rank}, {state}>"

    def close(self) -> None:
        """Give the memory back; harmless when repeated. All ranks must close it before they make another.

        An array that was taken from `local` stays readable, but will show what later windows hold.
        """
        if self._region is not None:
            self._owner.arena.give_back(self._region)
            self._region = None
            self._plans.clear()
            del self._local

    @property
    def local(self) -> Array:
        """This rank's part, as an array to read and write."""
        self._check_open("local")
        return self._local

    def put(self, peer: int, index: Any, array: Any) -> None:
        """Copy an array into a region of a peer's part; complete there when it returns.

        The peer may read it after a wait that a later notify of this rank satisfies.

        Parameters
        ----------
        peer : int
            Which rank's part; one's own too.
        index : int, slice, Ellipsis or tuple of these
            The region, as it would index `local`; contiguous.
        array : array
            Of the region's shape and the window's dtype, any strides.

        Raises
        ------
        TypeError, ValueError, IndexError
            Nothing was written.
        BrokenCommunicatorError
        """
        offset, _, source = self._prepare("put", peer, index, array)
        self._put(peer, offset, source)

    def _put(self, peer: int, offset: int, source: Array) -> None:
        nbytes = source.nbytes
        if nbytes:
            self._chunk.put(peer, offset, address(source), nbytes)
            self._chunk.flush(peer)

    def get(self, peer: int, index: Any = ...) -> Array:
        """A copy of a region of a peer's part.

        Parameters
        ----------
        peer, index
            As for `put`.

        Returns
        -------
        ndarray
            Of the region's shape; 0-dimensional if `index` names one element.
        """
        self._check_peer("get", peer)
        offset, shape = self._region_of("get", index)
        out = np.empty(shape, self.dtype)
        if out.nbytes:
            self._chunk.get(peer, offset, address(out), out.nbytes)
            self._chunk.flush(peer)
            self._chunk.fence()
        return out

    def accumulate(self, peer: int, index: Any, array: Any, op: Op | str = SUM, timeout: float | None = None) -> None:
        """Fold an array into a region of a peer's part: ``region = region op array``, complete when it returns.

        Accumulates of several ranks to one part follow each other, in any order; a lock sees to it. Puts do not take
        the lock.

        Parameters
        ----------
        peer, index, array
            As for `put`.
        op : Op or str
            Any but AVG.
        timeout : float, optional
            Seconds to wait for the lock.

        Raises
        ------
        TypeError, ValueError, IndexError
            Nothing was written.
        CollectiveTimeout
            A rank has held the lock for so long.
        BrokenCommunicatorError
        """
        _, codes = self._check_op("accumulate", op, "who would divide?")
        offset, shape, source = self._prepare("accumulate", peer, index, array)
        if not source.nbytes:
            return
        if np.may_share_memory(source, self._local):  # a fold must not read what it has written
            source = source.copy()
        chunk = self._chunk
        self._lock(peer, timeout)
        try:
            where = chunk.peer_base(peer)
            if where:
                ops.fold(codes, source.size, where + offset, [where + offset, address(source)])
            else:
                held = np.empty(shape, self.dtype)
                chunk.get(peer, offset, address(held), held.nbytes)
                chunk.flush(peer)
                ops.fold(codes, source.size, address(held), [address(held), address(source)])
                chunk.put(peer, offset, address(held), held.nbytes)
                chunk.flush(peer)
        finally:
            chunk.fence()
            chunk.compare_and_swap(peer, self._start - LINE, self._owner.rank + 1, 0)

    def put_notify(
        self, peer: int, index: Any, array: Any, signal: Signal, cell: Cell, value: int = 1, op: NotifyOp = NotifyOp.ADD
    ) -> None:
        """`put`, then ``signal.notify(peer, cell, value, op)``: who waits for the cell finds the data."""
        self._check_signal("put_notify", signal)
        signal.check_notify(peer, cell, value, op)
        offset, _, source = self._prepare("put", peer, index, array)
        self._put(peer, offset, source)
        signal.notify(peer, cell, value, op)

    def reduce_scatter(self, signal: Signal, op: Op | str = SUM, *, timeout: float | None = None) -> Array:
        """Reduce what all ranks have staged, row by row; row `rank` of this rank's part becomes its reduced block.

        The window has P rows, and row b of a rank's part is its contribution to rank b. Afterwards the other rows are
        unchanged, and the window may be written again at once. Folds in rank order. Collective.

        Parameters
        ----------
        signal : Signal
            With one cell for each rank, all 0: the call gives and takes back 2 credits in each, so the same signal
            serves any number of calls. Meanwhile it must not be used for anything else.
        op : Op or str
        timeout : float, optional
            Seconds.

        Returns
        -------
        ndarray
            A view of row `rank`.

        Raises
        ------
        TypeError, ValueError
            Nothing was sent: a window without P rows, a signal without P cells, an op that is not offered.
        MismatchError, CollectiveTimeout, BrokenCommunicatorError
        """
        self._collective("reduce_scatter", signal, op, timeout)
        block: Array = self._local[self._owner.rank, ...]
        return block

    def allgather(self, signal: Signal, *, timeout: float | None = None) -> Array:
        """Row `rank` of every rank's part becomes row `rank` of all parts. Otherwise as `reduce_scatter`.

        Returns
        -------
        ndarray
            `local`.
        """
        self._collective("allgather", signal, None, timeout)
        return self._local

    def allreduce(self, signal: Signal, op: Op | str = SUM, *, timeout: float | None = None) -> Array:
        """Row b of all parts becomes the reduction of all ranks' rows b. Otherwise as `reduce_scatter`; 3 credits.

        Returns
        -------
        ndarray
            `local`.
        """
        self._collective("allreduce", signal, op, timeout)
        return self._local

    # ------------------------------------------------------------------------------------------------------ the inside

    def _worded(self, what: str, text: str) -> str:
        return f"window.{what}: {text} (rank {self._owner.rank} of {self._owner.size})"

    def _check_open(self, what: str) -> None:
        if self._region is None:
            raise ValueError(self._worded(what, "this window is closed"))
        if self._peers.broken is not None:
            self._peers.check_usable()

    def _check_peer(self, what: str, peer: Any) -> None:
        self._check_open(what)
        self._owner.check_peer(peer, self._worded, what)

    def _region_of(self, what: str, index: Any) -> tuple[int, tuple[int, ...]]:
        """Offset in any rank's part, and shape, of the region that an index names; remembered for the next time."""
        try:
            return self._regions[index]
        except (KeyError, TypeError):  # slices have no hash before Python 3.12
            pass
        parts = index if isinstance(index, tuple) else (index,)
        key = tuple([(slice, p.start, p.stop, p.step) if type(p) is slice else p for p in parts])
        try:
            return self._regions[key]
        except (KeyError, TypeError):
            pass
        view = self._view(what, index, parts)
        region = address(view) - self._chunk.base if view.nbytes else self._start, view.shape
        if len(self._regions) >= REGIONS_KEPT:
            self._regions.clear()
        try:
            self._regions[index] = region
        except TypeError:
            self._regions[key] = region
        return region

    def _view(self, what: str, index: Any, parts: tuple[Any, ...]) -> Array:
        """The region of one's own part that an index names; it lies at the same place in every part."""
        for part in parts:
            if isinstance(part, bool) or not (part is ... or isinstance(part, slice | int | np.integer)):
                raise TypeError(
                    self._worded(what, f"an index is made of ints, slices and ..., got {part!r}; that region need not "
                                 "be contiguous")
                )  # fmt: skip
        if not any(part is ... for part in parts):
            parts = (*parts, ...)
        try:
            view: Array = self._local[parts]
        except (IndexError, TypeError, ValueError) as error:
            raise type(error)(
                self._worded(what, f"index {index!r} for a window of shape {self.shape}: {error}")
            ) from None
        if not view.flags.c_contiguous:
            raise ValueError(
                self._worded(what, f"index {index!r} of a window of shape {self.shape} names a region that is not "
                             "contiguous; move it row by row")
            )  # fmt: skip
        return view

    def _prepare(self, what: str, peer: Any, index: Any, array: Any) -> tuple[int, tuple[int, ...], Array]:
        """Where a region lies, and the array that goes there, contiguous; all that can be wrong is found here."""
        self._check_peer(what, peer)
        offset, shape = self._region_of(what, index)
        try:
            source = as_array(array, "array")
        except TypeError as error:
            raise TypeError(self._worded(what, str(error))) from None
        if source.dtype != self.dtype:
            if source.ndim == 0 and isinstance(array, bool | int | float | complex):
                source = self._number_as_element(what, array)
            else:
                raise TypeError(
                    self._worded(what, f"the window holds {self.dtype}, the array {source.dtype}; pass "
                                 f"array.astype({str(self.dtype)!r})")
                )  # fmt: skip
        if source.shape != shape:
            raise ValueError(self._worded(what, f"the region has shape {shape}, the array {source.shape}"))
        if not source.flags.c_contiguous:
            source = np.ascontiguousarray(source).reshape(shape)
        return offset, shape, source

    def _number_as_element(self, what: str, number: complex) -> Array:
        """A plain number as an element of the window, if it can be one."""
        element = np.zeros((), self.dtype)
        try:
            element[()] = number
        except (TypeError, ValueError, OverflowError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(self._worded(what, f"{number!r} cannot be an element of {self.dtype}: {error}")) from None
        if self.dtype.kind in "iub" and element != number:
            raise ValueError(self._worded(what, f"{number!r} cannot be an element of {self.dtype}"))
        return element

    def _check_op(self, what: str, op: Any, mean: str) -> tuple[Op, tuple[int, int]]:
        """An op and its kernel for this window's dtype; AVG is refused if `mean` says why."""
        try:
            resolved = resolve_op(op)
            if resolved.name == "AVG" and mean:
                others = ", ".join(name for name in ops.OPS if name != "AVG")
                raise ValueError(f"op AVG is not offered here ({mean}): choose from {others}")
            return resolved, ops.kernel(resolved, self.dtype)
        except (TypeError, ValueError) as error:
            raise type(error)(self._worded(what, str(error))) from None

    def _check_signal(self, what: str, signal: Any) -> None:
        if not isinstance(signal, Signal):
            raise TypeError(self._worded(what, f"signal must be a Signal, got {type(signal).__name__}"))
        if signal.owner is not self._owner:
            raise ValueError(self._worded(what, "the signal belongs to another communicator"))
        signal.check_open(what)

    def _lock(self, peer: int, timeout: float | None) -> None:
        """Take the lock of a peer's part: a word that holds who has it, plus 1."""
        owner, chunk, lock = self._owner, self._chunk, self._start - LINE
        holder = 0

        def take() -> bool:
            nonlocal holder
            holder = chunk.compare_and_swap(peer, lock, 0, owner.rank + 1)
            if holder:
                chunk.poke()
                os.sched_yield()
            return not holder

        def missing() -> tuple[str, list[int]]:
            return f"rank {holder - 1} holds the lock of rank {peer}'s part", [holder - 1]

        where = f"window.accumulate (window {self._number}, rank {owner.rank} of {owner.size})"
        owner.wait(where, take, missing, owner.deadline(timeout))

    def _collective(self, name: str, signal: Signal, op: Any, timeout: float | None) -> None:
        self._check_open(name)
        self._check_signal(name, signal)
        key = (name, op, signal)
        try:
            found = self._plans.get(key)
        except TypeError:  # an op without a hash: refused below
            found = None
        if found is None:
            found = self._plan(name, signal, op)
            if len(self._plans) >= PLANS_KEPT:
                self._plans.clear()
            self._plans[key] = found
        signal.check_clear(name)
        self._owner.calls.run_call(*found, (self._local,), self._owner.deadline(timeout))

    def _plan(self, name: str, signal: Signal, op: Any) -> tuple[Plan, Room]:
        owner, size = self._owner, self._owner.size
        if not self.shape or self.shape[0] != size:
            raise ValueError(
                self._worded(name, f"the window must have one row for each of {size} ranks, its shape is {self.shape}")
            )
        if signal.size != size:
            raise ValueError(
                self._worded(
                    name, f"the signal must have one cell for each of {size} ranks, its shape is {signal.shape}"
                )
            )
        resolved = None
        if name != "allgather":
            narrow = self.dtype.itemsize == 2 and self.dtype.kind in "fV"
            mean = f"the mean of {self.dtype} may overflow in a window" if narrow else ""
            resolved, _ = self._check_op(name, op, mean)
        elements = math.prod(self.shape[1:])
        words = (("shape", str(self.shape)), ("window", str(self._number)), ("signal", str(signal.number)))
        call = Call(
            f"window.{name}", "mesh", resolved, self.dtype, (elements,) * size, words, owner.rank, owner.settings
        )
        program = build("mesh", window_rounds, name, size, owner.rank)
        rows: Sequence[int] = ()  # that are divided in the end
        if size > 1:
            rows = [owner.rank] if name == "reduce_scatter" else range(size)
        plan = Plan(program, call, in_window=True, result=[place_window(row, row) for row in rows])
        chunk, offset = signal.cells()
        return plan, Room([[Turn(self._chunk, self._start, chunk, offset, size, size)]], size, plan.window_bytes)
