"""Which algorithm a call runs when the caller names none, and why. No MPI.

The choice depends on nothing but what all ranks share: collective, bytes, nodes, op, dtype, and the profile in use,
whose digest is among the facts that calls are compared by. Where a profile holds (`pyreduce.profiles`) it is the
algorithm that was fastest when it was made; else, on one node, the engine; else what `pyreduce.model` takes for the
fastest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyreduce import algorithms
from pyreduce.errors import AlgorithmError, Unsupported
from pyreduce.model import DEFAULT, MODELLED, Figures, in_bytes, in_seconds, predict
from pyreduce.ops import Op
from pyreduce.profiles import Profile
from pyreduce.settings import MESSAGE_BYTES
from pyreduce.topology import Topology

__all__ = ["Candidate", "cannot_serve", "check_algorithm", "choose", "weigh"]

TOLD = 3  # algorithms that a reason tells the times of


@dataclass(frozen=True)
class Candidate:
    """An algorithm that a call may run by.

    Attributes
    ----------
    name : str
    refusal : str or None
        Why it cannot serve the call.
    measured : float or None
        Seconds, by the profile in use.
    predicted : float or None
        Seconds, by the model.
    """

    name: str
    refusal: str | None
    measured: float | None
    predicted: float | None


def choose(
    collective: str,
    nbytes: int,
    topology: Topology,
    op: Op | None,
    dtype: np.dtype,
    deterministic: bool = False,
    limit: int = MESSAGE_BYTES,
    no_engine: str | None = None,
    no_node_engine: str | None = None,
    profile: Profile | None = None,
    figures: Figures = DEFAULT,
) -> tuple[str, str]:
    """The algorithm for a call that names none.

    Parameters
    ----------
    collective : str
    nbytes : int
        Bytes of the whole vector.
    topology : Topology
    op : Op or None
        None for allgather.
    dtype : numpy.dtype
    deterministic : bool
        Allow only algorithms that fold in rank order.
    limit : int
        The message limit.
    no_engine : str, optional
        Why the ranks have no shared-memory engine; default: they have one, if they are on one node.
    no_node_engine : str, optional
        Why hierarchical has no engines within nodes.
    profile : Profile, optional
        One that holds on these nodes.
    figures : Figures, optional
        What the model works with.

    Returns
    -------
    name, why : str
    """
    call = (collective, nbytes, topology, op, dtype, deterministic, limit, no_engine, no_node_engine)
    has_engine = cannot_serve(algorithms.SHARED, *call) is None
    without = f" (no shared memory: {no_engine})" if no_engine is not None and topology.nnodes == 1 else ""
    if topology.nranks == 1 and not has_engine:
        return "ring", f"one rank: a copy{without}"
    if profile is not None:
        found = profile.choose(collective, nbytes, lambda name: cannot_serve(name, *call) is None)
        if found is not None:
            return found
    if has_engine:
        return algorithms.SHARED, "one node: through shared memory, folded in rank order"
    candidates = weigh(*call, figures=figures)
    ranking = sorted((one.predicted, one.name) for one in candidates if not one.refusal and one.predicted is not None)
    told = ", ".join(f"{name} {in_seconds(seconds)}" for seconds, name in ranking[:TOLD])
    ordered = ", in rank order" if deterministic and op is not None else ""
    return ranking[0][1], f"model, {in_bytes(nbytes)} on {topology}{ordered}: {told}{without}"


def weigh(
    collective: str,
    nbytes: int,
    topology: Topology,
    op: Op | None,
    dtype: np.dtype,
    deterministic: bool = False,
    limit: int = MESSAGE_BYTES,
    no_engine: str | None = None,
    no_node_engine: str | None = None,
    profile: Profile | None = None,
    figures: Figures = DEFAULT,
) -> list[Candidate]:
    """All algorithms with what is known of each for one call; parameters as those of `choose`."""
    measured = profile.times(collective, nbytes) if profile is not None else {}
    call = (collective, nbytes, topology, op, dtype, deterministic, limit, no_engine, no_node_engine)
    return [
        Candidate(
            name,
            cannot_serve(name, *call),
            measured.get(name),
            predict(name, collective, nbytes, topology, figures) if _is_modelled(name, no_engine) else None,
        )
        for name in algorithms.names()
    ]


def _is_modelled(name: str, no_engine: str | None) -> bool:
    """Windows through the MPI's one-sided calls have no formula: mesh has one where there is shared memory."""
    return name in MODELLED and (name != "mesh" or no_engine is None)


def cannot_serve(
    name: str,
    collective: str,
    nbytes: int,
    topology: Topology,
    op: Op | None,
    dtype: np.dtype,
    deterministic: bool = False,
    limit: int = MESSAGE_BYTES,
    no_engine: str | None = None,
    no_node_engine: str | None = None,
) -> str | None:
    """Why an algorithm cannot serve a call, the same on every rank, or None; parameters as those of `choose`."""
    if name not in algorithms.names():
        return "no algorithm is called so here"
    if deterministic and op is not None and not algorithms.folds_in_rank_order(name):
        return "does not fold in rank order"
    if name == algorithms.SHARED:
        return f"needs one node, here are {topology}" if topology.nnodes > 1 else no_engine
    if name == algorithms.NATIVE:
        return native_refuses(collective, op, dtype, nbytes, limit)
    if name == algorithms.HIERARCHICAL:
        if topology.nnodes == 1:
            return "one node only"
        return no_node_engine if topology.nnodes < topology.nranks else "no node has several ranks"
    try:
        algorithms.get(name).program(collective, topology.nranks, 0)
    except (Unsupported, AlgorithmError) as error:
        return str(error)
    return None


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
    if name in (algorithms.SHARED, algorithms.HIERARCHICAL):
        return
    if name != algorithms.NATIVE:
        algorithms.get(name).program(collective, nranks, rank)
        return
    refusal = native_refuses(collective, op, dtype, nbytes, limit)
    if refusal:
        raise Unsupported(f"{collective}: native cannot serve this call: {refusal}; use algorithm=None")
