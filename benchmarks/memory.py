"""Resident memory that a large reduce_scatter needs beyond its input and output. Run under mpirun."""

from __future__ import annotations

import argparse
import sys

import numpy as np
from mpi4py import MPI

import pyreduce as pr


def peak() -> int:
    """The largest resident size of this process so far, in bytes."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> int:
    """Print the extra memory of each algorithm, the largest over the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=256, help="size of each rank's vector")
    parser.add_argument("--algorithm", action="append", help="default: ring")
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    x = np.arange(options.mebibytes << 18, dtype=np.float32)
    out = np.ones(len(np.array_split(x, world.size)[world.rank]), np.float32)
    with pr.Communicator(world) as k:
        for algorithm in options.algorithm or ["ring"]:
            k.reduce_scatter(x[: 1 << 12], algorithm=algorithm)  # what MPI sets up at first use is not counted
            before = peak()
            k.reduce_scatter(x, out, algorithm=algorithm)
            extra = world.allreduce(peak() - before, MPI.MAX)
            if world.rank == 0:
                print(f"{algorithm}: {extra / 2**20:.1f} MiB beyond {options.mebibytes} MiB of input and the output")
    return 0


if __name__ == "__main__":
    sys.exit(main())
