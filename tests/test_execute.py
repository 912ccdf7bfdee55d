"""Plans and tags: what can be checked of the executor without a message."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("mpi4py.MPI")

from mpi4py import MPI

from pyreduce import algorithms, libmpi, ops
from pyreduce._core import ffi, lib
from pyreduce.blocks import partition
from pyreduce.calls import Call
from pyreduce.errors import Unsupported
from pyreduce.execute import NOTICE_TAG, Plan, Tags
from pyreduce.programs import Recv, Send
from pyreduce.settings import read_settings

MEBIBYTE = 1 << 20


def make_plan(name: str, collective: str, counts: tuple[int, ...], rank: int = 0, **given: int) -> Plan:
    program = algorithms.get(name).program(collective, len(counts), rank)
    op = None if collective == "allgather" else ops.SUM
    return Plan(program, Call(collective, name, op, np.dtype(np.float32), counts, (), rank, read_settings(**given)))


@pytest.mark.parametrize("nranks", [2, 3, 4, 64])
def test_a_ring_needs_a_few_segments_of_scratch(nranks):
    plan = make_plan("ring", "reduce_scatter", partition(256 * MEBIBYTE // 4, nranks))
    assert plan.scratch_bytes <= 4 * MEBIBYTE
    assert plan.segments > 1


@pytest.mark.parametrize("nranks", [2, 4, 16])
@pytest.mark.parametrize("collective", ["reduce_scatter", "allreduce"])
def test_an_algorithm_with_many_slots_gets_shorter_segments(nranks, collective):
    plan = make_plan("naive", collective, partition(256 * MEBIBYTE // 4, nranks))
    assert plan.scratch_bytes <= 32 * MEBIBYTE + 64 * plan.lanes


@pytest.mark.parametrize("name", ["naive", "ring"])
def test_scratch_follows_the_blocks_that_a_slot_holds(name):
    even, uneven = (make_plan(name, "allreduce", counts) for counts in ((5, 5, 5), (13, 1, 1)))
    assert even.scratch_bytes <= uneven.scratch_bytes if name == "ring" else even.scratch_bytes == uneven.scratch_bytes


@pytest.mark.parametrize("name", [name for name in algorithms.names() if not algorithms.has_no_program(name)])
def test_ranks_with_different_scratch_cut_the_same_segments(name):
    """Of ours, three ranks tell how much scratch any rank has."""
    for nranks in (*range(1, 18), 24, 33, 48):
        for collective in ("reduce_scatter", "allgather", "allreduce"):
            try:
                programs = algorithms.get(name).programs(collective, nranks)
            except Unsupported:
                continue
            assert algorithms.get(name).scratch(collective, nranks) == max(program.scratch for program in programs)


@pytest.mark.parametrize("largest", [2**15 - 1, 2**20 - 1, 2**29 - 1, 2**31 - 1, 2**62])
def test_tags_fit_and_tell_calls_apart(largest):
    tags = Tags(largest)
    seen = set()
    for digest in (None, 0, 1, 2**32 - 1, 123456789):
        for number in (1, 2, 30, 31, 32, 33):
            tag = tags.tag(digest, number)
            assert NOTICE_TAG < tag <= tag | 7 <= min(largest, 2**31 - 1)
            assert Tags.same_call(tag, tag | 5)
            assert Tags.same_number(tag, tags.neutral(number))
            assert not Tags.same_call(tag, tags.neutral(number))
            assert Tags.same_number(tag, tags.tag(digest, number + 31))
            assert not Tags.same_number(tag, tags.tag(digest, number + 1))
            kept = Tags.without_number(tag)
            assert kept <= kept | 7 <= min(largest, 2**31 - 1)
            assert not any(Tags.same_number(kept, tags.tag(digest, other)) for other in range(40))
            seen.add(tag)
    assert len(seen) == 5 * 4  # numbers are kept modulo 31: 1 and 32, 2 and 33 share theirs


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_both_sides_cut_a_message_alike(data):
    """The n-th message of a sender has the bytes that its receiver expects, however their pieces lie."""
    nranks = data.draw(st.integers(2, 5))
    counts = tuple(data.draw(st.lists(st.integers(0, 40), min_size=nranks, max_size=nranks)))
    given_settings = {
        "segment_bytes": data.draw(st.integers(4, 200)),
        "in_flight": data.draw(st.integers(1, 3)),
        "message_bytes": data.draw(st.integers(1, 300)),
    }
    name = data.draw(st.sampled_from(["naive", "ring"]))
    collective = data.draw(st.sampled_from(["reduce_scatter", "allgather", "allreduce"]))
    plans = [make_plan(name, collective, counts, rank, **given_settings) for rank in range(nranks)]
    assert len({(plan.segments, plan.segment, plan.lanes) for plan in plans}) == 1
    bases = (1 << 20, 2 << 20, 3 << 20)  # far apart: nothing is read there

    def sizes(rank: int, peer: int, kind: type, segment: int) -> list[int]:
        found = []
        for steps, (recvs, sends, _, _) in zip(plans[rank].program.rounds, plans[rank].rounds, strict=True):
            named = [step for step in steps if isinstance(step, kind)]
            for step, (_, where) in zip(named, sends if kind is Send else recvs, strict=True):
                if step.peer == peer:
                    for message in plans[rank].messages(where, bases, segment):
                        found.append(message.nbytes if not isinstance(message, list) else size_of(message))
        return found

    for segment in range(plans[0].segments):
        for rank in range(nranks):
            for peer in set(range(nranks)) - {rank}:
                assert sizes(rank, peer, Send, segment) == sizes(peer, rank, Recv, segment)


def test_what_the_mpi_refuses_is_raised_as_its_exception():
    """A program of the core that sends to a rank which is not there."""
    comm = MPI.COMM_SELF.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    assert libmpi.lend()
    words = ffi.new("int64_t[]", [1, 1, 1, 0, 1, 0, 7, 0, 0])
    run = ffi.gc(lib.pr_run_new(words, 0, 0, 1, 0, 0), lib.pr_run_free)
    with pytest.raises(MPI.Exception) as info:
        libmpi.raise_for(run, lib.pr_run_start(run, MPI._handleof(comm), 1, 0, 0, 0))
    assert info.value.Get_error_class() == MPI.ERR_RANK
    comm.Free()


@pytest.mark.parametrize("name", ["PMPI_Nothing", "MPI_Isend"])
def test_an_mpi_whose_functions_cannot_be_found_is_left_to_python(monkeypatch, name):
    monkeypatch.setattr(libmpi, "FUNCTIONS", (name, *libmpi.FUNCTIONS[1:]))
    libmpi.lend.cache_clear()
    try:
        assert libmpi.lend() is (name == "MPI_Isend")
        assert (make_plan("ring", "allreduce", (3, 3)).short is None) is (name != "MPI_Isend")
    finally:
        monkeypatch.undo()
        libmpi.lend.cache_clear()
        assert libmpi.lend()


def size_of(message: list) -> int:
    nbytes = message[1] * message[2].Get_size()
    if message[1]:
        message[2].Free()
    return nbytes
