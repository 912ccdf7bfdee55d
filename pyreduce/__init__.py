"""pyreduce: reduce_scatter, allgather and allreduce over MPI, faster, checked, and open to be read and extended.

What needs MPI is imported when it is first used, so that programs can be simulated, verified and explained without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyreduce import algorithms
from pyreduce.algorithms import register_algorithm
from pyreduce.arguments import IN_PLACE
from pyreduce.errors import (
    AlgorithmError,
    BrokenCommunicatorError,
    CollectiveTimeout,
    MismatchError,
    PyreduceError,
    Unsupported,
)
from pyreduce.ops import AVG, BAND, BOR, BXOR, LAND, LOR, LXOR, MAX, MIN, PROD, SUM, Op
from pyreduce.programs import Copy, Fold, Program, Recv, Send, place_input, place_output, place_scratch

if TYPE_CHECKING:
    from pyreduce.collectives import allgather, allreduce, reduce_scatter
    from pyreduce.communicator import Communicator, Stats

__version__ = "0.1.0"

__all__ = [
    "AVG",
    "BAND",
    "BOR",
    "BXOR",
    "IN_PLACE",
    "LAND",
    "LOR",
    "LXOR",
    "MAX",
    "MIN",
    "PROD",
    "SUM",
    "AlgorithmError",
    "BrokenCommunicatorError",
    "CollectiveTimeout",
    "Communicator",
    "Copy",
    "Fold",
    "MismatchError",
    "Op",
    "Program",
    "PyreduceError",
    "Recv",
    "Send",
    "Stats",
    "Unsupported",
    "algorithms",
    "allgather",
    "allreduce",
    "place_input",
    "place_output",
    "place_scratch",
    "reduce_scatter",
    "register_algorithm",
]

_NEEDS_MPI = {
    "Communicator": "pyreduce.communicator",
    "Stats": "pyreduce.communicator",
    "allgather": "pyreduce.collectives",
    "allreduce": "pyreduce.collectives",
    "reduce_scatter": "pyreduce.collectives",
}


def __getattr__(name: str) -> Any:
    if name in _NEEDS_MPI:
        value = getattr(import_module(_NEEDS_MPI[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'pyreduce' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
