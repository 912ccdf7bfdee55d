"""Calls that do not match, ranks that do not come, and what is left afterwards: errors.CASES rows 14 and 15."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pyreduce as pr
from pyreduce.algorithms.naive import naive
from pyreduce.algorithms.ring import ring
from pyreduce.calls import compare, describe
from pyreduce.errors import name_ranks

ALGORITHMS = ["naive", "ring", "circulant", "mesh", "shared", "hierarchical", "native"]
SMALL, LARGE = 64, 600_000  # elements: messages that go out at once, and messages that wait for their receiver

several = pytest.mark.ranks(2, 3, 4)


def outcome(call: Callable[[], Any]) -> BaseException | None:
    """What a call raises."""
    try:
        call()
    except Exception as error:
        return error
    return None


def check_broken(k: pr.Communicator, first: BaseException) -> None:
    """Every later call raises at once, with the first cause, whatever it is."""
    for call in (k.allreduce, k.reduce_scatter, k.allgather):
        with pytest.raises(pr.BrokenCommunicatorError) as info:
            call(np.ones(8))
        assert info.value.__cause__ is first
        assert str(first).split("\n")[0] in str(info.value)
    k.close()


@several
@pytest.mark.parametrize("length", [SMALL, LARGE])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("collective", ["allreduce", "reduce_scatter", "allgather"])
def test_a_rank_that_never_calls_is_named(comm, collective, algorithm, length):
    absent = comm.size - 1
    k = pr.Communicator(comm, timeout=0.5)
    x = np.arange(float(length)) + comm.rank
    counts = {"counts": [length] * comm.size} if collective == "allgather" else {}
    if comm.rank != absent:
        error = outcome(lambda: getattr(k, collective)(x, algorithm=algorithm, **counts))
        assert isinstance(error, pr.CollectiveTimeout), error
        assert isinstance(error, TimeoutError)
        assert error.missing == (absent,)
        assert f"rank {absent} had not arrived" in str(error)
        assert f"{collective} (call 1, rank {comm.rank} of {comm.size})" in str(error)
        check_broken(k, error)
    comm.Barrier()
    k.close()


@several
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rank_that_comes_too_late_is_told(comm, algorithm):
    late = 0
    k = pr.Communicator(comm, timeout=0.3)
    x = np.arange(float(LARGE))
    if comm.rank == late:
        comm.Barrier()
        time.sleep(0.1)
        error = outcome(lambda: k.allreduce(x, algorithm=algorithm, timeout=20))
        assert isinstance(error, pr.CollectiveTimeout), error
        assert "gave up after 0.3 s" in str(error)
    else:
        error = outcome(lambda: k.allreduce(x, algorithm=algorithm))
        assert isinstance(error, pr.CollectiveTimeout), error
        comm.Barrier()
    check_broken(k, error)
    comm.Barrier()


def odd_call(k: pr.Communicator, kind: str, length: int, odd: bool, algorithm: str) -> Any:
    """An allreduce that differs on the odd rank in one respect."""
    x = np.arange(float(length))
    match kind if odd else "even":
        case "op":
            return k.allreduce(x, op=pr.PROD, algorithm=algorithm)
        case "dtype":
            return k.allreduce(x.astype(np.float32), algorithm=algorithm)
        case "rows":
            return k.allreduce(x[:-2], algorithm=algorithm)
        case "shape":
            return k.allreduce(x.reshape(2, -1), algorithm=algorithm)
        case "algorithm":
            return k.allreduce(x, algorithm="naive" if algorithm != "naive" else "ring")
        case "collective":
            return k.reduce_scatter(x, algorithm=algorithm)
        case "extra call":
            k.allgather(x, counts=[length] * k.size, algorithm=algorithm)
            return k.allreduce(x, algorithm=algorithm)
        case _:
            return k.allreduce(x, algorithm=algorithm)


EXPECTED = {
    "op": ("op: ", "PROD", "SUM"),
    "dtype": ("dtype: ", "float32", "float64"),
    "rows": ("shape: ", "({short},)", "({length},)"),
    "shape": ("shape: ", "(2, {half})", "({length},)"),
    "algorithm": ("algorithm: ", "", ""),
    "collective": ("collective: ", "reduce_scatter", "allreduce"),
    "extra call": ("collective: ", "allgather", "allreduce"),
}


@several
@pytest.mark.parametrize("length", [SMALL, LARGE])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", EXPECTED)
def test_disagreement_is_a_mismatch_on_every_rank_with_both_sides(comm, kind, algorithm, length):
    odd = comm.size // 2
    with_check = pr.Communicator(comm, timeout=20)
    error = outcome(lambda: odd_call(with_check, kind, length, comm.rank == odd, algorithm))
    assert isinstance(error, pr.MismatchError), error
    others = [rank for rank in range(comm.size) if rank != odd]
    assert [odd] in error.groups.values()
    assert others in error.groups.values()
    fact, one, other = (text.format(length=length, short=length - 2, half=length // 2) for text in EXPECTED[kind])
    line = next(line for line in str(error).splitlines() if line.strip().startswith(fact))
    assert f"{one} on rank {odd}" in line
    assert f"{other} on {name_ranks(others)}" in line
    assert f"rank {odd} called" in str(error)
    assert f"{name_ranks(others)} called" in str(error)
    check_broken(with_check, error)


@several
@pytest.mark.parametrize(
    "setting", [{"segment_bytes": 256}, {"in_flight": 1}, {"message_bytes": 999}, {"check": "off"}]
)
def test_settings_that_differ_are_a_mismatch(comm, setting):
    k = pr.Communicator(comm, timeout=20, **(setting if comm.rank == 0 else {}))
    error = outcome(lambda: k.allreduce(np.arange(1000.0), algorithm="ring"))
    assert isinstance(error, pr.MismatchError), error
    assert f"{next(iter(setting))}: {next(iter(setting.values()))} on rank 0" in str(error)
    check_broken(k, error)


@several
def test_explicit_counts_that_differ_are_a_mismatch(comm):
    k = pr.Communicator(comm, timeout=20)
    counts = [2] * comm.size
    if comm.rank == 0:
        counts = [1, 3, *counts[2:]]
    error = outcome(lambda: k.reduce_scatter(np.arange(2.0 * comm.size), counts=counts))
    assert isinstance(error, pr.MismatchError), error
    assert "counts: (1, 3" in str(error)
    check_broken(k, error)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("algorithm", ["naive", "ring", "mesh", "shared", "native", None])
@pytest.mark.parametrize("lengths", [(409600, 409598), (1, 2)])
def test_case_14_lengths_differ(comm, algorithm, lengths):
    k = pr.Communicator(comm, timeout=20)
    x = np.arange(lengths[0] if comm.rank == 0 else lengths[1], dtype=np.float32)
    error = outcome(lambda: k.allreduce(x, algorithm=algorithm))
    assert isinstance(error, pr.MismatchError), error
    assert [0] in error.groups.values()
    assert f"({lengths[0]},) on rank 0" in str(error)
    assert f"({lengths[1]},) on ranks 1-3" in str(error)
    check_broken(k, error)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("algorithm", ["naive", "ring", "mesh", "shared", "native", None])
def test_case_15_the_next_call_names_the_first(comm, algorithm):
    k = pr.Communicator(comm, timeout=20)
    if comm.rank == 0:
        error = outcome(lambda: k.allgather(np.ones((3, 4)), counts=[3, 3, 3], algorithm=algorithm))
    else:
        error = outcome(lambda: k.allgather(np.ones(1), counts=[1, 1, 1], algorithm=algorithm))
    assert isinstance(error, pr.MismatchError), error
    assert "counts: (3, 3, 3) on rank 0, (1, 1, 1) on ranks 1 and 2" in str(error)
    check_broken(k, error)


@several
def test_rows_that_are_agreed_on_must_have_one_shape_and_dtype(comm):
    k = pr.Communicator(comm, timeout=20)
    x = np.ones((2, 3)) if comm.rank else np.ones((2, 4))
    error = outcome(lambda: k.allgather(x))
    assert isinstance(error, pr.MismatchError), error
    assert "row shape: (4,) on rank 0" in str(error)
    k.close()


@several
def test_full_check_names_call_sites(comm):
    k = pr.Communicator(comm, timeout=20, check="full")
    x = np.arange(8.0)
    for _ in range(3):
        np.testing.assert_array_equal(k.allreduce(x), x * comm.size)
    first, others = (lambda: k.allreduce(x, op=pr.MAX)), (lambda: k.allreduce(x, op=pr.MIN))
    error = outcome(first if comm.rank == 0 else others)
    assert isinstance(error, pr.MismatchError), error
    assert str(error).count("test_peers.py:") == comm.size
    check_broken(k, error)


@several
def test_full_check_tells_of_different_call_sites_once(comm, caplog):
    with pr.Communicator(comm, timeout=20, check="full") as k, caplog.at_level(logging.WARNING, "pyreduce"):
        for _ in range(3):
            if comm.rank == 0:
                k.allreduce(np.ones(3))
            else:
                k.allreduce(np.ones(3))
    told = [record for record in caplog.records if "different places" in record.getMessage()]
    assert len(told) == 1
    assert told[0].getMessage().count("test_peers.py:") == 2


@several
def test_without_check_all_is_well_if_the_calls_match(comm):
    with pr.Communicator(comm, timeout=20, check="off") as k:
        for algorithm in ALGORITHMS:
            x = np.arange(9.0) + comm.rank
            total = sum(np.arange(9.0) + rank for rank in range(comm.size))
            np.testing.assert_array_equal(k.allreduce(x, algorithm=algorithm), total)


@several
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_long_wait_without_timeout_names_who_is_missing_and_goes_on(comm, caplog, algorithm, monkeypatch):
    monkeypatch.delenv("PYREDUCE_TIMEOUT", raising=False)
    absent = comm.size - 1
    with pr.Communicator(comm, warn_seconds=0.3) as k, caplog.at_level(logging.WARNING, "pyreduce"):
        comm.Barrier()
        if comm.rank == absent:
            time.sleep(1.2)
        out = k.allreduce(np.ones(SMALL), algorithm=algorithm)
    assert (out == comm.size).all()
    told = [record.getMessage() for record in caplog.records if "has waited" in record.getMessage()]
    if comm.rank != absent:
        assert len(told) == 1, told
        assert str(absent) in told[0].split(": ")[-1], told  # on a busy machine perhaps others besides
        assert "not arrived" in told[0], told


class Torn(Exception):
    """Stands for an interrupt that comes in the middle of a call."""


@several
def test_peers_hear_of_a_rank_that_is_torn_out_of_a_call(comm):
    def tear(signum: int, frame: Any) -> None:
        raise Torn("by a signal")

    absent, torn = comm.size - 1, 0
    k = pr.Communicator(comm, timeout=20)
    if comm.rank == torn:
        before = signal.signal(signal.SIGUSR1, tear)
        timer = signal.getsignal(signal.SIGALRM)
        threading.Timer(0.3, lambda: signal.raise_signal(signal.SIGUSR1)).start()
        with pytest.raises(Torn) as info:
            k.allreduce(np.ones(SMALL), algorithm="ring")
        signal.signal(signal.SIGUSR1, before)
        assert signal.getsignal(signal.SIGALRM) is timer
        check_broken(k, info.value)
    elif comm.rank != absent:
        error = outcome(lambda: k.allreduce(np.ones(SMALL), algorithm="ring"))
        assert isinstance(error, pr.BrokenCommunicatorError), error
        assert "rank 0 left call 1 by Torn: by a signal" in str(error)
    comm.Barrier()
    if comm.rank == absent and absent != torn:
        error = outcome(lambda: k.allreduce(np.ones(SMALL), algorithm="ring"))
        assert isinstance(error, pr.BrokenCommunicatorError), error
    comm.Barrier()
    k.close()


@several
def test_other_communicators_are_not_touched_by_a_broken_one(comm):
    good, bad = pr.Communicator(comm, timeout=20), pr.Communicator(comm, timeout=20)
    error = outcome(lambda: bad.allreduce(np.ones(3 if comm.rank else 4)))
    assert isinstance(error, pr.MismatchError)
    for _ in range(20):
        assert (good.allreduce(np.full(LARGE, 2.0)) == 2 * comm.size).all()
    good.close()
    bad.close()


@several
def test_an_exception_that_leaves_the_block_is_told(comm):
    error = None
    try:
        with pr.Communicator(comm, timeout=20) as k:
            k.allreduce(np.ones(3))
            if comm.rank == 0:
                raise Torn("between two calls")
            k.allreduce(np.ones(3))
    except (Torn, pr.BrokenCommunicatorError) as caught:
        error = caught
    if comm.rank == 0:
        assert isinstance(error, Torn), error
    else:
        assert isinstance(error, pr.BrokenCommunicatorError), error
        assert "rank 0 gave up before call 2: Torn: between two calls" in str(error)


@several
def test_an_algorithm_that_differs_between_ranks_is_a_mismatch(comm):
    def shifted(by: int) -> Any:
        def rounds(collective: str, nranks: int, rank: int) -> Any:
            if collective != "reduce_scatter":
                raise pr.Unsupported("reduce_scatter only")
            yield from ring(collective, nranks, rank)
            yield from [()] * by

        return rounds

    pr.register_algorithm("differs", shifted(1 if comm.rank == 0 else 2), replace=True)
    k = pr.Communicator(comm, timeout=20)
    error = outcome(lambda: k.reduce_scatter(np.ones(8), algorithm="differs"))
    assert isinstance(error, pr.MismatchError), error
    assert "program: " in str(error)
    k.close()


@several
def test_an_algorithm_that_is_replaced_runs_from_then_on(comm):
    x = np.arange(8.0) + comm.rank
    with pr.Communicator(comm, timeout=20) as k:
        for rounds in (ring, naive):
            pr.register_algorithm("replaced", rounds, replace=True)
            k.allreduce(x, np.empty(8), algorithm="replaced")
            k.allreduce(x, np.empty(8), algorithm="replaced")
        (stats,) = k.stats.values()
    assert stats.rounds == 2 * 2 * (comm.size - 1) + 2 * 1


@several
def test_two_threads_in_one_communicator_are_refused(comm):
    with pr.Communicator(comm, timeout=20) as k:
        taken, free = threading.Event(), threading.Event()

        def take() -> None:
            with k._pending.lock:
                taken.set()
                free.wait(20)

        other = threading.Thread(target=take)
        other.start()
        taken.wait(20)
        with pytest.raises(RuntimeError, match="another thread is in a call"):
            k.allreduce(np.ones(3))
        free.set()
        other.join()
        assert (k.allreduce(np.ones(3)) == comm.size).all()


@several
def test_making_a_communicator_has_a_deadline(comm):
    theirs = comm.Dup()  # not to be used afterwards: one rank has not come
    if comm.rank > 0:
        error = outcome(lambda: pr.Communicator(theirs, timeout=0.2))
        assert isinstance(error, pr.CollectiveTimeout), error
        assert "not all ranks had come to make it" in str(error)
    comm.Barrier()


@several
def test_the_first_call_of_a_function_has_its_timeout_for_making_too(comm):
    theirs = comm.Dup()
    if comm.rank > 0:
        error = outcome(lambda: pr.allreduce(np.ones(3), comm=theirs, timeout=0.2))
        assert isinstance(error, pr.CollectiveTimeout), error
    comm.Barrier()


@several
def test_the_timeout_of_the_first_call_does_not_stay(comm):
    theirs = comm.Dup()
    pr.allreduce(np.ones(3), comm=theirs, timeout=0.2)
    if comm.rank == 0:
        time.sleep(0.6)
    assert (pr.allreduce(np.ones(3), comm=theirs) == comm.size).all()
    theirs.Free()


def test_timeout_zero_is_not_for_ever(world):
    with pr.Communicator(world, timeout=20) as k:
        if world.rank == 0 and world.size > 1:
            assert isinstance(outcome(lambda: k.allreduce(np.ones(3), timeout=0)), pr.CollectiveTimeout | None)
        world.Barrier()


def test_ranks_in_words():
    assert name_ranks([]) == "no rank"
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([2, 0]) == "ranks 0 and 2"
    assert name_ranks([5, 0, 1, 2, 3, 4, 9]) == "ranks 0-5 and 9"
    assert name_ranks([0, 1, 3]) == "ranks 0, 1 and 3"


def test_fingerprints_that_agree_are_no_mismatch():
    same = (("collective", "allreduce"), ("algorithm", "ring"), ("op", "SUM"))
    assert compare({0: same, 1: same}) is None
    other = (("collective", "allreduce"), ("algorithm", "ring"), ("op", "MAX"))
    text, groups = compare({0: same, 1: other, 2: same}, silent=[3])
    assert "op: MAX on rank 1, SUM on ranks 0 and 2" in text
    assert groups == {describe(other): [1], describe(same): [0, 2], "no answer": [3]}
    assert "rank 3 gave no answer" in text
