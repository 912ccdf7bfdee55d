"""Collectives between hosts that share no memory, made by benchmarks/network.sh on this machine: results, lost peers.

Skipped with the script's own word where there can be no such hosts (it takes root, namespaces, iproute2 and MPICH).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from helpers import clean_environment

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "network.sh"
RANKS = max(int(os.environ.get(name, "1") or 1) for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"))
SKIPPED = 77
TIMEOUT = 3  # seconds of a call whose peer is lost

pytestmark = pytest.mark.skipif(RANKS > 1, reason="starts a launcher: not from within an MPI job")


@contextmanager
def start(hosts: int, ranks: int, rate: str, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A command on a network of its own; both have ended in the end."""
    env = clean_environment()
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    line = ["bash", str(SCRIPT), str(hosts), str(ranks), rate, "0", "--", *command]
    with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        try:
            yield job
        finally:
            if job.poll() is None:
                job.send_signal(signal.SIGTERM)
            try:
                job.wait(20)
            finally:
                job.kill()


def run(hosts: int, ranks: int, rate: str, *command: str, seconds: float = 90) -> subprocess.CompletedProcess[str]:
    """Run a command on a network of its own."""
    with start(hosts, ranks, rate, *command) as job:
        out, err = job.communicate(timeout=seconds)
    return subprocess.CompletedProcess(command, job.returncode, out, err)


@pytest.fixture(scope="module", autouse=True)
def network() -> None:
    """Skips all tests here if there can be no network."""
    if os.name != "posix" or not os.path.exists("/proc/self/ns"):
        pytest.skip("needs Linux namespaces")
    done = run(2, 1, "1gbit", "true")
    if done.returncode == SKIPPED:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr


def test_hosts_have_names_addresses_processes_and_memory_of_their_own(tmp_path):
    tell = 'echo "$(hostname) $(readlink /proc/self/ns/ipc) $(ip -br addr show eth0) $(ls /dev/shm)" >'
    tell += f" {tmp_path}/$(hostname).$PMI_RANK; touch /dev/shm/mine; [ -d /proc/1 ] && [ ! -d /proc/{os.getpid()} ]"
    assert run(3, 1, "0", "sh", "-c", tell).returncode == 0
    told = [(tmp_path / f"host{n}.{n}").read_text().split() for n in range(3)]
    assert [words[0] for words in told] == ["host0", "host1", "host2"]
    assert len({words[1] for words in told}) == 3
    assert [words[4] for words in told] == ["10.77.0.1/16", "10.77.0.2/16", "10.77.0.3/16"]
    assert all("mine" not in words for words in told)


def test_status_is_the_command_s_and_nothing_is_left(tmp_path):
    before = count_beds()
    assert run(2, 1, "100mbit", "sh", "-c", "exit 7").returncode == 7
    with start(2, 1, "100mbit", "sh", "-c", f"touch {tmp_path}/began; sleep 1000") as job:
        wait_for(lambda: (tmp_path / "began").exists(), 20)
        job.send_signal(signal.SIGTERM)
        assert job.wait(20) == 128 + signal.SIGTERM
        left = f"NETWORK_BED={job.pid}".encode()
        wait_for(lambda: not any(left in environ for environ in environments()), 5)
    assert count_beds() <= before


@pytest.mark.parametrize(
    "arguments",
    [(), ("0", "1", "1gbit", "0"), ("2", "1", "1", "0"), ("2", "1", "1gbit", "1"), ("2", "1", "0", "0", "x")],
)
def test_misuse(arguments):
    done = subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert "usage: benchmarks/network.sh" in done.stderr


def count_beds() -> int:
    """Folders of networks."""
    return len(list(Path(os.environ.get("TMPDIR", "/tmp")).glob("pyreduce-network.*")))


def environments() -> Iterator[bytes]:
    """Of all processes that can be asked."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            yield path.read_bytes()


def wait_for(condition: Any, seconds: float) -> None:
    """Poll until it holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


# ---- results -------------------------------------------------------------------------------------

CHECK = """
import functools, itertools, socket, sys
import numpy as np
from mpi4py import MPI
import pyreduce as pr
from pyreduce import algorithms

comm = MPI.COMM_WORLD
P, hosts = comm.size, int(sys.argv[1])
node = comm.Split_type(MPI.COMM_TYPE_SHARED)
assert node.size == P // hosts and node.bcast(socket.gethostname()) == socket.gethostname()
assert len(set(comm.allgather(socket.gethostname()))) == hosts

def sent_by_all():
    comm.Barrier()
    with open("/proc/self/net/dev") as f:
        own = next(int(line.split()[9]) for line in f if "eth0:" in line)
    return comm.allreduce(own if node.rank == 0 else 0)

OPS = {"SUM": np.add, "MAX": np.maximum, "MIN": np.minimum, "PROD": np.multiply}
CASES = [("SUM", "f4"), ("SUM", "f8"), ("PROD", "i4"), ("MIN", "i2")]
served = {}
with pr.Communicator(comm, timeout=20) as c:
    for algorithm, rows, (op, dtype) in itertools.product(
        [None, *algorithms.names()], [0, P - 1, 1000, 60_001], CASES
    ):
        # Small whole numbers: exact in any order, PROD's too, which wrap.
        inputs = [((np.arange(rows) * (r + 3)) % 7 + r).astype(dtype) for r in range(P)]
        total = functools.reduce(OPS[op], inputs)
        blocks = np.array_split(total, P)
        mine = np.array_split(inputs[comm.rank], P)[comm.rank]
        before, ran = sent_by_all(), []
        for collective, x, expected in [
            ("allreduce", inputs[comm.rank], total),
            ("reduce_scatter", inputs[comm.rank], blocks[comm.rank]),
            ("allgather", mine, np.concatenate([np.array_split(a, P)[r] for r, a in enumerate(inputs)])),
        ]:
            settings = {} if collective == "allgather" else {"op": getattr(pr, op)}
            try:
                got = getattr(c, collective)(x, algorithm=algorithm, **settings)
            except pr.Unsupported:
                continue
            where = f"{collective} {algorithm} {op} {dtype} {rows}"
            assert got.dtype == expected.dtype and np.array_equal(got, expected), where
            ran.append(collective)
            served.setdefault(collective, set()).add(str(algorithm))
        # However an allreduce goes about it, so much must cross the cables.
        crossed = sent_by_all() - before
        if "allreduce" in ran:
            assert crossed >= 2 * total.nbytes * (hosts - 1), (algorithm, total.nbytes, crossed)
for collective in ("allreduce", "reduce_scatter", "allgather"):
    assert served[collective] >= {"None", "naive", "ring", "native"}, served
if comm.rank == 0:
    print("checked:", " ".join(sorted(served["allreduce"])))
"""


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 2), (3, 1)])
def test_results_between_hosts(tmp_path, hosts, ranks):
    program = tmp_path / "check.py"
    program.write_text(CHECK)
    done = run(hosts, ranks, "1gbit", "python", str(program), str(hosts))
    assert done.returncode == 0, done.stderr
    assert "checked: " in done.stdout


# ---- a lost peer ---------------------------------------------------------------------------------

LOSE = """
import json, os, subprocess, sys, threading, time
import numpy as np
from mpi4py import MPI
import pyreduce as pr

folder, algorithm, collective, timeout = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
comm = MPI.COMM_WORLD
hosts = int(os.environ["NETWORK_HOSTS"])
cut = None

def pull():
    global cut
    subprocess.run([os.environ["NETWORK_CUT"], f"host{hosts - 1}"], check=True)
    cut = time.monotonic()

c = pr.Communicator(comm, algorithm=None if algorithm == "None" else algorithm, timeout=timeout)
x, calls = np.ones(1 << 18, np.float32), 0
getattr(c, collective)(x)
if comm.rank == 0:
    threading.Timer(0.3, pull).start()
try:
    while True:
        began = time.monotonic()
        getattr(c, collective)(x)
        calls += 1
except pr.PyreduceError as error:
    took = time.monotonic() - began
    told = {"error": type(error).__name__, "text": str(error), "missing": getattr(error, "missing", None),
            "took": took, "calls": calls, "cut": cut is not None}
try:
    c.allreduce(x)
except pr.BrokenCommunicatorError as error:
    told["later"] = str(error)
with open(f"{folder}/{comm.rank}.new", "w") as f:
    json.dump(told, f)
os.rename(f"{folder}/{comm.rank}.new", f"{folder}/{comm.rank}.json")
time.sleep(1000)
"""


@pytest.mark.parametrize(("hosts", "ranks"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("algorithm", [None, "naive", "ring", "native"])
@pytest.mark.parametrize("collective", ["allreduce"])
def test_ranks_of_a_host_that_is_cut_off_are_named(tmp_path, hosts, ranks, algorithm, collective):
    program = tmp_path / "lose.py"
    program.write_text(LOSE)
    size = hosts * ranks
    paths = [tmp_path / f"{rank}.json" for rank in range(size)]
    command = ("python", str(program), str(tmp_path), str(algorithm), collective, str(TIMEOUT))
    with start(hosts, ranks, "100mbit", *command) as job:
        wait_for(lambda: job.poll() is not None or all(path.exists() for path in paths), 60)
        assert job.poll() is None, job.communicate()
    told = [json.loads(path.read_text()) for path in paths]
    lost = {*range(size - ranks, size)}
    assert told[0]["cut"]
    for rank, one in enumerate(told):
        absent = {*range(size)} - lost if rank in lost else lost
        assert one["error"] == "CollectiveTimeout", one
        assert {*one["missing"]} == absent, (rank, one)
        assert one["took"] < TIMEOUT + 5, one
        assert one["text"].splitlines()[0] in one["later"]
