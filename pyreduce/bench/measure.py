"""Checking and timing one size of one collective, all algorithms side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import pyreduce as pr
from pyreduce import algorithms
from pyreduce.bench import values
from pyreduce.bench.cases import Buffers, Call, Case, Problem, bus_factor
from pyreduce.bench.job import no_garbage_collection
from pyreduce.bench.options import AUTO, Options, as_dtype

__all__ = ["Bench", "Cell", "Row", "step_figures"]

TIMEOUT = 60.0  # seconds: a collective that hangs is reported, not waited for
BUDGET = 0.5  # seconds that the timed calls of one size of one collective may take, shared by all algorithms
PACE = 1.2  # seconds that a size may take in all; a run that is behind, as on a crowded machine, times fewer calls
FEWEST, MOST = 3, 2000  # timed calls that the budget may buy
TURNS = 10  # in which the algorithms alternate
CANARY = 0xA5


@dataclass(frozen=True)
class Trouble:
    """Why there is no time to show.

    Attributes
    ----------
    refused : bool
        The algorithm does not serve such a call, and said so; nothing is wrong.
    """

    text: str
    refused: bool = False


@dataclass(frozen=True)
class Cell:
    """An algorithm's figures for one size, out of place or in place; times in us, bandwidths in GB/s (1e9 bytes).

    Attributes
    ----------
    ratio : float or None
        The time of native by this time; None if native has none.
    wrong : int or None
        Wrong elements on all ranks, those of the input that were written included.
    """

    median_us: float | None = None
    min_us: float | None = None
    p99_us: float | None = None
    algbw: float | None = None
    busbw: float | None = None
    ratio: float | None = None
    wrong: int | None = None
    iterations: int = 0
    trouble: Trouble | None = None

    @property
    def failed(self) -> bool:
        """Whether the run must not end well."""
        return bool(self.wrong) or (self.trouble is not None and not self.trouble.refused)


@dataclass(frozen=True)
class Row:
    """An algorithm on one size.

    Attributes
    ----------
    runs : str
        The algorithm that ran: what the library chose, if `algorithm` is ``auto``.
    """

    collective: str
    nbytes: int
    algorithm: str
    runs: str
    out_of_place: Cell
    in_place: Cell


@dataclass
class Contender:
    """One algorithm, out of place or in place: its calls, one for each pair of buffers, and what came of them.

    Attributes
    ----------
    given : ndarray
        What this rank puts in, a copy that no call sees.
    runs : str
        The algorithms that the calls ran by.
    """

    algorithm: str
    in_place: bool
    problem: Problem
    case: Case
    given: NDArray[Any]
    buffers: Sequence[Buffers] = ()
    calls: Sequence[Call] = ()
    wrong: int | None = None
    trouble: Trouble | None = None
    runs: str = ""
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._next = cycle(range(len(self.calls)))

    def restore(self, buffers: Buffers) -> None:
        """In place, put back the input that the last call has overwritten."""
        if self.in_place:
            where = self.case.source_in_place(self.problem)
            buffers.buffer[where] = self.given

    def prepare(self) -> Call:
        """The next call, on the next pair of buffers, ready to be made."""
        index = next(self._next)
        self.restore(self.buffers[index])
        return self.calls[index]


class Bench:
    """Measures; every method is collective over `comm` and returns the same on every rank.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks; nobody else's messages travel on it.
    options : Options
    """

    def __init__(self, comm: MPI.Intracomm, options: Options) -> None:
        self.comm = comm
        self.options = options
        self.pyreduce = pr.Communicator(comm, timeout=TIMEOUT)
        self._begun = perf_counter()
        self._measured = 0

    def close(self) -> None:
        """Free the pyreduce communicator."""
        self.pyreduce.close()

    def measure(self, case: Case, nbytes: int) -> list[Row]:
        """Check, time and check again every algorithm on one size."""
        problem = self._problem(nbytes)
        names = (algorithms.NATIVE, *self.options.algorithms)
        prepared, trouble = self._attempt(lambda: _prepare(case, problem, self.options.rotate))
        if trouble is not None:
            cell = Cell(trouble=trouble)
            return [Row(case.name, problem.nbytes, name, name, cell, cell) for name in names]
        buffers, given, expected = prepared
        contenders = [self._enter(name, in_place, case, problem, given, buffers)
                      for name in names for in_place in case.places]  # fmt: skip
        sound = self._check_all(contenders, expected)
        if sound:
            iterations = self._warm_up(sound)
            with no_garbage_collection():
                self._race(sound, iterations)
            self._check_all(sound, expected)
        self._measured += 1
        return _rows(contenders, case, problem)

    def _problem(self, nbytes: int) -> Problem:
        dtype = as_dtype(self.options.dtype)
        return Problem(nbytes // dtype.itemsize, pr.ops.OPS[self.options.op], dtype, self.comm.size, self.comm.rank)

    def _enter(
        self, name: str, in_place: bool, case: Case, problem: Problem, given: NDArray[Any], buffers: Sequence[Buffers]
    ) -> Contender:
        """One contender with its calls prepared."""

        def bind(pair: Buffers) -> Call:
            if name == algorithms.NATIVE:
                return case.native(self.comm, problem, pair, in_place)
            # Not bound to the Communicator itself, which is another after a failure.
            return lambda: case.pyreduce(self.pyreduce, problem, pair, in_place, None if name == AUTO else name)()

        calls, trouble = self._attempt(lambda: [bind(pair) for pair in buffers])
        return Contender(name, in_place, problem, case, given, buffers, calls or (), trouble=trouble)

    def _attempt(self, action: Callable[[], Any]) -> tuple[Any, Trouble | None]:
        """Do something on every rank, and agree on whether it went well everywhere."""
        result, trouble = None, None
        try:
            result = action()
        except Exception as error:
            trouble = _describe(error)
        return result, self._agree(trouble)

    def _agree(self, trouble: Trouble | None) -> Trouble | None:
        """The same on all ranks: the first rank's trouble, if any has one."""
        troubles: list[Trouble | None] = self.comm.allgather(trouble)
        found = [(rank, one) for rank, one in enumerate(troubles) if one is not None]
        if not found:
            return None
        if len(found) == len(troubles) and all(one.refused for _, one in found):
            return found[0][1]
        rank, worst = next((rank, one) for rank, one in found if not one.refused or len(found) < len(troubles))
        return Trouble(worst.text if "(rank " in worst.text else f"{worst.text} (rank {rank} of {len(troubles)})")

    def _check_all(self, contenders: Sequence[Contender], expected: NDArray[Any]) -> list[Contender]:
        """Check everyone; those that may be timed."""
        for contender in contenders:
            if contender.trouble is None:
                self._check(contender, expected)
        return [contender for contender in contenders if contender.trouble is None]

    def _check(self, contender: Contender, expected: NDArray[Any]) -> None:
        """Make every call once, and count what is wrong on all ranks."""
        wrong, before = 0, self._count_calls(contender)
        for pair, call in zip(contender.buffers, contender.calls, strict=True):
            _spoil(contender, pair, expected)
            _, trouble = self._attempt(call)
            if trouble is not None:
                contender.trouble = trouble
                return self._start_afresh(trouble)
            wrong += _count_wrong(contender, pair, expected)
        contender.wrong = (contender.wrong or 0) + self.comm.allreduce(wrong)
        ran = [name for key, calls in self._count_calls(contender).items() if calls > before.get(key, 0)
               for name in key[1:]]  # fmt: skip
        contender.runs = ",".join(dict.fromkeys(ran))

    def _count_calls(self, contender: Contender) -> dict[tuple[str, str], int]:
        """Calls so far of what the contender consists of, by collective and algorithm."""
        parts = {name for name, _ in contender.case.parts(contender.problem)}
        return {key: stats.calls for key, stats in self.pyreduce.stats.items() if key[0] in parts}

    def _start_afresh(self, trouble: Trouble) -> None:
        """After a failure the communicator may be broken: go on with another."""
        if not trouble.refused:
            self.pyreduce.close()
            self.pyreduce = pr.Communicator(self.comm, timeout=TIMEOUT)

    def _warm_up(self, contenders: list[Contender]) -> int:
        """Untimed calls; the number of timed ones, the same for all ranks and algorithms."""
        options = self.options
        calls = max(options.warmup, 0 if options.iters else 1)
        begun = perf_counter()
        for contender in contenders:
            contender.trouble = _take_turn(self.comm, contender, calls, options.sync)
            contender.seconds.clear()
        if options.iters:
            return options.iters
        now = perf_counter()
        behind = now - self._begun > PACE * (self._measured + 1)
        affordable = int((BUDGET / 4 if behind else BUDGET) * calls / (now - begun))
        return int(self.comm.bcast(min(MOST, max(FEWEST, affordable))))

    def _race(self, contenders: list[Contender], iterations: int) -> None:
        """Time everyone in turns, so that noise hits all alike; every other round of turns goes backwards."""
        each = 1 if self.options.workload else -(-iterations // TURNS)
        order = contenders
        for done in range(0, iterations, each):
            for contender in order:
                trouble = _take_turn(self.comm, contender, min(each, iterations - done), self.options.sync)
                contender.trouble = contender.trouble or trouble
            order = order[::-1]
        for contender in contenders:
            contender.trouble = self._agree(contender.trouble)
            if contender.trouble is not None:
                self._start_afresh(contender.trouble)
            slowest = np.array(contender.seconds)
            self.comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
            contender.seconds = slowest.tolist()


def step_figures(row: Row) -> dict[str, Any]:
    """A row of a workload as it is shown; figures that are missing are None."""
    cell = row.out_of_place
    seconds = moved = None
    if cell.median_us is not None and cell.busbw is not None:
        seconds = cell.median_us / 1e6
        moved = cell.busbw * seconds * 1e3
    return {
        "step": row.collective,
        "algorithm": row.algorithm,
        "steps_a_second": 1 / seconds if seconds else None,
        "seconds_a_step": seconds,
        "MB_moved": moved,
        "ratio": cell.ratio,
        "wrong": cell.wrong,
    }


def _rows(contenders: Sequence[Contender], case: Case, problem: Problem) -> list[Row]:
    native = {one.in_place: one for one in contenders if one.algorithm == algorithms.NATIVE}
    cells = {(one.algorithm, one.in_place): _cell(one, native[one.in_place]) for one in contenders}
    rows = []
    for name in dict.fromkeys(one.algorithm for one in contenders):
        runs = next(one.runs for one in contenders if one.algorithm == name) or name
        in_place = cells.get((name, True), Cell())
        rows.append(Row(case.name, problem.nbytes, name, runs, cells[name, False], in_place))
    return rows


def _describe(error: Exception) -> Trouble:
    if isinstance(error, pr.Unsupported):
        return Trouble(str(error), refused=True)
    return Trouble(f"{type(error).__name__}: {error}")


def _prepare(case: Case, problem: Problem, pairs: int) -> tuple[list[Buffers], NDArray[Any], NDArray[Any]]:
    """Pairs of buffers with equal inputs, every page touched; a copy of the input; the exact result."""
    part = case.source(problem)
    given = np.empty(part.stop - part.start, problem.dtype)
    values.fill(given, part.start, lambda start, stop: case.inputs(problem, start, stop))
    buffers = [Buffers(given.copy(), np.ones(problem.rows, problem.dtype)) for _ in range(pairs)]
    return buffers, given, case.expected(problem)


def _spoil(contender: Contender, pair: Buffers, expected: NDArray[Any]) -> None:
    """Make sure that nothing right is in the buffer before the call: what is not written is then wrong."""
    pair.buffer.view(np.uint8)[...] = CANARY
    spoilt = pair.buffer[: len(expected)]
    if expected.dtype.kind == "b":
        np.logical_not(expected, out=spoilt)
    else:
        np.invert(expected.view(np.uint8), out=spoilt.view(np.uint8))
    contender.restore(pair)


def _count_wrong(contender: Contender, pair: Buffers, expected: NDArray[Any]) -> int:
    """Elements of the result that are not as expected, and of what must not be written but has been.

    MPI leaves open what its own reduce_scatter does in place to the rest of the buffer, and MPICH uses it.
    """
    wrong = np.count_nonzero(pair.buffer[: len(expected)] != expected)
    wrong += np.count_nonzero(pair.source != contender.given)
    behind = pair.buffer[len(expected) :]  # of a reduce_scatter's block: must be as it was
    if contender.in_place and contender.algorithm == algorithms.NATIVE:
        return int(wrong)
    if contender.in_place:
        wrong += np.count_nonzero(behind != contender.given[len(expected) :]) if len(behind) else 0
    else:
        wrong += np.count_nonzero(behind.view(np.uint8) != CANARY)
    return int(wrong)


def _take_turn(comm: MPI.Intracomm, contender: Contender, calls: int, sync: str) -> Trouble | None:
    """Time some calls on this rank. A failure does not stop it, or the others would wait in their barriers for ever."""
    trouble = None
    comm.Barrier()
    for _ in range(calls):
        call = contender.prepare()
        if sync == "barrier":
            comm.Barrier()
        begun = perf_counter()
        try:
            call()
        except Exception as error:
            trouble = trouble or _describe(error)
        contender.seconds.append(perf_counter() - begun)
    return trouble


def _cell(contender: Contender, native: Contender) -> Cell:
    if contender.trouble is not None or not contender.seconds:
        return Cell(wrong=contender.wrong, trouble=contender.trouble)
    microseconds = np.array(contender.seconds) * 1e6
    median = float(np.median(microseconds))
    algbw = contender.problem.nbytes / median / 1e3
    comparable = native.trouble is None and native.seconds
    return Cell(
        median_us=median,
        min_us=float(microseconds.min()),
        p99_us=float(np.quantile(microseconds, 0.99)),
        algbw=algbw,
        busbw=algbw * bus_factor(contender.case, contender.problem.nranks),
        ratio=float(np.median(native.seconds)) * 1e6 / median if comparable else None,
        wrong=contender.wrong,
        iterations=len(microseconds),
    )
