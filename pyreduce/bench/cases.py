"""The three collectives, each described once: who puts in what, what comes out, and how to call it.

A case works on `Buffers`: ``source``, what this rank puts in out of place, and ``buffer``, which takes the result, and
in place holds the input too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import pyreduce as pr
from pyreduce.algorithms.native import mpi_datatype
from pyreduce.bench import values
from pyreduce.blocks import offsets, partition

__all__ = ["CASES", "Buffers", "Case", "Problem", "bus_factor"]

Array = NDArray[Any]
Call = Callable[[], object]


@dataclass(frozen=True)
class Problem:
    """One collective's arguments: a vector of `rows` elements, cut into blocks for `nranks` ranks."""

    rows: int
    op: pr.Op
    dtype: np.dtype[Any]
    nranks: int
    rank: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole vector."""
        return self.rows * self.dtype.itemsize

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements of each rank's block."""
        return partition(self.rows, self.nranks)

    @property
    def even(self) -> bool:
        """Whether all blocks have the same length."""
        return self.rows % self.nranks == 0

    @property
    def whole(self) -> slice:
        """The vector."""
        return slice(0, self.rows)

    @property
    def own(self) -> slice:
        """This rank's block of the vector."""
        first = offsets(self.counts)[self.rank]
        return slice(first, first + self.counts[self.rank])

    def inputs(self, start: int, stop: int) -> Array:
        """Elements of this rank's vector."""
        return values.inputs(self.op, self.dtype, self.nranks, self.rank, start, stop)

    def results(self, start: int, stop: int) -> Array:
        """Elements of the reduction."""
        return values.results(self.op, self.dtype, self.nranks, start, stop)


@dataclass
class Buffers:
    """One rank's memory for one problem."""

    source: Array
    buffer: Array


class Case(Protocol):
    """One collective: which part of the vector goes in and comes out, and the two ways of calling it."""

    name: str
    doubled: bool  # whether every byte crosses the bus twice
    places: tuple[bool, ...]  # whether it is called in place: both, or out of place only

    def parts(self, problem: Problem) -> list[tuple[str, Problem]]:
        """The collectives that a call consists of, with their problems."""

    def source(self, problem: Problem) -> slice:
        """The part of the vector that this rank puts in."""

    def result(self, problem: Problem) -> slice:
        """The part of the vector that this rank gets."""

    def source_in_place(self, problem: Problem) -> slice:
        """Where in the buffer the input lies in place; the result is at the front always."""

    def inputs(self, problem: Problem, start: int, stop: int) -> Array:
        """What this rank puts in."""

    def expected(self, problem: Problem) -> Array:
        """The exact result of this rank."""

    def native(self, comm: MPI.Intracomm, problem: Problem, buffers: Buffers, in_place: bool) -> Call:
        """The MPI's own collective, its arguments prepared; `Unsupported` if the MPI lacks the dtype."""

    def pyreduce(
        self, comm: pr.Communicator, problem: Problem, buffers: Buffers, in_place: bool, algorithm: str | None
    ) -> Call:
        """Our collective."""


class Allreduce:
    name = "allreduce"
    doubled = True
    places: tuple[bool, ...] = (False, True)

    def parts(self, problem: Problem) -> list[tuple[str, Problem]]:
        return [(self.name, problem)]

    def source(self, problem: Problem) -> slice:
        return problem.whole

    def result(self, problem: Problem) -> slice:
        return problem.whole

    def source_in_place(self, problem: Problem) -> slice:
        return problem.whole

    def inputs(self, problem: Problem, start: int, stop: int) -> Array:
        return problem.inputs(start, stop)

    def expected(self, problem: Problem) -> Array:
        return _reduction(problem, problem.whole)

    def native(self, comm: MPI.Intracomm, problem: Problem, buffers: Buffers, in_place: bool) -> Call:
        datatype, op = _mpi_types(problem)
        sent = MPI.IN_PLACE if in_place else [_raw(buffers.source), problem.rows, datatype]
        received = [_raw(buffers.buffer), problem.rows, datatype]
        return _averaged(problem, buffers.buffer, lambda: comm.Allreduce(sent, received, op))

    def pyreduce(
        self, comm: pr.Communicator, problem: Problem, buffers: Buffers, in_place: bool, algorithm: str | None
    ) -> Call:
        sent = pr.IN_PLACE if in_place else buffers.source
        return lambda: comm.allreduce(sent, buffers.buffer, op=problem.op, algorithm=algorithm)


class ReduceScatter:
    name = "reduce_scatter"
    doubled = False
    places: tuple[bool, ...] = (False, True)

    def parts(self, problem: Problem) -> list[tuple[str, Problem]]:
        return [(self.name, problem)]

    def source(self, problem: Problem) -> slice:
        return problem.whole

    def result(self, problem: Problem) -> slice:
        return problem.own

    def source_in_place(self, problem: Problem) -> slice:
        return problem.whole

    def inputs(self, problem: Problem, start: int, stop: int) -> Array:
        return problem.inputs(start, stop)

    def expected(self, problem: Problem) -> Array:
        return _reduction(problem, problem.own)

    def native(self, comm: MPI.Intracomm, problem: Problem, buffers: Buffers, in_place: bool) -> Call:
        datatype, op = _mpi_types(problem)
        own = problem.counts[problem.rank]
        result = buffers.buffer[:own]
        if problem.even:
            block = MPI.IN_PLACE if in_place else [_raw(buffers.source), own, datatype]
            received = [_raw(buffers.buffer), own, datatype]
            return _averaged(problem, result, lambda: comm.Reduce_scatter_block(block, received, op))
        sent = MPI.IN_PLACE if in_place else [_raw(buffers.source), problem.rows, datatype]
        received = [_raw(buffers.buffer), problem.rows if in_place else own, datatype]
        counts = list(problem.counts)
        return _averaged(problem, result, lambda: comm.Reduce_scatter(sent, received, counts, op))

    def pyreduce(
        self, comm: pr.Communicator, problem: Problem, buffers: Buffers, in_place: bool, algorithm: str | None
    ) -> Call:
        own = problem.counts[problem.rank]
        sent = pr.IN_PLACE if in_place else buffers.source
        received = buffers.buffer if in_place else buffers.buffer[:own]
        return lambda: comm.reduce_scatter(sent, received, op=problem.op, algorithm=algorithm)


class Allgather:
    name = "allgather"
    doubled = False
    places: tuple[bool, ...] = (False, True)

    def parts(self, problem: Problem) -> list[tuple[str, Problem]]:
        return [(self.name, problem)]

    def source(self, problem: Problem) -> slice:
        return problem.own

    def result(self, problem: Problem) -> slice:
        return problem.whole

    def source_in_place(self, problem: Problem) -> slice:
        return problem.own

    def inputs(self, problem: Problem, start: int, stop: int) -> Array:
        return values.inputs(None, problem.dtype, problem.nranks, problem.rank, start, stop)

    def expected(self, problem: Problem) -> Array:
        vector = np.empty(problem.rows, problem.dtype)
        for rank, first in enumerate(offsets(problem.counts)):

            def block(start: int, stop: int, rank: int = rank) -> Array:
                return values.inputs(None, problem.dtype, problem.nranks, rank, start, stop)

            values.fill(vector[first : first + problem.counts[rank]], first, block)
        return vector

    def native(self, comm: MPI.Intracomm, problem: Problem, buffers: Buffers, in_place: bool) -> Call:
        # As bytes, for nothing is folded: so the MPI need not know the dtype.
        sent = MPI.IN_PLACE if in_place else [_raw(buffers.source), MPI.BYTE]
        if problem.even:
            nbytes = problem.nbytes // problem.nranks
            received: list[Any] = [_raw(buffers.buffer), nbytes, MPI.BYTE]
            return lambda: comm.Allgather(sent, received)
        counts = [count * problem.dtype.itemsize for count in problem.counts]
        received = [_raw(buffers.buffer), counts, None, MPI.BYTE]
        return lambda: comm.Allgatherv(sent, received)

    def pyreduce(
        self, comm: pr.Communicator, problem: Problem, buffers: Buffers, in_place: bool, algorithm: str | None
    ) -> Call:
        sent = pr.IN_PLACE if in_place else buffers.source
        return lambda: comm.allgather(sent, buffers.buffer, algorithm=algorithm)


CASES: dict[str, Case] = {case.name: case for case in (ReduceScatter(), Allgather(), Allreduce())}
"""Every collective by its name."""


def bus_factor(case: Case, nranks: int) -> float:
    """busbw / algbw, as nccl-tests derives it: the share of the vector that a rank must send; 0 for one rank.

    >>> bus_factor(CASES["allreduce"], 4), bus_factor(CASES["allgather"], 4)
    (1.5, 0.75)
    """
    return (2 if case.doubled else 1) * (nranks - 1) / nranks


def _reduction(problem: Problem, part: slice) -> Array:
    reduction = np.empty(part.stop - part.start, problem.dtype)
    values.fill(reduction, part.start, problem.results)
    return reduction


def _raw(array: Array) -> Array:
    """Bytes, which every dtype can be passed to MPI as."""
    return array.view(np.uint8)


def _mpi_types(problem: Problem) -> tuple[MPI.Datatype, MPI.Op]:
    """What MPI calls the dtype and the op. AVG is a SUM to it, and a bool an integer, for which it has all ops."""
    if problem.dtype.name == "bfloat16":
        raise pr.Unsupported("MPI has no bfloat16")
    datatype = MPI.UINT8_T if problem.dtype.kind == "b" else mpi_datatype(problem.dtype)
    op: MPI.Op = getattr(MPI, "SUM" if problem.op == pr.AVG else problem.op.name)
    return datatype, op


def _averaged(problem: Problem, result: Array, call: Call) -> Call:
    """MPI has no AVG: who wants one sums and divides."""
    if problem.op != pr.AVG:
        return call
    parts = result.view(result.real.dtype)

    def summed_and_divided() -> None:
        call()
        np.divide(parts, problem.nranks, out=parts)

    return summed_and_divided
