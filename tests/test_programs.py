"""Programs as pure data: every registered one verified, its cost as promised, and wrong ones refused by name."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import COLLECTIVES, MODES, call, run_checked

import pyreduce as pr
from pyreduce import (
    Copy,
    Fold,
    Get,
    Notify,
    Put,
    Recv,
    Send,
    Wait,
    algorithms,
    blocks,
    place_input,
    place_output,
    place_scratch,
    place_window,
)
from pyreduce.programs import Cost, Place, Program, build, in_place_safe, output_blocks
from pyreduce.simulate import Simulation
from pyreduce.verify import fold_symbols, format_symbol, verify

BUILT_IN = ["naive", "ring", "direct", "circulant", "pairwise", "recursive_doubling", "mesh"]
ONLY_ALLREDUCE = ["recursive_doubling"]


# ------------------------------------------------------------------------------------------------- the built-in ones


def test_these_are_all_there_are() -> None:
    assert algorithms.names() == [*BUILT_IN, "shared", "hierarchical", "native"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("algorithm", BUILT_IN)
def test_right_for_many_numbers_of_ranks(algorithm: str, collective: str) -> None:
    in_rank_order = True
    if algorithm in ONLY_ALLREDUCE and collective != "allreduce":
        pytest.skip("serves allreduce only")
    for nranks in range(1, 129) if os.environ.get("VERIFY_ALL") else (*range(1, 34), 64, 97):
        report = verify(algorithm, algorithms.get(algorithm).rounds, collective, nranks)
        in_rank_order &= report.rank_order
        if collective == "allgather":
            assert report.orders == tuple(range(nranks))
        elif algorithm == "ring" and nranks > 1:  # block b starts at rank b + 1
            assert report.orders == tuple(tuple((b + 1 + hop) % nranks for hop in range(nranks)) for b in range(nranks))
    if collective != "allgather":
        assert in_rank_order == algorithms.get(algorithm).rank_order


def promised_cost(algorithm: str, collective: str, P: int, rank: int) -> Cost:
    """The table of costs, in blocks."""
    if algorithm == "recursive_doubling":
        doublings = P.bit_length() - 1
        pairs = P - (1 << doublings)
        if rank < 2 * pairs and rank % 2:
            return Cost(2, P, P, 1, 0, 0)
        paired = rank < 2 * pairs
        messages = doublings + paired
        scratch = P * (1 + min(2, messages - 1)) if P > 1 else 0
        return Cost(messages + paired, P * messages, P * messages, messages, P * messages, scratch)
    if algorithm == "mesh" and P > 1:
        halves = 2 if collective == "allreduce" else 1
        folds, scratch = (0, 0) if collective == "allgather" else (P - 1, P - 1)
        window = {"reduce_scatter": P, "allgather": 1, "allreduce": P + 1}[collective]
        return Cost(halves, 0, halves * (P - 1), 0, folds, scratch, window, halves * (P - 1))
    if algorithm == "naive":
        if collective == "allgather":
            return Cost(int(P > 1), P - 1, P - 1, P - 1, 0, 0)
        scratch = (P - 1) * P + (P if collective == "reduce_scatter" else 0)
        return Cost(int(P > 1), P * (P - 1), P * (P - 1), P - 1, P * (P - 1), scratch)
    if algorithm == "direct":
        halves, folds = (2 if collective == "allreduce" else 1), 0 if collective == "allgather" else P - 1
        return Cost(halves * (P > 1), halves * (P - 1), halves * (P - 1), halves * (P - 1), folds, folds)
    once = P - 1
    rounds = (P - 1).bit_length() if algorithm == "circulant" else once
    half = -(-P // 2)
    scratch = {"ring": min(2, once), "circulant": half + half // 2 if P > 1 else 0}.get(algorithm, once)
    if collective == "reduce_scatter":  # the last hop's arrival is scratch as well
        return Cost(rounds, once, once, rounds, once, scratch)
    if collective == "allgather":
        return Cost(rounds, once, once, rounds, 0, 0)
    return Cost(2 * rounds, 2 * once, 2 * once, 2 * rounds, once, scratch)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("algorithm", BUILT_IN)
def test_costs_are_as_promised(algorithm: str, collective: str) -> None:
    if algorithm in ONLY_ALLREDUCE and collective != "allreduce":
        pytest.skip("serves allreduce only")
    for nranks in (1, 2, 3, 4, 5, 8, 13, 16, 64):
        for program in algorithms.get(algorithm).programs(collective, nranks):
            cost = promised_cost(algorithm, collective, nranks, program.rank)
            assert program.cost() == cost, (nranks, program.rank)
        programs = algorithms.get(algorithm).programs(collective, nranks)
        assert len({(program.window, program.cells) for program in programs}) == 1  # peers' windows are laid out alike


class Overlay(Simulation[Any]):
    """Plays programs with each output laid over the input, as an in-place call does."""

    def _over(self, cell: tuple[str, int], rank: int) -> tuple[str, int]:
        space, index = cell
        if space != "output":
            return cell
        return ("input", 0 if self.programs[0].collective == "reduce_scatter" else index)

    def _read(self, rank: int, place: Place) -> list[tuple[int, Any]]:
        if place.space == "window":
            return super()._read(rank, place)
        cells = [(self._over((space, index), rank), block) for space, index, block in place.cells(self.nranks)]
        return [(block, self.memory[rank][cell][1]) for cell, block in cells]

    def _write(self, rank: int, place: Place, values: list[tuple[int, Any]]) -> None:
        if place.space == "window":
            super()._write(rank, place, values)
            return
        for (space, index, _), value in zip(place.cells(self.nranks), values, strict=True):
            self.memory[rank][self._over((space, index), rank)] = value


def stays_right_in_place(programs: list[Program]) -> bool:
    """Whether the programs of all ranks give the same output laid over the input as apart from it."""
    collective, nranks = programs[0].collective, len(programs)
    blocks_of = [[p.rank] if collective == "allgather" else range(nranks) for p in programs]
    inputs: list[dict[int, Any]] = [{block: (rank, block) for block in held} for rank, held in enumerate(blocks_of)]
    fold = lambda values: tuple(values)  # noqa: E731
    want = Simulation(programs, [dict(held) for held in inputs], fold).run()
    overlay = Overlay(programs, [dict(held) for held in inputs], fold)
    overlay.run()
    for rank, memory in enumerate(overlay.memory):
        for block in output_blocks(collective, nranks, rank):
            where = ("input", 0 if collective == "reduce_scatter" else block)
            if memory[where][1] != want[rank][block]:
                return False
    return True


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("algorithm", BUILT_IN)
def test_in_place_safe_is_no_empty_claim(algorithm: str, collective: str) -> None:
    if algorithm in ONLY_ALLREDUCE and collective != "allreduce":
        pytest.skip("serves allreduce only")
    claims = set()
    for nranks in range(1, 13):
        programs = algorithms.get(algorithm).programs(collective, nranks)
        claim = all(in_place_safe(program) for program in programs)
        claims.add(claim)
        assert stays_right_in_place(programs) or not claim, (nranks, claim)
    assert True in claims, "safe for no P at all: calls in place would always copy"


def test_unsafe_in_place_is_noticed() -> None:
    def overwrites(collective: str, nranks: int, rank: int) -> list[Any]:
        peer = 1 - rank
        return [
            [Send(peer, place_input(0, 2)), Recv(peer, place_scratch(0, 0, 2))],
            [Fold(place_output(0), (place_input(0), place_scratch(0, 0)))],
            [Fold(place_scratch(2, 0), (place_input(0), place_scratch(0, 0))),
             Fold(place_output(1), (place_input(1), place_scratch(1, 1)))],
        ]  # fmt: skip

    programs = [build("overwrites", overwrites, "allreduce", 2, rank) for rank in range(2)]
    assert not any(in_place_safe(program) for program in programs)


# ------------------------------------------------------------------------------------------------- blocks, symbols


def test_partition_is_array_split() -> None:
    for rows, nranks in itertools.product([*range(40), 73, 1000, 1023], range(1, 20)):
        parts = np.array_split(np.arange(rows), nranks)
        counts = blocks.partition(rows, nranks)
        assert counts == tuple(map(len, parts))
        assert [rows[:1].tolist() for rows in parts if len(rows)] == [
            [start] for start, count in zip(blocks.offsets(counts), counts, strict=True) if count
        ]
    assert blocks.partition(2**62 + 1, 2) == (2**61 + 1, 2**61)


def test_counts_are_checked() -> None:
    assert blocks.check_counts(np.array([1, 0, 5]), 3) == (1, 0, 5)
    assert all(type(count) is int for count in blocks.check_counts(np.array([1, 2]), 2))
    for wrong, error in (
        ([1, 2.0], TypeError),
        ("ab", TypeError),
        (5, TypeError),
        ([1], ValueError),
        ([1, -1], ValueError),
    ):
        with pytest.raises(error, match="counts"):
            blocks.check_counts(wrong, 2)  # type: ignore[arg-type]


def test_symbols() -> None:
    assert fold_symbols([3]) == 3
    assert fold_symbols([3, 0, 1]) == (3, 0, 1)
    assert fold_symbols([(3, 0), 1]) == (3, 0, 1)
    assert fold_symbols([(0, 1), (2, 3)]) == (0, 1, (2, 3))
    assert format_symbol((3, 0, 1)) == "((x3 + x0) + x1)"
    assert format_symbol((0, 1, (2, 3))) == "((x0 + x1) + (x2 + x3))"


# ------------------------------------------------------------------------------------------------- wrong algorithms


def mutate(collective: str, nranks: int, rank: int, change: Any) -> list[list[Any]]:
    """The naive allreduce, changed from 3 ranks on; other collectives are not served."""
    if collective != "allreduce":
        raise pr.Unsupported("allreduce only")
    rounds = [list(steps) for steps in algorithms.get("naive").rounds(collective, nranks, rank)]
    return change(rounds, nranks, rank) if nranks >= 3 else rounds


def refuse(match: str, change: Any) -> None:
    """Register an algorithm that is wrong; it must be refused, in these words, and not be there afterwards."""
    with pytest.raises(pr.AlgorithmError, match=match):
        pr.register_algorithm("mine", lambda collective, P, rank: mutate(collective, P, rank, change))
    assert "mine" not in algorithms.names()


def fold_all(nranks: int, sources: Sequence[int], rank: int) -> list[Any]:
    """The fold of the naive allreduce over the vectors of some ranks, in that order."""
    place = {rank: place_input(0, nranks)}
    for index in range(nranks - 1):
        place[(rank - 1 - index) % nranks] = place_scratch(index * nranks, 0, nranks)
    return [Fold(place_output(0, nranks), tuple(place[source] for source in sources))]


def test_a_lost_contribution() -> None:
    refuse(
        r"mine: allreduce with P=3: block 0 on rank 1 lacks the contribution of rank 2",
        lambda rounds, P, rank: (
            [rounds[0], fold_all(P, [0, 1] if rank == 1 else [0, 1, 2], rank)] if P == 3 else rounds
        ),
    )


def test_a_doubled_contribution() -> None:
    refuse(
        r"mine: allreduce with P=4: block 0 on rank 0 holds the contribution of rank 2 2 times",
        lambda rounds, P, rank: [rounds[0], fold_all(P, [0, 1, 2, 2, 3], rank)] if P == 4 else rounds,
    )


def test_a_block_never_written() -> None:
    def keep_the_first(rounds: list[Any], nranks: int, rank: int) -> list[Any]:
        fold = rounds[1][0]
        short = [Place(p.space, 0, nranks - 1, p.slot) for p in (fold.dst, *fold.srcs)]
        return [rounds[0], [Fold(short[0], tuple(short[1:]))]] if rank == 2 else rounds

    refuse(r"mine: allreduce with P=3: block 2 on rank 2 was never received or written", keep_the_first)


def test_a_receive_that_nobody_serves() -> None:
    refuse(
        r"mine: allreduce with P=3: deadlock: rank 1 waits in round 1 for blocks 0..\+3 that rank 0 never sends",
        lambda rounds, P, rank: [
            [step for step in rounds[0] if not (rank == 0 and isinstance(step, Send) and step.peer == 1)],
            rounds[1],
        ],
    )


def test_a_send_that_nobody_receives() -> None:
    refuse(
        r"mine: allreduce with P=3: rank 0 sends block 1 to rank 2 in round 3, which rank 2 never receives",
        lambda rounds, P, rank: [*rounds, [Send(2, place_output(1))]] if rank == 0 else rounds,
    )


def test_ranks_that_wait_for_each_other() -> None:
    def all_send_first(rounds: list[Any], nranks: int, rank: int) -> list[Any]:
        sends = [step for step in rounds[0] if isinstance(step, Send)]
        return [sends, [step for step in rounds[0] if not isinstance(step, Send)], rounds[1]]

    refuse(r"mine: allreduce with P=3: deadlock: rank 0 waits in round 1 for rank [12] to receive", all_send_first)


def test_blocks_that_do_not_fit() -> None:
    def send_one_short(rounds: list[Any], nranks: int, rank: int) -> list[Any]:
        if rank == 0:
            rounds[0][0] = Send(1, place_input(0, nranks - 1))
        return rounds

    refuse(
        r"P=3: rank 0 sends blocks 0..\+2 to rank 1 in its round 1, where rank 1 receives blocks 0..\+3", send_one_short
    )


def test_an_order_that_differs_between_ranks() -> None:
    refuse(
        r"block 0 is folded as \(\(x0 \+ x1\) \+ x2\) on rank 0 but as \(\(x2 \+ x1\) \+ x0\) on rank 1: ranks",
        lambda rounds, P, rank: [rounds[0], fold_all(P, range(P) if rank != 1 else range(P)[::-1], rank)],
    )


def test_a_foreign_block() -> None:
    def gather_wrongly(collective: str, nranks: int, rank: int) -> list[list[Any]]:
        if collective != "reduce_scatter" or nranks == 1:
            raise pr.Unsupported("reduce_scatter only")
        return [[Copy(place_output(rank), place_input((rank + 1) % nranks))]]

    with pytest.raises(pr.AlgorithmError, match=r"P=2, rank 0, round 1: .*mixes blocks 0 and 1"):
        pr.register_algorithm("mine", gather_wrongly)


WRONG_STEPS = {
    "a send to itself": ([Send(0, place_input(0))], "talks to its own rank; use Copy"),
    "a peer out of range": ([Send(7, place_input(0))], r"names peer 7; ranks are 0\.\.2"),
    "a peer that is no number": ([Recv("1", place_output(0))], "names peer '1'"),
    "a write to the input": ([Recv(1, place_input(0))], "writes to the input, which is read-only"),
    "a fold into the input": ([Fold(place_input(0), (place_input(0), place_scratch(0, 0)))], "writes to the input"),
    "a write over a block being sent": (
        [Send(1, place_output(1)), Copy(place_output(1), place_input(1))],
        r"writes to \('output', 1\) while a send reads it",
    ),
    "two receives into one place": (
        [Recv(1, place_scratch(0, 0)), Recv(2, place_scratch(0, 1))],
        r"two receives write to \('scratch', 0\)",
    ),
    "blocks mixed up": ([Copy(place_output(0), place_input(1))], "mixes blocks 0 and 1"),
    "a fold of nothing": ([Fold(place_output(0), ())], "folds nothing"),
    "a block out of range": ([Copy(place_output(3), place_input(3))], r"out of range; blocks are 0\.\.2"),
    "a negative slot": ([Recv(1, place_scratch(-1, 0))], "out of range"),
    "no step": (["send"], r"'send' is not a step \(Send, Recv, Fold, Copy, Put, Get, Notify, Wait\)"),
    "a put to itself": ([Put(0, place_window(0, 0), place_input(0))], "talks to its own rank; use Copy"),
    "a get from a peer out of range": ([Get(3, place_scratch(0, 0), place_window(0, 0))], "names peer 3"),
    "a get from what is no window": ([Get(1, place_scratch(0, 0), place_output(0))], "only windows can be reached"),
    "a get into the input": ([Get(1, place_input(0), place_window(0, 0))], "writes to the input, which is read-only"),
    "a put of another block": ([Put(1, place_window(0, 1), place_input(0))], "mixes blocks 0 and 1"),
    "a notify of nobody": ([Notify(3, 0)], "names peer 3"),
    "a notify of nothing": ([Notify(1, 0, 0)], "credits are given to peers|adds nothing"),
    "a credit taken from a peer": ([Notify(1, 0, -1)], "taken back from oneself"),
    "a credit given to itself": ([Notify(0, 0, 1)], "taken back from oneself"),
    "a wait for nothing": ([Wait(0, 0)], "waits for nothing: a cell holds 0 at the start"),
    "a negative cell": ([Wait(-1)], "cells from 0 on"),
    "a cell that is no number": ([Notify(1, "a")], "cells and values are integers"),
    "a get over a block being sent": (
        [Send(1, place_scratch(0, 0)), Get(1, place_scratch(0, 0), place_window(0, 0))],
        r"writes to \('scratch', 0\) while a send reads it",
    ),
    "no place": ([Send(1, "input")], "'input' is not a place in input, output, scratch or window"),
    "no such space": ([Send(1, Place("cloud", 0))], "is not a place in input, output, scratch or window"),
    "no sequence": (42, "round 1 is 42, not a sequence of steps"),
}


@pytest.mark.parametrize("what", WRONG_STEPS)
def test_steps_that_cannot_be(what: str) -> None:
    steps, text = WRONG_STEPS[what]
    refuse(
        rf"^mine: allreduce with P=3, rank 0.*{text}",
        lambda rounds, P, rank: [steps, *rounds] if rank == 0 else rounds,
    )


def test_a_read_of_what_was_never_written() -> None:
    refuse(
        r"rank 0 reads scratch slot 99 in round 1, where block 0 was never received or written",
        lambda rounds, P, rank: [[Copy(place_scratch(98, 0), place_scratch(99, 0))], *rounds] if rank == 0 else rounds,
    )
    mixed = [[Copy(place_scratch(0, 1), place_input(1))], [Copy(place_scratch(9, 0), place_scratch(0, 0))]]
    refuse(
        r"rank 0 reads scratch slot 0 in round 2 as block 0, but it holds block 1",
        lambda rounds, P, rank: [*mixed, *rounds] if rank == 0 else rounds,
    )


def test_an_algorithm_that_serves_nothing() -> None:
    def useless(collective: str, nranks: int, rank: int) -> list[Any]:
        raise pr.Unsupported("not today")

    with pytest.raises(pr.AlgorithmError, match="mine: serves no collective at any number of ranks tried: not today"):
        pr.register_algorithm("mine", useless)


def test_names_that_are_taken_or_none() -> None:
    for name in (*BUILT_IN, "shared", "hierarchical", "native"):
        for replace in (False, True):
            taken = f"the name '{name}' is taken; there are naive, ring, .*, shared, hierarchical, native"
            with pytest.raises(ValueError, match=taken):
                pr.register_algorithm(name, pairwise, replace=replace)
    pr.register_algorithm("mine", pairwise)
    with pytest.raises(ValueError, match="the name 'mine' is taken"):
        pr.register_algorithm("mine", pairwise)
    pr.register_algorithm("mine", pairwise, replace=True)
    for wrong in ("", 3, None):
        with pytest.raises(TypeError, match="non-empty string"):
            pr.register_algorithm(wrong, pairwise)
    with pytest.raises(TypeError, match=r"a function \(collective, nranks, rank\) -> rounds, got 5"):
        pr.register_algorithm("other", 5)  # type: ignore[arg-type]


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"no algorithm is called 'spam'; there are naive, ring, .*, shared, hier.*"):
        algorithms.get("spam")
    with pytest.raises(ValueError, match="native is the MPI's own collective"):
        algorithms.get("native")
    with pytest.raises(ValueError, match="shared is the shared-memory engine"):
        algorithms.get("shared")


# ------------------------------------------------------------------------------------------------- right algorithms


def pairwise(collective: str, nranks: int, rank: int) -> Iterator[list[Any]]:
    """Pairwise exchange: in round h everybody sends rank + h its block, folds what rank - h sends."""
    if collective == "allgather":
        yield [Copy(place_output(rank), place_input(rank))]
        for hop in range(1, nranks):
            source = (rank - hop) % nranks
            yield [Send((rank + hop) % nranks, place_input(rank)), Recv(source, place_output(source))]
        return
    if collective == "allreduce":
        raise pr.Unsupported("pairwise: no allreduce; use algorithm='ring'")
    held = place_input(rank)
    for hop in range(1, nranks):
        target, source = (rank + hop) % nranks, (rank - hop) % nranks
        arriving = place_scratch(0, rank)
        yield [
            Send(target, place_input(target)), Recv(source, arriving), Fold(place_output(rank), (held, arriving)),
        ]  # fmt: skip
        held = place_output(rank)
    if nranks == 1:
        yield [Copy(place_output(0), place_input(0))]


def recursive_doubling(collective: str, nranks: int, rank: int) -> Iterator[list[Any]]:
    """Allreduce for powers of two: in round k everybody exchanges all it has with rank xor 2^k."""
    if collective != "allreduce" or nranks & (nranks - 1):
        raise pr.Unsupported("recursive_doubling: allreduce on a power of two ranks; use algorithm='ring'")
    held = place_input(0, nranks)
    distance = 1
    while distance < nranks:
        peer, arriving = rank ^ distance, place_scratch(0, 0, nranks)
        mine = place_scratch(nranks * (1 + distance.bit_length() % 2), 0, nranks)
        last = 2 * distance == nranks
        pair = (held, arriving) if rank < peer else (arriving, held)
        yield [Send(peer, held), Recv(peer, arriving), Fold(place_output(0, nranks) if last else mine, pair)]
        held, distance = mine, 2 * distance
    if nranks == 1:
        yield [Copy(place_output(0), place_input(0))]


def test_linear_is_accepted() -> None:
    registered = pr.register_algorithm("linear", pairwise)
    assert algorithms.names() == [*BUILT_IN, "linear", "shared", "hierarchical", "native"]
    assert algorithms.get("linear") is registered
    assert not registered.rank_order
    for nranks in (2, 5, 16, 20):
        for program in registered.programs("reduce_scatter", nranks):
            assert program.cost() == Cost(nranks - 1, nranks - 1, nranks - 1, nranks - 1, nranks - 1, 1)
    with pytest.raises(pr.Unsupported, match="no allreduce"):
        registered.program("allreduce", 4, 0)


def test_recursive_doubling_is_accepted() -> None:
    @pr.register_algorithm("doubling")
    def doubling(collective: str, nranks: int, rank: int) -> Iterator[list[Any]]:
        return recursive_doubling(collective, nranks, rank)

    assert callable(doubling)
    assert algorithms.get("doubling").rounds is doubling
    assert verify("doubling", doubling, "allreduce", 4).orders == ((0, 1, (2, 3)),) * 4
    assert algorithms.get("doubling").programs("allreduce", 8)[3].cost().rounds == 3
    for collective, nranks in (("allreduce", 3), ("allgather", 4)):
        with pytest.raises(pr.Unsupported, match="power of two"):
            algorithms.get("doubling").program(collective, nranks, 0)


def test_more_ranks_than_were_verified_are_verified_when_used() -> None:
    def breaks_later(collective: str, nranks: int, rank: int) -> Any:
        return mutate(collective, nranks, rank, lambda rounds, P, rank: rounds[: 2 if P < 17 else 1])

    pr.register_algorithm("mine", breaks_later)
    algorithms.get("mine").program("allreduce", 16, 0)
    with pytest.raises(pr.AlgorithmError, match="mine: allreduce with P=17: block 0 on rank 0 was never"):
        algorithms.get("mine").program("allreduce", 17, 0)


def test_algorithms_of_one_s_own_run_by_name(communicator: Any) -> None:
    pr.register_algorithm("linear", pairwise)
    pr.register_algorithm("doubling", recursive_doubling)
    c, size = communicator, communicator.size
    for collective in ("reduce_scatter", "allgather"):
        for mode in MODES[:4]:
            for rows in (0, 1, size + 1, 200):
                check_by_verified_order(c, "linear", collective, rows, mode)
    with pytest.raises(pr.Unsupported, match=rf"allreduce: pairwise: no allreduce.*\(rank {c.rank} of {size}\)"):
        c.allreduce(np.zeros(3), algorithm="linear")
    if size & (size - 1):
        with pytest.raises(
            pr.Unsupported, match=r"allreduce: recursive_doubling: .*power of two.*use algorithm='ring'"
        ):
            c.allreduce(np.zeros(3), algorithm="doubling")
    else:
        for mode in MODES:
            for rows in (0, 1, size + 1, 200):
                check_by_verified_order(c, "doubling", "allreduce", rows, mode)
    run_checked(c, "allreduce", "float32", 50, algorithm="ring")


def check_by_verified_order(c: Any, algorithm: str, collective: str, rows: int, mode: str) -> None:
    run_checked(c, collective, "float32", rows, algorithm=algorithm, mode=mode)


def test_the_checked_call_checks(communicator: Any) -> None:
    """`run_checked` notices a wrong result, a written input and a written guard."""

    class Vandal:
        size, rank = communicator.size, communicator.rank
        _plans, _comm = communicator._plans, communicator._comm

        def __init__(self, deed: str) -> None:
            self.deed = deed

        def allreduce(self, x: np.ndarray, out: np.ndarray, **options: Any) -> np.ndarray:
            if self.deed == "guard":
                np.ndarray((len(out) + 1,), out.dtype, out.base, 72)[...] = 0
            call(communicator, "allreduce", x, out, **options)
            if self.deed == "result":
                out[-1] += 1
            if self.deed == "input":
                x[0] += 1
            return out

    for deed in ("result", "input", "guard"):
        with pytest.raises(AssertionError):
            run_checked(Vandal(deed), "allreduce", "int32", 9, algorithm="naive", times=1)
