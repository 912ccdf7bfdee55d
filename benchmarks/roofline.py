"""How near the collectives come to what memory allows, measured in one run.

    mpirun -n 2 python benchmarks/roofline.py [--bytes 128M] [--json FILE]

T is the time that all P processes at once need to copy S bytes each, with stores that stream past the caches; of the
ways to copy, the fastest counts. An allreduce must read S and write S: its limit is T. reduce_scatter reads S and
writes S/P, allgather reads S/P and writes S: T(P+1)/(2P). Copies and collectives (float32 SUM, out of place) alternate;
the time of a turn is the slowest rank's, the median over the turns counts. Results are checked before; exit status 1 if
an element is wrong.

Where pyreduce has `Communicator.empty`, reduce_scatter is also measured with its input in such an array, which peers
read where it is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from compare import COLLECTIVES, DTYPE, TIMEOUT, TURNS, Array, Contender, Memory, count_rows, facts, race
from mpi4py import MPI

import pyreduce as pr
from pyreduce._core import lib
from pyreduce.bench.job import end_together
from pyreduce.bench.options import parse_size

EMPTY = "reduce_scatter, input from empty"


def make_copies(source: Array, out: Array) -> list[Contender]:
    """All ways there are to copy an array."""
    found = [Contender("np.copyto", partial(np.copyto, out, source))]
    for name in ("pr_copy", "pr_copy_streaming"):
        if hasattr(lib, name):
            copy = partial(getattr(lib, name), source.nbytes, out.ctypes.data, source.ctypes.data)
            found.append(Contender(name, copy))
    return found


def make_collectives(communicator: pr.Communicator, memory: Memory, rows: int) -> dict[str, list[Contender]]:
    """Every collective's ways to be called."""
    found = {}
    for name in COLLECTIVES:
        call = partial(getattr(communicator, name), memory.sent(name, rows), memory.received(name, rows))
        found[name] = [Contender(name, call)]
    if hasattr(communicator, "empty"):
        shared = communicator.empty(rows, DTYPE)
        shared[:] = memory.source[:rows]
        call = partial(communicator.reduce_scatter, shared, memory.received("reduce_scatter", rows))
        found["reduce_scatter"].append(Contender(EMPTY, call))
    return found


def check(memory: Memory, collectives: dict[str, list[Contender]], copies: Sequence[Contender], rows: int) -> int:
    """Wrong elements of everything that is to be timed."""
    source, out, wrong = memory.source[:rows], memory.out[:rows], 0
    cases = [(one, source, out, source) for one in copies]
    for name, ways in collectives.items():
        sent, received, expected = (part(name, rows) for part in (memory.sent, memory.received, memory.expected))
        cases += [(one, sent, received, expected) for one in ways]
    for one, sent, received, expected in cases:
        one.wrong = memory.count_wrong(one, sent, received, expected)
        wrong += one.wrong
        if one.wrong and memory.comm.rank == 0:
            print(f"# {one.name}: {one.wrong} WRONG elements", flush=True)
    return wrong


def limit_share(collective: str, nranks: int) -> float:
    """The limit of a collective, as a share of T.

    >>> limit_share("allreduce", 4), limit_share("allgather", 4)
    (1.0, 0.625)
    """
    return 1.0 if collective == "allreduce" else (nranks + 1) / (2 * nranks)


def evaluate(collectives: dict[str, list[Contender]], copy: Contender, nranks: int) -> dict[str, dict[str, Any]]:
    """Limit, time and fraction of the limit, of each way to call a collective."""
    found: dict[str, dict[str, Any]] = {}
    for name, ways in collectives.items():
        limit = limit_share(name, nranks) * median(copy.seconds) * 1e6
        for one in ways:
            figures = one.figures()
            found[one.name] = {"limit_us": limit, "fraction": limit / figures["median_us"], **figures}
    if EMPTY in found:
        found[EMPTY]["speed_up"] = found["reduce_scatter"]["median_us"] / found[EMPTY]["median_us"]
    return found


def show(results: dict[str, dict[str, Any]], copies: Sequence[Contender], best: Contender, nbytes: int, P: int) -> None:
    """Print the table."""
    for copy in copies:
        seconds = median(copy.seconds)
        mark = " = T" if copy is best else ""
        print(f"# copy, {copy.name:18} {seconds * 1e3:10.3f} ms, {2 * P * nbytes / seconds / 1e9:6.1f} GB/s{mark}")
    print(f"# {'':34}{'limit ms':>10}{'time ms':>10}{'min ms':>10}{'of limit':>10}{'speed-up':>10}")
    for name, row in results.items():
        times = "".join(f"{row[key] / 1e3:10.3f}" for key in ("limit_us", "median_us", "min_us"))
        speed_up = f"{row['speed_up']:10.2f}" if "speed_up" in row else ""
        print(f"  {name:34}{times}{row['fraction']:10.2f}{speed_up}")


def read_options() -> argparse.Namespace:
    """Parse the command line; the same on every rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=parse_size, default="128M", help="of the whole vector (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=20, help="that timing may take (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    """Measure, print on rank 0, and write JSON if asked to; the exit status."""
    options, comm = read_options(), MPI.COMM_WORLD
    machine = facts(comm, gloo=False)
    rows = count_rows(options.bytes, comm.size)
    memory = Memory(comm, rows)
    copies = make_copies(memory.source, memory.out)
    with pr.Communicator(comm, timeout=TIMEOUT) as communicator:
        collectives = make_collectives(communicator, memory, rows)
        if check(memory, collectives, copies, rows):
            return 1
        everyone = [*copies, *(one for ways in collectives.values() for one in ways)]
        turns = race(comm, everyone, options.seconds, *TURNS)
    if comm.rank:
        return 0
    best = min(copies, key=lambda copy: median(copy.seconds))
    results = evaluate(collectives, best, comm.size)
    nbytes = rows * DTYPE.itemsize
    print(f"# {machine['mpi']}, {comm.size} ranks, {machine['cores']} cores ({machine['cpu']}), {nbytes} bytes, "
          f"{turns} turns")  # fmt: skip
    show(results, copies, best, nbytes, comm.size)
    if options.json:
        record = {
            "machine": machine,
            "nbytes": nbytes,
            "turns": turns,
            "copies": {copy.name: copy.figures() for copy in copies},
            "T_us": median(best.seconds) * 1e6,
            "collectives": results,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    end_together(main)
