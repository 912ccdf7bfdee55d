"""The second interpreter of programs: all ranks in one process, on arrays or on symbols. No MPI.

Messages between two ranks arrive in the order sent, as in MPI. A send counts as done only when its receive has been
posted (MPI's synchronous mode), so that a program which leans on buffering inside the MPI shows up as a deadlock here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pyreduce.blocks import check_counts, offsets, partition
from pyreduce.errors import AlgorithmError
from pyreduce.ops import AVG, SUM, Op, divide, dtype_code, fold_arrays, kernel, resolve_op
from pyreduce.programs import INPUT, OUTPUT, SCRATCH, Copy, Fold, Place, Program, Recv, Send, input_blocks

__all__ = ["Simulation", "run"]

Value = TypeVar("Value")


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
    """

    def __init__(
        self,
        programs: Sequence[Program],
        inputs: Sequence[dict[int, Value]],
        fold: Callable[[list[Value]], Value],
        name: str = "program",
        watch: Callable[[int, int, dict[tuple[str, int], tuple[int, Value]]], None] | None = None,
    ) -> None:
        self.programs = programs
        self.nranks = len(programs)
        self.fold = fold
        self.watch = watch
        self.where = f"{name}: {programs[0].collective} with P={self.nranks}"
        self.memory: list[dict[tuple[str, int], tuple[int, Value]]] = [
            {(INPUT, block): (block, value) for block, value in blocks.items()} for blocks in inputs
        ]
        self._round = [0] * self.nranks
        self._open = [0] * self.nranks  # sends and receives of the current round that have not been matched
        self._sends: dict[tuple[int, int], deque[tuple[int, Place, list[tuple[int, Value]]]]] = {}
        self._recvs: dict[tuple[int, int], deque[tuple[int, Place]]] = {}

    def run(self) -> list[dict[int, Value]]:
        """Play to the end.

        Returns
        -------
        list of dict
            For each rank, the value of every block of its output.

        Raises
        ------
        AlgorithmError
            A deadlock, a message nobody receives, messages that do not fit, or a read of what was never written.
        """
        entering = deque(range(self.nranks))
        while entering:
            rank = entering.popleft()
            if self._round[rank] == len(self.programs[rank].rounds):
                continue
            for peer in self._start_round(rank):
                if self._open[peer] == 0:
                    self._finish_round(peer)
                    entering.append(peer)
        self._check_all_done()
        return [
            {block: value for (space, _), (block, value) in memory.items() if space == OUTPUT} for memory in self.memory
        ]

    def _start_round(self, rank: int) -> list[int]:
        """Post the sends and receives of a rank's round, match what can be; ranks whose round may be over."""
        touched = {rank}
        number = self._round[rank]
        read: dict[Place, list[tuple[int, Value]]] = {}
        for step in self.programs[rank].rounds[number]:
            if isinstance(step, Send):
                pair = (rank, step.peer)
                values = read.get(step.src)
                if values is None:
                    values = read[step.src] = self._read(rank, step.src)
                self._sends.setdefault(pair, deque()).append((number, step.src, values))
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
        (sent_in, src, values), (received_in, dst) = sends.popleft(), recvs.popleft()
        if (src.first, src.count) != (dst.first, dst.count):
            raise AlgorithmError(
                f"{self.where}: rank {source} sends {_blocks(src)} to rank {target} in its round {sent_in + 1}, "
                f"where rank {target} receives {_blocks(dst)} in its round {received_in + 1}"
            )
        self._write(target, dst, values)
        self._open[source] -= 1
        self._open[target] -= 1
        return pair

    def _finish_round(self, rank: int) -> None:
        number = self._round[rank]
        for step in self.programs[rank].rounds[number]:
            if isinstance(step, Fold):
                columns = [self._read(rank, place) for place in step.srcs]
                folded = [
                    (cells[0][0], self.fold([value for _, value in cells])) for cells in zip(*columns, strict=True)
                ]
                self._write(rank, step.dst, folded)
            elif isinstance(step, Copy):
                self._write(rank, step.dst, self._read(rank, step.src))
        self._round[rank] = number + 1
        if self.watch is not None:
            self.watch(rank, number + 1, self.memory[rank])

    def _read(self, rank: int, place: Place) -> list[tuple[int, Value]]:
        memory = self.memory[rank]
        found = []
        for space, index, block in place.cells(self.nranks):
            cell = memory.get((space, index))
            if cell is None or cell[0] != block:
                what = f"{self.where}: rank {rank} reads {_cell(space, index)} in round {self._round[rank] + 1}"
                if cell is None:
                    raise AlgorithmError(f"{what}, where block {block} was never received or written")
                raise AlgorithmError(f"{what} as block {block}, but it holds block {cell[0]}")
            found.append(cell)
        return found

    def _write(self, rank: int, place: Place, values: list[tuple[int, Value]]) -> None:
        memory = self.memory[rank]
        for (space, index, _), cell in zip(place.cells(self.nranks), values, strict=True):
            memory[space, index] = cell

    def _check_all_done(self) -> None:
        for (source, target), sends in self._sends.items():
            if sends and self._round[target] == len(self.programs[target].rounds):
                number, src, _ = sends[0]
                raise AlgorithmError(
                    f"{self.where}: rank {source} sends {_blocks(src)} to rank {target} in round {number + 1}, "
                    f"which rank {target} never receives"
                )
        stuck = [rank for rank in range(self.nranks) if self._round[rank] < len(self.programs[rank].rounds)]
        if stuck:
            waits = "; ".join(self._describe_wait(rank) for rank in stuck[:4])
            more = f"; and {len(stuck) - 4} more ranks" if len(stuck) > 4 else ""
            raise AlgorithmError(f"{self.where}: deadlock: {waits}{more}")

    def _describe_wait(self, rank: int) -> str:
        for (source, target), recvs in self._recvs.items():
            if recvs and target == rank:
                number, dst = recvs[0]
                return f"rank {rank} waits in round {number + 1} for {_blocks(dst)} that rank {source} never sends"
        for (source, target), sends in self._sends.items():
            if sends and source == rank:
                number, src, _ = sends[0]
                return f"rank {rank} waits in round {number + 1} for rank {target} to receive {_blocks(src)}"
        raise AssertionError(f"rank {rank} is stuck without waiting")


def _blocks(place: Place) -> str:
    if place.count == 0:
        return "an empty message"
    return f"block {place.first}" if place.count == 1 else f"blocks {place.first}..+{place.count}"


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
