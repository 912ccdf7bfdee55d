"""Arguments of a call, checked on one rank alone, before any communication. No MPI.

What is wrong here is a `TypeError` or `ValueError`; what comes out says what is read, what is written, and how many
rows every rank's block has.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from pyreduce import arrays, ops
from pyreduce.arrays import Array
from pyreduce.blocks import check_counts, offsets, partition

__all__ = ["IN_PLACE", "Arguments", "check_arguments", "check_block"]


class _InPlace:
    """The type of `IN_PLACE`."""

    def __repr__(self) -> str:
        return "pyreduce.IN_PLACE"


IN_PLACE = _InPlace()
"""Given as the input: take it from the output's buffer. ``mpi4py.MPI.IN_PLACE`` is accepted too."""


def says_in_place(sendbuf: object) -> bool:
    """Whether `sendbuf` is pyreduce's or mpi4py's IN_PLACE."""
    if sendbuf is IN_PLACE:
        return True
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and sendbuf is mpi.IN_PLACE


class Arguments(NamedTuple):
    """A call's arguments, checked on this rank alone."""

    vector: Array  # what this rank puts in
    result: Array | None  # what is written, in the user's buffer; None to allocate
    shape: tuple[int, ...]  # of the result
    rows: tuple[int, ...]  # rows of each block
    row_shape: tuple[int, ...]
    in_place: bool


def check_block(sendbuf: Any) -> Array:
    """The block of an allgather whose lengths are still to be agreed on."""
    if says_in_place(sendbuf):
        raise ValueError("IN_PLACE needs recvbuf, which holds the input")
    block = arrays.as_array(sendbuf, "sendbuf")
    ops.dtype_code(block.dtype)
    check_has_rows(block)
    return block


def check_has_rows(vector: Array, name: str = "sendbuf") -> None:
    """A 0-dimensional array has no rows to cut into blocks."""
    if vector.ndim == 0:
        raise ValueError(f"{name} is 0-dimensional and has no rows; pass x.reshape(1)")


def check_arguments(
    collective: str, sendbuf: Any, recvbuf: Any, counts: Sequence[int] | None, nranks: int, rank: int
) -> Arguments:
    """Everything that can be wrong on this rank alone, and where input and output lie.

    Parameters
    ----------
    collective : str
    sendbuf, recvbuf, counts : object
        As the user gave them; see `pyreduce.Communicator`.
    nranks, rank : int

    Raises
    ------
    TypeError, ValueError
        Without the name of the collective and the rank, which the caller adds.
    """
    in_place = says_in_place(sendbuf)
    output = None if recvbuf is None else arrays.as_output(recvbuf, "recvbuf")
    if in_place:
        if output is None:
            raise ValueError("IN_PLACE needs recvbuf, which holds the input")
        vector = output
    else:
        vector = arrays.as_array(sendbuf, "sendbuf")
        if output is not None:
            if vector.dtype != output.dtype:
                raise TypeError(f"sendbuf is {vector.dtype}, recvbuf is {output.dtype}; they must be the same")
            in_place = arrays.same_array(vector, output)
            if not in_place and arrays.overlaps(vector, output):
                raise ValueError("sendbuf and recvbuf overlap; pass the same array twice, or IN_PLACE, or a copy")
    ops.dtype_code(vector.dtype)
    if collective == "allreduce":
        return _allreduce_arguments(vector, output, in_place, nranks)
    check_has_rows(vector)
    if output is not None:
        check_has_rows(output, "recvbuf")
    if output is not None and output.shape[1:] != vector.shape[1:]:
        raise ValueError(f"rows of sendbuf are {vector.shape[1:]}, rows of recvbuf are {output.shape[1:]}")
    rows = None if counts is None else check_counts(counts, nranks)
    if collective == "reduce_scatter":
        return _reduce_scatter_arguments(vector, output, in_place, rows, nranks, rank)
    return _allgather_arguments(vector, output, in_place, rows, nranks, rank)


def _allreduce_arguments(vector: Array, output: Array | None, in_place: bool, nranks: int) -> Arguments:
    if output is not None and output.shape != vector.shape:
        raise ValueError(_too_few(output, vector.shape) or f"recvbuf is {output.shape}, sendbuf is {vector.shape}")
    return Arguments(vector, output, vector.shape, partition(vector.size, nranks), (), in_place)


def _too_few(output: Array, shape: tuple[int, ...]) -> str | None:
    if output.ndim == len(shape) > 0 and output.shape[1:] == shape[1:]:
        return f"recvbuf has {len(output)} rows, needs {shape[0]}"
    return None


def _check_rows(name: str, array: Array, needed: int, exact: bool) -> None:
    if len(array) < needed or (exact and len(array) != needed):
        raise ValueError(f"{name} has {len(array)} rows, needs {needed}")


def _reduce_scatter_arguments(
    vector: Array, output: Array | None, in_place: bool, counts: tuple[int, ...] | None, nranks: int, rank: int
) -> Arguments:
    rows = partition(len(vector), nranks) if counts is None else counts
    needed = sum(rows)
    _check_rows("recvbuf" if in_place else "sendbuf", vector, needed, exact=False)
    if len(vector) != needed:
        vector = vector[:needed]
    if output is not None:
        if not in_place:
            _check_rows("recvbuf", output, rows[rank], exact=counts is None)
        if len(output) != rows[rank]:
            output = output[: rows[rank]]
    return Arguments(vector, output, (rows[rank], *vector.shape[1:]), rows, vector.shape[1:], in_place)


def _allgather_arguments(
    vector: Array, output: Array | None, in_place: bool, counts: tuple[int, ...] | None, nranks: int, rank: int
) -> Arguments:
    rows = partition(len(output), nranks) if counts is None and output is not None else counts
    assert rows is not None
    needed = sum(rows)
    if output is not None:
        _check_rows("recvbuf", output, needed, exact=counts is None)
        output = output[:needed] if len(output) != needed else output
    if in_place:
        assert output is not None
        first = offsets(rows)[rank]
        vector = output[first : first + rows[rank]]
    else:
        if len(vector) < rows[rank] or (counts is None and len(vector) != rows[rank]):
            hint = (
                "" if counts is not None else f" (its share of recvbuf's {needed} rows); pass counts for other shares"
            )
            raise ValueError(f"sendbuf has {len(vector)} rows, needs {rows[rank]}{hint}")
        vector = vector[: rows[rank]]
    return Arguments(vector, output, (needed, *vector.shape[1:]), rows, vector.shape[1:], in_place)
