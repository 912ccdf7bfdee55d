"""reduce_scatter step by step, small enough to follow by eye: 4 ranks, 12 numbers each.

    mpirun -n 4 python examples/walkthrough.py        the real thing, one process a rank
    python examples/walkthrough.py                    the same story, all ranks played in this one process

Any number of ranks works. What is printed is not written down here: who sends what to whom, and what a rank holds by
then, is read off the library's own programs, played by its simulator on texts such as "A3" instead of numbers; and the
numbers are what the real calls returned. The exit status is 1 if any of them differs from what NumPy says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import pyreduce as pr
from pyreduce import algorithms, simulate
from pyreduce.blocks import partition
from pyreduce.programs import INPUT, Fold, Place, Send

ELEMENTS = 12
Vector = NDArray[np.int64]  # whole numbers: their sum is the same in any order, so every comparison below is exact


class Held(NamedTuple):
    """What one rank put in, and what each call gave it."""

    vector: Vector
    naive_block: Vector
    block: Vector
    full: Vector
    total: Vector


class Moment(NamedTuple):
    """What one rank did in one round of a program: what it sent to whom, and what it folded."""

    round: int
    rank: int
    sends: list[tuple[str, int]]  # what, to which rank
    folds: list[tuple[str, str]]  # what of its own input went in, what came out


def letter(rank: int) -> str:
    """A, B, ..., Z, AA, AB, ...: the name of a rank's vector."""
    return (letter(rank // 26 - 1) if rank >= 26 else "") + chr(ord("A") + rank % 26)


def vector(rank: int) -> Vector:
    """The input of a rank: A is 1..12, B is 101..112, C is 201..212, and so on."""
    return 100 * rank + np.arange(1, ELEMENTS + 1, dtype=np.int64)


def run_on_mpi(comm: MPI.Intracomm) -> list[Held] | None:
    """Make the calls, every rank its own; what all ranks held, on rank 0 (so that one process prints, in order)."""
    x = vector(comm.rank)
    naive_block = pr.reduce_scatter(x, comm=comm, algorithm="naive")
    block = pr.reduce_scatter(x, comm=comm, algorithm="ring")
    full = pr.allgather(block, comm=comm, algorithm="ring")
    total = pr.allreduce(x, comm=comm)  # no algorithm named: the library chooses
    return comm.gather(Held(x, naive_block, block, full, total), root=0)


def run_in_simulator(nranks: int) -> list[Held]:
    """The same calls for all ranks in this process, without MPI."""

    def call(collective: str, algorithm: str, inputs: list[Vector]) -> list[NDArray[Any]]:
        return simulate.run(algorithms.get(algorithm).programs(collective, nranks), inputs)

    x = [vector(rank) for rank in range(nranks)]
    naive_blocks = call("reduce_scatter", "naive", x)
    blocks = call("reduce_scatter", "ring", x)
    full = call("allgather", "ring", blocks)
    total = call("allreduce", "ring", x)
    return [Held(*of_one_rank) for of_one_rank in zip(x, naive_blocks, blocks, full, total, strict=True)]


def check(ranks: list[Held]) -> list[str]:
    """What differs from NumPy's answer, in words; exact equality, and an empty list if all is well."""
    total = np.sum([vector(rank) for rank in range(len(ranks))], axis=0)
    wrong = []
    for rank, (held, block) in enumerate(zip(ranks, np.array_split(total, len(ranks)), strict=True)):
        expected = Held(vector(rank), block, block, total, total)
        for name, got, wanted in zip(Held._fields, held, expected, strict=True):
            if not np.array_equal(got, wanted):
                wrong.append(f"WRONG: rank {rank} of {len(ranks)}: {name} is {got}, NumPy says {wanted}")
    return wrong


def play(algorithm: str, nranks: int) -> tuple[list[Moment], list[dict[int, str]]]:
    """Play a reduce_scatter on texts: block 3 of A is "A3", and folding "A3" and "B3" gives "A3+B3".

    Returns
    -------
    list of Moment
        By round, then by rank.
    list of dict
        For each rank, the text of every block of its output.
    """
    programs = algorithms.get(algorithm).programs("reduce_scatter", nranks)
    inputs = [{block: f"{letter(rank)}{block}" for block in range(nranks)} for rank in range(nranks)]
    moments: list[Moment] = []

    def watch(rank: int, number: int, memory: dict[tuple[str, int], tuple[int, str]]) -> None:
        """Called after each round of each rank; no step writes what a send of its round reads, so it is still there."""

        def read(place: Place) -> str:
            return " ".join(memory[space, index][1] for space, index, _ in place.cells(nranks))

        steps = programs[rank].rounds[number - 1]
        sends = [(read(step.src), step.peer) for step in steps if isinstance(step, Send)]
        folds = [
            (" ".join(read(place) for place in step.srcs if place.space == INPUT), read(step.dst))
            for step in steps
            if isinstance(step, Fold)
        ]
        moments.append(Moment(number, rank, sends, folds))

    outputs = simulate.Simulation(programs, inputs, "+".join, name=algorithm, watch=watch).run()
    return sorted(moments), outputs


def bytes_sent(algorithm: str, collective: str, nranks: int) -> str:
    """Bytes that a rank sends, counted from the programs; a range if blocks, and so ranks, differ."""
    rows = partition(ELEMENTS, nranks)
    sent = [
        sum(
            rows[block] * np.dtype(np.int64).itemsize
            for steps in program.rounds
            for step in steps
            if isinstance(step, Send)
            for _, _, block in step.src.cells(nranks)
        )
        for program in algorithms.get(algorithm).programs(collective, nranks)
    ]
    return f"{min(sent)} bytes" if min(sent) == max(sent) else f"{min(sent)} to {max(sent)} bytes"


def numbers(x: Vector) -> str:
    """An array as text: ``[101 102 103]``."""
    return "[" + " ".join(f"{value:3d}" for value in x.tolist()) + "]"


def tell_naive(nranks: int) -> None:
    """The naive way, from its program."""
    moments, outputs = play("naive", nranks)
    for rank, output in enumerate(outputs):
        sends = [send for moment in moments if moment.rank == rank for send in moment.sends]
        sent = f"sends {sends[0][0]} to every other rank; " if sends else ""
        print(f"  rank {rank}  {sent}adds up all {nranks} blocks; keeps {output[rank]}")
    print(f"  Each rank sends {bytes_sent('naive', 'reduce_scatter', nranks)}.", end=" ")
    print(f"Even the ring's allreduce would send {bytes_sent('ring', 'allreduce', nranks)}.")


def tell_ring(nranks: int) -> None:
    """The ring, round by round, from its program."""
    moments, outputs = play("ring", nranks)
    after = {(moment.round, moment.rank): moment.folds for moment in moments}
    for moment in moments:
        for sent, peer in moment.sends:
            if moment.rank == 0:
                print(f"  Round {moment.round} of {nranks - 1}")
            (own, result), *_ = after[moment.round, peer]
            complete = "   complete" if result == outputs[peer].get(peer) else ""
            print(f"    rank {moment.rank} sends {sent} to rank {peer}, which adds {own}:  {result}{complete}")
    if nranks == 1:
        print("  One rank has nobody to send to: 0 rounds.")
    print(f"  Each rank sends {bytes_sent('ring', 'reduce_scatter', nranks)}: every block but one, once.")


def tell(ranks: list[Held]) -> None:
    """The story, told by rank 0 alone."""
    nranks = len(ranks)
    print(f"reduce_scatter on {nranks} ranks, {ELEMENTS} numbers each, cut into {nranks} blocks\n")
    print("Before: each rank holds a vector of its own")
    for rank, held in enumerate(ranks):
        named = [f"{letter(rank)}{i} {numbers(b)}" for i, b in enumerate(np.array_split(held.vector, nranks))]
        print(f"  rank {rank}  " + "  ".join(named))
    print("\nThe goal: rank r holds block r of the sum, and nothing else")
    print("\nThe naive way: a whole allreduce, of which each rank keeps its own block and drops the rest")
    tell_naive(nranks)
    print("\nThe ring: in each round, send one block to the right, add one's own to what comes from the left")
    tell_ring(nranks)
    symbols = play("ring", nranks)[1]
    print("\nAfter reduce_scatter: each rank holds its block of the sum")
    for rank, held in enumerate(ranks):
        print(f"  rank {rank}  {symbols[rank][rank]} = {numbers(held.block)}")
    print("\nAfter allgather of these blocks: each rank holds the whole sum")
    for rank, held in enumerate(ranks):
        print(f"  rank {rank}  {numbers(held.full)}")
    print("\nallreduce gives the same in one call: allreduce = reduce_scatter, then allgather")
    for rank, held in enumerate(ranks):
        equal = "the same" if np.array_equal(held.total, held.full) else "DIFFERENT"
        print(f"  rank {rank}  {numbers(held.total)}  {equal}")
    print()


def main(argv: Sequence[str] | None = None) -> int:
    """Run, tell, check; the exit status, the same on every rank."""
    parser = argparse.ArgumentParser(description="reduce_scatter step by step")
    parser.add_argument("--ranks", type=int, default=4, help="ranks to simulate without mpirun (default: 4)")
    options = parser.parse_args(argv)
    if options.ranks < 1:
        parser.error("--ranks must be 1 or more")

    comm = MPI.COMM_WORLD
    ranks = run_on_mpi(comm)
    wrong: list[str] = []
    if ranks is not None:  # this is rank 0
        wrong = check(ranks)
        if comm.size == 1:
            print(f"One process only, so {options.ranks} ranks are simulated in it. To run on 4 real ones:")
            print("    mpirun -n 4 python examples/walkthrough.py\n")
            ranks = run_in_simulator(options.ranks)
            wrong += check(ranks)
        tell(ranks)
        print("\n".join(wrong) or "Every number above equals NumPy's.\nOK")
    return int(comm.bcast(bool(wrong), root=0))


if __name__ == "__main__":
    sys.exit(main())
