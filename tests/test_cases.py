"""Rows of CASES.md: faults that hurt users of other libraries, in the rows' own numbers.

Element i of rank r's input is ``1000 * r + i`` unless a row says otherwise. Up to 4 ranks over MPI, more in the
simulator. Rows 14 and 15 (calls that do not match) are tested with the other mismatches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import (
    ALGORITHMS,
    COLLECTIVES,
    REDUCTIONS,
    Guarded,
    assert_same,
    assert_same_everywhere,
    call,
    offsets,
    partition,
    run_checked,
    serves,
)

import pyreduce as pr
from pyreduce import algorithms, simulate

PROGRAMS = ["naive", "ring", "circulant", "mesh"]
MakeCommunicator = Callable[..., pr.Communicator]
in_and_out_of_place = pytest.mark.parametrize("in_place", [False, True], ids=["out of place", "in place"])
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
every_program = pytest.mark.parametrize("algorithm", PROGRAMS)


def case_input(rank: int, shape: int | tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
    return (1000 * rank + np.arange(np.prod(shape, dtype=int))).astype(dtype).reshape(shape)


def case_total(nranks: int, shape: int | tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
    return np.sum([case_input(rank, shape, dtype) for rank in range(nranks)], axis=0).astype(dtype)


def play(algorithm: str, collective: str, inputs: list[np.ndarray], **options: Any) -> list[np.ndarray]:
    return simulate.run(algorithms.get(algorithm).programs(collective, len(inputs)), inputs, **options)


def scatter(c: pr.Communicator, x: np.ndarray, own: int, in_place: bool, **options: Any) -> np.ndarray:
    """A reduce_scatter between guards, in place or not; the rest of the buffer must stay as it is."""
    source = Guarded(x.shape, x.dtype).fill(x)
    if not in_place:
        target = Guarded((own, *x.shape[1:]), x.dtype)
        got = c.reduce_scatter(source.view, target.view, **options)
        source.check_unchanged()
        target.check_guards()
        return got
    got = c.reduce_scatter(pr.IN_PLACE, source.view, **options)
    source.check_guards()
    assert_same(source.view[own:].copy(), np.ascontiguousarray(x[own:]))
    return got[:own]


# -------------------------------------------------------------------------------------------------------- row 1


@every_algorithm
@in_and_out_of_place
def test_row_1_counts_of_one(communicator: pr.Communicator, algorithm: str | None, in_place: bool) -> None:
    size = communicator.size
    for _ in range(2):
        got = scatter(communicator, np.ones(17, np.int32), 1, in_place, counts=[1] * size, algorithm=algorithm)
        assert got.tolist() == [size]
    target = np.array([-7, -8, -9], np.int32)
    communicator.reduce_scatter(np.ones(17, np.int32), target, counts=[1] * size, algorithm=algorithm)
    assert target.tolist() == [size, -8, -9]


@every_program
@pytest.mark.parametrize("nranks", range(1, 17))
def test_row_1_in_the_simulator(algorithm: str, nranks: int) -> None:
    blocks = play(algorithm, "reduce_scatter", [np.ones(17, np.int32)] * nranks, counts=[1] * nranks)
    assert [block.tolist() for block in blocks] == [[nranks]] * nranks


# ------------------------------------------------------------------------------------------------- rows 2 and 3


@every_algorithm
def test_row_2_in_place_reads_and_writes_its_own_bytes_only(
    communicator: pr.Communicator, algorithm: str | None
) -> None:
    size, rank = communicator.size, communicator.rank
    for _ in range(2):
        got = scatter(communicator, case_input(rank, size * 5), 5, True, algorithm=algorithm)
        assert_same(got, case_total(size, size * 5)[5 * rank : 5 * rank + 5])


@pytest.mark.ranks(4)
@every_algorithm
@in_and_out_of_place
def test_row_3_a_block_each(communicator: pr.Communicator, algorithm: str | None, in_place: bool) -> None:
    rank = communicator.rank
    for dtype in (np.int64, np.float32):
        x = np.array([1, 2, 3, 4], dtype) * (rank + 1)
        got = scatter(communicator, x, 1, in_place, algorithm=algorithm)
        assert got.tolist() == [[10, 20, 30, 40][rank]]


# ------------------------------------------------------------------------------------------------- rows 4 and 5


@every_algorithm
@in_and_out_of_place
def test_row_4_fewer_elements_than_ranks(communicator: pr.Communicator, algorithm: str | None, in_place: bool) -> None:
    size, rank = communicator.size, communicator.rank
    x = case_input(rank, size - 1)
    got = communicator.allreduce(pr.IN_PLACE if in_place else x, x if in_place else None, algorithm=algorithm)
    assert_same(got, case_total(size, size - 1))


@every_program
@pytest.mark.parametrize("nranks", [2, 3, 4, 5, 6, 7, 8])
def test_row_4_in_the_simulator(algorithm: str, nranks: int) -> None:
    for got in play(algorithm, "allreduce", [case_input(rank, nranks - 1) for rank in range(nranks)]):
        assert_same(got, case_total(nranks, nranks - 1))


ROW_5 = [(73, [19, 18, 18, 18]), (10, [3, 3, 2, 2]), (5, [2, 1, 1, 1]), (0, [0, 0, 0, 0])]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("n", "lengths"), ROW_5)
@every_algorithm
def test_row_5_the_round_trip_covers_everything(
    communicator: pr.Communicator, algorithm: str | None, n: int, lengths: list[int]
) -> None:
    block = communicator.reduce_scatter(case_input(communicator.rank, n), algorithm=algorithm)
    assert len(block) == lengths[communicator.rank]
    assert_same(communicator.allgather(block, algorithm=algorithm), case_total(4, n))
    full = np.full(n, -1.0)
    assert_same(communicator.allgather(block, full, algorithm=algorithm), case_total(4, n))


@every_program
@pytest.mark.parametrize(("n", "lengths"), ROW_5)
def test_row_5_in_the_simulator(algorithm: str, n: int, lengths: list[int]) -> None:
    blocks = play(algorithm, "reduce_scatter", [case_input(rank, n) for rank in range(4)])
    assert [len(block) for block in blocks] == lengths
    for full in play(algorithm, "allgather", blocks):
        assert_same(full, case_total(4, n))


# ------------------------------------------------------------------------------------------------- rows 6 and 7


@every_algorithm
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_row_6_block_k_is_rank_k_s(communicator: pr.Communicator, collective: str, algorithm: str | None) -> None:
    for rows in (communicator.size, 2 * communicator.size + 1):
        run_checked(communicator, collective, "int64", rows, algorithm=algorithm)


@every_program
@pytest.mark.parametrize("nranks", [3, 5, 6, 7, 8, 16, 24])
def test_row_6_in_the_simulator(algorithm: str, nranks: int) -> None:
    for n in (nranks, 2 * nranks + 1):
        inputs, total = [case_input(rank, n) for rank in range(nranks)], case_total(nranks, n)
        for block, start, own in zip(
            play(algorithm, "reduce_scatter", inputs), offsets(partition(n, nranks)), partition(n, nranks), strict=True
        ):
            assert_same(block, total[start : start + own])
        assert all((got == total).all() for got in play(algorithm, "allreduce", inputs))
        blocks = [case_input(rank, 1 + rank % 3) for rank in range(nranks)]
        assert all((got == np.concatenate(blocks)).all() for got in play(algorithm, "allgather", blocks))


@pytest.mark.ranks(4)
@every_algorithm
def test_row_7_empty_rows_and_empty_blocks(communicator: pr.Communicator, algorithm: str | None) -> None:
    rank, counts = communicator.rank, (3, 0, 5, 0)
    for _ in range(2):
        assert communicator.allgather(np.zeros((1, 0, 2)), algorithm=algorithm).shape == (4, 0, 2)
        assert communicator.reduce_scatter(np.zeros((4, 0, 2)), algorithm=algorithm).shape == (1, 0, 2)
        block = communicator.reduce_scatter(case_input(rank, 8), counts=counts, algorithm=algorithm)
        start = offsets(counts)[rank]
        assert_same(block, case_total(4, 8)[start : start + counts[rank]])
        assert_same(communicator.allgather(block, counts=counts, algorithm=algorithm), case_total(4, 8))
        assert_same(communicator.allgather(block, algorithm=algorithm), case_total(4, 8))


# ------------------------------------------------------------------------------------------------- rows 8 and 9


@pytest.mark.ranks(4)
@every_algorithm
@pytest.mark.parametrize("layout", ["axes swapped", "every other row", "one row broadcast"])
def test_row_8_layout_is_respected(communicator: pr.Communicator, algorithm: str | None, layout: str) -> None:
    rank = communicator.rank
    change: Callable[[np.ndarray], np.ndarray] = {
        "axes swapped": lambda x: x.swapaxes(1, 2),
        "every other row": lambda x: np.concatenate([x, x + 7])[::2],
        "one row broadcast": lambda x: np.broadcast_to(x[1], (4, 3, 2)),
    }[layout]
    strided = [change(np.arange(24.0).reshape(4, 3, 2) + 1000 * r) for r in range(4)]
    before = strided[rank].copy()
    want = np.sum([x.copy() for x in strided], axis=0)[rank : rank + 1]
    for _ in range(2):
        assert_same(communicator.reduce_scatter(strided[rank], algorithm=algorithm), np.ascontiguousarray(want))
        assert_same(communicator.reduce_scatter(before, algorithm=algorithm), np.ascontiguousarray(want))
    assert_same(strided[rank].copy(), before)


@pytest.mark.ranks(2)
@every_algorithm
@in_and_out_of_place
def test_row_9_only_the_column_changes(communicator: pr.Communicator, algorithm: str | None, in_place: bool) -> None:
    rank = communicator.rank
    matrix = case_input(rank, (2, 2))
    column = matrix[:, 0]
    communicator.allreduce(pr.IN_PLACE if in_place else column.copy(), column, algorithm=algorithm)
    assert_same(matrix, np.array([[1000, 1000 * rank + 1], [1004, 1000 * rank + 3]], float))


# ----------------------------------------------------------------------------------------------- rows 10 and 11


@every_algorithm
@in_and_out_of_place
def test_row_10_avg_is_the_mean(communicator: pr.Communicator, algorithm: str | None, in_place: bool) -> None:
    size, rank = communicator.size, communicator.rank
    for _ in range(2):
        x = np.arange(1, 4 * size + 1, dtype=np.float32)
        got = scatter(communicator, x, 4, in_place, op=pr.AVG, algorithm=algorithm)
        assert_same(got, x[4 * rank : 4 * rank + 4])
        mine = x * (rank + 1)
        got = communicator.allreduce(pr.IN_PLACE if in_place else mine, mine if in_place else None, op="avg")
        assert_same(got, x * np.float32((size + 1) / 2))


@every_algorithm
def test_row_10_an_unknown_op_is_an_error_everywhere(communicator: pr.Communicator, algorithm: str | None) -> None:
    for collective in REDUCTIONS:
        with pytest.raises(ValueError, match=f"{collective}: unknown op 'MEAN': choose from SUM"):
            call(communicator, collective, np.arange(3.0), op="MEAN", algorithm=algorithm)
    assert communicator.allreduce(np.arange(3.0), algorithm=algorithm)[2] == 2 * communicator.size


@pytest.mark.ranks(4)
@pytest.mark.parametrize("algorithm", ["naive", "ring", None])
def test_row_11_the_mean_of_float16_does_not_overflow(communicator: pr.Communicator, algorithm: str | None) -> None:
    x = np.full(9, 20000, np.float16)
    for _ in range(2):
        assert (communicator.allreduce(x, op="AVG", algorithm=algorithm) == 20000).all()
        assert (communicator.reduce_scatter(x, op="AVG", algorithm=algorithm) == 20000).all()
        assert np.isposinf(communicator.allreduce(x, op="SUM", algorithm=algorithm)).all()


@every_program
def test_row_11_in_the_simulator(algorithm: str) -> None:
    inputs = [np.full(9, 20000, np.float16)] * 4
    assert all((got == 20000).all() for got in play(algorithm, "allreduce", inputs, op="AVG"))
    assert all(np.isposinf(got).all() for got in play(algorithm, "allreduce", inputs, op="SUM"))


# ----------------------------------------------------------------------------------------------- rows 12 and 13

ROW_12 = [(ml_dtypes.bfloat16, 256, 264), (np.float16, 2048, 2056)]


@pytest.mark.parametrize(("dtype", "first", "want"), ROW_12, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("collective", REDUCTIONS)
def test_row_12_small_addends_are_not_lost(dtype: Any, first: int, want: int, collective: str) -> None:
    inputs = [np.full(19, first if rank == 0 else 1, dtype) for rank in range(8)]
    assert all((got == np.array(want, dtype)).all() for got in play("naive", collective, inputs))


@pytest.mark.parametrize(("dtype", "first", "_want"), ROW_12, ids=["bfloat16", "float16"])
def test_row_12_over_mpi(communicator: pr.Communicator, dtype: Any, first: int, _want: int) -> None:
    x = np.full(19, first if communicator.rank == 0 else 1, dtype)
    want = np.float32(first + communicator.size - 1).astype(dtype)
    for algorithm in ("naive", "mesh", "shared"):
        assert (communicator.allreduce(x, algorithm=algorithm) == want).all()


@pytest.mark.ranks(4)
@every_algorithm
def test_row_13_ranks_agree_on_every_placement(communicator: pr.Communicator, comm: Any, algorithm: str | None) -> None:
    placements = np.array(list(itertools.permutations([1e8, 1.0, -1e8, 1.0])), np.float32)
    mine = placements[:, comm.rank].copy()
    first = communicator.allreduce(mine, algorithm=algorithm)
    for _ in range(99):
        assert_same(communicator.allreduce(mine, algorithm=algorithm), first)
    assert_same_everywhere(comm, first)
    if algorithm in ("naive", "mesh", "shared"):
        assert first[0] == 1.0
        assert_same(first, np.add.reduce(placements.T.copy()))


# ----------------------------------------------------------------------------------------------- rows 22 and 23


@every_algorithm
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_row_22_byte_orders_and_structures(
    communicator: pr.Communicator, collective: str, algorithm: str | None
) -> None:
    """On a little-endian machine, which is what wheels are built for."""
    rank, size = communicator.rank, communicator.size
    refused = {">f8": "native byte order", "x i4, y f8": "fields one by one"}
    for spelled, advice in refused.items():
        dtype = np.dtype([("x", "i4"), ("y", "f8")]) if "," in spelled else np.dtype(spelled)
        with pytest.raises(TypeError, match=rf"^{collective}: dtype .*{advice}.*\(rank {rank} of {size}\)$"):
            call(communicator, collective, np.zeros(size, dtype), algorithm=algorithm)
    got = call(communicator, collective, np.arange(size, dtype="<f8"), algorithm=algorithm)
    want = {
        "allgather": [*range(size)] * size,
        "allreduce": [size * i for i in range(size)],
        "reduce_scatter": [size * rank],
    }
    assert got.tolist() == want[collective]


@every_algorithm
@in_and_out_of_place
def test_row_23_folds_start_from_the_first_operand(
    communicator: pr.Communicator, algorithm: str | None, in_place: bool
) -> None:
    size, rank = communicator.size, communicator.rank
    for dtype in ("int32", "float64"):
        for op, sign, want in (("MIN", 1, 1), ("MAX", -1, -1), ("PROD", 1, np.prod(np.arange(1, size + 1)))):
            if not serves(algorithm, op, dtype):
                continue
            x = np.full(2 * size, sign * (rank + 1)).astype(dtype)
            got = scatter(communicator, x, 2, in_place, op=op, algorithm=algorithm)
            assert got.tolist() == [want, want]


# ----------------------------------------------------------------------------------------------- rows 24 and 25


@pytest.mark.parametrize(
    ("variable", "launcher"), [("OMPI_COMM_WORLD_SIZE", "Open MPI"), ("PMI_SIZE", "MPICH or Intel MPI")]
)
def test_row_24_another_mpi_s_launcher_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, launcher: str) -> None:
    mpi = pytest.importorskip("mpi4py.MPI")
    from pyreduce import launcher as launchers

    for other in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(other, raising=False)
    library = SimpleNamespace(COMM_WORLD=mpi.COMM_SELF, Get_library_version=lambda: "Some MPI 7.1, built today\nmore")
    monkeypatch.setattr(launchers, "MPI", library)
    monkeypatch.setattr(launchers, "_warned", False)
    launchers.warn_if_foreign_launcher()  # nothing to warn of
    monkeypatch.setenv(variable, "4")
    with pytest.warns(RuntimeWarning, match=f"4 processes by the mpiexec of {launcher}.*mpi4py loaded Some MPI 7.1"):
        launchers.warn_if_foreign_launcher()
    launchers.warn_if_foreign_launcher()  # once is enough


@pytest.mark.parametrize(("message_bytes", "rows"), [(2**16, 150_001), (7, 301)])
@pytest.mark.parametrize("algorithm", PROGRAMS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_row_25_long_messages_are_cut(
    make_communicator: MakeCommunicator, comm: Any, collective: str, algorithm: str, message_bytes: int, rows: int
) -> None:
    for settings in ({}, {"segment_bytes": 3 * message_bytes + 1, "in_flight": 3}):
        c = make_communicator(message_bytes=message_bytes, **settings)
        for mode in ("given", "in place"):
            run_checked(c, collective, "float32", rows, algorithm=algorithm, mode=mode, times=1)
        counts = tuple(rows if rank == comm.size - 1 else 0 for rank in range(comm.size))
        if collective != "allreduce":
            run_checked(c, collective, "float32", rows, algorithm=algorithm, counts=counts, times=1)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_row_25_choosing_for_the_user_heeds_the_limit(
    make_communicator: MakeCommunicator, comm: Any, collective: str
) -> None:
    c = make_communicator(message_bytes=2**12)
    for rows in (100, 5000, 150_001):
        run_checked(c, collective, "float32", rows, times=1)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_row_25_native_refuses_what_it_cannot_cut(
    make_communicator: MakeCommunicator, comm: Any, collective: str
) -> None:
    c = make_communicator(message_bytes=100)
    x = case_input(comm.rank, 25 * comm.size)
    with pytest.raises(pr.Unsupported, match=f"{collective}: native .*longer than 100 bytes.*use algorithm=None"):
        call(
            c,
            collective,
            x,
            algorithm="native",
            **({"counts": [len(x)] * comm.size} if collective == "allgather" else {}),
        )
    run_checked(c, collective, "float32", 25 * comm.size, algorithm="ring")
