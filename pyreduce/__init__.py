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
    WindowMemoryError,
)
from pyreduce.ops import AVG, BAND, BOR, BXOR, LAND, LOR, LXOR, MAX, MIN, PROD, SUM, Op
from pyreduce.programs import (
    Copy,
    Fold,
    Get,
    Notify,
    Program,
    Put,
    Recv,
    Send,
    Wait,
    place_input,
    place_output,
    place_scratch,
    place_window,
)

if TYPE_CHECKING:
    from pyreduce.collectives import allgather, allreduce, reduce_scatter
    from pyreduce.communicator import Communicator, Stats
    from pyreduce.requests import PersistentRequest, Request, waitall
    from pyreduce.signals import NotifyOp, Signal, WaitCmp
    from pyreduce.windows import Window

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
    "Get",
    "MismatchError",
    "Notify",
    "NotifyOp",
    "Op",
    "PersistentRequest",
    "Program",
    "Put",
    "PyreduceError",
    "Recv",
    "Request",
    "Send",
    "Signal",
    "Stats",
    "Unsupported",
    "Wait",
    "WaitCmp",
    "Window",
    "WindowMemoryError",
    "algorithms",
    "allgather",
    "allreduce",
    "place_input",
    "place_output",
    "place_scratch",
    "place_window",
    "reduce_scatter",
    "register_algorithm",
    "waitall",
]

_NEEDS_MPI = {
    "Communicator": "pyreduce.communicator",
    "NotifyOp": "pyreduce.signals",
    "PersistentRequest": "pyreduce.requests",
    "Request": "pyreduce.requests",
    "Signal": "pyreduce.signals",
    "Stats": "pyreduce.communicator",
    "WaitCmp": "pyreduce.signals",
    "Window": "pyreduce.windows",
    "allgather": "pyreduce.collectives",
    "allreduce": "pyreduce.collectives",
    "reduce_scatter": "pyreduce.collectives",
    "waitall": "pyreduce.requests",
}


def __getattr__(name: str) -> Any:
    if name in _NEEDS_MPI:
        value = getattr(import_module(_NEEDS_MPI[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'pyreduce' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
