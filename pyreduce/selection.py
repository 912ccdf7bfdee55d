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

# Measured on one node under MPICH, Open MPI and Intel MPI (benchmarks/results/bench-*.json): below, one round of naive
# beats everything; above RING_BYTES the ring's few bytes win; between, and for many ranks, the MPI's own.
NAIVE_BYTES = 4096  # bytes of the whole vector, all ranks together sending (P - 1) times that
NAIVE_RANKS = 8
RING_BYTES = 1 << 20


def choose(
    collective: str,
    nbytes: int,
    nranks: int,
    op: Op | None,
    dtype: np.dtype,
    deterministic: bool = False,
    limit: int = MESSAGE_BYTES,
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

    Returns
    -------
    name, why : str
    """
    if deterministic and op is not None:
        return "naive", "deterministic: folds in rank order"
    if nranks == 1:
        return "ring", "one rank: a copy"
    if nbytes <= NAIVE_BYTES and nranks <= NAIVE_RANKS:
        return "naive", f"at most {NAIVE_BYTES} bytes on at most {NAIVE_RANKS} ranks: one round beats fewer bytes"
    if nbytes > RING_BYTES:
        return "ring", f"more than {RING_BYTES} bytes: fewest bytes win"
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
    if name != algorithms.NATIVE:
        algorithms.get(name).program(collective, nranks, rank)
        return
    refusal = native_refuses(collective, op, dtype, nbytes, limit)
    if refusal:
        raise Unsupported(f"{collective}: native cannot serve this call: {refusal}; use algorithm='ring'")
