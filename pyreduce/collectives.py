"""The functions: one cached `Communicator` for each mpi4py communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from pyreduce.arrays import Array
from pyreduce.communicator import Communicator
from pyreduce.launcher import check_comm
from pyreduce.ops import SUM, Op

__all__ = ["allgather", "allreduce", "reduce_scatter"]

_keyval = MPI.KEYVAL_INVALID


def _close(comm: MPI.Comm, keyval: int, cached: Communicator) -> None:
    """MPI calls this when the user's communicator is freed, which is collective, as closing is."""
    cached.close()


def cached_communicator(comm: MPI.Intracomm | None, timeout: float | None = None) -> Communicator:
    """The `Communicator` kept as an attribute of `comm`, made at the first call and freed with `comm`.

    `timeout` is that of the first call, which making it is part of; it does not stay.
    """
    global _keyval
    comm = check_comm(comm)
    if _keyval == MPI.KEYVAL_INVALID:
        _keyval = MPI.Comm.Create_keyval(delete_fn=_close)
    cached: Any = comm.Get_attr(_keyval)
    if cached is None:
        cached = Communicator(comm, timeout=timeout)
        cached.forget_timeout()
        comm.Set_attr(_keyval, cached)
    assert isinstance(cached, Communicator)
    return cached


def reduce_scatter(
    sendbuf: Any,
    recvbuf: Any = None,
    *,
    op: Op | str = SUM,
    counts: Sequence[int] | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Array:
    """Reduce over all ranks of `comm`; each keeps its block of the rows. See `Communicator.reduce_scatter`.

    Examples
    --------
    On 4 ranks, rank r holding ``(r + 1) * [1, 2, 3, 4]``, rank 2 gets ``[30]``:

    >>> block = pr.reduce_scatter((rank + 1) * np.array([1, 2, 3, 4]))  # doctest: +SKIP
    """
    return cached_communicator(comm, timeout).reduce_scatter(
        sendbuf, recvbuf, op=op, counts=counts, algorithm=algorithm, timeout=timeout
    )


def allgather(
    sendbuf: Any,
    recvbuf: Any = None,
    *,
    counts: Sequence[int] | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Array:
    """Give every rank of `comm` the blocks of all, in rank order. See `Communicator.allgather`.

    Examples
    --------
    On 4 ranks, rank r holding r rows, every rank gets 6:

    >>> everything = pr.allgather(np.full(rank, rank))  # doctest: +SKIP
    """
    return cached_communicator(comm, timeout).allgather(
        sendbuf, recvbuf, counts=counts, algorithm=algorithm, timeout=timeout
    )


def allreduce(
    sendbuf: Any,
    recvbuf: Any = None,
    *,
    op: Op | str = SUM,
    comm: MPI.Intracomm | None = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Array:
    """Reduce over all ranks of `comm`; each gets the whole result. See `Communicator.allreduce`.

    Examples
    --------
    >>> mean = pr.allreduce(gradient, op=pr.AVG)  # doctest: +SKIP
    >>> pr.allreduce(pr.IN_PLACE, gradient, op=pr.AVG)  # doctest: +SKIP
    """
    return cached_communicator(comm, timeout).allreduce(sendbuf, recvbuf, op=op, algorithm=algorithm, timeout=timeout)
