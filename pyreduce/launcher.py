"""Which MPI launched us, and over which communicator a user wants to work."""

from __future__ import annotations

import os
import warnings
from typing import Any

from mpi4py import MPI

from pyreduce.topology import Topology, virtual_nodes

__all__ = ["check_comm", "find_nodes", "largest_tag", "virtual_nodes_of", "warn_if_foreign_launcher"]

LEAST_TAG_UB = 32767  # what the MPI standard grants

_LAUNCHERS = {"Open MPI": "OMPI_COMM_WORLD_SIZE", "MPICH or Intel MPI (Hydra)": "PMI_SIZE"}
_warned = False


def warn_if_foreign_launcher() -> None:
    """Launched by another MPI's mpiexec, P processes are P jobs of size 1: say so, once."""
    global _warned
    if _warned or MPI.COMM_WORLD.size > 1:
        return
    library = MPI.Get_library_version().split("\n")[0].split(",")[0].strip()
    for launcher, variable in _LAUNCHERS.items():
        size = os.environ.get(variable, "")
        if size.isdigit() and int(size) > 1:
            _warned = True
            warnings.warn(
                f"launched as {size} processes by the mpiexec of {launcher}, but mpi4py loaded {library}, for which "
                f"each of them is a job of its own, of size 1; use the mpiexec of {library} (mpi_launch.sh finds it)",
                RuntimeWarning,
                stacklevel=4,
            )
            return


def check_comm(comm: Any) -> MPI.Intracomm:
    """`comm` as an intracommunicator; default ``COMM_WORLD``."""
    if comm is None:
        return MPI.COMM_WORLD
    if not isinstance(comm, MPI.Comm):
        raise TypeError(f"comm is a {type(comm).__name__}, not an mpi4py communicator")
    if comm == MPI.COMM_NULL:
        raise ValueError("comm is MPI.COMM_NULL; this rank is not part of the communicator")
    if comm.is_inter or not isinstance(comm, MPI.Intracomm):
        raise TypeError("comm is an intercommunicator; merge it first (comm.Merge())")
    return comm


def largest_tag() -> int:
    """The largest tag of any communicator. Only ``COMM_WORLD`` must know it; Open MPI's split ones do not."""
    largest = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    return largest if isinstance(largest, int) else LEAST_TAG_UB


def find_nodes(comm: MPI.Intracomm) -> Topology:
    """Which ranks share a node, by the MPI; collective, without a deadline."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    first = node.bcast(comm.rank)
    node.Free()
    return Topology.of(comm.allgather(first))


def virtual_nodes_of(comm: MPI.Intracomm, nodes: str | None) -> Topology | None:
    """The nodes that the caller asks for, over `comm`, or ``PYREDUCE_NODES``, over ``COMM_WORLD``; None: neither."""
    if nodes is not None:
        return virtual_nodes(nodes, comm.size, "nodes")
    text = os.environ.get("PYREDUCE_NODES")
    if not text:
        return None
    world = virtual_nodes(text, MPI.COMM_WORLD.size)
    ranks = comm.group.Translate_ranks(None, MPI.COMM_WORLD.group)
    if MPI.UNDEFINED in ranks:
        raise ValueError("PYREDUCE_NODES speaks of the ranks of COMM_WORLD; some of this communicator's are not there")
    return Topology.of(world.node_of[rank] for rank in ranks)
