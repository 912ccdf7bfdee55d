"""``python -m pyreduce.explain`` of what has no program, and of what would be chosen (of programs: test_races.py)."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from pyreduce import algorithms, ops
from pyreduce.algorithms.shared import SMALL_BYTES
from pyreduce.explain import main
from pyreduce.profiles import Profile, Where
from pyreduce.selection import choose
from pyreduce.topology import Topology


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints."""
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("collective", ["reduce_scatter", "allgather", "allreduce"])
def test_the_engine_in_words(capsys: pytest.CaptureFixture[str], collective: str) -> None:
    text = told(capsys, collective, "--algorithm", "shared", "-n", "3", "--rank", "1")
    assert f"{collective} by shared, P=3 ranks of a node" in text
    assert "rank 1" in text
    assert "\nrank 0" not in text
    assert "wait until ranks 0 and 2 published j" in text
    assert ("every block: ((x0 + x1) + x2)" in text) == (collective != "allgather")
    assert ("  collect  " in text) == (collective == "allreduce")
    assert (f"up to {SMALL_BYTES} bytes" in text) == (collective == "allreduce")
    assert f"read from peers {4 if collective == 'allreduce' else 2}/3 S" in text


def test_the_engine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert "copy the input to the result" in told(capsys, "allreduce", "-a", "shared", "-n", "1")


def test_what_would_be_chosen_on_one_node(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "--why", "allreduce", "1M", "-n", "4").splitlines()
    assert lines[0] == "allreduce of 1 MiB (float32, SUM), 1 node of 4 ranks"
    assert lines[1] == "  runs by             shared: one node: through shared memory, folded in rank order"
    assert lines[2].startswith("  deterministic=True  shared: ")
    assert lines[3] == "  no profile          there is no profile for these ranks, nodes and MPI"
    rows = {line.split()[0]: line for line in lines[6:]}
    assert set(rows) == set(algorithms.names())
    assert re.match(r"  ring +- +[0-9.]+ (us|ms)$", rows["ring"])


def test_what_would_be_chosen_between_nodes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = told(capsys, "--why", "allreduce", "64K", "-n", "4", "--nodes", "2x2")
    assert text.startswith("allreduce of 64 KiB (float32, SUM), 2 nodes of 2 ranks\n")
    name, why = choose("allreduce", 65536, Topology.even(4, 2), ops.SUM, np.dtype(np.float32))
    assert f"  runs by             {name}: {why}\n" in text
    assert re.search(r"\n  shared +- +-   cannot serve: needs one node, here are 2 nodes of 2 ranks\n", text)
    monkeypatch.setenv("PYREDUCE_NODES", "0,1,0,1")
    assert told(capsys, "--why", "allreduce", "64K", "-n", "4") != text


def test_what_a_profile_chooses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    where = Where(4, "2x2", "mpich", "5.0.2", "0.1.0", "a machine")
    Profile(where, {"allreduce": [(8, {"ring": 1e-5, "naive": 2e-5})]}, "2026-01-31").save(path)
    arguments = ("--why", "allreduce", "8", "-n", "4", "--profile", str(path))
    lines = told(capsys, *arguments, "--nodes", "2x2").splitlines()
    assert lines[1] == "  runs by             ring: profile p.json: ring 10 us at 8 B, naive 20 us"
    assert lines[2] == "  deterministic=True  naive: profile p.json: naive 20 us at 8 B"
    assert lines[3] == f"  profile             {path}"
    assert lines[4] == "  made                2026-01-31, under mpich 5.0.2, a machine"
    assert [line.split()[:3] for line in lines[7:9]] == [["ring", "10", "us"], ["naive", "20", "us"]]
    told_why = f"{path} is not used: it was made "
    assert f"{told_why}on 2x2 (nodes x ranks), here is 1x4" in told(capsys, *arguments)
    assert f"{told_why}under mpich, this is x" in told(capsys, *arguments, "--nodes", "2x2", "--mpi", "x")


def test_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "--why", "allgather", "8", "-n", "1")
    assert "  runs by             shared: one node: " in text
    assert "  no profile          one rank\n" in text


@pytest.mark.parametrize("size", ["1x", "-4", ""])
def test_a_size_that_is_none(capsys: pytest.CaptureFixture[str], size: str) -> None:
    with pytest.raises(SystemExit):
        main(["--why", "allreduce", f"{size}"])
    assert "no number of bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        (["8", "--why", "-a", "ring"], "leave out --algorithm"),
        (["--nodes", "2x2"], "--nodes is for --why"),
        (["--why"], "--why needs bytes"),
        (["64K"], "bytes are for --why"),
        (["--profile", "p.json"], "--profile is for --why"),
        (["8", "--why", "--nodes", "3x2"], "--nodes is '3x2', which is for 6 ranks; there are 4"),
        (["8", "--why", "--profile", "gone.json"], "profile gone.json: there is no such file"),
    ],
)
def test_what_does_not_go_together(capsys: pytest.CaptureFixture[str], argv: list[str], fault: str) -> None:
    with pytest.raises(SystemExit):
        main(["allreduce", *argv])
    assert fault in capsys.readouterr().err


@pytest.mark.parametrize("collective", ["reduce_scatter", "allgather", "allreduce"])
def test_hierarchical_tells_nodes_lanes_and_what_runs_between(
    capsys: pytest.CaptureFixture[str], collective: str
) -> None:
    text = told(capsys, collective, "--algorithm", "hierarchical", "-n", "5", "--nodes", "0,1,0,1,1")
    assert f"{collective} by hierarchical, nodes of 2 and 3 ranks" in text
    assert "  node 1: ranks 1, 3 and 4\n" in text
    assert "  lane 1: ranks 2 and 3\n" in text
    assert "B, between the nodes: circulant, P=2" in text
    assert "link      " + ("S bytes" if collective == "allreduce" else "S/2 bytes") in text
