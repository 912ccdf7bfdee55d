"""Signals on both transports: what notify, wait and barrier promise, and what comes of wrong calls and silent peers."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pyreduce as pr

pytest.importorskip("mpi4py.MPI")

MakeCommunicator = Callable[..., pr.Communicator]
ROUNDS = int(os.environ.get("STRESS_ROUNDS", 500))
several = pytest.mark.ranks(2, 3, 4)


def neighbours(k: pr.Communicator) -> tuple[int, int]:
    return (k.rank + 1) % k.size, (k.rank - 1) % k.size


def all_cells(s: pr.Signal) -> list[int]:
    return [s.read(cell) for cell in np.ndindex(s.shape)]


# ------------------------------------------------------------------------------------------------ notify, wait and read


def test_cells_start_at_zero_and_take_what_is_added_or_set(k: pr.Communicator, transport: str) -> None:
    for shape in [(), 3, (3,), (k.size, 2), [2, 1, 2]]:
        with k.signal(shape) as s:
            assert s.transport == transport
            assert s.shape == (tuple(shape) if isinstance(shape, list | tuple) else (shape,))
            assert all_cells(s) == [0] * s.size
            s.barrier()  # or a peer's first notify would be seen
            right, _ = neighbours(k)
            for number, cell in enumerate(np.ndindex(s.shape)):
                s.notify(right, cell, number + 5)
                s.wait(cell, number + 5)
                s.barrier()
                s.notify(right, cell, -2)
                s.wait(cell, number + 3, pr.WaitCmp.EQ)
                assert s.read(cell) == number + 3
            s.barrier()
            last = tuple(n - 1 for n in s.shape)
            s.notify(right, last, -(2**63), pr.NotifyOp.SET)
            s.wait(last, -(2**63), pr.WaitCmp.EQ)
            s.barrier()
            s.notify(right, last, 2**63 - 1, op=pr.NotifyOp.SET)
            s.wait(last, 2**63 - 1)
            s.barrier()
            s.notify(k.rank, last, 0, op=pr.NotifyOp.SET)
            assert s.read(last) == 0
            s.barrier()


def test_cells_are_named_as_numpy_names_elements(k: pr.Communicator) -> None:
    with k.signal((2, 3)) as s:
        s.notify(k.rank, (1, 2), 7)
        assert s.read((-1, -1)) == s.read((np.int64(1), np.int32(2))) == 7
        s.notify(np.int64(k.rank), (-2, 0), np.int16(4))
        assert all_cells(s) == [4, 0, 0, 0, 0, 7]


def test_test_looks_and_does_not_wait(k: pr.Communicator) -> None:
    with k.signal(2) as s:
        assert not s.test(0, 1)
        assert s.test(0, 0)
        assert s.test(0, -5)
        assert s.test(0, 0, pr.WaitCmp.EQ)
        s.barrier()
        s.notify((k.rank + 1) % k.size, 0, 3)
        s.barrier()
        assert s.test(0, 2)
        assert not s.test(0, 2, pr.WaitCmp.EQ)
        assert s.test(0, 3, cmp=pr.WaitCmp.EQ)
        assert not s.test(1, 1)


@several
def test_row_18_peers_that_notify_late_while_another_window_is_in_use(k: pr.Communicator) -> None:
    with k.signal(k.size) as s, k.window((k.size, 100)) as w:
        right, left = neighbours(k)
        for number in range(1, 4):
            if k.rank:
                time.sleep(0.05 * k.rank * number)
                if number == 2:  # computing, not asleep
                    end, x = time.perf_counter() + 0.2, 1.0
                    while time.perf_counter() < end:
                        x = x * 1.0000001
            w.put(right, k.rank, np.full(100, float(number)))
            s.notify(right, k.rank)
            s.wait(left, number, timeout=20)
            assert (w.local[left] == number).all()
            s.barrier()


@several
def test_row_19_adds_from_all_and_sets_one_by_one(k: pr.Communicator) -> None:
    rounds = 1000
    with k.signal((2, k.size)) as s:
        for _ in range(rounds):
            for peer in range(k.size):
                if peer != k.rank:
                    s.notify(peer, (0, peer))
        s.wait((0, k.rank), rounds * (k.size - 1), pr.WaitCmp.EQ)
        right, left = neighbours(k)
        for number in range(1, rounds + 1):
            s.notify(right, (1, k.rank), number, pr.NotifyOp.SET)  # left neighbour's cell is not mine: no race
            s.wait((1, left), number)
        s.barrier()
        assert s.read((1, left)) == rounds


@several
def test_data_put_before_a_notify_are_there_after_the_wait(k: pr.Communicator) -> None:
    """The promise, round after round, with delays: what is put, then notified, is whole; then it may be overwritten."""
    n = 257
    right, left = neighbours(k)
    rng = np.random.default_rng(k.rank)
    with k.window((2, n), np.int64) as w, k.signal(2) as s:
        ramp = np.arange(n)
        for number in range(1, ROUNDS + 1):
            half = number % 2
            if number > 2:
                s.wait(1, number - 2)  # the right neighbour has read what was put there two rounds ago
            w.put_notify(right, half, ramp * number + k.rank, s, 0)
            if rng.random() < 0.05:
                time.sleep(rng.random() * 1e-3)
            s.wait(0, number)
            assert (w.local[half] == ramp * number + left).all(), number
            s.notify(left, 1)


@several
def test_two_communicators_turn_about(make_communicator: MakeCommunicator, comm: Any, transport: str) -> None:
    one, two = make_communicator(transport=transport), make_communicator(transport=transport)
    with one.signal(1) as a, two.signal(1) as b, two.window(4) as w:
        right, _ = neighbours(one)
        for number in range(1, 200):
            first, second = (a, b) if number % 2 else (b, a)
            first.notify(right, 0)
            w.put_notify(right, 3, float(number), b, 0, 2)
            second.notify(right, 0)
            first.wait(0, number if first is a else 3 * number - 2)
            second.wait(0, number if second is a else 3 * number)
            b.wait(0, 3 * number)
            assert w.local[3] == number
            b.barrier()
            x = one.allreduce(np.ones(3), algorithm="mesh")
            assert (x == one.size).all()


# -------------------------------------------------------------------------------------------------------------- barrier


def test_barrier_orders_what_was_written(k: pr.Communicator, comm: Any) -> None:
    right, left = neighbours(k)
    with k.signal(1) as s, k.window(1, np.int64) as w:
        s.notify(k.rank, 0, 5)
        for number in range(1, 101):
            w.put(right, 0, number + k.rank)
            if number % 10 == k.rank:
                time.sleep(1e-3)
            s.barrier()
            assert w.local[0] == number + left
            s.barrier()
        assert s.read(0) == 5


@several
def test_a_rank_that_does_not_come_to_the_barrier_is_named(k: pr.Communicator, comm: Any) -> None:
    s = k.signal(1)
    if k.rank != k.size - 1:
        with pytest.raises(pr.CollectiveTimeout, match=f"signal.barrier .*rank {k.size - 1} had not arrived") as info:
            s.barrier(timeout=0.3)
        assert info.value.missing == (k.size - 1,)
    else:
        time.sleep(1.5)
        with pytest.raises(pr.CollectiveTimeout, match=r"and will not come|gave up"):
            s.barrier()


@several
def test_a_barrier_against_another_call_is_a_mismatch(k: pr.Communicator, comm: Any) -> None:
    s = k.signal(1)
    call = s.barrier if k.rank else lambda: k.allreduce(np.ones(3), algorithm="ring")
    with pytest.raises(pr.MismatchError) as info:
        call()
    assert "rank 0 called allreduce by ring" in str(info.value)
    assert "called signal.barrier" in str(info.value)


# ---------------------------------------------------------------------------------------------------------- wrong calls

WRONG: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("notify", (-1, 0), ValueError, "there is no rank -1; ranks are 0.."),
    ("notify", (99, 0), ValueError, "there is no rank 99"),
    ("notify", ("1", 0), TypeError, "peer must be a rank"),
    ("notify", (0, 5), IndexError, "cell 5 is out of range for a signal of shape (2,)"),
    ("notify", (0, -3), IndexError, "cell -3 is out of range"),
    ("notify", (0, (0, 0)), IndexError, "cell (0, 0) does not name one cell of a signal of shape (2,)"),
    ("notify", (0, slice(None)), TypeError, "a cell is named by ints"),
    ("notify", (0, [0]), TypeError, "a cell is named by ints"),
    ("notify", (0, 1.0), TypeError, "a cell is named by ints"),
    ("notify", (0, 0, 0), ValueError, "adding 0 changes nothing, so no wait could ever see it"),
    ("notify", (0, 0, 1.5), TypeError, "a cell holds integers, got a float"),
    ("notify", (0, 0, np.array([2, 3])), TypeError, "a cell holds integers, got a ndarray"),
    ("wait", (0, np.array(-1)), TypeError, "a cell holds integers, got a ndarray"),
    ("notify", (0, 0, None), TypeError, "a cell holds integers, got a NoneType"),
    ("notify", (0, 0, 2**63), ValueError, "does not fit in the 64 bits"),
    ("notify", (0, 0, 1, "add"), TypeError, "op must be NotifyOp.ADD or NotifyOp.SET"),
    ("notify", (0, 0, 1, pr.WaitCmp.GE), TypeError, "a WaitCmp belongs in wait"),
    ("notify", (0, 0, pr.NotifyOp.SET), TypeError, "an op or a comparison goes in its own argument"),
    ("wait", (0, 1, pr.NotifyOp.ADD), TypeError, "a NotifyOp belongs in notify"),
    ("wait", (0, 1, ">="), TypeError, "cmp must be WaitCmp.GE or WaitCmp.EQ"),
    ("wait", (0, "1"), TypeError, "a cell holds integers, got a str"),
    ("wait", (0, -(2**63) - 1), ValueError, "does not fit"),
    ("wait", (2, 1), IndexError, "cell 2 is out of range"),
    ("wait", (0, 1, pr.WaitCmp.GE, -1), ValueError, "timeout is -1"),
    ("test", (0, 0.5), TypeError, "a cell holds integers"),
    ("test", (0, 1, pr.NotifyOp.SET), TypeError, "a NotifyOp belongs in notify"),
    ("read", ((),), IndexError, "cell () does not name one cell"),
    ("read", (None,), TypeError, "a cell is named by ints"),
]


def test_wrong_arguments_change_nothing(k: pr.Communicator, comm: Any) -> None:
    with k.signal(2) as s:
        for _ in range(2):  # the second time the quick way knows the right cells
            for method, arguments, error, text in WRONG:
                with pytest.raises(error, match=re.escape(text)) as info:
                    getattr(s, method)(*arguments)
                if "timeout" not in text:
                    assert f"(rank {k.rank} of {k.size})" in str(info.value)
            s.barrier()
            assert all_cells(s) == [0, 0]
            s.barrier()
            s.notify(0, 0)
            s.barrier()
            if k.rank == 0:
                assert s.read(0) == k.size
            s.barrier()
            s.notify(0, 0, -1)
            s.barrier()
    for shape, error in ((-1, ValueError), ((2, 0), ValueError), (0, ValueError), (1.5, TypeError), ("x", TypeError)):
        with pytest.raises(error, match=r"signal: "):
            k.signal(shape)


def test_the_enums_are_two_types() -> None:
    assert not set(pr.NotifyOp) & set(pr.WaitCmp)
    assert not isinstance(pr.NotifyOp.ADD, int | str)
    assert not isinstance(pr.WaitCmp.GE, int | str)


@pytest.mark.ranks(1)
def test_a_wait_that_nobody_could_end_is_refused(k: pr.Communicator) -> None:
    with k.signal(2) as s:
        s.notify(0, 0)
        s.wait(0, 1)
        with pytest.raises(ValueError, match=r"cell 1 to be >= 1; it holds 0, and there is no other rank to notify it"):
            s.wait(1, 1)
        with pytest.raises(ValueError, match=r"cell 0 to be == 2; it holds 1"):
            s.wait(0, 2, pr.WaitCmp.EQ)
        s.barrier()


def test_a_closed_signal_says_so(k: pr.Communicator, make_communicator: MakeCommunicator, transport: str) -> None:
    s = k.signal(1)
    s.notify(k.rank, 0)
    s.wait(0, 1)
    s.close()
    s.close()
    assert "closed" in repr(s)
    for call in (lambda: s.notify(0, 0), lambda: s.wait(0, 1), lambda: s.test(0, 1), lambda: s.read(0), s.barrier):
        with pytest.raises(ValueError, match="this signal is closed"):
            call()
    other = make_communicator(transport=transport)
    mine = other.signal(1)
    other.close()
    with pytest.raises(ValueError, match="this signal is closed"):
        mine.notify(0, 0)
    with pytest.raises(ValueError, match="signal: this communicator is closed"):
        other.signal(1)


@several
def test_ranks_that_make_different_signals_hear_of_it(make_communicator: MakeCommunicator, comm: Any) -> None:
    for what in ("shape", "kind", "order"):
        k = make_communicator()
        kept = k.signal(1)
        odd = k.rank == k.size - 1
        if what == "order" and odd:
            kept.close()
        make = k.window if what == "kind" and odd else k.signal
        with pytest.raises(pr.MismatchError) as info:
            make(2 if what == "shape" and odd else 4)
        if what == "shape":
            assert f"(2,) on rank {k.size - 1}" in str(info.value)
        elif what == "order":
            assert "1 made, 0 open" in str(info.value)


# ------------------------------------------------------------------------------------------------------- silent peers


@several
@pytest.mark.parametrize("use", ["counter", "a cell a rank"])
def test_a_peer_that_never_notifies_is_named(k: pr.Communicator, comm: Any, use: str) -> None:
    silent = k.size - 1
    s, w = k.signal(1 if use == "counter" else (k.size, 1)), k.window(2)
    begun = time.perf_counter()
    if k.rank == 0:
        cell, expected = (0, k.size - 1) if use == "counter" else ((silent, 0), 1)
        with pytest.raises(pr.CollectiveTimeout) as info:
            s.wait(cell, expected, timeout=0.4)
        assert time.perf_counter() - begun > 0.39
        assert info.value.missing == (silent,)
        held = k.size - 2 if use == "counter" else 0
        assert (
            f"waits for cell {cell!r} to be >= {expected}; it holds {held}; rank {silent} has not notified it"
            in str(info.value)
        )
        assert f"rank {silent} 0 times" in str(info.value)
    else:
        if k.rank != silent:
            s.notify(0, 0 if use == "counter" else (k.rank, 0))
        with pytest.raises(
            pr.BrokenCommunicatorError, match=r"rank 0 gave up before call \d+: CollectiveTimeout: signal.wait"
        ):
            s.wait(0 if use == "counter" else (0, 0), 1, timeout=20)
    for call in (lambda: s.notify(0, 0), lambda: s.wait(0, 0), lambda: w.put(0, 0, 1.0), lambda: w.get(0), s.barrier,
                 lambda: k.allreduce(np.ones(2)), lambda: k.signal(1)):  # fmt: skip
        with pytest.raises(pr.BrokenCommunicatorError, match="broken since an earlier call"):
            call()


@several
def test_counts_of_notifies_tell_who_is_behind(k: pr.Communicator, comm: Any) -> None:
    s = k.signal(2)
    if k.rank:
        for _ in range(5 - (k.rank == 1)):
            s.notify(0, 1)
    s.barrier()
    if k.rank == 0:
        with pytest.raises(pr.CollectiveTimeout, match=r"more is to come from rank 1 .so far: rank 1 4 times") as info:
            s.wait(1, 5 * (k.size - 1), timeout=0)
        assert info.value.missing == (1,)


@several
def test_a_value_that_was_passed_is_told(k: pr.Communicator) -> None:
    s = k.signal(1)
    if k.rank == 1:
        s.notify(0, 0, 2)
    s.barrier()
    if k.rank == 0:
        with pytest.raises(pr.CollectiveTimeout, match=r"== 1; it holds 2, which is past it: with ADD, wait for GE"):
            s.wait(0, 1, pr.WaitCmp.EQ, timeout=0.1)


@several
def test_a_long_wait_warns_once_and_goes_on(
    make_communicator: MakeCommunicator, comm: Any, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    k = make_communicator(transport=transport, warn_seconds=0.1, timeout=None)
    k._settings = k._one_sided.settings = type(k._settings)(
        **{name: getattr(k._settings, name) for name in k._settings.__slots__} | {"timeout": None}
    )
    s = k.signal(1)
    if k.rank == 0:
        with caplog.at_level(logging.WARNING, "pyreduce"):
            s.wait(0, 1)
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 1
        assert "has waited 0 s: waits for cell 0 to be >= 1; it holds 0" in said[0]
    else:
        time.sleep(0.4)
        if k.rank == 1:
            s.notify(0, 0)


@several
def test_a_collective_hears_of_a_wait_that_failed(k: pr.Communicator, comm: Any) -> None:
    s = k.signal(1)
    if k.rank == 0:
        with pytest.raises(pr.CollectiveTimeout):
            s.wait(0, 1, timeout=0.2)
    else:
        with pytest.raises(pr.BrokenCommunicatorError, match="rank 0 gave up before call"):
            k.allreduce(np.ones(4), algorithm="ring")
