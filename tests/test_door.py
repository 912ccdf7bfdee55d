"""The short way of repeated plain calls: whatever changes between two calls, results and errors are the long way's."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import offsets, partition
from test_shared import door_calls

import pyreduce as pr
from pyreduce._core import ffi, lib

MPI = pytest.importorskip("mpi4py.MPI")
MakeCommunicator = Callable[..., pr.Communicator]
several = pytest.mark.ranks(2, 3, 4)


def check_allreduce(c: pr.Communicator, x: np.ndarray, y: np.ndarray, short: bool, **options: Any) -> None:
    """One call with fresh contents; whether it went the short way, and wrote the right result where it should."""
    number, before = c.next_call() % 50, door_calls(c)
    pattern = np.arange(x.size).reshape(x.shape) % 5
    x.flags.writeable = True
    x[...] = pattern + number + c.rank
    x.flags.writeable = False
    if not np.shares_memory(x, y):
        y[...] = 99
    y.flags.writeable = True
    got = c.allreduce(x, y, **options)
    assert got is y or type(y) is not np.ndarray
    assert np.array_equal(np.asarray(y), c.size * (pattern + number) + sum(range(c.size))), (x.shape, x.dtype, options)
    assert door_calls(c) - before == short, (x.shape, x.dtype, x.flags, options)
    x.flags.writeable = True


def test_arrays_that_change_between_calls(make_communicator: MakeCommunicator) -> None:
    c = make_communicator(transport="shared")
    x, y = np.empty(6), np.empty(6)
    check_allreduce(c, x, y, short=False)
    check_allreduce(c, x, y, short=True)
    for _ in range(3):
        check_allreduce(c, np.empty(6), np.empty(6), short=True)
    for shape, dtype in [
        ((7,), "f8"), ((2, 3), "f8"), ((3, 2), "f8"), ((6,), "f4"), ((6,), "i8"), ((), "f8"), ((0,), "f8"),
        ((1, 1, 2, 3), "f8"), ((100_000,), "f8"), ((6,), "longdouble"), ((6,), "f2"),
    ]:  # fmt: skip
        for short in (False, True, True):
            check_allreduce(c, np.empty(shape, dtype), np.empty(shape, dtype), short)
        check_allreduce(c, x, y, short=True)
    for _ in range(2):  # more dimensions than a door knows, a subclass: never
        check_allreduce(c, np.empty((1, 2, 1, 3, 1)), np.empty((1, 2, 1, 3, 1)), short=False)
        check_allreduce(c, np.empty(6).view(np.recarray), np.empty(6), short=False)
        check_allreduce(c, np.empty(6), np.empty(6).view(np.memmap), short=False)
    check_allreduce(c, x, y, short=True)


def test_arrays_that_lie_in_other_ways(make_communicator: MakeCommunicator) -> None:
    """Strided, in Fortran's order, not aligned, next to each other, the same twice."""
    c = make_communicator(transport="shared")
    x, y = np.empty((2, 3)), np.empty((2, 3))
    check_allreduce(c, x, y, short=False)
    wide, tall = np.full((2, 7), 5.0), np.full((2, 7), 5.0)
    for _ in range(2):
        check_allreduce(c, wide[:, :6:2], y, short=False)
        check_allreduce(c, x, tall[:, 1::2], short=False)
        check_allreduce(c, np.empty((2, 3), order="F"), y, short=False)
        check_allreduce(c, x, np.empty((3, 2)).T, short=False)
        check_allreduce(c, x[::-1], y, short=False)
        check_allreduce(c, x, y, short=True)
    assert (tall[:, ::2] == 5).all()
    memory = np.empty(97, np.uint8)
    first, second = memory[1:49].view("f8").reshape(2, 3), memory[49:].view("f8").reshape(2, 3)
    check_allreduce(c, first, second, short=True)
    check_allreduce(c, second, first, short=True)
    number = door_calls(c)
    for _ in range(3):
        y[...] = 2
        assert c.allreduce(y, y) is y
        assert (y == 2 * c.size).all()
    assert door_calls(c) == number + 3
    y[...] = 2
    assert (c.allreduce(pr.IN_PLACE, y) == 2 * c.size).all()
    assert door_calls(c) == number + 4


def test_a_shape_that_is_set_between_calls(make_communicator: MakeCommunicator) -> None:
    c = make_communicator(transport="shared")
    x, y = np.empty(6), np.empty(6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for shape in ((6,), (3, 2), (6, 1)):
            x.shape = y.shape = shape
            check_allreduce(c, x, y, short=False)
            check_allreduce(c, x, y, short=True)
        x.shape = (6,)
        with pytest.raises(ValueError, match=r"recvbuf is \(6, 1\), sendbuf is \(6,\)"):
            c.allreduce(x, y)
        y.shape = (6,)
    check_allreduce(c, x, y, short=True)


def test_what_is_wrong_is_told_as_the_long_way_tells_it(make_communicator: MakeCommunicator) -> None:
    c = make_communicator(transport="shared")
    x, y, memory = np.ones(6), np.empty(6), np.ones(8)
    locked = np.empty(6)
    locked.flags.writeable = False
    scatter = np.empty(partition(6, c.size)[c.rank])
    for _ in range(2):
        c.allreduce(x, y)
        c.reduce_scatter(x, scatter)
        c.allgather(scatter, y)
    for collective, given, result in (
        ("allreduce", (memory[:6], memory[1:7]), locked),
        ("allreduce", (memory[2:], memory[:6]), locked),
        ("reduce_scatter", (memory[:6], memory[1 : 1 + len(scatter)]), locked[: len(scatter)]),
        ("allgather", (memory[1 : 1 + len(scatter)] if c.rank == 0 else memory[: len(scatter)], memory[:6]), locked),
    ):
        call, number = getattr(c, collective), door_calls(c)
        source = {"allgather": scatter}.get(collective, x)
        for kind, text, arrays in (
            (ValueError, "read-only", (source, result)),
            (ValueError, "sendbuf and recvbuf overlap", given),
            (ValueError, "recvbuf", (source, np.empty((len(result), 2)))),
            (TypeError, "must be the same", (source, np.empty(len(result), "f4"))),
            (TypeError, "is a list", ([1.0] * len(source), y)),
            (TypeError, "is a list", (source, [1.0] * len(result))),
            (TypeError, "masked array", (np.ma.ones(len(source)), y)),
            (TypeError, "NoneType", (None, y)),
            (TypeError, "", (source.astype("M8[s]"), np.empty(len(result), "M8[s]"))),
            (TypeError, "native byte order", (source.astype(">f8"), np.empty(len(result), ">f8"))),
            (TypeError, "", (source.astype(object), np.empty(len(result), object))),
        ):
            with pytest.raises(kind, match=f"{collective}: .*{text}"):
                call(*arrays)
        assert door_calls(c) == number
    assert (memory == 1).all()
    check_allreduce(c, x, y, short=True)
    assert c.reduce_scatter(np.ones(6), scatter) is scatter
    assert (scatter == c.size).all()


def test_all_collectives_ops_and_algorithms_have_doors(make_communicator: MakeCommunicator) -> None:
    c = make_communicator(transport="shared")
    counts = partition(11, c.size)
    first, own = offsets(counts)[c.rank], counts[c.rank]
    start = 0
    for i in range(4):
        x = np.arange(11.0) + i
        block = np.empty(own)
        assert c.reduce_scatter(x, block) is block
        assert (block == c.size * x[first : first + own]).all()
        whole = np.empty(11)
        assert c.allgather(x[first : first + own], whole) is whole
        assert (whole == x).all()
        for op, want in [
            (pr.SUM, c.size * x), ("sum", c.size * x), ("SUM", c.size * x),
            (pr.AVG, x), ("max", x), (pr.PROD, x**c.size),
        ]:  # fmt: skip
            assert (c.allreduce(x, np.empty(11), op=op) == want).all(), op
        assert (c.allreduce(x, np.empty(11), algorithm="shared") == c.size * x).all()
        before = door_calls(c)
        assert (c.allreduce(x, np.empty(11), algorithm="naive") == c.size * x).all()
        assert (c.reduce_scatter(x, np.empty(own), counts=counts) == c.size * x[first : first + own]).all()
        assert (c.allreduce(x, np.empty(11), timeout=20) == c.size * x).all()
        assert (c.allreduce(x) == c.size * x).all()
        z = x.copy()
        assert (c.reduce_scatter(z, z)[:own] == c.size * x[first : first + own]).all()
        assert door_calls(c) == before + (i > 0)
        if i == 0:
            start = door_calls(c)
    assert door_calls(c) == start + 3 * 10
    for bad in ([pr.SUM], {"op": 1}, bytearray(b"sum"), None, 3, "summ"):
        with pytest.raises((TypeError, ValueError), match="allreduce: "):
            c.allreduce(np.ones(11), np.empty(11), op=bad)
    for bad in ([pr.SUM], {"op": 1}):
        with pytest.raises(TypeError):
            c.allreduce(np.ones(11), np.empty(11), op=bad)
        with pytest.raises(TypeError):
            c.reduce_scatter(np.ones(11), np.empty(own), op=bad)
    for bad in (["shared"], {}):
        with pytest.raises((TypeError, ValueError)):
            c.allgather(np.ones(own), np.empty(11), algorithm=bad)  # type: ignore[arg-type]
    assert (c.allreduce(np.ones(11), np.empty(11)) == c.size).all()
    full = make_communicator(transport="shared", check="full")
    for _ in range(3):
        assert (full.allreduce(np.ones(3), np.empty(3)) == c.size).all()
    assert door_calls(full) == 0


def test_ops_of_mpi_go_either_way(make_communicator: MakeCommunicator) -> None:
    """Some versions of mpi4py cannot hash them."""
    MPI = pytest.importorskip("mpi4py.MPI")
    c = make_communicator(transport="shared")
    x = np.arange(11.0)
    for _ in range(3):
        for op, want in ((MPI.SUM, c.size * x), (MPI.MIN, x)):
            assert (c.allreduce(x, np.empty(11), op=op) == want).all()
            assert (c.iallreduce(x, np.empty(11), op=op).wait() == want).all()
            assert (c.allreduce_init(x, np.empty(11), op=op)() == want).all()
            scattered = c.reduce_scatter(x, np.empty(partition(11, c.size)[c.rank]), op=op)
            assert set(scattered) <= set(want)


def test_a_closed_communicator_has_no_doors(make_communicator: MakeCommunicator) -> None:
    c = make_communicator(transport="shared")
    x, y, block = np.ones(8), np.empty(8), np.empty(partition(8, c.size)[c.rank])

    def call_all() -> list[Callable[[], Any]]:
        return [lambda: c.allreduce(x, y), lambda: c.reduce_scatter(x, block), lambda: c.allgather(block, y)]

    for call in 2 * call_all():
        call()
    c.close()
    for call in call_all():
        y[:] = 3
        with pytest.raises(ValueError, match="this communicator is closed"):
            call()
        assert (y == 3).all()


@several
def test_a_broken_communicator_has_no_doors(make_communicator: MakeCommunicator) -> None:
    c = make_communicator(transport="shared")
    x, y, block = np.ones(12), np.empty(12), np.empty(partition(12, c.size)[c.rank])
    calls: list[Callable[[], Any]] = [
        lambda: c.allreduce(x, y),
        lambda: c.reduce_scatter(x, block),
        lambda: c.allgather(block, y),
    ]
    for call in 2 * calls:
        call()
    other = (np.ones(13), np.empty(13))
    for _ in range(2):
        c.allreduce(*other)
    with pytest.raises(pr.MismatchError, match="shape: ") as info:
        c.allreduce(*(other if c.rank == 0 else (x, y)))
    number = door_calls(c)
    for call in calls:
        y[:] = 3
        with pytest.raises(pr.BrokenCommunicatorError, match="broken since an earlier call") as later:
            call()
        assert later.value.__cause__ is info.value
        assert (y == 3).all()
    assert door_calls(c) == number


@several
def test_a_second_thread_is_refused_and_the_first_one_completes(make_communicator: MakeCommunicator, comm: Any) -> None:
    MPI = pytest.importorskip("mpi4py.MPI")
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        pytest.skip("needs an MPI that takes calls of several threads")
    c = make_communicator(transport="shared")
    x, y = c.empty(5), np.empty(5)
    x[:] = 1
    for _ in range(2):
        c.allreduce(x, y)
    engine = c._plans.engine
    assert engine is not None
    told: list[BaseException | None] = []

    def intrude() -> None:
        """Once the first thread is inside, and then once it waits: try everything, and only then let the peers come."""
        for inside in (lambda: lib.pr_shared_current(engine.handle) != ffi.NULL, lambda: c._pending.inside != 0):
            while not inside():
                time.sleep(0)
            for call in (
                lambda: c.allreduce(np.ones(5), np.empty(5)),
                lambda: c.allreduce(np.ones(5)),
                lambda: c.iallreduce(np.ones(5), np.empty(5)),
                lambda: c.allreduce(np.ones(6), np.empty(6), op="max"),
                lambda: c.empty(5),
                lambda: c.window(5),
            ):
                try:
                    call()
                    told.append(None)
                except BaseException as error:
                    told.append(error)
        for rank in range(1, comm.size):
            comm.send("come", rank)

    for i in range(10):
        comm.Barrier()
        told.clear()
        x[:] = i
        if comm.rank == 0:
            thread = threading.Thread(target=intrude)
            thread.start()
            assert c.allreduce(x, y) is y
            thread.join()
            assert len(told) == 12
            for error in told:
                assert isinstance(error, RuntimeError), told
                assert "another thread is in a call" in str(error)
        else:
            assert comm.recv(source=0) == "come"
            assert c.allreduce(x, y) is y
        assert (y == i * comm.size).all()
        assert (c.allreduce(x, y) == i * comm.size).all()
    before = door_calls(c)
    for _ in range(3):
        assert (c.allreduce(x, y) == 9 * comm.size).all()
    assert door_calls(c) == before + 3


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 4096, 100_001])
def test_calls_in_place_go_through_doors(make_communicator: MakeCommunicator, comm: Any, rows: int) -> None:
    """Also the second of two calls whose arrays look alike; with IN_PLACE, mpi4py's, or the same array twice."""
    c = make_communicator(transport="shared")
    whole = (np.arange(rows * 2.0).reshape(rows, 2) + 1) * (comm.rank + 1)
    total = whole / (comm.rank + 1) * (comm.size * (comm.size + 1) / 2)
    starts = [0, *np.cumsum(partition(rows, comm.size))]
    own = slice(starts[comm.rank], starts[comm.rank + 1])
    front = own.stop - own.start
    for turn in range(3):
        for given in (pr.IN_PLACE, MPI.IN_PLACE, None):
            before = door_calls(c)
            x = whole.copy()
            assert c.allreduce(x if given is None else given, x) is x
            np.testing.assert_array_equal(x, total)
            x = whole.copy()
            block = c.reduce_scatter(x if given is None else given, x)
            assert block.base is x or block is x
            np.testing.assert_array_equal(block, total[own])
            np.testing.assert_array_equal(x[front:], whole[front:])
            x = np.full_like(total, -1)
            x[own] = total[own]
            assert c.allgather(x if given is None else given, x) is x
            np.testing.assert_array_equal(x, total)
            if turn or given is not pr.IN_PLACE:
                assert door_calls(c) == before + 3
    x, y = whole.copy(), np.zeros_like(whole)
    np.testing.assert_array_equal(c.allreduce(x, y), total)  # not in place, through the same door
    if front < rows:
        with pytest.raises(ValueError, match="recvbuf has"):
            c.reduce_scatter(x, y)
        with pytest.raises(ValueError, match="sendbuf has"):
            c.allgather(x, y)
    with pytest.raises(ValueError, match="IN_PLACE needs recvbuf"):
        c.allreduce(pr.IN_PLACE)
