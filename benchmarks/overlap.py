"""Computing and an allreduce together, against one after the other.

    mpirun -n 2 python benchmarks/overlap.py [--bytes 32M] [--json FILE]

Each rank computes (sines of an array that stays in its L1 cache, NumPy on one thread) for about as long as a blocking
allreduce takes. Told are the times of the allreduce alone, of the computation alone, of both in a row, and of both
together: ``iallreduce``, compute, ``wait``, with ``progress="thread"`` and without (then the call advances only while
it is started and waited for). Medians of alternating turns; a time is the slowest rank's. Below 0.75 of the two in a
row is good overlap; 0.5 is perfect.

Where threads and ranks outnumber cores (`free cores` says so), the thread can only take turns with the computation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import numpy as np
from mpi4py import MPI

import pyreduce as pr
from pyreduce.bench.machine import describe_machine
from pyreduce.bench.options import parse_size

TURNS = 11
LANES = 2048  # float64 elements of the array that is computed with


class Work:
    """A computation of adjustable length."""

    def __init__(self) -> None:
        self.x = np.linspace(0.0, 1.0, LANES)
        self.out = np.empty_like(self.x)
        self.times = 1

    def calibrate(self, seconds: float) -> None:
        """Make it last about so long."""
        begun = perf_counter()
        for _ in range(200):
            np.sin(self.x, out=self.out)
        self.times = max(1, round(seconds * 200 / (perf_counter() - begun)))

    def __call__(self) -> None:
        for _ in range(self.times):
            np.sin(self.x, out=self.out)


def slowest(comm: MPI.Intracomm, what: Callable[[], object]) -> float:
    """Seconds of one call, the slowest rank's."""
    comm.Barrier()
    begun = perf_counter()
    what()
    return comm.allreduce(perf_counter() - begun, MPI.MAX)


def measure(comm: MPI.Intracomm, nbytes: int) -> dict[str, float]:
    """Median seconds of every kind."""
    x = np.arange(nbytes // 4, dtype=np.float32) + comm.rank
    out = np.empty_like(x)
    work = Work()
    plain, threaded = pr.Communicator(comm), pr.Communicator(comm, progress="thread")

    def together(c: pr.Communicator) -> None:
        request = c.iallreduce(x, out)
        work()
        request.wait()

    def in_a_row() -> None:
        plain.allreduce(x, out)
        work()

    kinds: dict[str, Callable[[], object]] = {
        "allreduce": lambda: plain.allreduce(x, out),
        "computation": work,
        "in a row": in_a_row,
        "together, no thread": lambda: together(plain),
        "together, thread": lambda: together(threaded),
    }
    work.calibrate(statistics.median(slowest(comm, kinds["allreduce"]) for _ in range(7)))
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(TURNS + 1):  # the first warms up
        for name, kind in kinds.items():
            seconds = slowest(comm, kind)
            if turn:
                taken[name].append(seconds)
    expected = np.arange(nbytes // 4, dtype=np.float32) * comm.size + sum(range(comm.size))
    wrong = comm.allreduce(
        int((out != expected).sum()) if nbytes < 1 << 22 else int((out[:1000] != expected[:1000]).sum())
    )
    plain.close()
    threaded.close()
    if wrong:
        raise SystemExit(f"{wrong} wrong elements")
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> int:
    """Measure, print on rank 0, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description="Overlap of computing and allreduce.")
    parser.add_argument("--bytes", type=parse_size, default=32 << 20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    machine = describe_machine(comm)
    cores = len(os.sched_getaffinity(0))
    seconds = measure(comm, options.bytes)
    if comm.rank:
        return 0
    free = max(cores - comm.size, 0)
    print(f"# {MPI.Get_library_version().splitlines()[0].strip()}, {comm.size} ranks, {cores} cores, {free} free cores")
    print(f"# allreduce of {options.bytes} bytes, float32 SUM; of both in a row, at best 0.5")
    for name, value in seconds.items():
        ratio = f"{value / seconds['in a row']:6.2f} of both in a row" if "together" in name else ""
        print(f"  {name:22} {value * 1e3:10.3f} ms {ratio}")
    if options.json:
        record = {"machine": asdict(machine), "bytes": options.bytes, "free_cores": free, "seconds": seconds}
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
