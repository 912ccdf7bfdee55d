"""Nonblocking and persistent calls, the queue they stand in, and the thread that advances it; CASES rows 7, 16, 17."""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers import (
    ALGORITHMS,
    COLLECTIVES,
    MODES,
    REDUCTIONS,
    Guarded,
    as_dtype,
    assert_same,
    assert_same_everywhere,
    everybody,
    offsets,
    partition,
    run_checked,
    serves,
)
from test_leaks import ALLOWED, grow
from test_peers import check_broken, outcome

import pyreduce as pr
from pyreduce.programs import Copy, Recv, Send, place_input, place_output

MakeCommunicator = Callable[..., pr.Communicator]
several = pytest.mark.ranks(2, 3, 4)
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
LARGE = 600_000  # elements: messages that wait for their receiver, and many pieces of the shared-memory engine
LOOKS_SECONDS = 40  # a loop of `test` that ends later is taken for one that does not end


def each(name: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test once for each value, all on the same communicators: making those takes longer than most tests."""
    chosen = list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            for value in chosen:
                print(f"{name}: {value}")  # is shown if it fails
                test(**fixtures, **{name: value})

        signature = inspect.signature(test)
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[parameter for parameter in signature.parameters.values() if parameter.name != name]
        )
        return run

    return decorate


each_algorithm, each_collective = each("algorithm", ALGORITHMS), each("collective", COLLECTIVES)


# ------------------------------------------------------------------------------------------------ ways to make a call


def settle(request: Any) -> np.ndarray:
    """`test` until it is complete, then `wait`."""
    end = time.monotonic() + LOOKS_SECONDS
    while not request.test():
        assert time.monotonic() < end, "test() never says that the call is complete"
    return request.wait()


class By:
    """The blocking calls' face for another way to make them, so that `run_checked` checks that way."""

    def __init__(self, k: pr.Communicator, way: str) -> None:
        self.k, self.way, self.size, self.rank = k, way, k.size, k.rank
        self._plans, self._comm = k._plans, k._comm

    def __getattr__(self, collective: str) -> Callable[..., np.ndarray]:
        return lambda *buffers, **options: self._run(collective, *buffers, **options)

    def _run(self, collective: str, *buffers: Any, **options: Any) -> np.ndarray:
        if self.way in ("wait", "test"):
            request = getattr(self.k, f"i{collective}")(*buffers, **options)
            got = request.wait() if self.way == "wait" else settle(request)
            assert request.test()
            assert request.wait() is got
            return got
        with getattr(self.k, f"{collective}_init")(*buffers, **options) as request:
            if self.way == "call":
                return request()
            request.start()
            return request.wait() if self.way == "start and wait" else settle(request)


WAYS = ["wait", "test", "start and wait", "start and test", "call"]


def case_input(rank: int, n: int, dtype: Any = np.float64) -> np.ndarray:
    return (1000 * rank + np.arange(n)).astype(dtype)


def case_result(collective: str, nranks: int, rank: int, n: int, dtype: Any = np.float64, scale: int = 1) -> np.ndarray:
    """What a collective over everybody's `case_input` yields; whole numbers, so whatever the fold order."""
    inputs = [case_input(r, n, dtype) * np.dtype(dtype).type(scale) for r in range(nranks)]
    if collective == "allgather":
        return np.concatenate(inputs)
    total = np.sum(inputs, axis=0, dtype=dtype)
    return total if collective == "allreduce" else np.array_split(total, nranks)[rank]


def case_options(collective: str, nranks: int, n: int) -> dict[str, Any]:
    return {"counts": [n] * nranks} if collective == "allgather" else {}


def begin(k: pr.Communicator, collective: str, *buffers: Any, **options: Any) -> pr.Request:
    return getattr(k, f"i{collective}")(*buffers, **options)


def init(k: pr.Communicator, collective: str, *buffers: Any, **options: Any) -> pr.PersistentRequest:
    return getattr(k, f"{collective}_init")(*buffers, **options)


def poisoned(shape: Any, dtype: Any = np.float64) -> np.ndarray:
    return Guarded(np.empty(shape).shape, dtype).view


def count_alive(*names: str) -> int:
    """Objects of classes with these names."""
    gc.collect()
    return sum(type(thing).__name__ in names for thing in gc.get_objects())


class Work:
    """Some calls of all kinds, the same on all ranks: started, and checked when they are waited for."""

    def __init__(self, k: pr.Communicator, number: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.k = k
        self.kinds: list[tuple[Any, ...]] = []
        for i in range(number):
            collective = COLLECTIVES[(i + seed) % 3]
            algorithm = ALGORITHMS[int(rng.integers(len(ALGORITHMS)))]
            dtype = (np.float64, np.int32, np.float32, np.int64)[int(rng.integers(4))]
            self.kinds.append((collective, algorithm, dtype, int(rng.integers(0, 90)), int(rng.integers(1, 5))))
        self.requests: list[pr.Request] = []

    def start(self, i: int) -> None:
        collective, algorithm, dtype, n, scale = self.kinds[i]
        k = self.k
        x = case_input(k.rank, n, dtype) * dtype(scale)
        rows = {"allreduce": n, "allgather": n * k.size, "reduce_scatter": partition(n, k.size)[k.rank]}[collective]
        out = poisoned(rows, dtype) if scale % 2 else None
        self.requests.append(begin(k, collective, x, out, algorithm=algorithm, **case_options(collective, k.size, n)))

    def start_all(self) -> None:
        for i in range(len(self.kinds)):
            self.start(i)

    def check(self, i: int) -> None:
        collective, _, dtype, n, scale = self.kinds[i]
        want = case_result(collective, self.k.size, self.k.rank, n, dtype, scale)
        assert_same(self.requests[i].wait(), want)


# ------------------------------------------------------------------------------------------------ results


@every_algorithm
@pytest.mark.parametrize("way", WAYS)
def test_results_in_every_mode(communicator, way, algorithm):
    by = By(communicator, way)
    for collective, mode in itertools.product(COLLECTIVES, MODES):
        for rows in (0, 2, 37):
            run_checked(by, collective, "float64", rows, algorithm=algorithm, mode=mode, seed=rows)  # type: ignore[arg-type]


@each_algorithm
@pytest.mark.parametrize("way", ["wait", "start and test"])
def test_strided_input_and_output(communicator, way, algorithm):
    by = By(communicator, way)
    for collective in COLLECTIVES:
        for layouts in (("strided", "column"), ("reversed", "contiguous"), ("contiguous", "fortran"), ("swapped",) * 2):
            options = {"algorithm": algorithm, "layouts": layouts, "row_shape": (3, 2)}
            run_checked(by, collective, "float32", 7, **options)  # type: ignore[arg-type]
            if layouts[0] == layouts[1]:
                run_checked(by, collective, "float32", 7, mode="in place", **options)  # type: ignore[arg-type]


@each_algorithm
@pytest.mark.parametrize("way", ["wait", "start and wait"])
def test_explicit_counts(communicator, way, algorithm):
    by, nranks = By(communicator, way), communicator.size
    for counts in ((3, 0, 5, 2), (0, 7, 0, 0), (0, 0, 0, 0), (1, 1, 1, 40)):
        for collective, mode in itertools.product(["reduce_scatter", "allgather"], ["given", "allocated", "in place"]):
            shares = (*counts, *range(nranks - 4))[:nranks]
            run_checked(by, collective, "int64", sum(shares), counts=shares, algorithm=algorithm, mode=mode)  # type: ignore[arg-type]


@each_algorithm
def test_narrow_floats_and_means(communicator, algorithm):
    for way, dtype in itertools.product(["wait", "start and wait"], ["float16", "bfloat16"]):
        for collective, op in itertools.product(REDUCTIONS, ["AVG", "SUM"]):
            if serves(algorithm, op, dtype):
                by = By(communicator, way)
                run_checked(by, collective, dtype, 33, op=op, algorithm=algorithm)  # type: ignore[arg-type]


@each_algorithm
@each_collective
def test_the_same_bits_as_the_blocking_call(communicator, collective, algorithm):
    """Also those of `native`, whose fold order only the MPI knows."""
    x = everybody("float64", (41,), communicator.size)[communicator.rank]
    options = {"algorithm": algorithm, **case_options(collective, communicator.size, 41)}
    want = getattr(communicator, collective)(x, **options)
    assert_same(begin(communicator, collective, x, **options).wait(), want)
    request = init(communicator, collective, x, **options)
    for _ in range(3):
        assert_same(request(), want)
    request.free()


def test_what_goes_in_and_what_comes_out(communicator):
    """Numbers, lists of no rows, lengths to be agreed on: as in blocking calls."""
    k = communicator
    assert k.iallreduce(3.0).wait() == 3.0 * k.size
    assert k.iallreduce(np.empty((0, 3))).wait().shape == (0, 3)
    assert_same(k.iallgather(np.full(k.rank, k.rank)).wait(), np.repeat(np.arange(k.size), np.arange(k.size)))
    request = k.iallreduce(np.ones(3))
    assert isinstance(request, pr.Request)
    assert f"{request!r}".startswith("<pyreduce.Request ")
    assert request.wait(timeout=10).tolist() == [k.size] * 3
    assert "complete" in repr(request)
    out = poisoned(3)
    assert k.iallreduce(np.ones(3), out).wait() is out


# ------------------------------------------------------------------------------------------------ several outstanding


@pytest.mark.ranks(2)
@each_algorithm
@each_collective
def test_case_16_a_blocking_call_between(communicator, collective, algorithm):
    k, n = communicator, 40
    options = {"algorithm": algorithm, **case_options(collective, k.size, n)}
    for other in ALGORITHMS:
        x, y = case_input(k.rank, n), case_input(k.rank, n) * 3
        first = begin(k, collective, x, **options)
        between = getattr(k, collective)(y, **{**options, "algorithm": other})
        assert_same(between, case_result(collective, k.size, k.rank, n, scale=3))
        assert_same(first.wait(), case_result(collective, k.size, k.rank, n))
    for order in (range(4), reversed(range(4))):
        requests = [begin(k, collective, case_input(k.rank, n) * i, **options) for i in range(4)]
        for i in order:
            assert_same(requests[i].wait(), case_result(collective, k.size, k.rank, n, scale=i))


@pytest.mark.parametrize("order", ["first first", "last first", "other on each rank", "tested"])
def test_several_outstanding(communicator, order):
    for seed in range(8):
        work = Work(communicator, 4, seed)
        work.start_all()
        turns = list(range(4))
        if order == "last first":
            turns.reverse()
        elif order == "other on each rank":
            np.random.default_rng((seed, communicator.rank)).shuffle(turns)
        elif order == "tested":
            assert settle(work.requests[2]) is not None
        for i in turns:
            work.check(i)


def test_blocking_calls_between_those_outstanding(communicator):
    k = communicator
    for seed in range(6):
        work = Work(k, 5, seed)
        for i in range(5):
            work.start(i)
            algorithm = ALGORITHMS[(seed + i) % len(ALGORITHMS)]
            if i % 2:
                assert_same(
                    k.allreduce(case_input(k.rank, 9 + i), algorithm=algorithm),
                    case_result("allreduce", k.size, k.rank, 9 + i),
                )
        for i in (3, 0, 4, 1, 2):
            work.check(i)


@pytest.mark.ranks(1, 2, 4)
def test_more_outstanding_than_tags_tell_apart(communicator):
    """Tags hold the number of a call modulo 32."""
    work = Work(communicator, 80)
    work.start_all()
    for i in (79, *range(79)):
        work.check(i)
    same = [communicator.iallreduce(case_input(communicator.rank, 5) * i, algorithm="ring") for i in range(70)]
    for i, request in enumerate(same):
        assert_same(request.wait(), case_result("allreduce", communicator.size, communicator.rank, 5, scale=i))


@several
@each_algorithm
def test_large_ones(make_communicator, comm, algorithm):
    k = make_communicator()
    x, y = case_input(k.rank, LARGE), case_input(k.rank, LARGE) * 2
    requests = [k.iallreduce(x, algorithm=algorithm), k.ireduce_scatter(y, algorithm=algorithm)]
    assert_same(requests[1].wait(), case_result("reduce_scatter", k.size, k.rank, LARGE, scale=2))
    assert_same(requests[0].wait(), case_result("allreduce", k.size, k.rank, LARGE))


@pytest.mark.ranks(4)
def test_case_7_memory_is_flat_over_1000_nonblocking_calls(communicator):
    k = communicator
    counts = (3, 0, 5, 0)
    whole = np.zeros((1, 0, 2))

    def make_calls(number: int) -> None:
        for i in range(number // 4):
            algorithm = ALGORITHMS[i % len(ALGORITHMS)]
            requests = [
                k.iallgather(whole, counts=[1] * 4, algorithm=algorithm),
                k.ireduce_scatter(np.arange(8.0), counts=counts, algorithm=algorithm),
                k.iallgather(np.full(counts[k.rank], k.rank), counts=counts, algorithm=algorithm),
                k.iallreduce(np.arange(40.0), algorithm=algorithm),
            ]
            shapes = [got.shape for got in pr.waitall(requests)]
            assert shapes == [(4, 0, 2), (counts[k.rank],), (8,), (40,)]

    make_calls(40)
    before = count_alive("Operation", "Request", "Staging", "Execution")
    assert grow(make_calls, 1000) < ALLOWED / 4
    assert count_alive("Operation", "Request", "Staging", "Execution") <= before


# ------------------------------------------------------------------------------------------------ lives of buffers


@each_algorithm
@each_collective
def test_a_request_keeps_its_buffers(communicator, comm, collective, algorithm):
    k, n = communicator, 600
    options = {"algorithm": algorithm, **case_options(collective, k.size, n)}
    out = poisoned({"allreduce": n, "allgather": n * k.size}.get(collective, partition(n, k.size)[k.rank]))
    requests = [begin(k, collective, case_input(k.rank, n) * i, out if i == 1 else None, **options) for i in (1, 2, 3)]
    del out
    gc.collect()
    junk = [np.full(n * i, np.nan) for i in (1, 1, 1, 1, k.size, k.size)]
    for i in (3, 1, 2):
        assert_same(requests[i - 1].wait(), case_result(collective, k.size, k.rank, n, scale=i))
    assert all(np.isnan(x).all() for x in junk)


def test_buffers_are_let_go_of_afterwards(communicator):
    x, y = np.ones(10), np.empty(10)
    seen = [weakref.ref(x), weakref.ref(y)]
    request = communicator.iallreduce(x, y)
    persistent = communicator.allreduce_init(x, y)
    request.wait()
    persistent()
    persistent.free()
    del x, y, request, persistent
    gc.collect()
    assert [ref() for ref in seen] == [None, None]


# ------------------------------------------------------------------------------------------------ many at once


def test_waitall(make_communicator, communicator):
    k, other = communicator, make_communicator()
    assert pr.waitall([]) == []
    want = [case_result("allreduce", k.size, k.rank, 30, scale=i) for i in range(6)]
    for timeout in (None, 20):
        requests = [(k, other)[i % 2].iallreduce(case_input(k.rank, 30) * i) for i in range(6)]
        for got, right in zip(pr.waitall(requests[::-1], timeout)[::-1], want, strict=True):
            assert_same(got, right)
    persistent = k.allreduce_init(case_input(k.rank, 30))
    persistent.start()
    mixed = [persistent, other.iallreduce(case_input(k.rank, 30))]
    assert all(got.tolist() == want[1].tolist() for got in pr.waitall(mixed))
    request = k.iallreduce(case_input(k.rank, 30))
    assert_same(pr.Request.waitall([request, request])[1], want[1])
    for bad, kind in (("soon", ValueError), (-1, ValueError), (object(), TypeError)):
        with pytest.raises(kind, match="timeout"):
            pr.waitall([request], bad)


@pytest.mark.ranks(3, 4)
@every_algorithm
@pytest.mark.parametrize("progress", [None, "thread"])
def test_two_communicators_waited_for_crosswise(make_communicator, comm, algorithm, progress):
    """Messages that wait for their receiver, so that who waits in one must push the other."""
    one, two = make_communicator(progress=progress), make_communicator(progress=progress)
    x = case_input(comm.rank, LARGE // 4)
    for turn in range(3):
        requests = [one.iallreduce(x, algorithm=algorithm), two.ireduce_scatter(x, algorithm=algorithm)]
        if comm.rank == turn % comm.size:
            requests.reverse()
        for request in requests:
            request.wait()
        if comm.rank == turn % comm.size:
            requests.reverse()
        assert_same(requests[0].wait(), case_result("allreduce", comm.size, comm.rank, len(x)))
        assert_same(requests[1].wait(), case_result("reduce_scatter", comm.size, comm.rank, len(x)))


@several
@each_algorithm
def test_a_blocking_call_in_one_while_another_is_outstanding(make_communicator, comm, algorithm):
    """Rank 0 waits in a blocking call of one communicator for peers that first wait in the other."""
    one, two = make_communicator(), make_communicator()
    x = case_input(comm.rank, LARGE // 4)
    for k in (one, two):
        k.allreduce(x[:9], algorithm=algorithm)
    request = one.iallreduce(x, algorithm=algorithm)
    if comm.rank:
        request.wait()
    assert_same(two.allreduce(x), case_result("allreduce", comm.size, comm.rank, len(x)))
    assert_same(request.wait(), case_result("allreduce", comm.size, comm.rank, len(x)))


# ------------------------------------------------------------------------------------------------ dropped and closed


@each_algorithm
def test_a_dropped_request_warns_and_completes_later(communicator, algorithm):
    k = communicator
    out = np.full(20, np.nan)
    request = k.iallreduce(case_input(k.rank, 20), out, algorithm=algorithm)
    held = [request]
    del request
    with pytest.warns(ResourceWarning, match=r"a request of allreduce \(call \d+\) was dropped"):
        held.clear()
    gc.collect()
    k.iallreduce(np.ones(1), algorithm=algorithm).wait()
    assert_same(out, case_result("allreduce", k.size, k.rank, 20))


def test_a_request_waited_for_does_not_warn(communicator):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        for finish in (pr.Request.wait, settle):
            request = communicator.iallreduce(np.ones(3))
            finish(request)
            del request
            gc.collect()


@each_algorithm
@each_collective
def test_close_completes_what_is_outstanding(comm, collective, algorithm):
    for progress in (None, "thread"):
        k = pr.Communicator(comm, progress=progress)
        options = {"algorithm": algorithm, **case_options(collective, k.size, 50)}
        requests = [begin(k, collective, case_input(k.rank, 50) * i, **options) for i in range(4)]
        k.close()
        for i, request in enumerate(requests):
            assert_same(request.wait(), case_result(collective, k.size, k.rank, 50, scale=i))
            assert request.test()


def test_a_closed_communicator_starts_nothing(comm):
    k = pr.Communicator(comm)
    request = k.allreduce_init(np.ones(3))
    request()
    k.close()
    for collective in COLLECTIVES:
        for starting in (begin, init):
            with pytest.raises(ValueError, match="closed"):
                starting(k, collective, np.ones(3))
    with pytest.raises(ValueError, match="closed"):
        request.start()
    request.free()
    k.close()


# ------------------------------------------------------------------------------------------------ errors


def test_wrong_arguments_start_nothing(communicator):
    k = communicator
    before = k.next_call()
    x = np.ones(4)
    read_only = np.ones(4)
    read_only.flags.writeable = False
    wrong: list[tuple[type[Exception], Callable[[], Any]]] = []
    for collective in COLLECTIVES:
        for starting in (begin, init):
            options = case_options(collective, k.size, 4)
            wrong += [
                (TypeError, lambda s=starting, c=collective: s(k, c, np.array([object()] * 4))),
                (TypeError, lambda s=starting, c=collective, o=options: s(k, c, x, np.empty(4, np.int8), **o)),
                (ValueError, lambda s=starting, c=collective, o=options: s(k, c, x, algorithm=3, **o)),
                (ValueError, lambda s=starting, c=collective, o=options: s(k, c, x, np.empty((7, 3)), **o)),
                (ValueError, lambda s=starting, c=collective, o=options: s(k, c, x, read_only, **o)),
                (ValueError, lambda s=starting, c=collective, o=options: s(k, c, x, algorithm="none such", **o)),
                (ValueError, lambda s=starting, c=collective: s(k, c, pr.IN_PLACE)),
            ]
            if collective != "allgather":
                wrong.append((ValueError, lambda s=starting, c=collective: s(k, c, x, op="none such")))
            if collective != "allreduce":
                wrong.append((ValueError, lambda s=starting, c=collective: s(k, c, x, counts=[1] * (k.size + 1))))
    for i, (kind, call) in enumerate(wrong):
        error = outcome(call)
        assert type(error) is kind, (i, error)
        assert f"rank {k.rank} of {k.size}" in str(error)
    assert k.next_call() in (before, before + 1)
    assert (k.allreduce(x) == k.size).all()


@pytest.mark.parametrize("way", ["nonblocking", "persistent"])
def test_wrong_timeouts(communicator, way):
    k = communicator
    request = k.iallreduce(np.ones(3)) if way == "nonblocking" else k.allreduce_init(np.ones(3))
    if way == "persistent":
        request.start()
    for bad, kind in (("soon", ValueError), (-1, ValueError), (float("nan"), ValueError), ([], TypeError)):
        error = outcome(lambda bad=bad: request.wait(bad))
        assert error is None or type(error) is kind, error  # None: it was complete, and no timeout looked at
        if error is None:
            break
    else:
        assert (request.wait(20) == k.size).all()
    assert (k.allreduce(np.ones(3)) == k.size).all()


def odd_start(k: pr.Communicator, kind: str, odd: bool, x: np.ndarray, algorithm: str | None, way: str) -> Any:
    """Start an allreduce that differs on the odd rank in one respect."""
    start = begin if way == "nonblocking" else init
    match kind if odd else "even":
        case "op":
            request = start(k, "allreduce", x, op=pr.PROD, algorithm=algorithm)
        case "collective":
            request = start(k, "reduce_scatter", x, algorithm=algorithm)
        case _:
            request = start(k, "allreduce", x, algorithm=algorithm)
    if way == "persistent":
        request.start()
    return request


def warm_up(k: pr.Communicator, x: np.ndarray, algorithm: str | None) -> None:
    """Have everything there that starting waits for all ranks to make: mismatches would be found there."""
    k.allreduce(x, algorithm=algorithm)
    k.allreduce(x, op=pr.PROD, algorithm=algorithm)
    k.reduce_scatter(x, algorithm=algorithm)


def check_mismatch(k: pr.Communicator, error: BaseException | None, odd: int, kind: str) -> None:
    assert isinstance(error, pr.MismatchError), error
    others = [rank for rank in range(k.size) if rank != odd]
    assert sorted(error.groups.values()) == sorted([[odd], others])
    line = next(line for line in str(error).splitlines() if line.strip().startswith(f"{kind}: "))
    one, other = {"op": ("PROD", "SUM"), "collective": ("reduce_scatter", "allreduce")}[kind]
    assert f"{one} on rank {odd}" in line
    assert f"{other} on rank" in line


@pytest.mark.ranks(3, 4)
@every_algorithm
@pytest.mark.parametrize("way", ["nonblocking", "persistent"])
@pytest.mark.parametrize("kind", ["op", "collective"])
def test_a_mismatch_is_raised_everywhere_by_wait(comm, kind, way, algorithm):
    odd = comm.size // 2
    k = pr.Communicator(comm, timeout=20)
    x = np.arange(64.0)
    warm_up(k, x, algorithm)
    request = odd_start(k, kind, comm.rank == odd, x, algorithm, way)
    later = k.iallreduce(np.ones(5), algorithm=algorithm)
    comm.Barrier()  # nobody has given up before all have started
    error = outcome(request.wait)
    check_mismatch(k, error, odd, kind)
    assert isinstance(outcome(later.wait), pr.MismatchError | pr.BrokenCommunicatorError)
    assert isinstance(outcome(later.test), pr.MismatchError | pr.BrokenCommunicatorError)
    for collective, starting in itertools.product(COLLECTIVES, (begin, init)):
        again = outcome(lambda c=collective, s=starting: s(k, c, np.ones(4)))
        assert isinstance(again, pr.BrokenCommunicatorError), again
    if way == "persistent":
        assert isinstance(outcome(request.start), pr.BrokenCommunicatorError)
        request.free()
    check_broken(k, error)


@pytest.mark.ranks(3)
@every_algorithm
@pytest.mark.parametrize("way", ["nonblocking", "persistent"])
def test_loops_of_test_notice_a_mismatch(comm, way, algorithm):
    odd = 0
    k = pr.Communicator(comm, timeout=20)
    x = np.arange(64.0)
    warm_up(k, x, algorithm)
    request = odd_start(k, "collective", comm.rank == odd, x, algorithm, way)
    comm.Barrier()
    error = outcome(lambda: settle(request))
    check_mismatch(k, error, odd, "collective")
    check_broken(k, error)


@several
def test_a_later_request_tells_of_an_earlier_mismatch(comm):
    k = pr.Communicator(comm, timeout=20)
    warm_up(k, np.ones(8), "ring")
    first = odd_start(k, "op", comm.rank == 0, np.ones(8), "ring", "nonblocking")
    second = k.iallreduce(np.ones(5), algorithm="ring")
    comm.Barrier()
    error = outcome(second.wait)
    check_mismatch(k, error, 0, "op")
    assert outcome(first.wait) is error
    check_broken(k, error)


@pytest.mark.ranks(3)
@every_algorithm
@pytest.mark.parametrize("way", ["nonblocking", "persistent"])
def test_a_peer_that_never_starts_is_named(comm, way, algorithm):
    absent = 1
    collective = COLLECTIVES[ALGORITHMS.index(algorithm) % 3]
    k = pr.Communicator(comm, timeout=20)
    options = {"algorithm": algorithm, **case_options(collective, k.size, 64)}
    x = np.arange(64.0)
    persistent = init(k, collective, x, **options)
    persistent()
    if comm.rank != absent:
        if way == "persistent":
            persistent.start()
        request: Any = persistent if way == "persistent" else begin(k, collective, x, **options)
        error = outcome(lambda: request.wait(timeout=0.5))
        assert isinstance(error, pr.CollectiveTimeout), error
        assert error.missing == (absent,)
        assert f"rank {absent} had not arrived" in str(error)
        if way == "nonblocking":
            assert outcome(lambda: request.wait(timeout=0.5)) is error
            assert outcome(request.test) is error
        assert isinstance(outcome(persistent.start), pr.BrokenCommunicatorError)
        check_broken(k, error)
    persistent.free()
    comm.Barrier()
    k.close()


@pytest.mark.ranks(3)
def test_close_gives_up_on_a_peer_that_never_starts(comm):
    absent = comm.size - 1
    k = pr.Communicator(comm, timeout=0.5)
    k.allreduce(np.ones(4), algorithm="ring", timeout=20)
    if comm.rank != absent:
        request = k.iallreduce(np.ones(4), algorithm="ring")
        error = outcome(k.close)
        assert isinstance(error, pr.CollectiveTimeout), error
        assert outcome(request.wait) is error
    comm.Barrier()
    k.close()


# ------------------------------------------------------------------------------------------------ persistent calls


@each_algorithm
@each_collective
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_case_17_three_starts(communicator, collective, algorithm, layout):
    """New input and a poisoned output each time; contents at the start count."""
    k, n = communicator, 13
    rows = {"allreduce": n, "allgather": n * k.size}.get(collective, partition(n, k.size)[k.rank])
    source, target = Guarded((n,), np.float64, layout), Guarded((rows,), np.float64, layout)
    source.fill(np.full(n, np.nan))
    options = {"algorithm": algorithm, **case_options(collective, k.size, n)}
    with init(k, collective, source.view, target.view, **options) as request:
        assert isinstance(request, pr.PersistentRequest)
        for i in range(1, 4):
            source.fill(case_input(k.rank, n) * i)
            target.fill(np.full(rows, np.nan))
            request.start()
            got = request.wait()
            assert got is target.view
            assert_same(got.copy(), case_result(collective, k.size, k.rank, n, scale=i))
            source.check_unchanged()
            target.check_guards()


@each_algorithm
def test_persistent_in_place(communicator, algorithm):
    k, n = communicator, 14
    for layout in ("contiguous", "column"):
        buffer = Guarded((n,), np.float64, layout)
        requests = [init(k, c, pr.IN_PLACE, buffer.view, algorithm=algorithm) for c in COLLECTIVES]
        start, own = offsets(partition(n, k.size))[k.rank], partition(n, k.size)[k.rank]
        for i in range(1, 4):
            for collective, request in zip(COLLECTIVES, requests, strict=True):
                x = case_input(k.rank, n) * i
                buffer.fill(x)
                got = request()
                buffer.check_guards()
                if collective == "allgather":
                    blocks = np.array_split(np.arange(n), k.size)
                    want = np.concatenate([case_input(r, n)[at] * i for r, at in enumerate(blocks)])
                    assert_same(buffer.view.copy(), want)
                    continue
                want = case_result(collective, k.size, k.rank, n, scale=i)
                assert_same(np.ascontiguousarray(got), want)
                assert_same(buffer.view[: len(want)].copy(), want)
                assert_same(buffer.view[len(want) :].copy(), x[len(want) :])
        for request in requests:
            request.free()
        assert start + own <= n


@each_algorithm
def test_persistent_means_of_narrow_floats(communicator, algorithm):
    k = communicator
    for dtype in ("float16", "bfloat16"):
        x, out = np.empty(9, as_dtype(dtype)), np.empty(9, as_dtype(dtype))
        with k.allreduce_init(x, out, op=pr.AVG, algorithm=algorithm) as request:
            for i in range(3):
                x[...] = np.arange(9) * (k.rank + 1 + i)
                mean = (np.arange(9) * (k.size + 1) / 2 + np.arange(9) * i).astype(as_dtype(dtype))
                if k.size in (1, 2, 4):  # thirds are rounded
                    assert_same(request(), mean)
                assert_same(request().copy(), k.allreduce(x, op=pr.AVG, algorithm=algorithm))


@each_algorithm
def test_persistent_of_many_segments(communicator, algorithm):
    """Eight elements a segment: more segments than lanes, all of whose messages are kept."""
    k, n = communicator, 500
    x, out = np.empty(n), np.empty(n)
    with k.allreduce_init(x, out, algorithm=algorithm) as request:
        for i in range(4):
            x[...] = case_input(k.rank, n) * i
            out[...] = np.nan
            assert_same(request(), case_result("allreduce", k.size, k.rank, n, scale=i))
            assert_same(k.allreduce(x, algorithm=algorithm), out)


@each_algorithm
def test_persistent_large(make_communicator, algorithm):
    k = make_communicator()
    x, out = np.empty(LARGE // 3), np.empty(LARGE // 3)
    with k.allreduce_init(x, out, algorithm=algorithm) as request:
        for i in range(3):
            x[...] = case_input(k.rank, len(x)) * i
            assert_same(request(), case_result("allreduce", k.size, k.rank, len(x), scale=i))


@each_algorithm
def test_rules_of_persistent_requests(communicator, algorithm):
    k = communicator
    request = k.allreduce_init(np.ones(4), algorithm=algorithm)
    for _ in range(2):
        assert request.test()
        with pytest.raises(ValueError, match="has not been started"):
            request.wait()
        request.start()
        with pytest.raises(ValueError, match="has not been waited for"):
            request.start()
        with pytest.raises(ValueError, match="has not been waited for"):
            request()
        assert "under way" in repr(request)
        assert (settle(request) == k.size).all()
        assert "inactive" in repr(request)
        with pytest.raises(ValueError, match="has not been started"):
            request.wait()
    request.start()
    request.free()  # waits
    request.free()
    assert "freed" in repr(request)
    for call in (request.start, request):
        with pytest.raises(ValueError, match="has been freed"):
            call()
    with pytest.raises(ValueError, match="has not been started"):
        request.wait()
    assert (k.allreduce(np.ones(4)) == k.size).all()


@each_algorithm
def test_persistent_amid_others(communicator, algorithm):
    """Two of the same shape, the second started before the first is waited for; nonblocking and blocking ones too."""
    k, n = communicator, 21
    x, y = case_input(k.rank, n), case_input(k.rank, n) * 2
    one, two = (k.allreduce_init(v, np.empty(n), algorithm=algorithm) for v in (x, y))
    want = [case_result("allreduce", k.size, k.rank, n, scale=i) for i in range(4)]
    for turn in range(4):
        one.start()
        two.start()
        if turn == 1:
            assert_same(k.allreduce(x, algorithm=algorithm), want[1])
        request = k.iallreduce(case_input(k.rank, n) * 3, algorithm=algorithm) if turn >= 2 else None
        if turn == 3:
            one.test()
            assert_same(k.reduce_scatter(x, algorithm=algorithm), np.array_split(want[1], k.size)[k.rank])
        waits: list[tuple[Any, int]] = [(two, 2), (one, 1)]
        if request is not None:
            waits.insert(turn % 3, (request, 3))
        if turn % 2 and k.rank == 0:
            waits.reverse()
        for waited, scale in waits:
            assert_same(waited.wait(), want[scale])
    one.free()
    assert_same(two(), want[2])
    two.free()


def test_persistent_of_all_algorithms_at_once(communicator):
    k, n = communicator, 25
    kinds = list(itertools.product(COLLECTIVES, ALGORITHMS))
    requests = [init(k, c, case_input(k.rank, n), algorithm=a, **case_options(c, k.size, n)) for c, a in kinds]
    rng = np.random.default_rng(7)
    for _ in range(3):
        order = rng.permutation(len(kinds))
        for i in order:
            requests[i].start()
        for i in np.random.default_rng(k.rank).permutation(order):
            assert_same(requests[i].wait(), case_result(kinds[i][0], k.size, k.rank, n))
    for request in requests:
        request.free()


@pytest.mark.ranks(1, 2)
@every_algorithm
def test_dropped_persistent_requests_leave_nothing(communicator, algorithm):
    """Freed or not."""
    k = communicator

    def make(number: int) -> None:
        for i in range(number):
            request = k.allreduce_init(np.ones(30), algorithm=algorithm)
            assert request()[0] == k.size
            if i % 3 == 0:
                request.free()
            del request
        gc.collect()
        assert (k.allreduce(np.ones(3), algorithm=algorithm) == k.size).all()

    make(3)
    before = count_alive("Plan", "SharedPlan", "NativePlan", "Prequest")
    assert grow(make, 160) < ALLOWED / 4
    assert count_alive("Plan", "SharedPlan", "NativePlan", "Prequest") <= before


@each_algorithm
def test_persistent_calls_are_counted(make_communicator, algorithm):
    k, other = make_communicator(segment_bytes=64), make_communicator(segment_bytes=64)
    with k.allreduce_init(np.ones(40), algorithm=algorithm) as request:
        for _ in range(3):
            request()
            other.allreduce(np.ones(40), algorithm=algorithm)
    (got,), (want,) = k.stats.values(), other.stats.values()
    for name in ("calls", "rounds", "bytes_sent", "bytes_received", "why"):
        assert getattr(got, name) == getattr(want, name), name


# ------------------------------------------------------------------------------------------------ the thread


def progress_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pyreduce-progress"]


@pytest.mark.parametrize("algorithm", ["shared", "ring", "mesh", "native", None])
def test_a_thread_advances_while_the_program_computes(make_communicator, algorithm):
    k = make_communicator(progress="thread")
    a = np.random.default_rng(k.rank).random((60, 60))
    for n in (10, LARGE // 6):
        x = case_input(k.rank, n)
        requests = [k.iallreduce(x * i, algorithm=algorithm) for i in range(3)]
        for _ in range(10):
            a = a @ a
            a /= np.abs(a).max()
        if n == 10:
            assert_same(k.allreduce(x, algorithm=algorithm), case_result("allreduce", k.size, k.rank, n))
        for i in (2, 0, 1):
            assert_same(requests[i].wait(), case_result("allreduce", k.size, k.rank, n, scale=i))


def test_a_thread_completes_calls_alone(make_communicator, comm):
    """Nobody looks but the threads."""
    k = make_communicator(progress="thread")
    requests = [k.iallreduce(case_input(k.rank, 100), algorithm=a) for a in ("ring", "shared", "naive")]
    end = time.monotonic() + LOOKS_SECONDS
    while not all("done" in repr(request) for request in requests):
        assert time.monotonic() < end, requests
        time.sleep(0.001)
    for request in requests:
        assert_same(request.wait(), case_result("allreduce", k.size, k.rank, 100))


@pytest.mark.parametrize("order", ["first first", "last first", "other on each rank"])
def test_several_outstanding_with_a_thread(make_communicator, order):
    k = make_communicator(progress="thread", segment_bytes=64)
    for seed in range(6):
        work = Work(k, 4, seed)
        for i in range(4):
            work.start(i)
            if i == seed % 4:
                k.allreduce(np.ones(3), algorithm=ALGORITHMS[seed])
        turns = list(range(4))
        if order == "last first":
            turns.reverse()
        elif order == "other on each rank":
            np.random.default_rng((seed, k.rank)).shuffle(turns)
        for i in turns:
            work.check(i)


@each_algorithm
def test_persistent_calls_with_a_thread(make_communicator, algorithm):
    k = make_communicator(progress="thread", segment_bytes=64)
    x, out = np.empty(50), np.empty(50)
    with k.allreduce_init(x, out, algorithm=algorithm) as request:
        for i in range(6):
            x[...] = case_input(k.rank, 50) * i
            request.start()
            between = k.iallreduce(x, algorithm=algorithm) if i % 2 else None
            got = request.wait() if i % 3 else settle(request)
            assert_same(got, case_result("allreduce", k.size, k.rank, 50, scale=i))
            if between is not None:
                assert_same(between.wait(), out)


@several
@pytest.mark.parametrize("algorithm", ["ring", "shared"])
def test_what_goes_wrong_in_the_thread_is_raised_by_wait(comm, algorithm):
    k = pr.Communicator(comm, timeout=20, progress="thread")
    warm_up(k, np.ones(8), algorithm)
    before = len(progress_threads())
    comm.Barrier()
    # A rank that starts late may hear of it then.
    error = outcome(lambda: odd_start(k, "collective", comm.rank == 0, np.ones(8), algorithm, "nonblocking").wait())
    check_mismatch(k, error, 0, "collective")
    check_broken(k, error)
    assert len(progress_threads()) == before - 1


def test_close_ends_the_thread(comm):
    before = progress_threads()
    k = pr.Communicator(comm, progress="thread")
    (thread,) = set(progress_threads()) - set(before)
    request = k.iallreduce(np.ones(5))
    k.close()
    assert not thread.is_alive()
    assert (request.wait() == k.size).all()
    assert progress_threads() == before


def test_wrong_values_of_progress(comm):
    for bad in ("threads", "", 1, True):
        with pytest.raises(ValueError, match="progress is"):
            pr.Communicator(comm, progress=bad)


# ------------------------------------------------------------------------------------------------ settings


def test_full_check(make_communicator):
    by = {way: By(make_communicator(check="full", segment_bytes=64), way) for way in ("wait", "start and test")}
    for (way, c), algorithm, collective in itertools.product(by.items(), ALGORITHMS, COLLECTIVES):
        run_checked(c, collective, "float64", 11, algorithm=algorithm)  # type: ignore[arg-type]
        assert way in WAYS
    k = by["wait"].k
    work = Work(k, 6)
    work.start_all()
    for i in (4, 0, 5, 1, 2, 3):
        work.check(i)


@several
def test_full_check_finds_a_mismatch_at_the_start(comm):
    k = pr.Communicator(comm, timeout=20, check="full")
    first = k.iallreduce(np.ones(3))
    error = outcome(lambda: k.iallreduce(np.ones(8), op=pr.MAX if comm.rank == 0 else pr.MIN))
    assert isinstance(error, pr.MismatchError), error
    assert str(error).count("test_requests.py:") == comm.size
    assert (first.wait() == comm.size).all()
    check_broken(k, error)


def test_without_check(make_communicator):
    k = make_communicator(check="off")
    for algorithm in ALGORITHMS:
        with k.allreduce_init(case_input(k.rank, 30), algorithm=algorithm) as persistent:
            requests = [k.iallreduce(case_input(k.rank, 30) * i, algorithm=algorithm) for i in range(3)]
            persistent.start()
            for i in (1, 2, 0):
                assert_same(requests[i].wait(), case_result("allreduce", k.size, k.rank, 30, scale=i))
            assert_same(persistent.wait(), case_result("allreduce", k.size, k.rank, 30))


def test_deterministic(make_communicator, comm):
    k = make_communicator(deterministic=True)
    x = everybody("float32", (97,), k.size)[k.rank]
    want = k.allreduce(x)
    request = k.allreduce_init(x)
    for got in (k.iallreduce(x).wait(), request(), k.iallreduce(x, algorithm="naive").wait()):
        assert_same(got, want)
        assert_same_everywhere(comm, got)
    request.free()
    for starting in (begin, init):
        with pytest.raises(ValueError, match="rank order"):
            starting(k, "allreduce", x, algorithm="ring")


# ------------------------------------------------------------------------------------------------ found by reading


@pytest.mark.ranks(1, 2, 3, 4)
def test_a_persistent_request_outlives_forgotten_plans(communicator, comm, forget_registered_algorithms):
    """It is started the short way, and adopted into the queue, after the communicator has cleared its plans."""
    k = communicator
    x = case_input(k.rank, 30)
    request = k.allreduce_init(x, np.empty(30), algorithm="shared")
    communicator._plans.clear()
    for _ in range(3):
        if k.rank:
            request.start()
        comm.Barrier()
        if not k.rank:
            request.start()
        between = k.iallreduce(x, algorithm="ring")
        assert_same(request.wait(), case_result("allreduce", k.size, k.rank, 30))
        assert_same(between.wait(), case_result("allreduce", k.size, k.rank, 30))


def test_a_persistent_call_outstanding_at_close_has_its_result(comm):
    for algorithm in ("shared", "ring", "naive"):
        k = pr.Communicator(comm)
        request = k.allreduce_init(case_input(k.rank, 30), algorithm=algorithm)
        if k.rank:
            comm.Barrier()
        request.start()
        if not k.rank:  # whose call is surely under way
            comm.Barrier()
        k.close()
        assert_same(request.wait(), case_result("allreduce", k.size, k.rank, 30))


@several
@pytest.mark.parametrize("adopted", [False, True])
@pytest.mark.parametrize("algorithm", ["shared", "ring", "mesh"])
def test_a_persistent_request_dropped_under_way_keeps_its_buffers(make_communicator, comm, algorithm, adopted):
    """The call goes on in them. The arrays are views: their memory stays in any case, or the test may crash."""
    k = make_communicator()
    memory = case_input(k.rank, 3000), np.empty(3000)
    views = [array[:] for array in memory]
    refs = [weakref.ref(view) for view in views]
    requests = [k.allreduce_init(*views, algorithm=algorithm)]
    requests[0]()
    comm.Barrier()
    if k.rank:
        requests[0].start()
        later = k.iallreduce(np.ones(3), algorithm=algorithm) if adopted else None
        views.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            requests.clear()
            gc.collect()
        kept = [ref() is not None for ref in refs]
    comm.Barrier()
    if not k.rank:
        requests[0].start()
        later = k.iallreduce(np.ones(3), algorithm=algorithm) if adopted else None
        kept = [True]
    if later is not None:
        later.wait()
    k.allreduce(np.ones(3), algorithm=algorithm)
    assert_same(memory[1], case_result("allreduce", k.size, k.rank, 3000))
    assert all(kept), "the arrays of a call under way were freed"


def late(collective: str, nranks: int, rank: int) -> Iterator[list[Any]]:
    """An allgather in which rank 0 waits for the last rank's second round, and nobody else does."""
    if collective != "allgather":
        raise pr.Unsupported("allgather only")
    last = nranks - 1
    own = place_input(rank)
    peers = [peer for peer in range(nranks) if peer != rank]
    early = [Send(peer, own) for peer in peers if not (rank == last and peer == 0)]
    recvs = [Recv(peer, place_output(peer)) for peer in peers]
    yield [*early, *recvs, Copy(place_output(rank), own)]
    if rank == last and nranks > 1:
        yield [Send(0, own)]


@pytest.mark.ranks(3, 4)
def test_a_peer_ahead_in_a_persistent_call_is_no_mismatch(communicator, comm, forget_registered_algorithms):
    """Its messages carry the number of the first start: modulo 32 that of the call which rank 0 is still in."""
    pr.register_algorithm("late", late, replace=True)
    k, world = communicator, comm.Dup()
    options = {"counts": [2] * k.size, "algorithm": "late"}
    persistent = k.allreduce_init(np.ones(2), algorithm="naive")
    first = k.next_call()
    persistent()
    while (k.next_call() - first) % 32:
        k.allreduce(np.ones(2), algorithm="naive")
    last = k.size - 1
    if k.rank == last:
        request = k.iallgather(np.full(2, k.rank), **options)
        world.send("go", 1)
        world.recv(source=1)
        time.sleep(0.1)  # rank 0 looks around meanwhile
        got = request.wait()
        persistent.start()
    elif k.rank == 1:
        world.recv(source=last)
        got = k.allgather(np.full(2, k.rank), **options)
        persistent.start()
        world.send("ahead", last)
    else:
        got = k.allgather(np.full(2, k.rank), **options)
        persistent.start()
    assert_same(got, np.repeat(np.arange(k.size), 2))
    assert (persistent.wait() == k.size).all()
    persistent.free()
    world.Free()


@several
def test_threads_with_communicators_of_their_own(make_communicator, comm):
    """While one waits it pushes the other's queue; that is no reason to refuse the other its own communicator."""
    if sys.modules["mpi4py.MPI"].Query_thread() < sys.modules["mpi4py.MPI"].THREAD_MULTIPLE:
        pytest.skip("needs MPI.THREAD_MULTIPLE")
    errors: list[BaseException] = []
    interval = sys.getswitchinterval()
    ks = [make_communicator(timeout=5), make_communicator(timeout=5)]
    for k in ks:
        warm_up(k, np.ones(200), "ring")

    def run(k: pr.Communicator) -> None:
        try:
            for _ in range(100):
                requests = [k.iallreduce(np.ones(200), algorithm="ring") for _ in range(3)]
                for request in requests:
                    assert (request.wait() == k.size).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in ks]
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not errors, errors


@several
@pytest.mark.parametrize("look", ["wait", "test"])
def test_the_thread_finds_a_mismatch_while_the_program_comes_to_look(comm, monkeypatch, look):
    """Between the program's look at the request and its turn at the queue."""
    k = pr.Communicator(comm, timeout=20, progress="thread")
    warm_up(k, np.ones(8), "ring")
    comm.Barrier()
    hold = k._pending.progress.hold

    def hold_late() -> None:
        end = time.monotonic() + LOOKS_SECONDS
        while k._pending.peers.broken is None and time.monotonic() < end:
            time.sleep(0.001)
        hold()

    try:
        request = odd_start(k, "op", comm.rank == 0, np.ones(8), "ring", "nonblocking")
    except pr.MismatchError as error:  # it has come late
        caught: BaseException | None = error
    else:
        monkeypatch.setattr(k._pending.progress, "hold", hold_late)
        caught = outcome(getattr(request, look))
        monkeypatch.undo()
    check_mismatch(k, caught, 0, "op")
    check_broken(k, caught)


@pytest.mark.ranks(1, 2)
def test_a_call_that_finds_another_thread_in_one_leaves_its_marks(
    make_communicator: MakeCommunicator, comm: Any
) -> None:
    c = make_communicator(algorithm="naive", nodes=str(comm.size))
    x, y = np.ones(3), np.empty(3)
    for _ in range(2):
        c.allreduce(x, y)
    taken, told = threading.Event(), threading.Event()

    def hold() -> None:
        with c._pending.lock:
            c._pending.inside = threading.get_ident()
            taken.set()
            told.wait()
            c._pending.inside = 0

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    inside = c._pending.inside
    try:
        with pytest.raises(RuntimeError, match="another thread is in a call"):
            c.allreduce(x, y)
        assert c._pending.inside == inside == holder.ident
    finally:
        told.set()
        holder.join()
    assert (c.allreduce(x, y) == comm.size).all()
