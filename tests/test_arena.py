"""The list of free bytes that windows are carved from. No MPI is used here, but for the import."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mpi4py.MPI")

from pyreduce.arena import FreeList


def test_first_fit_and_joining() -> None:
    free = FreeList(100)
    assert free.unused
    assert [free.take(30), free.take(30), free.take(30), free.take(30)] == [0, 30, 60, None]
    free.give_back(30, 30)
    assert free.take(31) is None
    assert free.take(10) == 30
    free.give_back(60, 30)
    assert free.take(60) == 40
    free.give_back(40, 60)
    free.give_back(30, 10)
    free.give_back(0, 30)
    assert free.unused
    assert free.take(100) == 0
    assert not free.unused
    with pytest.raises(ValueError, match="free already"):
        FreeList(100).give_back(50, 10)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 10)), max_size=60))
def test_no_two_regions_overlap(wishes: list[tuple[int, int]]) -> None:
    free, held = FreeList(200), []
    for size, which in wishes:
        offset = free.take(size)
        if offset is not None:
            assert all(offset + size <= o or o + n <= offset for o, n in held)
            assert 0 <= offset <= 200 - size
            held.append((offset, size))
        if held and which < len(held):
            free.give_back(*held.pop(which))
    for region in held:
        free.give_back(*region)
    assert free.unused
