"""The second interpreter of programs: all ranks in one process, on arrays or on symbols. No MPI.

Messages between two ranks arrive in the order sent, as in MPI. A send counts as done only when its receive has been
posted (MPI's synchronous mode), so that a program which leans on buffering inside the MPI shows up as a deadlock here.

Races
    Windows are watched with vector clocks: ``clock[q]`` of rank r says how much of what rank q has done is known to
    have happened before what r does next. Messages and waits carry clocks over. A wait for v credits says that rank s
    has made its k-th notify only if v credits cannot come together without it, which is so for k = v less everything
    that other ranks give to the cell; the order in which things happen to be played here says nothing. Two accesses
    to a slot of a window, one of them a write, that no chain of messages and waits orders are a race, even if it went
    well this time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pyreduce.blocks import check_counts, offsets, partition
from pyreduce.errors import AlgorithmError, name_ranks
from pyreduce.ops import AVG, SUM, Op, divide, dtype_code, fold_arrays, kernel, resolve_op
from pyreduce.programs import (
    INPUT,
    MOST_CREDITS,
    OUTPUT,
    SCRATCH,
    WINDOW,
    Copy,
    Fold,
    Get,
    Notify,
    Place,
    Program,
    Put,
    Recv,
    Send,
    Wait,
    input_blocks,
)

__all__ = ["Simulation", "run"]

Value = TypeVar("Value")
Clock = list[int]


@dataclass(slots=True)
class _Cell:
    """A cell of one rank: what it holds, what was taken back, and each source's clock at each of its credits."""

    value: int = 0
    cleared: int = 0
    given: dict[int, list[Clock]] = field(default_factory=dict)


@dataclass(slots=True)
class _Slot:
    """The last write of a window slot, and the reads since: rank -> (its tick, its round)."""

    writer: int
    tick: int
    number: int
    reads: dict[int, tuple[int, int]] = field(default_factory=dict)


class Simulation(Generic[Value]):
    """Plays the programs of all ranks against each other.

    Parameters
    ----------
    programs : sequence of Program
        One a rank, in rank order.
    inputs : sequence of dict
        For each rank, the value of every block of its input.
    fold : callable
        ``fold([v0, v1, ...])`` gives ``((v0 op v1) op ...)`` without changing its operands.
    name : str
        What to call the algorithm in messages.
    watch : callable, optional
        ``watch(rank, round number, memory)`` is called whenever a rank has finished a round; `memory` maps
        ``(space, index)`` to ``(block, value)``.
    calls : int
        How often the programs are run, one call after the other, no rank waiting for the others in between.
    turns : int
        Sets of windows and cells that the calls take turns on: 2 as `pyreduce.execute` has it, 1 for calls on a
        user's window.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        inputs: Sequence[dict[int, Value]],
        fold: Callable[[list[Value]], Value],
        name: str = "program",
        watch: Callable[[int, int, dict[tuple[str, int], tuple[int, Value]]], None] | None = None,
        *,
        calls: int = 1,
        turns: int = 2,
    ) -> None:
        self.programs = programs
        self.nranks = len(programs)
        self.fold = fold
        self.watch = watch
        self.calls = calls
        self.turns = turns
        self.where = f"{name}: {programs[0].collective} with P={self.nranks}"
        self.memory: list[dict[tuple[str, int], tuple[int, Value]]] = [
            {(INPUT, block): (block, value) for block, value in blocks.items()} for blocks in inputs
        ]
        self._round = [0] * self.nranks  # counted through all calls
        self._open = [-1] * self.nranks  # sends, receives and waits of the current round that are not satisfied
        self._sends: dict[tuple[int, int], deque[tuple[int, Place, list[tuple[int, Value]], Clock]]] = {}
        self._recvs: dict[tuple[int, int], deque[tuple[int, Place]]] = {}
        self._watched = any(program.one_sided for program in programs)  # messages alone cannot race
        self._clocks: list[Clock] = [[0] * self.nranks for _ in programs]
        self._windows: dict[tuple[int, int, int], tuple[int, Value]] = {}  # (rank, turn, slot)
        self._slots: dict[tuple[int, int, int], _Slot] = {}
        self._cells: dict[tuple[int, int, int], _Cell] = {}  # (rank, call if they have cells of their own, cell)
        self._waits: dict[tuple[int, int, int], list[int]] = {}  # values that are waited for there now
        self._waited: dict[tuple[int, int, int], int] = {}  # the most that was ever waited for there
        self._woken: list[int] = []
        self._credits = self._count_credits()

    def run(self) -> list[dict[int, Value]]:
        """Play to the end.

        Returns
        -------
        list of dict
            For each rank, the value of every block of its output.

        Raises
        ------
        AlgorithmError
            A deadlock, a race, a message nobody receives, credits nobody waits for, messages that do not fit, or a
            read of what was never written.
        """
        entering = deque(range(self.nranks))
        while entering:
            rank = entering.popleft()
            if self._is_done(rank):
                continue
            ready = deque(self._start_round(rank))
            while ready:
                peer = ready.popleft()
                if self._open[peer] == 0:
                    self._open[peer] = -1
                    self._finish_round(peer)
                    entering.append(peer)
                    ready.extend(self._woken)
                    self._woken.clear()
        self._check_all_done()
        return [
            {block: value for (space, _), (block, value) in memory.items() if space == OUTPUT} for memory in self.memory
        ]

    def _is_done(self, rank: int) -> bool:
        return self._round[rank] == len(self.programs[rank].rounds) * self.calls

    def _place_in_calls(self, rank: int) -> tuple[int, int]:
        """Which call a rank is in, and which of the program's rounds, both from 0."""
        return divmod(self._round[rank], max(len(self.programs[rank].rounds), 1))

    def _turn(self, rank: int) -> int:
        return self._place_in_calls(rank)[0] % self.turns

    def _cell_of(self, rank: int, owner: int, index: int) -> tuple[int, int, int]:
        """The cell of `owner` that `rank` means. With turns, a call spends all its credits: the next begins at 0."""
        return owner, self._place_in_calls(rank)[0] if self.turns > 1 else 0, index

    def _named_round(self, rank: int, number: int | None = None) -> str:
        call, within = divmod(self._round[rank] if number is None else number, len(self.programs[rank].rounds))
        return f"round {within + 1}" + (f" of call {call + 1}" if self.calls > 1 else "")

    def _start_round(self, rank: int) -> list[int]:
        """Post the sends, receives and waits of a rank's round, match what can be; ranks whose round may be over."""
        touched = {rank}
        self._open[rank] = 0
        self._clocks[rank][rank] += 1
        number = self._round[rank]
        read: dict[Place, list[tuple[int, Value]]] = {}
        for step in self.programs[rank].rounds[self._place_in_calls(rank)[1]]:
            if isinstance(step, Wait):
                self._open[rank] += 1
                where = self._cell_of(rank, rank, step.cell)
                self._waited[where] = max(self._waited.get(where, 0), step.value)
                self._waits.setdefault(where, []).append(step.value)
                self._satisfy(where)
                continue
            if isinstance(step, Send):
                pair = (rank, step.peer)
                values = read.get(step.src)
                if values is None:
                    values = read[step.src] = self._read(rank, step.src)
                self._sends.setdefault(pair, deque()).append((number, step.src, values, self._clock_of(rank)))
            elif isinstance(step, Recv):
                pair = (step.peer, rank)
                self._recvs.setdefault(pair, deque()).append((number, step.dst))
            else:
                continue
            self._open[rank] += 1
            touched.update(self._match(pair))
        return sorted(touched)

    def _match(self, pair: tuple[int, int]) -> tuple[int, ...]:
        sends, recvs = self._sends.get(pair), self._recvs.get(pair)
        if not sends or not recvs:
            return ()
        source, target = pair
        (sent_in, src, values, clock), (received_in, dst) = sends.popleft(), recvs.popleft()
        if (src.first, src.count) != (dst.first, dst.count):
            raise AlgorithmError(
                f"{self.where}: rank {source} sends {_blocks(src)} to rank {target} in its "
                f"{self._named_round(source, sent_in)}, where rank {target} receives {_blocks(dst)} in its "
                f"{self._named_round(target, received_in)}"
            )
        self._learn(target, clock)
        self._write(target, dst, values)
        self._open[source] -= 1
        self._open[target] -= 1
        return pair

    def _clock_of(self, rank: int) -> Clock:
        return self._clocks[rank].copy() if self._watched else self._clocks[rank]

    def _learn(self, rank: int, clock: Clock) -> None:
        if self._watched:
            self._clocks[rank] = list(map(max, self._clocks[rank], clock))

    def _finish_round(self, rank: int) -> None:
        number = self._round[rank]
        for step in self.programs[rank].rounds[self._place_in_calls(rank)[1]]:
            if isinstance(step, Fold):
                columns = [self._read(rank, place) for place in step.srcs]
                folded = [
                    (cells[0][0], self.fold([value for _, value in cells])) for cells in zip(*columns, strict=True)
                ]
                self._write(rank, step.dst, folded)
            elif isinstance(step, Copy):
                self._write(rank, step.dst, self._read(rank, step.src))
            elif isinstance(step, Get):
                self._write(rank, step.dst, self._read_window(rank, step.peer, step.src))
            elif isinstance(step, Put):
                self._write_window(rank, step.peer, step.dst, self._read(rank, step.src))
            elif isinstance(step, Notify):
                self._notify(rank, step)
        self._round[rank] = number + 1
        if self.watch is not None:
            turn = number // len(self.programs[rank].rounds) % self.turns
            window = {(WINDOW, slot): cell for (r, t, slot), cell in self._windows.items() if r == rank and t == turn}
            self.watch(rank, number + 1, {**self.memory[rank], **window})

    def _read(self, rank: int, place: Place) -> list[tuple[int, Value]]:
        if place.space == WINDOW:
            return self._read_window(rank, rank, place)
        memory = self.memory[rank]
        found = []
        for space, index, block in place.cells(self.nranks):
            cell = memory.get((space, index))
            if cell is None or cell[0] != block:
                what = f"{self.where}: rank {rank} reads {_cell(space, index)} in {self._named_round(rank)}"
                if cell is None:
                    raise AlgorithmError(f"{what}, where block {block} was never received or written")
                raise AlgorithmError(f"{what} as block {block}, but it holds block {cell[0]}")
            found.append(cell)
        return found

    def _write(self, rank: int, place: Place, values: list[tuple[int, Value]]) -> None:
        if place.space == WINDOW:
            self._write_window(rank, rank, place, values)
            return
        memory = self.memory[rank]
        for (space, index, _), cell in zip(place.cells(self.nranks), values, strict=True):
            memory[space, index] = cell

    # ------------------------------------------------------------------------------------------------ windows and cells

    def _read_window(self, rank: int, owner: int, place: Place) -> list[tuple[int, Value]]:
        found = []
        turn, number, clock = self._turn(rank), self._round[rank], self._clocks[rank]
        for _, index, block in place.cells(self.nranks):
            where = (owner, turn, index)
            slot, cell = self._slots.get(where), self._windows.get(where)
            what = f"{self.where}: rank {rank} reads {_slot(owner, rank, index)} in {self._named_round(rank)}"
            if slot is None or cell is None:
                raise AlgorithmError(
                    f"{what}, which is not written yet: a race, no wait stands between, or nobody writes it"
                )
            if clock[slot.writer] < slot.tick and slot.writer != rank:
                raise AlgorithmError(
                    f"{what}, while rank {slot.writer} may still have to write it in its "
                    f"{self._named_round(slot.writer, slot.number)}: a race, no wait stands between"
                )
            if cell[0] != block:
                raise AlgorithmError(f"{what} as block {block}, but it holds block {cell[0]}")
            slot.reads[rank] = (clock[rank], number)
            found.append(cell)
        return found

    def _write_window(self, rank: int, owner: int, place: Place, values: list[tuple[int, Value]]) -> None:
        turn, number, clock = self._turn(rank), self._round[rank], self._clocks[rank]
        for (_, index, _), cell in zip(place.cells(self.nranks), values, strict=True):
            where = (owner, turn, index)
            slot = self._slots.get(where)
            if slot is not None:
                what = f"{self.where}: rank {rank} writes {_slot(owner, rank, index)} in {self._named_round(rank)}"
                late = [r for r, (tick, _) in slot.reads.items() if r != rank and clock[r] < tick]
                if late:
                    reader = min(late)
                    raise AlgorithmError(
                        f"{what}, while {name_ranks(late)} may still read it in "
                        f"{self._named_round(reader, slot.reads[reader][1])}: a write-after-read race, "
                        "no wait stands between"
                    )
                if slot.writer != rank and clock[slot.writer] < slot.tick:
                    raise AlgorithmError(
                        f"{what}, and rank {slot.writer} in {self._named_round(slot.writer, slot.number)}: "
                        "a race, no wait stands between"
                    )
            self._slots[where] = _Slot(rank, clock[rank], number)
            self._windows[where] = cell

    def _notify(self, rank: int, step: Notify) -> None:
        where = self._cell_of(rank, step.peer, step.cell)
        cell = self._cells.setdefault(where, _Cell())
        cell.value += step.value
        if step.value < 0:
            cell.cleared -= step.value
            return
        clock = self._clocks[rank].copy()
        cell.given.setdefault(rank, []).extend([clock] * step.value)
        self._clocks[rank][rank] += 1  # what comes now is no longer covered by this notify
        self._satisfy(where)

    def _satisfy(self, where: tuple[int, int, int]) -> None:
        """Let the waits on a cell go on that it satisfies."""
        waits = self._waits.get(where)
        if not waits:
            return
        cell = self._cells.setdefault(where, _Cell())
        rank = where[0]
        for value in [value for value in waits if cell.value >= value]:
            waits.remove(value)
            self._open[rank] -= 1
            self._woken.append(rank)
            # Credits since the first call on this set of cells; a rank's own taking back does not count.
            needed = cell.cleared + value
            credits = self._credits.get((rank, where[2]), {})
            overlapping = self.calls if self.turns == 1 else 1
            for source, clocks in cell.given.items():
                least = needed - sum(given * overlapping for other, given in credits.items() if other != source)
                if least >= 1:
                    self._learn(rank, clocks[least - 1])

    def _count_credits(self) -> dict[tuple[int, int], dict[int, int]]:
        """What each rank gives to each cell in a call: ``(rank, cell) -> {source: credits}``."""
        credits: dict[tuple[int, int], dict[int, int]] = {}
        for program in self.programs:
            for steps in program.rounds:
                for step in steps:
                    if isinstance(step, Notify) and step.value > 0:
                        cell = credits.setdefault((step.peer, step.cell), {})
                        cell[program.rank] = cell.get(program.rank, 0) + step.value
        for (rank, index), given in credits.items():
            if sum(given.values()) > MOST_CREDITS:
                raise AlgorithmError(
                    f"{self.where}: cell {index} of rank {rank} is given {sum(given.values())} credits in a call; "
                    f"at most {MOST_CREDITS} fit"
                )
        return credits

    # ------------------------------------------------------------------------------------------------------- the end

    def _check_all_done(self) -> None:
        for (source, target), sends in self._sends.items():
            if sends and self._is_done(target):
                number, src, _, _ = sends[0]
                raise AlgorithmError(
                    f"{self.where}: rank {source} sends {_blocks(src)} to rank {target} in "
                    f"{self._named_round(source, number)}, which rank {target} never receives"
                )
        stuck = [rank for rank in range(self.nranks) if not self._is_done(rank)]
        if stuck:
            waits = "; ".join(self._describe_wait(rank) for rank in stuck[:4])
            more = f"; and {len(stuck) - 4} more ranks" if len(stuck) > 4 else ""
            raise AlgorithmError(f"{self.where}: deadlock: {waits}{more}")
        self._check_credits()

    def _describe_wait(self, rank: int) -> str:
        for (source, target), recvs in self._recvs.items():
            if recvs and target == rank:
                number, dst = recvs[0]
                return (
                    f"rank {rank} waits in {self._named_round(rank, number)} for {_blocks(dst)} that rank {source} "
                    "never sends"
                )
        for (source, target), sends in self._sends.items():
            if sends and source == rank:
                number, src, _, _ = sends[0]
                return (
                    f"rank {rank} waits in {self._named_round(rank, number)} for rank {target} to receive "
                    f"{_blocks(src)}"
                )
        for where, values in self._waits.items():
            if values and where[0] == rank:
                return self._describe_cell(where, min(values))
        raise AssertionError(f"rank {rank} is stuck without waiting")

    def _describe_cell(self, where: tuple[int, int, int], value: int) -> str:
        rank, _, index = where
        cell, credits = self._cells.get(where, _Cell()), self._credits.get((rank, index), {})
        calls = self._place_in_calls(rank)[0] + 1 if self.turns == 1 else 1
        late = [source for source, given in credits.items() if len(cell.given.get(source, ())) < given * calls]
        if late:
            who = f"{name_ranks(late)} {'has' if len(late) == 1 else 'have'} not notified it"
        elif credits:
            who = f"and no more than {sum(credits.values())} credits a call are ever given to it"
        else:
            who = "and no rank ever notifies it"
        return (
            f"rank {rank} waits in {self._named_round(rank)} for its cell {index} to reach {value}: it holds "
            f"{cell.value}, {who}"
        )

    def _check_credits(self) -> None:
        """All credits of a call are waited for, or taken back: else the next call would find them."""
        for (rank, _, index), cell in self._cells.items():
            waited = self._waited.get((rank, _, index), 0)
            if cell.value not in ((0, waited) if self.turns > 1 and not cell.cleared else (0,)):
                raise AlgorithmError(
                    f"{self.where}: cell {index} of rank {rank} is left at {cell.value}: the most that is waited for "
                    f"is {waited}" + (f", {cell.cleared} were taken back" if cell.cleared else "")
                )


def _blocks(place: Place) -> str:
    if place.count == 0:
        return "an empty message"
    return f"block {place.first}" if place.count == 1 else f"blocks {place.first}..+{place.count}"


def _slot(owner: int, rank: int, index: int) -> str:
    return f"slot {index} of " + ("its own window" if owner == rank else f"rank {owner}'s window")


def _cell(space: str, index: int) -> str:
    return f"scratch slot {index}" if space == SCRATCH else f"its {space}"


def run(
    programs: Sequence[Program],
    inputs: Sequence[NDArray[Any]],
    *,
    op: Op | str = SUM,
    counts: Sequence[int] | None = None,
) -> list[NDArray[Any]]:
    """Run the programs of all ranks on arrays, in this process.

    Parameters
    ----------
    programs : sequence of Program
        One a rank, for example ``pyreduce.algorithms.get("ring").programs("allreduce", 4)``.
    inputs : sequence of ndarray
        One a rank. For reduce_scatter and allreduce all of one shape; for allgather a rank's block each.
    op : Op or str
        The reduction; ignored by allgather.
    counts : sequence of int, optional
        Rows of each block; default as `numpy.array_split` (for allgather: the rows of `inputs`).

    Returns
    -------
    list of ndarray
        What each rank's call would return.

    Examples
    --------
    >>> import numpy as np
    >>> from pyreduce import algorithms, simulate
    >>> x = [np.arange(4) + 10 * rank for rank in range(2)]
    >>> simulate.run(algorithms.get("ring").programs("reduce_scatter", 2), x)
    [array([10, 12]), array([14, 16])]
    """
    nranks, collective = len(programs), programs[0].collective
    op = resolve_op(op)
    if len(inputs) != nranks:
        raise ValueError(f"simulate: {len(inputs)} inputs for {nranks} ranks")
    arrays = [np.ascontiguousarray(x) for x in inputs]
    if any(x.ndim == 0 for x in inputs):
        raise ValueError("simulate: inputs need an axis of rows; pass x.reshape(1)")
    if counts is None:
        counts = [len(x) for x in arrays] if collective == "allgather" else partition(len(arrays[0]), nranks)
    counts = check_counts(counts, nranks)
    starts = offsets(counts)
    held: list[dict[int, NDArray[Any]]] = []
    for rank, x in enumerate(arrays):
        blocks = input_blocks(collective, nranks, rank)
        needed = sum(counts[b] for b in blocks)
        if len(x) < needed:
            raise ValueError(f"simulate: {collective}: input of rank {rank} has {len(x)} rows, needs {needed}")
        base = starts[blocks[0]]
        held.append({b: x[starts[b] - base : starts[b] - base + counts[b]] for b in blocks})
    divides = op == AVG and collective != "allgather"
    dtype = arrays[0].dtype
    if collective != "allgather":
        kernel(op, dtype)
    if divides and dtype.itemsize == 2:
        held = [{b: v.astype(np.float32) for b, v in blocks.items()} for blocks in held]
    reduction = SUM if divides else op
    outputs = Simulation(programs, held, lambda values: fold_arrays(reduction, values)).run()
    results = []
    for out in outputs:
        result = np.concatenate([out[b] for b in sorted(out)])
        if divides:
            where = result.ctypes.data
            divide(dtype_code(result.dtype), result.size, where, where, nranks)
        results.append(result.astype(dtype, copy=False))
    return results
