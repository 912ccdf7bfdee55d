"""The shared-memory engine: where it switches, long mixtures, the short way in, and arrays in shared memory."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import DEFINED, Guarded, as_dtype, assert_same, everybody, offsets, oracle, partition
from test_leaks import ALLOWED, grow
from test_leaks import SCALE as LEAK_SCALE

import pyreduce as pr
from pyreduce import transports
from pyreduce._core import lib
from pyreduce.algorithms import shared

MakeCommunicator = Callable[..., pr.Communicator]
ROUNDS = int(os.environ.get("STRESS_ROUNDS", 300))
FLOATS = ["float16", "bfloat16", "float32", "float64", "longdouble"]
DTYPES_BY_ARENA = {8192: FLOATS, 16384: ["bfloat16", "float64"], None: ["float16", "float32", "longdouble"]}
several = pytest.mark.ranks(2, 3, 4)


def door_calls(c: pr.Communicator) -> int:
    """Calls that have come the short way."""
    engine = c._plans.engine
    return 0 if engine is None else int(lib.pr_door_calls(engine.handle))


def slot_bytes(arena_bytes: int) -> int:
    return (arena_bytes - shared.HEAD_BYTES) // shared.SLOTS // shared.SLOT_MULTIPLE * shared.SLOT_MULTIPLE


# ------------------------------------------------------------------------------------------------- switch points


def switch_points(nranks: int, arena_bytes: int | None, itemsize: int) -> list[int]:
    """Elements of vectors at, below and above every size where the engine does something else."""
    slot = slot_bytes(arena_bytes or 1 << 20)
    share = slot // max(nranks - 1, 1) // 128 * 128 // itemsize
    whole = slot // 128 * 128 // itemsize
    edges = {104 // itemsize, min(shared.SMALL_BYTES, slot) // itemsize, slot // itemsize}
    for pieces in (1, 2, 3) if arena_bytes is not None else (1, 2):
        edges |= {pieces * share * nranks, pieces * whole * nranks if arena_bytes is not None else 0}
    return sorted({max(edge + step, 0) for edge in edges for step in (-1, 0, 1)} | {104 // itemsize * nranks})


def check_all_three(
    c: pr.Communicator, dtype: str, n: int, shifts: tuple[int, int], op: str = "SUM", in_place: bool = False
) -> None:
    """All collectives on a vector of `n` elements, between guards, against the fold in rank order."""
    inputs = everybody(dtype, (n,), c.size, n)
    want = oracle(op, list(inputs)) if c.size > 1 else inputs[0]
    counts, kind = partition(n, c.size), as_dtype(dtype)
    start, own = offsets(counts)[c.rank], counts[c.rank]
    gathered = np.concatenate([x[o : o + k] for x, o, k in zip(inputs, offsets(counts), counts, strict=True)])
    for collective, given, result in (
        ("allreduce", inputs[c.rank], want),
        ("reduce_scatter", inputs[c.rank], want[start : start + own]),
        ("allgather", inputs[c.rank][start : start + own], gathered),
    ):
        options: dict[str, Any] = {} if collective == "allgather" else {"op": op}
        if in_place:
            target = Guarded((n,), kind, shift=shifts[1])
            if collective == "allgather":
                target.view[start : start + own] = given
            else:
                target.fill(given)
            getattr(c, collective)(pr.IN_PLACE, target.view, **options)
            assert_same(target.view[: len(result)].copy(), result)
        else:
            source, target = Guarded(given.shape, kind, shift=shifts[0]), Guarded(result.shape, kind, shift=shifts[1])
            source.fill(given)
            getattr(c, collective)(source.view, target.view, **options)
            assert_same(target.view.copy(), result)
            source.check_unchanged()
        target.check_guards()


@pytest.mark.parametrize("arena_bytes", DTYPES_BY_ARENA)
def test_around_every_switch(make_communicator: MakeCommunicator, arena_bytes: int | None) -> None:
    c = make_communicator(algorithm="shared", arena_bytes=arena_bytes)
    for dtype in DTYPES_BY_ARENA[arena_bytes]:
        itemsize = as_dtype(dtype).itemsize
        points = switch_points(c.size, arena_bytes, itemsize)
        if arena_bytes is None and itemsize <= 4:  # whose folds are slow to check: what is small, and the largest
            points = [n for n in points if n * itemsize <= slot_bytes(1 << 20) // 8] + points[-1:]
        for i, n in enumerate(points):
            check_all_three(c, dtype, n, (i % 16, i * 7 % 16), "AVG" if i % 3 == 2 else "SUM", in_place=i % 2 == 1)
            if arena_bytes is not None and i % 2 == 0:
                check_all_three(c, dtype, n, (0, 0), "MAX" if i % 3 == 2 else "SUM")


@several
@pytest.mark.parametrize("dtype", ["float16", "float32", "longdouble"])
def test_every_alignment(make_communicator: MakeCommunicator, dtype: str) -> None:
    c = make_communicator(algorithm="shared", arena_bytes=8192)
    for shift in range(16):
        for n in (5, 500, 5000 if shift % 4 == 1 else 1500):
            check_all_three(c, dtype, n, (shift, 5 * shift % 16))
            check_all_three(c, dtype, n, (0, shift), in_place=True)


@pytest.mark.parametrize("in_place", [False, True], ids=["out of place", "in place"])
def test_streamed_results_of_every_op_and_dtype(
    make_communicator: MakeCommunicator, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    monkeypatch.setattr(shared, "cache_bytes", lambda: 1)
    c = make_communicator(algorithm="shared", arena_bytes=16384)
    for i, (op, dtype) in enumerate(DEFINED):
        check_all_three(c, dtype, 1 + i * 131 % 700, (i % 16, i * 3 % 16), op, in_place)
    for dtype in FLOATS:
        check_all_three(c, dtype, 9000, (3, 9), "AVG", in_place)


# ------------------------------------------------------------------------------------------------- a long mixture


def test_a_long_mixture_on_two_communicators(make_communicator: MakeCommunicator, comm: Any) -> None:
    """Sizes from nothing to many pieces, uneven counts, in place and not; every result is checked."""
    cs = [make_communicator(algorithm="shared", arena_bytes=arena) for arena in (8192, 20000)]
    lent = [c.empty(1 << 16, "u1") for c in cs]
    rng = np.random.default_rng(11)  # the same on all ranks
    operations = [pr.SUM, pr.BXOR, pr.MAX, pr.MIN]
    for i in range(ROUNDS):
        which = int(rng.integers(2))
        c, kind = cs[which], np.dtype(["u1", "i2", "i4", "i8", "u8"][rng.integers(5)])
        counts = [int(k) for k in rng.integers(0, int(rng.choice([2, 20, 300, 1500])), comm.size)]
        n, op, seed = sum(counts), operations[rng.integers(4)], int(rng.integers(1 << 30))
        in_place, in_shared = bool(rng.integers(2)), rng.integers(2, size=comm.size).astype(bool)
        inputs = [
            np.random.default_rng([seed, r]).integers(0, 256, n * kind.itemsize, np.uint8).view(kind)
            for r in range(comm.size)
        ]
        fold = {"SUM": np.add, "BXOR": np.bitwise_xor, "MAX": np.maximum, "MIN": np.minimum}[op.name]
        want = fold.reduce(np.array(inputs).reshape(comm.size, n), axis=0, dtype=kind)
        first, own = offsets(counts)[comm.rank], counts[comm.rank]
        x = inputs[comm.rank]
        if in_shared[comm.rank]:
            x = lent[which][: n * kind.itemsize].view(kind)
            x[:] = inputs[comm.rank]
        match rng.integers(3):
            case 0:
                got = c.allreduce(pr.IN_PLACE, x, op=op) if in_place else c.allreduce(x, op=op)
            case 1:
                want = want[first : first + own]
                got = c.reduce_scatter(pr.IN_PLACE, x, op=op, counts=counts) if in_place else c.reduce_scatter(
                    x, op=op, counts=counts
                )  # fmt: skip
                got = got[:own]
            case _:
                blocks = zip(inputs, offsets(counts), counts, strict=True)
                want = np.concatenate([y[o : o + k] for y, o, k in blocks])
                got = c.allgather(pr.IN_PLACE, x, counts=counts) if in_place else c.allgather(
                    x[first : first + own], counts=counts
                )  # fmt: skip
        assert np.array_equal(got, want), (i, c.rank, counts, kind, op, in_place, in_shared)
        if in_shared[comm.rank]:
            lent[which][:] = i % 251  # a peer that still read it would be wrong
        if i % 50 == comm.rank:
            time.sleep(0.002)


# ------------------------------------------------------------------------------------------------- the short way


def test_plain_repeated_calls_go_the_short_way(make_communicator: MakeCommunicator, comm: Any) -> None:
    c = make_communicator()
    x, y = np.arange(8.0) + comm.rank, np.empty(8)
    c.allreduce(x, y)
    before = door_calls(c)
    for i in range(20):
        x[:] = i
        assert c.allreduce(x, y) is y
        assert (y == i * comm.size).all()
    assert door_calls(c) == before + 20


@pytest.mark.ranks(1, 3)
def test_a_dtype_that_has_gone_is_not_taken_for_its_successor(make_communicator: MakeCommunicator) -> None:
    """Equal dtypes need not be one object; a door that knows one by its address must keep it alive."""
    c = make_communicator()
    memory = np.empty(64, "f8")
    for i in range(20):
        before = np.dtype("f8", metadata={"before": i})
        c.allreduce(np.ones(4), np.empty(4, before))
        place, others = id(before), []
        del before
        for _ in range(200):
            after = np.dtype("f4", metadata={"after": i})
            if id(after) == place:
                break
            others.append(after)
        memory[:] = 7
        x, y = np.ones(64, after)[:4], memory.view(after)[:4]
        c.allreduce(x, y)
        assert (y == c.size).all()
        assert (memory[2:] == 7).all(), "bytes outside the result were written"


@several
def test_more_shapes_than_plans_are_kept(make_communicator: MakeCommunicator, comm: Any) -> None:
    """The plans are dropped, the call at hand is not: it is counted, and found when its peers are late."""
    c = make_communicator()
    for n in range(1, 259):
        x, y = np.ones(n), np.empty(n)
        for _ in range(2):
            c.allreduce(x, y)
    comm.Barrier()
    if comm.rank == 0:
        time.sleep(0.1)
    for _ in range(2):
        assert (c.allreduce(x, y) == comm.size).all()
    assert c.stats["allreduce", "shared"].calls == 2 * 258 + 2


@several
def test_persistent_calls_outlive_the_plans(make_communicator: MakeCommunicator, comm: Any) -> None:
    c = make_communicator()
    y = np.empty(7)
    request = c.allreduce_init(np.ones(7), y)
    for n in range(1, 300):
        c.allreduce(np.ones(n))
    comm.Barrier()
    if comm.rank == 0:
        time.sleep(0.1)
    assert (request() == comm.size).all()
    request.free()


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("way", ["with a timeout", "nonblocking"])
def test_the_long_way_opens_one_door_and_counts_every_call(make_communicator: MakeCommunicator, way: str) -> None:
    c = make_communicator()
    x, y = np.ones(5), np.empty(5)
    for _ in range(600):
        if way == "nonblocking":
            c.iallreduce(x, y).wait()
        else:
            c.allreduce(x, y, timeout=20)
    assert c._in_doors == 1
    assert c.stats["allreduce", "shared"].calls == 600


@pytest.mark.ranks(1, 3)
def test_settled_calls_that_are_dropped_leave_nothing(make_communicator: MakeCommunicator) -> None:
    c = make_communicator()
    x, y = np.ones(5), np.empty(5)
    for i in range(300):
        request = c.allreduce_init(x, y)
        assert (request() == c.size).all()
        if i % 2:
            request.free()
        del request
    gc.collect()
    assert c._plans.engine is not None
    assert len(c._plans.engine.plans) < 50
    assert c.stats["allreduce", "shared"].calls == 300


# ------------------------------------------------------------------------------------------- arrays in shared memory


def lay_memory_at(addresses: list[int], nbytes: int) -> list[np.ndarray]:
    """Ordinary memory, zero, where no other lies; nothing where it cannot be had."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    read_write, private_anonymous, no_replace = 3, 0x22, 0x100000
    made = []
    for wanted in addresses:
        found = libc.mmap(wanted, nbytes, read_write, private_anonymous | no_replace, -1, 0)
        if found == wanted:
            made.append(np.frombuffer((ctypes.c_char * nbytes).from_address(found), np.uint8))
    return made


def test_memory_that_was_shared_once_is_not_taken_for_shared(make_communicator: MakeCommunicator, comm: Any) -> None:
    """A failing `empty` frees chunks as well: private memory that comes to lie there is private."""
    c = make_communicator()
    nbytes = 8 << 20
    array = c.empty(nbytes, np.uint8)
    (chunk,) = c._arrays.chunks
    bases = [chunk.peer_base(peer) for peer in range(comm.size)]
    del array, chunk
    with pytest.raises(pr.WindowMemoryError):
        c.empty(1 << 46, np.uint8)
    memory = {view.ctypes.data: view for view in lay_memory_at(bases, nbytes)}
    x = memory.get(bases[comm.rank], np.empty(nbytes, np.uint8))
    x[:] = 1
    comm.Barrier()
    all_there = comm.allreduce(len(memory) == comm.size)
    if all_there == comm.size:  # or a peer may read memory that is not there
        assert (c.allreduce(x) == comm.size).all()


@pytest.mark.ranks(1, 3)
def test_arrays_are_given_back_beside_many_that_stay(make_communicator: MakeCommunicator) -> None:
    c = make_communicator()
    kept = [c.empty(10) for _ in range(70)]

    def make_and_drop() -> int:
        for _ in range(30):
            c.empty(50_000)[:] = 1
        gc.collect()
        return sum(chunk.nbytes for chunk in c._arrays.chunks)

    before = make_and_drop()
    make_and_drop()
    assert make_and_drop() <= 2 * before
    assert len(kept) == 70


@several
def test_what_empty_refuses(make_communicator: MakeCommunicator, comm: Any) -> None:
    """On the rank that asks for it, before anything is sent."""
    c = make_communicator()
    objects = np.dtype([("a", "f8"), ("b", object)])
    wrong: list[tuple[type[Exception], str, Any, Any]] = [
        (TypeError, "holds Python objects", 3, object),
        (TypeError, "holds Python objects", 3, objects),
        (ValueError, "negative length", -1, "f8"),
        (ValueError, "negative length", (3, -2), "f8"),
        (TypeError, "must be an int or a tuple of ints", 2.5, "f8"),
        (TypeError, "must be an int or a tuple of ints", "3", "f8"),
        (TypeError, "must be an int or a tuple of ints", None, "f8"),
        (ValueError, "more than there can be", (1 << 40, 1 << 40), "f8"),
        (TypeError, "no such type", 3, "no such type"),
    ]
    for kind, text, shape, dtype in wrong[: None if comm.rank == 0 else 4]:
        with pytest.raises(kind, match=text):
            c.empty(shape, dtype)
    for dtype in ("f8", "S3", [("a", "i4"), ("b", "f4")], "M8[s]", "?"):
        assert c.empty((2, 3), dtype).dtype == np.dtype(dtype)
    with pytest.raises((TypeError, ValueError)):
        c.empty(3, timeout=-1)
    assert (c.allreduce(np.ones(3)) == comm.size).all()


def test_shared_arrays_of_all_shapes_in_all_places(make_communicator: MakeCommunicator, comm: Any) -> None:
    """Other shapes on other ranks, nothing, slices, as output, in place, and ordinary arrays on some ranks."""
    c = make_communicator(arena_bytes=16384)
    own = c.empty((comm.rank + 1, 3), np.int32)
    assert own.shape == (comm.rank + 1, 3)
    own[:] = comm.rank
    nothing = c.empty(0 if comm.rank else (0, 5))
    assert nothing.size == 0
    assert c.allreduce(nothing.reshape(-1)).size == 0
    counts = [rank + 1 for rank in range(comm.size)]
    want = np.repeat(np.arange(comm.size), counts)[:, None] * np.ones(3, int)
    assert np.array_equal(c.allgather(own, counts=counts), want)
    assert np.array_equal(c.allgather(own), want)
    if comm.rank == 0:  # only some have something
        part = c.empty(4)
    else:
        part = c.empty(())
        part[()] = 7
    for length in (9, 600, 9000):
        a, b = c.empty(length + 9), c.empty(length + 9)
        for ordinary in (False, True):  # on every second rank
            for skip in (0, 1, 9):
                x, y = a[skip : skip + length], b[skip : skip + length]
                if ordinary and comm.rank % 2:
                    x, y = np.empty(length), np.empty(length)
                lengths = partition(length, comm.size)
                first, mine = offsets(lengths)[comm.rank], lengths[comm.rank]
                values = np.arange(length) % 13 + comm.rank
                total = comm.size * (np.arange(length) % 13) + sum(range(comm.size))
                gathered = np.arange(length) % 13 + np.repeat(np.arange(comm.size), lengths)
                a[:], b[:] = 1e9, 1e9
                x[:] = values
                assert np.array_equal(c.allreduce(x, y), total)
                assert np.array_equal(c.reduce_scatter(x, y[:mine]), total[first : first + mine])
                assert np.array_equal(c.allgather(x[first : first + mine], y), gathered)
                assert np.array_equal(x, values)
                assert np.array_equal(c.allgather(pr.IN_PLACE, x), gathered)
                x[:] = values
                assert np.array_equal(c.reduce_scatter(x, x)[:mine], total[first : first + mine])
                x[:] = values
                assert np.array_equal(c.allreduce(x, x), total)
                x[:] = values
                assert np.array_equal(c.iallreduce(pr.IN_PLACE, x).wait(), total)
                if x.base is not None:  # neighbours in the same memory: one output beside its input
                    a[: length // 2] = comm.rank
                    got = c.allreduce(a[: length // 2], a[length // 2 : length // 2 * 2])
                    assert (got == sum(range(comm.size))).all()
                else:
                    assert (c.allreduce(np.full(length // 2, comm.rank * 1.0)) == sum(range(comm.size))).all()
                outside = np.concatenate((b[:skip], b[skip + length :]))
                assert (outside == 1e9).all()
    assert part.size in (1, 4)


@several
def test_an_input_may_be_overwritten_when_the_call_has_returned(make_communicator: MakeCommunicator, comm: Any) -> None:
    """Peers read it where it lies; whichever rank is late, and wherever it is late, gets what was there."""
    c = make_communicator(arena_bytes=16384)
    lent, rng = c.empty(20_000), np.random.default_rng(comm.rank)
    sizes = np.random.default_rng(5)  # the same on all ranks
    for i in range(60):
        n, late = int(sizes.choice([3, 40, 700, 5000, 20_000])), int(sizes.integers(comm.size))
        x, y = lent[:n], np.empty(n)
        x[:] = np.arange(n) + i + comm.rank
        total = comm.size * (np.arange(n) + i) + sum(range(comm.size))
        counts = partition(n, comm.size)
        first, own = offsets(counts)[comm.rank], counts[comm.rank]
        if comm.rank == late:
            time.sleep(rng.uniform(0, 0.004))
        match i % 4:
            case 0:
                got, want = c.allreduce(x, y), total
            case 1:
                got, want = c.reduce_scatter(x, y[:own]), total[first : first + own]
            case 2:
                got = c.allgather(x[first : first + own], y)
                want = np.arange(n) + i + np.repeat(np.arange(comm.size), counts)
            case _:
                request = c.iallreduce(x, y)
                if comm.rank == late:
                    time.sleep(rng.uniform(0, 0.004))
                got, want = request.wait(), total
        lent[:] = np.nan
        assert np.array_equal(got, want), (i, n, late)


def test_shared_arrays_outlive_their_communicator(make_communicator: MakeCommunicator, comm: Any) -> None:
    c = make_communicator()
    array, big = c.empty((3, 4)), c.empty(1 << 20, "u1")
    array[:], big[:] = comm.rank, comm.rank + 1
    view = big[5::7]
    del big
    c.close()
    comm.Barrier()
    assert (array == comm.rank).all()
    assert (view == comm.rank + 1).all()
    array[:], view[:] = -1.0 - comm.rank, comm.rank + 9
    comm.Barrier()
    other = make_communicator()
    fresh = other.empty((3, 4))
    fresh[:] = 5
    assert (other.allreduce(array) == -sum(range(1, comm.size + 1))).all()
    assert (array == -1 - comm.rank).all()
    assert (view == comm.rank + 9).all()
    with pytest.raises(ValueError, match="closed"):
        c.empty(3)


def test_without_shared_memory_empty_is_an_ordinary_array(make_communicator: MakeCommunicator, comm: Any) -> None:
    c = make_communicator(transport="rma")
    array = c.empty((2, 3 + comm.rank), np.float32)
    assert type(array) is np.ndarray
    assert array.flags.owndata
    assert (array.shape, array.dtype) == ((2, 3 + comm.rank), np.float32)
    assert not c._arrays.chunks
    with pytest.raises(TypeError, match="holds Python objects"):
        c.empty(3, object)
    array[:] = 1
    assert (c.allreduce(array[:, :3].copy()) == comm.size).all()
    assert not c._arrays.chunks


# --------------------------------------------------------------------------------------------- what calls take up


def calls_of_all_sizes(c: pr.Communicator, number: int, most: int) -> None:
    """All collectives, all kinds of calls, growing sizes."""
    for i in range(number):
        n = 1 + most * i // number
        x, counts = np.ones(n), partition(n, c.size)
        match i % 6:
            case 0:
                c.allreduce(x)
            case 1:
                c.reduce_scatter(x, np.empty(counts[c.rank]))
            case 2:
                c.allgather(np.ones(counts[c.rank]), x)
            case 3:
                c.allreduce(pr.IN_PLACE, x, op="max", algorithm="shared")
            case 4:
                c.iallgather(np.ones(n)).wait()
            case _:
                c.allreduce_init(x, x)().sum()


@pytest.mark.ranks(1, 3)
def test_no_window_is_made_after_the_first_call(
    make_communicator: MakeCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    class CountedWin(transports.MPI.Win):  # type: ignore[misc]
        """Counts what is asked of it."""

        @classmethod
        def Allocate_shared(cls, size: int, *rest: Any, **options: Any) -> Any:
            made.append(size)
            return transports_win.Allocate_shared(size, *rest, **options)

        @classmethod
        def Allocate(cls, size: int, *rest: Any, **options: Any) -> Any:
            made.append(size)
            return transports_win.Allocate(size, *rest, **options)

    class CountedMPI:
        """mpi4py.MPI, with another Win."""

        Win = CountedWin

        def __getattr__(self, name: str) -> Any:
            return getattr(mpi, name)

    mpi, transports_win = transports.MPI, transports.MPI.Win
    monkeypatch.setattr(transports, "MPI", CountedMPI())
    c = make_communicator(transport="shared")
    assert not made
    c.allreduce(np.ones(1))
    assert len(made) == 1
    calls_of_all_sizes(c, 204, 200_000)
    assert len(made) == 1
    assert {algorithm for _, algorithm in c.stats} == {"shared"}


def test_memory_is_flat_over_calls_of_growing_sizes(world: Any) -> None:
    calls = int(800 * LEAK_SCALE)
    with pr.Communicator(world, transport="shared") as c:
        calls_of_all_sizes(c, 40, 40_000)
        assert grow(lambda number: calls_of_all_sizes(c, number, 2_000), calls) * 10_000 / calls < ALLOWED


# --------------------------------------------------------------------------------------------------- who runs it


@pytest.mark.ranks(1, 3)
def test_the_engine_is_chosen_and_says_why(make_communicator: MakeCommunicator) -> None:
    c = make_communicator(transport="shared")
    c.allreduce(np.ones(3))
    ((key, stats),) = c.stats.items()
    assert key == ("allreduce", "shared")
    assert "one node" in stats.why


@pytest.mark.ranks(1, 3)
def test_without_shared_memory_something_else_runs_and_says_why(make_communicator: MakeCommunicator) -> None:
    c = make_communicator(transport="rma")
    assert (c.allreduce(np.ones(3)) == c.size).all()
    ((key, stats),) = c.stats.items()
    assert key[1] != "shared"
    assert "transport 'rma'" in stats.why
    with pytest.raises(pr.Unsupported, match="transport 'rma' asks for no shared memory"):
        c.allreduce(np.ones(3), algorithm="shared")
    array = c.empty(5)
    array[:] = 1
    assert (c.allreduce(array) == c.size).all()


@pytest.mark.ranks(1, 3)
def test_too_many_ranks_for_the_arena(make_communicator: MakeCommunicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "LEAST_SHARE", 1 << 20)
    c = make_communicator(arena_bytes=8192)
    for _ in range(3):
        assert (c.allreduce(np.ones(3)) == c.size).all()
    (stats,) = c.stats.values()
    assert "an arena of 8192 bytes a rank is too small" in stats.why
    with pytest.raises(pr.Unsupported, match="too small"):
        c.allreduce(np.ones(3), algorithm="shared")
    assert (c.empty(4).shape) == (4,)
