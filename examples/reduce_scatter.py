"""reduce_scatter by hand from a window and signals, and as the one call on the window that does the same.

    mpirun -n 4 python examples/reduce_scatter.py                       by hand
    mpirun -n 4 python examples/reduce_scatter.py --mode builtin        one call
    mpirun -n 4 python examples/reduce_scatter.py --break own-block     a mistake, and how it shows

Every rank holds P blocks of SIZE numbers; in the end rank r must hold the sum, over all ranks, of their blocks r. That
is the golden result; every rank has another one, so a rank that reduces the wrong block is found out. The numbers are
whole, so their sum is the same in any order and the comparison is exact. Prints OK only if every rank's result is
golden. docs/signals.md explains what holds between a notify and a wait.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import pyreduce as pr
from pyreduce import NotifyOp, WaitCmp
from pyreduce.algorithms.mesh import mesh_in_window
from pyreduce.programs import Notify, Step, Wait
from pyreduce.verify import verify

Vector = NDArray[np.float64]

LESSONS = {
    "own-block": """\
The sum must start from one's own row of the window, which holds one's own contribution. Here it starts from zero and
adds the peers' rows only, so every rank lacks exactly what it has put in itself.
Mend: acc = data.local[rank].copy() before the loop over peers.""",
    "row-zero": """\
Every rank must reduce the row of its own number. Here all reduce row 0, so all ranks get the same block; only rank 0 is
right, and a test that looks at rank 0 alone would pass.
Mend: row `rank`, in one's own window and in the peers'.""",
    "offset": """\
Block c of the vector begins at c * SIZE. Here it is taken from c * (SIZE - 1), so every block but the first begins
early, with numbers that belong to the block before it.
Mend: x[c * SIZE : (c + 1) * SIZE] to row c.""",
    "one-barrier": """\
In place, the result goes back to the window, and whoever returns may write to its window at once: stage the next
vector, for example. With one barrier only, a fast rank does so while a slow one still reads. Runs may get away with it
for a long time, since ranks are seldom so far apart; the simulator, which knows what orders what, finds it. (Within one
call the rows are apart: rank r writes row r of its own window, which no peer reads.)
Mend: a second barrier, after the fold and before the write back. --mode builtin has it; --mode hand has no need of it,
because it writes its result where no peer reads.""",
}


def vector(rank: int, nranks: int, size: int) -> Vector:
    """The input of a rank: every element is different, on every rank."""
    return 1000.0 * (rank + 1) + np.arange(nranks * size)


def golden(rank: int, nranks: int, size: int) -> Vector:
    """What a rank must hold in the end."""
    blocks = [vector(source, nranks, size)[rank * size : (rank + 1) * size] for source in range(nranks)]
    return np.sum(blocks, axis=0)


def by_hand(c: pr.Communicator, x: Vector, size: int, mistake: str | None = None) -> Vector:
    """Stage all blocks, barrier, sum one's own block over all ranks."""
    rank, nranks = c.rank, c.size
    with c.window((nranks, size)) as data, c.signal((nranks, 1)) as signal:
        # Phase 1: stage every block at its row, so that each peer can read the one it needs.
        begin = size - 1 if mistake == "offset" else size
        for block in range(nranks):
            data.local[block] = x[block * begin : block * begin + size]

        # Phase 2, the barrier: notify every peer, wait for every peer.
        for peer in range(nranks):
            if peer != rank:
                signal.notify(peer, (rank, 0), 1, NotifyOp.ADD)
        for source in range(nranks):
            if source != rank:
                signal.wait((source, 0), 1, WaitCmp.GE)

        # Phase 3: sum row `rank` over all windows, one's own first; the result goes where no peer reads.
        row = 0 if mistake == "row-zero" else rank
        acc = np.zeros(size) if mistake == "own-block" else data.local[row].copy()
        for peer in range(nranks):
            if peer != rank:
                acc += data.get(peer, (row, slice(None)))
        return acc


def by_one_call(c: pr.Communicator, x: Vector, size: int) -> Vector:
    """Stage all blocks; phases 2 and 3 are one call, which leaves the result in row `rank` of the window."""
    with c.window((c.size, size)) as data, c.signal((c.size, 1)) as signal:
        for block in range(c.size):
            data.local[block] = x[block * size : (block + 1) * size]
        data.reduce_scatter(signal, pr.SUM)
        return data.local[c.rank].copy()


def with_one_barrier(collective: str, nranks: int, rank: int) -> Iterator[Sequence[Step]]:
    """The program of the one call, its second barrier left out."""
    for steps in mesh_in_window(collective, nranks, rank):
        folded = any(isinstance(step, Wait) for step in steps)
        kept: list[Step] = []
        for step in steps:
            if isinstance(step, Notify) and step.value < 0:
                kept.append(Notify(rank, step.cell, -1))
            elif not (isinstance(step, Wait) and step.value == 2) and not (isinstance(step, Notify) and folded):
                kept.append(step)
        yield kept


def describe_failure(mistake: str, rank: int, got: Vector, want: Vector, x: Vector) -> str:
    """How a rank's result differs from the golden one."""
    size = len(want)
    text = f"rank {rank}: got {got[:4]}..., golden {want[:4]}...: "
    if (got == want).all():
        return text + "equal"
    if mistake == "own-block" and (want - got == x[rank * size : (rank + 1) * size]).all():
        return text + "short by exactly its own block"
    nranks = len(x) // size
    for other in range(nranks):
        if (got == golden(other, nranks, size)).all():
            return text + f"this is block {other}"
    shifts = [s for s in range(1, size * nranks) if (want - got == s * nranks).all()]
    return text + (f"the block begins {shifts[0]} elements early" if shifts else "something else")


def run(c: pr.Communicator, options: argparse.Namespace, comm: MPI.Intracomm) -> int:
    """Run on all ranks, print on rank 0; the exit status."""
    rank, nranks, size = c.rank, c.size, options.size
    if options.mistake == "one-barrier":
        try:
            verify("builtin with one barrier", with_one_barrier, "reduce_scatter", nranks, turns=1)
            found = "the simulator found nothing"
        except pr.AlgorithmError as error:
            found = str(error)
        if rank == 0:
            print(f"--break one-barrier, {nranks} ranks, in the simulator:\n{found}\n\n{LESSONS['one-barrier']}\nWRONG")
        return 1
    x = vector(rank, nranks, size)
    got = by_one_call(c, x, size) if options.mode == "builtin" else by_hand(c, x, size, options.mistake)
    want = golden(rank, nranks, size)
    right = bool((got == want).all())
    told = comm.gather((right, describe_failure(options.mistake, rank, got, want, x)), root=0)
    all_right = comm.bcast(all(fine for fine, _ in told) if told is not None else None, root=0)
    if told is not None:
        if options.mistake:
            print(f"--break {options.mistake}, {nranks} ranks:")
        if not all_right:
            print("\n".join(text for _, text in told))
        if options.mistake:
            print(f"\n{LESSONS[options.mistake]}")
        print("OK" if all_right else "WRONG")
    return 0 if all_right else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    comm = MPI.COMM_WORLD
    parser: Any = argparse.ArgumentParser(description="reduce_scatter from a window and signals.")
    parser.add_argument("--mode", choices=["hand", "builtin"], default="hand", help="default: hand")
    parser.add_argument("--size", type=int, default=64, metavar="N", help="elements of a block, default 64")
    parser.add_argument("--break", dest="mistake", choices=LESSONS, help="make this mistake, and see how it shows")
    parser.add_argument("--transport", choices=["shared", "rma"], help="default: by where the ranks are")
    options = parser.parse_args(argv)
    if options.size < 2:
        parser.error(f"--size {options.size}: needs at least 2")
    if options.mistake and comm.size < 2:
        parser.error("--break shows nothing on one rank; start it on two or more")
    if options.mistake in ("own-block", "row-zero", "offset") and options.mode == "builtin":
        parser.error(f"--break {options.mistake} is a mistake that only --mode hand can make")
    with pr.Communicator(comm, transport=options.transport) as c:
        return run(c, options, comm)


if __name__ == "__main__":
    sys.exit(main())
