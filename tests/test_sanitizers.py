"""The cells of csrc/cells.c under the thread, address and undefined-behaviour sanitizers, threads in place of ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from test_launch import RANKS

ROOT = Path(__file__).resolve().parent.parent
COMPILER = shutil.which(os.environ.get("CC", "cc"))
SANITIZERS = {"thread": "-fsanitize=thread", "address": "-fsanitize=address,undefined"}
ROUNDS = os.environ.get("STRESS_ROUNDS", "2000")

pytestmark = [
    pytest.mark.skipif(RANKS > 1, reason="once is enough"),
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler"),
    pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="needs the C sources"),
]


@pytest.mark.parametrize("kind", SANITIZERS)
def test_cells_publish_what_was_written(kind: str, tmp_path: Path) -> None:
    assert COMPILER is not None
    build = [COMPILER, "-O1", "-g", "-std=c11", SANITIZERS[kind], "-fno-sanitize-recover=all", f"-I{ROOT / 'csrc'}"]
    empty = tmp_path / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    probe = tmp_path / "probe"
    tried = subprocess.run([*build, str(empty), "-o", str(probe)], capture_output=True, check=False)
    if tried.returncode or subprocess.run([str(probe)], capture_output=True, check=False).returncode:
        pytest.skip(f"this compiler has no {kind} sanitizer that works here")
    program = tmp_path / "stress"
    sources = [ROOT / "tests" / "c" / "cells_stress.c", ROOT / "csrc" / "cells.c"]
    made = subprocess.run(
        [*build, "-Wall", "-Wextra", "-Werror", *map(str, sources), "-pthread", "-o", str(program)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    for nranks in ("1", "2", "3", "4", "8"):
        done = subprocess.run([str(program), nranks, ROUNDS], capture_output=True, text=True, check=False, timeout=110)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout == f"{nranks} ranks, {ROUNDS} rounds: 0 wrong\n"
