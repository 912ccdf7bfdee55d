"""Ops, dtypes and the fold kernels: every pair against NumPy, around every switch of the loops. No MPI."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyreduce
from pyreduce import ops
from pyreduce._core import lib
from pyreduce.errors import CoreError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64", "longdouble"]
COMPLEXES = ["complex64", "complex128"]
NARROW = ["float16", "bfloat16"]

# Around vector widths, the pads of float16, the accumulator tiles (4096 bytes of accumulators) and numpy-like sizes.
SIZES = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 255, 257, 511, 512, 513, 1000, 1023]
SIZES += [1024, 1025, 2049, 4095, 4096, 4097]

ALTERNATIVES = {  # (op names, dtype names): what the TypeError must name
    ("SUM", "bool"): "LOR",
    ("PROD", "bool"): "LAND",
    ("MIN MAX", "complex64 complex128"): ".real",
    ("LAND LOR LXOR", " ".join(FLOATS + COMPLEXES)): "bool",
    ("BAND BOR BXOR", " ".join(FLOATS + COMPLEXES)): "view as an integer",
    ("AVG", " ".join(["bool", *INTEGERS])): "SUM",
}
REFUSED = {
    (op, dtype): alternative
    for (names, dtypes), alternative in ALTERNATIVES.items()
    for op in names.split()
    for dtype in dtypes.split()
}
PAIRS = [(op, dtype) for op in ops.OPS for dtype in ops.DTYPES]
DEFINED = [pair for pair in PAIRS if pair not in REFUSED]


def as_dtype(name: str) -> np.dtype[Any]:
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def make_inputs(name: str, k: int, n: int, seed: int = 0) -> list[np.ndarray]:
    """Values that differ in every element of every source, over the dtype's whole range where that makes sense."""
    rng = np.random.default_rng([seed, k, n, ops.DTYPES[name]])
    dtype = as_dtype(name)
    if name == "bool":
        return [rng.integers(0, 2, n).astype(bool) for _ in range(k)]
    if name in INTEGERS:
        info = np.iinfo(dtype)
        arrays = [rng.integers(info.min, info.max, n, dtype=dtype, endpoint=True) for _ in range(k)]
        for array in arrays:
            array[rng.random(n) < 0.3] = 0  # or logical ops would hardly ever meet a false
        return arrays
    if name in COMPLEXES:
        return [(rng.normal(size=n) + 1j * rng.normal(size=n)).astype(dtype) for _ in range(k)]
    return [(rng.normal(size=n) * 2.0 ** rng.integers(-3, 4, n)).astype(dtype) for _ in range(k)]


def multiply_complex(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The textbook product; numpy.multiply may fuse, depending on the CPU, and is off by a rounding then."""
    out = np.empty_like(a)
    out.real = a.real * b.real - a.imag * b.imag
    out.imag = a.real * b.imag + a.imag * b.real
    return out


UFUNCS = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "LAND": np.logical_and,
    "LOR": np.logical_or,
    "LXOR": np.logical_xor,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def widen(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What a mean is folded in: float32 for 16-bit floats."""
    return [x.astype(np.float32) if x.dtype.itemsize == 2 else x for x in values]


def mean(total: np.ndarray, nranks: int, dtype: np.dtype) -> np.ndarray:
    """Divide a sum, once."""
    parts = total.view(total.real.dtype) if total.dtype.kind == "c" else total
    return (parts / parts.dtype.type(nranks)).view(total.dtype).astype(dtype)


def oracle(op: str, arrays: list[np.ndarray]) -> np.ndarray:
    """functools.reduce of NumPy's ufunc; 16-bit floats in float32, rounded once; logical ops in bool."""
    dtype = arrays[0].dtype
    if op == "AVG":
        return mean(functools.reduce(np.add, widen(arrays)), len(arrays), dtype)
    ufunc = UFUNCS[op]
    if op in ("LAND", "LOR", "LXOR") and len(arrays) > 1:
        return functools.reduce(ufunc, [a != 0 for a in arrays]).astype(dtype)
    if dtype.kind == "c" and op == "PROD":
        return functools.reduce(multiply_complex, arrays)
    if dtype == np.float16 or dtype == BFLOAT16:
        arrays = [a.astype(np.float32) for a in arrays]
    with np.errstate(all="ignore"):
        return functools.reduce(ufunc, arrays).astype(dtype)


def assert_same(got: np.ndarray, want: np.ndarray) -> None:
    """Equal bits (values for long double, whose padding bytes mean nothing)."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if got.dtype.char == "g":
        np.testing.assert_array_equal(got, want)
    else:
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


GUARD = 64
PATTERN = np.random.default_rng(7).integers(0, 256, 4093, np.uint8)


class Placed:
    """An array at a byte offset from 64-byte alignment, with guard bytes on both sides."""

    def __init__(self, values: np.ndarray, offset: int = 0) -> None:
        nbytes = values.nbytes
        self.memory = np.resize(PATTERN, nbytes + 2 * GUARD + 64 + offset)
        start = GUARD + -(self.memory.ctypes.data + GUARD) % 64 + offset
        self.span = slice(start, start + nbytes)
        self.memory[self.span] = np.frombuffer(values.tobytes(), np.uint8)
        self.before = self.memory.copy()
        self.dtype = values.dtype
        self.address = self.memory.ctypes.data + start

    def values(self) -> np.ndarray:
        return np.frombuffer(self.memory[self.span].tobytes(), np.uint8).view(self.dtype)

    def check_unchanged(self) -> None:
        np.testing.assert_array_equal(self.memory, self.before)

    def check_guards(self) -> None:
        np.testing.assert_array_equal(self.memory[: self.span.start], self.before[: self.span.start])
        np.testing.assert_array_equal(self.memory[self.span.stop :], self.before[self.span.stop :])


def fold_placed(
    op: str, dtype: str, inputs: list[np.ndarray], offsets: list[int], alias: int | None = None
) -> np.ndarray:
    """Fold with the last offset for out, or with source ``alias`` as out; check guards and sources."""
    sources = [Placed(a, offset) for a, offset in zip(inputs, offsets, strict=False)]
    poison = np.full(inputs[0].nbytes, 0xA5, np.uint8).view(inputs[0].dtype)
    out = Placed(poison, offsets[-1]) if alias is None else sources[alias]
    n = inputs[0].size
    ops.fold(ops.kernel(ops.OPS[op], as_dtype(dtype)), n, out.address, [s.address for s in sources])
    out.check_guards()
    for source in sources:
        if source is not out:
            source.check_unchanged()
    return out.values()


def test_tables_are_complete() -> None:
    assert len(PAIRS) == 11 * 16
    assert len(ops.DTYPES) == lib.PR_DTYPE_COUNT
    assert sorted(ops.DTYPES.values()) == list(range(lib.PR_DTYPE_COUNT))
    assert len(ops.OPS) == lib.PR_OP_COUNT + 1  # AVG is a SUM for the core
    assert len(REFUSED) == 2 + 4 + 2 * 21 + 9


@pytest.mark.parametrize(("op", "dtype"), REFUSED)
def test_refused_pair_names_an_alternative(op: str, dtype: str) -> None:
    with pytest.raises(TypeError, match=f"{op} is not defined for dtype {dtype}: ") as caught:
        ops.kernel(ops.OPS[op], as_dtype(dtype))
    assert REFUSED[op, dtype] in str(caught.value).split(": ", 1)[1]
    if op != "AVG":  # the core refuses as well
        arguments = (getattr(lib, f"PR_{op}"), ops.DTYPES[dtype], 0, 0, [0, 0], 2)
        assert lib.pr_fold(*arguments) == lib.PR_BAD_PAIR


@pytest.mark.parametrize(("op", "dtype"), DEFINED)
def test_pair_equals_numpy(op: str, dtype: str) -> None:
    for n in SIZES:
        for k in (2, 5) if n not in (1, 9, 33, 1025) else range(1, 10):
            inputs = make_inputs(dtype, k, n)
            copies = [a.copy() for a in inputs]
            want = oracle(op, copies)
            assert_same(ops.fold_arrays(ops.OPS[op], inputs), want)
            for array, copy in zip(inputs, copies, strict=True):
                assert_same(array, copy)


@pytest.mark.parametrize(("op", "dtype"), [pair for pair in DEFINED if pair[0] != "AVG"])
def test_any_alignment(op: str, dtype: str) -> None:
    size = as_dtype(dtype).itemsize
    for n in (1, 17, 65, 1025):
        for k in (1, 2, 3, 4, 6):
            inputs = make_inputs(dtype, k, n)
            want = oracle(op, inputs)
            assert_same(fold_placed(op, dtype, inputs, [size * (j % 3) for j in range(k + 1)]), want)
            assert_same(fold_placed(op, dtype, inputs, [1 + 2 * j for j in range(k + 1)]), want)


@pytest.mark.parametrize(("op", "dtype"), [pair for pair in DEFINED if pair[0] != "AVG"])
def test_out_may_be_any_source(op: str, dtype: str) -> None:
    for n in (1, 8, 33, 1030, 4099):
        for k in range(1, 7) if n != 4099 else (9,):
            inputs = make_inputs(dtype, k, n)
            want = oracle(op, inputs)
            for alias in range(k):
                assert_same(fold_placed(op, dtype, inputs, [0] * k, alias), want)


@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16", "complex128", "longdouble"])
@pytest.mark.parametrize("k", [2, 6])
@pytest.mark.parametrize("offset", [0, 1, 16, 48])
def test_large_result_that_is_streamed(dtype: str, k: int, offset: int) -> None:
    n = (8 << 20) // as_dtype(dtype).itemsize + 37  # just above STREAM_FROM of csrc/fold.c
    small = make_inputs(dtype, k, 9973)
    inputs = [np.resize(a, n) for a in small]
    want = np.resize(oracle("SUM", small), n)
    alias = None if offset != 16 else k - 1  # never streamed then
    assert_same(fold_placed("SUM", dtype, inputs, [0] * k + [offset], alias), want)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap(dtype: str) -> None:
    info = np.iinfo(dtype)
    top = np.full(37, info.max, dtype)
    two = np.full(37, 2, dtype)
    assert (ops.fold_arrays(ops.SUM, [top, two]) == np.array(info.min + 1 if info.min else 1, dtype)).all()
    # (2^m - 1)^2 = 1 modulo 2^m; signed: (2^(m-1) - 1)^2 = 1 modulo 2^m as well
    assert (ops.fold_arrays(ops.PROD, [top, top]) == 1).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["MIN", "MAX"])
@pytest.mark.parametrize("k", [2, 3, 5])
def test_nan_propagates_from_every_place(dtype: str, op: str, k: int) -> None:
    for place in range(k):
        inputs = make_inputs(dtype, k, 67)
        inputs[place][::3] = np.nan
        got = ops.fold_arrays(ops.OPS[op], inputs)
        nan = np.isnan(got.astype(np.float64))
        assert nan[::3].all()
        assert nan.sum() == len(nan[::3])


@pytest.mark.parametrize("op", ["MIN", "MAX"])
@pytest.mark.parametrize("n", [1, 7, 40])
def test_first_nan_wins_and_zeros_are_as_in_numpy(op: str, n: int) -> None:
    nans = [np.full(n, bits, np.uint32).view(np.float32) for bits in (0x7FC00001, 0x7FC00002, 0xFFC00003)]
    assert_same(ops.fold_arrays(ops.OPS[op], nans), nans[0])
    zeros = [np.full(n, -0.0, np.float32), np.zeros(n, np.float32)]
    for pair in (zeros, zeros[::-1]):
        assert_same(ops.fold_arrays(ops.OPS[op], pair), UFUNCS[op](*pair))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("op", ["SUM", "PROD", "MIN", "MAX"])
def test_narrow_floats_all_values(dtype: str, op: str) -> None:
    """Every 16-bit pattern, NaN and subnormals included, against every kind of partner."""
    every = np.arange(65536, dtype=np.uint16).view(as_dtype(dtype))
    tiny, huge = (6e-8, 65504) if dtype == "float16" else (1e-40, 3e38)
    partners = np.array([0, -0.0, 1, -1, 0.5, 3e-5, tiny, huge, np.inf, -np.inf, np.nan], as_dtype(dtype))
    for partner in partners:
        other = np.full(65536, partner)
        for pair in ([every, other], [other, every], [every, other, every[::-1].copy()]):
            got, want = ops.fold_arrays(ops.OPS[op], pair), oracle(op, pair)
            nan = np.isnan(want.astype(np.float32))
            np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
            assert_same(got[~nan], want[~nan])


@pytest.mark.parametrize(
    ("dtype", "terms", "want"),
    [
        ("float16", [2048, 1], 2048),  # ties to even, down
        ("float16", [2050, 1], 2052),  # ties to even, up
        ("float16", [2048, 1, 1], 2050),  # a rounding at each hop would lose both ones
        ("float16", [65504, 15.9921875], 65504),
        ("float16", [65504, 16], np.inf),
        ("float16", [65504, 65504, -65504], 65504),  # the float32 sum does not overflow on the way
        ("float16", [2.0**-24, 2.0**-24], 2.0**-23),
        ("float16", [2.0**-14, -(2.0**-24)], 2.0**-14 - 2.0**-24),
        ("bfloat16", [256, 1], 256),
        ("bfloat16", [258, 1], 260),
        ("bfloat16", [256, 1, 1], 258),
        ("bfloat16", [3.3895314e38, 3.3895314e38], np.inf),
        ("bfloat16", [1e-40, 1e-40], 2e-40),
    ],
)
def test_narrow_floats_round_once_to_even(dtype: str, terms: list[float], want: float) -> None:
    for n in (1, 8, 21):
        inputs = [np.full(n, term, as_dtype(dtype)) for term in terms]
        assert_same(ops.fold_arrays(ops.SUM, inputs), np.full(n, want, as_dtype(dtype)))


@pytest.mark.parametrize(("dtype", "first", "want"), [("bfloat16", 256, 264), ("float16", 2048, 2056)])
def test_case_12_small_addends_are_not_lost(dtype: str, first: int, want: int) -> None:
    inputs = [np.full(19, first if rank == 0 else 1, as_dtype(dtype)) for rank in range(8)]
    assert_same(ops.fold_arrays(ops.SUM, inputs), np.full(19, want, as_dtype(dtype)))


def test_case_11_average_does_not_overflow() -> None:
    inputs = [np.full(11, 20000, np.float16)] * 4
    assert (ops.fold_arrays(ops.AVG, inputs) == 20000).all()
    assert np.isposinf(ops.fold_arrays(ops.SUM, inputs)).all()


def test_case_22_byte_orders_and_structures() -> None:
    native, other = ("<", ">") if sys.byteorder == "little" else (">", "<")
    assert ops.dtype_code(native + "f8") == ops.dtype_code(np.float64)
    with pytest.raises(TypeError, match="newbyteorder"):
        ops.dtype_code(other + "f8")
    with pytest.raises(TypeError, match="fields one by one"):
        ops.dtype_code([("x", "f8"), ("y", "i4")])


@pytest.mark.parametrize(
    ("dtype", "hint"),
    [
        ("M8[s]", "int64"),
        ("m8[ns]", "int64"),
        ("O", "mpi4py"),
        ("U5", "text"),
        ("S5", "text"),
        ("V7", "view it"),
        ("clongdouble", "complex128"),
        (ml_dtypes.float8_e4m3fn, "float32"),
        (ml_dtypes.float8_e5m2, "float32"),
        (ml_dtypes.int4, "convert"),
    ],
)
def test_unsupported_dtype_says_what_to_do(dtype: Any, hint: str) -> None:
    with pytest.raises(TypeError, match="is not supported: ") as caught:
        ops.kernel(ops.SUM, np.dtype(dtype))
    assert hint in str(caught.value).split(". Supported are")[0]


@pytest.mark.parametrize("name", ["byte", "short", "intc", "longlong", "intp", "ubyte", "ushort", "uintc", "ulonglong"])
def test_aliases_of_c_integers_resolve(name: str) -> None:
    dtype = np.dtype(name)
    assert ops.dtype_code(dtype) == ops.DTYPES[f"{'u' if dtype.kind == 'u' else ''}int{8 * dtype.itemsize}"]


@pytest.mark.parametrize("dtype", [d for d in ops.DTYPES if d not in ("bool", *COMPLEXES)])
def test_case_23_starts_from_the_first_operand(dtype: str) -> None:
    k, n = 5, 41
    positive = [(np.arange(n) % 23 + 2 + rank).astype(as_dtype(dtype)) for rank in range(k)]
    assert_same(ops.fold_arrays(ops.MIN, positive), positive[0])
    assert_same(ops.fold_arrays(ops.MAX, positive), positive[-1])
    assert_same(ops.fold_arrays(ops.PROD, positive), oracle("PROD", positive))
    if not dtype.startswith("uint"):
        negative = [-a for a in positive]
        assert_same(ops.fold_arrays(ops.MAX, negative), negative[0])
        assert_same(ops.fold_arrays(ops.MIN, negative), negative[-1])


@pytest.mark.parametrize("dtype", ["bool", *INTEGERS])
@pytest.mark.parametrize("op", ["LAND", "LOR", "LXOR"])
def test_logical_op_of_one_source_is_a_copy(dtype: str, op: str) -> None:
    x = np.array([0, 1, 2, 100, 0, 127] * 9).astype(as_dtype(dtype))
    assert_same(ops.fold_arrays(ops.OPS[op], [x]), functools.reduce(UFUNCS[op], [x]))


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_fold(data: st.DataObject) -> None:
    op, dtype = data.draw(st.sampled_from([pair for pair in DEFINED if pair[0] != "AVG"]))
    k = data.draw(st.integers(1, 20))
    n = data.draw(st.integers(0, 3000))
    offsets = data.draw(st.lists(st.integers(0, 63), min_size=k + 1, max_size=k + 1))
    alias = data.draw(st.none() | st.integers(0, k - 1))
    inputs = make_inputs(dtype, k, n, seed=data.draw(st.integers(0, 99)))
    assert_same(fold_placed(op, dtype, inputs, offsets, alias), oracle(op, inputs))


@pytest.mark.parametrize("dtype", FLOATS + COMPLEXES)
@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 64])
def test_divide(dtype: str, divisor: int) -> None:
    for n in (1, 8, 35, 1029):
        x = make_inputs(dtype, 1, n)[0]
        wide = x.astype(np.float32) if dtype in NARROW else x
        parts = wide.view(wide.real.dtype)
        want = (parts / parts.dtype.type(divisor)).view(wide.dtype).astype(x.dtype)
        source, out = Placed(x, 1), Placed(np.zeros_like(x), 3)
        ops.divide(ops.dtype_code(x.dtype), n, out.address, source.address, divisor)
        assert_same(out.values(), want)
        out.check_guards()
        source.check_unchanged()
        ops.divide(ops.dtype_code(x.dtype), n, source.address, source.address, divisor)
        assert_same(source.values(), want)
        source.check_guards()


def test_resolve_op() -> None:
    for name, op in ops.OPS.items():
        assert ops.resolve_op(op) is op
        assert ops.resolve_op(name) is op
        assert ops.resolve_op(name.lower()) is op
        assert repr(op) == f"pyreduce.{name}"
    assert len(set(ops.OPS.values())) == 11
    for wrong in ("average", "", "MAXLOC"):
        with pytest.raises(ValueError, match="choose from SUM, PROD"):
            ops.resolve_op(wrong)
    for wrong in (None, 3, np.add, sum):
        with pytest.raises(TypeError, match="choose from SUM, PROD"):
            ops.resolve_op(wrong)


# A stand-in, since importing the real mpi4py.MPI starts MPI: its ops compare equal by handle, not by identity.
class FakeMpiOp:
    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeMpiOp) and other.handle == self.handle

    __hash__ = None  # type: ignore[assignment]


def test_mpi4py_constants_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["SUM", "PROD", "MIN", "MAX", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR", "MAXLOC", "REPLACE"]
    module = type(sys)("mpi4py.MPI")
    module.Op = FakeMpiOp
    for handle, name in enumerate(names):
        setattr(module, name, FakeMpiOp(handle))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    for handle, name in enumerate(names[:10]):
        assert ops.resolve_op(FakeMpiOp(handle)) is ops.OPS[name]
    with pytest.raises(ValueError, match=r"MPI\.REPLACE is not offered: choose from"):
        ops.resolve_op(FakeMpiOp(11))
    with pytest.raises(ValueError, match="user-defined MPI op is not offered"):
        ops.resolve_op(FakeMpiOp(99))


def test_mpi4py_is_never_imported() -> None:
    # A stand-in for the package, so that pyreduce/__init__.py does not run: only what ops itself imports counts.
    code = f"""
import sys, types
package = types.ModuleType("pyreduce")
package.__path__ = {list(pyreduce.__path__)!r}
sys.modules["pyreduce"] = package
import pyreduce.ops
pyreduce.ops.resolve_op("sum")
print([name for name in sys.modules if name.startswith("mpi4py")])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_codes_become_exceptions() -> None:
    ops.check(lib.PR_OK)
    assert lib.pr_fold(-1, 0, 0, 0, [0], 1) == lib.PR_BAD_OP
    assert lib.pr_fold(lib.PR_OP_COUNT, 0, 0, 0, [0], 1) == lib.PR_BAD_OP
    assert lib.pr_fold(0, -1, 0, 0, [0], 1) == lib.PR_BAD_DTYPE
    assert lib.pr_fold(0, lib.PR_DTYPE_COUNT, 0, 0, [0], 1) == lib.PR_BAD_DTYPE
    assert lib.pr_fold(0, lib.PR_INT8, 0, 0, [0], 0) == lib.PR_BAD_COUNT
    assert lib.pr_divide(lib.PR_INT8, 0, 0, 0, 2.0) == lib.PR_BAD_PAIR
    for divisor in (0.0, -1.0, float("nan"), float("inf"), 1e300, 0.1):
        assert lib.pr_divide(lib.PR_FLOAT32, 0, 0, 0, divisor) == lib.PR_BAD_DIVISOR
    with pytest.raises(CoreError, match="at least one source"):
        ops.fold((lib.PR_SUM, lib.PR_INT8), 0, 0, [])
    with pytest.raises(CoreError, match="-999"):
        ops.check(-999)
    with pytest.raises(ValueError, match="PYREDUCE_ISA"):
        ops.check(lib.PR_BAD_ISA)


def test_fold_arrays_refuses_what_does_not_match() -> None:
    x = np.arange(6.0)
    with pytest.raises(ValueError, match="at least one"):
        ops.fold_arrays(ops.SUM, [])
    for other in (x.astype(np.float32), x[:5], x.reshape(2, 3)):
        with pytest.raises(ValueError, match="all arrays must have"):
            ops.fold_arrays(ops.SUM, [x, other])
    with pytest.raises(ValueError, match="contiguous"):
        ops.fold_arrays(ops.SUM, [np.arange(12.0)[::2]])
    frozen = x.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        ops.fold_arrays(ops.SUM, [x, x], out=frozen)


def run_digests(isa: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYREDUCE_ISA": isa}
    command = [sys.executable, __file__, "digests"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


def print_digests() -> None:
    """Print the instruction set and a digest of every pair's results, for test_versions_give_the_same_bits."""
    import hashlib

    print(ops.isa())
    for op, dtype in DEFINED:
        digest = hashlib.sha256()
        for n in (1, 5, 77, 1031, 2100):
            for k in (2, 3, 4, 9):
                inputs = make_inputs(dtype, k, n)
                if dtype in NARROW:  # any bits at all: NaNs, infinities, subnormals
                    rng = np.random.default_rng([n, k])
                    inputs = [rng.integers(0, 65536, n, np.uint16).view(as_dtype(dtype)) for _ in range(k)]
                elif dtype in ("float32", "float64"):
                    for j, special in enumerate([np.nan, np.inf, -np.inf, -0.0, 1e-40, 5e-324]):
                        inputs[j % k][j::7] = special
                result = ops.fold_arrays(ops.OPS[op], inputs)
                if dtype not in ("bool", *INTEGERS):
                    result = result.astype(np.complex128 if dtype in COMPLEXES else np.float64)
                    result[np.isnan(result)] = np.nan  # which NaN survives a sum of several is not promised
                digest.update(result.tobytes())
        print(op, dtype, digest.hexdigest())


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_versions_give_the_same_bits(isa: str) -> None:
    other = run_digests(isa)
    if other.returncode != 0:
        assert "PYREDUCE_ISA must name an instruction set of this CPU" in other.stderr
        pytest.skip(f"{isa} is not available on this CPU")
    baseline = run_digests("baseline")
    assert baseline.returncode == 0, baseline.stderr
    assert baseline.stdout.splitlines()[0] == "baseline"
    assert other.stdout.splitlines()[0] == isa
    assert len(other.stdout.splitlines()) == 1 + len(DEFINED)
    assert other.stdout.splitlines()[1:] == baseline.stdout.splitlines()[1:]


def test_unknown_instruction_set_is_refused() -> None:
    result = run_digests("mmx")
    assert result.returncode != 0
    assert "PYREDUCE_ISA must name an instruction set of this CPU" in result.stderr


if __name__ == "__main__":
    if sys.argv[1:] == ["digests"]:
        print_digests()
