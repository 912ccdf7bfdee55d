"""How the suite runs alone and under mpirun.

Alone (``python -m pytest``) everything runs with one rank; without mpi4py the pure tests run and the rest is skipped.

Under ``mpirun -n N python -m pytest`` every rank runs pytest over the same tests, in the same order:

- a test that takes the fixture `world` (or `comm`, which needs it) is collective. With `comm` it runs once for each of
  P = 1, 2, 3, 4, N ranks (of these, TEST_RANKS=2,4 picks some); ranks beyond P pass through;
- every other test is pure: it runs alone only, and is deselected here;
- after each phase of each test the ranks exchange their outcomes: if one failed, all fail, and say who and why. So
  ``-x`` stops all ranks at the same test, and all ranks exit with the same status;
- nobody waits for ever: calls of pyreduce time out, then the exchange does, naming who is missing, and aborts the job;
  a watchdog in C sees to ranks that hang within the MPI;
- only rank 0 prints.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.register_assert_rewrite("helpers")

CALL_SECONDS = 30  # a call of pyreduce that waits so long fails
COLLECTIVE_SECONDS = 60  # a rank that comes so late to the exchange after a collective test is given up
PURE_SECONDS = 150  # the same after a pure test, which pytest-timeout ends after 120 s
HANG_SECONDS = 200  # a rank that is stuck in C for so long is killed, with a traceback
RECORD_BYTES = 2048

CHOSEN = ("PYREDUCE_ISA", "PYREDUCE_TRANSPORT")  # settings that a whole run of the suite may be made with

for variable in [name for name in os.environ if name.startswith("PYREDUCE_") and name not in CHOSEN]:
    del os.environ[variable]
os.environ["PYREDUCE_TIMEOUT"] = str(CALL_SECONDS)
os.environ["PYREDUCE_PROFILE"] = "none"  # whoever tests here may have tuned
# MPICH's UCX complains at the end of the windows of communicators that tests have broken, which are never freed.
os.environ.setdefault("UCX_LOG_LEVEL", "error")

try:
    from mpi4py import MPI
except (ImportError, RuntimeError):  # RuntimeError: mpi4py is there, but no MPI library
    MPI = None  # type: ignore[assignment]

TESTED_RANKS = [int(P) for P in os.environ.get("TEST_RANKS", "").split(",") if P]
RANK, SIZE = (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) if MPI else (0, 1)

failed_somewhere = pytest.StashKey[bool]()


class Exchange:
    """Exchange of short texts among all ranks, on a communicator of its own, with a deadline.

    Every rank sends its record to every other: unlike an allgather's, such messages tell who has come and who has not.
    """

    def __init__(self, stderr: int) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.stderr = stderr

    def run(self, where: str, text: str, seconds: float) -> list[tuple[str, str]]:
        """Give this rank's place in the run and its text; get those of all ranks."""
        own = bytearray(f"{where}\0{text}".encode()[:RECORD_BYTES].ljust(RECORD_BYTES, b"\0"))
        records = [own if rank == RANK else bytearray(RECORD_BYTES) for rank in range(SIZE)]
        peers = [rank for rank in range(SIZE) if rank != RANK]
        recvs = {rank: self.comm.Irecv([records[rank], MPI.BYTE], rank) for rank in peers}
        sends = [self.comm.Isend([own, MPI.BYTE], rank) for rank in peers]
        timer, _ = signal.setitimer(signal.ITIMER_REAL, 0)  # the deadline here is ours, not pytest-timeout's
        end, pause = time.monotonic() + seconds, 0.0
        while recvs or not MPI.Request.Testall(sends):
            recvs = {rank: request for rank, request in recvs.items() if not request.Test()}
            if time.monotonic() > end:
                told = [f"{where}: ranks {sorted(recvs)} did not come within {seconds:g} s."]
                for rank in sorted({*range(SIZE)} - {*recvs}):
                    place, _, said = bytes(records[rank]).rstrip(b"\0").decode(errors="replace").partition("\0")
                    told.append(f"Rank {rank} ({place}): {said or 'passed'}")
                self.abort("\n".join(told))
            time.sleep(pause)
            pause = min(pause + 2e-5, 2e-3)
        signal.setitimer(signal.ITIMER_REAL, timer)
        texts = [bytes(record).rstrip(b"\0").decode(errors="replace").partition("\0") for record in records]
        return [(place, told) for place, _, told in texts]

    def abort(self, message: str) -> None:
        """Say why, and end all ranks."""
        os.write(self.stderr, f"\ntests: rank {RANK} of {SIZE}: {message}\n".encode())
        MPI.COMM_WORLD.Abort(1)

    def settle(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Make a report failed if any rank's is."""
        where = f"{item.nodeid} [{report.when}]"
        text = report.longreprtext[-RECORD_BYTES // 2 :] or "failed" if report.failed else ""
        told = self.run(where, text, COLLECTIVE_SECONDS if is_collective(item) else PURE_SECONDS)
        if any(place != where for place, _ in told):
            places = "; ".join(f"rank {rank} in {place}" for rank, (place, _) in enumerate(told))
            self.abort(f"the ranks are out of step: {places}")
        failures = {rank: text for rank, (_, text) in enumerate(told) if text}
        if not failures:
            return
        item.stash[failed_somewhere] = True
        who = f"failed on ranks {', '.join(map(str, failures))} of {SIZE}"
        others = [f"rank {rank}:\n{text}" for rank, text in failures.items() if rank != RANK]
        if report.failed:
            report.sections.append((who, "\n\n".join(others)))
        else:
            report.outcome = "failed"
            report.longrepr = f"{who}\n\n" + "\n\n".join(others)


def is_collective(item: pytest.Item) -> bool:
    """Whether a test runs on all ranks."""
    return "world" in getattr(item, "fixturenames", ())


def takes_part(item: pytest.Item) -> bool:
    """Whether a test has anything to do on this rank."""
    if not is_collective(item):
        return RANK == 0
    comm = getattr(item, "funcargs", {}).get("comm")
    return comm is None or comm != MPI.COMM_NULL


exchange: Exchange | None = None


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    global exchange
    config.addinivalue_line("markers", "ranks(P, ...): numbers of ranks that `comm` has, as far as there are so many")
    if SIZE == 1:
        return
    exchange = Exchange(os.dup(sys.__stderr__.fileno()))
    if RANK > 0:
        config.pluginmanager.unregister(name="terminalreporter")
        silence = open(os.devnull, "w")  # noqa: SIM115
        config.pluginmanager.register(pytest.TerminalReporter(config, silence), "terminalreporter")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Pure tests have nothing to gain from more ranks: under mpirun they are left to the run alone."""
    if SIZE > 1:
        pure = [item for item in items if not is_collective(item)]
        config.hook.pytest_deselected(items=pure)
        items[:] = [item for item in items if is_collective(item)]


def pytest_collection_finish(session: pytest.Session) -> None:
    if exchange is None:
        return
    digest = zlib.crc32("\n".join(item.nodeid for item in session.items).encode())
    text = f"{len(session.items)} tests (digest {digest:08x}), {session.testsfailed} errors"
    told = [text for _, text in exchange.run("collection", text, COLLECTIVE_SECONDS)]
    if len(set(told)) > 1:
        who = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told))
        pytest.exit(f"the ranks collected different tests: {who}", returncode=1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if exchange is not None:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=exchange.stderr)
    try:
        return (yield)
    finally:
        if exchange is not None:
            faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    return None if takes_part(pyfuncitem) else True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        item.stash[failed_somewhere] = True
    if exchange is not None:
        exchange.settle(item, report)
    return report


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """After failures some rank may never come to MPI_Finalize, or wait there for a lost message: leave without."""
    if exchange is not None and getattr(config, "failures", 0):
        sys.stdout.flush()
        sys.stderr.flush()
        exchange.run("the end", "", COLLECTIVE_SECONDS)
        time.sleep(1)
        os._exit(1)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.failures = session.testsfailed  # type: ignore[attr-defined]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "comm" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("ranks")
        sizes = [P for P in marker.args if P <= SIZE] if marker else sorted({*range(1, min(SIZE, 4) + 1), SIZE})
        if TESTED_RANKS:
            sizes = [P for P in sizes if P in TESTED_RANKS]
        metafunc.parametrize("comm", sizes, indirect=True, ids=[f"P{size}" for size in sizes], scope="session")


@pytest.fixture(scope="session")
def world() -> Any:
    """``COMM_WORLD``; a test that takes it runs on all ranks."""
    if MPI is None:
        pytest.skip("needs mpi4py and an MPI")
    return MPI.COMM_WORLD


@pytest.fixture(scope="session")
def split_worlds(world: Any) -> dict[int, Any]:
    """Communicators of the first P ranks, made as they are asked for."""
    return {}


@pytest.fixture(autouse=True)
def forget_registered_algorithms() -> Iterator[None]:
    """Algorithms that a test registers are gone after it."""
    from helpers import fold_orders

    from pyreduce import algorithms

    before = dict(algorithms._ALGORITHMS)
    yield
    if before != algorithms._ALGORITHMS:
        algorithms._ALGORITHMS.clear()
        algorithms._ALGORITHMS.update(before)
        fold_orders.cache_clear()


@pytest.fixture
def comm(request: pytest.FixtureRequest, world: Any, split_worlds: dict[int, Any]) -> Any:
    """A communicator of P ranks; ``COMM_NULL`` on ranks beyond, which do not run the test."""
    size = request.param
    if size not in split_worlds:
        split_worlds[size] = world.Split(0 if world.rank < size else MPI.UNDEFINED)
    return split_worlds[size]


@pytest.fixture
def make_communicator(request: pytest.FixtureRequest, comm: Any) -> Iterator[Callable[..., Any]]:
    """Makes `pyreduce.Communicator` objects on `comm`, and closes them if the test passed on all ranks."""
    import pyreduce as pr

    made: list[Any] = []

    def make(on: Any = None, **settings: Any) -> Any:
        made.append(pr.Communicator(comm if on is None else on, **settings))
        return made[-1]

    yield make
    if not request.node.stash.get(failed_somewhere, False):
        for communicator in made:
            communicator.close()


@pytest.fixture
def communicator(make_communicator: Callable[..., Any], comm: Any) -> Any:
    """A `pyreduce.Communicator` on `comm` that cuts small vectors into many segments; None beyond `comm`."""
    if comm == MPI.COMM_NULL:
        return None
    return make_communicator(segment_bytes=64, in_flight=2)


@pytest.fixture(params=["shared", "rma"])
def transport(request: pytest.FixtureRequest) -> str:
    """How windows and signals reach peers: a test that takes it runs on both."""
    return request.param


@pytest.fixture
def k(make_communicator: Callable[..., Any], comm: Any, transport: str) -> Any:
    """A communicator that uses the transport; None beyond `comm`."""
    return make_communicator(transport=transport) if comm else None
