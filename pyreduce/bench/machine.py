"""What a run ran on: versions, MPI, nodes and cores."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import mpi4py
import numpy as np
from mpi4py import MPI

import pyreduce as pr
from pyreduce import ops

__all__ = ["Machine", "describe_machine"]


@dataclass(frozen=True)
class Machine:
    """Versions and the places of the ranks.

    Attributes
    ----------
    cores : int
        Cores that the ranks of the most crowded node may run on, by their affinity.
    ranks_on_node : int
        Ranks of that node.
    """

    pyreduce: str
    kernels: str
    python: str
    numpy: str
    mpi4py: str
    mpi: str
    mpi_standard: str
    ranks: int
    nodes: int
    ranks_on_node: int
    cores: int
    cpu: str

    @property
    def oversubscribed(self) -> bool:
        """Whether ranks outnumber cores on some node."""
        return self.ranks_on_node > self.cores


def describe_machine(comm: MPI.Intracomm) -> Machine:
    """Collective; the same on every rank but for `cpu`."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    cores = len(frozenset().union(*node.allgather(_affinity())))
    crowds = comm.allgather((node.size / cores, node.size, cores, node.rank == 0))
    _, ranks_on_node, cores, _ = max(crowds)
    node.Free()
    major, minor = MPI.Get_version()
    return Machine(
        pyreduce=pr.__version__,
        kernels=ops.isa(),
        python=platform.python_version(),
        numpy=np.__version__,
        mpi4py=mpi4py.__version__,
        mpi=_name_library(MPI.Get_library_version()),
        mpi_standard=f"{major}.{minor}",
        ranks=comm.size,
        nodes=sum(first for *_, first in crowds),
        ranks_on_node=ranks_on_node,
        cores=cores,
        cpu=_name_cpu(),
    )


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _name_library(text: str) -> str:
    """The library and its version, out of what each MPI makes of that."""
    first = text.strip("\0 \n").split("\n")[0].split(",")[0]
    return " ".join(first.replace("Version:", "").replace(" for Linux* OS", "").split())


def _name_cpu() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
