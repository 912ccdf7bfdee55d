"""How programs that measure run as a job of several ranks."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from mpi4py import MPI

__all__ = ["end_together", "no_garbage_collection"]

FAILED = 1


def end_together(main: Callable[[], int]) -> NoReturn:
    """Exit with the status that `main` gives, when all ranks have come; an exception on one rank ends the job."""
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(FAILED)  # the others wait for this rank
        raise
    MPI.COMM_WORLD.Barrier()  # nobody exits before rank 0 has spoken, or the launcher ends the job
    sys.exit(status)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Nothing is collected in what is timed."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
