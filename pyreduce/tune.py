"""``mpirun -n P python -m pyreduce.tune``: measure every algorithm here, so that calls choose by it.

For each size and collective all candidates take turns: everything that can serve such a call, algorithms of yours
from ``--load FILE.py`` included. Before a candidate is timed its result is compared, bit for bit, with the exact one; a
wrong one is rejected by name. A turn is a batch of calls after a barrier; its time is the slowest rank's; what the
profile keeps is the median over the turns. A candidate that takes more than 5 times the best one's time at 3 sizes in
a row, from 32 KiB on, is not measured on larger ones. What is measured is float32 SUM, out of place.

Rank 0 writes the profile (`pyreduce.profiles` says where profiles are looked for) and all ranks exit with one status:
0; 1 if a candidate was wrong or failed, or the profile could not be written; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

import pyreduce as pr
from pyreduce import algorithms
from pyreduce.bench.cases import CASES, Buffers, Call, Problem
from pyreduce.bench.job import end_together, no_garbage_collection
from pyreduce.bench.machine import describe_machine
from pyreduce.bench.options import format_size, parse_size
from pyreduce.commandline import run_file
from pyreduce.errors import Unsupported
from pyreduce.model import in_bytes, in_seconds
from pyreduce.profiles import NONE, PROJECT_FILE, VARIABLE, Profile, Where, configuration_folder, name_mpi, nodes_text
from pyreduce.programs import COLLECTIVES
from pyreduce.selection import cannot_serve
from pyreduce.topology import Topology

__all__ = ["main"]

SIZES = ",".join(format_size(8 << (2 * i)) for i in range(13))  # 8 B to 128 MiB
SECONDS = 120.0
DTYPE = np.dtype(np.float32)
TIMEOUT = 60.0  # seconds: a call that hangs is reported, not waited for
BATCH = 0.005  # seconds that a turn should take
FEWEST, MOST = 3, 25  # turns
LARGE = 256 << 10  # bytes from which a call takes the longer the more there are
HOPELESS, IN_A_ROW = 5.0, 3  # times slower than the best, at so many sizes: not measured any more
TELLING = 32 << 10  # bytes below which being slow says nothing of larger sizes
WRONG, USAGE = 1, 2


class UsageError(Exception):
    """The command line is wrong; the message is the whole text to print."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing and exiting, so that one rank can do that for all."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.format_usage()}{self.prog}: error: {message}")


@dataclass(frozen=True)
class Options:
    """What to measure, the same on every rank.

    Attributes
    ----------
    algorithms : tuple of str
        Empty: all there are.
    output : str or None
        Where the profile goes; None: to the configuration folder, an empty text: to standard output.
    """

    sizes: tuple[int, ...]
    collectives: tuple[str, ...]
    algorithms: tuple[str, ...]
    seconds: float
    output: str | None
    load: str | None


def read_options(argv: Sequence[str] | None = None) -> Options:
    """Parse the command line; `UsageError` if it is wrong, `SystemExit` after ``--help``."""
    parser = _Parser(
        prog="python -m pyreduce.tune",
        description="Measure every algorithm on these ranks, and write a profile that calls choose by.",
        epilog="SIZE is in bytes, of the whole vector: 8, 64K, 32M, 1G. Under MPI: mpirun -n 4 python -m pyreduce.tune",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--sizes", default=SIZES, metavar="SIZE[,SIZE]", help="default: 8 to 128M by factors of 4")
    add("--collectives", default=",".join(COLLECTIVES), metavar="NAME[,NAME]", help="default: %(default)s")
    add("--algorithms", default="", metavar="NAME[,NAME]", help="default: all that can serve")
    add("--seconds", type=float, default=SECONDS, metavar="S",
        help="time for all of it; sizes that are left then are not measured (default %(default)g)")  # fmt: skip
    add("--load", metavar="FILE.py", help="run this file first, which registers algorithms of yours")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--output", metavar="FILE", help="default: in your configuration folder, by ranks, nodes and MPI"
    )
    where.add_argument(
        "--project", action="store_true", help=f"write {PROJECT_FILE} here, for programs that start here"
    )
    where.add_argument("--stdout", action="store_true", help="write to standard output, and the table elsewhere")
    given = parser.parse_args(argv)
    if not given.seconds > 0:
        parser.error(f"--seconds {given.seconds:g}: needs more than zero")
    try:
        sizes = tuple(sorted({max(parse_size(text), DTYPE.itemsize) for text in _split(given.sizes)}))
    except argparse.ArgumentTypeError as error:
        parser.error(f"--sizes: {error}")
    collectives = _split(given.collectives)
    for name in collectives:
        if name not in COLLECTIVES:
            parser.error(f"--collectives: there is no {name!r}; there are {', '.join(COLLECTIVES)}")
    if not sizes or not collectives:
        parser.error("there is nothing to measure")
    output = PROJECT_FILE if given.project else "" if given.stdout else given.output
    return Options(sizes, collectives, _split(given.algorithms), given.seconds, output, given.load)


def _split(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


# ---------------------------------------------------------------------------------------------------------- measuring


@dataclass
class Runner:
    """A candidate at one size of one collective."""

    name: str
    bind: Callable[[], Call]
    calls: int = 1  # a turn
    seconds: list[float] = field(default_factory=list)  # a call's, by turn, the slowest rank's

    def __post_init__(self) -> None:
        self.call = self.bind()


class Tuner:
    """Measures; every method is collective over `comm` and comes to the same on every rank.

    Parameters
    ----------
    comm : MPI.Intracomm
    options : Options
    say : callable
        Tells people, on rank 0.

    Attributes
    ----------
    topology : Topology
        The nodes, as calls see them.
    table : dict
        What has been measured, as `pyreduce.profiles.Profile` has it.
    wrong : list of str
        What has been rejected, and why.
    """

    def __init__(self, comm: MPI.Intracomm, options: Options, say: Callable[[str], None]) -> None:
        self.comm = comm
        self.options = options
        self.say = say
        self.table: dict[str, list[tuple[int, dict[str, float]]]] = {name: [] for name in options.collectives}
        self.wrong: list[str] = []
        self._rejected: set[tuple[str, str]] = set()
        self._lagging: dict[tuple[str, str], int] = {}  # sizes in a row at which a candidate was hopeless
        self._begun = perf_counter()
        self._communicator = pr.Communicator(comm, timeout=TIMEOUT)
        self._communicator.allreduce(np.zeros(1))  # a call that names no algorithm makes the nodes known
        self.topology = self._communicator._plans.topology or Topology.one_node(comm.size)

    def close(self) -> None:
        """Free the communicator."""
        self._communicator.close()

    def run(self) -> None:
        """Measure all sizes, or as many as the time allows."""
        sizes, cost = self.options.sizes, 0.0
        for index, nbytes in enumerate(sizes):
            growth = max(nbytes, LARGE) / max(sizes[index - 1], LARGE)
            left = self.options.seconds - self._elapsed()
            if index and left < cost * growth:
                told = ", ".join(in_bytes(size) for size in sizes[index:])
                self.say(f"the {self.options.seconds:g} s are over: {told} not measured")
                return
            share = left / (len(sizes) - index) / len(self.options.collectives)
            cost = sum(self.measure(collective, nbytes, share) for collective in self.options.collectives)

    def measure(self, collective: str, nbytes: int, share: float) -> float:
        """Check and time all candidates; the seconds that could not be spared."""
        begun = perf_counter()
        problem = Problem(-(-nbytes // DTYPE.itemsize), pr.SUM, DTYPE, self.comm.size, self.comm.rank)
        case = CASES[collective]
        part = case.source(problem)
        given = case.inputs(problem, part.start, part.stop)
        buffers, expected = Buffers(given.copy(), np.empty(problem.rows, DTYPE)), case.expected(problem)
        runners = []
        for name in self._candidates(collective, nbytes):
            runner = self._enter(name, collective, problem, buffers, given, expected)
            if runner is not None:
                runners.append(runner)
        prepared = self._slowest(perf_counter() - begun)
        if not runners:
            return prepared
        turns = self._plan_turns(runners, max(share - prepared, 0.0))
        with no_garbage_collection():
            self._race(runners, turns)
        times = {runner.name: median(runner.seconds) for runner in runners}
        self._note_hopeless(collective, nbytes, times)
        self.table[collective].append((nbytes, {name: float(f"{seconds:.4g}") for name, seconds in times.items()}))
        best = min(times, key=lambda name: (times[name], name))
        self.say(f"{collective} {in_bytes(nbytes)}: {best} {in_seconds(times[best])}, {len(times)} candidates, "
                 f"{turns} turns ({self._elapsed():.0f} of {self.options.seconds:g} s)")  # fmt: skip
        return prepared + FEWEST * sum(times.values())

    def _candidates(self, collective: str, nbytes: int) -> Iterator[str]:
        """Who may be chosen here; programs that do not serve say so when they are called."""
        op = None if collective == "allgather" else pr.SUM
        for name in self.options.algorithms or algorithms.names():
            given_up = self._lagging.get((collective, name), 0) >= IN_A_ROW
            if given_up or (collective, name) in self._rejected:
                continue
            if algorithms.has_no_program(name) and cannot_serve(name, collective, nbytes, self.topology, op, DTYPE):
                continue
            yield name

    def _enter(
        self, name: str, collective: str, problem: Problem, buffers: Buffers, given: Any, expected: Any
    ) -> Runner | None:
        """A candidate whose result is right; None if it cannot serve, fails, or is wrong."""
        case = CASES[collective]
        # Not bound to the Communicator itself, which is another after a failure.
        runner = Runner(name, lambda: case.pyreduce(self._communicator, problem, buffers, False, name))
        buffers.buffer.view(np.uint8)[...] = 0xA5
        np.invert(expected.view(np.uint8), out=buffers.buffer[: len(expected)].view(np.uint8))  # nothing right is there
        fault, refused = "", False
        try:
            runner.call()
        except Unsupported as error:
            fault, refused = str(error), True
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        faults = self.comm.allgather((fault, refused))
        failed = [(rank, text) for rank, (text, refused) in enumerate(faults) if text and not refused]
        if failed or (any(text for text, _ in faults) and not all(refused for _, refused in faults)):
            rank, text = failed[0] if failed else next((r, text) for r, (text, _) in enumerate(faults) if text)
            self._reject(name, collective, f"fails at {in_bytes(problem.nbytes)} on rank {rank}: {text}")
            self._communicator.close()
            self._communicator = pr.Communicator(self.comm, timeout=TIMEOUT)
            return None
        if faults[0][0]:
            return None
        wrong = np.count_nonzero(buffers.buffer[: len(expected)].view(np.uint32) != expected.view(np.uint32))
        wrong += np.count_nonzero(buffers.source != given)
        wrong = self.comm.allreduce(int(wrong))
        if wrong:
            self._reject(name, collective, f"gives {wrong} wrong elements at {in_bytes(problem.nbytes)}")
            np.copyto(buffers.source, given)
            return None
        return runner

    def _reject(self, name: str, collective: str, why: str) -> None:
        self._rejected.add((collective, name))
        self.wrong.append(f"{name} is rejected: its {collective} {why}")
        self.say(self.wrong[-1])

    def _plan_turns(self, runners: Sequence[Runner], seconds: float) -> int:
        """How many calls make a turn of each, and how many turns fit in the time."""
        for runner in runners:
            runner.call = runner.bind()  # there may be another communicator since
            once = self._turn(runner)
            runner.calls = max(1, min(1000, int(BATCH / max(once, 1e-7))))
            if runner.calls > 1:  # the first call was slow
                runner.calls = max(1, min(1000, int(BATCH / max(self._turn(runner), 1e-7))))
        round_of_all = sum(self._turn(runner) * runner.calls for runner in runners)
        return max(FEWEST, min(MOST, int(seconds / max(round_of_all, 1e-6))))

    def _race(self, runners: Sequence[Runner], turns: int) -> None:
        """All take turns, in one order and then in the other."""
        order = list(runners)
        for _ in range(turns):
            for runner in order:
                runner.seconds.append(self._turn(runner))
            order.reverse()

    def _turn(self, runner: Runner) -> float:
        """Seconds of one call: the mean of a batch, the slowest rank's."""
        call = runner.call
        self.comm.Barrier()
        begun = perf_counter()
        for _ in range(runner.calls):
            call()
        return self._slowest((perf_counter() - begun) / runner.calls)

    def _slowest(self, seconds: float) -> float:
        return float(self.comm.allreduce(seconds, MPI.MAX))

    def _elapsed(self) -> float:
        return self._slowest(perf_counter() - self._begun)

    def _note_hopeless(self, collective: str, nbytes: int, times: dict[str, float]) -> None:
        if nbytes < TELLING:
            return
        best = min(times.values())
        for name, seconds in times.items():
            key = collective, name
            self._lagging[key] = self._lagging.get(key, 0) + 1 if seconds > HOPELESS * best else 0
            if self._lagging[key] == IN_A_ROW and nbytes < self.options.sizes[-1]:
                self.say(f"{name} is hopeless for {collective} from here on: {in_seconds(seconds)}")


# ------------------------------------------------------------------------------------------------------------- telling


def table_lines(profile: Profile) -> Iterator[str]:
    """The profile as people read it: a row a size, a column an algorithm, the best marked."""
    for collective, rows in profile.table.items():
        names = list(dict.fromkeys(name for _, times in rows for name in times))
        if not rows:
            continue
        widths = [max(len(name), 7) + 3 for name in names]
        yield f"{collective:18}" + "".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
        for nbytes, times in rows:
            cells = [in_seconds(times[name]) if name in times else "-" for name in names]
            best = min(times, key=lambda name: (times[name], name))
            marked = [f"{cell}{'*' if name == best else ' '}" for name, cell in zip(names, cells, strict=True)]
            line = "".join(f"{cell:>{width}}" for cell, width in zip(marked, widths, strict=True))
            yield f"  {in_bytes(nbytes):16}{line}".rstrip()


def _write(profile: Profile, output: str | None) -> str:
    """On rank 0: write the profile, and the table; what went wrong, or an empty text."""
    stream = sys.stderr if output == "" else sys.stdout
    for line in table_lines(profile):
        print(line, file=stream)
    if output == "":
        print(profile.to_json(), end="", flush=True)
        return ""
    path = output if output is not None else str(configuration_folder() / profile.where.file_name)
    try:
        profile.save(path)
    except OSError as error:
        return f"the profile cannot be written: {error}"
    print(f"wrote {path}", file=stream, flush=True)
    return ""


# ------------------------------------------------------------------------------------------------------------- running


def main(argv: Sequence[str] | None = None, comm: MPI.Intracomm = MPI.COMM_WORLD) -> int:
    """Measure and write; collective over `comm`.

    Returns
    -------
    int
        The exit status, the same on every rank.
    """
    comm = comm.Dup()
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = NONE  # a profile that lies ready, broken perhaps, is nothing to choose by here
    try:
        options = _agree_on_options(argv, comm)
        return options if isinstance(options, int) else _run(options, comm)
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
        comm.Free()


def _say_as(rank: int) -> Callable[[str], None]:
    def say(text: str) -> None:
        if rank == 0:
            print(f"tune: {text}", file=sys.stderr, flush=True)

    return say


def _agree_on_options(argv: Sequence[str] | None, comm: MPI.Intracomm) -> Options | int:
    """Rank 0 reads the command line for all, and all run the file to load; an exit status if there is nothing to do."""
    result: Options | int = 0
    if comm.rank == 0:
        try:
            result = read_options(argv)
        except UsageError as error:
            print(error, file=sys.stderr, flush=True)
            result = USAGE
        except SystemExit:  # --help
            sys.stdout.flush()
    result = comm.bcast(result)
    if isinstance(result, int):
        return result
    fault = ""
    try:
        if result.load:
            run_file(result.load)
        for name in result.algorithms:
            if not algorithms.has_no_program(name):
                algorithms.get(name)
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    faults = comm.allgather(fault)
    for rank, fault in enumerate(faults):
        if fault:
            _say_as(comm.rank)(f"error on rank {rank}: {fault}")
            return USAGE
    return result


def _run(options: Options, comm: MPI.Intracomm) -> int:
    say = _say_as(comm.rank)
    machine = describe_machine(comm)
    tuner = Tuner(comm, options, say)
    try:
        tuner.run()
    finally:
        tuner.close()
    name, version = name_mpi(MPI.Get_library_version())
    cores = f"{machine.cores} core{'s' * (machine.cores > 1)} a node"
    where = Where(comm.size, nodes_text(tuner.topology), name, version, pr.__version__, f"{machine.cpu}, {cores}")
    table = {collective: rows for collective, rows in tuner.table.items() if rows}
    profile = Profile(where, table, datetime.date.today().isoformat())
    fault = "nothing was measured" if not table else ""
    if not fault and comm.rank == 0:
        fault = _write(profile, options.output)
    fault = comm.bcast(fault)
    if fault:
        say(f"error: {fault}")
    return WRONG if fault or tuner.wrong else 0


if __name__ == "__main__":
    end_together(main)
