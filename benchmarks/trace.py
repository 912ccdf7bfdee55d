"""What tracing costs: allreduce on a traced communicator against one that is not, alternating. Run under mpirun."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from time import perf_counter

import numpy as np
from mpi4py import MPI

import pyreduce as pr

world = MPI.COMM_WORLD


def seconds(k: pr.Communicator, x: np.ndarray, out: np.ndarray, algorithm: str, times: int) -> float:
    """Of a call, the slowest rank's."""
    world.Barrier()
    start = perf_counter()
    for _ in range(times):
        k.allreduce(x, out, algorithm=algorithm)
    return float(world.allreduce((perf_counter() - start) / times, MPI.MAX))


def main() -> int:
    """Print a table; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--turns", type=int, default=31)
    parser.add_argument("--bytes", default="8,65536,262144,1048576")
    parser.add_argument("--algorithms", default="ring,shared")
    parser.add_argument("--json")
    options = parser.parse_args()
    directory = world.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    communicators = [pr.Communicator(world, trace=""), pr.Communicator(world, trace=directory)]
    rows = []
    for algorithm in options.algorithms.split(","):
        for nbytes in map(int, options.bytes.split(",")):
            x = np.arange(max(nbytes // 4, 1), dtype=np.float32) + world.rank
            out = np.empty_like(x)
            taken = [
                [seconds(k, x, out, algorithm, options.times) for k in communicators[:: 1 - 2 * (turn % 2)]][
                    :: 1 - 2 * (turn % 2)
                ]
                for turn in range(options.turns + 1)
            ][1:]
            off, on = np.median(taken, axis=0)
            ratio = float(np.median([b / a for a, b in taken]))
            least, least_on = np.min(taken, axis=0)
            row = {"algorithm": algorithm, "bytes": nbytes, "off": off, "on": on, "ratio": ratio}
            rows.append(row | {"least off": least, "least on": least_on})
    for k in communicators:
        k.close()
    if world.rank == 0:
        mpi = MPI.Get_library_version().splitlines()[0].strip("\0")
        print(f"# {mpi}, {world.size} ranks, {os.cpu_count()} cores, allreduce, us a call")
        print(f"{'':8} {'bytes':>9} {'off':>9} {'on':>9} {'ratio':>7} {'least off':>10} {'least on':>9} {'ratio':>7}")
        for row in rows:
            print(
                f"{row['algorithm']:8} {row['bytes']:9} {row['off'] * 1e6:9.1f} {row['on'] * 1e6:9.1f} "
                f"{row['ratio']:7.3f} {row['least off'] * 1e6:10.1f} {row['least on'] * 1e6:9.1f} "
                f"{row['least on'] / row['least off']:7.3f}"
            )
        if options.json:
            facts = {"mpi": mpi, "ranks": world.size, "cores": os.cpu_count(), "rows": rows}
            with open(options.json, "w") as file:
                json.dump(facts, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
