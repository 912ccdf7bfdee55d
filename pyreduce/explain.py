"""``python -m pyreduce.explain COLLECTIVE --algorithm A -n P``: an algorithm in words, without MPI.

Prints the rounds of every rank, which rank holds what after each round, the fold order of every block, and the cost.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction

from pyreduce import algorithms
from pyreduce.programs import COLLECTIVES, INPUT, OUTPUT, Fold, Place, Program, Recv, Send, Step, input_blocks
from pyreduce.simulate import Simulation
from pyreduce.verify import Symbol, fold_symbols, format_symbol, verify

__all__ = ["cost_card", "describe_step", "explain", "fold_orders", "holdings", "main", "rounds_in_words"]

WIDE = 120  # columns above which the picture of who holds what is left out


def name_blocks(place: Place, nranks: int) -> str:
    """``block 3``, ``blocks 0-3`` or, wrapping, ``blocks 3, 4, 0``."""
    if place.count == 0:
        return "an empty message"
    if place.count == 1:
        return f"block {place.first}"
    blocks = [block for _, _, block in place.cells(nranks)]
    if blocks[-1] - blocks[0] == len(blocks) - 1:
        return f"blocks {blocks[0]}-{blocks[-1]}"
    return "blocks " + ", ".join(map(str, blocks))


def _describe_operand(place: Place, arrived: dict[Place, int]) -> str:
    if place in arrived:
        return f"what came from rank {arrived[place]}"
    return "own" if place.space == INPUT else "what it holds"


def describe_step(step: Step, nranks: int, arrived: dict[Place, int]) -> str:
    """One step in words; `arrived` maps the places received into in this round, or before it, to the sender."""
    if isinstance(step, Send):
        return f"send {name_blocks(step.src, nranks)} to rank {step.peer}"
    if isinstance(step, Recv):
        return f"receive {name_blocks(step.dst, nranks)} from rank {step.peer}"
    if isinstance(step, Fold):
        operands = ", then ".join(_describe_operand(src, arrived) for src in step.srcs)
        end = " into the result" if step.dst.space == OUTPUT else ""
        return f"fold {name_blocks(step.dst, nranks)}{end}: {operands}"
    end = " to the result" if step.dst.space == OUTPUT else ""
    return f"copy {name_blocks(step.src, nranks)}{end}"


def rounds_in_words(program: Program) -> Iterator[str]:
    """A line a round: ``round 1: send block 3 to rank 1; receive block 2 from rank 3 and fold``."""
    arrived: dict[Place, int] = {}
    for number, steps in enumerate(program.rounds, start=1):
        words: list[str] = []
        fresh: dict[Place, int] = {step.dst: step.peer for step in steps if isinstance(step, Recv)}
        folded_on_arrival = {
            place
            for step in steps
            if isinstance(step, Fold) and len(step.srcs) == 2
            for place in step.srcs
            if place in fresh and any(src.space == INPUT for src in step.srcs)
        }
        arrived.update(fresh)
        for step in steps:
            if isinstance(step, Fold) and folded_on_arrival & set(step.srcs):
                continue
            text = describe_step(step, program.nranks, arrived)
            words.append(f"{text} and fold" if isinstance(step, Recv) and step.dst in folded_on_arrival else text)
        yield f"  round {number}: " + "; ".join(words)


def _short(symbol: Symbol) -> str:
    """Contributions as ``0+1+2``, runs shortened."""
    if isinstance(symbol, int):
        return str(symbol)
    return "+".join(f"({_short(member)})" if isinstance(member, tuple) else str(member) for member in symbol)


def holdings(programs: Sequence[Program], name: str) -> Iterator[str]:
    """Which rank holds which block, folded from whom, after each round: a row a rank, a column a round.

    Only what is new is told: ``2:3+0`` is block 2 holding the contributions of ranks 3 and 0, folded in that order.
    """
    nranks = len(programs)
    reduces = programs[0].collective != "allgather"
    before: list[dict[tuple[str, int], tuple[int, Symbol]]] = [{} for _ in programs]
    table: list[list[str]] = [[] for _ in programs]

    def watch(rank: int, number: int, memory: dict[tuple[str, int], tuple[int, Symbol]]) -> None:
        new = [cell for where, cell in memory.items() if where[0] != INPUT and before[rank].get(where) != cell]
        before[rank] = dict(memory)
        fullest: dict[int, str] = {}
        for block, symbol in new:
            fullest[block] = max(fullest.get(block, ""), _short(symbol), key=len)
        parts = [f"{block}:{text}" if reduces else f"{block}" for block, text in fullest.items()]
        table[rank].append(" ".join(parts) or "-")

    inputs: list[dict[int, Symbol]] = [
        dict.fromkeys(input_blocks(program.collective, nranks, rank), rank) for rank, program in enumerate(programs)
    ]
    Simulation[Symbol](programs, inputs, fold_symbols, name, watch).run()
    rounds = max(len(row) for row in table)
    rows = [[f"rank {rank}", *row, *["-"] * (rounds - len(row))] for rank, row in enumerate(table)]
    head = ["after", *(f"round {number}" for number in range(1, rounds + 1))]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(rounds + 1)]
    if sum(widths) + 2 * rounds > WIDE:
        yield f"  (too wide to print for P={nranks}; try a smaller -n)"
        return
    for row in [head, *rows]:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def fold_orders(orders: Sequence[Symbol]) -> Iterator[str]:
    """A line a block: in which order its contributions are folded."""
    for block, order in enumerate(orders):
        yield f"  block {block}: {format_symbol(order)}"


def _share(blocks: int, nranks: int) -> str:
    """Blocks as a multiple of the vector S."""
    share = Fraction(blocks, nranks)
    if share == 0:
        return "0"
    top = "S" if share.numerator == 1 else f"{share.numerator} S"
    return top if share.denominator == 1 else f"{top}/{share.denominator}"


def cost_card(programs: Sequence[Program]) -> Iterator[str]:
    """Rounds, bytes, folds and scratch of the costliest rank; S is the bytes of the whole vector, in equal blocks."""
    nranks = len(programs)
    costs = [program.cost() for program in programs]
    yield f"  rounds    {max(cost.rounds for cost in costs)}"
    for label, values in (
        ("sends", [cost.sent for cost in costs]),
        ("receives", [cost.received for cost in costs]),
        ("folds", [cost.folds for cost in costs]),
        ("scratch", [cost.scratch for cost in costs]),
    ):
        unit = {"folds": " folded", "scratch": "; a segment of each block at a time"}.get(label, "")
        told = f"{_share(max(values), nranks)} bytes a rank ({max(values)} blocks){unit}"
        yield f"  {label:9} {told}"
    yield f"  messages  {max(cost.messages for cost in costs)} a rank and segment"


def explain(collective: str, algorithm: str, nranks: int, ranks: Sequence[int] | None = None) -> Iterator[str]:
    """All of it, line by line.

    Parameters
    ----------
    collective, algorithm : str
    nranks : int
    ranks : sequence of int, optional
        Whose rounds to print; default all.
    """
    chosen = algorithms.get(algorithm)
    programs = chosen.programs(collective, nranks)
    report = verify(algorithm, chosen.rounds, collective, nranks)
    yield f"{collective} by {algorithm}, P={nranks} ranks"
    what = (sys.modules[chosen.rounds.__module__].__doc__ or "").strip().split("\n")[0]
    if what:
        yield f"  {what}"
    for rank in ranks if ranks is not None else range(nranks):
        yield f"\nrank {rank}"
        yield from rounds_in_words(programs[rank])
    meaning = "block:ranks folded into it, in order" if collective != "allgather" else "blocks that have come"
    yield f"\nwho holds what is new after each round ({meaning})"
    yield from holdings(programs, algorithm)
    if collective != "allgather":
        yield "\nfold order" + (" (rank order)" if report.rank_order else "")
        yield from fold_orders(report.orders)
    yield "\ncost (S: bytes of the whole vector)"
    yield from cost_card(programs)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pyreduce.explain", description="Explain an algorithm in words.")
    parser.add_argument("collective", choices=COLLECTIVES)
    parser.add_argument("--algorithm", "-a", default="ring", metavar="A", help="default: ring")
    parser.add_argument("--load", metavar="FILE.py", help="run this file first, which registers algorithms of yours")
    parser.add_argument("-n", "--ranks", type=int, default=4, metavar="P", help="number of ranks, default 4")
    parser.add_argument("--rank", type=int, action="append", metavar="R", help="print the rounds of this rank only")
    options = parser.parse_args(argv)
    if options.ranks < 1:
        parser.error(f"-n {options.ranks}: needs one rank at least")
    for rank in options.rank or ():
        if not 0 <= rank < options.ranks:
            parser.error(f"--rank {rank}: ranks are 0..{options.ranks - 1}")
    try:
        if options.load:
            runpy.run_path(options.load)
        for line in explain(options.collective, options.algorithm, options.ranks, options.rank):
            print(line)
    except BrokenPipeError:
        sys.stderr.close()
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
