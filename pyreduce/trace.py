"""What each rank did, and when: Chrome trace events in JSON, which Perfetto (ui.perfetto.dev) opens.

    PYREDUCE_TRACE=DIR mpirun -n 4 python program.py
    python -m pyreduce.trace summary DIR
    python -m pyreduce.trace merge DIR -o all.json

Every process writes ``DIR/rank-<rank in COMM_WORLD>.json``: a JSON array, an event a line. It grows while the program
runs, so that a program which is killed leaves a file that lacks no more than its end.

Times are those of `time.perf_counter` of the process. What this clock shows against that of the first traced rank of a
communicator is measured when the communicator is made (`pyreduce.peers.compare_clocks`) and stands in its metadata;
`summary` and `merge` put all ranks on one clock.

Files belong to the same run if a communicator had both as members (each process has a stamp, and a communicator's
metadata name all members' stamps), or if the processes lived at the same time. Other files in the directory are left
out, the newest run is told.
"""

from __future__ import annotations

import argparse
import atexit
import json
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Lock
from time import perf_counter, time, time_ns
from typing import Any, Protocol

from pyreduce.calls import Call
from pyreduce.errors import name_ranks
from pyreduce.programs import Get, Program, Put, Recv, Send, Step

__all__ = ["Trace", "TraceFile", "main", "merge", "open_file", "read_run", "summarize"]

log = logging.getLogger("pyreduce")

EVENTS_KEPT = 1 << 18  # in memory, some 200 bytes each; with more they are written
TIDS = 16  # of a communicator: one for its calls, then one a lane
IDLE_SECONDS = 1.0  # who waits so long has time to write what it has

Json = dict[str, Any]


class Waiting(Protocol):
    """What is waited for, see `pyreduce.peers.Started`; ``sample()``, if it has it, tells the same in less time."""

    def awaited(self) -> tuple[list[int], int]:
        """Peers still to be heard from, and the round."""


# ------------------------------------------------------------------------------------------------ writing


class Shape:
    """What the rounds of a plan move, in words that are found once."""

    def __init__(self, program: Program, counts: tuple[int, ...], segment: int, itemsize: int) -> None:
        self.program = program
        self.counts = counts
        self.segment = segment
        self.itemsize = itemsize
        self.full: int = min(counts) // segment  # segments in which every block has a whole piece
        self._told: dict[tuple[int, int], str] = {}
        self._awaited: dict[tuple[Any, ...], list[int]] = {}

    def tell(self, number: int, segment: int) -> str:
        """The arguments of a round's event."""
        key = (number, segment if segment >= self.full else -1)
        told = self._told.get(key)
        if told is None:
            told = self._told[key] = json.dumps(self._describe(self.program.rounds[number], segment))[1:-1]
        return told

    def awaited(self, lanes: tuple[tuple[int, bool, bool], ...]) -> list[int]:
        """Whom a wait is for: of every lane the round, and whether messages and credits are waited for."""
        found = self._awaited.get(lanes)
        if found is None:
            peers: set[int] = set()
            for number, messages, credits in lanes:
                if messages:
                    peers.update(step.peer for step in self.program.rounds[number] if isinstance(step, Recv))
                if credits:  # whose, a cell does not say
                    peers.update(set(range(self.program.nranks)) - {self.program.rank})
            found = self._awaited[lanes] = sorted(peers)
        return found

    def _describe(self, steps: Sequence[Step], segment: int) -> Json:
        received = [(step.peer, step.dst) for step in steps if isinstance(step, Recv | Get)]
        sent = [(step.peer, step.src) for step in steps if isinstance(step, Send | Put)]
        return {
            "from": sorted({peer for peer, _ in received}),
            "to": sorted({peer for peer, _ in sent}),
            "bytes received": sum(self._bytes(place, segment) for _, place in received),
            "bytes sent": sum(self._bytes(place, segment) for _, place in sent),
        }

    def _bytes(self, place: Any, segment: int) -> int:
        blocks = [block for _, _, block in place.cells(len(self.counts))]
        pieces = [min(self.counts[block] - segment * self.segment, self.segment) for block in blocks]
        return int(sum(piece for piece in pieces if piece > 0) * self.itemsize)


class TraceFile:
    """The file of this process.

    Parameters
    ----------
    path : Path
    rank, size : int
        In ``COMM_WORLD``.

    Attributes
    ----------
    stamp : int
        Tells this process and run from others; positive.
    communicators : int
        Those that have been counted so far.

    Raises
    ------
    OSError
        It cannot be written.
    """

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self.path = path
        self.rank = rank
        self.stamp = time_ns()
        self.communicators = 0
        self.events: list[tuple[Any, ...]] = []
        self.written = perf_counter()
        self._process = os.getpid()
        self._lock = Lock()
        self._open: list[Trace] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "w")  # noqa: SIM115
        host = os.uname().nodename
        about = {
            "stamp": self.stamp, "rank": rank, "size": size, "host": host, "process": self._process,
            "started": time(), "clock": perf_counter(),
        }  # fmt: skip
        self._file.write("[\n")
        self.tell("process_name", 0, {"name": f"rank {rank} ({host})"})
        self.tell("process_sort_index", 0, {"sort_index": rank})
        self.tell("pyreduce", 0, about)
        self._file.flush()
        atexit.register(self.end)

    def count_communicator(self) -> int:
        """Another one is made; its number."""
        self.communicators += 1
        return self.communicators

    def tell(self, name: str, tid: int, args: Json) -> None:
        """Write metadata."""
        if not self._file.closed:
            self._file.write(json.dumps(self._metadata(name, tid, args)) + ",\n")

    def _metadata(self, name: str, tid: int, args: Json) -> Json:
        return {"name": name, "ph": "M", "ts": 0, "pid": self.rank, "tid": tid, "args": args}

    def write(self) -> None:
        """Write what has happened so far; when that fails, tracing ends and the program goes on."""
        with self._lock:
            events = self.events[:]
            del self.events[: len(events)]
            if not self._file.closed and os.getpid() == self._process:
                try:
                    self._file.writelines(self._lines(events))
                    self._file.flush()
                except OSError as error:
                    self._give_up(error)
            self.written = perf_counter()

    def _lines(self, events: Sequence[tuple[Any, ...]]) -> Iterator[str]:
        pid = self.rank
        text: str | None
        key: tuple[Any, ...]
        texts: dict[tuple[Any, ...], str] = {}  # what many calls have in common; the events keep what `id` names
        for kind, tid, begun, ended, *rest in events:
            start, duration = round(begun * 1e9), round(ended * 1e9) - round(begun * 1e9)
            when = f'"ts":{_microseconds(start)},"pid":{pid},"tid":{tid}'
            lasting = f'{{"ph":"X","dur":{_microseconds(duration)},{when}'
            if kind == "round":
                segment, number, shape = rest
                text = f'"segment":{segment},{shape.tell(number, segment)}'
                yield f'{lasting},"cat":"round","name":"round {number + 1}","args":{{{text}}}}},\n'
            elif kind == "rounds":  # what the C core has noted: nanoseconds of its clock, `begun` seconds behind
                times, shape = rest
                for number, (start, after) in enumerate(pairwise(time + round(begun * 1e9) for time in times)):
                    lasting = (
                        f'"dur":{_microseconds(after - start)},"ts":{_microseconds(start)},"pid":{pid},"tid":{tid}'
                    )
                    text = f'"cat":"round","name":"round {number + 1}","args":{{"segment":0,{shape.tell(number, 0)}}}'
                    yield f'{{"ph":"X",{lasting},{text}}},\n'
            elif kind == "wait":
                yield f'{lasting},"cat":"wait","name":"wait","args":{{"for":{_awaited(rest[0])}}}}},\n'
            elif kind == "door":
                number, name, nbytes, dtype, options = rest
                op = None if name == "allgather" else options.get("op", "SUM")
                key = (name, nbytes, dtype, id(op))
                text = texts.get(key)
                if text is None:
                    text = texts[key] = _tell_call("the short way", "shared", nbytes, dtype, op)
                yield f'{lasting},"cat":"call","name":"{name}","args":{{"call":{number},{text}}}}},\n'
            elif kind == "call":
                call, number, why, silent, error = rest
                name, key = call.collective, (id(call), why)
                text = '"agreement":true' if silent else texts.get(key)
                if text is None:
                    nbytes = sum(call.counts) * call.dtype.itemsize
                    text = texts[key] = _tell_call(why, call.algorithm, nbytes, call.dtype, call.op)
                if silent:
                    name = f"agree on {name}"
                if error:
                    text += f',"error":{json.dumps(error)}'
                yield f'{lasting},"cat":"call","name":"{name}","args":{{"call":{number},{text}}}}},\n'
            else:
                yield f'{{"ph":"i","s":"t",{when},"cat":"note","name":"{kind}","args":{json.dumps(rest[0])}}},\n'

    def enter(self, trace: Trace) -> None:
        """What a communicator leaves unfinished is told at the end."""
        self._open.append(trace)

    def leave(self, trace: Trace) -> None:
        """It is closed."""
        if trace in self._open:
            self._open.remove(trace)
        self.write()

    def end(self) -> None:
        """The process ends."""
        for trace in list(self._open):
            trace.close()
        if not self._file.closed and os.getpid() == self._process:
            try:
                self._file.write(json.dumps(self._metadata("end", 0, {})) + "\n]\n")
                self._file.close()
            except OSError as error:
                self._give_up(error)
        atexit.unregister(self.end)
        _files.pop(str(self.path), None)

    def _give_up(self, error: OSError) -> None:
        log.warning("the trace %s ends here: %s", self.path, error)
        with suppress(OSError):
            self._file.close()


def _microseconds(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def _tell_call(why: str, algorithm: str, nbytes: int, dtype: Any, op: Any) -> str:
    """Arguments of a call's event, but for its number."""
    told = None if op is None else str(getattr(op, "name", op))
    args = {"algorithm": algorithm, "bytes": nbytes, "dtype": dtype.name, "op": told, "why": why}
    return json.dumps(args)[1:-1]


def _awaited(sample: tuple[Any, ...]) -> list[int]:
    if sample and isinstance(sample[0], Shape):
        return sample[0].awaited(sample[1:])
    return list(sample)


_files: dict[str, TraceFile] = {}


def open_file(directory: str, rank: int, size: int) -> TraceFile:
    """The file of this process in a directory, made at the first call.

    Raises
    ------
    OSError
        It cannot be written.
    """
    path = Path(directory).absolute() / f"rank-{rank}.json"
    found = _files.get(str(path))
    if found is None:
        try:
            found = _files[str(path)] = TraceFile(path, rank, size)
        except OSError as error:
            text = f"trace: rank {rank} of {size} cannot write its file: {error.strerror}"
            raise OSError(error.errno, text, str(path)) from None
    return found


class Trace:
    """What one communicator tells its process's file.

    Parameters
    ----------
    file : TraceFile
    rank, size : int
        Of the communicator.
    lanes : int
    members : sequence of (int, int, int)
        Of every rank: its rank in ``COMM_WORLD``, its stamp (0: it is not traced), and the number that the communicator
        has in its file.
    offset, round_trip : float
        Seconds by which this clock is ahead of the first traced rank's, and how long a question and its answer took
        when that was measured.

    Attributes
    ----------
    tid, lane_tid : int
        Of its calls, and of the rounds of its first lane.
    events : list
        What is to be written, and `append` its method.
    begun : int
        Calls that the queue has begun.
    doors : int
        Calls that began in a door.
    arrived : float
        When the call that is about to begin was made; 0: with the end of the one before it.
    """

    def __init__(
        self,
        file: TraceFile,
        rank: int,
        size: int,
        lanes: int,
        members: Sequence[Sequence[int]],
        offset: float,
        round_trip: float,
    ) -> None:
        self.arrived = 0.0
        self._file = file
        number = file.communicators
        self.tid = self._tid = number * TIDS
        self.lane_tid = self._tid + 1
        self.events = self._events = file.events
        self.append = self._events.append
        self.begun = 0
        self.doors = 0
        self._call: tuple[Any, ...] | None = None
        self._paused: float | None = None
        self._for: tuple[Any, ...] = ()
        self._counted: float | None = None
        told = f"communicator {number}, rank {rank} of {size}"
        _, stamp, its_number = next(tuple(member) for member in members if member[1])
        about = {
            "id": f"{stamp:x}-{its_number}", "rank": rank, "size": size, "offset": offset, "round trip": round_trip,
            "members": [[world, mark] for world, mark, _ in members],
        }  # fmt: skip
        for lane in range(lanes + 1):
            file.tell("thread_name", self._tid + lane, {"name": f"{told}, lane {lane}" if lane else told})
            file.tell("thread_sort_index", self._tid + lane, {"sort_index": self._tid + lane})
        file.tell("communicator", self._tid, about)
        file.enter(self)
        file.write()

    def begin(self, number: int, call: Call, why: str, silent: bool) -> None:
        """A call begins; a `silent` one only agrees on something for a call that follows."""
        begun, self.arrived = self.arrived or perf_counter(), 0.0
        self.begun += 1
        self._call = begun, call, number, why, silent

    def finish(self, now: float, error: str = "") -> None:
        """The call is over."""
        self.arrived = 0.0
        if self._call is None:
            return
        self._events.append(("call", self._tid, self._call[0], now, *self._call[1:], error))
        self._call = None
        if len(self._events) > EVENTS_KEPT:
            self.write()

    def tell(self, name: str, args: Json) -> None:
        """Write metadata."""
        self._file.tell(name, self._tid, args)

    def write(self) -> None:
        """There are many events: write them, and that it took time."""
        begun = perf_counter()
        events = len(self._events)
        self._file.write()
        now = perf_counter()
        self._events.append(("wrote the trace", self._tid, begun, now, {"events": events, "seconds": now - begun}))

    def torn(self, error: BaseException) -> None:
        """The communicator has broken: whatever was under way is over."""
        now = perf_counter()
        if self._paused is not None:
            self.resume(now)
        text = f"{type(error).__name__}: {error}"
        if self._call is None:
            self._events.append(("broken", self._tid, now, now, {"error": text}))
        self.finish(now, text)
        self._file.write()

    def close(self) -> None:
        """Write everything; harmless when repeated."""
        if self._call is not None:
            self.finish(perf_counter(), "not finished")
        self._file.leave(self)

    # ---- rounds and waits

    def pause(self, started: Waiting, now: float) -> None:
        """Nothing can be done since `now` but wait."""
        self._paused = now
        self._for = _sample(started)
        # The engine moves data while the waiting loop waits for it, and counts itself how long it could not.
        seconds = getattr(started, "waited_seconds", None)
        self._counted = None if seconds is None else seconds()

    def look(self, started: Waiting, now: float) -> None:
        """Still waiting: for others by now?"""
        if _sample(started) != self._for:
            self.resume(now, started)
            self.pause(started, now)
        elif self._paused is not None and now - max(self._file.written, self._paused) > IDLE_SECONDS:
            _, call, number, *_ = self._call or (0.0, None, 0)
            args = {"for": _awaited(self._for), "in": call.collective if call is not None else "", "call": number}
            self._events.append(("waiting", self._tid, now, now, args))
            self._file.write()

    def resume(self, now: float, started: Waiting | None = None) -> None:
        """Something has come."""
        begun, self._paused = self._paused, None
        if begun is None:
            return
        if started is not None and self._counted is not None:
            now = min(now, begun + started.waited_seconds() - self._counted)  # type: ignore[attr-defined]
        if now > begun:
            self._events.append(("wait", self._tid, begun, now, self._for))


def _sample(started: Waiting) -> tuple[Any, ...]:
    sample = getattr(started, "sample", None)
    return tuple(started.awaited()[0]) if sample is None else sample()


# ------------------------------------------------------------------------------------------------ reading


@dataclass
class Traced:
    """One file, read.

    Attributes
    ----------
    about : dict
        Of the process.
    communicators : dict
        Metadata by tid.
    events : list of dict
    shift : float
        What its clock is ahead of the run's, in microseconds.
    """

    path: Path
    about: Json
    communicators: dict[int, Json]
    events: list[Json]
    shift: float = 0.0

    @property
    def rank(self) -> int:
        """In ``COMM_WORLD``."""
        return int(self.about["rank"])

    @property
    def lived(self) -> tuple[float, float]:
        """From when to when by the wall clock."""
        last = max((event["ts"] + event.get("dur", 0) for event in self.events if event["ph"] != "M"), default=0)
        return self.about["started"], self.about["started"] + max(last * 1e-6 - self.about["clock"], 0.0)


@dataclass
class Run:
    """The files of one run, by rank, and those that belong to another."""

    files: list[Traced]
    others: list[Traced] = field(default_factory=list)


def _read(path: Path) -> Traced:
    """Read a file; one that was cut short lacks its end.

    Raises
    ------
    OSError, ValueError
    """
    text = path.read_text(errors="replace")
    try:
        events = json.loads(text)
    except ValueError:
        events = _read_lines(path, text)
    good = isinstance(events, list) and all(isinstance(event, dict) and "ph" in event for event in events)
    about = [event["args"] for event in events if event.get("name") == "pyreduce"] if good else []
    if len(about) != 1:
        raise ValueError(f"{path} is no trace of pyreduce")
    communicators = {event["tid"]: event["args"] for event in events if event.get("name") == "communicator"}
    for event in events:
        if event["name"] == "waited" and event["tid"] in communicators:
            communicators[event["tid"]]["waited"] = sum(event["args"].values())
    return Traced(path, about[0], communicators, events)


def _read_lines(path: Path, text: str) -> list[Json]:
    lines = text.splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip() in ("[", "]", ""):
            continue
        try:
            found.append(json.loads(line.rstrip().removesuffix(",")))
        except ValueError as error:
            if number == len(lines) and number > 1:  # cut short in the middle of a line
                break
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
    return found


def read_run(directory: str | Path) -> Run:
    """Read the files of the newest run in a directory.

    Raises
    ------
    OSError, ValueError
        There are none, or one cannot be read.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no directory")
    paths = sorted(folder.glob("rank-*.json"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no trace: no rank-*.json")
    files = sorted((_read(path) for path in paths), key=lambda file: file.rank)
    chosen = [max(files, key=lambda file: file.about["started"])]
    for file in chosen:  # which grows meanwhile
        begun, ended = file.lived
        named = {stamp for about in file.communicators.values() for _, stamp in about["members"]}
        for other in files:
            if other in chosen:
                continue
            meets = other.lived[0] <= ended and begun <= other.lived[1]
            if meets or other.about["stamp"] in named:
                chosen.append(other)
    chosen.sort(key=lambda file: file.rank)
    run = Run(chosen, [file for file in files if file not in chosen])
    _align(run)
    return run


def _align(run: Run) -> None:
    """Find what each clock is ahead of the first rank's, from one communicator to the next."""
    known: dict[int, float] = {id(run.files[0]): 0.0}
    clocks: dict[str, float] = {}  # of communicators
    while True:
        before = len(known) + len(clocks)
        for file in run.files:
            for about in file.communicators.values():
                if id(file) in known:
                    clocks.setdefault(about["id"], known[id(file)] - about["offset"] * 1e6)
                elif about["id"] in clocks:
                    known[id(file)] = clocks[about["id"]] + about["offset"] * 1e6
        if len(known) + len(clocks) == before:
            break
    first = run.files[0].about
    for file in run.files:  # by the wall clock, if it shares no communicator with the others
        apart = (file.about["clock"] - file.about["started"]) - (first["clock"] - first["started"])
        file.shift = known.get(id(file), apart * 1e6)


@dataclass
class Row:
    """What `summarize` says of a rank; seconds."""

    rank: int
    host: str
    calls: int = 0
    in_calls: float = 0.0
    waited: float = 0.0
    late: float = 0.0
    awaited: float = 0.0


def count(run: Run) -> list[Row]:
    """One row a rank, in order.

    `late`: for every call the time from when each other rank came to when the last one came, which is what they lost
    by it. `awaited`: the waits of other ranks, each split evenly among those it was for.
    """
    rows = {file.rank: Row(file.rank, file.about["host"]) for file in run.files}
    came: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    for file in run.files:
        row = rows[file.rank]
        seen: dict[str, int] = defaultdict(int)
        drawn: dict[str, float] = defaultdict(float)
        for event in file.events:
            if event["ph"] != "X" or event["tid"] not in file.communicators:
                continue
            about, args = file.communicators[event["tid"]], event["args"]
            if event["cat"] == "call":
                row.calls += not args.get("agreement", False)
                row.in_calls += event["dur"] * 1e-6
                seen[about["id"]] += 1  # every rank makes the same calls in the same order
                came[about["id"], seen[about["id"]]].append((event["ts"] - file.shift, file.rank))
            elif event["cat"] == "wait":
                drawn[about["id"]] += event["dur"] * 1e-6
                for peer in args["for"]:
                    world = about["members"][peer][0]
                    told = rows.setdefault(world, Row(world, "not traced"))
                    told.awaited += event["dur"] * 1e-6 / len(args["for"])
        counted = {about["id"]: about.get("waited", 0.0) for about in file.communicators.values()}
        row.waited = sum(max(seconds, drawn[name]) for name, seconds in counted.items())
    for arrivals in came.values():
        last, who = max(arrivals)
        rows[who].late += sum(last - when for when, _ in arrivals) * 1e-6
    return [rows[rank] for rank in sorted(rows)]


def summarize(directory: str | Path) -> str:
    """What ranks did and whom they waited for, in a table and a sentence.

    Raises
    ------
    OSError, ValueError
    """
    run = read_run(directory)
    rows = count(run)
    width = max(len("host"), *(len(row.host) for row in rows))
    lines = [f"rank  {'host':{width}}    calls   in calls     waited  came late    awaited"]
    for row in rows:
        seconds = "".join(f" {value:9.3f}s" for value in (row.in_calls, row.waited, row.late, row.awaited))
        lines.append(f"{row.rank:4d}  {row.host:{width}} {row.calls:8d}{seconds}")
    lines += [
        "",
        "came late: what the other ranks lost, in all, because this one was the last to come to a call",
        "awaited: the waits of other ranks, each split evenly among the ranks it was for",
        "",
    ]
    missing = sorted(
        {rank for file in run.files for about in file.communicators.values() for rank, _ in about["members"]}
        - {file.rank for file in run.files}
    )
    if missing:
        lines.append(f"There is no trace of {name_ranks(missing)}.")
    if run.others:
        lines.append("Of another run, and left out: " + ", ".join(file.path.name for file in run.others) + ".")
    lines.append(_verdict(rows, bool(missing)))
    return "\n".join(lines)


def _verdict(rows: Sequence[Row], incomplete: bool) -> str:
    """The rank that others waited for most; where not all were traced, by their waits, which name those as well."""
    seconds = {row.rank: row.late for row in rows}
    if incomplete or not any(seconds.values()):
        seconds = {row.rank: row.awaited for row in rows}
    total = sum(seconds.values())
    if not total:
        return "No rank waited for another."
    most = max(seconds, key=lambda rank: seconds[rank])
    return (
        f"The others waited for rank {most} most: {seconds[most]:.3f} s of their time, {seconds[most] / total:.0%} of "
        f"the {total:.3f} s that ranks waited for one another."
    )


def merge(directory: str | Path, output: str | Path) -> int:
    """Write the events of all ranks on one clock, from 0, into one file; how many there are.

    Raises
    ------
    OSError, ValueError
    """
    run = read_run(directory)
    lasting = [(file, event) for file in run.files for event in file.events if event["ph"] != "M"]
    first = min((event["ts"] - file.shift for file, event in lasting), default=0.0)
    lines = [json.dumps(event) for file in run.files for event in file.events if event["ph"] == "M"]
    lines += [json.dumps(event | {"ts": round(event["ts"] - file.shift - first, 3)}) for file, event in lasting]
    Path(output).write_text("[\n" + ",\n".join(lines) + "\n]\n")
    return len(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pyreduce.trace", description="look at what PYREDUCE_TRACE wrote")
    commands = parser.add_subparsers(dest="command", required=True)
    told = commands.add_parser("summary", help="a table of all ranks, and the rank that others waited for most")
    told.add_argument("directory")
    merged = commands.add_parser("merge", help="one file of all ranks, for Perfetto")
    merged.add_argument("directory")
    merged.add_argument("-o", "--output", required=True, metavar="FILE")
    options = parser.parse_args(argv)
    try:
        if options.command == "summary":
            print(summarize(options.directory))
        else:
            events = merge(options.directory, options.output)
            print(f"{events} events in {options.output}; open it at ui.perfetto.dev")
    except (OSError, ValueError) as error:
        print(f"pyreduce.trace: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
