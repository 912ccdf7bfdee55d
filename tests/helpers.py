"""What the tests of collectives share: inputs, guarded buffers, expected results, and one checked call.

All ranks know all inputs, so each can work out every expected result alone.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from test_ops import DEFINED, REFUSED, as_dtype, make_inputs, mean, oracle, widen
from test_ops import assert_same as explain_difference

import pyreduce as pr
from pyreduce import algorithms, ops
from pyreduce.algorithms.hierarchical import inner_algorithm, lay_out
from pyreduce.blocks import offsets, partition
from pyreduce.selection import choose
from pyreduce.topology import Topology
from pyreduce.verify import Symbol, verify

__all__ = [
    "ALGORITHMS",
    "COLLECTIVES",
    "DEFINED",
    "MODES",
    "REDUCTIONS",
    "REFUSED",
    "Guarded",
    "as_dtype",
    "assert_result",
    "assert_same",
    "assert_same_everywhere",
    "call",
    "clean_environment",
    "everybody",
    "expect",
    "fold_orders",
    "make_inputs",
    "offsets",
    "oracle",
    "partition",
    "run_checked",
    "serves",
]

ROOT = Path(__file__).resolve().parent.parent
ALGORITHMS = ["naive", "ring", "direct", "circulant", "mesh", "shared", "hierarchical", "native", None]
HOP_BY_HOP = ["ring", "circulant", "recursive_doubling"]  # where narrow floats are rounded after every operation
REDUCTIONS = ["reduce_scatter", "allreduce"]
COLLECTIVES = [*REDUCTIONS, "allgather"]
MODES = ["given", "allocated", "in place", "in place as MPI says it", "same array twice"]
GUARD_BYTES = 72
POISON = np.random.default_rng(3).integers(0, 256, 1 << 22, np.uint8)


def clean_environment() -> dict[str, str]:
    """The environment without what launchers and settings leave there, for programs that run on their own."""
    launchers = ("PMI", "OMPI_", "PMIX_", "PRTE_", "HYD", "MPI_", "I_MPI_", "PYREDUCE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    kept["PYREDUCE_PROFILE"] = "none"
    kept["PYTHONPATH"] = os.pathsep.join([str(Path(pr.__file__).parent.parent), kept.get("PYTHONPATH", "")])
    return kept


# ------------------------------------------------------------------------------------------------ inputs and buffers


@functools.lru_cache(maxsize=256)
def everybody(dtype: str, shape: tuple[int, ...], nranks: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Every rank's input, read-only: values differ from element to element and from rank to rank."""
    inputs = tuple(x.reshape(shape) for x in make_inputs(dtype, nranks, int(np.prod(shape, dtype=int)), seed))
    for x in inputs:
        x.flags.writeable = False
    return inputs


def strides_of(layout: str, shape: tuple[int, ...], itemsize: int) -> list[int]:
    """Byte strides of an array that lies as the layout says."""

    def packed(lengths: Sequence[int], step: int = itemsize) -> list[int]:
        strides = []
        for length in reversed(lengths):
            strides.append(step)
            step *= max(length, 1)
        return strides[::-1]

    if layout == "contiguous":
        return packed(shape)
    if layout == "fortran":
        return packed(shape[::-1])[::-1]
    if layout == "strided":  # x[::2]
        return [2 * packed(shape)[0], *packed(shape)[1:]] if shape else []
    if layout == "reversed":  # x[::-1]
        return [-packed(shape)[0], *packed(shape)[1:]] if shape else []
    if layout == "swapped":  # x.swapaxes(-1, -2)
        if len(shape) < 2:
            return packed(shape)
        strides = packed([*shape[:-2], shape[-1], shape[-2]])
        return [*strides[:-2], strides[-1], strides[-2]]
    if layout == "column":  # wide[..., 1], every element apart from the next
        return packed(shape, 3 * itemsize)
    raise ValueError(layout)


LAYOUTS = ["contiguous", "fortran", "strided", "reversed", "swapped", "column"]


class Guarded:
    """An array amid random bytes, in any layout, at an offset of `shift` bytes from what NumPy would align to.

    Bytes of the array that have not been filled yet are random as well: poison.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: Any, layout: str = "contiguous", shift: int | None = None
    ) -> None:
        dtype = np.dtype(dtype)
        shift = dtype.itemsize if shift is None else shift
        strides = strides_of(layout, shape, dtype.itemsize)
        reach = [stride * (length - 1) for stride, length in zip(strides, shape, strict=True) if length]
        low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + dtype.itemsize
        start = GUARD_BYTES - GUARD_BYTES % 16 + shift - low
        nbytes = start + high + GUARD_BYTES
        self.memory = POISON[:nbytes].copy()
        assert len(self.memory) == nbytes, "larger than any test needs"
        self.view: np.ndarray = np.ndarray(shape, dtype, self.memory, start, strides)
        inside = np.zeros(nbytes, bool)
        np.ndarray((*shape, dtype.itemsize), bool, inside, start, (*strides, 1))[...] = True
        self.outside = ~inside
        self.before = self.memory.copy()

    def fill(self, values: np.ndarray) -> Guarded:
        self.view[...] = values
        self.before = self.memory.copy()
        return self

    def check_guards(self) -> None:
        before, after = self.before[self.outside], self.memory[self.outside]
        if before.tobytes() != after.tobytes():
            np.testing.assert_array_equal(after, before, "bytes outside were written")

    def check_unchanged(self) -> None:
        if self.memory.tobytes() != self.before.tobytes():
            np.testing.assert_array_equal(self.memory, self.before, "the input was written")


# ------------------------------------------------------------------------------------------------ expected results


@functools.lru_cache(maxsize=256)
def expect_of(
    algorithm: str, collective: str, op: str, dtype: str, shape: tuple[int, ...], nranks: int, seed: int,
    shares: tuple[int, ...], topology: Topology | None = None,
) -> np.ndarray:  # fmt: skip
    """`expect` for the inputs of `everybody`; for an allgather its result."""
    inputs = everybody(dtype, shape, nranks, seed)
    if collective == "allgather":
        return np.concatenate([x[o : o + n] for x, o, n in zip(inputs, offsets(shares), shares, strict=True)])
    return expect(algorithm, collective, op, inputs, shares, topology)


@functools.cache
def fold_orders(algorithm: str, collective: str, nranks: int) -> tuple[Symbol, ...]:
    """The fold order of every block, as verification reports it."""
    return verify(algorithm, algorithms.get(algorithm).rounds, collective, nranks).orders


def fold_symbol(op: str, symbol: Symbol, values: Sequence[np.ndarray], hop_by_hop: bool) -> np.ndarray:
    """Fold in the order a symbol says; `hop_by_hop` rounds narrow floats after each operation, not only at the end."""
    if isinstance(symbol, int):
        return values[symbol]
    if op == "AVG" and any(isinstance(member, tuple) for member in symbol):
        return mean(fold_symbol("SUM", symbol, widen(values), hop_by_hop), len(values), values[0].dtype)
    operands = [fold_symbol(op, member, values, hop_by_hop) for member in symbol]
    if op == "AVG" or not hop_by_hop:
        return oracle(op, operands)
    return functools.reduce(lambda a, b: oracle(op, [a, b]), operands)


def resolve(
    algorithm: str | None, collective: str, op: str, x: np.ndarray, topology: Topology, deterministic: bool
) -> str:
    """The algorithm that a call runs which names `algorithm`."""
    if algorithm is not None:
        return algorithm
    resolved = None if collective == "allgather" else ops.OPS[op]
    return choose(collective, x.nbytes, topology, resolved, x.dtype, deterministic)[0]


_topologies: WeakKeyDictionary[Any, Topology] = WeakKeyDictionary()


def topology_of(c: Any) -> Topology:
    """The nodes of a communicator; collective the first time."""
    if c not in _topologies:
        from pyreduce.launcher import find_nodes  # which knows MPI: tests that are pure get by without

        _topologies[c] = c._plans._virtual or find_nodes(c._comm)
    return _topologies[c]


def expect_between_nodes(
    collective: str, op: str, flat: Sequence[np.ndarray], counts: Sequence[int], topology: Topology
) -> np.ndarray:
    """What hierarchical must give: the sum of every node in rank order, then the order of the program between them.

    `flat` are the vectors, in one dimension; `counts` the elements of every block.
    """
    layout = lay_out(collective, counts, topology)
    values, step = (widen(flat), "SUM") if op == "AVG" else (flat, op)
    itemsize = values[0].dtype.itemsize
    nbytes = max(sum(layout.length(lane, j) for j in range(topology.nnodes)) for lane in range(layout.lanes)) * itemsize
    orders = fold_orders(inner_algorithm(collective, topology.nnodes, nbytes), collective, topology.nnodes)
    whole = np.empty(sum(counts), values[0].dtype)
    for units in layout.units:
        for order, unit in zip(orders, units, strict=True):
            for start, count in unit:
                parts = [x[start : start + count] for x in values]
                sums = [
                    fold_symbol(step, ranks if len(ranks) > 1 else ranks[0], parts, False) for ranks in topology.nodes
                ]
                whole[start : start + count] = fold_symbol(step, order, sums, True)
    return mean(whole, topology.nranks, flat[0].dtype) if op == "AVG" else whole


def serves(algorithm: str | None, op: str, dtype: str) -> bool:
    """Whether an algorithm serves a pair in reductions: `native` leaves out what MPI cannot do or does otherwise."""
    if algorithm != "native":
        return True
    if dtype == "bfloat16":
        return op == "AVG"
    if op == "SUM" and dtype in ("int8", "int16", "uint8", "uint16"):
        return False
    return not (op in ("MIN", "MAX") and dtype in ("float16", "float32", "float64", "longdouble"))


def expect(
    algorithm: str,
    collective: str,
    op: str,
    inputs: Sequence[np.ndarray],
    counts: Sequence[int] | None = None,
    topology: Topology | None = None,
) -> np.ndarray:
    """The whole reduction, all blocks of it, in the fold order of the algorithm (rank order for `native`).

    `counts` are the rows of each block of a reduce_scatter; an allreduce cuts by elements.
    """
    nranks = len(inputs)
    if nranks == 1:  # one operand is a copy, for logical ops too, as functools.reduce has it
        return inputs[0].copy()
    if collective == "allreduce":
        flat = [x.reshape(-1) for x in inputs]
        counts = partition(flat[0].size, nranks)
    else:
        flat = list(inputs)
        counts = partition(len(flat[0]), nranks) if counts is None else counts
    if algorithm == "hierarchical":
        row = int(np.prod(flat[0].shape[1:]))
        elements = [count * row for count in counts]
        nodes = topology or Topology.one_node(nranks)
        whole = expect_between_nodes(collective, op, [x.reshape(-1) for x in flat], elements, nodes)
        return whole.reshape(inputs[0].shape)
    orders = fold_orders("naive" if algorithm in ("native", "shared") else algorithm, collective, nranks)
    pieces = []
    for order, start, count in zip(orders, offsets(counts), counts, strict=True):
        pieces.append(fold_symbol(op, order, [x[start : start + count] for x in flat], algorithm in HOP_BY_HOP))
    whole = np.concatenate(pieces)
    return whole.reshape(inputs[0].shape) if collective == "allreduce" else whole


def assert_result(algorithm: str, op: str, got: np.ndarray, want: np.ndarray, inputs: Sequence[np.ndarray]) -> None:
    """Equal bits; for floats by `native`, whose fold order is unknown, equal but for rounding.

    `inputs` are every rank's contributions to `got`.
    """
    if algorithm != "native" or got.dtype.kind in "biu" or op in ("MIN", "MAX"):
        assert_same(got, want)
        return
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    wide = np.promote_types(got.dtype, np.float64) if got.dtype.itemsize > 2 else np.dtype(np.float64)
    sizes = [np.abs(x.astype(wide)) for x in inputs]
    scale = functools.reduce(np.multiply if op == "PROD" else np.add, sizes)
    eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(got.dtype.name) or np.finfo(got.dtype).eps
    error = np.abs(got.astype(wide) - want.astype(wide))
    assert (error <= 4 * len(inputs) * eps * scale + 1e-6 * (got.dtype.itemsize == 2)).all()


def assert_same(got: np.ndarray, want: np.ndarray) -> None:
    """Equal dtype, shape and bits; the slow way, which explains, only if they are not."""
    if got.dtype != want.dtype or got.shape != want.shape or got.tobytes() != want.tobytes():
        explain_difference(np.ascontiguousarray(got), np.ascontiguousarray(want))


def assert_same_everywhere(comm: Any, array: np.ndarray) -> None:
    """Every rank holds the same bits."""
    told = comm.allgather(np.ascontiguousarray(array).tobytes())
    assert all(other == told[0] for other in told), f"ranks {[r for r, t in enumerate(told) if t != told[0]]} differ"


# ------------------------------------------------------------------------------------------------ checked calls


def call(c: Any, collective: str, *buffers: Any, op: str = "SUM", **options: Any) -> np.ndarray:
    """Call a collective by its name; allgather takes no op."""
    if collective != "allgather":
        options["op"] = op
    return getattr(c, collective)(*buffers, **options)


def run_checked(
    c: Any,
    collective: str,
    dtype: str,
    rows: int,
    *,
    op: str = "SUM",
    algorithm: str | None = None,
    row_shape: tuple[int, ...] = (),
    counts: Sequence[int] | None = None,
    mode: str = "given",
    layouts: tuple[str, str] = ("contiguous", "contiguous"),
    shift: int | None = None,
    seed: int = 0,
    times: int = 2,
) -> np.ndarray:
    """Run one collective twice on the ranks of `c`; check result, input and guards.

    Parameters
    ----------
    c : pyreduce.Communicator
    rows : int
        Of the whole vector; with `counts`, their sum.
    mode : str
        One of `MODES`.
    layouts : pair of str
        Of the input and of the output, from `LAYOUTS`.
    shift : int, optional
        Bytes by which the buffers are off 16-byte alignment; default one element.

    Returns
    -------
    ndarray
        The last result.
    """
    nranks, rank, kind = c.size, c.rank, as_dtype(dtype)
    shares = partition(rows, nranks) if counts is None else tuple(counts)
    start, own = offsets(shares)[rank], shares[rank]
    inputs = everybody(dtype, (rows, *row_shape), nranks, seed)
    topology = topology_of(c)
    if algorithm == "shared" and topology.nnodes > 1:
        pytest.skip("shared serves one node")
    name = resolve(algorithm, collective, op, inputs[0], topology, c._plans.deterministic)
    whole = expect_of(name, collective, op, dtype, (rows, *row_shape), nranks, seed, shares, topology)
    mine = slice(start, start + own) if collective == "reduce_scatter" else slice(None)
    contributions = [whole] if collective == "allgather" else [x[mine] for x in inputs]
    given = inputs[rank][start : start + own] if collective == "allgather" else inputs[rank]
    want = whole[mine]
    options: dict[str, Any] = {"algorithm": algorithm, "op": op}
    if counts is not None:
        options["counts"] = counts
    for _ in range(times):
        if mode in ("given", "allocated"):
            source = Guarded(given.shape, kind, layouts[0], shift).fill(given)
            target = Guarded(want.shape, kind, layouts[1], shift) if mode == "given" else None
            got = call(c, collective, source.view, target and target.view, **options)
            source.check_unchanged()
        else:
            target = Guarded(inputs[rank].shape, kind, layouts[1], shift)
            if collective == "allgather":
                target.view[start : start + own] = given
            else:
                target.fill(given)
            first = {"in place": pr.IN_PLACE, "in place as MPI says it": mpi_in_place()}.get(mode, target.view)
            rest = target.view[own:].copy()
            got = call(c, collective, first, target.view, **options)
            if collective == "reduce_scatter":
                assert_same(target.view[own:].copy(), rest)
        assert_result(name, op if collective != "allgather" else "MIN", got, want, contributions)
        if target is not None:
            target.check_guards()
            assert got.size == 0 or np.shares_memory(got, target.view), "the result is not in recvbuf"
            assert_result(name, op, target.view[: len(want)], want, contributions)
    return got


def mpi_in_place() -> Any:
    return sys.modules["mpi4py.MPI"].IN_PLACE
