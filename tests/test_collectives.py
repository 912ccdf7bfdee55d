"""The three collectives by every algorithm, over MPI: results bit for bit, inputs untouched, nothing written beside."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import (
    ALGORITHMS,
    COLLECTIVES,
    DEFINED,
    LAYOUTS,
    MODES,
    REDUCTIONS,
    REFUSED,
    Guarded,
    as_dtype,
    assert_same,
    assert_same_everywhere,
    call,
    everybody,
    expect,
    offsets,
    partition,
    run_checked,
    serves,
)

import pyreduce as pr
from pyreduce import ops

MPI = pytest.importorskip("mpi4py.MPI")

SEGMENT_BYTES = 64  # 16 float32 elements a block
# Where what None chooses would only run one of these again.
CHOSEN = ["naive", "ring", "circulant", "pairwise", "mesh", "hierarchical", "native"]
NATIVE_MAY_REFUSE = ["float16", "int8", "int16", "uint8", "uint16"]  # not every MPI has them, or has them right
MakeCommunicator = Callable[..., pr.Communicator]


def counts_around_segments(nranks: int) -> list[int]:
    """Rows of 4 bytes: the small ones of every test, and those around one and three segments a block."""
    least = sorted({0, 1, nranks - 1, nranks, nranks + 1, 2 * nranks + 1})
    segment = SEGMENT_BYTES // 4 * nranks
    return [*least, segment - 1, segment, segment + 1, 3 * segment, 3 * segment + nranks + 1, 7 * segment + 1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("collective", REDUCTIONS)
def test_every_op_and_dtype(communicator: pr.Communicator, comm: Any, collective: str, algorithm: str | None) -> None:
    for op, dtype in DEFINED:
        rows = 2 * comm.size + 1 + len(op)
        if not serves(algorithm, op, dtype):
            with pytest.raises(pr.Unsupported, match=f"{collective}: native cannot serve this call: .*use algorithm="):
                run_checked(communicator, collective, dtype, rows, op=op, algorithm=algorithm)
        elif algorithm == "native" and dtype in NATIVE_MAY_REFUSE:
            run_or_refuse(communicator, comm, collective, dtype, op, rows)
        else:
            run_checked(communicator, collective, dtype, rows, op=op, algorithm=algorithm)


def run_or_refuse(c: pr.Communicator, comm: Any, collective: str, dtype: str, op: str, rows: int) -> None:
    """Whether an MPI serves a dtype rightly is its own affair, but all ranks must say the same."""
    refused = None
    try:
        run_checked(c, collective, dtype, rows, op=op, algorithm="native")
    except pr.Unsupported as error:
        refused = str(error)
    assert len(set(comm.allgather(refused is None))) == 1
    assert refused is None or "use algorithm=" in refused


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_allgather_of_every_dtype(communicator: pr.Communicator, algorithm: str | None) -> None:
    for dtype in ops.DTYPES:
        for mode in ("given", "allocated"):
            run_checked(communicator, "allgather", dtype, 2 * communicator.size + 1, mode=mode, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_undefined_pairs_are_refused_and_harmless(communicator: pr.Communicator, algorithm: str | None) -> None:
    rank, size = communicator.rank, communicator.size
    for op, dtype in REFUSED:
        x = everybody(dtype, (5,), size)[rank]
        for collective in REDUCTIONS:
            with pytest.raises(
                TypeError, match=rf"{collective}: op {op} is not defined for.*\(rank {rank} of {size}\)"
            ):
                call(communicator, collective, x, op=op, algorithm=algorithm)
    run_checked(communicator, "allreduce", "int32", 5, algorithm=algorithm)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("algorithm", CHOSEN)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_counts_around_segments(
    make_communicator: MakeCommunicator, comm: Any, collective: str, algorithm: str | None, in_flight: int
) -> None:
    c = make_communicator(segment_bytes=SEGMENT_BYTES, in_flight=in_flight)
    for rows in counts_around_segments(comm.size):
        run_checked(c, collective, "float32", rows, algorithm=algorithm, seed=in_flight)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("algorithm", CHOSEN)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_ways_to_say_where_the_result_goes(
    communicator: pr.Communicator, collective: str, algorithm: str | None, mode: str
) -> None:
    if collective == "allgather" and mode == "same array twice":
        return  # test_allgather_of_the_same_array_twice
    for rows in (0, 1, communicator.size, 5 * communicator.size + 2, 131):
        for dtype in ("float32", "bfloat16") if algorithm != "native" else ("float32", "int32"):
            run_checked(communicator, collective, dtype, rows, algorithm=algorithm, mode=mode)


@pytest.mark.parametrize("mode", ["given", "in place"])
@pytest.mark.parametrize("algorithm", CHOSEN)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_layouts(communicator: pr.Communicator, collective: str, algorithm: str | None, mode: str) -> None:
    for row_shape in ((), (3, 2)):
        for index, layout in enumerate(LAYOUTS):
            for output in (layout, LAYOUTS[index - 1], "contiguous"):
                run_checked(
                    communicator, collective, "float32", 4 * communicator.size + 1, algorithm=algorithm,
                    row_shape=row_shape, mode=mode, layouts=(layout, output), times=1,
                )  # fmt: skip


@pytest.mark.parametrize("algorithm", CHOSEN)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_broadcast_input(communicator: pr.Communicator, collective: str, algorithm: str | None) -> None:
    """Stride 0: many rows that are one."""
    size, rank = communicator.size, communicator.rank
    rows = everybody("int32", (1, 3), size)
    spread = [np.broadcast_to(row, (2, 3) if collective == "allgather" else (2 * size, 3)) for row in rows]
    for _ in range(2):
        got = call(communicator, collective, spread[rank], algorithm=algorithm)
        if collective == "allgather":
            assert_same(got, np.concatenate([x.copy() for x in spread]))
        else:
            want = sum(spread[1:], spread[0].copy())
            assert_same(got, want if collective == "allreduce" else want[2 * rank : 2 * rank + 2])


def test_allgather_of_the_same_array_twice(communicator: pr.Communicator) -> None:
    run_checked(communicator, "allgather", "float32", 11, mode="same array twice")


def uneven_counts(nranks: int) -> list[tuple[int, ...]]:
    """Zeros first, last, everywhere and nowhere; one rank with nearly everything; very uneven."""
    return [
        (0,) * nranks,
        (1,) * nranks,
        (0,) * (nranks - 1) + (67,),
        (67,) + (0,) * (nranks - 1),
        tuple(3 * rank for rank in range(nranks)),
        tuple([3, 0, 50, 1][rank % 4] for rank in range(nranks)),
        tuple(2 ** (7 - 2 * (rank % 4)) for rank in range(nranks)),
    ]


@pytest.mark.parametrize("mode", ["given", "allocated", "in place"])
@pytest.mark.parametrize("algorithm", CHOSEN)
@pytest.mark.parametrize("collective", ["reduce_scatter", "allgather"])
def test_explicit_counts(communicator: pr.Communicator, collective: str, algorithm: str | None, mode: str) -> None:
    for counts in uneven_counts(communicator.size):
        for row_shape in ((), (3,)):
            run_checked(
                communicator, collective, "float32", sum(counts), algorithm=algorithm, mode=mode, counts=counts,
                row_shape=row_shape,
            )  # fmt: skip


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_buffers_longer_than_counts(communicator: pr.Communicator, algorithm: str | None) -> None:
    """With explicit counts the rows beyond them are not looked at, nor written."""
    size, rank = communicator.size, communicator.rank
    counts = tuple([3, 0, 5, 2][r % 4] for r in range(size))
    start, own, total = offsets(counts)[rank], counts[rank], sum(counts)
    inputs = everybody("int64", (total + 4,), size)
    whole = expect("naive", "reduce_scatter", "SUM", [x[:total] for x in inputs], counts)
    source = Guarded((total + 4,), "int64").fill(inputs[rank])
    target = Guarded((own + 3,), "int64").fill(np.arange(own + 3) - 99)
    got = communicator.reduce_scatter(source.view, target.view, counts=counts, algorithm=algorithm)
    assert_same(got, whole[start : start + own])
    assert_same(target.view[own:].copy(), np.arange(own + 3)[own:] - 99)
    source.check_unchanged()
    target.check_guards()

    block = Guarded((own + 2,), "int64").fill(inputs[rank][: own + 2])
    target = Guarded((total + 3,), "int64").fill(np.arange(total + 3) - 99)
    got = communicator.allgather(block.view, target.view, counts=counts, algorithm=algorithm)
    assert_same(got, np.concatenate([x[:n] for x, n in zip(inputs, counts, strict=True)]))
    assert_same(target.view[total:].copy(), np.arange(total + 3)[total:] - 99)
    block.check_unchanged()
    target.check_guards()


@pytest.mark.parametrize("algorithm", CHOSEN)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_row_shapes(communicator: pr.Communicator, collective: str, algorithm: str | None) -> None:
    for row_shape in ((), (3,), (2, 2), (0,), (1, 0, 2)):
        for rows in (0, communicator.size - 1, 2 * communicator.size + 1, 40):
            for mode in ("given", "allocated", "in place"):
                run_checked(
                    communicator,
                    collective,
                    "float64",
                    rows,
                    algorithm=algorithm,
                    row_shape=row_shape,
                    mode=mode,
                    times=1,
                )


@pytest.mark.parametrize("algorithm", CHOSEN)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_any_alignment(communicator: pr.Communicator, collective: str, algorithm: str | None) -> None:
    """Buffers off their natural alignment by odd numbers of elements, and of bytes."""
    for dtype in ("int8", "int16", "float32", "float64", "complex128"):
        size = as_dtype(dtype).itemsize
        if not serves(algorithm, "SUM", dtype):
            continue
        for shift in (size, 3 * size, 1, 5):
            for mode in ("given", "in place"):
                run_checked(communicator, collective, dtype, 37, algorithm=algorithm, mode=mode, shift=shift, times=1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_zero_dimensional_allreduce(communicator: pr.Communicator, algorithm: str | None) -> None:
    rank, size = communicator.rank, communicator.size
    for scalar in (np.array(rank + 2.0), rank + 2.0):  # plain numbers are taken as well
        got = communicator.allreduce(scalar, algorithm=algorithm)
        assert got.shape == ()
        assert got == sum(r + 2.0 for r in range(size))


# ---------------------------------------------------------------------------------------------------- the bits


def random_floats(dtype: str, rows: int, nranks: int, seed: int = 0) -> list[np.ndarray]:
    """Floats of very different sizes, so that every change of order shows."""
    rng = np.random.default_rng([rows, nranks, seed])
    return [(rng.normal(size=rows) * 10.0 ** rng.uniform(-3, 3, rows)).astype(as_dtype(dtype)) for _ in range(nranks)]


def reduce_in_rank_order(inputs: list[np.ndarray]) -> np.ndarray:
    """``functools.reduce(numpy.add, inputs)``; 16-bit floats in float32, rounded once."""
    if inputs[0].dtype.itemsize > 2:
        return functools.reduce(np.add, inputs)
    return functools.reduce(np.add, [x.astype(np.float32) for x in inputs]).astype(inputs[0].dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_naive_is_functools_reduce(make_communicator: MakeCommunicator, comm: Any, dtype: str) -> None:
    for rows in (1, 53, 400):
        inputs = random_floats(dtype, rows, comm.size)
        want = reduce_in_rank_order(inputs)
        start, own = offsets(partition(rows, comm.size))[comm.rank], partition(rows, comm.size)[comm.rank]
        for segment_bytes in (4, 64, 1 << 20):
            c = make_communicator(segment_bytes=segment_bytes, algorithm="naive")
            for _ in range(2):
                assert_same(c.allreduce(inputs[comm.rank]), want)
                assert_same(c.reduce_scatter(inputs[comm.rank]), want[start : start + own])


@pytest.mark.parametrize("collective", REDUCTIONS)
@pytest.mark.parametrize("op", ["SUM", "AVG", "PROD"])
def test_ring_folds_in_the_order_that_verification_reports(
    make_communicator: MakeCommunicator, comm: Any, collective: str, op: str
) -> None:
    for dtype in ("float32", "float64", "float16", "bfloat16", "complex64"):
        for segment_bytes, in_flight in ((16, 1), (64, 3), (100, 2), (1 << 20, 2)):
            c = make_communicator(segment_bytes=segment_bytes, in_flight=in_flight, algorithm="ring")
            run_checked(c, collective, dtype, 203, op=op, algorithm="ring", seed=5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_all_ranks_and_all_runs_have_the_same_bits(
    make_communicator: MakeCommunicator, comm: Any, algorithm: str | None, dtype: str
) -> None:
    inputs = random_floats(dtype, 777, comm.size)
    first = None
    for settings in ({"segment_bytes": 64, "in_flight": 3}, {"segment_bytes": 64, "in_flight": 3}, {}):
        c = make_communicator(**settings)
        for _ in range(5):
            try:
                got = c.allreduce(inputs[comm.rank], algorithm=algorithm)
            except pr.Unsupported:  # this MPI has no float16
                assert algorithm == "native"
                return
            first = got if first is None else first
            assert_same(got, first)
    assert_same_everywhere(comm, first)


@pytest.mark.parametrize("collective", REDUCTIONS)
def test_deterministic_folds_in_rank_order(make_communicator: MakeCommunicator, comm: Any, collective: str) -> None:
    c = make_communicator(deterministic=True, segment_bytes=1 << 16)
    rank, size = comm.rank, comm.size
    for rows in (7, 3000, 300_000):
        inputs = random_floats("float32", rows, size)
        start, own = offsets(partition(rows, size))[rank], partition(rows, size)[rank]
        block = slice(None) if collective == "allreduce" else slice(start, start + own)
        assert_same(call(c, collective, inputs[rank]), reduce_in_rank_order(inputs)[block])
        assert_same(c.allgather(inputs[rank]), np.concatenate(inputs))
    for algorithm in ("ring", "native"):
        with pytest.raises(
            ValueError, match=rf"{collective}: .*does not fold in rank order.*\(rank {rank} of {size}\)"
        ):
            call(c, collective, inputs[rank], algorithm=algorithm)
        assert_same(c.allgather(inputs[rank], algorithm=algorithm), np.concatenate(inputs))
    assert_same(call(c, collective, inputs[rank], algorithm="naive"), reduce_in_rank_order(inputs)[block])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("collective", REDUCTIONS)
def test_integers_wrap(make_communicator: MakeCommunicator, comm: Any, collective: str, algorithm: str | None) -> None:
    """So many elements that the MPI's vectorised loops run, and that None chooses native."""
    # A bug as of now under Open MPI, whose op/avx component adds int8, int16, uint8 and uint16 with saturation: 127
    # where the sum is 133 - 256, silently. native_refuses should refuse SUM of these (choose then takes the ring).
    c = make_communicator()
    for dtype in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
        for op in ("SUM", "PROD"):
            if algorithm == "native" and dtype in NATIVE_MAY_REFUSE:
                run_or_refuse(c, comm, collective, dtype, op, 10_000)
            else:
                run_checked(c, collective, dtype, 10_000, op=op, algorithm=algorithm, times=1)


@pytest.mark.parametrize("op", ["MIN", "MAX"])
@pytest.mark.parametrize("algorithm", ["naive", "ring", "mesh", None])
def test_nan_reaches_every_rank(communicator: pr.Communicator, comm: Any, algorithm: str | None, op: str) -> None:
    for culprit in range(comm.size):
        x = np.arange(9, dtype=np.float32) - 3 * comm.rank
        if comm.rank == culprit:
            x[culprit::4] = np.nan
        got = communicator.allreduce(x, op=op, algorithm=algorithm)
        assert np.isnan(got[culprit::4]).all()
        assert np.isnan(got).sum() == len(got[culprit::4])


# ----------------------------------------------------------------------------------------------- what it costs


@pytest.mark.parametrize("settings", [{}, {"segment_bytes": 64, "in_flight": 3}, {"message_bytes": 7}], ids=str)
def test_ring_sends_the_least_bytes(make_communicator: MakeCommunicator, comm: Any, settings: dict[str, int]) -> None:
    c = make_communicator(**settings)
    size, calls = comm.size, 3
    for rows in (size, 30 * size):
        c.stats.clear()
        for _ in range(calls):
            c.reduce_scatter(np.arange(rows, dtype=np.float64) + comm.rank, algorithm="ring")
            c.allreduce(np.arange(rows, dtype=np.float64) + comm.rank, algorithm="ring")
        whole = rows * 8
        scattered, reduced = c.stats["reduce_scatter", "ring"], c.stats["allreduce", "ring"]
        assert scattered.calls == reduced.calls == calls
        assert scattered.bytes_sent == scattered.bytes_received == calls * whole * (size - 1) // size
        assert reduced.bytes_sent == reduced.bytes_received == calls * 2 * whole * (size - 1) // size
        assert scattered.rounds == calls * (size - 1)
        assert reduced.rounds == calls * 2 * (size - 1)
        assert scattered.wait_seconds >= 0


def test_naive_sends_all_to_all(communicator: pr.Communicator, comm: Any) -> None:
    for collective in REDUCTIONS:
        call(communicator, collective, np.arange(100, dtype=np.int16) * comm.rank, algorithm="naive")
        stats = communicator.stats[collective, "naive"]
        assert stats.bytes_sent == stats.bytes_received == 200 * (comm.size - 1)
        assert stats.rounds == (comm.size > 1)


# ------------------------------------------------------------------------------------ several, and the functions


@pytest.mark.parametrize("check", ["light", "full", "off"])
def test_a_long_random_mixture(make_communicator: MakeCommunicator, comm: Any, check: str) -> None:
    """Hundreds of calls of every kind, turn about on communicators with different settings."""
    turns = [
        make_communicator(check=check),
        make_communicator(check=check, segment_bytes=64, in_flight=3),
        make_communicator(check=check, segment_bytes=40, in_flight=1, message_bytes=7),
    ]
    halves = comm.Split(comm.rank % 2)
    turns.append(make_communicator(halves, check=check, segment_bytes=128))
    rng = np.random.default_rng(comm.size)
    pairs = [pair for pair in DEFINED if pair[1] != "longdouble"]
    for number in range(300 if check == "light" else 60):
        op, dtype = pairs[rng.integers(len(pairs))]
        algorithm = ALGORITHMS[rng.integers(len(ALGORITHMS))]
        collective = COLLECTIVES[rng.integers(len(COLLECTIVES))]
        turn = rng.integers(len(turns))
        if algorithm == "native" and (not serves(algorithm, op, dtype) or dtype in NATIVE_MAY_REFUSE):
            algorithm = "ring"
        if turn == 2 and algorithm in ("native", None):  # too long for its message limit
            algorithm = "naive"
        rows, row_shape = int(rng.choice([0, 1, 2, 5, 17, 100, 1500])), [(), (3,)][rng.integers(2)]
        run_checked(
            turns[turn], collective, dtype, rows, op=op, algorithm=algorithm, row_shape=row_shape,
            mode=MODES[rng.integers(4)], seed=number, times=1,
        )  # fmt: skip
    halves.Free()


def test_functions_keep_one_communicator_for_each_mpi_communicator(comm: Any) -> None:
    from pyreduce.collectives import cached_communicator

    mine = comm.Dup()
    kept = cached_communicator(mine)
    rank, size = comm.rank, comm.size
    inputs = everybody("float64", (11, 2), size)
    total = expect("ring", "allreduce", "SUM", inputs)
    start, own = offsets(partition(11, size))[rank], partition(11, size)[rank]
    for _ in range(2):
        assert_same(pr.allreduce(inputs[rank], comm=mine, algorithm="ring"), total)
        block = pr.reduce_scatter(inputs[rank], comm=mine, algorithm="naive", op=pr.MAX)
        assert_same(block, np.maximum.reduce(inputs)[start : start + own])
        assert_same(pr.allgather(block, comm=mine), np.maximum.reduce(inputs))
        out = np.empty((11, 2))
        assert pr.allreduce(inputs[rank], out, comm=mine, op=MPI.SUM, algorithm="naive", timeout=20) is out
    assert cached_communicator(mine) is kept
    assert kept.stats["allreduce", "ring"].calls == 2
    assert cached_communicator(comm) is not kept
    mine.Free()
    with pytest.raises(ValueError, match="allreduce: this communicator is closed"):
        kept.allreduce(inputs[rank])


def test_functions_default_to_the_world(world: Any) -> None:
    x = np.arange(3) + 10 * world.rank
    assert_same(pr.allreduce(x), np.arange(3) * world.size + 10 * sum(range(world.size)))
    assert_same(pr.allgather(x), np.concatenate([np.arange(3) + 10 * r for r in range(world.size)]))
    assert (
        pr.reduce_scatter(x, op="max").tolist()
        == (np.arange(3) + 10 * (world.size - 1))[
            slice(*np.cumsum([0, *partition(3, world.size)])[world.rank : world.rank + 2])
        ].tolist()
    )


def test_user_messages_and_ours_never_meet(communicator: pr.Communicator, comm: Any) -> None:
    """A receive of anything from anybody, open on the user's communicator during calls."""
    inbox = np.zeros(1)
    request = comm.Irecv([inbox, MPI.DOUBLE], MPI.ANY_SOURCE, MPI.ANY_TAG)
    for algorithm in ALGORITHMS:
        run_checked(communicator, "allreduce", "float64", 50, algorithm=algorithm)
    came_early = request.Test()
    comm.Barrier()
    comm.Isend([np.array([1.5 + comm.rank]), MPI.DOUBLE], (comm.rank + 1) % comm.size).Wait()
    request.Wait()
    assert not came_early
    assert inbox[0] == 1.5 + (comm.rank - 1) % comm.size


def test_communicators_of_every_kind(comm: Any, make_communicator: MakeCommunicator) -> None:
    backwards = comm.Split(0, -comm.rank)
    alone = comm.Split(comm.rank)
    for mpi_comm in (backwards, alone, MPI.COMM_SELF):
        c = make_communicator(mpi_comm, segment_bytes=64)
        for collective in COLLECTIVES:
            run_checked(c, collective, "float32", 45)
    backwards.Free()
    alone.Free()


@pytest.mark.parametrize("algorithm", ["naive", "ring", "direct", "circulant", "recursive_doubling", "native"])
def test_python_makes_the_same_calls_where_the_core_cannot(
    make_communicator: MakeCommunicator, comm: Any, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """Calls in one segment run in C; if the MPI's functions cannot be found, in the interpreter of the others."""
    outcomes = []
    limit = None if algorithm == "native" else 200  # bytes of a message
    for found in (True, False):
        if not found:
            monkeypatch.setattr("pyreduce.execute.lend", lambda: False)
        c = make_communicator(message_bytes=limit, algorithm=algorithm, nodes=str(comm.size))
        results = []
        for rows in (0, 1, comm.size, 3 * comm.size + 1, 40 * comm.size):
            x = ((np.arange(rows * 3) + comm.rank) / 7).reshape(rows, 3)
            for op in ("SUM", "AVG"):
                results.append(c.allreduce(x, op=op))
                if algorithm != "recursive_doubling":
                    results.append(c.reduce_scatter(x, op=op))
                    results.append(c.allgather(results[-1]))
            with c.allreduce_init(x, y := np.empty_like(x)) as request:
                for _ in range(3):
                    results.append(request().copy())
                request.start()
                results.append(request.wait())
            requests = [c.iallreduce(x * k, y * 0) for k in range(3)]
            results += [request.wait() for request in reversed(requests)]
        stats = {key: (s.calls, s.rounds, s.bytes_sent, s.bytes_received) for key, s in c.stats.items()}
        outcomes.append(([result.tobytes() for result in results], stats))
    assert outcomes[0] == outcomes[1]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("nodes", ["3", "1+2", None])
def test_ranks_whose_programs_differ_cut_the_same_segments(
    make_communicator: MakeCommunicator, comm: Any, nodes: str | None
) -> None:
    """With recursive_doubling on 3 ranks one has no scratch, and the other two more than others."""
    x = np.arange(393_215.0) + comm.rank
    c = make_communicator(nodes=nodes, in_flight=8, algorithm="recursive_doubling")
    assert_same(c.allreduce(x, op="max"), np.arange(393_215.0) + 2)
