"""Users' arrays: viewing them without a copy, packing strided ones, and turning them into addresses. No MPI."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyreduce._core import ffi, lib

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


def _knows_layout() -> bool:
    """Tell the core how CPython and NumPy lay out an array, and see that it then sees what NumPy says."""
    if sys.implementation.name != "cpython":
        return False
    lib.pr_door_layout(object.__basicsize__, id(np.ndarray))
    words = [ffi.new(kind) for kind in ("uintptr_t *", "int *", "intptr_t *", "uintptr_t *", "int *")]
    data, ndim, first, descr, flags = words
    samples: list[Array] = [np.zeros(3), np.zeros((5, 2), np.int8)[::2], np.zeros((2, 3, 4), "f4", "F"), np.array(1.0)]
    samples[0].flags.writeable = False
    for x in samples:
        if lib.pr_door_look(id(x), *words) != lib.PR_OK:
            return False
        seen = (data[0], ndim[0], first[0], descr[0], bool(flags[0] & 0x1), bool(flags[0] & 0x400))
        if seen != (
            x.__array_interface__["data"][0], x.ndim, x.shape[0] if x.shape else 0, id(x.dtype),
            x.flags.c_contiguous, x.flags.writeable,
        ):  # fmt: skip
            return False
    return lib.pr_door_look(id(np.float64(1)), *words) == lib.PR_SHUT


KNOWS_LAYOUT = _knows_layout()
if not KNOWS_LAYOUT:
    lib.pr_door_layout(0, 0)


def address(array: Array) -> int:
    """Address of an array's first element."""
    found = lib.pr_door_address(id(array))
    return found if found else int(array.__array_interface__["data"][0])


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
