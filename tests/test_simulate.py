"""The simulator: all ranks in one process, on arrays against NumPy, and on symbols. No MPI, not even imported."""

from __future__ import annotations

import doctest
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from helpers import (
    COLLECTIVES,
    DEFINED,
    REDUCTIONS,
    REFUSED,
    as_dtype,
    assert_same,
    clean_environment,
    everybody,
    expect,
    offsets,
    partition,
)

import pyreduce as pr
from pyreduce import algorithms, simulate
from pyreduce.simulate import Simulation
from pyreduce.verify import fold_symbols

PROGRAMS = ["naive", "ring", "mesh"]
RANKS = [1, 2, 3, 4, 5, 7, 8, 13]


def play(algorithm: str, collective: str, inputs: list[np.ndarray], **options: Any) -> list[np.ndarray]:
    before = [x.copy() for x in inputs]
    first = simulate.run(algorithms.get(algorithm).programs(collective, len(inputs)), inputs, **options)
    again = simulate.run(algorithms.get(algorithm).programs(collective, len(inputs)), inputs, **options)
    for x, copy, one, other in zip(inputs, before, first, again, strict=True):
        assert_same(np.ascontiguousarray(x), np.ascontiguousarray(copy))
        assert_same(one, other)
    return first


def check(algorithm: str, collective: str, inputs: list[np.ndarray], op: str = "SUM", counts: Any = None) -> None:
    """Against the fold order that verification reports, bit for bit."""
    nranks = len(inputs)
    options = {"op": op} if counts is None else {"op": op, "counts": counts}
    outputs = play(algorithm, collective, inputs, **options)
    whole = expect(algorithm, collective, op, inputs, counts)
    shares = partition(len(inputs[0]), nranks) if counts is None else counts
    for got, start, own in zip(outputs, offsets(shares), shares, strict=True):
        assert_same(got, whole if collective == "allreduce" else whole[start : start + own])


@pytest.mark.parametrize("nranks", RANKS)
@pytest.mark.parametrize("algorithm", PROGRAMS)
@pytest.mark.parametrize("collective", REDUCTIONS)
def test_reductions_of_many_sizes(collective: str, algorithm: str, nranks: int) -> None:
    for rows in sorted({0, 1, nranks - 1, nranks, nranks + 1, 2 * nranks + 1}):
        for row_shape in ((), (2, 2), (0,)):
            inputs = everybody("float64", (rows, *row_shape), nranks)
            if collective == "allreduce" and row_shape:  # the simulator cuts by rows, calls over MPI by elements
                outputs = play(algorithm, collective, inputs)
                assert all(np.allclose(got, np.sum(inputs, axis=0)) for got in outputs)
            else:
                check(algorithm, collective, inputs)


@pytest.mark.parametrize("nranks", RANKS)
@pytest.mark.parametrize("algorithm", PROGRAMS)
def test_allgather(algorithm: str, nranks: int) -> None:
    for row_shape in ((), (3,), (0,)):
        blocks = [x[: rank % 4] for rank, x in enumerate(everybody("float32", (3, *row_shape), nranks))]
        for got in play(algorithm, "allgather", blocks):
            assert_same(got, np.concatenate(blocks))


@pytest.mark.parametrize(("op", "dtype"), DEFINED)
def test_every_op_and_dtype(op: str, dtype: str) -> None:
    for algorithm in PROGRAMS:
        for collective in REDUCTIONS:
            for nranks in (2, 5):
                check(algorithm, collective, everybody(dtype, (2 * nranks + 1,), nranks), op)


@pytest.mark.parametrize(("op", "dtype"), DEFINED)
def test_one_rank_alone(op: str, dtype: str) -> None:
    """One operand is a copy, for logical ops too."""
    for algorithm in PROGRAMS:
        for collective in REDUCTIONS:
            check(algorithm, collective, everybody(dtype, (9,), 1), op)


@pytest.mark.parametrize(("op", "dtype"), REFUSED)
def test_undefined_pairs_are_refused(op: str, dtype: str) -> None:
    with pytest.raises(TypeError, match=f"op {op} is not defined for dtype {dtype}"):
        play("ring", "allreduce", everybody(dtype, (4,), 3), op=op)


@pytest.mark.parametrize("algorithm", PROGRAMS)
def test_explicit_counts(algorithm: str) -> None:
    for counts in ((3, 0, 5, 2), (0, 0, 0, 0), (0, 0, 0, 10), (10, 0, 0, 0)):
        check(algorithm, "reduce_scatter", everybody("float32", (sum(counts), 2), 4), counts=counts)
        blocks = [x[:n] for x, n in zip(everybody("float32", (10, 2), 4), counts, strict=True)]
        for got in play(algorithm, "allgather", blocks, counts=counts):
            assert_same(got, np.concatenate(blocks))


@pytest.mark.parametrize("algorithm", PROGRAMS)
def test_strided_inputs(algorithm: str) -> None:
    strided = [x[::2].T for x in everybody("float64", (8, 6), 3)]
    packed = [np.ascontiguousarray(x) for x in strided]
    whole = expect(algorithm, "reduce_scatter", "SUM", packed)
    for got, start in zip(play(algorithm, "reduce_scatter", strided), (0, 2, 4), strict=True):
        assert_same(got, whole[start : start + 2])


def test_wrong_arguments() -> None:
    programs = algorithms.get("ring").programs("reduce_scatter", 2)
    x = np.arange(4.0)
    with pytest.raises(ValueError, match="simulate: 3 inputs for 2 ranks"):
        simulate.run(programs, [x, x, x])
    with pytest.raises(ValueError, match=r"need an axis of rows; pass x\.reshape\(1\)"):
        simulate.run(programs, [np.array(1.0), np.array(2.0)])
    with pytest.raises(ValueError, match="input of rank 1 has 3 rows, needs 4"):
        simulate.run(programs, [x, x[:3]])
    with pytest.raises(ValueError, match="counts has 3 entries, needs 2"):
        simulate.run(programs, [x, x], counts=[1, 1, 1])
    with pytest.raises(ValueError, match="unknown op"):
        simulate.run(programs, [x, x], op="mean")


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("algorithm", PROGRAMS)
def test_symbols_and_watching(algorithm: str, collective: str) -> None:
    """Any values with a fold will do; a watcher sees every rank after every round."""
    nranks = 5
    programs = algorithms.get(algorithm).programs(collective, nranks)
    held = [[rank] if collective == "allgather" else range(nranks) for rank in range(nranks)]
    seen: list[tuple[int, int]] = []
    outputs = Simulation(
        programs,
        [dict.fromkeys(blocks, rank) for rank, blocks in enumerate(held)],
        fold_symbols,
        watch=lambda rank, number, memory: seen.append((rank, number)),
    ).run()
    assert sorted(seen) == [(p.rank, number + 1) for p in programs for number in range(len(p.rounds))]
    for rank, output in enumerate(outputs):
        assert sorted(output) == ([rank] if collective == "reduce_scatter" else list(range(nranks)))
        for block, order in output.items():
            if collective == "allgather":
                assert order == block
            else:
                start = block + 1 if algorithm == "ring" else 0
                assert order == tuple((start + hop) % nranks for hop in range(nranks))


def test_the_worked_example_of_the_ring() -> None:
    """The table in algorithms/ring.py: what each rank holds after each round, P = 5."""
    after: dict[tuple[int, int], list[tuple[int, Any]]] = {}

    def watch(rank: int, number: int, memory: dict[tuple[str, int], tuple[int, Any]]) -> None:
        after[rank, number] = [cell for (space, _), cell in memory.items() if space != "input"]

    programs = algorithms.get("ring").programs("reduce_scatter", 5)
    Simulation(programs, [dict.fromkeys(range(5), rank) for rank in range(5)], fold_symbols, watch=watch).run()
    assert (3, (4, 0)) in after[0, 1]
    assert (0, (1, 2, 3)) in after[3, 2]
    assert (4, (0, 1, 2, 3)) in after[3, 3]
    for rank in range(5):
        assert (rank, tuple((rank + 1 + hop) % 5 for hop in range(5))) in after[rank, 4]


def test_examples_in_the_documentation() -> None:
    from pyreduce import blocks

    for module in (simulate.interpreter, simulate.events, simulate.network, blocks):
        assert doctest.testmod(module).failed == 0


WITHOUT_MPI = """
import sys
sys.modules["mpi4py"] = None  # any import of it raises ImportError
import numpy as np
import pyreduce as pr, pyreduce.simulate, pyreduce.verify
assert not [name for name in sys.modules if name.startswith("mpi4py.")]
x = [np.arange(4) + 10 * rank for rank in range(2)]
ring = pr.algorithms.get("ring")
print(pyreduce.simulate.run(ring.programs("reduce_scatter", 2), x, op=pr.MAX))
print(pyreduce.verify.verify("ring", ring.rounds, "allreduce", 3).orders)
pr.register_algorithm("mine", ring.rounds)
try:
    pr.allreduce
except ImportError:
    print("allreduce needs mpi4py")
"""


def test_mpi4py_is_not_needed() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_MPI], env=clean_environment(), capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "[array([10, 11]), array([12, 13])]", "((1, 2, 0), (2, 0, 1), (0, 1, 2))", "allreduce needs mpi4py",
    ]  # fmt: skip


def test_mpi4py_is_not_imported() -> None:
    code = "import sys, pyreduce, pyreduce.simulate, pyreduce.verify; print([m for m in sys.modules if 'mpi4py' in m])"
    result = subprocess.run(
        [sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True, timeout=100
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_the_package_offers_what_it_names() -> None:
    for name in pr.__all__:
        if name not in pr._NEEDS_MPI:
            assert getattr(pr, name) is not None
    assert set(pr._NEEDS_MPI) <= set(pr.__all__)
    assert dir(pr) == sorted(pr.__all__)
    with pytest.raises(AttributeError, match="no attribute 'spam'"):
        pr.spam  # noqa: B018
    assert as_dtype("float32") == np.float32
