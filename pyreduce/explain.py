"""``python -m pyreduce.explain COLLECTIVE --algorithm A -n P``: an algorithm in words, without MPI.

Prints the rounds of every rank, which rank holds what after each round, the fold order of every block, and the cost.

``python -m pyreduce.explain --why COLLECTIVE BYTES -n P --nodes FORM`` tells which algorithm runs there, and why.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import groupby
from math import inf
from typing import Any

import numpy as np

from pyreduce import algorithms, ops, profiles
from pyreduce.algorithms import hierarchical, shared
from pyreduce.algorithms.mesh import mesh, mesh_in_window
from pyreduce.commandline import parse_bytes, reporting_by
from pyreduce.errors import name_ranks
from pyreduce.model import in_bytes, in_seconds
from pyreduce.programs import (
    COLLECTIVES,
    INPUT,
    OUTPUT,
    WINDOW,
    Copy,
    Fold,
    Get,
    Notify,
    Place,
    Program,
    Put,
    Recv,
    RoundsFunction,
    Send,
    Step,
    Wait,
    build,
    input_blocks,
    writes,
)
from pyreduce.selection import choose, weigh
from pyreduce.settings import ARENA_BYTES
from pyreduce.simulate import Simulation
from pyreduce.topology import Topology, virtual_nodes
from pyreduce.verify import Symbol, fold_symbols, format_symbol, verify

__all__ = [
    "cost_card",
    "describe_step",
    "explain",
    "explain_choice",
    "explain_engine",
    "fold_orders",
    "holdings",
    "main",
    "rounds_in_words",
]

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


def _name_slots(place: Place) -> str:
    return f"slot {place.slot}" if place.count == 1 else f"slots {place.slot}-{place.slot + place.count - 1}"


def _describe_operand(place: Place, arrived: dict[Place, int]) -> str:
    if place in arrived:
        return f"what came from rank {arrived[place]}"
    return "own" if place.space in (INPUT, WINDOW) else "what it holds"


def _to_or_from(place: Place, word: str) -> str:
    """Where a copy goes to or comes from, if that is not plain."""
    if place.space == WINDOW:
        return f" {word} window {_name_slots(place)}"
    return f" {word} the result" if place.space == OUTPUT else ""


def _kind(step: Step) -> Any:
    """Steps of one kind are told together: those that differ in nothing but the peer or the cell."""
    if isinstance(step, Notify):
        return (Notify, step.cell if step.value > 0 else None, step.value)
    if isinstance(step, Wait):
        return (Wait, step.value)
    if isinstance(step, Get) and step.src.first == step.dst.first:
        return (Get, step.src)
    return step


def _describe_together(steps: list[Step]) -> str:
    """Several steps of one kind."""
    first = steps[0]
    if isinstance(first, Notify):
        cells = sorted(step.cell for step in steps if isinstance(step, Notify))
        if first.value < 0:
            return f"take {_credits(-first.value)} back from {_name_cells(cells)}"
        peers = name_ranks([step.peer for step in steps if isinstance(step, Notify)])
        return f"notify cell {first.cell} of {peers}" + (f" with {first.value} credits" if first.value > 1 else "")
    if isinstance(first, Wait):
        cells = sorted(step.cell for step in steps if isinstance(step, Wait))
        return f"wait for {_credits(first.value)} in {_name_cells(cells)}"
    assert isinstance(first, Get)
    peers = name_ranks([step.peer for step in steps if isinstance(step, Get)])
    return f"get block {first.src.first} from window {_name_slots(first.src)} of {peers}"


def _credits(count: int) -> str:
    return f"{count} credit" + "s" * (count != 1)


def _name_cells(cells: list[int]) -> str:
    return name_ranks(cells).replace("rank", "cell")


def describe_step(step: Step, nranks: int, arrived: dict[Place, int]) -> str:
    """One step in words; `arrived` maps the places received into in this round, or before it, to the sender."""
    if isinstance(step, Send):
        return f"send {name_blocks(step.src, nranks)} to rank {step.peer}"
    if isinstance(step, Recv):
        return f"receive {name_blocks(step.dst, nranks)} from rank {step.peer}"
    if isinstance(step, Fold):
        operands = ", then ".join(_describe_operand(src, arrived) for src in step.srcs)
        end = _to_or_from(step.dst, "into")
        return f"fold {name_blocks(step.dst, nranks)}{end}: {operands}"
    if isinstance(step, Put):
        return f"put {name_blocks(step.src, nranks)} into window {_name_slots(step.dst)} of rank {step.peer}"
    if isinstance(step, Get):
        return f"get {name_blocks(step.dst, nranks)} from window {_name_slots(step.src)} of rank {step.peer}"
    if isinstance(step, Notify | Wait):
        return _describe_together([step])
    source = _to_or_from(step.src, "from") if step.src.space == WINDOW else ""
    return f"copy {name_blocks(step.src, nranks)}{source}{_to_or_from(step.dst, 'to')}"


def rounds_in_words(program: Program) -> Iterator[str]:
    """A line a round: ``round 1: send block 3 to rank 1; receive block 2 from rank 3 and fold``."""
    arrived: dict[Place, int] = {}
    for number, steps in enumerate(program.rounds, start=1):
        words: list[str] = []
        fresh: dict[Place, int] = {step.dst: step.peer for step in steps if isinstance(step, Recv | Get)}
        folded_on_arrival = {
            place
            for step in steps
            if isinstance(step, Fold) and len(step.srcs) == 2
            for place in step.srcs
            if place in fresh and any(src.space == INPUT for src in step.srcs)
        }
        arrived.update(fresh)
        for _, run in groupby(steps, _kind):
            together = list(run)
            step = together[0]
            if len(together) > 1 and isinstance(step, Notify | Wait | Get):
                words.append(_describe_together(together))
                continue
            for step in together:
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
    rounds, written = max(cost.rounds for cost in costs), max(len(program.rounds) for program in programs)
    yield f"  rounds    {rounds}" + (f" in which a rank waits for peers, of {written}" if written > rounds else "")
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
    if any(cost.window for cost in costs):
        window = max(cost.window for cost in costs)
        yield f"  window    {_share(window, nranks)} bytes a rank ({window} blocks), shown to the peers"
        yield f"  notifies  {max(cost.notifies for cost in costs)} a rank and segment"


MODES: dict[str, tuple[RoundsFunction, int]] = {"hand": (mesh, 2), "builtin": (mesh_in_window, 1)}
"""The two forms of mesh: the function, and the sets of windows that its calls take turns on."""

WHY = """\
  hand writes its result where no peer reads, so one barrier is enough: all have staged before anyone reads. Its next
  call must not stage over what a slow peer still reads, and does not: it has another window and other cells
  (algorithm="mesh" takes two sets, turn about; a program that does it once needs no second).
  builtin is a call on a window of the user's, and its result is a row of it. Whoever comes back may write to the window
  at once, so nobody may come back before all peers have read: the second barrier is the price of the result in place.
  The credits of both barriers are taken back at the end, so that the same signal serves the next call."""


def compare_modes(collective: str, nranks: int) -> Iterator[str]:
    """What differs between the two forms of mesh: a line a property, counted in the program of the last rank."""
    rows: list[list[str]] = [[""], ["stores"], ["barriers"], ["remote reads"], ["result"], ["credits"], ["clean-up"]]
    for name, (function, _) in MODES.items():
        program = build(name, function, collective, nranks, nranks - 1)
        steps = [step for steps in program.rounds for step in steps]
        first_wait = next((i for i, step in enumerate(steps) if isinstance(step, Wait)), len(steps))
        staged = sum(p.count for s in steps[:first_wait] for p in writes(s) if p.space == WINDOW)
        back = sum(p.count for s in steps[first_wait:] for p in writes(s) if p.space == WINDOW)
        barriers = max((step.value for step in steps if isinstance(step, Wait)), default=0)
        out = [s for s in steps if isinstance(s, Copy | Fold | Get) and s.dst.space == OUTPUT]
        taken = {step.value for step in steps if isinstance(step, Notify) and step.value < 0}
        columns = [
            name,
            f"{staged} blocks to one's own window",
            f"{barriers}",
            f"{sum(s.dst.count for s in steps if isinstance(s, Get))} blocks",
            "back to the window, then out of it" if back and len(out) == 1 else "written straight out",
            f"{barriers} a cell and call",
            f"{-min(taken)} credits taken back from each cell" if taken else "none",
        ]
        for row, cell in zip(rows, columns, strict=True):
            row.append(cell)
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield WHY


def _engine_steps(collective: str, nranks: int, rank: int) -> Iterator[str]:
    """What a rank does with a piece, in words."""
    others = name_ranks([peer for peer in range(nranks) if peer != rank])
    staged = {
        "reduce_scatter": f"lay out segment j of every block but block {rank}, for their owners",
        "allgather": f"lay out segment j of block {rank}, and copy it to the result",
        "allreduce": f"lay out segment j of every block but block {rank}, for their owners",
    }[collective]
    consumed = {
        "reduce_scatter": f"fold segment j of block {rank} of all ranks, in rank order, straight into the result",
        "allgather": f"copy what {others} laid out to the result",
        "allreduce": f"fold segment j of block {rank} of all ranks, in rank order, to the result and where all see it",
    }[collective]
    yield f"  stage    {staged}; publish j"
    yield f"  consume  wait until {others} published j; {consumed}" + (
        "; publish that too" * (collective == "allreduce")
    )
    if collective == "allreduce":
        yield f"  collect  wait until {others} published theirs; copy them to the result"


def explain_engine(collective: str, nranks: int, ranks: Sequence[int] | None = None) -> Iterator[str]:
    """``shared``, which has no program: what happens to one piece of the vector, and what it costs."""
    yield f"{collective} by shared, P={nranks} ranks of a node"
    for line in (shared.__doc__ or "").strip().split("\n"):
        yield f"  {line}".rstrip()
    yield "\nwhat a rank does with piece j (segment j of every block), piece j + 1 being staged before j is collected"
    for rank in ranks if ranks is not None else range(nranks):
        yield f"\nrank {rank}"
        if nranks == 1:
            yield "  copy the input to the result"
        else:
            yield from _engine_steps(collective, nranks, rank)
    if collective == "allreduce":
        small = "every rank lays out its whole vector, and folds all of all ranks' (one wait)"
        yield f"\nup to {shared.SMALL_BYTES} bytes: {small}"
    if collective != "allgather":
        yield "\nfold order (rank order)"
        whole = "x0"
        for peer in range(1, nranks):
            whole = f"({whole} + x{peer})"
        yield f"  every block: {whole}"
    yield "\ncost (S: bytes of the whole vector)"
    read = {"reduce_scatter": 1, "allgather": 1, "allreduce": 2}[collective]
    yield f"  messages  0; read from peers {read * (nranks - 1)}/{nranks} S a rank"
    yield f"  memory    an arena of fixed size (arena_bytes, {ARENA_BYTES} a rank)"


def explain_hierarchical(collective: str, topology: Topology) -> Iterator[str]:
    """``hierarchical``: what a segment goes through on such nodes, which ranks are a lane, and what runs between."""
    nranks, nnodes = topology.nranks, topology.nnodes
    layout = hierarchical.lay_out(collective, [1] * nranks, topology)
    yield f"{collective} by hierarchical, {topology}"
    for line in (hierarchical.__doc__ or "").strip().split("\n"):
        yield f"  {line}".rstrip()
    yield "\nnodes and lanes"
    for node, ranks in enumerate(topology.nodes):
        yield f"  node {node}: {name_ranks(ranks)}"
    for lane in range(layout.lanes):
        yield f"  lane {lane}: {name_ranks([ranks[lane] for ranks in topology.nodes])}"
    name = hierarchical.inner_algorithm(collective, nnodes, 1 << 20)
    program = algorithms.get(name).program(collective, nnodes, 0)
    yield f"\nB, between the nodes: {name}, P={nnodes}; its ranks are a lane's, node by node. On node 0"
    yield from rounds_in_words(program)
    if collective == "allreduce":
        yield f"  (recursive_doubling where a lane has {hierarchical.DOUBLING_BYTES} bytes or less)"
    yield "\ncost (S: bytes of the whole vector)"
    yield f"  link      {_share(program.cost().sent, nnodes)} bytes a node, each way"
    yield f"  rounds    {program.cost().rounds} of messages a segment"


def explain_choice(
    collective: str, nbytes: int, topology: Topology, shelf: profiles.Shelf, mpi: str | None = None
) -> Iterator[str]:
    """Which algorithm ``algorithm=None`` means for so many bytes of float32, and why; and how all of them compare.

    Parameters
    ----------
    collective : str
    nbytes : int
    topology : Topology
    shelf : Shelf
        The profiles to choose from.
    mpi : str, optional
        Default: whatever a profile was made under.
    """
    op = None if collective == "allgather" else ops.SUM
    call = (collective, nbytes, topology, op, np.dtype(np.float32))
    profile, words = shelf.pick(topology, mpi) if topology.nranks > 1 else (None, "one rank")
    yield f"{collective} of {in_bytes(nbytes)} (float32, SUM), {topology}"
    for deterministic in (False, True):
        name, why = choose(*call, deterministic, profile=profile)
        yield f"  {'deterministic=True' if deterministic else 'runs by':18}  {name}: {why}"
    if profile is None:
        yield f"  no profile          {words}"
    else:
        where = profile.where
        made = " ".join(part for part in (where.mpi, where.mpi_version) if part)
        yield f"  profile             {words}"
        yield f"  made                {profile.made or 'some day'}, under {made}, {where.machine or 'on some machine'}"
    yield "\n  algorithm           measured   by the model"
    candidates = weigh(*call, profile=profile)
    for one in sorted(candidates, key=lambda one: (bool(one.refusal), one.measured or inf, one.predicted or inf)):
        times = [in_seconds(seconds) if seconds is not None else "-" for seconds in (one.measured, one.predicted)]
        refused = f"cannot serve: {one.refusal}" if one.refusal else ""
        yield f"  {one.name:18} {times[0]:>9} {times[1]:>14}   {refused}".rstrip()


def explain(
    collective: str,
    algorithm: str,
    nranks: int,
    ranks: Sequence[int] | None = None,
    mode: str | None = None,
    topology: Topology | None = None,
) -> Iterator[str]:
    """All of it, line by line.

    Parameters
    ----------
    collective, algorithm : str
    nranks : int
    ranks : sequence of int, optional
        Whose rounds to print; default all.
    mode : {"hand", "builtin"}, optional
        Of ``mesh``: as one writes it by hand, or as the call on a window does it; with what differs.
    topology : Topology, optional
        For ``hierarchical``; default one node.
    """
    if algorithm == algorithms.SHARED:
        yield from explain_engine(collective, nranks, ranks)
        return
    if algorithm == algorithms.HIERARCHICAL:
        yield from explain_hierarchical(collective, topology or Topology.one_node(nranks))
        return
    function, turns = MODES[mode] if mode else (algorithms.get(algorithm).rounds, 2)
    programs = [build(algorithm, function, collective, nranks, rank) for rank in range(nranks)]
    report = verify(algorithm, function, collective, nranks, turns=turns)
    yield f"{collective} by {algorithm}, P={nranks} ranks" + (f", mode {mode}" if mode else "")
    module = sys.modules.get(function.__module__)  # none for a file that --load has run
    what = ((module.__doc__ if module else function.__doc__) or "").strip().split("\n")[0]
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
    if mode:
        yield "\nwhat differs between the modes"
        yield from compare_modes(collective, nranks)


def _read_topology(form: str | None, nranks: int) -> Topology:
    """The nodes asked for, those of ``PYREDUCE_NODES``, or one."""
    if form:
        return virtual_nodes(form, nranks, "--nodes")
    asked = os.environ.get("PYREDUCE_NODES")
    return virtual_nodes(asked, nranks) if asked else Topology.one_node(nranks)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pyreduce.explain", description="Explain an algorithm in words.")
    parser.add_argument("collective", choices=COLLECTIVES)
    parser.add_argument("bytes", nargs="?", type=parse_bytes, help="with --why: of the whole vector; 4096, 64K, 1M")
    parser.add_argument("--algorithm", "-a", metavar="A", help="default: ring")
    parser.add_argument("--load", metavar="FILE.py", help="run this file first, which registers algorithms of yours")
    parser.add_argument("-n", "--ranks", type=int, default=4, metavar="P", help="number of ranks, default 4")
    parser.add_argument("--rank", type=int, action="append", metavar="R", help="print the rounds of this rank only")
    parser.add_argument("--mode", choices=MODES, help="of mesh: by hand, or the call on a window; and what differs")
    parser.add_argument(
        "--why", action="store_true", help="tell which algorithm runs for a vector of so many bytes, and why"
    )
    parser.add_argument(
        "--nodes",
        metavar="FORM",
        help="with --why or hierarchical: 2x4, 3+5, 0,1,0,1; default PYREDUCE_NODES, or one node",
    )
    parser.add_argument("--profile", metavar="FILE", help="with --why: choose by this one; default: the one in use")
    parser.add_argument("--mpi", metavar="NAME", help="with --why: a profile must be of this MPI: mpich, openmpi, ...")
    options = parser.parse_intermixed_args(argv)
    if options.why != (options.bytes is not None):
        parser.error("--why needs bytes, and bytes are for --why: --why allreduce 64K")
    if options.why and options.algorithm:
        parser.error("--why tells which algorithm would be chosen; leave out --algorithm")
    for name in ("nodes", "profile", "mpi"):
        if getattr(options, name) is not None and not options.why:
            if name == "nodes" and options.algorithm == algorithms.HIERARCHICAL:
                continue
            parser.error(f"--{name} is for --why" + " and --algorithm hierarchical" * (name == "nodes"))
    options.algorithm = options.algorithm or "ring"
    if options.mode and options.algorithm != "mesh":
        parser.error(f"--mode is for --algorithm mesh, not {options.algorithm}")
    if options.ranks < 1:
        parser.error(f"-n {options.ranks}: needs one rank at least")
    for rank in options.rank or ():
        if not 0 <= rank < options.ranks:
            parser.error(f"--rank {rank}: ranks are 0..{options.ranks - 1}")
    with reporting_by(parser, options.load):
        if options.why:
            topology = _read_topology(options.nodes, options.ranks)
            shelf = profiles.Shelf(profiles.load(options.profile)) if options.profile else profiles.find(options.ranks)
            lines = explain_choice(options.collective, options.bytes, topology, shelf, options.mpi)
        else:
            topology = None
            if options.algorithm == algorithms.HIERARCHICAL:
                topology = _read_topology(options.nodes, options.ranks)
            lines = explain(options.collective, options.algorithm, options.ranks, options.rank, options.mode, topology)
        for line in lines:
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
