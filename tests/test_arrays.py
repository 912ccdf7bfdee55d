"""What may be passed as an array, and how buffers are compared. No MPI but in the last tests."""

from __future__ import annotations

import array
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import as_dtype, assert_same, everybody, expect, offsets, partition

from pyreduce import arrays, ops


class WithInterface:
    """Something with ``__array_interface__`` and nothing else, as many libraries' arrays have it."""

    def __init__(self, wrapped: np.ndarray) -> None:
        self._wrapped = wrapped
        self.__array_interface__ = wrapped.__array_interface__


class WithDLPack:
    """Something with DLPack and nothing else."""

    def __init__(self, wrapped: np.ndarray) -> None:
        self._wrapped = wrapped

    def __dlpack__(self, **options: Any) -> Any:
        return self._wrapped.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._wrapped.__dlpack_device__()


class OnAnotherDevice(WithDLPack):
    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("the data lie on a GPU")


class WithGradient(WithDLPack):
    requires_grad = True


def as_memoryview(x: np.ndarray) -> memoryview:
    return memoryview(x)


def as_subclass(x: np.ndarray) -> np.ndarray:
    return x.view(np.recarray)


WRAPPERS = [WithInterface, WithDLPack, as_memoryview, as_subclass]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("change", [lambda x: x, lambda x: x[::2], lambda x: x.T, lambda x: x[::-1]])
def test_views_without_a_copy(wrap: Any, change: Any) -> None:
    for dtype in ("int32", "float64", "float16", "complex64", "uint8", "bool"):
        x = change(everybody(dtype, (4, 3), 1)[0].copy())
        seen = arrays.as_array(wrap(x), "sendbuf")
        assert type(seen) is np.ndarray
        assert arrays.same_array(seen, x)
        assert arrays.same_array(arrays.as_output(wrap(x), "recvbuf"), x)


def test_buffers_of_the_standard_library() -> None:
    numbers = array.array("d", [1.5, 2.5, 3.5])
    arrays.as_output(numbers, "recvbuf")[1] = 7
    assert numbers[1] == 7
    raw = bytearray(b"spam")
    seen = arrays.as_output(raw, "recvbuf")
    assert seen.dtype == np.uint8
    seen[0] = ord("S")
    assert raw == b"Spam"
    assert arrays.as_array(b"spam", "sendbuf").tolist() == list(b"spam")
    assert arrays.as_array(memoryview(b"spamspam").cast("i"), "sendbuf").dtype == np.int32


def test_an_ndarray_is_itself() -> None:
    x = np.arange(3)
    assert arrays.as_array(x, "sendbuf") is x


def test_what_cannot_be_viewed() -> None:
    x = np.arange(3.0)
    for wrong, text in (
        ([1, 2], "sendbuf is a list, not an array that NumPy can view without a copy; pass numpy.asarray"),
        (WithGradient(x), r"requires grad; pass x\.detach\(\)"),
        (OnAnotherDevice(x), r"OnAnotherDevice that NumPy cannot view .*on a GPU.*pass it on the CPU"),
        (np.ma.masked_array(x), "masked"),
    ):
        with pytest.raises(TypeError, match=text):
            arrays.as_array(wrong, "sendbuf")


def test_outputs_must_be_writable() -> None:
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    for wrong in (frozen, b"spam", memoryview(b"spam"), WithInterface(frozen), frozen.view(np.recarray)):
        with pytest.raises(ValueError, match="recvbuf is read-only"):
            arrays.as_output(wrong, "recvbuf")


def test_outputs_may_not_overlap_themselves() -> None:
    memory = np.zeros(64)
    strided = np.lib.stride_tricks.as_strided
    for shape, strides in (
        ((3,), (0,)),
        ((3, 3), (8, 8)),
        ((4, 4), (16, 8)),
        ((2, 5), (32, 8)),
        ((3,), (4,)),
        ((2, 2), (0, 8)),
    ):
        with pytest.raises(ValueError, match="share memory"):
            arrays.as_output(strided(memory, shape, strides), "recvbuf")
    for shape, strides in (
        ((3,), (16,)),
        ((3, 3), (24, 8)),
        ((3, 3), (8, 24)),
        ((1, 4), (0, 8)),
        ((0, 3), (0, 0)),
        ((2, 5), (40, 8)),
    ):
        assert arrays.as_output(strided(memory, shape, strides), "recvbuf").shape == shape
    assert arrays.as_output(memory[::-1], "recvbuf").shape == (64,)


def test_same_array() -> None:
    x = np.arange(12.0).reshape(3, 4)
    assert arrays.same_array(x, x)
    assert arrays.same_array(x, x[:])
    for other in (x.T, x[::-1], x[:2], x.copy(), x.view(np.int64), x.reshape(4, 3)):
        assert not arrays.same_array(x, other)


def test_overlaps() -> None:
    x = np.arange(24.0)
    assert arrays.overlaps(x, x)
    assert arrays.overlaps(x[:10], x[9:])
    assert arrays.overlaps(x[::2], x[4:5])
    assert arrays.overlaps(x, x[::-1])
    assert not arrays.overlaps(x[:10], x[10:])
    assert not arrays.overlaps(x[::2], x[1::2])
    assert not arrays.overlaps(x[:0], x)
    assert not arrays.overlaps(x, x.copy())


@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_address(dtype: str) -> None:
    x = np.zeros((3, 2), as_dtype(dtype))
    assert arrays.address(x) == x.__array_interface__["data"][0]
    assert arrays.address(x[1:]) == arrays.address(x) + 2 * x.itemsize
    x.flags.writeable = False
    assert arrays.address(x) == x.__array_interface__["data"][0]
    arrays.address(x[:0])
    arrays.address(np.zeros((), as_dtype(dtype)))


# ----------------------------------------------------------------------------------------------------- over MPI


@pytest.mark.parametrize("algorithm", ["naive", "ring", "native"])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_collectives_on_wrapped_arrays(communicator: Any, wrap: Any, algorithm: str) -> None:
    size, rank = communicator.size, communicator.rank
    inputs = everybody("float32", (5, 3), size)
    counts = partition(5, size)
    start, own = offsets(counts)[rank], counts[rank]
    for _ in range(2):
        source, full, block = inputs[rank].copy(), np.full((5, 3), 7, np.float32), np.full((own, 3), 7, np.float32)
        exact = algorithm if algorithm != "native" else "naive"
        communicator.allreduce(wrap(source), wrap(full), algorithm=exact)
        assert_same(full, expect(exact, "allreduce", "SUM", inputs))
        communicator.reduce_scatter(wrap(source), wrap(block), algorithm=algorithm, op="AVG")
        np.testing.assert_allclose(block, np.mean(inputs, axis=0)[start : start + own], rtol=1e-5, atol=1e-6)
        communicator.allgather(wrap(source[start : start + own]), wrap(full), algorithm=algorithm)
        assert_same(
            full, np.concatenate([x[o : o + n] for x, o, n in zip(inputs, offsets(counts), counts, strict=True)])
        )
        assert_same(source, inputs[rank])
        communicator.allreduce(wrap(source), wrap(source), algorithm=exact)  # in place: two wrappers of one array
        assert_same(source, expect(exact, "allreduce", "SUM", inputs))


def test_collectives_on_buffers_of_the_standard_library(communicator: Any) -> None:
    size, rank = communicator.size, communicator.rank
    numbers = array.array("l", [rank, rank + 1, 5])
    out = array.array("l", [0, 0, 0])
    communicator.allreduce(numbers, out)
    assert out.tolist() == [sum(range(size)), sum(range(1, size + 1)), 5 * size]
    word = bytearray(2 * size)
    communicator.allgather(bytes([rank, 100 + rank]), word)
    assert word == b"".join(bytes([r, 100 + r]) for r in range(size))


def test_bfloat16_which_has_no_buffer_protocol(communicator: Any) -> None:
    size, rank = communicator.size, communicator.rank
    x = np.arange(1, 10).astype(ml_dtypes.bfloat16) * ml_dtypes.bfloat16(rank + 1)
    got = communicator.allreduce(WithInterface(x.view(np.uint16)), op="MAX")
    assert (got.view(ml_dtypes.bfloat16) == np.arange(1, 10) * size).all()
    assert (communicator.allreduce(x, op="MAX") == np.arange(1, 10) * size).all()
