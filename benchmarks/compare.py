"""pyreduce's blocking calls, the MPI's own collectives and torch.distributed's gloo, turn about in one job.

    mpirun -n 2 python benchmarks/compare.py [--torch] [--sizes 8,64K,32M] [--json FILE] [--plot FILE.png]
    python benchmarks/compare.py --merge FILE.json FILE.json ...

float32 SUM, out of place, results into given arrays, what a caller gets who names no algorithm. Sizes are bytes of the
whole vector of P blocks, for allgather too, cut to blocks of whole and equally many elements. Contenders:

pyreduce    `pyreduce.Communicator`, as it is made by default
native      Allreduce, Reduce_scatter_block and Allgather of mpi4py, given ``[array, MPI.FLOAT]`` made beforehand, which
            is its fastest form (``--form plain`` gives arrays alone, as most people write it)
gloo        with ``--torch``: all_reduce, reduce_scatter and all_gather on one tensor each; its all_reduce works in
            place, so it is spared a buffer

A turn is a batch of calls back to back after a barrier, long enough to time; its time is the slowest rank's. Turns of
the contenders alternate. All work on the same arrays. Told are the medians over the turns, and ratios of medians: above
1, pyreduce is faster. Before anything is timed every contender's result is compared with the exact one. Exit status: 1
if an element is wrong.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import pyreduce as pr
from pyreduce.bench import values
from pyreduce.bench.cases import Problem
from pyreduce.bench.job import end_together
from pyreduce.bench.machine import describe_machine
from pyreduce.bench.options import format_size, parse_size

Array = NDArray[np.float32]
Call = Callable[[], object]

OURS = "pyreduce"
COLLECTIVES = ("allreduce", "reduce_scatter", "allgather")
SIZES = "8,64,1K,8K,64K,512K,4M,32M,128M"
DTYPE = np.dtype(np.float32)
TIMEOUT = 60.0  # seconds: a call of ours that hangs is reported, not waited for
BATCH = 0.02  # seconds a batch should take
LARGE = 1 << 20  # bytes from which fewer turns will do
TURNS, TURNS_LARGE = (11, 31), (5, 15)  # the fewest, and the most if there is time
COLORS = {"native": "#d1495b", "gloo": "#00798c"}


@dataclass
class Contender:
    """One way to do a collective.

    Attributes
    ----------
    call : callable
    in_place : bool
        The call reduces what lies in the result's place.
    wrong : int or None
        Wrong elements on all ranks; None before the check.
    trouble : str or None
        Why it cannot be called at all.
    calls : int
        Calls a batch.
    seconds : list of float
        A call's mean time in each batch, the slowest rank's.
    """

    name: str
    call: Call
    in_place: bool = False
    wrong: int | None = None
    trouble: str | None = None
    calls: int = 1
    seconds: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """What the JSON keeps."""
        if not self.seconds:
            return {"wrong": self.wrong, "trouble": self.trouble}
        times = [round(1e6 * seconds, 4) for seconds in self.seconds]
        return {"median_us": median(times), "min_us": min(times), "calls": self.calls, "turns_us": times, "wrong": 0}


@dataclass
class Cell:
    """All contenders on one collective and size.

    Attributes
    ----------
    asked, nbytes : int
        Bytes of the whole vector, as asked for and as measured.
    runs : str
        The algorithms that pyreduce ran.
    ratios : dict
        Each other contender's median time divided by ours.
    """

    collective: str
    asked: int
    nbytes: int
    runs: str
    turns: int
    contenders: dict[str, dict[str, Any]]
    ratios: dict[str, float]


class Memory:
    """Input, output and exact results, made once for the largest size; every size works on their first elements.

    Parameters
    ----------
    comm : MPI.Intracomm
    rows : int
        Elements of the largest vector.
    """

    def __init__(self, comm: MPI.Intracomm, rows: int) -> None:
        self.comm = comm
        problem = Problem(rows, pr.SUM, DTYPE, comm.size, comm.rank)
        self.source, self.out, self._reduction = (np.ones(rows, DTYPE) for _ in range(3))
        values.fill(self.source, 0, problem.inputs)
        values.fill(self._reduction, 0, problem.results)

    def sent(self, collective: str, rows: int) -> Array:
        """What this rank puts in, if the whole vector has so many rows."""
        return self.source[: rows // self.comm.size] if collective == "allgather" else self.source[:rows]

    def received(self, collective: str, rows: int) -> Array:
        """Where the result goes."""
        return self.out[: rows // self.comm.size] if collective == "reduce_scatter" else self.out[:rows]

    def expected(self, collective: str, rows: int) -> Array:
        """What must be there after the call."""
        own = rows // self.comm.size
        if collective == "reduce_scatter":
            return self._reduction[own * self.comm.rank : own * (self.comm.rank + 1)]
        if collective == "allreduce":
            return self._reduction[:rows]
        gathered = np.empty((self.comm.size, own), DTYPE)
        for rank, block in enumerate(gathered):
            values.fill(block, 0, partial(values.inputs, pr.SUM, DTYPE, self.comm.size, rank))
        return gathered.reshape(-1)

    def count_wrong(self, contender: Contender, sent: Array, received: Array, expected: Array) -> int:
        """Make the call once, on a place that holds nothing right; wrong elements on all ranks."""
        received.fill(np.nan)
        if contender.in_place:
            received[:] = sent
        contender.call()
        return int(self.comm.allreduce(np.count_nonzero(received != expected)))


class Ours:
    """pyreduce."""

    name = OURS

    def __init__(self, communicator: pr.Communicator) -> None:
        self.communicator = communicator

    def enter(self, collective: str, sent: Array, received: Array) -> Contender:
        return Contender(OURS, partial(getattr(self.communicator, collective), sent, received))

    def count_calls(self, collective: str) -> dict[str, int]:
        """Calls so far, by algorithm."""
        return {name: stats.calls for (what, name), stats in self.communicator.stats.items() if what == collective}


class Native:
    """The MPI's own, through mpi4py."""

    name = "native"

    def __init__(self, comm: MPI.Intracomm, typed: bool) -> None:
        self.typed = typed
        methods = (comm.Allreduce, comm.Reduce_scatter_block, comm.Allgather)
        self.methods: dict[str, Callable[..., None]] = dict(zip(COLLECTIVES, methods, strict=True))

    def enter(self, collective: str, sent: Array, received: Array) -> Contender:
        buffers = [[array, MPI.FLOAT] if self.typed else array for array in (sent, received)]
        return Contender(self.name, partial(self.methods[collective], *buffers))


class Gloo:
    """torch.distributed on the CPU. The ranks find each other by a file, so they must share a file system."""

    name = "gloo"

    def __init__(self, comm: MPI.Intracomm, folder: str | None) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        store = dist.FileStore(os.path.join(comm.bcast(folder), "store"), comm.size)
        dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
        self.as_tensor, self.close = torch.from_numpy, dist.destroy_process_group
        self.reduce = dist.all_reduce
        self.others = {  # torch 2.13 gave them new names
            "reduce_scatter": getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
            "allgather": getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
        }

    def enter(self, collective: str, sent: Array, received: Array) -> Contender:
        result = self.as_tensor(received)
        if collective == "allreduce":  # Repeated, its sums may grow to infinity, which costs nothing.
            return Contender(self.name, partial(self.reduce, result), in_place=True)
        return Contender(self.name, partial(self.others[collective], result, self.as_tensor(sent)))


Library = Ours | Native | Gloo


@contextmanager
def open_gloo(comm: MPI.Intracomm) -> Iterator[Gloo]:
    """Gloo, and the folder of its rendezvous while it lives."""
    with tempfile.TemporaryDirectory() if comm.rank == 0 else ExitStack() as folder:
        gloo = Gloo(comm, folder if isinstance(folder, str) else None)
        try:
            yield gloo
        finally:
            gloo.close()
            comm.Barrier()


def time_batch(comm: MPI.Intracomm, call: Call, calls: int) -> float:
    """Seconds that `calls` calls back to back take this rank."""
    comm.Barrier()
    begun = perf_counter()
    for _ in range(calls):
        call()
    return perf_counter() - begun


def estimate(comm: MPI.Intracomm, call: Call) -> float:
    """About how many seconds a call takes, the same on every rank; a warm-up as well."""
    calls = 1
    while True:
        seconds = [float(comm.allreduce(time_batch(comm, call, calls), MPI.MAX))]
        while len(seconds) < 3 and seconds[0] < 5 * BATCH:  # one may be a hiccup
            seconds.append(float(comm.allreduce(time_batch(comm, call, calls), MPI.MAX)))
        if median(seconds) > BATCH / 8 or calls >= 4096:
            return median(seconds) / calls
        calls *= 4


def race(comm: MPI.Intracomm, contenders: Sequence[Contender], share: float, fewest: int, most: int) -> int:
    """Time all of them turn about, every other turn backwards; collective, arguments the same everywhere.

    Parameters
    ----------
    share : float
        Seconds after which no turn begins, once there have been `fewest`.
    fewest, most : int
        Turns.

    Returns
    -------
    int
        Turns taken.
    """
    deadline = perf_counter() + share
    batch = min(BATCH, share / most / len(contenders))
    for contender in contenders:
        contender.calls = max(1, round(batch / estimate(comm, contender.call)))
    order, turns = list(contenders), 0
    gc.collect()
    gc.disable()
    try:
        while turns < fewest or (turns < most and comm.bcast(perf_counter() < deadline)):
            for contender in order:
                seconds = time_batch(comm, contender.call, contender.calls)
                contender.seconds.append(seconds / contender.calls)
            order.reverse()
            turns += 1
    finally:
        gc.enable()
    for contender in contenders:
        slowest = np.array(contender.seconds)
        comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
        contender.seconds = slowest.tolist()
    return turns


def check(memory: Memory, contender: Contender, sent: Array, received: Array, expected: Array) -> bool:
    """Whether the contender may be timed. One that lacks the collective says so; ours and the MPI's own must not."""
    try:
        contender.wrong = memory.count_wrong(contender, sent, received, expected)
    except (RuntimeError, NotImplementedError) as error:
        if contender.name != Gloo.name:
            raise
        contender.trouble = str(error).splitlines()[0]
    return contender.wrong == 0


def measure(memory: Memory, libraries: Sequence[Library], collective: str, asked: int, share: float) -> Cell:
    """Check and time one collective on one size."""
    rows = count_rows(asked, memory.comm.size)
    sent, received = memory.sent(collective, rows), memory.received(collective, rows)
    expected = memory.expected(collective, rows)
    ours = next(library for library in libraries if isinstance(library, Ours))
    contenders = [library.enter(collective, sent, received) for library in libraries]
    before = ours.count_calls(collective)
    sound = [contender for contender in contenders if check(memory, contender, sent, received, expected)]
    runs = [name for name, calls in ours.count_calls(collective).items() if calls > before.get(name, 0)]
    limits = TURNS_LARGE if rows * DTYPE.itemsize >= LARGE else TURNS
    turns = race(memory.comm, sound, share, *limits) if sound else 0
    medians = {contender.name: median(contender.seconds) for contender in sound}
    ratios = {name: time / medians[OURS] for name, time in medians.items() if name != OURS and OURS in medians}
    figures = {contender.name: contender.figures() for contender in contenders}
    return Cell(collective, asked, rows * DTYPE.itemsize, "+".join(runs), turns, figures, ratios)


def count_rows(nbytes: int, nranks: int) -> int:
    """Elements of the vector: equal blocks, none of them empty.

    >>> count_rows(8, 4), count_rows(1024, 3)
    (4, 255)
    """
    return max(nbytes // DTYPE.itemsize // nranks, 1) * nranks


def measure_all(memory: Memory, libraries: Sequence[Library], options: argparse.Namespace) -> list[Cell]:
    """Measure and print every cell; each gets its share of the time that is left."""
    comm, cells = memory.comm, []
    deadline = perf_counter() + options.seconds
    todo = [(collective, size) for collective in options.collectives for size in options.sizes]
    for done, (collective, size) in enumerate(todo):
        share = comm.bcast(max(deadline - perf_counter(), 0.1) / (len(todo) - done))
        cells.append(measure(memory, libraries, collective, size, share))
        if comm.rank == 0:
            if size == options.sizes[0]:
                print(header(collective, libraries))
            print(*lines_of(cells[-1], libraries), sep="\n", flush=True)
    return cells


def header(collective: str, libraries: Sequence[Library]) -> str:
    """The columns' names, for rank 0 to print."""
    others = [library.name for library in libraries if library.name != OURS]
    figures = "".join(f"{name + ' us':>14}{'ratio':>8}" for name in others)
    return f"#\n# {collective:16}{'bytes':>12}{OURS + ' us':>14}{figures}{'turns':>7}{'#wrong':>8}  runs"


def lines_of(cell: Cell, libraries: Sequence[Library]) -> Iterator[str]:
    """A line of figures, and one for each contender that has none."""
    figures = ""
    for library in libraries:
        time = cell.contenders[library.name].get("median_us")
        figures += f"{'-' if time is None else f'{time:.2f}':>14}"
        if library.name != OURS:
            ratio = cell.ratios.get(library.name)
            figures += f"{'-' if ratio is None else f'{ratio:.2f}':>8}"
    yield f"  {cell.collective:16}{cell.nbytes:>12}{figures}{cell.turns:>7}{count_wrong([cell]):>8}  {cell.runs}"
    for name, one in cell.contenders.items():
        if one.get("trouble"):
            yield f"#   {name} has no {cell.collective} here: {one['trouble']}"
        elif one["wrong"]:
            yield f"#   {name}: {one['wrong']} WRONG elements, not timed"


def count_wrong(cells: Iterable[Cell]) -> int:
    """Wrong elements of all contenders."""
    return sum(one.get("wrong") or 0 for cell in cells for one in cell.contenders.values())


def summarize(cells: Sequence[Cell], name: str) -> dict[str, Any]:
    """Geometric means and the least ratio of one contender; empty if it has none."""
    found = [cell for cell in cells if name in cell.ratios]
    if not found:
        return {}
    least = min(found, key=lambda cell: cell.ratios[name])
    groups = {what: [cell.ratios[name] for cell in found if cell.collective == what] for what in COLLECTIVES}
    return {
        "geometric_mean": geometric_mean(cell.ratios[name] for cell in found),
        "by_collective": {what: geometric_mean(ratios) for what, ratios in groups.items() if ratios},
        "least": {"ratio": least.ratios[name], "collective": least.collective, "nbytes": least.nbytes},
        "cells": len(found),
    }


def names_of(cells: Iterable[Cell]) -> list[str]:
    """Contenders that have a ratio somewhere."""
    return list(dict.fromkeys(name for cell in cells for name in cell.ratios))


def show_summary(cells: Sequence[Cell]) -> None:
    """Print geometric means and least cells."""
    print("#")
    for name in names_of(cells):
        total = summarize(cells, name)
        parts = ", ".join(f"{what} {mean:.2f}" for what, mean in total["by_collective"].items())
        least = total["least"]
        print(f"# {name}/{OURS}: geometric mean {total['geometric_mean']:.2f} ({parts}); "
              f"least {least['ratio']:.2f} ({least['collective']}, {least['nbytes']} bytes)")  # fmt: skip
    print(f"# wrong elements: {count_wrong(cells)}", flush=True)


def write_json(path: Path, machine: dict[str, Any], options: argparse.Namespace, cells: Sequence[Cell]) -> None:
    """Everything, the time of every turn included."""
    parameters = {"sizes": options.sizes, "form": options.form, "seconds": options.seconds, "dtype": str(DTYPE)}
    record = {
        "machine": machine,
        "parameters": parameters,
        "units": {"nbytes": "bytes of the whole vector", "_us": "microseconds a call", "ratios": f"time / {OURS}'s"},
        "summary": {name: summarize(cells, name) for name in names_of(cells)},
        "cells": [asdict(cell) for cell in cells],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def facts(comm: MPI.Intracomm, gloo: bool) -> dict[str, Any]:
    """Machine, MPI and versions; collective."""
    machine = describe_machine(comm)
    found = {**asdict(machine), "oversubscribed": machine.oversubscribed, "load_average": os.getloadavg()[0]}
    if gloo:
        found["torch"] = str(sys.modules["torch"].__version__)
    return found


def draw_plot(path: Path, machine: dict[str, Any], cells: Sequence[Cell]) -> None:
    """A panel a collective: ratio against size, a line a contender."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    collectives = list(dict.fromkeys(cell.collective for cell in cells))
    figure, axes = pyplot.subplots(
        1, len(collectives), figsize=(4.2 * len(collectives) + 0.6, 4.2), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, collective in zip(axes[0], collectives, strict=True):
        draw_panel(axis, [cell for cell in cells if cell.collective == collective], names_of(cells))
        axis.set_title(collective)
    axes[0][0].set_ylabel(f"their time / {OURS}'s")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    crowded = f" on {machine['cores']} cores" if machine["oversubscribed"] else ""
    figure.suptitle(f"{machine['mpi']}, {machine['ranks']} ranks{crowded}, SUM {DTYPE}: above 1, {OURS} is faster")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_panel(axis: Any, cells: Sequence[Cell], names: Sequence[str]) -> None:
    """One collective's lines."""
    axis.axhline(1, color="#444444", linewidth=1)
    for name in names:
        points = sorted((cell.nbytes, cell.ratios[name]) for cell in cells if name in cell.ratios)
        if points:
            axis.plot(*zip(*points, strict=True), "o-", color=COLORS[name], markersize=4.5, label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ticks = sorted({cell.nbytes for cell in cells})
    axis.set_xticks(ticks, [format_size(tick) for tick in ticks], rotation=45)
    axis.minorticks_off()
    axis.set_xlabel("bytes of the whole vector")
    axis.grid(True, color="#dddddd", linewidth=0.6)


def merge(paths: Sequence[Path]) -> str:
    """A Markdown table of several runs' ratios, with a line for all runs of an MPI and one for all there are."""
    runs: list[tuple[str, int, list[Cell]]] = []
    for path in paths:
        record = json.loads(path.read_text())
        cells = [Cell(**cell) for cell in record["cells"]]
        runs.append((record["machine"]["mpi"], record["machine"]["ranks"], cells))
    lines = [f"| their time / {OURS}'s | {' | '.join(COLLECTIVES)} | all | least |", "| --- " * 6 + "|"]
    for name in names_of(cell for *_, cells in runs for cell in cells):
        having = [run for run in runs if name in names_of(run[2])]
        for label, cells in _groups(having):
            total = summarize(cells, name)
            means = [total["by_collective"].get(what) for what in COLLECTIVES] + [total["geometric_mean"]]
            figures = " | ".join("-" if mean is None else f"{mean:.2f}" for mean in means)
            least = total["least"]
            where = f"{least['ratio']:.2f} ({least['collective']}, {format_size(least['nbytes'])})"
            lines.append(f"| {name}, {label} | {figures} | {where} |")
    return "\n".join(lines)


def _groups(runs: Sequence[tuple[str, int, list[Cell]]]) -> Iterator[tuple[str, list[Cell]]]:
    """Every run, all runs of each MPI if it has several, and all runs if there are several MPIs."""
    libraries = list(dict.fromkeys(mpi for mpi, *_ in runs))
    for library in libraries:
        mine = [(ranks, cells) for mpi, ranks, cells in runs if mpi == library]
        for ranks, cells in mine:
            yield f"{library}, P = {ranks}", cells
        if len(mine) > 1:
            yield f"**{library}**", [cell for _, cells in mine for cell in cells]
    if len(libraries) > 1:
        yield "**all**", [cell for *_, cells in runs for cell in cells]


def read_options() -> argparse.Namespace:
    """Parse the command line; the same on every rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sizes", default=SIZES, metavar="SIZE,...", help="bytes of the whole vector (default %(default)s)")
    add("--collectives", default=",".join(COLLECTIVES), metavar="NAME,...", help="default %(default)s")
    add("--torch", action="store_true", help="torch.distributed's gloo too")
    add("--form", choices=["typed", "plain"], default="typed", help="what mpi4py is given (default %(default)s)")
    add("--seconds", type=float, default=120, help="that the table should take (default %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write machine, versions and times")
    add("--plot", type=Path, metavar="FILE.png", help="draw ratio against size")
    add("--merge", type=Path, nargs="+", metavar="FILE", help="measure nothing: a Markdown table of runs' JSON files")
    options = parser.parse_args()
    try:
        options.sizes = sorted({parse_size(text) for text in options.sizes.split(",")})
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    options.collectives = options.collectives.split(",")
    if not set(options.collectives) <= set(COLLECTIVES):
        parser.error(f"collectives are {', '.join(COLLECTIVES)}")
    for wanted, module in ((options.torch, "torch"), (options.plot, "matplotlib")):
        if wanted and importlib.util.find_spec(module) is None:
            parser.error(f"needs {module}: pip install {module}")
    for path in (options.json, options.plot):
        if path is not None and not path.parent.is_dir():
            parser.error(f"there is no folder {path.parent}")
    return options


def main() -> int:
    """Measure, print on rank 0, and write what was asked for; the exit status."""
    options = read_options()
    comm = MPI.COMM_WORLD
    if options.merge:
        if comm.rank == 0:
            print(merge(options.merge))
        return 0
    with ExitStack() as stack:
        communicator = stack.enter_context(pr.Communicator(comm, timeout=TIMEOUT))
        libraries: list[Library] = [Ours(communicator), Native(comm, options.form == "typed")]
        if options.torch:
            libraries.append(stack.enter_context(open_gloo(comm)))
        machine = facts(comm, options.torch)
        if comm.rank == 0:
            print(f"# {machine['mpi']}, {comm.size} ranks, {machine['cores']} cores ({machine['cpu']})")
            print(f"# pyreduce {machine['pyreduce']}, mpi4py {machine['mpi4py']}, torch {machine.get('torch', '-')}; "
                  f"ratio: their time / {OURS}'s")  # fmt: skip
        memory = Memory(comm, max(count_rows(size, comm.size) for size in options.sizes))
        cells = measure_all(memory, libraries, options)
    if comm.rank == 0:
        show_summary(cells)
        if options.json:
            write_json(options.json, machine, options, cells)
        if options.plot:
            draw_plot(options.plot, machine, cells)
    return 1 if count_wrong(cells) else 0


if __name__ == "__main__":
    end_together(main)
