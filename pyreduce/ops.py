"""Reduction ops, the dtypes they are defined for, and the fold: the Python face of the C kernels.

There is one table of ops (`OPS`), one of dtypes (`DTYPES`), and one of the pairs that are refused (`_refuse_pair`);
`kernel` answers for a pair with the codes that `fold` wants, or with a `TypeError` that says what to do instead.
`check` is the only place where a code of the C core becomes an exception.

Nothing here needs MPI: mpi4py's op constants are recognised if mpi4py is loaded already, and never imported.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from pyreduce._core import ffi, lib
from pyreduce.errors import CoreError

__all__ = [
    "AVG",
    "BAND",
    "BOR",
    "BXOR",
    "DTYPES",
    "LAND",
    "LOR",
    "LXOR",
    "MAX",
    "MIN",
    "OPS",
    "PROD",
    "SUM",
    "Op",
    "check",
    "copy",
    "divide",
    "dtype_code",
    "fold",
    "fold_arrays",
    "isa",
    "kernel",
    "resolve_op",
]


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """A reduction op. The eleven constants of this module are all there are, also after pickling.

    Attributes
    ----------
    name : str
        The name in capitals, as MPI spells it without its prefix.
    """

    name: str

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return resolve_op, (self.name,)

    def __repr__(self) -> str:
        return f"pyreduce.{self.name}"


SUM = Op("SUM")
PROD = Op("PROD")
MIN = Op("MIN")
MAX = Op("MAX")
AVG = Op("AVG")
LAND = Op("LAND")
LOR = Op("LOR")
LXOR = Op("LXOR")
BAND = Op("BAND")
BOR = Op("BOR")
BXOR = Op("BXOR")

OPS: dict[str, Op] = {op.name: op for op in (SUM, PROD, MIN, MAX, AVG, LAND, LOR, LXOR, BAND, BOR, BXOR)}
"""Every op by its name."""

_LOGICAL = (LAND, LOR, LXOR)
_BITWISE = (BAND, BOR, BXOR)

_OP_CODES = MappingProxyType({op: getattr(lib, f"PR_{op.name}") for op in OPS.values() if op is not AVG})

DTYPES: dict[str, int] = {
    "bool": lib.PR_BOOL,
    "int8": lib.PR_INT8,
    "int16": lib.PR_INT16,
    "int32": lib.PR_INT32,
    "int64": lib.PR_INT64,
    "uint8": lib.PR_UINT8,
    "uint16": lib.PR_UINT16,
    "uint32": lib.PR_UINT32,
    "uint64": lib.PR_UINT64,
    "float16": lib.PR_FLOAT16,
    "bfloat16": lib.PR_BFLOAT16,
    "float32": lib.PR_FLOAT32,
    "float64": lib.PR_FLOAT64,
    "longdouble": lib.PR_LONGDOUBLE,
    "complex64": lib.PR_COMPLEX64,
    "complex128": lib.PR_COMPLEX128,
}
"""The supported dtypes by name, and their codes in the C core."""

# NumPy knows several C integers of one size by different names: kind and size are what counts.
_BY_KIND_AND_SIZE = {(np.dtype(name).kind, np.dtype(name).itemsize): name for name in DTYPES if name != "bfloat16"}


def resolve_op(op: object) -> Op:
    """Return the `Op` that ``op`` stands for.

    Parameters
    ----------
    op : Op, str or mpi4py.MPI.Op
        One of the constants, a name in any case (``"sum"``), or mpi4py's constant of the same name.

    Raises
    ------
    ValueError
        A string or an MPI op that is not offered.
    TypeError
        Anything else.
    """
    if isinstance(op, Op):
        if OPS.get(op.name) is op:
            return op
        raise ValueError(f"unknown op {op.name!r}: choose from {_list_ops()}")
    if isinstance(op, str):
        found = OPS.get(op.upper())
        if found is None:
            raise ValueError(f"unknown op {op!r}: choose from {_list_ops()}")
        return found
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(op, mpi.Op):
        return _resolve_mpi_op(op, mpi)
    raise TypeError(f"op must be an op or its name, not {type(op).__name__}: choose from {_list_ops()}")


def _list_ops() -> str:
    return ", ".join(OPS)


def _resolve_mpi_op(op: object, mpi: Any) -> Op:
    for name, ours in OPS.items():
        if op == getattr(mpi, name, None):
            return ours
    others = ("MAXLOC", "MINLOC", "REPLACE", "NO_OP", "OP_NULL")
    name = next((f"MPI.{other}" for other in others if op == getattr(mpi, other, None)), "a user-defined MPI op")
    raise ValueError(f"{name} is not offered: choose from {_list_ops()}")


def dtype_code(dtype: npt.DTypeLike) -> int:
    """Return the code of a dtype in the C core.

    Raises
    ------
    TypeError
        The dtype is not supported; the message says what to do.
    """
    return _find_code(np.dtype(dtype))


@lru_cache(maxsize=256)
def _find_code(dtype: np.dtype[Any]) -> int:
    return DTYPES[_name_dtype(dtype)]


def _name_dtype(dtype: np.dtype[Any]) -> str:
    """Return the dtype's name in `DTYPES`, or raise the `TypeError` that says what to do."""
    if not dtype.isnative:
        hint = "convert it to native byte order with x.astype(x.dtype.newbyteorder('='))"
    elif dtype.names is not None or dtype.subdtype is not None:
        hint = "reduce its fields one by one, as x['field']"
    elif dtype.name == "bfloat16" and dtype.itemsize == 2:
        return "bfloat16"
    elif dtype.char == "g":
        return "longdouble"
    elif dtype.char != "G" and (dtype.kind, dtype.itemsize) in _BY_KIND_AND_SIZE:
        return _BY_KIND_AND_SIZE[dtype.kind, dtype.itemsize]
    elif dtype.kind in "mM":
        hint = "reduce x.view('int64') and view the result back"
    elif dtype.kind == "O":
        hint = "convert it to a numeric dtype, or use mpi4py's lower-case methods for Python objects"
    elif dtype.kind == "c":
        hint = "convert it to complex128, or reduce .real and .imag"
    elif dtype.kind in "SUT":
        hint = "convert it to a numeric dtype; text has no reduction"
    else:
        hint = "convert it to float32, or view it as an unsigned integer dtype of the same size for bitwise ops"
    raise TypeError(f"dtype {dtype} is not supported: {hint}. Supported are {', '.join(DTYPES)}")


def kernel(op: Op, dtype: npt.DTypeLike) -> tuple[int, int]:
    """Return what `fold` wants for an op and a dtype: the two codes of the C core.

    `AVG` has the codes of `SUM`; whoever folds divides at the end.

    Raises
    ------
    TypeError
        The op is not defined for the dtype, or the dtype is not supported; the message names an alternative.
    """
    return _find_kernel(op, np.dtype(dtype))


@lru_cache(maxsize=1024)
def _find_kernel(op: Op, dtype: np.dtype[Any]) -> tuple[int, int]:
    name = _name_dtype(dtype)
    alternative = _refuse_pair(op, name)
    if alternative is not None:
        raise TypeError(f"op {op.name} is not defined for dtype {name}: {alternative}")
    return _OP_CODES[SUM if op == AVG else op], DTYPES[name]


def _refuse_pair(op: Op, name: str) -> str | None:
    """Return the alternative to a pair that is not defined, None for one that is."""
    is_complex = name.startswith("complex")
    is_inexact = is_complex or "float" in name or name == "longdouble"
    if op == AVG and not is_inexact:
        return "use SUM and divide, or convert to float64"
    if name == "bool" and op == SUM:
        return "use LOR, or convert to an integer dtype to count"
    if name == "bool" and op == PROD:
        return "use LAND"
    if is_complex and op in (MIN, MAX):
        return "complex numbers have no order; reduce .real and .imag, or numpy.abs(x)"
    if is_inexact and op in _LOGICAL:
        return "convert to bool first, as x != 0"
    if is_inexact and op in _BITWISE:
        return "view as an integer dtype of the same size first, as x.view('uint8')"
    return None


_MESSAGES = {
    lib.PR_BAD_OP: "no such op",
    lib.PR_BAD_DTYPE: "no such dtype",
    lib.PR_BAD_PAIR: "the op is not defined for the dtype",
    lib.PR_BAD_COUNT: "a fold needs at least one source",
    lib.PR_NO_ROOM: "out of memory",
    lib.PR_MPI_FAILED: "a function of the MPI has failed",
    lib.PR_BAD_DIVISOR: "the divisor must be positive and exact in float32",
}


def check(code: int) -> None:
    """Raise the exception that a code of the C core stands for; return for success."""
    if code == 0:
        return
    if code == lib.PR_BAD_ISA:
        raise ValueError("PYREDUCE_ISA must name an instruction set of this CPU: baseline, avx2 or avx512")
    raise CoreError(_MESSAGES.get(code, f"unknown code {code} from the C core"))


def isa() -> str:
    """Return the instruction set of the kernels in use: ``"baseline"``, ``"avx2"`` or ``"avx512"``."""
    name = lib.pr_isa()
    if name == ffi.NULL:
        check(lib.PR_BAD_ISA)
    return ffi.string(name).decode()


def fold(
    kernel: tuple[int, int],
    n: int,
    out: int,
    srcs: Sequence[int],
    _fold: Any = lib.pr_fold,
    _fold2: Any = lib.pr_fold2,
) -> None:
    """Fold k sources in order: ``out[i] = ((s0[i] op s1[i]) op s2[i]) ...``, in one pass over memory.

    Parameters
    ----------
    kernel : tuple of int
        From `kernel`.
    n : int
        Elements.
    out : int
        Address of the result, of any alignment; it may be exactly one of the sources.
    srcs : list of int
        Addresses of the sources, at least one; with one, a copy.
    """
    op, dtype = kernel
    if len(srcs) == 2:
        first, second = srcs
        code = _fold2(op, dtype, n, out, first, second)
    else:
        code = _fold(op, dtype, n, out, srcs, len(srcs))
    if code:
        check(code)


def copy(nbytes: int, out: int, src: int, _copy: Any = lib.pr_copy) -> None:
    """Copy bytes from one address to another."""
    _copy(nbytes, out, src)


def divide(dtype: int, n: int, out: int, src: int, divisor: float) -> None:
    """Divide by a number of ranks, rounding once: ``out[i] = src[i] / divisor``.

    Parameters
    ----------
    dtype : int
        From `dtype_code`.
    n : int
        Elements.
    out, src : int
        Addresses, of any alignment; they may be the same.
    divisor : float
        Positive, and exact in float32.
    """
    check(lib.pr_divide(dtype, n, out, src, divisor))


def fold_arrays(op: Op, arrays: Sequence[npt.NDArray[Any]], out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
    """Fold whole arrays in order; the fold that `simulate` and the tests use.

    Parameters
    ----------
    op : Op
    arrays : sequence of ndarray
        C-contiguous, of one shape and dtype.
    out : ndarray, optional
        Where the result goes; it may be one of the arrays.

    Returns
    -------
    ndarray
        ``out``, or a new array. AVG divides at the end; for float16 and bfloat16 it is computed in float32 and rounded
        once.

    Raises
    ------
    TypeError, ValueError
        The op is not defined for the dtype, or the arrays do not match.
    """
    if not arrays:
        raise ValueError("fold_arrays: needs at least one array")
    first = arrays[0]
    codes = kernel(op, first.dtype)
    if out is None:
        out = np.empty(first.shape, first.dtype)
    for array in (*arrays, out):
        if array.dtype != first.dtype or array.shape != first.shape:
            raise ValueError(
                f"fold_arrays: all arrays must have dtype {first.dtype} and shape {first.shape}, "
                f"one has {array.dtype} and {array.shape}"
            )
        if not array.flags.c_contiguous:
            raise ValueError("fold_arrays: arrays must be C-contiguous; use numpy.ascontiguousarray")
    if not out.flags.writeable:
        raise ValueError("fold_arrays: out is read-only")
    if op == AVG and codes[1] in (lib.PR_FLOAT16, lib.PR_BFLOAT16):
        out[...] = fold_arrays(AVG, [array.astype(np.float32) for array in arrays]).astype(first.dtype)
        return out
    size = math.prod(first.shape)
    fold(codes, size, out.ctypes.data, [array.ctypes.data for array in arrays])
    if op == AVG:
        divide(codes[1], size, out.ctypes.data, out.ctypes.data, len(arrays))
    return out
