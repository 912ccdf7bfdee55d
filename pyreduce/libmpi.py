"""The MPI that mpi4py has loaded, as the C core calls it: functions by address, handles by value.

The core is compiled against no MPI (`csrc/rounds.c`), so one build serves every MPI, as mpi4py's wheels do. The MPI's
functions are looked up where mpi4py's own calls find them: first among the symbols of the whole process, where a
preloaded profiler puts itself in front, then in the libraries that mpi4py's module needs.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from mpi4py import MPI

from pyreduce._core import lib
from pyreduce.ops import check

__all__ = ["lend", "raise_for"]

# In the order of enum pr_mpi_function.
FUNCTIONS = (
    "MPI_Isend",
    "MPI_Irecv",
    "MPI_Send_init",
    "MPI_Recv_init",
    "MPI_Startall",
    "MPI_Testall",
    "MPI_Request_free",
    "MPI_Type_create_hindexed",
    "MPI_Type_commit",
    "MPI_Type_free",
)


@cache
def lend() -> bool:
    """Hand the MPI's functions to the core; whether it can call them. Where not, Python makes the same calls."""
    assert len(FUNCTIONS) == lib.PR_MPI_FUNCTIONS
    try:
        addresses = [_find(name) for name in FUNCTIONS]
    except (AttributeError, OSError):  # linked into mpi4py with its names hidden
        return False
    code = lib.pr_mpi_use(addresses, MPI._handleof(MPI.BYTE), MPI._sizeof(MPI.Request), MPI._sizeof(MPI.Status))
    return int(code) == lib.PR_OK


def _find(name: str) -> int:
    for library in (None, MPI.__file__):
        try:
            address = ctypes.cast(getattr(ctypes.CDLL(library), name), ctypes.c_void_p).value
        except AttributeError:
            if library is not None:
                raise
        else:
            assert address is not None
            return address
    raise AssertionError(name)


def raise_for(run: Any, code: int) -> None:
    """Raise what a code of the core stands for, or the MPI's own if it is one of its functions that has failed."""
    if code == lib.PR_MPI_FAILED:
        raise MPI.Exception(lib.pr_run_error(run))
    check(code)
