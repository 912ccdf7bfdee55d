"""The model of time: against sums done by hand, and its two ways of computing against each other. No MPI."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyreduce as pr
from pyreduce import algorithms
from pyreduce.programs import COLLECTIVES, RoundsFunction, build
from pyreduce.simulate import Network, Timing, predict
from pyreduce.simulate.__main__ import format_seconds, main, parse_bytes, parse_seconds
from pyreduce.simulate.network import lower_bound, uniform, uniforms
from pyreduce.simulate.pictures import crossovers
from pyreduce.simulate.symmetric import find
from pyreduce.topology import Topology

ALPHA, BETA, GAMMA = 1.0, 0.01, 0.001
NETWORK = Network(ALPHA, BETA, GAMMA)
PROGRAMS = [name for name in algorithms.names() if not algorithms.has_no_program(name)]


def skips(collective: str, nranks: int, rank: int) -> Iterator[Sequence[Any]]:
    """An allgather in ceil(log2 P) rounds, as Bruck and others: the same on every rank, up to rotation."""
    if collective != "allgather":
        raise pr.Unsupported("skips serves allgather")
    yield [pr.Copy(pr.place_output(rank), pr.place_input(rank))]
    have = 1
    while have < nranks:
        count = min(have, nranks - have)
        source = (rank + have) % nranks
        yield [
            pr.Send((rank - have) % nranks, pr.place_output(rank, count)),
            pr.Recv(source, pr.place_output(source, count)),
        ]
        have += count


def rounds_of(name: str) -> RoundsFunction:
    return skips if name == "skips" else algorithms.get(name).rounds


def timing(name: str, collective: str, nranks: int, nbytes: int, network: Network = NETWORK, **more: Any) -> Timing:
    return predict(rounds_of(name), collective, nranks, nbytes, network, name=name, **more)


# ------------------------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize("path", ["events", "symmetric"])
def test_ring_by_hand(path: str) -> None:
    got = timing("ring", "reduce_scatter", 4, 400, path=path)
    assert got.finish == pytest.approx([3 * (ALPHA + 100 * BETA + 100 * GAMMA)] * 4)
    assert got.shares == pytest.approx((3 * ALPHA, 300 * BETA, 300 * GAMMA))
    assert got.bytes_sent.tolist() == [300] * 4
    assert got.bound == pytest.approx(2 * ALPHA + 300 * BETA + 300 * GAMMA)
    assert got.efficiency == pytest.approx(got.bound / got.time)
    assert timing("ring", "allreduce", 4, 400, path=path).time == pytest.approx(6 * (ALPHA + 1) + 3 * 0.1)


@pytest.mark.parametrize("path", ["events", "symmetric"])
def test_naive_by_hand(path: str) -> None:
    """One round of P-1 messages, one at a time out of a rank and into it; then a fold of P vectors."""
    got = timing("naive", "allreduce", 5, 100, path=path)
    assert got.time == pytest.approx(4 * (ALPHA + 100 * BETA) + 4 * 100 * GAMMA)
    assert got.rounds.tolist() == [1] * 5


@pytest.mark.parametrize("path", ["events", "symmetric"])
def test_a_slow_rank_by_hand(path: str) -> None:
    """Two ranks of 3, one message each way: the slow one's takes long for both, its fold for itself."""
    got = timing("ring", "reduce_scatter", 2, 200, Network(ALPHA, BETA, GAMMA, slow={1: 3.0}), path=path)
    assert got.finish == pytest.approx([3 * (ALPHA + 1) + 0.1, 3 * (ALPHA + 1) + 0.3])
    assert got.last == 1
    assert [hop.kind for hop in got.critical] == ["message", "fold"]


def test_a_slow_rank_is_found() -> None:
    got = timing("ring", "reduce_scatter", 16, 1600, Network(ALPHA, BETA, GAMMA, slow={5: 4.0}))
    assert all(5 in (hop.rank, hop.peer) for hop in got.critical)


def across(collective: str, nranks: int, rank: int) -> Iterator[Sequence[Any]]:
    """Ranks r and r + P/2 exchange whole vectors: no collective, but a load for links."""
    peer = (rank + nranks // 2) % nranks
    yield [pr.Send(peer, pr.place_input(0, nranks)), pr.Recv(peer, pr.place_scratch(0, 0, nranks))]


def test_two_nodes_share_a_link_by_hand() -> None:
    """Three messages each way between two nodes: one after the other, both ways at once."""
    nodes = Topology.even(6, 2)
    got = predict(across, "allreduce", 6, 100, Network(ALPHA, BETA, topology=nodes, alpha_node=0.1, beta_node=0.0))
    assert got.finish == pytest.approx([2.0, 4.0, 6.0] * 2)
    assert len(got.critical) == 3
    assert predict(across, "allreduce", 6, 100, Network(ALPHA, BETA)).finish == pytest.approx([2.0] * 6)
    one = Network(ALPHA, BETA, topology=Topology.one_node(6), alpha_node=0.1, beta_node=0.0)
    assert predict(across, "allreduce", 6, 100, one).finish == pytest.approx([0.1] * 6)


def test_a_ring_over_nodes_by_hand() -> None:
    """Neighbours on one node are quick, but each round the pair across the link keeps others waiting in the next."""
    network = Network(ALPHA, 0.0, topology=Topology.even(4, 2), alpha_node=0.25)
    for path in ("events", "symmetric"):
        got = timing("ring", "allgather", 4, 400, network, path=path)
        # Round 1: ranks 0, 2 receive at 1, ranks 1, 3 at 0.25; all are done at 1, since each sends or receives across.
        assert got.finish == pytest.approx([3.0] * 4)


def test_mesh_by_hand() -> None:
    """A barrier of P-1 notifies, P-1 gets, a fold of P-1 operations."""
    got = timing("mesh", "reduce_scatter", 4, 400)
    assert got.time == pytest.approx(3 * ALPHA + 3 * (ALPHA + 100 * BETA) + 3 * 100 * GAMMA)


def test_segments_overlap() -> None:
    """Folding one segment while the next travels: two lanes hide the folds of all but the last."""
    network = Network(0.0, BETA, BETA)
    whole = timing("ring", "reduce_scatter", 2, 800, network)
    cut = timing("ring", "reduce_scatter", 2, 800, network, segments=4)
    assert whole.time == pytest.approx(8.0)
    assert cut.time == pytest.approx(4.0 + 1.0)
    assert cut.bytes_sent.tolist() == [400, 400]
    assert timing("ring", "reduce_scatter", 2, 800, network, segments=4, lanes=1).time == pytest.approx(8.0)


def late(collective: str, nranks: int, rank: int) -> Iterator[Sequence[Any]]:
    """Rank 2 sends to rank 0 before rank 0 is ready; rank 0 hears rank 1 first."""
    block = pr.place_scratch(0, 0)
    if rank == 0:
        yield [pr.Recv(1, block)]
        yield [pr.Recv(2, block)]
    else:
        yield [pr.Send(0, pr.place_input(0))]


def test_a_send_waits_for_its_receiver() -> None:
    got = predict(late, "reduce_scatter", 3, 0, Network(ALPHA, BETA), spans=True)
    assert got.finish.tolist() == [2.0, 1.0, 2.0]
    assert [(span.rank, span.start) for span in got.spans] == [(1, 0.0), (2, 1.0)]
    assert [hop.rank for hop in got.critical] == [1, 2]


# ----------------------------------------------------------------------------------------------------------- both ways


def networks(nranks: int) -> Iterator[Network]:
    yield NETWORK
    yield Network(ALPHA, BETA, GAMMA, slow={nranks - 1: 2.5, 0: 1.5})
    yield Network(ALPHA, BETA, GAMMA, jitter=0.5, seed=3)
    for nnodes in {1, min(2, nranks), nranks}:
        yield Network(ALPHA, BETA, GAMMA, Topology.even(nranks, nnodes), 0.1, 0.001)
    nodes = Topology.even(nranks, min(3, nranks))
    yield Network(ALPHA, BETA, GAMMA, nodes, 0.1, 0.001, jitter=0.2, slow={nranks // 2: 3.0})


@pytest.mark.parametrize("nranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", [*PROGRAMS, "skips"])
def test_both_ways_give_the_same_times(name: str, nranks: int) -> None:
    ways = set()
    for collective in COLLECTIVES:
        for nbytes in (nranks - 1, 100 * nranks, 100 * nranks + 1):
            for network in networks(nranks):
                try:
                    one = timing(name, collective, nranks, nbytes, network, path="events")
                except pr.Unsupported:
                    continue
                other = timing(name, collective, nranks, nbytes, network)
                ways.add(other.path)
                for word in ("finish", "rounds", "messages", "sent", "received", "folds", "bytes_sent"):
                    assert np.array_equal(getattr(one, word), getattr(other, word)), word
                for each in (one, other):
                    assert sum(each.shares) == pytest.approx(each.time)
                    assert each.time >= each.bound * (1 - 1e-12)
    if name in ("ring", "skips", "circulant", "pairwise") and ways:
        assert "symmetric" in ways


@pytest.mark.parametrize("nranks", [1, 3, 4, 6, 9])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_counts_as_the_cost_card_does(name: str, nranks: int) -> None:
    for collective in COLLECTIVES:
        for path in ("auto", "events"):
            try:
                got = timing(name, collective, nranks, 1000, path=path)
            except pr.Unsupported:
                continue
            for rank in range(nranks):
                cost = build(name, rounds_of(name), collective, nranks, rank).cost()
                counted = (got.rounds, got.messages, got.sent, got.received, got.folds)
                assert tuple(int(count[rank]) for count in counted) == (
                    cost.rounds, cost.messages, cost.sent, cost.received, cost.folds,
                )  # fmt: skip


def test_programs_that_are_no_rotations_are_played_one_by_one() -> None:
    def one_differs(collective: str, nranks: int, rank: int) -> Iterator[Sequence[Any]]:
        yield from algorithms.get("ring").rounds(collective, nranks, rank)
        if rank == 3:
            yield [pr.Fold(pr.place_output(3), (pr.place_output(3), pr.place_input(3)))]

    assert find(one_differs, "reduce_scatter", 8, True) is None
    assert predict(one_differs, "reduce_scatter", 8, 800, NETWORK).last == 3
    with pytest.raises(pr.Unsupported, match="not rotations of each other"):
        predict(one_differs, "reduce_scatter", 8, 800, NETWORK, path="symmetric")


def test_a_ring_of_a_thousand() -> None:
    nodes = Topology.even(1024, 64)
    got = timing("ring", "reduce_scatter", 1024, 1 << 20, Network(ALPHA, BETA, GAMMA, nodes, 0.1, 0.001, jitter=0.1))
    assert got.path == "symmetric"
    assert 12 <= got.compared <= 1024
    assert 1023 * ALPHA < got.time < 1023 * (1.1 * ALPHA + 1.2 * 1024 * BETA + 1024 * GAMMA)
    assert timing("skips", "allgather", 1024, 1 << 20).time == pytest.approx(10 * ALPHA + 1023 * 1024 * BETA)


def test_random_numbers_are_the_same_one_by_one() -> None:
    for seed, number in ((0, 0), (7, 3), (-1, 1000)):
        many = uniforms(seed, 100, number)
        assert many.tolist() == [uniform(seed, rank, number) for rank in range(100)]
        assert 0 <= many.min() < 0.1 < 0.9 < many.max() < 1
    one, two = (timing("ring", "allgather", 8, 800, Network(1.0, 0.0, jitter=1.0, seed=seed)).time for seed in (1, 2))
    assert one != two


# -------------------------------------------------------------------------------------------------------------- limits


def test_the_lower_bound() -> None:
    assert lower_bound("allreduce", 1, 1000, NETWORK) == 0
    assert lower_bound("allgather", 8, 800, NETWORK) == pytest.approx(3 * ALPHA + 700 * BETA)
    assert lower_bound("allreduce", 8, 800, NETWORK) == pytest.approx(3 * ALPHA + 1400 * BETA + 700 * GAMMA)
    nodes = Network(ALPHA, BETA, 0.0, Topology.even(8, 2), 0.1, 0.0)
    assert lower_bound("allgather", 8, 800, nodes) == pytest.approx(ALPHA + 400 * BETA)
    assert lower_bound("allgather", 8, 800, Network(ALPHA, BETA, 0.0, Topology.one_node(8), 0.1, 0.0)) == (
        pytest.approx(0.3)
    )


def test_what_cannot_be_predicted() -> None:
    def never(collective: str, nranks: int, rank: int) -> Iterator[Sequence[Any]]:
        yield [pr.Recv((rank + 1) % nranks, pr.place_scratch(0, 0))]

    def misfit(collective: str, nranks: int, rank: int) -> Iterator[Sequence[Any]]:
        yield [pr.Send(1, pr.place_input(0, 2))] if rank == 0 else [pr.Recv(0, pr.place_scratch(0, 0))]

    with pytest.raises(pr.AlgorithmError, match="deadlock: rank 0 waits in round 1 for a message that rank 1 does not"):
        predict(never, "allreduce", 2, 8, NETWORK)
    with pytest.raises(pr.AlgorithmError, match="sends 2 blocks from 0 on to rank 1 in its round 1"):
        predict(misfit, "allreduce", 2, 8, NETWORK)
    with pytest.raises(pr.Unsupported, match="more than 10 messages"):
        timing("naive", "allgather", 8, 7, most=10)
    for wrong, text in (
        ({"nranks": 0}, "nranks is 0"), ({"nbytes": -1}, "nbytes is -1"), ({"collective": "scan"}, "no collective"),
        ({"path": "best"}, "path is"), ({"segments": 0}, "segments is 0"),
        ({"network": Network(1, 1, slow={4: 2})}, "factor is given for rank 4"),
        ({"network": Network(1, 1, topology=Topology.even(3, 2))}, "those of 3 ranks"),
    ):  # fmt: skip
        given: dict[str, Any] = {"collective": "allreduce", "nranks": 4, "nbytes": 8, "network": NETWORK, **wrong}
        with pytest.raises(ValueError, match=text):
            predict(rounds_of("ring"), **given)
    with pytest.raises(ValueError, match="alpha is -1"):
        Network(-1, 0)
    with pytest.raises(ValueError, match="factor of rank 0 is 0"):
        Network(1, 0, slow={0: 0})


# ----------------------------------------------------------------------------------------------------- the command line


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "allreduce", "-n", "8", "--bytes", "64", "--alpha", "1us", "--beta", "1e-9", "--gamma", "0")
    rows = [line.split() for line in text.splitlines() if line.startswith("  ") and "%" in line]
    assert {row[0] for row in rows} == set(PROGRAMS)
    assert "lower bound 3.112 us" in text
    scale = {"us": 1e-6, "ms": 1e-3, "ns": 1e-9}
    times = [float(row[1]) * scale[row[2]] for row in rows]
    assert times == sorted(times)


def test_one_algorithm_in_detail(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(
        capsys, "reduce_scatter", "-n", "6", "-b", "600", "-a", "ring", "--alpha", "1", "--beta", "1ms",
        "--nodes", "2x3", "--alpha-node", "0.5", "--beta-node", "0", "--jitter", "10%", "--seed", "4", "--slow", "2:2",
    )  # fmt: skip
    for words in ("2 nodes of 3 ranks", "within a node alpha 500 ms", "slow: rank 2 by 2", "(seed 4)", "is done last",
                  "critical path: 5 messages", "round 1: "):  # fmt: skip
        assert words in text, words


def test_an_algorithm_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).resolve().parent.parent / "examples" / "torus.py"
    if not path.is_file():
        pytest.skip("an installed package has no examples")
    text = told(capsys, "reduce_scatter", "--load", str(path), "-a", "torus", "-a", "ring", "-n", "64", "-b", "6400")
    rows = [line.split() for line in text.splitlines() if line.startswith(("  torus", "  ring"))]
    assert [(row[0], row[4]) for row in rows] == [("torus", "14"), ("ring", "63")]
    with pytest.raises(SystemExit):
        main(["reduce_scatter", "--load", str(path), "-a", "torus", "-n", "7"])
    assert "7 ranks have none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0"], "needs a whole number, 1 at least"),
        (["--bytes", "1x"], "no number of bytes"),
        (["--alpha", "-1"], "is no time"),
        (["--beta", "1h"], "is no time"),
        (["--jitter", "x"], "is no fraction"),
        (["--slow", "1"], "is no rank and factor"),
        (["--slow", "4:2"], "ranks are 0..3"),
        (["--seed", "1"], "needs --jitter"),
        (["--alpha-node", "1"], "needs --nodes"),
        (["--nodes", "9"], "--nodes is '9', more nodes than ranks"),
        (["--segments", "0"], "1 at least"),
        (["--plot", "x.pdf"], "needs to end in .png or .svg"),
        (["--plot", "no/such/x.png"], "no such directory"),
        (["-a", "spam"], "no algorithm is called 'spam'"),
        (["-a", "native"], "has no program"),
        (["--load", "no-such-file.py"], "no-such-file.py"),
    ],
)
def test_options_that_make_no_sense(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit):
        main(["allreduce", "=".join(arguments) if arguments[0].startswith("--") else "".join(arguments)])
    assert words in capsys.readouterr().err


def test_numbers_in_words() -> None:
    assert [parse_seconds(text) for text in ("1us", "8e-9", "2ms", "3s", "5ns")] == [1e-6, 8e-9, 2e-3, 3.0, 5e-9]
    assert [parse_bytes(text) for text in ("8", "2K", "32M", "1G")] == [8, 2048, 1 << 25, 1 << 30]
    assert [format_seconds(t) for t in (0, 1e-9, 1.5e-6, 2e-3, 12)] == ["0", "1 ns", "1.5 us", "2 ms", "12 s"]


def test_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "times.svg"
    text = told(capsys, "allgather", "-n", "3", "-a", "ring", "-a", "naive", "--plot", str(path))
    assert f"drawn: {path}, {tmp_path / 'times-gantt.svg'}" in text
    assert path.stat().st_size > 1000
    assert (tmp_path / "times-gantt.svg").stat().st_size > 1000


def test_without_matplotlib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyreduce.simulate.pictures.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["allreduce", "--plot", "x.png"])
    assert "--plot needs matplotlib: pip install" in capsys.readouterr().err


def test_crossovers() -> None:
    (only,) = crossovers([1, 100], {"flat": [10.0, 10.0], "steep": [1.0, 100.0]})
    assert only == (pytest.approx(10.0), pytest.approx(10.0), "steep", "flat")
    assert crossovers([1, 100], {"flat": [1.0, 1.0], "steep": [2.0, 100.0]}) == []
