"""``python -m pyreduce.simulate COLLECTIVE -n P --bytes S``: how long algorithms take on a network, without MPI."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import isfinite
from typing import Any

from pyreduce import algorithms
from pyreduce.commandline import parse_bytes, reporting_by
from pyreduce.errors import Unsupported
from pyreduce.programs import COLLECTIVES
from pyreduce.simulate.events import MOST_MESSAGES, Timing, predict
from pyreduce.simulate.network import FOLD, MESSAGE, Hop, Network, lower_bound
from pyreduce.simulate.pictures import FORMATS, draw_gantt, draw_times, gantt_name, why_not
from pyreduce.topology import virtual_nodes

__all__ = ["format_bytes", "format_seconds", "main", "parse_bytes", "parse_seconds", "report"]

GANTT_RANKS = 16
MOST_UNASKED = 200_000  # messages of an algorithm that nobody has named
SHOWN = 4  # messages of a critical path, at its start and at its end
SIZES = [*(1 << power for power in range(3, 30, 2)), 1 << 30]  # that are drawn

UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_seconds(text: str) -> float:
    """``1e-6``, ``1us``, ``0.25ns``, ``2ms`` or ``1s``, in seconds."""
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    try:
        seconds = float(text.removesuffix(unit)) * UNITS.get(unit, 1.0)
    except ValueError:
        seconds = -1.0
    if not (isfinite(seconds) and seconds >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: 1e-6, 1us, 0.25ns")
    return seconds


def parse_share(text: str) -> float:
    """``0.1`` or ``10%``."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not (isfinite(share) and share >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no fraction: 0.1 or 10%")
    return share


def parse_slow(text: str) -> tuple[int, float]:
    """``RANK:FACTOR``."""
    try:
        rank, factor = text.split(":")
        slow = int(rank), float(factor)
    except ValueError:
        slow = -1, 0.0
    if slow[0] < 0 or not (isfinite(slow[1]) and slow[1] > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no rank and factor above 0: 3:2.5")
    return slow


def _at_least(least: int) -> Any:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r}: needs a whole number, {least} at least")
        return number

    return parse


def format_seconds(seconds: float) -> str:
    """``12.3 us``."""
    for unit in ("s", "ms", "us"):
        if seconds >= 0.9995 * UNITS[unit]:
            return f"{seconds / UNITS[unit]:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns" if seconds else "0"


def format_bytes(nbytes: float) -> str:
    """``32 MiB``, ``1.5 KiB``, ``73 B``."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.4g} {unit}"
    return f"{nbytes:.0f} B"


def _describe_network(network: Network, segments: int) -> Iterator[str]:
    def rates(alpha: float, beta: float) -> str:
        speed = f" ({1e-9 / beta:.4g} GB/s)" if beta else ""
        return f"alpha {format_seconds(alpha)}, beta {format_seconds(beta)}/B{speed}"

    fold = f"gamma {format_seconds(network.gamma)}/B"
    if network.topology is None:
        yield f"  {rates(network.alpha, network.beta)}, {fold}"
    else:
        yield f"  {network.topology}; between them {rates(network.alpha, network.beta)}"
        yield f"  within a node {rates(*network.within)}; {fold}"
    if network.jitter:
        yield f"  messages take up to {network.jitter:.4g} longer, at random (seed {network.seed})"
    if network.slow:
        yield "  slow: " + ", ".join(f"rank {rank} by {factor:.4g}" for rank, factor in network.slow.items())
    if segments > 1:
        yield f"  {segments} segments, 2 in flight"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + "s" * (number != 1)


def table(timings: Sequence[Timing]) -> Iterator[str]:
    """A line an algorithm, the fastest first."""
    rows = [["algorithm", "time", "bound/time", "rounds", "bytes sent a rank", "alpha", "beta", "gamma"]]
    for timing in timings:
        shares = [_percent(part, timing.time) for part in timing.shares]
        most, least = int(timing.bytes_sent.max()), int(timing.bytes_sent.min())
        sent = format_bytes(most) if format_bytes(most) == format_bytes(least) else f"up to {format_bytes(most)}"
        row = [timing.name, format_seconds(timing.time), _percent(timing.bound, timing.time), f"{timing.rounds.max()}"]
        rows.append([*row, sent, *shares])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _tell_hop(kind: str, hops: list[Hop]) -> str:
    first, last = hops[0], hops[-1]
    rounds = f"round {first.round}" if first.round == last.round else f"rounds {first.round}-{last.round}"
    span = f"{format_seconds(first.start)} to {format_seconds(last.end)}"
    nbytes = format_bytes(sum(hop.nbytes for hop in hops))
    if kind == FOLD:
        return f"    {rounds}: rank {first.rank} folds {nbytes}, {span}"
    return f"    {rounds}: rank {first.rank} sends {nbytes} to rank {first.peer}, {span}"


def critical_path(timing: Timing) -> Iterator[str]:
    """What made the last rank late: totals, then the messages and folds themselves, the middle left out if long."""
    hops, finish = timing.critical, timing.finish
    if not hops:
        yield "  critical path: nothing takes time"
        return
    early = float(finish.min())
    if early == timing.time:
        yield f"  all ranks are done at {format_seconds(timing.time)}"
    else:
        yield (
            f"  rank {timing.last} is done last, at {format_seconds(timing.time)}; rank {int(finish.argmin())} first, "
            f"at {format_seconds(early)}"
        )
    kinds = Counter(hop.kind for hop in hops)
    alpha, beta, gamma = (format_seconds(part) for part in timing.shares)
    happened = f"{_count(kinds[MESSAGE], 'message')} and {_count(kinds[FOLD], 'fold')}"
    yield f"  critical path: {happened}; alpha {alpha}, beta {beta}, gamma {gamma}"
    ranks = Counter(rank for hop in hops for rank in {hop.rank, hop.peer})
    rank, times = ranks.most_common(1)[0]
    if len(hops) > 2 and 2 * times > len(hops) and timing.nranks > 2:
        yield f"  rank {rank} has part in {times} of these {len(hops)}"
    lines, before = [], hops[0]
    for (kind, _, _), group in groupby(hops, lambda hop: (hop.kind, hop.rank, hop.peer)):
        run = list(group)
        apart = not {before.rank, before.peer} & {run[0].rank, run[0].peer}
        lines.append(_tell_hop(kind, run) + ", once the link was free" * apart)
        before = run[-1]
    if len(lines) > 2 * SHOWN + 1:
        lines[SHOWN:-SHOWN] = [f"    ... {len(lines) - 2 * SHOWN} more ..."]
    yield from lines


def report(timings: Sequence[Timing], network: Network, segments: int, detailed: Sequence[str]) -> Iterator[str]:
    """All of it, line by line; of `detailed` with the critical path."""
    first = timings[0]
    plural = "s" * (first.nranks > 1)
    yield f"{first.collective} of {format_bytes(first.nbytes)} on {first.nranks} rank{plural}"
    yield from _describe_network(network, segments)
    yield f"  lower bound {format_seconds(first.bound)}"
    yield ""
    yield from table(timings)
    for timing in timings:
        if timing.name in detailed:
            yield ""
            yield f"{timing.name}"
            yield from critical_path(timing)
            if timing.compared < timing.nranks:
                yield (
                    f"  ({timing.compared} of {timing.nranks} ranks' programs were compared: rotations of each other; "
                    "the rest is taken to be so)"
                )


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pyreduce.simulate",
        description="Predict how long algorithms take on a network, and say why. Times are seconds, or have a unit: "
        "1us, 0.1ns.",
    )
    parser.add_argument("collective", choices=COLLECTIVES)
    parser.add_argument("-n", "--ranks", type=_at_least(1), default=4, metavar="P", help="number of ranks, default 4")
    parser.add_argument(
        "-b", "--bytes", type=parse_bytes, default=1 << 20, metavar="S", help="of the whole vector, default 1M"
    )
    parser.add_argument(
        "-a",
        "--algorithm",
        action="append",
        metavar="A",
        help="may be repeated; default: all that serve this, and are soon played",
    )
    parser.add_argument("--load", metavar="FILE.py", help="run this file first, which registers algorithms of yours")
    cost = parser.add_argument_group("costs")
    cost.add_argument("--alpha", type=parse_seconds, default=2e-6, metavar="T", help="of a message, default 2us")
    cost.add_argument("--beta", type=parse_seconds, default=1e-10, metavar="T", help="a byte sent, default 0.1ns")
    cost.add_argument("--gamma", type=parse_seconds, default=1e-10, metavar="T", help="a byte folded, default 0.1ns")
    cost.add_argument("--nodes", metavar="N", help="nodes of ranks, each with one link: 4, 4x2, 3+5 or 0,1,0,1")
    cost.add_argument("--alpha-node", type=parse_seconds, metavar="T", help="alpha within a node, default --alpha")
    cost.add_argument("--beta-node", type=parse_seconds, metavar="T", help="beta within a node, default --beta")
    cost.add_argument(
        "--jitter", type=parse_share, default=0.0, metavar="F", help="messages take up to F longer: 0.1 or 10%%"
    )
    cost.add_argument("--seed", type=int, metavar="N", help="of the jitter, default 0")
    cost.add_argument(
        "--slow", type=parse_slow, action="append", default=[], metavar="RANK:FACTOR", help="may be repeated"
    )
    cost.add_argument(
        "--segments", type=_at_least(1), default=1, metavar="K", help="cut blocks into K segments, 2 in flight"
    )
    parser.add_argument(
        "--plot", metavar="FILE.png", help="draw times by size, and for 16 ranks or fewer FILE-gantt.png: who does what"
    )
    return parser


def _read_network(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Network:
    topology = None
    if options.nodes is not None:
        try:
            topology = virtual_nodes(options.nodes, options.ranks, "--nodes")
        except ValueError as error:
            parser.error(str(error))
    for word in ("alpha_node", "beta_node"):
        if getattr(options, word) is not None and topology is None:
            parser.error(f"--{word.replace('_', '-')} says what holds within a node; needs --nodes")
    if options.seed is not None and not options.jitter:
        parser.error("--seed is that of the jitter; needs --jitter")
    for rank, _ in options.slow:
        if rank >= options.ranks:
            parser.error(f"--slow {rank}: ranks are 0..{options.ranks - 1}")
    return Network(
        options.alpha, options.beta, options.gamma, topology, options.alpha_node, options.beta_node,
        options.jitter, options.seed or 0, dict(options.slow),
    )  # fmt: skip


def _check_plot(parser: argparse.ArgumentParser, path: str) -> None:
    if not path.endswith(FORMATS):
        parser.error(f"--plot {path}: its name needs to end in {' or '.join(FORMATS)}")
    if not os.path.isdir(os.path.dirname(path) or "."):
        parser.error(f"--plot {path}: no such directory")
    why = why_not()
    if why:
        parser.error(why)


def _predict(name: str, options: argparse.Namespace, network: Network, nbytes: int, spans: bool = False) -> Timing:
    return predict(
        algorithms.get(name).rounds, options.collective, options.ranks, nbytes, network,
        name=name, segments=options.segments, spans=spans, most=MOST_MESSAGES if options.algorithm else MOST_UNASKED,
    )  # fmt: skip


def _predict_all(names: Sequence[str], options: argparse.Namespace, network: Network) -> tuple[list[Timing], list[str]]:
    """Of all that serve this, the fastest first; and why the others do not."""
    timings, refused = [], []
    for name in names:
        try:
            timings.append(_predict(name, options, network, options.bytes))
        except Unsupported as error:
            refused.append(str(error))
    return sorted(timings, key=lambda timing: timing.time), refused


def _draw(options: argparse.Namespace, network: Network, timings: Sequence[Timing]) -> Iterator[str]:
    """Both pictures; their names."""
    nranks, names = options.ranks, [timing.name for timing in timings]
    # Blocks of whole bytes, all equal: a few bytes more, and the fast way of computing.
    rounded = [-(-size // nranks) * nranks for size in SIZES]
    lines = {name: [_predict(name, options, network, size).time for size in rounded] for name in names}
    bound = [lower_bound(options.collective, nranks, size, network) for size in rounded]
    title = f"{options.collective}, {nranks} ranks" + (f", {network.topology}" if network.topology else "")
    draw_times(options.plot, title, SIZES, lines, bound, format_bytes, format_seconds)
    yield options.plot
    if nranks <= GANTT_RANKS:
        spanned = [_predict(name, options, network, options.bytes, spans=True) for name in names]
        path = gantt_name(options.plot)
        draw_gantt(path, f"{title}, {format_bytes(options.bytes)}", spanned, format_seconds)
        yield path


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = _make_parser()
    options = parser.parse_args(argv)
    network = _read_network(parser, options)
    if options.plot:
        _check_plot(parser, options.plot)
    with reporting_by(parser, options.load):
        named = list(dict.fromkeys(options.algorithm or ()))
        names = named or [name for name in algorithms.names() if not algorithms.has_no_program(name)]
        timings, refused = _predict_all(names, options, network)
        if not timings:
            parser.error("; ".join(refused))
        for line in report(timings, network, options.segments, named or [timings[0].name]):
            print(line)
        for line in refused:
            print(f"\nleft out: {line}")
        if options.plot:
            print("\ndrawn: " + ", ".join(_draw(options, network, timings)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
