"""hierarchical: how vectors are cut, and every collective on nodes of all sizes and placements."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import COLLECTIVES, DEFINED, MODES, REDUCTIONS, assert_same_everywhere, run_checked
from hypothesis import given
from hypothesis import strategies as st

import pyreduce as pr
from pyreduce import ops
from pyreduce.algorithms.hierarchical import clip, lay_out
from pyreduce.topology import Topology

MakeCommunicator = Callable[..., pr.Communicator]

PLACED = {
    1: ["1"],
    2: ["1", "2"],
    3: ["1+2", "0,1,0", "3"],
    4: ["2x2", "1+3", "3+1", "4x1", "1", "0,1,0,1", "0,1,1,0", "0,1,2,0"],
}


@given(st.data())
def test_units_hold_every_element_once(data: st.DataObject) -> None:
    topology = Topology.of(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=12)))
    counts = data.draw(st.lists(st.integers(0, 9), min_size=topology.nranks, max_size=topology.nranks))
    for collective in COLLECTIVES:
        layout = lay_out(collective, counts, topology)
        assert layout.lanes == min(map(len, topology.nodes))
        held = [
            element
            for units in layout.units
            for unit in units
            for start, count in unit
            for element in range(start, start + count)
        ]
        assert sorted(held) == list(range(sum(counts)))
        if collective != "allreduce":  # what a lane brings to a node belongs there
            starts = list(itertools.accumulate(counts, initial=0))
            for node, ranks in enumerate(topology.nodes):
                own = {e for rank in ranks for e in range(starts[rank], starts[rank + 1])}
                brought = {
                    e for units in layout.units for start, count in units[node] for e in range(start, start + count)
                }
                assert brought == own


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 5)), max_size=5), st.integers(0, 20), st.integers(0, 20))
def test_clip(fragments: list[tuple[int, int]], low: int, high: int) -> None:
    elements = [start + i for start, count in fragments for i in range(count)]
    assert [start + i for start, count in clip(fragments, low, high) for i in range(count)] == elements[low:high]


def each_placement(make: MakeCommunicator, comm: Any, **settings: Any) -> list[pr.Communicator]:
    return [make(nodes=nodes, **settings) for nodes in PLACED[comm.size]]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_placement(make_communicator: MakeCommunicator, comm: Any, collective: str) -> None:
    for c in each_placement(make_communicator, comm):
        for rows in (0, 1, comm.size, 37, 1001, 70_001):
            for mode in MODES:
                if mode != "same array twice" or collective != "allgather":
                    run_checked(c, collective, "float32", rows, algorithm="hierarchical", mode=mode)
        counts = [(7 * rank * rank + 3) % 5 * 11 for rank in range(comm.size)]
        if collective != "allreduce":
            run_checked(c, collective, "float32", sum(counts), algorithm="hierarchical", counts=counts)


@pytest.mark.parametrize("collective", REDUCTIONS)
def test_every_op_and_dtype_on_every_placement(make_communicator: MakeCommunicator, comm: Any, collective: str) -> None:
    for c in each_placement(make_communicator, comm, in_flight=1):
        for op, dtype in DEFINED:
            run_checked(c, collective, dtype, 2 * comm.size + len(op), op=op, algorithm="hierarchical", times=1)


def test_allgather_of_every_dtype_on_every_placement(make_communicator: MakeCommunicator, comm: Any) -> None:
    for c in each_placement(make_communicator, comm):
        for dtype in ops.DTYPES:
            run_checked(c, "allgather", dtype, 3 * comm.size + 1, algorithm="hierarchical", times=1)


@pytest.mark.parametrize("in_flight", [1, 2, 8])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_bits_do_not_depend_on_segments(
    make_communicator: MakeCommunicator, comm: Any, collective: str, in_flight: int
) -> None:
    """`run_checked` compares bits with what the cut into units says."""
    for segment_bytes in (4096, 40_000):
        for c in each_placement(make_communicator, comm, segment_bytes=segment_bytes, in_flight=in_flight):
            for rows in (4096, 41_003):
                got = run_checked(c, collective, "float32", rows, algorithm="hierarchical", seed=in_flight)
                if collective == "allreduce":
                    assert_same_everywhere(comm, got)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_nonblocking_and_persistent(make_communicator: MakeCommunicator, comm: Any, collective: str) -> None:
    for c in each_placement(make_communicator, comm):
        x = np.arange(2000.0) * (comm.rank + 1)
        want = getattr(c, collective)(x, algorithm="naive")
        requests = [getattr(c, f"i{collective}")(x, counts=None, algorithm=a) if collective != "allreduce"
                    else c.iallreduce(x, algorithm=a) for a in ("hierarchical", "ring", "hierarchical")]  # fmt: skip
        for request in reversed(requests):
            np.testing.assert_allclose(request.wait(), want)
        out = np.empty_like(want)
        persistent = getattr(c, f"{collective}_init")(x, out, algorithm="hierarchical")
        for _ in range(3):
            persistent.start()
            persistent.wait()
            np.testing.assert_allclose(out, want)
        persistent.free()


@pytest.mark.ranks(4)
def test_none_chooses_among_what_serves_between_nodes(make_communicator: MakeCommunicator, comm: Any) -> None:
    c = make_communicator(nodes="2x2")
    for rows in (1, 1000, 1_000_000):
        run_checked(c, "allreduce", "float32", rows)
    assert not {name for _, name in c.stats} & {"shared", "mesh"}
    with pytest.raises(pr.Unsupported, match=r"shared cannot serve this communicator: .*2 nodes of 2 ranks"):
        c.allreduce(np.ones(4), algorithm="shared")
    run_checked(c, "allreduce", "float32", 50)


@pytest.mark.ranks(4)
def test_deterministic_folds_in_rank_order_between_nodes(make_communicator: MakeCommunicator, comm: Any) -> None:
    c = make_communicator(nodes="2x2", deterministic=True)
    for rows in (1, 1000, 1_000_000):
        run_checked(c, "reduce_scatter", "float32", rows)
    assert {name for _, name in c.stats} <= {"naive", "direct", "pairwise"}
    with pytest.raises(ValueError, match="does not fold in rank order"):
        c.allreduce(np.ones(4), algorithm="hierarchical")


@pytest.mark.ranks(4)
def test_ranks_that_disagree_are_named(make_communicator: MakeCommunicator, comm: Any) -> None:
    for odd in range(comm.size):
        c = make_communicator(nodes="2x2", timeout=20)
        c.allreduce(np.ones(100), algorithm="hierarchical")
        rows = 101 if comm.rank == odd else 100
        with pytest.raises(pr.MismatchError) as info:
            c.allreduce(np.ones(rows), algorithm="hierarchical")
        assert [odd] in info.value.groups.values()
        with pytest.raises(pr.BrokenCommunicatorError):
            c.allreduce(np.ones(100), algorithm="hierarchical")


@pytest.mark.ranks(4)
def test_a_rank_that_does_not_come_is_named(make_communicator: MakeCommunicator, comm: Any) -> None:
    for late in range(comm.size):
        c = make_communicator(nodes="2x2", timeout=0.5)
        c.allreduce(np.ones(100), algorithm="hierarchical", timeout=30)
        comm.Barrier()
        if comm.rank != late:
            with pytest.raises(pr.CollectiveTimeout) as info:
                c.allreduce(np.ones(100), algorithm="hierarchical")
            assert info.value.missing == (late,)
        comm.Barrier()


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("nodes", "algorithm"), [(None, None), (None, "shared"), ("2x2", None), ("2x2", "hierarchical")]
)
def test_a_rank_that_comes_late_to_its_first_call_is_told(
    make_communicator: MakeCommunicator, comm: Any, nodes: str | None, algorithm: str | None
) -> None:
    """It finds everybody's word there, and must not go where it would wait for those that have given up."""
    c, late = make_communicator(nodes=nodes, timeout=0.5), 2
    if comm.rank == late:
        time.sleep(2)
        with pytest.raises((pr.CollectiveTimeout, pr.BrokenCommunicatorError)):
            c.allreduce(np.ones(1001), algorithm=algorithm)
    else:
        with pytest.raises(pr.CollectiveTimeout) as info:
            c.allreduce(np.ones(1001), algorithm=algorithm)
        assert info.value.missing == (late,)


@pytest.mark.ranks(4)
def test_many_calls_of_all_sizes_with_two_communicators(make_communicator: MakeCommunicator, comm: Any) -> None:
    first, second = make_communicator(nodes="2x2", in_flight=1), make_communicator(nodes="0,1,0,1")
    rng = np.random.default_rng(8)
    for i in range(150):
        c = (first, second)[int(rng.integers(2))]
        collective = COLLECTIVES[int(rng.integers(3))]
        rows = int(2 ** rng.uniform(0, 16))
        run_checked(c, collective, "int32", rows, algorithm="hierarchical", seed=i % 7, times=1)
