"""All interleavings of the shared-memory engine's protocol, for few ranks and calls; broken ones are noticed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, product

import pytest
from shared_model import ALLGATHER, REDUCE_SCATTER, SMALL, TWO_PHASES, Call, Protocol, Violation, explore
from test_launch import RANKS

pytestmark = pytest.mark.skipif(RANKS > 1, reason="once is enough")

FLAGS = (False, True)
NO, YES = (False,) * 3, (True,) * 3
ONE = (True, False, True)
"""Ranks differ."""

# Where two ranks have their inputs, and whether results replace them, in all combinations.
LONG = [
    Call(kind, pieces, shared, in_place)
    for kind, pieces in product((REDUCE_SCATTER, TWO_PHASES), (1, 2, 3))
    for shared, in_place in product(product(FLAGS, FLAGS), product(FLAGS, FLAGS))
]
GATHERS = [Call(ALLGATHER, pieces, shared) for pieces in (1, 2, 3) for shared in product(FLAGS, FLAGS)]
SHORT = [Call(SMALL), Call(SMALL, in_place=YES), Call(SMALL, fits_line=True, in_place=ONE)] + [
    Call(kind, fits_line=True, shared=YES) for kind in (REDUCE_SCATTER, ALLGATHER)
]
EVERY = [*LONG, *GATHERS, *SHORT]

# One of every sort.
SORTS = [
    Call(REDUCE_SCATTER, 2),
    Call(REDUCE_SCATTER, 1, shared=ONE, in_place=ONE),
    Call(REDUCE_SCATTER, 2, shared=YES),
    Call(ALLGATHER, 2),
    Call(ALLGATHER, 1, shared=ONE),
    Call(ALLGATHER, 2, shared=YES),
    Call(SMALL),
    Call(SMALL, fits_line=True),
    Call(TWO_PHASES, 1),
    Call(TWO_PHASES, 2, shared=ONE),
    Call(TWO_PHASES, 2, shared=YES, in_place=YES),
]
FEW = [SORTS[2], SORTS[3], SORTS[7], SORTS[10]]


def visit(nranks: int, sequences: Sequence[tuple[Call, ...]]) -> int:
    """Explore all sequences; the number of states."""
    return sum(explore(nranks, calls) for calls in sequences)


def test_two_ranks_two_calls() -> None:
    sequences = list(chain(product(EVERY, SORTS), product(SORTS, EVERY)))
    assert visit(2, sequences) > 50 * len(sequences)


def test_two_ranks_three_calls() -> None:
    visit(2, list(product(SORTS, FEW, SORTS)))


def test_three_ranks_two_calls() -> None:
    visit(3, list(product(SORTS, SORTS)))


def test_three_ranks_three_calls() -> None:
    visit(3, list(product(FEW, FEW[:2], FEW)))


@pytest.mark.parametrize("kind", [REDUCE_SCATTER, ALLGATHER, TWO_PHASES])
@pytest.mark.parametrize("shared", [NO, ONE, YES])
def test_three_ranks_three_pieces(kind: str, shared: tuple[bool, ...]) -> None:
    call = Call(kind, 3, shared, in_place=NO if kind == ALLGATHER else ONE)
    visit(3, [(call,), (call, call), (Call(SMALL), call)])


def test_one_rank_alone() -> None:
    assert visit(1, [(call,) for call in SORTS]) > len(SORTS)


def twice(call: Call) -> tuple[Call, Call]:
    return call, call


NO_WAIT, EARLY = Protocol(owner_waits=False), Protocol(stages_before_fold=True)
FOLDED_FIRST, IN_PLACE = Protocol(folded_before_fold=True), Protocol(in_place_is_staged=False)
MUTATIONS = {
    "one stage slot": (Protocol(stage_slots=1), twice(Call(REDUCE_SCATTER, 2)), "'slot'"),
    "one stage slot, allgather": (Protocol(stage_slots=1), twice(Call(ALLGATHER, 2)), "'slot'"),
    "one line": (Protocol(lines=1), twice(Call(REDUCE_SCATTER, 2, shared=YES)), "'line'|nobody can go on"),
    "one result slot": (Protocol(result_slots=1), twice(Call(TWO_PHASES, 2)), "'result'"),
    "stages before it folds": (EARLY, twice(Call(REDUCE_SCATTER, 3)), "'slot'"),
    "stages before it folds, two phases": (EARLY, (Call(REDUCE_SCATTER), Call(TWO_PHASES, 2)), "'slot'"),
    "folded before it folds": (FOLDED_FIRST, twice(Call(REDUCE_SCATTER, shared=YES)), "'input'"),
    "folded before the result is there": (FOLDED_FIRST, twice(Call(TWO_PHASES)), "'result'"),
    "folded before it folds, in place": (FOLDED_FIRST, twice(Call(TWO_PHASES, shared=YES, in_place=YES)), "'input'"),
    "the owner does not wait": (NO_WAIT, twice(Call(REDUCE_SCATTER, 2, shared=YES)), "'input'"),
    "the owner does not wait, allgather": (NO_WAIT, twice(Call(ALLGATHER, shared=ONE)), "'input'"),
    "in place without staging": (IN_PLACE, twice(Call(REDUCE_SCATTER, shared=YES, in_place=YES)), "'input'"),
}


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_protocol_is_noticed(name: str, nranks: int) -> None:
    protocol, calls, what = MUTATIONS[name]
    explore(nranks, calls)
    with pytest.raises(Violation, match=what):
        explore(nranks, calls, protocol)


@pytest.mark.parametrize("nranks", [2, 3])
def test_what_is_not_wrong_is_not_called_so(nranks: int) -> None:
    """In two phases alone, C(k-1) has seen that peers are past F(k-1): S(k+1) could come before F(k)."""
    explore(nranks, twice(Call(TWO_PHASES, 3)), EARLY)
