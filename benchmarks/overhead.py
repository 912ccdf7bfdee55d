"""What a small call costs: algorithms and `check=` levels against the MPI's own, alternating. Run under mpirun."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from time import perf_counter

import numpy as np
from mpi4py import MPI

import pyreduce as pr

world = MPI.COMM_WORLD


def measure(calls: dict[str, Callable[[], object]], times: int, turns: int) -> dict[str, float]:
    """Microseconds a call, the slowest rank's; the median of alternating turns."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            world.Barrier()
            start = perf_counter()
            for _ in range(times):
                call()
            seconds = world.allreduce((perf_counter() - start) / times, MPI.MAX)
            if turn:
                taken[name].append(seconds * 1e6)
    return {name: float(np.median(values)) for name, values in taken.items()}


def main() -> int:
    """Print a table; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=8)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json")
    options = parser.parse_args()
    x = np.arange(max(options.bytes // 4, 1), dtype=np.float32) + world.rank
    out = np.empty_like(x)
    calls: dict[str, Callable[[], object]] = {"MPI Allreduce": lambda: world.Allreduce(x, out)}
    communicators = {check: pr.Communicator(world, check=check) for check in ("off", "light", "full")}
    for algorithm in ("naive", "ring", "native"):
        for check, k in communicators.items():
            calls[f"{algorithm}, check={check}"] = lambda k=k, algorithm=algorithm: k.allreduce(
                x, out, algorithm=algorithm
            )
    result = measure(calls, options.times, options.turns)
    for k in communicators.values():
        k.close()
    if world.rank == 0:
        mpi = MPI.Get_library_version().splitlines()[0].strip("\0")
        print(f"# {mpi}, {world.size} ranks, {os.cpu_count()} cores, allreduce of {x.nbytes} bytes, us a call")
        for name, microseconds in result.items():
            print(f"{name:24} {microseconds:9.2f}")
        if options.json:
            facts = {"mpi": mpi, "ranks": world.size, "cores": os.cpu_count(), "bytes": x.nbytes, "us": result}
            with open(options.json, "w") as file:
                json.dump(facts, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
