"""Proof by playing: run a program on symbols and look at what every rank ends up with.

A symbol says which contributions a value holds, and in which order they were folded: an int ``r`` is rank r's own
value, a tuple is a left fold of its members, so ``(3, 0, 1)`` is ``(x3 op x0) op x1`` and ``((0, 1), (2, 3))`` is a
tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from pyreduce.errors import AlgorithmError, Unsupported, name_ranks
from pyreduce.programs import COLLECTIVES, Cost, RoundsFunction, build, input_blocks, output_blocks
from pyreduce.simulate import Simulation

__all__ = ["Report", "Symbol", "fold_symbols", "format_symbol", "verify", "verify_all"]

CALLS = 3  # of programs with windows: the third uses what the first one used
CALLS_UP_TO = 16  # ranks; with more, one call is played

Symbol: TypeAlias = "int | tuple[Symbol, ...]"


@dataclass(frozen=True, slots=True)
class Report:
    """What verification found out about a program.

    Attributes
    ----------
    collective : str
    nranks : int
    orders : tuple of Symbol
        The fold order of each block, equal on every rank that has the block.
    costs : tuple of Cost
        Each rank's cost.
    """

    collective: str
    nranks: int
    orders: tuple[Symbol, ...]
    costs: tuple[Cost, ...]

    @property
    def rank_order(self) -> bool:
        """Whether every block is folded in the order of ranks 0, 1, ..., P-1."""
        if self.collective == "allgather" or self.nranks == 1:
            return True
        return all(order == tuple(range(self.nranks)) for order in self.orders)


def fold_symbols(values: list[Symbol]) -> Symbol:
    """The symbol of ``((v0 op v1) op v2) ...``: a left fold goes on where its first operand's fold ended."""
    if len(values) == 1:
        return values[0]
    first = values[0]
    return (*(first if isinstance(first, tuple) else (first,)), *values[1:])


def format_symbol(symbol: Symbol) -> str:
    """A fold order in words: ``((x3 + x0) + x1)``."""
    if isinstance(symbol, int):
        return f"x{symbol}"
    text = format_symbol(symbol[0])
    for member in symbol[1:]:
        text = f"({text} + {format_symbol(member)})"
    return text


def verify(name: str, function: RoundsFunction, collective: str, nranks: int, *, turns: int = 2) -> Report:
    """Check an algorithm for one collective and one number of ranks.

    Parameters
    ----------
    name : str
        The algorithm's name, for messages.
    function : callable
        ``(collective, nranks, rank) -> rounds``.
    collective : str
    nranks : int
    turns : int
        Sets of windows and cells that calls take turns on (see `Simulation`): 1 for programs on a user's window.

    Returns
    -------
    Report

    Raises
    ------
    AlgorithmError
        Naming the block, the rank and the contribution that is missing, doubled or never received; the two ranks of a
        race; who waits for whom in a deadlock.
    Unsupported
        `function` does not serve this collective or this number of ranks.
    """
    programs = [build(name, function, collective, nranks, rank) for rank in range(nranks)]
    calls = CALLS if nranks <= CALLS_UP_TO and any(program.one_sided for program in programs) else 1
    inputs: list[dict[int, Symbol]] = [
        dict.fromkeys(input_blocks(collective, nranks, rank), rank) for rank in range(nranks)
    ]
    outputs = Simulation[Symbol](programs, inputs, fold_symbols, name, calls=calls, turns=turns).run()
    where = f"{name}: {collective} with P={nranks}"
    orders: dict[int, tuple[int, Symbol]] = {}
    for rank, output in enumerate(outputs):
        for block in output_blocks(collective, nranks, rank):
            if block not in output:
                raise AlgorithmError(f"{where}: block {block} on rank {rank} was never received or written")
            other, order = orders.setdefault(block, (rank, output[block]))
            if rank == other or order != output[block]:  # an order that was right is so on every rank
                _check_contributions(output[block], collective, nranks, block, rank, where)
            if order != output[block] and _canonical(order) != _canonical(output[block]):
                raise AlgorithmError(
                    f"{where}: block {block} is folded as {format_symbol(order)} on rank {other} but as "
                    f"{format_symbol(output[block])} on rank {rank}: ranks would disagree in the last bits"
                )
    return Report(
        collective,
        nranks,
        tuple(orders[block][1] for block in range(nranks)),
        tuple(program.cost() for program in programs),
    )


def verify_all(name: str, function: RoundsFunction, nranks: Iterable[int]) -> dict[tuple[str, int], Report]:
    """Check an algorithm for all collectives and several numbers of ranks; what it does not serve is left out.

    Raises
    ------
    AlgorithmError
        The first fault found, or that `function` serves none of the collectives.
    """
    reports: dict[tuple[str, int], Report] = {}
    refusal = ""
    for size in nranks:
        for collective in COLLECTIVES:
            try:
                reports[collective, size] = verify(name, function, collective, size)
            except Unsupported as error:
                refusal = str(error)
    if not reports:
        raise AlgorithmError(f"{name}: serves no collective at any number of ranks tried: {refusal}")
    return reports


def _leaves(symbol: Symbol) -> Iterator[int]:
    if isinstance(symbol, int):
        yield symbol
    else:
        for member in symbol:
            yield from _leaves(member)


def _check_contributions(symbol: Symbol, collective: str, nranks: int, block: int, rank: int, where: str) -> None:
    found = Counter(_leaves(symbol))
    wanted = {block} if collective == "allgather" else set(range(nranks))
    missing = sorted(wanted - set(found))
    if missing:
        raise AlgorithmError(f"{where}: block {block} on rank {rank} lacks the contribution of {name_ranks(missing)}")
    foreign = sorted(set(found) - wanted)
    if foreign:
        raise AlgorithmError(f"{where}: block {block} on rank {rank} holds what belongs to {name_ranks(foreign)}")
    doubled = sorted(source for source, times in found.items() if times > 1)
    if doubled:
        raise AlgorithmError(
            f"{where}: block {block} on rank {rank} holds the contribution of {name_ranks(doubled)} "
            f"{found[doubled[0]]} times"
        )


def _canonical(symbol: Symbol) -> object:
    """Equal for symbols that differ only in the order of the two operands of an operation: the same bits."""
    if isinstance(symbol, int):
        return (0, symbol)
    tree = _canonical(symbol[0])
    for member in symbol[1:]:
        tree = (1, *sorted([tree, _canonical(member)], key=repr))
    return tree
