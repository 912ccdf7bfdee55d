"""The shared-memory engine in trouble: ranks that give up in the middle of a call, and what their peers then get."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import clean_environment
from test_launch import RANKS, SCRIPT
from test_shared import door_calls

import pyreduce as pr
from pyreduce._core import ffi, lib
from pyreduce.algorithms import shared

MakeCommunicator = Callable[..., pr.Communicator]
several = pytest.mark.ranks(3)
ARENA_BYTES = 1 << 16


def length_in_pieces(collective: str, nranks: int, pieces: int) -> int:
    """Float64 elements of an input that passes through the arena in so many pieces, all of the same length."""
    slot = (ARENA_BYTES - shared.HEAD_BYTES) // shared.SLOTS // shared.SLOT_MULTIPLE * shared.SLOT_MULTIPLE
    share = slot if collective == "allgather" else slot // max(nranks - 1, 1)
    return pieces * (share // 128 * 128 // 8) * (1 if collective == "allgather" else nranks)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("collective", "pieces", "lent"),
    [("reduce_scatter", 2, "by all"), ("allgather", 3, "by those who give up"), ("allreduce", 4, "by all")],
)
def test_what_a_rank_does_to_its_array_after_giving_up_is_in_no_result(
    make_communicator: MakeCommunicator, comm: Any, collective: str, pieces: int, lent: str
) -> None:
    """One rank rests in mid-call; the others give up and use their arrays, in which it still reads when it goes on."""
    c, rests = make_communicator(algorithm="shared", arena_bytes=ARENA_BYTES), comm.size - 1
    n = length_in_pieces(collective, comm.size, pieces)
    x = c.empty(n)
    if comm.rank == rests and lent == "by those who give up":
        x = np.empty(n)
    x[:] = comm.rank + 1.0
    sums = np.full(n, comm.size * (comm.size + 1) / 2)
    want = {
        "reduce_scatter": sums[: n // comm.size],
        "allreduce": sums,
        "allgather": np.repeat(np.arange(1.0, comm.size + 1), n),
    }[collective]
    y, start = np.empty_like(want), getattr(c, f"i{collective}")
    start(x, y).wait()
    assert (y == want).all()
    y[:] = -1
    error: Exception | None = None
    comm.Barrier()
    if comm.rank != rests:  # what they lay out is there before the other comes, who gets past the first piece at once
        request = start(x, y)
        comm.Barrier()
        comm.Barrier()
        try:
            request.wait(timeout=0.2)
        except pr.PyreduceError as caught:
            error = caught
        x[:] = 1e6
        comm.Barrier()
    else:
        comm.Barrier()
        request = start(x, y)
        comm.Barrier()
        comm.Barrier()
        try:
            request.wait()
        except pr.PyreduceError as caught:
            error = caught
    if error is None:
        assert (y == want).all(), f"a result without an error, and wrong: {y[y != want][:4]}"
    else:
        assert isinstance(error, pr.CollectiveTimeout), error


@pytest.mark.ranks(2, 3)
def test_a_call_that_has_gone_well_is_not_spoiled_by_who_gives_up_in_the_next(
    make_communicator: MakeCommunicator, comm: Any
) -> None:
    """The one that rests has laid out its part of a call, which the others complete; for the next it is too late."""
    c, rests = make_communicator(algorithm="shared"), comm.size - 1
    x, y = np.ones(4), np.zeros(4)
    error: Exception | None = None
    c.allreduce(x)
    if comm.rank == rests:
        request = c.iallreduce(x, y)
        comm.Barrier()
        comm.Barrier()
        try:
            request.wait()
        except pr.PyreduceError as caught:
            error = caught
    else:
        comm.Barrier()
        c.allreduce(x, y)
        with pytest.raises(pr.CollectiveTimeout):
            c.allreduce(x, timeout=0.2)
        comm.Barrier()
    comm.Barrier()
    assert error is None, error
    assert (y == comm.size).all()
    if comm.rank == rests:
        with pytest.raises(pr.CollectiveTimeout, match="gave up after"):
            c.allreduce(x)


# ------------------------------------------------------------------------------------------- stopped, killed, torn out


def in_a_call(c: pr.Communicator) -> bool:
    """Whether the engine has begun a call that is not over."""
    engine = c._plans.engine
    return engine is not None and lib.pr_shared_current(engine.handle) != ffi.NULL


def start_when_inside(c: pr.Communicator, work: Callable[[], None]) -> threading.Thread:
    """A thread that works as soon as this rank is in the middle of a call."""

    def wait() -> None:
        while not in_a_call(c):
            time.sleep(0)
        work()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def interrupt_after(turns: int) -> None:
    for _ in range(turns):
        pass
    signal.raise_signal(signal.SIGINT)


def is_free(lock: Any) -> bool:
    """Whether another thread could take it."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(lambda: lock.acquire(blocking=False) and not lock.release()).result()


@several
@pytest.mark.parametrize("way", ["blocking", "nonblocking", "persistent"])
def test_a_rank_that_is_stopped_is_named(make_communicator: MakeCommunicator, comm: Any, way: str) -> None:
    """The whole process rests in the middle of a call until its peers have given up; then it is told."""
    c, stopped = make_communicator(transport="shared", timeout=1, arena_bytes=ARENA_BYTES), comm.size - 1
    x, y = np.ones(1_000_000), np.empty(1_000_000)
    for _ in range(2):
        c.allreduce(x, y, timeout=30)
    request = c.allreduce_init(x, y)
    pid = comm.bcast(os.getpid(), stopped)
    thread: threading.Thread | None = None

    def stop() -> None:
        subprocess.Popen(["sh", "-c", f"sleep 20; kill -CONT {pid}"], start_new_session=True)  # if no peer does
        os.kill(pid, signal.SIGSTOP)

    def call_again_and_again() -> None:
        for _ in range(10_000):
            if way == "blocking":
                c.allreduce(x, y)
            elif way == "nonblocking":
                c.iallreduce(x, y).wait()
            else:
                request()

    if comm.rank == stopped:
        thread = start_when_inside(c, stop)
    try:
        with pytest.raises(pr.CollectiveTimeout) as info:
            call_again_and_again()
    finally:
        if comm.rank == 0:
            for given_up in range(1, stopped):
                comm.recv(source=given_up)
            os.kill(pid, signal.SIGCONT)
        elif comm.rank != stopped:
            comm.send(None, 0)
    if thread is not None:
        thread.join()
    comm.Barrier()
    if comm.rank != stopped:
        assert info.value.missing == (stopped,), info.value
        assert f"rank {stopped} had not arrived" in str(info.value), info.value
    with pytest.raises(pr.BrokenCommunicatorError):
        c.allreduce(x, y)


@several
def test_who_comes_too_late_is_told_on_both_ways(make_communicator: MakeCommunicator, comm: Any) -> None:
    for way in ("door", "long way", "nonblocking"):
        c = make_communicator(transport="shared")
        x, y = np.ones(40), np.empty(40)
        for _ in range(2):
            c.allreduce(x, y)
        late, before = 1, door_calls(c)
        if comm.rank == late:
            comm.Barrier()
        options = {"timeout": 0.2} if comm.rank != late else {"timeout": 20} if way == "long way" else {}
        with pytest.raises(pr.CollectiveTimeout) as info:
            c.iallreduce(x, y).wait() if comm.rank == late and way == "nonblocking" else c.allreduce(x, y, **options)
        if comm.rank != late:
            assert info.value.missing == (late,)
            comm.Barrier()
        else:
            assert door_calls(c) == before + (way == "door")
            assert "gave up after 0.2 s" in str(info.value)
        with pytest.raises(pr.BrokenCommunicatorError):
            c.allreduce(x, y)
        comm.Barrier()


@several
def test_mismatches_are_found_without_checks(make_communicator: MakeCommunicator, comm: Any) -> None:
    """What a rank publishes carries its call's digest, whatever `check` says; through doors too."""
    odd = comm.rank == 1
    calls: list[Callable[[pr.Communicator], Any]] = [
        lambda c: c.allreduce(np.ones(5 + odd), np.empty(5 + odd)),
        lambda c: c.allreduce(np.ones(5, "f4" if odd else "f8"), np.empty(5, "f4" if odd else "f8")),
        lambda c: c.allreduce(np.ones(5), np.empty(5), op=pr.MAX if odd else pr.SUM),
        lambda c: c.allreduce(np.ones((5, 1) if odd else 5), np.empty((5, 1) if odd else 5)),
        lambda c: c.allreduce(np.ones(90_000 + odd)),
        lambda c: c.allgather(np.ones(5), np.empty(15)) if odd else c.allreduce(np.ones(15), np.empty(15)),
        lambda c: c.reduce_scatter(np.ones(15), np.empty(5)) if odd else c.iallreduce(np.ones(15)).wait(),
    ]
    for i, call in enumerate(calls):
        c = make_communicator(transport="shared", check="off")
        for _ in range(2):  # every rank knows both calls
            for x in (np.ones(5), np.ones(6), np.ones(5, "f4"), np.ones((5, 1)), np.ones(15)):
                c.allreduce(x, np.empty_like(x))
            c.allreduce(np.ones(5), np.empty(5), op=pr.MAX)
            c.allgather(np.ones(5), np.empty(15))
            c.reduce_scatter(np.ones(15), np.empty(5))
        before = door_calls(c)
        with pytest.raises(pr.MismatchError) as info:
            call(c)
        assert [1] in info.value.groups.values(), info.value
        if i < 4:
            assert door_calls(c) == before + 1
        with pytest.raises(pr.BrokenCommunicatorError):
            c.allreduce(np.ones(5), np.empty(5))


@several
def test_an_interrupt_in_a_call_through_a_door_is_told(make_communicator: MakeCommunicator, comm: Any) -> None:
    torn, absent = 0, comm.size - 1
    for delay in range(0, 1000, 50):
        c = make_communicator(transport="shared")
        x, y = np.ones(40), np.empty(40)
        for _ in range(2):
            c.allreduce(x, y)
        comm.Barrier()
        before, error = door_calls(c), None
        if comm.rank == torn:
            handler = signal.signal(signal.SIGINT, signal.default_int_handler)
            thread = start_when_inside(c, partial(interrupt_after, delay))
            with pytest.raises(KeyboardInterrupt) as info:
                c.allreduce(x, y)
            thread.join()
            signal.signal(signal.SIGINT, handler)
            error = info.value
            assert is_free(c._pending.lock)
        elif comm.rank != absent:
            with pytest.raises(pr.BrokenCommunicatorError, match="rank 0 left call 3 by KeyboardInterrupt"):
                c.allreduce(x, y)
        comm.Barrier()
        if comm.rank == absent:
            with pytest.raises(pr.BrokenCommunicatorError, match="rank 0 left call 3 by KeyboardInterrupt"):
                c.allreduce(x, y)
        assert door_calls(c) == before + 1
        with pytest.raises(pr.BrokenCommunicatorError, match="broken since an earlier call") as later:
            c.allreduce(x, y)
        assert error is None or later.value.__cause__ is error
        comm.Barrier()


KILLED = """
import os, signal, sys, threading, time
import numpy as np, pyreduce as pr
from mpi4py import MPI
from pyreduce._core import ffi, lib

comm, way = MPI.COMM_WORLD, sys.argv[1]
c = pr.Communicator(transport="shared", timeout=2, arena_bytes=1 << 16)
x, y = np.ones(1_000_000), np.empty(1_000_000)
for _ in range(2):
    c.allreduce(x, y, timeout=60)
request = c.allreduce_init(x, y)
comm.Barrier()

def die():
    while lib.pr_shared_current(c._plans.engine.handle) == ffi.NULL:
        time.sleep(0)
    os.kill(os.getpid(), signal.SIGKILL)

if comm.rank == 1:
    threading.Thread(target=die).start()
try:
    for _ in range(1000):
        if way == "blocking":
            c.allreduce(x, y)
        elif way == "nonblocking":
            c.iallreduce(x, y).wait()
        else:
            request()
except pr.PyreduceError as error:
    with open(f"{sys.argv[2]}.{comm.rank}", "w") as told:  # what goes through the launcher may be lost with it
        told.write(f"{type(error).__name__} missing {getattr(error, 'missing', None)}: {error}")
time.sleep(1)
os._exit(0)
"""


@pytest.mark.skipif(RANKS > 1, reason="starts a launcher: not from within an MPI job")
def test_peers_of_a_killed_rank_are_told_who_is_missing(tmp_path: Path) -> None:
    """With a launcher that lets the others live.

    Even so MPICH's sends SIGUSR1 to all when a process dies, and SIGKILL where it is the launcher's own child that was
    killed; so each rank has a shell between, which bears the one and hides the other.
    """
    MPI = pytest.importorskip("mpi4py.MPI")
    if "MPICH" not in MPI.Get_library_version():
        pytest.skip("only MPICH's launcher can be told to leave the others alone")
    program = tmp_path / "program.py"
    program.write_text(KILLED)
    environment = clean_environment()
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    environment.setdefault("VIRTUAL_ENV", sys.prefix)
    shell = ["sh", "-c", "trap '' USR1; \"$@\"; exit 0", "sh"]
    mpirun = subprocess.run(
        [str(SCRIPT), "--print", "-n", "3", "true"], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    at = mpirun.index("-n")
    for way in ("blocking", "nonblocking", "persistent"):
        told = tmp_path / way
        options = [*mpirun[:at], "-disable-auto-cleanup", *mpirun[at:-1]]
        line = [*options, *shell, sys.executable, str(program), way, str(told)]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=100, check=False)
        for rank in (0, 2):
            place = told.with_suffix(f".{rank}")
            for _ in range(1000):  # the launcher need not wait for all
                if place.exists() and place.read_text():
                    break
                time.sleep(0.01)
            else:
                pytest.fail(f"{way}: rank {rank} has told nothing\n{done.stdout}{done.stderr}")
            assert place.read_text().startswith("CollectiveTimeout missing (1,): allreduce"), place.read_text()
        assert not told.with_suffix(".1").exists()
