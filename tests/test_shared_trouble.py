"""The shared-memory engine in trouble: ranks that give up in the middle of a call, and what their peers then get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pyreduce as pr
from pyreduce.algorithms import shared

MakeCommunicator = Callable[..., pr.Communicator]
several = pytest.mark.ranks(2, 3, 4)
ARENA_BYTES = 1 << 16


def length_in_pieces(collective: str, nranks: int, pieces: int) -> int:
    """Float64 elements of an input that passes through the arena in so many pieces, all of the same length."""
    slot = (ARENA_BYTES - shared.HEAD_BYTES) // shared.SLOTS // shared.SLOT_MULTIPLE * shared.SLOT_MULTIPLE
    share = slot if collective == "allgather" else slot // max(nranks - 1, 1)
    return pieces * (share // 128 * 128 // 8) * (1 if collective == "allgather" else nranks)


@several
@pytest.mark.parametrize("lent", ["by all", "by those who give up"])
@pytest.mark.parametrize("pieces", [2, 3, 4])
@pytest.mark.parametrize("collective", ["reduce_scatter", "allgather", "allreduce"])
def test_what_a_rank_does_to_its_array_after_giving_up_is_in_no_result(
    make_communicator: MakeCommunicator, comm: Any, collective: str, pieces: int, lent: str
) -> None:
    """One rank rests in mid-call; the others give up and use their arrays, in which it still reads when it goes on."""
    c, rests = make_communicator(algorithm="shared", arena_bytes=ARENA_BYTES), comm.size - 1
    n = length_in_pieces(collective, comm.size, pieces)
    x = c.empty(n)
    if comm.rank == rests and lent == "by those who give up":
        x = np.empty(n)
    x[:] = comm.rank + 1.0
    sums = np.full(n, comm.size * (comm.size + 1) / 2)
    want = {
        "reduce_scatter": sums[: n // comm.size],
        "allreduce": sums,
        "allgather": np.repeat(np.arange(1.0, comm.size + 1), n),
    }[collective]
    y, start = np.empty_like(want), getattr(c, f"i{collective}")
    start(x, y).wait()
    assert (y == want).all()
    y[:] = -1
    error: Exception | None = None
    comm.Barrier()
    if comm.rank != rests:  # what they lay out is there before the other comes, who gets past the first piece at once
        request = start(x, y)
        comm.Barrier()
        comm.Barrier()
        try:
            request.wait(timeout=0.2)
        except pr.PyreduceError as caught:
            error = caught
        x[:] = 1e6
        comm.Barrier()
    else:
        comm.Barrier()
        request = start(x, y)
        comm.Barrier()
        comm.Barrier()
        try:
            request.wait()
        except pr.PyreduceError as caught:
            error = caught
    if error is None:
        assert (y == want).all(), f"a result without an error, and wrong: {y[y != want][:4]}"
    else:
        assert isinstance(error, pr.CollectiveTimeout), error


@several
def test_a_call_that_has_gone_well_is_not_spoiled_by_who_gives_up_in_the_next(
    make_communicator: MakeCommunicator, comm: Any
) -> None:
    """The one that rests has laid out its part of a call, which the others complete; for the next it is too late."""
    c, rests = make_communicator(algorithm="shared"), comm.size - 1
    x, y = np.ones(4), np.zeros(4)
    error: Exception | None = None
    c.allreduce(x)
    if comm.rank == rests:
        request = c.iallreduce(x, y)
        comm.Barrier()
        comm.Barrier()
        try:
            request.wait()
        except pr.PyreduceError as caught:
            error = caught
    else:
        comm.Barrier()
        c.allreduce(x, y)
        with pytest.raises(pr.CollectiveTimeout):
            c.allreduce(x, timeout=0.2)
        comm.Barrier()
    comm.Barrier()
    assert error is None, error
    assert (y == comm.size).all()
    if comm.rank == rests:
        with pytest.raises(pr.CollectiveTimeout, match="gave up after"):
            c.allreduce(x)
