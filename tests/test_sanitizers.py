"""Cells, rounds of messages and the shared-memory engine of csrc under the thread, address and undefined-behaviour
sanitizers, threads in place of ranks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_launch import RANKS

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
STRESS = ROOT / "tests" / "c"
COMPILER = shutil.which(os.environ.get("CC", "cc")) or ""
SANITIZERS = {"thread": "-fsanitize=thread", "address": "-fsanitize=address,undefined"}
ROUNDS = int(os.environ.get("STRESS_ROUNDS", "2000"))
RANK_COUNTS = (1, 2, 3, 4, 8)
STRICT = ("-Wall", "-Wextra", "-Werror")

# The engine calls this before every publication.
DELAY = "-DPR_DELAY()={extern void stress_delay(void);stress_delay();}"
ENGINE = ("shared_engine.c", "shared_pieces.c", "copy.c", "fold.c")

# Kernels of the baseline only: those of all instruction sets take half a minute to compile with sanitizers.
BASELINE_KERNELS = """\
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#undef __x86_64__
#include "kernels.c"
"""

# Protocols that are wrong: the file, what is replaced in it, and by what.
BROKEN = {
    "relaxed stores": ("shared_engine.c", "memory_order_release", "memory_order_relaxed"),
    "relaxed loads": ("shared_engine.c", "memory_order_acquire", "memory_order_relaxed"),
    "one stage slot": ("shared.h", r"PR_HEAD \+ \(piece & 1\)", "PR_HEAD + 0"),
    "one result slot": ("shared.h", r"\(2 \+ \(piece & 1\)\)", "2"),
    "returns before its input is read": ("shared_engine.c", r"\(last && e->where != 0\)", "0"),
    "in place without staging": ("shared_engine.c", r"\|\| \(p->collective == PR_REDUCE_SCATTER[^;]*\)", ""),
    "folded before it is read": (
        "shared_engine.c",
        r"(work\(e, pr_consume, k\);)(.*?memory_order_release\);)",
        r"\2 \1",
    ),
}

pytestmark = [
    pytest.mark.skipif(RANKS > 1, reason="once is enough"),
    pytest.mark.skipif(not COMPILER, reason="needs a C compiler"),
    pytest.mark.skipif(not CSRC.is_dir(), reason="needs the C sources"),
]


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command's outcome, with what it wrote."""
    words = [str(word) for word in command]
    env = {**os.environ, **environment}
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=110, env=env)


def compile_c(kind: str, *arguments: object, includes: Path = CSRC) -> None:
    """Compile under a sanitizer, and succeed."""
    made = run(
        COMPILER, "-O1", "-g", "-std=c11", SANITIZERS[kind], "-fno-sanitize-recover=all", f"-I{includes}", *arguments,
        "-pthread",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr


def need(kind: str, folder: Path) -> None:
    """Skip the test if there is no such sanitizer that works here."""
    empty, probe = folder / "empty.c", folder / "probe"
    empty.write_text("int main(void) { return 0; }\n")
    try:
        compile_c(kind, empty, "-o", probe)
        works = run(probe).returncode == 0
    except AssertionError:
        works = False
    if not works:
        pytest.skip(f"this compiler has no {kind} sanitizer that works here")


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what several tests need compiled."""
    return tmp_path_factory.mktemp("objects")


def kernels(kind: str, objects: Path) -> Path:
    """The baseline's kernels, compiled once for each sanitizer."""
    made = objects / f"kernels-{kind}.o"
    if not made.exists():
        source = objects / "baseline_kernels.c"
        source.write_text(BASELINE_KERNELS)
        compile_c(kind, "-c", source, "-o", made)
    return made


def build_engine(kind: str, objects: Path, program: Path, csrc: Path = CSRC, flags: tuple[str, ...] = STRICT) -> None:
    """Compile the stress test with the engine in `csrc`."""
    sources = [STRESS / "shared_stress.c", *(csrc / name for name in ENGINE)]
    compile_c(kind, DELAY, *flags, *sources, kernels(kind, objects), "-o", program, includes=csrc)


def break_engine(name: str, folder: Path) -> Path:
    """A copy of the C sources with a protocol that is wrong."""
    csrc = folder / "csrc"
    shutil.copytree(CSRC, csrc, ignore=shutil.ignore_patterns("__pycache__"))
    file, pattern, replacement = BROKEN[name]
    text, count = re.subn(pattern, replacement, (csrc / file).read_text(), flags=re.DOTALL)
    assert count > 0
    (csrc / file).write_text(text)
    return csrc


@pytest.mark.parametrize("kind", SANITIZERS)
def test_cells_publish_what_was_written(kind: str, tmp_path: Path) -> None:
    need(kind, tmp_path)
    program = tmp_path / "stress"
    compile_c(kind, *STRICT, STRESS / "cells_stress.c", CSRC / "cells.c", "-o", program)
    for nranks in RANK_COUNTS:
        done = run(program, nranks, ROUNDS)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout == f"{nranks} ranks, {ROUNDS} rounds: 0 wrong\n"


@pytest.mark.parametrize("handle", ["int32_t", "uintptr_t"])
@pytest.mark.parametrize("kind", SANITIZERS)
def test_rounds_of_messages_over_an_mpi_of_either_width(kind: str, handle: str, tmp_path: Path, objects: Path) -> None:
    need(kind, tmp_path)
    program = tmp_path / "stress"
    sources = [STRESS / "rounds_stress.c", *(CSRC / name for name in ("rounds.c", "copy.c", "fold.c"))]
    compile_c(kind, *STRICT, f"-DHANDLE_TYPE={handle}", *sources, kernels(kind, objects), "-o", program)
    for nranks in (2, 3, 20):  # 20: more sources than fold without memory of their own
        calls = max(ROUNDS // nranks**2, 3)
        done = run(program, nranks, calls, PYREDUCE_ISA="baseline")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout == f"{nranks} ranks, {calls} calls: 0 wrong\n"


@pytest.mark.parametrize("kind", SANITIZERS)
def test_the_engine_gives_exact_results(kind: str, tmp_path: Path, objects: Path) -> None:
    need(kind, tmp_path)
    program = tmp_path / "stress"
    build_engine(kind, objects, program)
    for nranks in RANK_COUNTS:
        calls = max(ROUNDS * 4 // max(nranks, 4) ** 2, 10)  # every rank makes the inputs of all
        done = run(program, nranks, calls, nranks, PYREDUCE_ISA="baseline")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout == f"{nranks} ranks, {calls} calls: 0 wrong\n"


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_protocol_is_reported(name: str, tmp_path: Path, objects: Path) -> None:
    """Else the test above would say nothing."""
    need("thread", tmp_path)
    program = tmp_path / "stress"
    build_engine("thread", objects, program, break_engine(name, tmp_path), flags=())
    done = run(program, 3, 2000, 1, PYREDUCE_ISA="baseline", TSAN_OPTIONS="halt_on_error=1")
    assert done.returncode != 0
    assert any(told in done.stderr for told in ("WARNING: ThreadSanitizer", "wrong: rank", "mismatch: rank"))
