"""An algorithm of one's own: ranks in a grid, rings along its rows and columns.

    mpirun -n 4 python examples/torus.py                                        run it, and check it against NumPy
    python -m pyreduce.explain reduce_scatter --load examples/torus.py --algorithm torus -n 6
    python -m pyreduce.simulate reduce_scatter --load examples/torus.py -n 1024 --bytes 1M

P ranks stand in a grid of R rows and C columns, as near to a square as P allows; rank r stands in row r % R of column
r // R, so that blocks of one column are neighbours too. reduce_scatter goes around every row first, with the R blocks
of a column as one piece, then around every column, block by block. A ring of all ranks would take P-1 rounds; this
takes (C-1) + (R-1), and sends as few bytes: S (C-1)/C, then S/C (R-1)/R, which is S (P-1)/P. allgather is the same
backwards.

docs/own-algorithm.md tells how this file came about.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from math import isqrt
from typing import Any

import numpy as np

import pyreduce as pr

Rounds = Iterator[Sequence[Any]]


def grid(nranks: int) -> tuple[int, int]:
    """Rows and columns, both 2 at least; `Unsupported` where there is no such grid."""
    for rows in range(isqrt(nranks), 1, -1):
        if nranks % rows == 0:
            return rows, nranks // rows
    raise pr.Unsupported(f"torus needs a grid with two rows and two columns at least; {nranks} ranks have none")


def torus(collective: str, nranks: int, rank: int) -> Rounds:
    """Rounds of one rank: rings along the rows and columns of a grid."""
    if nranks == 1:
        own, result = pr.place_input(0), pr.place_output(0)
        yield [pr.Copy(result, own) if collective == "allgather" else pr.Fold(result, (own,))]
        return
    rows, columns = grid(nranks)
    column, row = divmod(rank, rows)
    if collective != "allgather":
        yield from reduce_along_row(rows, columns, row, column)
        yield from reduce_along_column(rows, columns, row, column)
    if collective != "reduce_scatter":
        yield from gather_along_column(rows, row, column, own_in_input=collective == "allgather")
        yield from gather_along_row(rows, columns, row, column)


def reduce_along_row(rows: int, columns: int, row: int, column: int) -> Rounds:
    """Piece c, the blocks of column c, travels once around the row, and ends in column c: in scratch, R slots."""
    right, left = (column + 1) % columns * rows + row, (column - 1) % columns * rows + row
    held = pr.place_input((column - 1) % columns * rows, rows)
    for hop in range(columns - 1):
        first = (column - 2 - hop) % columns * rows  # the first block of the piece that comes
        arriving = pr.place_scratch(hop % 2 * rows, first, rows)  # two places, turn about: one is being sent
        yield [
            pr.Send(right, held),
            pr.Recv(left, arriving),
            pr.Fold(arriving, (arriving, pr.place_input(first, rows))),
        ]
        held = arriving


def reduce_along_column(rows: int, columns: int, row: int, column: int) -> Rounds:
    """The blocks of this column's piece travel around the column, each to its owner."""
    first, slot = column * rows, columns % 2 * rows  # where the last round along the row has left the piece

    def partial(which: int) -> Any:
        return pr.place_scratch(slot + which, first + which)

    down, up = first + (row + 1) % rows, first + (row - 1) % rows
    held = partial((row - 1) % rows)
    for hop in range(rows - 1):
        which = (row - 2 - hop) % rows
        arriving = pr.place_scratch(2 * rows + hop % 2, first + which)
        folded = pr.place_output(first + row) if which == row else arriving
        yield [pr.Send(down, held), pr.Recv(up, arriving), pr.Fold(folded, (arriving, partial(which)))]
        held = folded


def gather_along_column(rows: int, row: int, column: int, own_in_input: bool) -> Rounds:
    """Every block travels once around its column."""
    first = column * rows
    down, up = first + (row + 1) % rows, first + (row - 1) % rows
    own = pr.place_input(first + row) if own_in_input else pr.place_output(first + row)
    for hop in range(rows - 1):
        held = own if hop == 0 else pr.place_output(first + (row - hop) % rows)
        steps: list[Any] = [pr.Send(down, held), pr.Recv(up, pr.place_output(first + (row - 1 - hop) % rows))]
        if hop == 0 and own_in_input:
            steps.append(pr.Copy(pr.place_output(first + row), own))
        yield steps


def gather_along_row(rows: int, columns: int, row: int, column: int) -> Rounds:
    """The pieces of all columns travel once around every row."""
    right, left = (column + 1) % columns * rows + row, (column - 1) % columns * rows + row
    for hop in range(columns - 1):
        held, arriving = ((column - back) % columns * rows for back in (hop, hop + 1))
        yield [pr.Send(right, pr.place_output(held, rows)), pr.Recv(left, pr.place_output(arriving, rows))]


pr.register_algorithm("torus", torus, replace=True)  # plays it for P = 1..16, and refuses it if it is wrong


def check(comm: Any, length: int) -> list[str]:
    """Run all three on whole numbers, whose sums are the same in any order; what differs from NumPy."""
    vectors = [np.arange(length) * (rank + 1) + 100 * rank for rank in range(comm.size)]
    total = np.sum(vectors, axis=0)
    block = np.array_split(total, comm.size)[comm.rank]
    found = {
        "reduce_scatter": (pr.reduce_scatter(vectors[comm.rank], comm=comm, algorithm="torus"), block),
        "allgather": (pr.allgather(block, comm=comm, algorithm="torus"), total),
        "allreduce": (pr.allreduce(vectors[comm.rank], comm=comm, algorithm="torus"), total),
    }
    return [
        f"rank {comm.rank}: {collective} of {length} numbers gives {got}, NumPy {wanted}"
        for collective, (got, wanted) in found.items()
        if not np.array_equal(got, wanted)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Check it on all ranks; returns the exit status."""
    from mpi4py import MPI  # here, so that the file can be loaded where there is no MPI

    comm = MPI.COMM_WORLD
    if argv:
        raise SystemExit(f"torus.py takes no arguments, got {' '.join(argv)}")
    if comm.size > 1:
        try:
            rows, columns = grid(comm.size)
        except pr.Unsupported as error:
            if comm.rank == 0:
                print(f"nothing to run: {error}")
            return 0
    else:
        rows = columns = 1
    wrong = [line for length in (0, 1, 12, 1000, 100_003) for line in check(comm, length)]
    everybody = comm.gather(wrong)
    status = comm.bcast(int(any(everybody)) if comm.rank == 0 else None)
    if comm.rank == 0:
        print(f"torus: {comm.size} ranks, {rows} x {columns}")
        print("\n".join([*(line for lines in everybody for line in lines), "WRONG"]) if status else "OK")
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
