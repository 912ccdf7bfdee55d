"""What ranks put in, and what must come out: exact, and independent of the library.

Every element of every rank has its own pseudo-random code, and from it a value for which the result of the op is exact
in whatever order it is folded. So any rank can say what any element of the result must be, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyreduce.ops import Op

__all__ = ["fill", "inputs", "results"]

Array = NDArray[Any]
CHUNK = 1 << 17  # elements made at a time: they stay in cache
WIDEST = 30  # bits of a code that are used at most
SIGNIFICAND = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53, "complex64": 24, "complex128": 53}
DOUBLING = 7  # so many ranks may hold a 2 in a product: 2^7 times 1 is exact in every dtype

UFUNCS: dict[str, Callable[[Array, Array], Array]] = {
    "SUM": np.add,
    "AVG": np.add,
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


def inputs(op: Op | None, dtype: np.dtype[Any], nranks: int, rank: int, start: int, stop: int) -> Array:
    """Elements `start` to `stop` of the vector that `rank` puts in; `op` is None for allgather."""
    name = "" if op is None else op.name
    if name == "PROD":
        return _units(dtype, rank, start, stop)
    if name in ("LAND", "LOR", "LXOR") or (dtype.kind == "b" and name):
        return _truths(name, dtype, nranks, _codes(rank, start, stop))
    if name in ("BAND", "BOR", "BXOR") or (not name and dtype.kind in "iu"):
        return _bits(name, dtype, _codes(rank, start, stop))
    if dtype.kind == "b":
        true: Array = _codes(rank, start, stop) % 2 == 1
        return true
    if dtype.kind == "c":
        return _whole_numbers(name, dtype, nranks, rank, 2 * start, 2 * stop).view(dtype)
    return _whole_numbers(name, dtype, nranks, rank, start, stop)


def results(op: Op, dtype: np.dtype[Any], nranks: int, start: int, stop: int) -> Array:
    """Elements `start` to `stop` of the reduction; the mean of AVG is rounded once from the exact one."""
    fold: Callable[[Array, Array], Array] = UFUNCS[op.name]
    with np.errstate(over="ignore"):
        total = _widened(inputs(op, dtype, nranks, 0, start, stop))
        for rank in range(1, nranks):
            total = fold(total, _widened(inputs(op, dtype, nranks, rank, start, stop)))
    if op.name == "AVG":
        # float32 has more than twice the digits of the narrow dtypes: rounding twice is rounding once.
        parts = total.view(total.real.dtype)
        parts /= nranks
    result: Array = total.astype(dtype)
    return result


def fill(out: Array, start: int, make: Callable[[int, int], Array]) -> None:
    """Write ``make(start, start + len(out))`` into `out`, piece by piece."""
    for first in range(0, len(out), CHUNK):
        piece = out[first : first + CHUNK]
        piece[...] = make(start + first, start + first + len(piece))


def _codes(rank: int, start: int, stop: int) -> NDArray[np.uint32]:
    """32 pseudo-random bits for each element of a rank's vector."""
    code = np.arange(stop - start, dtype=np.uint32)
    code += np.uint32(start % (1 << 32))
    code *= np.uint32(0x9E3779B1)
    code += np.uint32((rank * 0x85EBCA77 + 0x165667B1) % (1 << 32))
    code ^= code >> 15
    code *= np.uint32(0x2C1B3C6D)
    code ^= code >> 13
    return code


def _whole_numbers(name: str, dtype: np.dtype[Any], nranks: int, rank: int, start: int, stop: int) -> Array:
    """Whole numbers whose sum over all ranks is exact in the dtype; of both signs where it has them."""
    real = dtype if dtype.kind != "c" else np.empty(0, dtype).real.dtype
    exact = int(np.iinfo(dtype).max) if dtype.kind in "iu" else 1 << SIGNIFICAND.get(dtype.name, 63)
    summed = nranks if name in ("SUM", "AVG") else 1
    bits = min((exact // summed).bit_length() - 1, WIDEST) if summed < exact else 0  # 2^bits * summed <= exact
    number: Array = _codes(rank, start, stop)
    if dtype.kind == "u":
        number >>= np.uint32(32 - max(bits, 1))
    else:
        number >>= np.uint32(31 - bits)
        number = number.view(np.int32)
        number -= np.int32(1 << bits)
    spread = -(-summed // exact)
    if spread > 1:  # more ranks than the significand can count: only one in `spread` has something to add
        number[(np.arange(start, stop) + rank) % spread != 0] = 0
    return number.astype(real)


def _units(dtype: np.dtype[Any], rank: int, start: int, stop: int) -> Array:
    """Factors whose product over all ranks is exact: 1, -1 (3 if unsigned, i and -i too if complex), and a few 2s."""
    factors: list[complex] = [1, 3] if dtype.kind == "u" else [1, -1, 1j, -1j] if dtype.kind == "c" else [1, -1]
    if rank < DOUBLING:
        factors.append(2)
    table = np.array(factors if dtype.kind == "c" else [factor.real for factor in factors]).astype(dtype)
    chosen: Array = table[_codes(rank, start, stop) % np.uint32(len(table))]
    return chosen


def _truths(name: str, dtype: np.dtype[Any], nranks: int, code: NDArray[np.uint32]) -> Array:
    """Zeros and others, so mixed that the result over all ranks is mixed too."""
    if name in ("LAND", "BAND", "MIN"):
        true = code % np.uint32(nranks + 1) != 0
    elif name in ("LOR", "BOR", "MAX"):
        true = code % np.uint32(nranks + 1) == 0
    else:
        true = code % 2 == 1
    return true if dtype.kind == "b" else np.where(true, code % 100 + 1, 0).astype(dtype)


def _bits(name: str, dtype: np.dtype[Any], code: NDArray[np.uint32]) -> Array:
    """All bits but one for BAND, one for BOR, any for the others."""
    wide = code.astype(np.uint64)
    if name in ("BAND", "BOR"):
        wide = np.left_shift(np.uint64(1), wide % np.uint64(8 * dtype.itemsize))
        wide = ~wide if name == "BAND" else wide
    else:
        wide *= np.uint64(0x9E3779B97F4A7C15)
        wide >>= np.uint64(64 - 8 * dtype.itemsize)
    return wide.astype(f"u{dtype.itemsize}").view(dtype)


def _widened(array: Array) -> Array:
    """`array` in the dtype that the expected result is computed in."""
    return array.astype(np.float32) if array.dtype.name in ("float16", "bfloat16") else array
