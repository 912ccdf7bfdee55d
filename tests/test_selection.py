"""Which algorithm is chosen, and what the model says: without MPI."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pyreduce import algorithms, ops
from pyreduce.errors import Unsupported
from pyreduce.model import MODELLED, Figures, in_bytes, in_seconds, predict
from pyreduce.profiles import Profile, Where, nodes_text
from pyreduce.programs import COLLECTIVES
from pyreduce.selection import cannot_serve, choose, weigh
from pyreduce.topology import Topology

FLOAT = np.dtype(np.float32)
SIZES = [0, 8, 4096, 1 << 16, 1 << 20, 1 << 24, 1 << 27]
PLACEMENTS = [
    Topology.one_node(4),
    Topology.even(2, 2),
    Topology.even(5, 5),
    Topology.even(8, 4),
    Topology.of([0, 1, 0, 1, 0, 1]),
    Topology.of([0, 0, 0, 1, 1]),
    Topology.even(64, 8),
]
SEVERAL = PLACEMENTS[1:]


def op_of(collective: str) -> ops.Op | None:
    return None if collective == "allgather" else ops.SUM


def pick(collective: str, nbytes: int, topology: Topology, **options: object) -> tuple[str, str]:
    """What is chosen for floats."""
    return choose(collective, nbytes, topology, op_of(collective), FLOAT, **options)  # type: ignore[arg-type]


def profile_of(topology: Topology, *rows: tuple[int, dict[str, float]], collective: str = "allreduce") -> Profile:
    where = Where(topology.nranks, nodes_text(topology), "mpich")
    return Profile(where, {collective: list(rows)}, path="somewhere/p.json")


# -------------------------------------------------------------------------------------------------------------- model


@pytest.mark.parametrize("topology", PLACEMENTS, ids=nodes_text)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_times_are_positive_and_rise_with_the_size(collective: str, topology: Topology) -> None:
    for name in MODELLED:
        times = [predict(name, collective, nbytes, topology) for nbytes in SIZES]
        if times[0] is None:
            assert times == [None] * len(SIZES)
            continue
        assert all(below is not None and above is not None and 0 < below <= above
                   for below, above in itertools.pairwise(times))  # fmt: skip


def test_what_has_no_formula() -> None:
    one, two, flat = Topology.one_node(4), Topology.even(4, 2), Topology.even(4, 4)
    assert predict("mine", "allreduce", 8, one) is None
    assert predict("recursive_doubling", "allgather", 8, two) is None
    for name, topology in (("shared", two), ("mesh", two), ("hierarchical", one), ("hierarchical", flat)):
        assert predict(name, "allreduce", 8, topology) is None
    assert predict("hierarchical", "allreduce", 8, two) is not None


@pytest.mark.parametrize("nranks", [2, 3, 5, 8])
def test_the_wire_alone(nranks: int) -> None:
    """Without overheads, the formulas of the literature, on nodes of one rank."""
    bare = Figures(
        alpha=3.0, beta=7.0, gamma=0.5, beta_node=0, call=0, round=0, message=0, native_call=0, incast=0, changing=1
    )
    apart, nbytes, log = Topology.even(nranks, nranks), 60 * nranks, (nranks - 1).bit_length()
    moved = nbytes * (nranks - 1) / nranks
    assert predict("ring", "allgather", nbytes, apart, bare) == pytest.approx((nranks - 1) * 3 + moved * 7)
    assert predict("ring", "allreduce", nbytes, apart, bare) == pytest.approx(2 * (nranks - 1) * 3 + moved * 14.5)
    assert predict("direct", "reduce_scatter", nbytes, apart, bare) == pytest.approx(3 + moved * 7.5)
    assert predict("circulant", "reduce_scatter", nbytes, apart, bare) == pytest.approx(log * 3 + moved * 7.5)
    assert predict("pairwise", "reduce_scatter", nbytes, apart, bare) == pytest.approx((nranks - 1) * 3 + moved * 7.5)
    naive = 3 + (nranks - 1) * nbytes * 7.5
    assert predict("naive", "allreduce", nbytes, apart, bare) == pytest.approx(naive)
    doubling = (nranks.bit_length() - 1 + 2 * (nranks & (nranks - 1) > 0)) * (3 + nbytes * 7.5)
    assert predict("recursive_doubling", "allreduce", nbytes, apart, bare) == pytest.approx(doubling)


def test_ranks_of_a_node_share_its_link() -> None:
    """A ring crosses each link once if ranks are placed node by node, and with every rank if in turn."""
    bare = Figures(alpha=0, beta=1.0, gamma=0, alpha_node=0, beta_node=0, call=0, round=0)
    by_node, in_turn = Topology.even(8, 2), Topology.of([0, 1] * 4)
    assert predict("ring", "allgather", 800, by_node, bare) == pytest.approx(700)
    assert predict("ring", "allgather", 800, in_turn, bare) == pytest.approx(4 * 700)
    assert predict("hierarchical", "allgather", 800, in_turn, Figures(
        alpha=0, beta=1.0, gamma=0, beta_shared=0, wait_shared=0, call=0, round=0)) == pytest.approx(400)  # fmt: skip


def test_words() -> None:
    assert [in_seconds(s) for s in (1e-6, 0.9996e-3, 0.0123, 12)] == ["1.0 us", "1.0 ms", "12 ms", "12 s"]
    assert [in_bytes(n) for n in (0, 1000, 1024, 3 << 20, 1 << 30)] == ["0 B", "1000 B", "1 KiB", "3 MiB", "1 GiB"]


# ------------------------------------------------------------------------------------------------------------- choice


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_node_takes_the_engine(collective: str) -> None:
    for nbytes in SIZES:
        assert pick(collective, nbytes, Topology.one_node(3))[0] == "shared"
        assert pick(collective, nbytes, Topology.one_node(3), deterministic=True)[0] == "shared"


def test_one_rank_copies() -> None:
    assert pick("allreduce", 8, Topology.one_node(1))[0] == "shared"
    alone = pick("allreduce", 8, Topology.one_node(1), no_engine="no memory")
    assert alone == ("ring", "one rank: a copy (no shared memory: no memory)")


@pytest.mark.parametrize("topology", SEVERAL, ids=nodes_text)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_several_nodes_take_what_the_model_likes_best(collective: str, topology: Topology) -> None:
    for nbytes in SIZES:
        name, why = pick(collective, nbytes, topology)
        serving = {one.name: one.predicted for one in weigh(collective, nbytes, topology, op_of(collective), FLOAT)
                   if one.refusal is None and one.predicted is not None}  # fmt: skip
        assert serving[name] == min(serving.values())
        assert why.startswith(f"model, {in_bytes(nbytes)} on {topology}: {name} ")


@pytest.mark.parametrize("topology", SEVERAL, ids=nodes_text)
@pytest.mark.parametrize("collective", ["reduce_scatter", "allreduce"])
def test_deterministic_folds_in_rank_order(collective: str, topology: Topology) -> None:
    chosen = [pick(collective, nbytes, topology, deterministic=True) for nbytes in SIZES]
    assert all(algorithms.folds_in_rank_order(name) for name, _ in chosen)
    assert all("in rank order" in why for _, why in chosen)
    assert topology.nranks == 2 or chosen[1][0] in ("naive", "direct")
    profile = profile_of(topology, (8, {"ring": 1e-6, "naive": 1.0}), collective=collective)
    assert pick(collective, 8, topology, deterministic=True, profile=profile)[0] == "naive"
    only = profile_of(topology, (8, {"ring": 1e-6}), collective=collective)  # nothing of it will do: the model
    assert pick(collective, 8, topology, deterministic=True, profile=only)[1].startswith("model")


def test_the_reason_tells_why_there_is_no_engine() -> None:
    name, why = pick("allgather", 8, Topology.one_node(2), no_engine="the dog ate it")
    assert name != "shared"
    assert why.endswith("(no shared memory: the dog ate it)")


def test_a_profile_decides() -> None:
    topology = Topology.even(4, 2)
    profile = profile_of(topology, (8, {"native": 2e-5, "ring": 1e-4}), (1 << 20, {"native": 3e-3, "ring": 2e-3}))
    assert pick("allreduce", 8, topology, profile=profile)[0] == "native"
    assert pick("allreduce", 1 << 20, topology, profile=profile) == (
        "ring",
        "profile p.json: ring 2.0 ms at 1 MiB, native 3.0 ms",
    )
    assert pick("allgather", 8, topology, profile=profile)[1].startswith("model")  # it has none


def test_a_profile_decides_on_one_node_too() -> None:
    topology = Topology.one_node(2)
    profile = profile_of(topology, (8, {"native": 1e-6, "shared": 2e-6}))
    assert pick("allreduce", 8, topology, profile=profile)[0] == "native"
    assert pick("allreduce", 8, topology, profile=profile_of(topology, (8, {"hers": 1e-6})))[0] == "shared"


def test_what_the_winner_cannot_serve_goes_to_the_next() -> None:
    topology = Topology.one_node(2)
    profile = profile_of(topology, (8, {"gone": 1e-9, "native": 1e-6, "shared": 2e-6, "ring": 3e-6}))
    assert choose("allreduce", 8, topology, ops.MAX, FLOAT, profile=profile)[0] == "shared"  # NaN
    assert choose("allreduce", 8, topology, ops.MAX, FLOAT, profile=profile, no_engine="none")[0] == "ring"


def test_who_cannot_serve() -> None:
    one, two, flat = Topology.one_node(4), Topology.even(4, 2), Topology.even(4, 4)

    def refusal(name: str, topology: Topology, collective: str = "allreduce", **options: object) -> str | None:
        return cannot_serve(name, collective, 8, topology, op_of(collective), FLOAT, **options)  # type: ignore[arg-type]

    assert refusal("shared", one) is None
    assert refusal("shared", one, no_engine="no memory") == "no memory"
    assert refusal("shared", two) == "needs one node, here are 2 nodes of 2 ranks"
    assert refusal("ring", one, deterministic=True) == "does not fold in rank order"
    assert refusal("ring", one, "allgather", deterministic=True) is None
    assert refusal("nobody", one) == "no algorithm is called so here"
    assert refusal("hierarchical", one) == "one node only"
    assert refusal("hierarchical", flat) == "no node has several ranks"
    assert refusal("hierarchical", two) is None
    assert refusal("hierarchical", two, no_node_engine="no memory") == "no memory"

    @algorithms.register_algorithm("mine")
    def mine(collective: str, nranks: int, rank: int) -> object:
        if collective != "allgather" or nranks % 2:
            raise Unsupported("mine: even allgathers only")
        return algorithms.get("ring").rounds(collective, nranks, rank)

    assert refusal("mine", two) == "mine: even allgathers only"
    assert refusal("mine", two, "allgather") is None


def test_an_algorithm_of_ones_own_is_chosen_by_measurement_only() -> None:
    algorithms.register_algorithm("mine", algorithms.get("ring").rounds)
    topology = Topology.even(4, 2)
    assert pick("allreduce", 8, topology)[0] != "mine"
    assert pick("allreduce", 8, topology, profile=profile_of(topology, (8, {"mine": 1e-6})))[0] == "mine"
