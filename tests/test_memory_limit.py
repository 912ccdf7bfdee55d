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


def may_mount() -> bool:
    """Whether this process may give its children a /dev/shm of their own."""
    if RANKS > 1 or shutil.which("unshare") is None or os.geteuid() != 0:
        return False
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, check=False
    )
    return tried.returncode == 0


@pytest.mark.skipif(not may_mount(), reason="needs to mount a small /dev/shm: root and unshare, alone")
@pytest.mark.parametrize("transport", ["shared", "rma"])
def test_row_20_a_small_dev_shm_is_a_clear_error(tmp_path: Path, transport: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(transport=transport))
    small = 'mount -t tmpfs -o size=48m tmpfs /dev/shm && exec "$@"'
    # The environment that runs the tests is the one that is asked for its MPI.
    environment = clean_environment()
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    environment["PYREDUCE_SEGMENT_BYTES"] = str(16 << 20)
    environment.setdefault("VIRTUAL_ENV", sys.prefix)
    line = [
        "unshare",
        "-m",
        "bash",
        "-c",
        small,
        "bash",
        str(SCRIPT),
        "-t",
        "90",
        "-n",
        "2",
        sys.executable,
        str(program),
    ]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("OK") == 2, done.stdout + done.stderr
    assert done.stdout.count("REFUSED") >= 2, done.stdout + done.stderr
    assert "REFUSED" in done.stdout.split()[0], done.stdout
