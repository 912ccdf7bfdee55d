"""Users' arrays: viewing them without a copy, packing strided ones, and turning them into addresses. No MPI."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyreduce._core import ffi

__all__ = ["address", "as_array", "as_output", "overlaps", "same_array"]

Array = NDArray[Any]


def as_array(x: Any, name: str) -> Array:
    """`x` as an ndarray over the same memory.

    Takes what NumPy can view without a copy: ndarrays, ``__array_interface__``, DLPack on the CPU (torch tensors too);
    and plain numbers, as 0-dimensional arrays.

    Raises
    ------
    TypeError
        Anything else, with what to pass instead.
    """
    if type(x) is np.ndarray:
        return x
    if isinstance(x, bool | int | float | complex):
        return np.asarray(x)
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost; pass x.filled(value)")
    if isinstance(x, np.ndarray):
        return x.view(np.ndarray)
    if getattr(x, "requires_grad", False):
        raise TypeError(f"{name} is a tensor that requires grad; pass x.detach()")
    if hasattr(x, "__array_interface__"):
        return np.asarray(x)
    if hasattr(x, "__dlpack__"):
        try:
            return _from_dlpack(x)
        except (BufferError, ImportError, TypeError, RuntimeError, ValueError) as error:
            raise TypeError(
                f"{name} is a {type(x).__name__} that NumPy cannot view without a copy ({error}); "
                "pass it on the CPU, in a dtype that NumPy has"
            ) from error
    try:
        return np.asarray(memoryview(x))
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} is a {type(x).__name__}, not an array that NumPy can view without a copy; pass numpy.asarray(x)"
        ) from None


def _from_dlpack(x: Any) -> Array:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return np.from_dlpack(x)
    if x.dtype == torch.bfloat16:  # NumPy has no such dtype; ml_dtypes has
        import ml_dtypes

        return np.asarray(x.view(torch.int16).numpy()).view(ml_dtypes.bfloat16)
    return np.asarray(x.numpy())  # writable, which np.from_dlpack's view is not in every NumPy


def as_output(x: Any, name: str) -> Array:
    """`as_array`, and writable, and no element lying over another."""
    if isinstance(x, bool | int | float | complex | np.generic):
        raise TypeError(f"{name} is a plain number, which cannot be written to; pass an array")
    array = as_array(x, name)
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only")
    if not array.flags.c_contiguous and _overlaps_itself(array):
        raise ValueError(f"{name} has elements that share memory (strides {array.strides}); pass a copy")
    return array


def _overlaps_itself(array: Array) -> bool:
    """Whether two elements of an array share memory; in doubt yes."""
    if array.size < 2:
        return False
    reach = array.itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < reach:
            return True
        reach = stride * (length - 1) + reach
    return False


_UINTPTR, _cast, _from_buffer = ffi.typeof("uintptr_t"), ffi.cast, ffi.from_buffer


def address(array: Array) -> int:
    """Address of an array's first element."""
    try:
        return int(_cast(_UINTPTR, _from_buffer(array)))
    except (TypeError, ValueError, BufferError):  # bfloat16 arrays have no buffer protocol
        return int(array.__array_interface__["data"][0])


def same_array(one: Array, other: Array) -> bool:
    """Whether two arrays are the same elements in the same order."""
    if one is other:
        return True
    if one.shape != other.shape or one.strides != other.strides or one.dtype != other.dtype:
        return False
    return address(one) == address(other)


def overlaps(one: Array, other: Array) -> bool:
    """Whether two arrays share a byte; exact unless that would take long, in doubt yes."""
    if not np.may_share_memory(one, other):
        return False
    try:
        return np.shares_memory(one, other, max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
