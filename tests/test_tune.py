"""``python -m pyreduce.tune``: its arguments without MPI, and short runs of it on all ranks. No times are asserted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pyreduce import algorithms
from pyreduce.profiles import PROJECT_FILE, VARIABLE, configuration_folder, load
from pyreduce.programs import Copy, Recv, Send, Step, place_input, place_output

pytest.importorskip("mpi4py.MPI", exc_type=(ImportError, RuntimeError))  # type: ignore[arg-type]

from pyreduce import tune
from pyreduce.tune import Options, UsageError, main, read_options

QUICK = ["--sizes", "8,1K", "--seconds", "4"]


@pytest.fixture
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, comm: Any) -> Path:
    """The current folder of all ranks, rank 0's, with the configuration in it."""
    shared = Path(comm.bcast(str(tmp_path))) if comm else tmp_path
    monkeypatch.chdir(shared)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(shared / "config"))
    return shared


def wrong_ring(collective: str, nranks: int, rank: int) -> Iterator[Sequence[Step]]:
    """Gives everybody its left neighbour's vector."""
    if collective == "allreduce":
        whole = place_input(0, nranks)
        yield [Send((rank + 1) % nranks, whole), Recv((rank - 1) % nranks, place_output(0, nranks))]
    elif collective == "allgather":
        yield [Copy(place_output(rank), place_input(rank))]
    else:
        yield [Copy(place_output(rank), place_input(rank))]


# ---------------------------------------------------------------------------------------------------------- arguments


def test_the_defaults() -> None:
    options = read_options([])
    assert options.sizes == tuple(8 << (2 * i) for i in range(13))
    assert options.sizes[-1] == 128 << 20
    assert options.collectives == ("reduce_scatter", "allgather", "allreduce")
    assert (options.algorithms, options.output, options.load) == ((), None, None)


def test_what_can_be_asked_for() -> None:
    assert read_options(
        ["--sizes", "1M,8", "--collectives", "allgather", "--algorithms", "ring,naive", "--seconds", "3", "--project"]
    ) == Options((8, 1 << 20), ("allgather",), ("ring", "naive"), 3.0, PROJECT_FILE, None)
    assert read_options(["--output", "f.json"]).output == "f.json"
    assert read_options(["--stdout"]).output == ""


@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        (["--sizes", "8,x"], "'x' is not a size"),
        (["--sizes", ","], "there is nothing to measure"),
        (["--collectives", "bcast"], "there is no 'bcast'"),
        (["--seconds", "0"], "needs more than zero"),
        (["--project", "--stdout"], "not allowed with"),
    ],
)
def test_wrong_arguments(argv: list[str], fault: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_options(argv)
    assert fault in str(raised.value)


# ------------------------------------------------------------------------------------------------------- under mpirun


@pytest.mark.ranks(2, 3, 4)
def test_a_profile_is_measured_and_written(comm: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(QUICK, comm) == 0
    (path,) = configuration_folder().iterdir()
    profile = load(path)
    assert path.name == profile.where.file_name
    assert (profile.where.nranks, profile.where.nodes) == (comm.size, f"1x{comm.size}")
    assert set(profile.table) == {"reduce_scatter", "allgather", "allreduce"}
    for collective, rows in profile.table.items():
        assert rows[0][0] == 8
        names = set(rows[0][1])
        assert {"naive", "ring", "mesh", "shared", "native"} <= names
        assert ("recursive_doubling" in names) <= (collective == "allreduce")
    told = capsys.readouterr()
    if comm.rank == 0:
        assert f"wrote {path}" in told.out
        assert "tune: allgather 8 B: " in told.err
    else:
        assert told.out == told.err == ""
    assert os.environ[VARIABLE] == "none"


@pytest.mark.ranks(1, 2)
def test_to_standard_output_nothing_else_is_written(
    comm: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUICK, "--stdout", "--algorithms", "naive,ring", "--collectives", "allreduce"], comm) == 0
    out = capsys.readouterr().out
    if comm.rank == 0:
        assert set(json.loads(out)["table"]["allreduce"][0][1]) == {"naive", "ring"}
    assert list(folder.iterdir()) == []


@pytest.mark.ranks(2, 3)
def test_the_project_s_profile(comm: Any, folder: Path) -> None:
    (folder / PROJECT_FILE).write_text("broken")  # what lies there is replaced, not read
    comm.Barrier()
    assert main([*QUICK, "--project", "--algorithms", "ring", "--collectives", "allgather"], comm) == 0
    assert load(PROJECT_FILE).choose("allgather", 8) is not None


@pytest.mark.ranks(2, 3, 4)
def test_a_wrong_candidate_is_rejected(comm: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    algorithms._ALGORITHMS["liar"] = algorithms.Algorithm("liar", wrong_ring, rank_order=False)
    assert main([*QUICK, "--output", "p.json", "--algorithms", "liar,ring"], comm) == 1
    for rows in load("p.json").table.values():
        assert all(set(times) == {"ring"} for _, times in rows)
    if comm.rank == 0:
        told = capsys.readouterr().err
        assert "liar is rejected: its allreduce gives " in told
        assert told.count("liar is rejected: its allreduce") == 1


@pytest.mark.ranks(2, 3)
def test_a_candidate_that_fails_is_rejected(
    comm: Any, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Iterator[Sequence[Step]]:
        raise RuntimeError("no idea")

    algorithms._ALGORITHMS["lost"] = algorithms.Algorithm("lost", fail, rank_order=False, trusted=True)
    assert main([*QUICK, "--output", "p.json", "--algorithms", "ring,lost,naive"], comm) == 1
    for rows in load("p.json").table.values():
        assert all(set(times) == {"ring", "naive"} for _, times in rows)
    if comm.rank == 0:
        assert (
            "lost is rejected: its allgather fails at 8 B on rank 0: RuntimeError: no idea" in capsys.readouterr().err
        )


@pytest.mark.ranks(2)
def test_the_hopeless_are_dropped(comm: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "HOPELESS", 0.0)  # everyone is
    monkeypatch.setattr(tune, "IN_A_ROW", 2)
    monkeypatch.setattr(tune, "TELLING", 0)
    sizes = ["--sizes", "8,16,32,64", "--seconds", "30", "--collectives", "allgather"]
    assert main([*sizes, "--output", "p.json", "--algorithms", "ring,naive"], comm) == 0
    assert [nbytes for nbytes, _ in load("p.json").table["allgather"]] == [8, 16]


@pytest.mark.ranks(1, 2, 3)
def test_what_cannot_be_written_is_an_error_everywhere(
    comm: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "file").touch()
    arguments = [*QUICK, "--algorithms", "ring", "--collectives", "allgather"]
    assert main([*arguments, "--output", "file/p.json"], comm) == 1
    if comm.rank == 0:
        assert "tune: error: the profile cannot be written" in capsys.readouterr().err


@pytest.mark.ranks(1, 2, 3)
def test_wrong_arguments_end_all_ranks(comm: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sizes", "big"], comm) == 2
    assert main(["--algorithms", "nobody"], comm) == 2
    assert main(["--load", "nowhere.py"], comm) == 2
    told = capsys.readouterr().err
    if comm.rank == 0:
        assert "'big' is not a size" in told
        assert "no algorithm is called 'nobody'" in told
        assert "nowhere.py" in told
    else:
        assert told == ""


@pytest.mark.ranks(2, 3)
def test_an_algorithm_of_ones_own_is_measured(comm: Any, folder: Path) -> None:
    source = """
import pyreduce as pr
from pyreduce import algorithms
pr.register_algorithm("mine", algorithms.get("ring").rounds, replace=True)
"""
    if comm.rank == 0:
        (folder / "mine.py").write_text(source)
    comm.Barrier()
    arguments = [*QUICK, "--collectives", "allgather", "--load", "mine.py"]
    assert main([*arguments, "--algorithms", "mine,naive", "--output", "p.json"], comm) == 0
    assert set(load("p.json").table["allgather"][0][1]) == {"mine", "naive"}


@pytest.mark.ranks(2, 4)
def test_nodes_are_those_that_calls_see(comm: Any, world: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if comm.size < world.size:
        pytest.skip("PYREDUCE_NODES speaks of all ranks")
    nodes = f"{comm.size}x1"
    monkeypatch.setenv("PYREDUCE_NODES", nodes)
    assert main([*QUICK, "--collectives", "allgather"], comm) == 0
    (path,) = configuration_folder().iterdir()
    assert path.name.startswith(f"{comm.size}-{nodes}-")
    names = set(load(path).table["allgather"][0][1])
    assert {"ring", "native"} <= names
    assert not {"shared", "hierarchical"} & names
