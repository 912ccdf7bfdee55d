"""CASES row 20: memory for windows larger than /dev/shm, in a job whose /dev/shm is small. Starts a launcher."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import clean_environment
from test_launch import RANKS

SCRIPT = Path(__file__).resolve().parent.parent / "mpi_launch.sh"

PROGRAM = """
import numpy as np, pyreduce as pr
with pr.Communicator(transport={transport!r}, timeout=60) as c:
    before = c.window((c.size, 10))
    signal = c.signal(c.size)
    for make in (lambda: c.window(64 << 20, "u1"), lambda: c.allreduce(np.ones(9 << 20), algorithm="mesh")):
        try:
            make()
            print("MADE")
        except pr.WindowMemoryError as error:
            print("REFUSED" if "no memory for" in str(error) and "/dev/shm has" in str(error) else error)
    before.local[:] = 1
    assert (before.reduce_scatter(signal) == c.size).all()
    c.window(1 << 20, "u1").close()
print("OK")
"""


# With an arena of 64 MiB a rank, and then with one that fits, whose arrays do not.
SHARED = """
import numpy as np, pyreduce as pr
x = np.arange(1000.0)
with pr.Communicator(arena_bytes=64 << 20, timeout=60) as c:
    for n in (10, 1000, 50_000, 10):
        assert (c.allreduce(np.ones(n), np.empty(n)) == c.size).all()
        assert (c.reduce_scatter(np.ones(c.size * n)) == c.size).all()
        assert (c.allgather(np.full(n, 3.0)) == 3).all()
    assert c.stats
    for (collective, algorithm), stats in c.stats.items():
        assert algorithm != "shared", c.stats
        assert "no memory for" in stats.why and "/dev/shm has" in stats.why, stats.why
    print("FELL BACK")
    for collective in (c.allreduce, c.reduce_scatter, c.allreduce_init, c.iallreduce):
        for _ in range(2):
            try:
                collective(x, algorithm="shared")
                print("MADE")
            except pr.PyreduceError as error:
                print("REFUSED" if "no memory for" in str(error) and "/dev/shm has" in str(error) else repr(error))
    array = c.empty(5)
    array[:] = 1
    assert (c.allreduce(array) == c.size).all()
with pr.Communicator(arena_bytes=64 << 20, algorithm="shared", timeout=60) as c:
    try:
        c.allreduce(x)
        print("MADE")
    except pr.PyreduceError as error:
        print("REFUSED" if "no memory for" in str(error) and "/dev/shm has" in str(error) else repr(error))
with pr.Communicator(timeout=60) as c:
    before = c.empty(1000)
    before[:] = 2
    for nbytes in (64 << 20, 1 << 40, 30 << 20):
        try:
            c.empty(nbytes if c.rank == 0 else 8, "u1")
            print("MADE")
        except pr.WindowMemoryError as error:
            print("REFUSED" if "no memory for" in str(error) and "/dev/shm has" in str(error) else repr(error))
        assert (c.allreduce(before) == 2 * c.size).all()
        after = c.empty(1 << 20, "u1")
        after[:] = 1
        assert (c.allreduce(after, after) == c.size).all()
        assert (c.allreduce(np.ones(3 << 20)) == c.size).all()
    assert {algorithm for _, algorithm in c.stats} == {"shared"}
print("OK")
"""


def may_mount() -> bool:
    """Whether this process may give its children a /dev/shm of their own."""
    if RANKS > 1 or shutil.which("unshare") is None or os.geteuid() != 0:
        return False
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, check=False
    )
    return tried.returncode == 0


def run_in_a_small_dev_shm(program: Path, **settings: str) -> str:
    """What a program of two ranks prints whose /dev/shm has 48 MiB."""
    small = 'mount -t tmpfs -o size=48m tmpfs /dev/shm && exec "$@"'
    # The environment that runs the tests is the one that is asked for its MPI.
    environment = clean_environment() | settings
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    environment.setdefault("VIRTUAL_ENV", sys.prefix)
    line = ["unshare", "-m", "bash", "-c", small, "bash"]
    line += [str(SCRIPT), "-t", "90", "-n", "2", sys.executable, str(program)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("OK") == 2, done.stdout + done.stderr
    return done.stdout


in_a_small_dev_shm = pytest.mark.skipif(not may_mount(), reason="needs to mount a small /dev/shm: root, unshare, alone")


@in_a_small_dev_shm
@pytest.mark.parametrize("transport", ["shared", "rma"])
def test_row_20_a_small_dev_shm_is_a_clear_error(tmp_path: Path, transport: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(transport=transport))
    told = run_in_a_small_dev_shm(program, PYREDUCE_SEGMENT_BYTES=str(16 << 20))
    assert told.count("REFUSED") >= 2, told
    assert "REFUSED" in told.split()[0], told


@in_a_small_dev_shm
def test_row_20_an_arena_that_does_not_fit_is_done_without(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SHARED)
    told = run_in_a_small_dev_shm(program)
    assert told.count("FELL BACK") == 2, told
    assert told.count("REFUSED") == 2 * (8 + 1 + 3), told
