"""Windows on both transports: put, get, accumulate and the collectives on a window."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import DEFINED, REFUSED, as_dtype, assert_same, everybody, oracle

import pyreduce as pr
from pyreduce import arena, ops

MPI = pytest.importorskip("mpi4py.MPI")

MakeCommunicator = Callable[..., pr.Communicator]
several = pytest.mark.ranks(2, 3, 4)


# ---------------------------------------------------------------------------------------------------------- put and get


def test_a_window_is_zero_and_of_the_shape_asked_for(k: pr.Communicator, transport: str) -> None:
    for shape in [(), 5, (3, 4), (0,), (2, 0, 3), [2, 2]]:
        with k.window(shape, np.float32) as w:
            assert w.transport == transport
            assert w.local.shape == w.shape == (tuple(shape) if isinstance(shape, list | tuple) else (shape,))
            assert w.local.dtype == w.dtype == np.float32
            assert (w.local == 0).all()
            w.local[...] = k.rank + 1  # the next one is zero all the same
            if not w.local.size:
                w.put((k.rank + 1) % k.size, ..., np.empty(w.shape, np.float32))
                assert w.get((k.rank + 1) % k.size).shape == w.shape


def test_every_dtype_is_moved_as_it_is(k: pr.Communicator) -> None:
    for dtype in (*ops.DTYPES, "<U3", "datetime64[s]", "i4,f8", ">f8"):
        check_moves(k, dtype)


def check_moves(k: pr.Communicator, dtype: str) -> None:
    kind = as_dtype(dtype) if dtype in ops.DTYPES else np.dtype(dtype)
    right, left = (k.rank + 1) % k.size, (k.rank - 1) % k.size
    size = kind.itemsize

    def data(rank: int) -> np.ndarray:
        if dtype in ops.DTYPES and dtype != "longdouble":  # whose padding is not the same everywhere
            return everybody(dtype, (2, 3), k.size)[rank]
        return np.frombuffer(bytes([65 + rank, 0, 0, 0] * (6 * size))[: 6 * size], np.uint8).view(kind).reshape(2, 3)

    with k.window((2, 3), kind) as w, k.signal(1) as s:
        w.put_notify(right, ..., data(k.rank), s, 0)
        s.wait(0, 1)
        assert w.local.tobytes() == data(left).tobytes()
        assert w.get(right).tobytes() == data(k.rank).tobytes()
        assert w.get(right, (1, slice(1, None))).tobytes() == data(k.rank)[1, 1:].tobytes()
        s.barrier()


REGIONS: list[Any] = [
    (1, 2, 3), (-1, -1, -1), 0, -1, slice(None), ..., (1, slice(None)), (1, 2, slice(1, 3)), (slice(1, 3),),
    (slice(0, 2), slice(None)), (2, slice(1, 3), slice(None)), (0, ...), (..., 0, 0, 1), slice(2, 2), slice(1, 99),
    (np.int64(1), slice(None, None, 1)), (slice(0, 1), slice(1, 2), slice(0, 2)), (), slice(1, 2, 5),
]  # fmt: skip


def test_regions_are_numpys(k: pr.Communicator) -> None:
    right, left = (k.rank + 1) % k.size, (k.rank - 1) % k.size
    with k.window((3, 4, 5), np.int32) as w, k.signal(1) as s:
        model = np.zeros((3, 4, 5), np.int32)
        for number, index in enumerate(REGIONS):
            region = model[index]
            values = np.arange(np.size(region), dtype=np.int32).reshape(np.shape(region)) + 100 * number
            w.put(right, index, values + k.rank)
            s.barrier()
            model[index] = values + left
            assert_same(w.local, model)
            assert_same(w.get(k.rank, index), np.asarray(model[index]))
            got = w.get(right, index)
            assert_same(got, np.asarray(values + k.rank))
            if got.size:
                assert not np.shares_memory(got, w.local)
            s.barrier()


@pytest.mark.parametrize("source", ["strided", "fortran", "broadcast", "list of numbers", "number", "interface"])
def test_what_can_be_put(k: pr.Communicator, source: str) -> None:
    wanted = np.arange(12.0).reshape(3, 4)
    given: Any = {
        "strided": np.repeat(wanted, 2, axis=1)[:, ::2],
        "fortran": np.asfortranarray(wanted),
        "broadcast": np.broadcast_to(np.arange(4.0), (3, 4)),
        "number": 2.5,
        "interface": type("Like", (), {"__array_interface__": wanted.__array_interface__, "keep": wanted})(),
        "list of numbers": None,
    }[source]
    right = (k.rank + 1) % k.size
    with k.window((3, 4)) as w, k.signal(1) as s:
        if source == "list of numbers":
            with pytest.raises(TypeError, match=r"array is a list.*numpy.asarray"):
                w.put(right, 0, [1.0, 2.0, 3.0, 4.0])
            return
        if source == "number":
            w.put(right, (1, 2), given)
            wanted = np.zeros((3, 4))
            wanted[1, 2] = 2.5
        else:
            before = np.array(given)
            w.put(right, ..., given)
            assert_same(np.array(given), before)
            wanted = np.broadcast_to(np.arange(4.0), (3, 4)).copy() if source == "broadcast" else wanted
        s.barrier()
        assert_same(w.local.copy(), wanted)
        s.barrier()


WRONG: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("put", (9, 0, np.ones(4)), ValueError, "there is no rank 9"),
    ("put", (-1, 0, np.ones(4)), ValueError, "there is no rank -1"),
    ("put", (None, 0, np.ones(4)), TypeError, "peer must be a rank"),
    ("put", (0, 3, np.ones(4)), IndexError, "index 3 for a window of shape (3, 4)"),
    ("put", (0, (0, 0, 0), 1.0), IndexError, "too many indices"),
    ("put", (0, (slice(None), 0), np.ones(3)), ValueError, "not contiguous"),
    ("put", (0, slice(None, None, 2), np.ones((2, 4))), ValueError, "not contiguous"),
    ("put", (0, [0, 1], np.ones((2, 4))), TypeError, "an index is made of ints, slices and"),
    ("put", (0, np.array([0]), np.ones((1, 4))), TypeError, "an index is made of ints"),
    ("put", (0, None, np.ones((1, 3, 4))), TypeError, "an index is made of ints"),
    ("put", (0, True, np.ones((1, 3, 4))), TypeError, "got True"),
    ("put", (0, "a", np.ones(4)), TypeError, "an index is made of ints"),
    ("put", (0, 1.0, np.ones(4)), TypeError, "an index is made of ints"),
    ("put", (0, 0, np.ones(3)), ValueError, "the region has shape (4,), the array (3,)"),
    ("put", (0, 0, np.ones((1, 4))), ValueError, "the region has shape (4,), the array (1, 4)"),
    ("put", (0, 0, 1.0), ValueError, "the region has shape (4,), the array ()"),
    (
        "put",
        (0, 0, np.ones(4, np.float32)),
        TypeError,
        "the window holds float64, the array float32; pass array.astype",
    ),
    ("put", (0, 0, np.arange(4)), TypeError, "the window holds float64, the array int64"),
    ("put", (0, 0, object()), TypeError, "array is a object"),
    ("put", (0, (0, 0), 1j), TypeError, "cannot be an element of float64"),
    ("get", (9, 0), ValueError, "there is no rank 9"),
    ("get", (0, 5), IndexError, "index 5 for a window of shape (3, 4)"),
    ("get", (0, (slice(None), 1)), ValueError, "not contiguous"),
    ("accumulate", (0, 0, np.ones(4), "AVG"), ValueError, "op AVG is not offered here"),
    ("accumulate", (0, 0, np.ones(4), "mean"), ValueError, "unknown op 'mean'"),
    ("accumulate", (0, 0, np.ones(4), "BAND"), TypeError, "op BAND is not defined for dtype float64"),
    ("accumulate", (0, 0, np.ones(4), 3), TypeError, "op must be an op or its name"),
    ("accumulate", (0, 0, np.ones(3), "SUM"), ValueError, "the region has shape (4,), the array (3,)"),
    ("put_notify", (0, 0, np.ones(4), None, 0), TypeError, "signal must be a Signal, got NoneType"),
]


def test_wrong_arguments_write_nothing(k: pr.Communicator) -> None:
    with k.window((3, 4)) as w, k.signal(2) as s:
        for method, arguments, error, text in WRONG:
            with pytest.raises(error, match=re.escape(text)) as info:
                getattr(w, method)(*arguments)
            assert f"window.{method}: " in str(info.value)
            assert f"(rank {k.rank} of {k.size})" in str(info.value)
        add, put = pr.NotifyOp.ADD, pr.NotifyOp.SET
        wrong = [
            (7, 1, add, IndexError),
            (0, 0, add, ValueError),
            (0, 1, pr.WaitCmp.GE, TypeError),
            (0, "1", put, TypeError),
        ]
        for cell, value, op, error in wrong:
            with pytest.raises(error, match=r"signal.notify: "):
                w.put_notify(0, 0, np.ones(4), s, cell, value, op)  # type: ignore[arg-type]
        with (
            pytest.raises(ValueError, match=r"300 cannot be an element of uint8|out of bounds"),
            k.window(1, "u1") as u,
        ):
            u.put(0, 0, 300)
        s.barrier()
        assert (w.local == 0).all()
        assert s.read(0) == s.read(1) == 0
    for shape, dtype, error in (
        (-1, "f8", ValueError),
        (2.5, "f8", TypeError),
        (2, object, TypeError),
        (2, "S0", TypeError),
    ):
        with pytest.raises(error, match="window: "):
            k.window(shape, dtype)


def test_a_closed_window_says_so(k: pr.Communicator, make_communicator: MakeCommunicator, transport: str) -> None:
    s = k.signal(k.size)
    w = k.window((k.size, 2))
    w.close()
    w.close()
    assert "closed" in repr(w)
    x = np.ones(2)
    for call in (lambda: w.local, lambda: w.put(0, 0, x), lambda: w.get(0), lambda: w.accumulate(0, 0, x),
                 lambda: w.put_notify(0, 0, x, s, 0), lambda: w.reduce_scatter(s), lambda: w.allgather(s),
                 lambda: w.allreduce(s)):  # fmt: skip
        with pytest.raises(ValueError, match="this window is closed"):
            call()
    other = make_communicator(transport=transport)
    v = k.window((k.size, 2))
    t = other.signal(k.size)
    for call in (lambda: v.reduce_scatter(t), lambda: v.put_notify(0, 0, np.ones(2), t, 0)):
        with pytest.raises(ValueError, match="the signal belongs to another communicator"):
            call()
    s.close()
    with pytest.raises(ValueError, match="this signal is closed"):
        v.reduce_scatter(s)
    other.close()
    with pytest.raises(ValueError, match="window: this communicator is closed"):
        other.window(2)


def test_arrays_over_a_closed_window_can_still_be_read(
    make_communicator: MakeCommunicator, comm: Any, transport: str
) -> None:
    views = []
    for _ in range(3):
        k = make_communicator(transport=transport)
        with k.window(1000) as w:
            w.local[...] = 3.5
            views.append(w.local[10:20])
        k.close()
    assert all((view == 3.5).all() for view in views)


# ----------------------------------------------------------------------------------------------------------- accumulate


def test_accumulate_is_one_fold(k: pr.Communicator) -> None:
    right, left = (k.rank + 1) % k.size, (k.rank - 1) % k.size
    for op, dtype in DEFINED:
        if op == "AVG":
            continue
        inputs = everybody(dtype, (7,), k.size)
        with k.window((2, 7), as_dtype(dtype)) as w, k.signal(1) as s:
            w.local[1] = inputs[k.rank]
            s.barrier()
            w.accumulate(right, (1, slice(2, 6)), inputs[k.rank][2:6], op)
            s.barrier()
            want = inputs[k.rank].copy()
            want[2:6] = oracle(op, [inputs[k.rank][2:6], inputs[left][2:6]])
            assert_same(w.local[1].copy(), want)
            assert not w.local[0].astype(bool).any()
    for op, dtype in REFUSED:
        with k.window(3, as_dtype(dtype)) as w, pytest.raises((TypeError, ValueError), match=f"op {op} is not"):
            w.accumulate(k.rank, ..., np.zeros(3, as_dtype(dtype)), op)


def test_an_array_over_the_window_itself(k: pr.Communicator) -> None:
    base = np.arange(8).reshape(4, 2)
    with k.window((4, 2), np.int64) as w, k.signal(1) as s:
        w.local[...] = base
        w.accumulate(k.rank, slice(1, 4), w.local[:3])
        want = base.copy()
        want[1:] += base[:3]
        assert (w.local == want).all()
        w.local[...] = base
        w.accumulate(k.rank, ..., w.local)
        assert (w.local == 2 * base).all()
        w.local[...] = base
        w.put(k.rank, slice(1, 4), w.local[:3])
        assert (w.local[1:] == base[:3]).all()
        s.barrier()
        w.put((k.rank + 1) % k.size, 0, w.local[3])
        s.barrier()
        assert (w.local[0] == base[2]).all()
        s.barrier()


def test_accumulates_of_all_ranks_follow_each_other(k: pr.Communicator) -> None:
    with k.window(50, np.int64) as w, k.signal(1) as s:
        for _ in range(40):
            for hop in range(k.size):
                w.accumulate((k.rank + hop) % k.size, ..., np.arange(50) + k.rank)
        s.barrier()
        assert (w.local == 40 * (k.size * np.arange(50) + sum(range(k.size)))).all()


@several
def test_a_lock_that_is_never_given_back_is_a_timeout(k: pr.Communicator, comm: Any) -> None:
    w = k.window(4)
    s = k.signal(1)
    if k.rank == 1:
        w._lock(0, 1)  # as if it had died in accumulate
    s.barrier()
    if k.rank == 0:
        with pytest.raises(
            pr.CollectiveTimeout, match=r"window.accumulate .*rank 1 holds the lock of rank 0's part"
        ) as info:
            w.accumulate(0, 0, 1.0, timeout=0.2)
        assert info.value.missing == (1,)


# ------------------------------------------------------------------------------------------------ calls on windows


def check_builtins(k: pr.Communicator, dtype: str, op: str, columns: tuple[int, ...], seed: int = 0) -> None:
    size, rank, kind = k.size, k.rank, as_dtype(dtype)
    inputs = everybody(dtype, (size, *columns), size, seed)
    total = oracle(op, list(inputs)) if size > 1 else inputs[0]
    with k.window((size, *columns), kind) as w, k.signal((size, 1)) as s:
        for _ in range(2):
            w.local[...] = inputs[rank]
            block = w.reduce_scatter(s, op)
            want = inputs[rank].copy()
            want[rank] = total[rank]
            assert_same(w.local.copy(), want)
            assert np.shares_memory(block, w.local) or not block.size
            assert_same(w.allgather(s).copy(), total)
            w.local[...] = inputs[rank]
            assert_same(w.allreduce(s, getattr(pr, op)).copy(), total)
        s.barrier()
        assert all(s.read((cell, 0)) == 0 for cell in range(size))


def test_every_op_and_dtype_on_a_window(k: pr.Communicator) -> None:
    for op, dtype in DEFINED:
        if op == "AVG" and dtype in ("float16", "bfloat16"):
            with k.window((k.size, 2), as_dtype(dtype)) as w, k.signal(k.size) as s:
                for call in (w.reduce_scatter, w.allreduce):
                    with pytest.raises(
                        ValueError, match=f"op AVG is not offered here .the mean of {dtype} may overflow"
                    ):
                        call(s, "avg")
        else:
            check_builtins(k, dtype, op, (5,))


def test_rows_of_every_shape(k: pr.Communicator) -> None:
    for columns in ((), (1,), (0,), (3, 2), (1000,)):
        check_builtins(k, "float32", "SUM", columns)


def test_rows_longer_than_a_message(make_communicator: MakeCommunicator, comm: Any, transport: str) -> None:
    check_builtins(
        make_communicator(transport=transport, message_bytes=1000, segment_bytes=256), "float64", "SUM", (400,)
    )


@several
def test_a_thousand_calls_on_one_signal_with_a_slow_rank(k: pr.Communicator) -> None:
    """Two windows, two signals, turn about; one rank is late at random; every result right, all cells 0 in the end."""
    rng, slow = np.random.default_rng(k.rank), k.size - 1
    windows = [k.window((k.size, 16), np.int64), k.window((k.size, 16), np.int64)]
    signals = [k.signal(k.size), k.signal((k.size, 1))]
    base = np.arange(k.size * 16).reshape(k.size, 16)
    for number in range(1000):
        w, s = windows[number % 2], signals[number % 2]
        w.local[...] = base * (number + 1) + 1000 * k.rank
        if k.rank == slow and rng.random() < 0.1:
            time.sleep(rng.random() * 2e-3)
        name = ("reduce_scatter", "allreduce", "allgather")[number % 3]
        getattr(w, name)(s)
        total = base * (number + 1) * k.size + 1000 * sum(range(k.size))
        gathered = base * (number + 1) + 1000 * np.arange(k.size)[:, None]
        want = gathered if name == "allgather" else total
        rows = k.rank if name == "reduce_scatter" else slice(None)
        assert (w.local[rows] == want[rows]).all(), number
    signals[0].barrier()
    assert [s.read(cell) for s in signals for cell in np.ndindex(s.shape)] == [0] * (2 * k.size)


def test_windows_and_signals_of_the_wrong_shape_are_refused(k: pr.Communicator) -> None:
    P = k.size
    with k.window((P, 3)) as w, k.window((P + 1, 3)) as long, k.window((), "f4") as scalar, k.signal(P) as s:
        with k.signal(P + 1) as wide, k.signal((2, P)) as tall:
            for name in ("reduce_scatter", "allgather", "allreduce"):
                for signal in (wide, tall):
                    with pytest.raises(
                        ValueError, match=rf"window.{name}: the signal must have one cell for each of {P}"
                    ):
                        getattr(w, name)(signal)
                for window in (long, scalar):
                    with pytest.raises(
                        ValueError, match=rf"window.{name}: the window must have one row for each of {P}"
                    ):
                        getattr(window, name)(s)
                with pytest.raises(TypeError, match="signal must be a Signal"):
                    getattr(w, name)("s")
            for name in ("reduce_scatter", "allreduce"):
                with pytest.raises(ValueError, match="unknown op 'median'"):
                    getattr(w, name)(s, "median")
                with pytest.raises(TypeError, match="op BOR is not defined for dtype float64"):
                    getattr(w, name)(s, pr.BOR)
                with pytest.raises(TypeError, match="op must be"):
                    getattr(w, name)(s, [])
        s.barrier()
        assert all(s.read(cell) == 0 for cell in range(P))


def test_a_signal_that_holds_something_is_refused(k: pr.Communicator) -> None:
    P = k.size
    with k.window((P, 3)) as w, k.signal((P, 1)) as s:
        w.local[...] = 1
        for value in (1, -3, 2**40):
            s.notify(k.rank, (0, 0), value)
            for name in ("reduce_scatter", "allgather", "allreduce"):
                with pytest.raises(ValueError, match=rf"{name}: all cells must be 0, and cell .0, 0. holds {value};"):
                    getattr(w, name)(s)
            s.notify(k.rank, (0, 0), -value)
            s.barrier()
        assert (w.reduce_scatter(s) == P).all()


@several
@pytest.mark.parametrize("what", ["op", "window", "signal", "collective"])
def test_calls_on_windows_that_differ_are_found(k: pr.Communicator, comm: Any, what: str) -> None:
    P, odd = k.size, k.rank == k.size - 1
    w, v, s, t = k.window((P, 3)), k.window((P, 3)), k.signal(P), k.signal(P)
    w.local[...] = 1
    window, signal = v if what == "window" and odd else w, t if what == "signal" and odd else s
    call = window.allreduce if what == "collective" and odd else window.reduce_scatter
    with pytest.raises(pr.MismatchError) as info:
        call(signal, "MAX" if what == "op" and odd else "SUM")
    assert {tuple(ranks) for ranks in info.value.groups.values()} == {(P - 1,), tuple(range(P - 1))}
    if what == "op":
        assert f"MAX on rank {P - 1}" in str(info.value)


@several
def test_a_rank_that_does_not_come_to_a_call_on_a_window_is_named(k: pr.Communicator, comm: Any) -> None:
    w, s = k.window((k.size, 3)), k.signal(k.size)
    if k.rank:
        with pytest.raises(pr.CollectiveTimeout, match=r"window.reduce_scatter .*rank 0 had not arrived") as info:
            w.reduce_scatter(s, timeout=0.4)
        assert info.value.missing == (0,)


# --------------------------------------------------------------------------------------------------------------- memory


def test_windows_lie_in_one_arena_that_grows(make_communicator: MakeCommunicator, comm: Any, transport: str) -> None:
    k = make_communicator(transport=transport)
    held = k._arena._held
    small = [k.window(10) for _ in range(50)]
    assert len(held) == 1
    large = k.window(3 << 20, np.uint8)
    assert len(held) == 2
    for number, w in enumerate(small):
        w.put((k.rank + 1) % k.size, ..., np.full(10, float(number)))
    large.put((k.rank + 1) % k.size, slice(-5, None), np.full(5, 7, np.uint8))
    k.signal(1).barrier()
    assert all((w.local == number).all() for number, w in enumerate(small))
    assert (large.local[-5:] == 7).all()
    large.close()
    k.window(20 << 20, np.uint8).close()  # takes the place of the chunk that nothing lies in
    assert len(held) == 2
    assert sum(chunk.chunk.nbytes for chunk in held) < 30 << 20


def test_an_array_of_a_users_keeps_its_chunk(make_communicator: MakeCommunicator, comm: Any, transport: str) -> None:
    k = make_communicator(transport=transport)
    with k.window(2 << 20, np.uint8) as w:
        view = w.local if k.rank == 0 else None
        w.local[:9] = 5
    del w
    k.window(9 << 20, np.uint8).close()
    if view is not None:
        assert (view[:9] == 5).all()


@pytest.mark.parametrize("culprit", [0, -1])
def test_no_memory_is_an_error_on_all_ranks(
    k: pr.Communicator, comm: Any, culprit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    k.window(3).close()
    with monkeypatch.context() as patch:
        if k.rank == culprit % k.size:
            patch.setattr(arena, "_zero", lambda region: False)
        for make in (lambda: k.window(1000), lambda: k.window(9 << 20), lambda: k.signal(5)):
            with pytest.raises(
                pr.WindowMemoryError, match=rf"no memory for \d+ bytes.* on rank {culprit % k.size}"
            ) as info:
                make()
            assert isinstance(info.value, MemoryError)
    with k.window((k.size, 3)) as w, k.signal(k.size) as s:
        w.local[...] = 1
        assert (w.reduce_scatter(s) == k.size).all()


@pytest.mark.parametrize("culprit", [0, -1])
def test_what_cannot_fit_is_not_tried(
    k: pr.Communicator, comm: Any, culprit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free() -> int:
        return (30 << 20) * k.size if k.rank == culprit % k.size else 1 << 50

    monkeypatch.setattr(arena, "_free_bytes", free)
    for nbytes in (31 << 20, 1 << 45):
        with pytest.raises(pr.WindowMemoryError, match="no memory for"):
            k.window(nbytes, np.uint8)
    with k.window(20 << 20, np.uint8) as w, k.window(9 << 20, np.uint8) as v:
        w.local[-1] = v.local[-1] = 1
    assert sum(held.chunk.nbytes for held in k._arena._held) <= 30 << 20


def test_sizes_that_no_machine_has_are_refused_on_the_spot(k: pr.Communicator) -> None:
    for shape in (2**62, 2**70, (2**40, 2**20)):
        for make in (k.window, k.signal):
            with pytest.raises(ValueError, match=r"bytes a rank are more than there can be"):
                make(shape)
    with pytest.raises(TypeError, match=r"window: dtype .* cannot be a window's"):
        k.window(2, np.dtype(("f4", (3,))))
    assert k._arena._made == 0


def test_algorithm_mesh_needs_memory_too(
    make_communicator: MakeCommunicator, comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    k = make_communicator()
    if k.size == 1:
        return
    with monkeypatch.context() as patch:
        patch.setattr(arena, "_zero", lambda region: False)
        with pytest.raises(pr.WindowMemoryError):
            k.allreduce(np.ones(5), algorithm="mesh")
    assert (k.allreduce(np.ones(5), algorithm="mesh") == k.size).all()
    assert (k.allreduce(np.ones(100_000), algorithm="mesh") == k.size).all()
    assert (k.allreduce(np.ones(5), algorithm="mesh") == k.size).all()


@several
def test_windows_closed_at_another_moment_than_a_peers_do_not_move_mesh(
    make_communicator: MakeCommunicator, comm: Any
) -> None:
    """What ranks have closed so far is compared when a window is made, and matters to nothing else."""
    k = make_communicator()
    windows = [k.window(1000) for _ in range(4)]
    for number, w in enumerate(windows):
        if number % k.size == k.rank:
            w.close()
        total = k.allreduce(np.full(1000 * (number + 1), 1.0 + k.rank), algorithm="mesh")
        assert (total == sum(range(1, k.size + 1))).all()
        w.close()
    k.window(5).close()


@several
def test_shared_memory_across_nodes_is_refused(
    make_communicator: MakeCommunicator, comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that say they are each on a node of their own."""

    class Apart(MPI.Intracomm):
        def Split_type(self, kind: int, *rest: Any) -> Any:
            return comm.Split(comm.rank)

    for transport in ("shared", None):
        k = make_communicator(transport=transport)
        k._arena._comm = Apart(k._comm)
        if transport == "shared":
            with pytest.raises(ValueError, match=r"transport 'shared' needs all \d ranks on one node"):
                k.window(3)
        else:
            assert k.window(3).transport == os_transport()
        k._arena._comm = k._comm


def os_transport() -> str:
    """What placement alone would choose for ranks apart."""
    return "rma"
