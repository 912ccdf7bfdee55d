"""Traces: what is in them, what the summary makes of them, and what happens when something is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import clean_environment

from pyreduce import trace
from pyreduce.settings import trace_directory

try:
    from mpi4py import MPI
except (ImportError, RuntimeError):  # RuntimeError: mpi4py is there, but no MPI library
    MPI = None  # type: ignore[assignment]

Json = dict[str, Any]
Make = Callable[..., Any]
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def check_events(events: list[Json]) -> None:
    """What Perfetto needs, and that slices of a track lie within each other or apart."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid"} <= event.keys()
        assert event["ph"] in ("M", "X", "i")
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        open_ends: list[float] = []
        for start, end in sorted(slices, key=lambda slice: (slice[0], -slice[1])):
            while open_ends and start >= open_ends[-1] - 2e-3:  # a float holds so much of a microsecond
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 2e-3, "slices overlap"
            open_ends.append(end)


@pytest.fixture
def directory(world: Any, tmp_path: Path) -> Path:
    """One for all ranks."""
    return Path(world.bcast(str(tmp_path)))


def own_file(directory: Path) -> list[Json]:
    events: list[Json] = trace._read(directory / f"rank-{MPI.COMM_WORLD.rank}.json").events
    check_events(events)
    return events


# ------------------------------------------------------------------------------------------------ under MPI


@pytest.mark.parametrize("algorithm", ["ring", "naive", "mesh", "shared", "native", None])
def test_what_a_trace_holds(make_communicator: Make, comm: Any, directory: Path, algorithm: str | None) -> None:
    k = make_communicator(trace=directory / "new", segment_bytes=64, in_flight=2)
    x, out = np.arange(100.0) + comm.rank, np.empty(100)
    for _ in range(3):
        k.allreduce(x, out, algorithm=algorithm)
    requests = [k.iallreduce(x, algorithm=algorithm) for _ in range(3)]
    k.reduce_scatter(x, algorithm=algorithm)
    k.allgather(x, algorithm=algorithm)
    for request in requests:
        request.wait()
    with k.allreduce_init(x, out, algorithm=algorithm) as again:
        again()
        again()
    k.close()
    events = own_file(directory / "new")
    calls = [event for event in events if event.get("cat") == "call" and "agreement" not in event["args"]]
    names = ["allreduce"] * 6 + ["reduce_scatter", "allgather", "allgather"] + ["allreduce"] * 2
    assert [event["name"] for event in calls] == names  # allgather agrees on lengths first
    numbers = [event["args"]["call"] for event in calls]
    assert numbers == sorted({*numbers})
    assert all(event["args"]["bytes"] == 800 for event in calls[:6])
    assert all(event["args"]["dtype"] == "float64" and event["args"]["op"] == "SUM" for event in calls[:6])
    if algorithm is not None:
        assert {event["args"]["algorithm"] for event in calls[:6]} == {algorithm}
    waits = [event for event in events if event.get("cat") == "wait"]
    assert all({*event["args"]["for"]} <= {*range(comm.size)} - {comm.rank} for event in waits)
    if algorithm == "ring" and comm.size > 1:
        rounds = [event for event in events if event.get("cat") == "round" and event["ts"] >= calls[0]["ts"]]
        first = [event for event in rounds if event["ts"] + event["dur"] <= calls[0]["ts"] + calls[0]["dur"]]
        segments = 1 + max(event["args"]["segment"] for event in first)
        largest = -(-100 // comm.size)  # elements of a block; 8 go into a segment
        assert segments == -(-largest // 8)
        assert len(first) == segments * 2 * (comm.size - 1)
        assert {event["name"] for event in first} == {f"round {i + 1}" for i in range(2 * (comm.size - 1))}
        assert {event["tid"] - calls[0]["tid"] for event in first} == {*range(1, 1 + min(2, segments))}
        assert all(event["args"]["to"] == [(comm.rank + 1) % comm.size] for event in first)
        assert all(event["args"]["from"] == [(comm.rank - 1) % comm.size] for event in first)
        sent = sum(event["args"]["bytes sent"] for event in first)
        assert comm.allreduce(sent) == 2 * (comm.size - 1) * 800


@pytest.mark.parametrize("settings", [{"check": "full"}, {"progress": "thread"}, {"transport": "rma"}])
def test_other_ways_of_calling(make_communicator: Make, comm: Any, directory: Path, settings: Json) -> None:
    k = make_communicator(trace=directory, **settings)
    x = np.arange(10.0)
    for request in [k.iallreduce(x), k.iallgather(x)]:
        request.wait()
    assert k.allreduce(x).tolist() == (x * comm.size).tolist()
    k.close()
    names = [event["name"] for event in own_file(directory) if event.get("cat") == "call"]
    assert [name for name in names if not name.startswith("agree")][-1] == "allreduce"


def test_clocks_and_who_is_who(make_communicator: Make, comm: Any, directory: Path) -> None:
    ks = [make_communicator(trace=directory), make_communicator(trace=directory)]
    for k in ks:
        k.allreduce(np.ones(3))
        k.close()
    events = own_file(directory)
    abouts = [event["args"] for event in events if event["name"] == "communicator"]
    assert [(about["rank"], about["size"]) for about in abouts] == [(comm.rank, comm.size)] * 2
    assert len({about["id"] for about in abouts}) == 2
    assert comm.allgather([about["id"] for about in abouts]) == [[about["id"] for about in abouts]] * comm.size
    for about in abouts:
        assert about["offset"] == 0 if comm.rank == 0 else about["round trip"] > 0
        # The tests run on one machine, whose clock all read: the middle of the round trip is off by half of it at most.
        assert abs(about["offset"]) <= about["round trip"] / 2 + 1e-9
    comm.Barrier()
    run = trace.read_run(directory)
    assert [file.rank for file in run.files] == [*range(comm.size)]
    assert not run.others
    rows = trace.count(run)
    assert [row.calls for row in rows] == [2] * comm.size
    merged = directory / f"merged {comm.rank}"
    assert trace.merge(directory, merged) == len(json.loads(merged.read_text()))
    check_events(json.loads(merged.read_text()))


def test_some_ranks_are_not_traced(make_communicator: Make, comm: Any, directory: Path) -> None:
    """They, and those that are, go on as ever."""
    k = make_communicator(trace=directory if comm.rank % 2 else "")
    x, out = np.ones(100), np.empty(100)
    for algorithm in ("ring", "shared"):
        for _ in range(5):
            k.allreduce(x, out, algorithm=algorithm)
    k.close()
    comm.Barrier()
    if comm.size == 1:
        assert not [*directory.iterdir()]
    else:
        told = trace.summarize(directory)
        assert "There is no trace of rank" in told
        assert [file.rank for file in trace.read_run(directory).files] == [*range(1, comm.size, 2)]
    comm.Barrier()


def test_a_directory_that_cannot_be_written(comm: Any, directory: Path) -> None:
    import pyreduce as pr

    (directory / f"file {comm.rank}").touch()
    with pytest.raises(OSError, match=rf"trace: rank {comm.rank} of \d+ cannot write its file"):
        pr.Communicator(comm, trace=directory / f"file {comm.rank}" / "below")


@pytest.mark.ranks(2, 3, 4)
def test_a_broken_communicator_is_told(make_communicator: Make, comm: Any, directory: Path) -> None:
    import pyreduce as pr

    k = make_communicator(trace=directory)
    k.allreduce(np.ones(4), algorithm="ring")
    with pytest.raises(pr.MismatchError):
        k.allreduce(np.ones(4 + comm.rank % 2), algorithm="ring")
    last = [event for event in own_file(directory) if event.get("cat") == "call"][-1]
    assert last["args"]["error"].startswith("MismatchError: allreduce")


def test_many_events_are_written_meanwhile(
    make_communicator: Make, comm: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "EVENTS_KEPT", 10)
    k = make_communicator(trace=directory)
    for _ in range(30):
        k.allreduce(np.ones(4), algorithm="naive")
    assert len(k._trace.events) <= 10 + 1 + 3 * (comm.size + 1)
    assert [event for event in own_file(directory) if event["name"] == "wrote the trace"]
    k.close()
    assert len([event for event in own_file(directory) if event.get("cat") == "call"]) == 30


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("algorithm", ["ring", None])
def test_the_summary_names_the_slow_rank(
    comm: Any, directory: Path, algorithm: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn", reason="train_digits needs scikit-learn for its images")
    import importlib.util

    spec = importlib.util.spec_from_file_location("traced_train_digits", EXAMPLES / "train_digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setenv("PYREDUCE_TRACE", str(directory))
    slow = comm.size - 1
    arguments = ["--epochs", "1", "--slow", f"{slow}:0.1"]
    options = module.parse_options(arguments + (["--algorithm", algorithm] if algorithm else []))
    images, _ = module.load_images()
    part = comm.Dup()
    module.train_together(images, options, part)
    part.Free()
    comm.Barrier()
    for events in [trace._read(path).events for path in sorted(directory.glob("rank-*.json"))]:
        check_events(events)
    told = trace.summarize(directory)
    assert f"The others waited for rank {slow} most" in told, told
    comm.Barrier()


# ------------------------------------------------------------------------------------------------ alone


def test_where_traces_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYREDUCE_TRACE", raising=False)
    assert trace_directory(None) is None
    assert trace_directory(Path("here")) == "here"
    monkeypatch.setenv("PYREDUCE_TRACE", "there")
    assert trace_directory(None) == "there"
    assert trace_directory("here") == "here"
    assert trace_directory("") is None


def write(
    directory: Path, rank: int, calls: list[float], *, stamps: tuple[int, ...] = (1, 2, 3), ahead: float = 0.0,
    started: float = 1000.0, waits: tuple[tuple[float, tuple[int, ...]], ...] = (),
) -> Path:  # fmt: skip
    """A file as a rank writes it: calls that begin at these seconds of the first rank's clock and end at 100."""
    args = {
        "stamp": stamps[rank], "rank": rank, "size": 3, "host": "h", "process": 1, "started": started, "clock": ahead
    }  # fmt: skip
    members = [[world, stamp] for world, stamp in enumerate(stamps)]
    events: list[Json] = [
        {"name": "pyreduce", "ph": "M", "ts": 0, "pid": rank, "tid": 0, "args": args},
        {"name": "communicator", "ph": "M", "ts": 0, "pid": rank, "tid": 16, "args": {
            "id": "1-1", "rank": rank, "size": 3, "offset": ahead, "members": members}},
    ]  # fmt: skip
    for name, cat, begun, ended, told in [
        *[("allreduce", "call", begun, 100.0, {"call": i}) for i, begun in enumerate(calls)],
        *[("wait", "wait", 0.0, seconds, {"for": list(ranks)}) for seconds, ranks in waits],
    ]:
        when = {"ts": (begun + ahead) * 1e6, "dur": (ended - begun) * 1e6, "pid": rank, "tid": 16}
        events.append({"name": name, "cat": cat, "ph": "X", **when, "args": told})
    path = directory / f"rank-{rank}.json"
    path.write_text("[\n" + ",\n".join(map(json.dumps, events)) + ",\n")
    return path


def test_late_ranks_on_clocks_that_differ(tmp_path: Path) -> None:
    write(tmp_path, 0, [1.0, 5.0])
    write(tmp_path, 1, [3.0, 5.5], ahead=1e5)
    write(tmp_path, 2, [2.5, 7.0], ahead=-50.0, waits=((1.5, (0, 1)),))
    rows = trace.count(trace.read_run(tmp_path))
    assert [row.late for row in rows] == pytest.approx([0.0, 2.0 + 0.5, 2.0 + 1.5])
    assert [row.awaited for row in rows] == pytest.approx([0.75, 0.75, 0.0])
    assert [row.waited for row in rows] == pytest.approx([0.0, 0.0, 1.5])
    assert "The others waited for rank 2 most: 3.500 s of their time, 58% of the 6.000 s" in trace.summarize(tmp_path)


def test_merged_ranks_share_a_clock(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path, rank, [1.0 + rank], ahead=rank * 100.0)
    trace.merge(tmp_path, tmp_path / "all.json")
    calls = [event for event in json.loads((tmp_path / "all.json").read_text()) if event["ph"] == "X"]
    assert [event["ts"] for event in calls] == pytest.approx([0.0, 1e6, 2e6])


def test_a_rank_without_a_trace_is_found_by_the_waits(tmp_path: Path) -> None:
    write(tmp_path, 0, [1.0], stamps=(1, 2, 0), waits=((50.0, (2,)),))
    write(tmp_path, 1, [2.0], stamps=(1, 2, 0), waits=((49.0, (2,)),))
    told = trace.summarize(tmp_path)
    assert "There is no trace of rank 2." in told
    assert "The others waited for rank 2 most: 99.000 s" in told


def test_files_of_an_earlier_run_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, 2, [1.0], stamps=(1, 2, 3), started=1000.0)
    write(tmp_path, 0, [1.0], stamps=(7, 8), started=9000.0)
    write(tmp_path, 1, [2.0], stamps=(7, 8), started=9100.5)
    run = trace.read_run(tmp_path)
    assert [file.rank for file in run.files] == [0, 1]
    assert "Of another run, and left out: rank-2.json." in trace.summarize(tmp_path)


def test_ranks_that_share_no_communicator_are_one_run_if_they_lived_together(tmp_path: Path) -> None:
    write(tmp_path, 0, [1.0], stamps=(1,), started=1000.0)
    write(tmp_path, 1, [2.0], stamps=(0, 2), started=1050.0)
    assert [file.rank for file in trace.read_run(tmp_path).files] == [0, 1]


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [1.0, 2.0], stamps=(1,))
    text = path.read_text()
    path.write_text(text[: text.rindex('"ph"')])
    assert [row.calls for row in trace.count(trace.read_run(tmp_path))] == [1]


def test_nothing_to_wait_for(tmp_path: Path) -> None:
    write(tmp_path, 0, [], stamps=(1,))
    assert trace.summarize(tmp_path).endswith("No rank waited for another.")


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("", "is no trace of pyreduce"),
        ("[\n{},\n]", "is no trace of pyreduce"),
        ("[1, 2]", "is no trace of pyreduce"),
        ('{"name": "pyreduce"}', "is no trace of pyreduce"),
        ('[\n{"ph": "M"},\n{"ph": broken},\n{"ph": "M"}\n]', "line 3: not JSON"),
    ],
)
def test_files_that_are_broken(tmp_path: Path, content: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.json").write_text(content)
    assert trace.main(["summary", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert error in told
    assert "rank-0.json" in told


def test_directories_that_hold_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace.main(["summary", str(tmp_path)]) == 1
    assert "holds no trace: no rank-*.json" in capsys.readouterr().err
    assert trace.main(["merge", str(tmp_path / "none"), "-o", str(tmp_path / "out")]) == 1
    assert "is no directory" in capsys.readouterr().err
    write(tmp_path, 0, [1.0], stamps=(1,))
    assert trace.main(["merge", str(tmp_path), "-o", str(tmp_path / "no" / "out")]) == 1
    assert "out" in capsys.readouterr().err


def test_the_command_line(tmp_path: Path) -> None:
    write(tmp_path, 0, [1.0], stamps=(1,))
    for argv in (["summary", str(tmp_path)], ["merge", str(tmp_path), "-o", str(tmp_path / "out.json")]):
        command = [sys.executable, "-W", "error", "-m", "pyreduce.trace", *argv]
        done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=60)
        assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "out.json").read_text())) == 3


ENDS = {
    "closed": ("c.close()", True),
    "left open": ("pass", True),
    "by an exception": ("raise RuntimeError", True),
    "killed": ("c._trace.write(); os.kill(os.getpid(), 9)", False),
}


@pytest.mark.skipif(MPI is None, reason="needs mpi4py and an MPI")
@pytest.mark.parametrize("end", ENDS)
def test_the_file_can_be_read_however_a_program_ends(tmp_path: Path, end: str) -> None:
    last, whole = ENDS[end]
    program = f"""
        import os
        import numpy as np
        import pyreduce as pr
        c = pr.Communicator()
        for _ in range(5):
            c.allreduce(np.ones(10), algorithm="naive")
        {last}
    """
    environment = clean_environment() | {"PYREDUCE_TRACE": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    subprocess.run(command, capture_output=True, env=environment, timeout=60, check=False)
    text = (tmp_path / "rank-0.json").read_text()
    events = json.loads(text if whole else text.rstrip().removesuffix(",") + "]")
    check_events(events)
    assert len([event for event in events if event.get("cat") == "call"]) == 5
    assert trace.count(trace.read_run(tmp_path))[0].calls == 5
    assert os.listdir(tmp_path) == ["rank-0.json"]
