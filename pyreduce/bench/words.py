"""What a run says around its table: the header before, the summary after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, log

from pyreduce.bench.machine import Machine
from pyreduce.bench.measure import BUDGET, Cell, Row
from pyreduce.bench.options import AUTO, Options, format_size
from pyreduce.bench.workloads import Workload

__all__ = ["count_wrong", "header", "summary"]

SMALL, LARGE = 4 << 10, 1 << 20


def header(machine: Machine, options: Options) -> list[str]:
    """What was measured, on what, and what the columns mean."""
    m = machine
    crowded = f", oversubscribed: {m.ranks_on_node} ranks on {m.cores} cores" if m.oversubscribed else ""
    nodes = "1 node" if m.nodes == 1 else f"{m.nodes} nodes"
    iterations = str(options.iters) if options.iters else f"as many as fit {BUDGET} s a size"
    sync = "a barrier before each call" if options.sync == "barrier" else "none, calls back to back"
    lines = [
        f"pyreduce {m.pyreduce} ({m.kernels} kernels), Python {m.python}, NumPy {m.numpy}, mpi4py {m.mpi4py}",
        f"{m.mpi} (MPI {m.mpi_standard}), {_plural(m.ranks, 'rank')} on {nodes}, "
        f"{_plural(m.cores, 'core')} a node ({m.cpu}){crowded}",
        f"op {options.op}, dtype {options.dtype}, sync: {sync}; iterations: {iterations}, "
        f"warm-up {options.warmup}, {_plural(options.rotate, 'pair')} of buffers",
        "",
        *(_explain_steps(options.workload) if options.workload else _explain_sizes()),
        "ratio   native's time / this time: above 1 is faster than native, the MPI's own collective called directly",
        "#wrong  wrong elements on all ranks, before and after the timing",
    ]
    if options.workload and options.op == "AVG":
        lines.append("native  sums, for MPI has no AVG, and then divides what came out by P: in its time, as people do")
    if AUTO in options.algorithms:
        lines.append("auto    what the library chooses, in brackets")
    return [f"# {line}".rstrip() for line in lines]


def _explain_sizes() -> list[str]:
    return [
        "size    bytes of the whole vector of P blocks, for allgather too (where OSU prints the bytes of one rank)",
        "time    us, the slowest rank's, median of the iterations",
        "algbw   size / time, GB/s of 1e9 bytes",
        "busbw   algbw x 2(P-1)/P for allreduce, x (P-1)/P for the others: what a rank must send at least, a second",
    ]


def _explain_steps(workload: Workload) -> list[str]:
    w = workload
    shortened = f", all 1/{w.scale} as long" if w.scale > 1 else ""
    sizes = ", ".join(f"{count * w.itemsize / 1e6:.1f}" for count in w.buckets)
    return [
        f"workload {w.name}: {_plural(w.tensors, 'gradient')}{shortened}, {w.parameters} elements, "
        f"{w.nbytes / 1e6:.1f} MB, the last first,",
        f"in {_plural(len(w.buckets), 'bucket')}, closed before the gradient that would take them past "
        f"{format_size(w.bucket)} (a longer one is a bucket of its own)",
        f"MB of each: {sizes}",
        "",
        "step    all buckets, one blocking call after the other, nothing computed in between: each is allreduced, out",
        "        of place; or each is reduce-scattered into the rank's shard, then each is gathered, around the shard",
        "s/step  the slowest rank's, median of the steps, which alternate: one by each algorithm",
        "moved   MB of 1e6 bytes: what a rank must send at least in a step, 2(P-1)/P of the gradients",
    ]


def summary(rows: Sequence[Row], machine: Machine, options: Options) -> list[str]:
    """How the algorithms compare, whether all is right, and what to try next."""
    names = [AUTO] if AUTO in options.algorithms else list(options.algorithms)
    lines = [""]
    if names and machine.ranks > 1 and not options.workload:
        what = "what the library chooses" if names == [AUTO] else ", ".join(names)
        lines += [f"{what} against native (mean ratio, out of place and in place):",
                  f"{'':32}{'small, to 4K':>14}{'middle':>14}{'large, from 1M':>16}"]  # fmt: skip
        lines += _ratios(rows, names)
        lines.append("")
    wrong, failed = count_wrong(rows), sum(bool(cell.failed and not cell.wrong) for row in rows for cell in _cells(row))
    lines.append(f"wrong elements: {wrong}" + (f"; failed: {_plural(failed, 'measurement')}" if failed else ""))
    lines += ["next:", *_next_commands(rows, machine, options)]
    return [f"# {line}".rstrip() for line in lines]


def count_wrong(rows: Sequence[Row]) -> int:
    """Wrong elements of a whole run."""
    return sum(cell.wrong or 0 for row in rows for cell in _cells(row))


def _cells(row: Row) -> tuple[Cell, Cell]:
    return row.out_of_place, row.in_place


def _ratios(rows: Sequence[Row], names: Sequence[str]) -> Iterator[str]:
    classes = [(0, SMALL), (SMALL + 1, LARGE - 1), (LARGE, float("inf"))]
    for collective in dict.fromkeys(row.collective for row in rows):
        for name in names:
            mine = [row for row in rows if (row.collective, row.algorithm) == (collective, name)]
            means = [_mean_ratio([row for row in mine if low <= row.nbytes <= high]) for low, high in classes]
            label = collective if names == [AUTO] else f"{collective}, {name}"
            yield f"  {label:30}{means[0]:>14}{means[1]:>14}{means[2]:>16}"


def _mean_ratio(rows: Sequence[Row]) -> str:
    """Geometric mean of the ratios that there are."""
    ratios = [cell.ratio for row in rows for cell in (row.out_of_place, row.in_place) if cell.ratio]
    return f"{exp(sum(map(log, ratios)) / len(ratios)):.2f}x" if ratios else "-"


def _next_commands(rows: Sequence[Row], machine: Machine, options: Options) -> list[str]:
    if machine.ranks == 1:
        return ["  ./mpi_launch.sh -n 4 python -m pyreduce.bench      with one rank there is nobody to talk to"]
    if options.workload:
        again = f"python -m pyreduce.bench --workload {options.workload.name}"
        return [f"  ./mpi_launch.sh -n {machine.ranks} {again} --dtype float16 --algorithm auto,ring --json steps.json"]
    collective = rows[0].collective if rows else "allreduce"
    return [
        f"  ./mpi_launch.sh -n {machine.ranks} python -m pyreduce.bench -b 1M -e 64M -f 4 --plot bench.png",
        f"  ./mpi_launch.sh -n 1 python -m pyreduce.explain {collective} --algorithm ring -n {machine.ranks}",
    ]


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
