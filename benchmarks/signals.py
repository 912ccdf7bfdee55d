"""Latency of signals: notify + wait and put_notify + wait, on both transports, and the same in plain mpi4py.

    mpirun -n 2 python benchmarks/signals.py [--rounds N] [--json FILE]

Two ranks play ping-pong; with more, ranks 2, 3, ... play it with each other too, all pairs at once, so that with more
ranks than cores every wait has to give way. A figure is half a round trip, in microseconds: from before a notify on one
rank to after the wait on the other. The kinds are measured in turn, several times over; told is the median of the
repeats, and the ratio of medians to plain mpi4py. A plain loop that never yields its core may take milliseconds a round
when ranks outnumber cores; it gets fewer rounds there.

What plain mpi4py does: Accumulate of 1 and Flush; Sync, a load and an Iprobe until the value is there. With data: Put
and Flush before.
"""

from __future__ import annotations

import argparse
import json
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

DATA = 8  # float64 elements put along


class Plain:
    """The same with mpi4py alone."""

    def __init__(self, comm: MPI.Intracomm, data: int) -> None:
        self.comm = comm
        self.win = MPI.Win.Allocate(8 * (16 + DATA), 1, comm=comm)
        self.words = np.frombuffer(memoryview(self.win.tomemory()), np.int64)
        self.words[:] = 0
        self.win.Lock_all()
        self.win.Sync()
        self.one = np.ones(1, np.int64)
        self.data = np.arange(float(data))
        self.bytes = 8 * data
        comm.Barrier()

    def send(self, peer: int) -> None:
        if self.bytes:
            self.win.Put([self.data, MPI.BYTE], peer, (128, self.bytes, MPI.BYTE))
            self.win.Flush(peer)
        self.win.Accumulate([self.one, MPI.INT64_T], peer, (0, 1, MPI.INT64_T), MPI.SUM)
        self.win.Flush(peer)

    def wait(self, number: int) -> None:
        words, sync, probe = self.words, self.win.Sync, self.comm.Iprobe
        sync()
        while words[0] < number:
            probe()
            sync()

    def close(self) -> None:
        self.win.Unlock_all()
        del self.words
        self.win.Free()


class Ours:
    """pyreduce on one transport."""

    def __init__(self, comm: MPI.Intracomm, data: int, transport: str) -> None:
        self.communicator = pr.Communicator(comm, transport=transport)
        self.signal = self.communicator.signal(1)
        self.window = self.communicator.window(DATA)
        self.data = np.arange(float(data)) if data else None
        comm.Barrier()

    def send(self, peer: int) -> None:
        if self.data is not None:
            self.window.put_notify(peer, ..., self.data, self.signal, 0)
        else:
            self.signal.notify(peer, 0)

    def wait(self, number: int) -> None:
        self.signal.wait(0, number)

    def close(self) -> None:
        self.communicator.close()


def half_round_trip(comm: MPI.Intracomm, kind: Plain | Ours, begun: int, rounds: int) -> float:
    """Seconds from notify to wait; of rank 0's pair."""
    peer, send, wait = comm.rank ^ 1, kind.send, kind.wait
    comm.Barrier()
    start = perf_counter()
    if peer < comm.size:
        if comm.rank < peer:
            for number in range(begun + 1, begun + rounds + 1):
                send(peer)
                wait(number)
        else:
            for number in range(begun + 1, begun + rounds + 1):
                wait(number)
                send(peer)
    took = perf_counter() - start
    comm.Barrier()
    return took / rounds / 2


def measure(comm: MPI.Intracomm, data: int, rounds: int, repeats: int, crowded: bool) -> dict[str, float]:
    """Median microseconds of every kind, measured in turn."""
    makers: dict[str, Callable[[], Plain | Ours]] = {
        "plain mpi4py": lambda: Plain(comm, data),
        "rma": lambda: Ours(comm, data, "rma"),
        "shared": lambda: Ours(comm, data, "shared"),
    }
    kinds = {name: make() for name, make in makers.items()}
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    counts = {name: max(rounds // 100, 5) if crowded and name == "plain mpi4py" else rounds for name in kinds}
    for repeat in range(repeats + 1):  # the first is to warm up
        for name, kind in kinds.items():
            seconds = half_round_trip(comm, kind, repeat * counts[name], counts[name])
            if repeat:
                taken[name].append(seconds * 1e6)
    for kind in kinds.values():
        kind.close()
    return {name: round(comm.bcast(statistics.median(values)), 3) for name, values in taken.items()}


def main() -> int:
    """Measure, print on rank 0, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description="Latency of signals.")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    machine = describe_machine(comm)
    if comm.size < 2:
        parser.error("needs two ranks at least")
    results = {
        what: measure(comm, data, options.rounds, options.repeats, machine.oversubscribed)
        for what, data in (("notify + wait", 0), ("put_notify + wait", DATA))
    }
    if comm.rank:
        return 0
    print(f"# half a round trip in us, {comm.size} ranks, {MPI.Get_library_version().splitlines()[0].strip()}")
    print(f"# {'':18} {'plain mpi4py':>14} {'rma':>10} {'ratio':>7} {'shared':>10} {'ratio':>7}")
    for what, times in results.items():
        plain = times["plain mpi4py"]
        rma, shared = (f"{times[name]:10.2f} {times[name] / plain:7.2f}" for name in ("rma", "shared"))
        print(f"  {what:18} {plain:14.2f} {rma} {shared}")
    if options.json:
        record = {"machine": asdict(machine), "half_round_trip_us": results}
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
