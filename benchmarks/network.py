"""The MPI's own collectives and pyreduce's algorithms between hosts, turn about in one job, against the wire's limit.

    benchmarks/network.sh 4 1 1gbit 50us [-- python benchmarks/network.py [--sizes 8,64K] [--output FILE] ...]

Runs on any hosts; `network.sh` makes some on one machine and says how fast their links are. float32 SUM, out of place,
results into given arrays; sizes are bytes of the whole vector, S. What is compared, and how it is timed, is
`compare.py`'s: turns of the contenders alternate, each turn's time is its slowest rank's, told are medians, and every
result is checked before it is timed. Contenders: `MPI`, called through mpi4py, and pyreduce with each of
``--algorithms``; `default` is what a caller gets who names none.

The wire's limit: with N hosts (those of ``Split_type``), every host's link must carry S(N-1)/N each way in a
reduce_scatter or an allgather, and twice that in an allreduce, whatever the algorithm and however many ranks a host
has. (With m of P ranks on the smallest host: S(1 - m/P).) Divided by the rate, that is the least time; `of wire` is
that time divided by the time taken. The rate it uses is what a link of NETWORK_RATE has left for data, 1448 of the 1514
bytes of a full Ethernet frame of TCP; if NETWORK_RATE is not known, what a large message from one host to another gets.
The JSON keeps both. `sent` is what the busiest host really sent in one call, headers included, divided by what it must.

Also measured, for those who predict: alpha, half a round trip of 8 bytes between two hosts; beta, seconds a byte of a
large message; the same on one host; the two again while all ranks send around a ring (`alpha_busy`, `beta_busy`: hosts
that are namespaces of one machine share its cores); gamma, seconds a byte that pyreduce's fold of two takes, all ranks
at once. `benchmarks/validate.py` compares what the simulator makes of them with what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from compare import COLLECTIVES, DTYPE, TIMEOUT, Contender, Memory, Native, count_rows, facts, race
from mpi4py import MPI

import pyreduce as pr
from pyreduce import ops
from pyreduce.bench.job import end_together
from pyreduce.bench.options import format_size, parse_size
from pyreduce.launcher import find_nodes
from pyreduce.topology import Topology

SIZES = "8,64,1K,8K,64K,512K,1M,8M,32M"
PAYLOAD = 1448 / 1514  # of a full frame: Ethernet's 14 bytes, IP's 20 and TCP's 32, with its time stamps
TURNS = (3, 31)  # the fewest, and the most if there is time
LARGE = 4 << 20  # bytes of the message that shows the rate
DEFAULT = "default"
SETTINGS = ("UCX_", "FI_", "MPIR_CVAR_")  # of the environment, kept with the results


@dataclass(frozen=True)
class Network:
    """The hosts and what joins them.

    Attributes
    ----------
    rate : float
        Bytes a second of a link, each way, headers included; 0 if nobody said.
    delay : float
        Seconds that are added to every message; None if nobody said.
    shaper : str
        What limits the links; None if nobody said.
    one_machine : bool
        The hosts share the cores of one machine: `network.sh` has made them.
    payload_rate : float
        Bytes of data a second: what `rate` leaves, or else what was measured.
    measured_rate : float
        Bytes a second of a large message from one host to another.
    share : float
        Of a vector: what the link of the host with the fewest ranks must carry, each way, in a reduce_scatter.
    """

    hosts: int
    ranks_a_host: int
    rate: float
    delay: float | None
    shaper: str | None
    one_machine: bool
    payload_rate: float
    measured_rate: float
    share: float

    def least_bytes(self, collective: str, nbytes: int) -> float:
        """What a link must carry, each way."""
        return nbytes * self.share * (2 if collective == "allreduce" else 1)


@dataclass
class Cell:
    """One collective and size.

    Attributes
    ----------
    asked, nbytes : int
        Bytes of the whole vector, as asked for and as measured.
    limit_us : float
        The wire's limit at `Network.payload_rate`.
    contenders : dict
        Of each by name: times; `runs`, the algorithms that ran; `ratio`, the MPI's time divided by its own; `of_wire`
        and `of_measured`, the limit at either rate divided by its time; `sent_bytes` by the busiest host in one call.
    """

    collective: str
    asked: int
    nbytes: int
    limit_us: float
    turns: int = 0
    contenders: dict[str, dict[str, Any]] = field(default_factory=dict)


# ---- the network ---------------------------------------------------------------------------------


def time_messages(comm: MPI.Intracomm, peer: int, nbytes: int, rounds: int) -> float:
    """Half a round trip between rank 0 and a peer, median; collective."""
    buffer, seconds = np.zeros(nbytes, np.uint8), [0.0]
    comm.Barrier()
    if comm.rank in (0, peer):
        other = peer - comm.rank
        for number in range(rounds + 1):
            begun = perf_counter()
            if comm.rank == 0:
                comm.Send(buffer, other)
                comm.Recv(buffer, other)
            else:
                comm.Recv(buffer, other)
                comm.Send(buffer, other)
            if number:  # the first finds its way
                seconds.append((perf_counter() - begun) / 2)
    comm.Barrier()
    return float(comm.bcast(median(seconds[1:] or seconds)))


def time_folds(comm: MPI.Intracomm) -> float:
    """Seconds a byte of folding two arrays that lie in no cache but the last, all ranks at once, the slowest rank's."""
    arrays = [np.ones(LARGE // DTYPE.itemsize, DTYPE) for _ in range(3)]
    op, seconds = ops.resolve_op(pr.SUM), []
    for _ in range(7):
        comm.Barrier()
        begun = perf_counter()
        ops.fold_arrays(op, arrays[:2], arrays[2])
        seconds.append(perf_counter() - begun)
    return float(comm.allreduce(median(seconds), MPI.MAX)) / LARGE


def measure_figures(comm: MPI.Intracomm, nodes: Topology) -> dict[str, float]:
    """Alpha, beta and gamma; collective."""
    figures = {}
    for suffix, same in (("", False), ("_node", True)):
        peers = [rank for rank in range(1, comm.size) if (nodes.node_of[rank] == 0) == same]
        if peers:
            alpha = time_messages(comm, peers[0], 8, 300)
            figures[f"alpha{suffix}"] = alpha
            figures[f"beta{suffix}"] = max(time_messages(comm, peers[0], LARGE, 7) - alpha, 0) / LARGE
    figures["alpha_busy"] = alpha = time_shifts(comm, 8, 200)
    figures["beta_busy"] = max(time_shifts(comm, LARGE, 7) - alpha, 0) / LARGE
    figures["gamma"] = time_folds(comm)
    return figures


def time_shifts(comm: MPI.Intracomm, nbytes: int, rounds: int) -> float:
    """Seconds of a round in which every rank sends to its right neighbour and receives from its left one."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent, received, seconds = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8), []
    for _ in range(rounds + 1):
        begun = perf_counter()
        comm.Sendrecv(sent, right, 0, received, left, 0)
        seconds.append(perf_counter() - begun)
    return float(comm.allreduce(median(seconds[1:]), MPI.MAX))


def describe_network(nodes: Topology, figures: dict[str, float]) -> Network:
    """From what `network.sh` says and from what has been measured."""
    crowds = [len(ranks) for ranks in nodes.nodes]
    rate = float(os.environ.get("NETWORK_RATE") or 0)
    delay = os.environ.get("NETWORK_DELAY")
    measured = 1 / figures["beta"] if figures.get("beta") else 0.0
    return Network(
        hosts=len(crowds),
        ranks_a_host=max(crowds),
        rate=rate,
        delay=float(delay) if delay else None,
        shaper=os.environ.get("NETWORK_SHAPER"),
        one_machine="NETWORK_HOSTS" in os.environ,
        payload_rate=rate * PAYLOAD or measured,
        measured_rate=measured,
        share=1 - min(crowds) / nodes.nranks,
    )


def count_sent() -> int:
    """Bytes that this host has sent so far through all of its interfaces but the loopback; 0 if it does not say."""
    try:
        lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    except OSError:
        return 0
    counts = {name.strip(): rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return sum(int(count[8]) for name, count in counts.items() if name != "lo")


# ---- the comparison ------------------------------------------------------------------------------


class Race:
    """The contenders of every cell."""

    def __init__(self, comm: MPI.Intracomm, communicator: pr.Communicator, names: Sequence[str], rows: int) -> None:
        self.comm, self.communicator, self.names = comm, communicator, names
        self.memory, self.native = Memory(comm, rows), Native(comm, typed=True)

    def measure(self, network: Network, collective: str, asked: int, seconds: float) -> Cell:
        """Check and time one collective on one size; collective."""
        rows = count_rows(asked, self.comm.size)
        sent, received = self.memory.sent(collective, rows), self.memory.received(collective, rows)
        expected = self.memory.expected(collective, rows)
        theirs = self.native.enter(collective, sent, received)
        theirs.name = "MPI"
        contenders = [theirs]
        for name in self.names:
            algorithm = None if name == DEFAULT else name
            call = partial(getattr(self.communicator, collective), sent, received, algorithm=algorithm)
            contenders.append(Contender(name, call))
        nbytes = rows * DTYPE.itemsize
        least = network.least_bytes(collective, nbytes)
        limit = least / network.payload_rate if network.payload_rate else 0.0
        cell = Cell(collective, asked, nbytes, 1e6 * limit)
        for contender in contenders:
            cell.contenders[contender.name] = self.check(contender, collective, sent, received, expected)
        sound = [contender for contender in contenders if contender.wrong == 0]
        if sound:
            cell.turns = race(self.comm, sound, seconds, *TURNS)
        for contender in sound:
            figures = cell.contenders[contender.name]
            figures |= contender.figures()
            time = figures["median_us"]
            figures["of_wire"] = cell.limit_us / time
            figures["of_measured"] = 1e6 * least / network.measured_rate / time if network.measured_rate else None
            if theirs.seconds:
                figures["ratio"] = cell.contenders[theirs.name]["median_us"] / time
        return cell

    def check(self, contender: Contender, collective: str, sent: Any, received: Any, expected: Any) -> dict[str, Any]:
        """What ran, what it sent and whether it was right; collective."""
        before = self.count_calls(collective)
        try:
            contender.wrong = self.memory.count_wrong(contender, sent, received, expected)
        except pr.Unsupported as error:  # on all ranks alike, before any communication
            return {"wrong": None, "trouble": str(error).splitlines()[0]}
        ran = [name for name, calls in self.count_calls(collective).items() if calls > before.get(name, 0)]
        self.comm.Barrier()
        begun = count_sent()
        contender.call()
        self.comm.Barrier()
        link = self.comm.allreduce(count_sent() - begun, MPI.MAX)
        return {"wrong": contender.wrong, "runs": "+".join(ran), "sent_bytes": link}

    def count_calls(self, collective: str) -> dict[str, int]:
        """Calls of ours so far, by algorithm."""
        return {name: stats.calls for (what, name), stats in self.communicator.stats.items() if what == collective}


def header(collective: str) -> str:
    """The columns' names."""
    return (
        f"#\n# {collective:14}{'bytes':>11}  {'':12}{'us':>13}{'MPI/it':>8}{'of wire':>9}{'sent':>7}{'turns':>7}  runs"
    )


def lines_of(network: Network, cell: Cell) -> Iterator[str]:
    """A line a contender."""
    least = network.least_bytes(cell.collective, cell.nbytes)
    for name, one in cell.contenders.items():
        start = f"  {cell.collective:14}{cell.nbytes:>11}  {name:12}"
        if one.get("trouble"):
            yield f"{start}  {one['trouble']}"
        elif one["wrong"]:
            yield f"{start}  {one['wrong']} WRONG elements, not timed"
        else:
            # Of a small message the headers are most.
            sent = f"{one['sent_bytes'] / least:.2f}" if least >= 1 << 14 else "-"
            figures = f"{one['median_us']:>13.1f}{one.get('ratio', 0):>8.2f}{one['of_wire']:>9.2f}"
            yield f"{start}{figures}{sent:>7}{cell.turns:>7}  {one['runs']}"


def show_start(machine: dict[str, Any], network: Network, figures: dict[str, float]) -> None:
    """What it runs on."""
    cores = f"{machine['cores']} cores{' in all' if network.one_machine else ' each'} ({machine['cpu']})"
    print(f"# {machine['mpi']}, {network.hosts} hosts of {network.ranks_a_host} ranks, {cores}, "
          f"pyreduce {machine['pyreduce']}")  # fmt: skip
    said = f"{network.rate / 1e6:.1f} MB/s, of data {network.rate * PAYLOAD / 1e6:.1f}" if network.rate else "not said"
    delay = "not said" if network.delay is None else f"{1e6 * network.delay:g} us"
    print(f"# link: {said} ({network.shaper or 'real'}); measured {network.measured_rate / 1e6:.1f} MB/s of data; "
          f"added delay {delay}")  # fmt: skip
    print(f"# `of wire` uses {network.payload_rate / 1e6:.1f} MB/s. alpha is seconds, beta and gamma seconds a byte: "
          + ", ".join(f"{name} {figure:.3g}" for name, figure in figures.items()))  # fmt: skip


def write_json(
    path: Path, machine: dict[str, Any], network: Network, figures: dict[str, float], cells: Sequence[Cell]
) -> None:
    """Everything, the time of every turn included."""
    record = {
        "machine": machine,
        "network": asdict(network),
        "figures": figures,
        "settings": {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)},
        "units": {"nbytes": "bytes of the whole vector", "_us": "microseconds a call", "ratio": "the MPI's time / its"},
        "dtype": str(DTYPE),
        "cells": [asdict(cell) for cell in cells],
    }  # fmt: skip
    path.write_text(json.dumps(record, indent=1) + "\n")


def read_options() -> argparse.Namespace:
    """Parse the command line; the same on every rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sizes", default=SIZES, metavar="SIZE,...", help="bytes of the whole vector (default %(default)s)")
    add("--collectives", default=",".join(COLLECTIVES), metavar="NAME,...", help="default %(default)s")
    add("--algorithms", default=f"{DEFAULT},native", metavar="NAME,...", help="of pyreduce (default %(default)s)")
    add("--seconds", type=float, default=3, help="that a cell should take (default %(default)s)")
    add("--output", type=Path, metavar="FILE", help="write a JSON with machine, network, versions and times")
    options = parser.parse_args()
    try:
        options.sizes = sorted({parse_size(text) for text in options.sizes.split(",")})
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    options.collectives, options.algorithms = options.collectives.split(","), options.algorithms.split(",")
    if not set(options.collectives) <= set(COLLECTIVES):
        parser.error(f"collectives are {', '.join(COLLECTIVES)}")
    if options.output is not None and not options.output.parent.is_dir():
        parser.error(f"there is no folder {options.output.parent}")
    return options


def main() -> int:
    """Measure, print on rank 0, and write what was asked for; the exit status."""
    options = read_options()
    comm = MPI.COMM_WORLD
    cells = []
    nodes = find_nodes(comm)
    if nodes.nnodes == 1:
        if comm.rank == 0:
            print("network.py: all ranks share one host; see benchmarks/network.sh", file=sys.stderr, flush=True)
        return 2
    with pr.Communicator(comm, timeout=TIMEOUT) as communicator:
        machine = facts(comm, gloo=False)
        figures = measure_figures(comm, nodes)
        network = describe_network(nodes, figures)
        if comm.rank == 0:
            show_start(machine, network, figures)
        rows = max(count_rows(size, comm.size) for size in options.sizes)
        cast = Race(comm, communicator, options.algorithms, rows)
        for collective in options.collectives:
            if comm.rank == 0:
                print(header(collective), flush=True)
            for size in options.sizes:
                cells.append(cast.measure(network, collective, size, options.seconds))
                if comm.rank == 0:
                    print(*lines_of(network, cells[-1]), sep="\n", flush=True)
    wrong = sum(one["wrong"] or 0 for cell in cells for one in cell.contenders.values())
    if comm.rank == 0:
        print(f"# {format_size(max(options.sizes))} at most; wrong elements: {wrong}", flush=True)
        if options.output:
            write_json(options.output, machine, network, figures, cells)
    return 1 if wrong else 0


if __name__ == "__main__":
    end_together(main)
