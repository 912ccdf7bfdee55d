"""Which algorithm a call runs when the caller names none, and why. No MPI.

The choice depends on nothing but what all ranks share: collective, bytes, number of ranks, op and dtype.
"""

from __future__ import annotations

import numpy as np

from pyreduce import algorithms
from pyreduce.errors import Unsupported
from pyreduce.ops import Op
from pyreduce.settings import MESSAGE_BYTES

__all__ = ["check_algorithm", "choose"]

# Measured with 2 and 4 ranks on 2 cores under MPICH, Open MPI and Intel MPI (benchmarks/results/bench-*.json): as long
# as a rank receives little, one round of naive beats everything of ours; from RING_BYTES on the ring's few bytes win;
# between, and on many ranks, the MPI's own.
NAIVE_BYTES = 192 << 10  # bytes that a rank receives: (P - 1) vectors
NAIVE_RANKS = 8
RING_BYTES = 512 << 10  # bytes of the whole vector


def choose(
    collective: str,
    nbytes: int,
    nranks: int,
    op: Op | None,
    dtype: np.dtype,
    deterministic: bool = False,
    limit: int = MESSAGE_BYTES,
    no_engine: str | None = None,
) -> tuple[str, str]:
    """The algorithm for a call that names none.

    Parameters
    ----------
    collective : str
    nbytes : int
        Bytes of the whole vector.
    nranks : int
    op : Op or None
        None for allgather.
    dtype : numpy.dtype
    deterministic : bool
        Allow only algorithms that fold in rank order.
    limit : int
        The message limit.
    no_engine : str, optional
        Why the ranks have no shared-memory engine; default: they have one.

    Returns
    -------
    name, why : str
    """
    if no_engine is None:
        return "shared", "one node: through shared memory, folded in rank order"
    name, why = _choose_between_nodes(collective, nbytes, nranks, op, dtype, deterministic, limit)
    return name, f"{why} (no shared memory: {no_engine})"


def _choose_between_nodes(
    collective: str, nbytes: int, nranks: int, op: Op | None, dtype: np.dtype, deterministic: bool, limit: int
) -> tuple[str, str]:
    if deterministic and op is not None:
        return "naive", "deterministic: folds in rank order"
    if nranks == 1:
        return "ring", "one rank: a copy"
    received = nbytes * (nranks - 1) if op is not None else nbytes
    if received <= NAIVE_BYTES and nranks <= NAIVE_RANKS:
        return "naive", f"a rank receives {received} bytes at most: one round beats fewer bytes"
    if nbytes >= RING_BYTES:
        return "ring", f"at least {RING_BYTES} bytes: fewest bytes win"
    refusal = native_refuses(collective, op, dtype, nbytes, limit)
    if refusal:
        return "ring", f"native does not serve: {refusal}"
    return "native", "middling size: the MPI's own collective"


def native_refuses(collective: str, op: Op | None, dtype: np.dtype, nbytes: int, limit: int) -> str | None:
    """Why the MPI's own collective cannot serve a call, or None."""
    if nbytes > limit:
        return f"the vector is longer than {limit} bytes, the message limit"
    if collective == "allgather" or op is None:
        return None
    if dtype.name == "bfloat16" and op.name != "AVG":
        return "MPI has no bfloat16"
    if op.name == "SUM" and dtype.kind in "iu" and dtype.itemsize < 4:
        return f"MPI's SUM of {dtype.name} need not wrap: Open MPI's saturates"
    if op.name in ("MIN", "MAX") and dtype.kind in "f":
        return f"MPI's {op.name} need not propagate NaN"
    return None


def check_algorithm(
    name: str, collective: str, nbytes: int, nranks: int, rank: int, op: Op | None, dtype: np.dtype, limit: int
) -> None:
    """Raise, before any communication, if the algorithm asked for cannot serve the call.

    Raises
    ------
    ValueError
        No algorithm has that name.
    Unsupported
        It does not serve this call; the message says why and what does.
    """
    if name == algorithms.SHARED:
        return
    if name != algorithms.NATIVE:
        algorithms.get(name).program(collective, nranks, rank)
        return
    refusal = native_refuses(collective, op, dtype, nbytes, limit)
    if refusal:
        raise Unsupported(f"{collective}: native cannot serve this call: {refusal}; use algorithm=None")
