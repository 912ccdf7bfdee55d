"""Profiles: the files, where they lie, what they choose; and under mpirun, calls that choose by them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyreduce as pr
from pyreduce import profiles
from pyreduce.profiles import PROJECT_FILE, VARIABLE, Profile, Shelf, Where, find, load, name_mpi, nodes_text
from pyreduce.topology import Topology, virtual_nodes

MakeCommunicator = Callable[..., Any]
WHERE = Where(4, "2x2", "mpich", "5.0.2", "0.1.0", "a machine")
ROWS = [(8, {"naive": 1e-5, "ring": 4e-5}), (2048, {"naive": 4e-5, "ring": 4e-5}), (1 << 20, {"ring": 1e-3, "x": 1.0})]
PROFILE = Profile(WHERE, {"allreduce": ROWS, "allgather": []}, "2026-01-31")
HERE = Topology.even(4, 2)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """In an empty folder, with no configuration, and nothing warned of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(profiles, "_warned", set())
    return tmp_path


# -------------------------------------------------------------------------------------------------------------- files


def test_what_is_saved_is_loaded(alone: Path) -> None:
    path = alone / "folder" / "p.json"
    PROFILE.save(path)
    assert load(path) == PROFILE
    assert load(path).path == str(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["p.json"]
    assert json.loads(path.read_text())["table"]["allreduce"][0] == [8, {"naive": 1e-5, "ring": 4e-5}]


def test_what_cannot_be_saved_leaves_nothing(alone: Path) -> None:
    (alone / "taken").mkdir()
    (alone / "taken" / "inside").touch()
    with pytest.raises(OSError, match="taken"):
        PROFILE.save(alone / "taken")
    assert [entry.name for entry in alone.iterdir()] == ["taken"]


def test_the_digest_is_the_tables() -> None:
    assert Profile(WHERE, dict(reversed(PROFILE.table.items())), "another day").digest == PROFILE.digest
    assert Profile(WHERE, {"allreduce": ROWS[:2], "allgather": []}).digest != PROFILE.digest


WRONG = [
    ("[1]", "needs to be an object with format, where, made and table"),
    ("{", "is no JSON"),
    ('{"format": 2}', "format is 2, this version reads 1"),
    ({"where": []}, "where is [], needs an object"),
    ({"where": {"nranks": 0, "nodes": "1", "mpi": "x"}}, "where.nranks is 0, needs a number of ranks"),
    ({"where": {"nranks": 2, "nodes": "1"}}, "where.mpi is None, needs a text"),
    ({"where": {"nranks": 2, "nodes": "2x2", "mpi": "x"}}, "where.nodes is '2x2', which is for 4 ranks; there are 2"),
    ({"made": 3}, "made is 3"),
    ({"table": []}, "table is [], needs an object"),
    ({"table": {"alltoall": []}}, "table.alltoall: no collective is called so"),
    ({"table": {"allreduce": {}}}, "table.allreduce is {}, needs a list"),
    ({"table": {"allreduce": [[8]]}}, "table.allreduce[0] is [8], needs [bytes,"),
    ({"table": {"allreduce": [["8", {}]]}}, "table.allreduce[0]: '8' is no number of bytes"),
    ({"table": {"allreduce": [[8, {}]]}}, "table.allreduce[0]: has no times"),
    ({"table": {"allreduce": [[8, {"a": 1}], [8, {"a": 1}]]}}, "table.allreduce[1]: 8 bytes come after 8"),
    ({"table": {"allreduce": [[8, {"a": 0}]]}}, "table.allreduce[0]: a takes 0, needs seconds above zero"),
    ({"table": {"allreduce": [[8, {"a": float("nan")}]]}}, "a takes nan, needs seconds"),
]


@pytest.mark.parametrize(("content", "fault"), WRONG, ids=[fault for _, fault in WRONG])
def test_a_broken_file_says_what_is_wrong(alone: Path, content: Any, fault: str) -> None:
    if not isinstance(content, str):
        content = json.dumps(json.loads(PROFILE.to_json()) | content)
    Path("p.json").write_text(content)
    with pytest.raises(ValueError, match=r"^profile p\.json: ") as raised:
        load("p.json")
    assert fault in str(raised.value)


def test_files_that_cannot_be_read(alone: Path) -> None:
    with pytest.raises(ValueError, match=r"profile p\.json: there is no such file"):
        load("p.json")
    with pytest.raises(ValueError, match="cannot be read"):
        load(alone)
    Path("p.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="cannot be read"):
        load("p.json")


# ------------------------------------------------------------------------------------------------------------- choice


def test_times_between_measured_sizes() -> None:
    assert PROFILE.times("allreduce", 8) == {"naive": 1e-5, "ring": 4e-5}
    assert PROFILE.times("allreduce", 128) == pytest.approx({"naive": 2e-5, "ring": 4e-5})  # half way, in logarithms
    assert PROFILE.times("allreduce", 4096).keys() == {"ring"}  # the others were measured at one end only
    assert PROFILE.times("allreduce", 0) == PROFILE.times("allreduce", 8)
    assert PROFILE.times("allreduce", 4 << 20) == PROFILE.times("allreduce", 1 << 20)
    assert PROFILE.times("allreduce", (4 << 20) + 1) == {}
    assert PROFILE.choose("allreduce", 1 << 30) is None
    assert PROFILE.times("allgather", 8) == PROFILE.times("reduce_scatter", 8) == {}
    zero = Profile(WHERE, {"allreduce": [(0, {"a": 1.0}), (4, {"a": 2.0})]})
    assert zero.times("allreduce", 2) == pytest.approx({"a": 2**0.5})


def test_the_fastest_is_chosen() -> None:
    assert PROFILE.choose("allreduce", 128) == ("naive", "profile: naive 20 us at 128 B, ring 40 us")
    assert PROFILE.choose("allreduce", 1 << 21) == (
        "ring",
        "profile: ring 1.0 ms at 2 MiB, x 1.0 s (as at 1 MiB, the most that was measured)",
    )
    least = PROFILE.choose("allreduce", 4)
    assert least is not None
    assert least[1].endswith("(as at 8 B, the least that was measured)")
    assert PROFILE.choose("allreduce", 8, lambda name: name == "ring") == ("ring", "profile: ring 40 us at 8 B")
    assert PROFILE.choose("allreduce", 8, lambda name: False) is None
    assert PROFILE.choose("reduce_scatter", 8) is None


def test_a_tie_goes_to_the_winner_at_the_nearest_size() -> None:
    rows = [(8, {"a": 1.0, "b": 1.5}), (128, {"a": 2.0, "b": 1.0})]
    profile = Profile(WHERE, {"allreduce": rows})
    times = profile.times("allreduce", 23)
    assert times["b"] < times["a"] < 1.03 * times["b"]
    chosen = [profile.choose("allreduce", nbytes) for nbytes in (8, 23, 28)]
    assert [pair and pair[0] for pair in chosen] == ["a", "a", "b"]
    tied = Profile(WHERE, {"allreduce": [(8, {"b": 1.0, "a": 1.0})]}).choose("allreduce", 8)
    assert tied is not None
    assert tied[0] == "a"


# ------------------------------------------------------------------------------------------------------- where it holds


@pytest.mark.parametrize("form", ["1x4", "2x2", "4x1", "3+1", "1+3", "0,1,0,1", "0,1,1,0"])
def test_placements_in_words(form: str) -> None:
    assert nodes_text(virtual_nodes(form, 4)) == form


def test_files_are_named_by_where_they_hold() -> None:
    assert WHERE.file_name == "4-2x2-mpich.json"
    nodes = ",".join(str(rank % 2) for rank in range(40))
    assert Where(40, nodes, "mpich").file_name.startswith("40-2nodes-")


@pytest.mark.parametrize(
    ("text", "name", "version"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: ...\0", "mpich", "5.0.2"),
        ("Open MPI v5.0.11, package: Open MPI root@x Distribution", "openmpi", "5.0.11"),
        ("Intel(R) MPI Library 2021.18 for Linux* OS\n", "intelmpi", "2021.18"),
        ("Great MPI 3", "greatmpi", ""),
        ("", "mpi", ""),
    ],
)
def test_the_mpi_by_name(text: str, name: str, version: str) -> None:
    assert name_mpi(text) == (name, version)


def test_where_a_profile_does_not_hold() -> None:
    assert WHERE.differs(HERE, "mpich") is None
    assert WHERE.differs(HERE, None) is None
    assert WHERE.differs(HERE, "openmpi") == "it was made under mpich, this is openmpi"
    assert WHERE.differs(Topology.one_node(2), "mpich") == "it was made with 4 ranks, here are 2"
    told = WHERE.differs(Topology.of([0, 1, 0, 1]), "mpich")
    assert told == "it was made on 2x2 (nodes x ranks), here is 0,1,0,1"


def test_the_order_in_which_profiles_are_looked_for(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = alone / "config" / "pyreduce"
    assert profiles.configuration_folder() == folder
    assert find(4) == Shelf()
    for other in (WHERE, Where(4, "1x4", "mpich"), Where(8, "2x4", "mpich"), Where(4, "2x2", "openmpi")):
        Profile(other, PROFILE.table).save(folder / other.file_name)
    (folder / "notes.txt").touch()
    assert len(find(4).configured) == 3
    assert find(4).pick(HERE, "mpich")[1] == str(folder / "4-2x2-mpich.json")
    assert find(4).pick(HERE, "openmpi")[1] == str(folder / "4-2x2-openmpi.json")
    assert find(4).pick(Topology.one_node(4), "openmpi")[0] is None
    PROFILE.save(PROJECT_FILE)
    assert find(4).pick(HERE, "mpich")[1] == PROJECT_FILE
    assert find(4).pick(HERE, "openmpi")[1] == str(folder / "4-2x2-openmpi.json")  # the project's does not hold
    PROFILE.save("named.json")
    monkeypatch.setenv(VARIABLE, "named.json")
    assert find(4).pick(HERE, "mpich")[1] == "named.json"
    assert find(4).pick(HERE, "openmpi")[0] is None  # it, or none
    assert find(1) == Shelf()
    monkeypatch.setenv(VARIABLE, "none")
    assert find(4) == Shelf()


def test_the_configuration_folder_without_a_variable() -> None:
    assert profiles.configuration_folder({"HOME": "/h"}) == Path("/h/.config/pyreduce")
    assert profiles.configuration_folder({"HOME": "/h", "XDG_CONFIG_HOME": "no/path"}) == Path("/h/.config/pyreduce")


def test_a_named_file_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "gone.json")
    with pytest.raises(ValueError, match=r"profile gone\.json: there is no such file \(PYREDUCE_PROFILE\)"):
        find(4)


def test_one_made_elsewhere_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    PROFILE.save(PROJECT_FILE)
    with caplog.at_level(logging.WARNING, "pyreduce"):
        assert find(4).pick(HERE, "openmpi")[0] is None
        assert not caplog.records
        for _ in range(2):
            find(4).pick(HERE, "openmpi", warn=True)
    (record,) = caplog.records
    assert f"profile {PROJECT_FILE} is not used: it was made under mpich, this is openmpi" in record.message


def test_one_in_the_configuration_folder_is_passed_over_silently(caplog: pytest.LogCaptureFixture) -> None:
    PROFILE.save(profiles.configuration_folder() / WHERE.file_name)
    with caplog.at_level(logging.WARNING, "pyreduce"):
        assert find(4).pick(HERE, "openmpi", warn=True)[0] is None
    assert not caplog.records


# ------------------------------------------------------------------------------------------------------- under mpirun


def profile_here(comm: Any, times: dict[str, float], **changes: Any) -> Profile:
    """One that holds for the ranks of a test."""
    from mpi4py import MPI

    mpi, version = name_mpi(MPI.Get_library_version())
    where = {"nranks": comm.size, "nodes": f"1x{comm.size}", "mpi": mpi, "mpi_version": version} | changes
    return Profile(Where(**where), {"allreduce": [(40, times)]})


def check_sum(c: Any, algorithm: str) -> str:
    """One allreduce, by that algorithm; the reason for it."""
    total = c.allreduce(np.arange(5.0) + c.rank)
    assert total.tolist() == [x * c.size + sum(range(c.size)) for x in range(5)]
    ((collective, name),) = c.stats
    assert (collective, name) == ("allreduce", algorithm)
    return c.stats[collective, name].why


@pytest.mark.ranks(2, 3, 4)
def test_calls_choose_by_a_profile(make_communicator: MakeCommunicator, comm: Any) -> None:
    profile_here(comm, {"shared": 2e-5, "ring": 1e-5}).save(PROJECT_FILE)
    why = check_sum(make_communicator(), "ring")
    assert why.startswith(f"profile {PROJECT_FILE}: ring 10 us at 40 B, shared 20 us")
    check_sum(make_communicator(deterministic=True), "shared")
    check_sum(make_communicator(algorithm="naive"), "naive")


@pytest.mark.ranks(2, 3, 4)
def test_another_version_of_the_mpi_will_do(make_communicator: MakeCommunicator, comm: Any) -> None:
    profile_here(comm, {"ring": 1e-5}, mpi_version="0.1").save(PROJECT_FILE)
    check_sum(make_communicator(), "ring")


@pytest.mark.ranks(2, 3, 4)
def test_a_profile_from_elsewhere_is_not_used(
    make_communicator: MakeCommunicator, comm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    profile_here(comm, {"ring": 1e-5}, mpi="another").save(PROJECT_FILE)
    with caplog.at_level(logging.WARNING, "pyreduce"):
        for _ in range(2):
            check_sum(make_communicator(), "shared")
    told = [record.message for record in caplog.records if "it was made under another" in record.message]
    assert len(told) == (comm.rank == 0)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("algorithm", ["ring", "shared"])
def test_profiles_that_differ_are_a_mismatch(make_communicator: MakeCommunicator, comm: Any, algorithm: str) -> None:
    odd = comm.size - 1
    seconds = 1e-5 if comm.rank == odd else 2e-5
    profile_here(comm, {algorithm: seconds}).save(PROJECT_FILE)
    c = make_communicator()
    with pytest.raises(pr.MismatchError, match=f"profile: [0-9a-f]+ on rank {odd}|profile: [0-9a-f]+ on rank 0"):
        c.allreduce(np.ones(5))


@pytest.mark.ranks(2, 3, 4)
def test_a_profile_on_one_rank_only_is_a_mismatch(make_communicator: MakeCommunicator, comm: Any) -> None:
    if comm.rank == 0:
        profile_here(comm, {"ring": 1e-5}).save(PROJECT_FILE)
    c = make_communicator()
    with pytest.raises(pr.MismatchError, match=r"profile: .*none"):
        c.allreduce(np.ones(5))


@pytest.mark.ranks(2, 3, 4)
def test_a_broken_profile_raises_before_anything_is_sent(make_communicator: MakeCommunicator, comm: Any) -> None:
    Path(PROJECT_FILE).write_text("{}")
    with pytest.raises(ValueError, match=f"profile {PROJECT_FILE}: format is None"):
        make_communicator()


@pytest.mark.ranks(2, 3, 4)
def test_the_profile_of_these_nodes_is_picked(make_communicator: MakeCommunicator, comm: Any) -> None:
    apart = f"{comm.size}x1"
    profile_here(comm, {"native": 1e-5}, nodes=apart).save(profiles.configuration_folder() / f"{comm.size}-a.json")
    profile_here(comm, {"pairwise": 1e-5}).save(profiles.configuration_folder() / f"{comm.size}-b.json")
    check_sum(make_communicator(nodes=apart), "native")
    check_sum(make_communicator(), "pairwise")


@pytest.mark.ranks(2, 3, 4)
def test_a_profile_on_one_rank_only_is_a_mismatch_between_nodes_too(
    make_communicator: MakeCommunicator, comm: Any
) -> None:
    apart = f"{comm.size}x1"
    if comm.rank == 0:
        profile_here(comm, {"ring": 1e-5}, nodes=apart).save(PROJECT_FILE)
    c = make_communicator(nodes=apart)
    with pytest.raises(pr.MismatchError, match=r"profile: .*none"):
        c.allreduce(np.ones(5))
