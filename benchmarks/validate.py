"""What the simulator predicts from alpha, beta and gamma of a network, against the times measured on it. No MPI.

    python benchmarks/validate.py benchmarks/results/network-4x1-1gbit.json [--from BYTES]

reads what `network.py` wrote: half a round trip of one small message (alpha), what a byte costs and what folding it
costs while all ranks are busy (beta, gamma), and the time of every program that it ran by name; and prints a table of
predicted and measured times, smallest vector first. The model (`pyreduce.simulate`) knows the wire and the folds; what
a call costs before its first message (`--call`) and what a round costs a rank's software (`--round`) are taken from the
measured times of the smallest vector: two figures for all algorithms.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from pyreduce import algorithms
from pyreduce.settings import read_settings
from pyreduce.simulate import Network, predict

LIMIT = 0.25


def cells_of(found: dict[str, Any]) -> list[tuple[str, str, int, float]]:
    """Collective, algorithm, bytes and seconds of everything that was run by name, and has a program."""
    named = set(algorithms.names()) - {"native", "shared", "hierarchical"}
    return [
        (cell["collective"], name, cell["nbytes"], told["median_us"] * 1e-6)
        for cell in found["cells"]
        for name, told in cell["contenders"].items()
        if name in named and "median_us" in told
    ]


def play(collective: str, name: str, nbytes: int, nranks: int, network: Network) -> float:
    """Seconds by the simulator, cut into segments as `pyreduce.execute` cuts."""
    settings = read_settings()
    segments = max(1, -(-nbytes // nranks // settings.segment_bytes))
    rounds = algorithms.get(name).rounds
    timing = predict(rounds, collective, nranks, nbytes, network, segments=segments, lanes=settings.in_flight)
    return float(timing.finish.max())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--from", dest="least", type=int, default=0, metavar="BYTES", help="leave out smaller vectors")
    options = parser.parse_args()
    found = json.loads(options.file.read_text())
    figures, shape = found["figures"], found["network"]
    nranks = shape["hosts"] * shape["ranks_a_host"]
    network = Network(alpha=figures["alpha"], beta=figures["beta_busy"], gamma=figures["gamma"])
    cells = sorted(cells_of(found), key=lambda cell: (cell[2], cell[0], cell[1]))
    least = min(nbytes for _, _, nbytes, _ in cells)
    call, turn = fit_overhead([cell for cell in cells if cell[2] == least], nranks, network)
    print(
        f"alpha {network.alpha * 1e6:.0f} us, 1/beta {1e-6 / network.beta:.1f} MB/s, gamma {network.gamma * 1e9:.2f} "
        f"ns a byte; a call {call * 1e6:.0f} us, a round {turn * 1e6:.0f} us (from {least} bytes)\n"
    )
    print("| bytes | collective | algorithm | predicted ms | measured ms | off by |")
    print("| --- | --- | --- | --- | --- | --- |")
    off = []
    for collective, name, nbytes, measured in cells:
        if nbytes < options.least:
            continue
        rounds = algorithms.get(name).program(collective, nranks, 0).cost().rounds
        predicted = play(collective, name, nbytes, nranks, network) + call + rounds * turn
        off.append(predicted / measured - 1)
        print(f"| {nbytes} | {collective} | {name} | {predicted * 1e3:.2f} | {measured * 1e3:.2f} | {off[-1]:+.0%} |")
    within = sum(abs(error) <= LIMIT for error in off)
    print(f"\n{within} of {len(off)} within {LIMIT:.0%}; the median is off by {np.median(np.abs(off)):.0%}.")


def fit_overhead(cells: list[tuple[str, str, int, float]], nranks: int, network: Network) -> tuple[float, float]:
    """What a call and a round cost beyond the model, by least squares of the smallest vectors' relative errors."""
    rows, rest = [], []
    for collective, name, nbytes, measured in cells:
        rounds = algorithms.get(name).program(collective, nranks, 0).cost().rounds
        rows.append([1.0 / measured, rounds / measured])
        rest.append(1.0 - play(collective, name, nbytes, nranks, network) / measured)
    (call, turn), *_ = np.linalg.lstsq(np.array(rows), np.array(rest), rcond=None)
    return max(float(call), 0.0), max(float(turn), 0.0)


if __name__ == "__main__":
    main()
