"""Nothing grows: memory over thousands of calls and hundreds of communicators (``LEAK_SCALE=4`` for more)."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import numpy as np
import pytest

import pyreduce as pr

SCALE = float(os.environ.get("LEAK_SCALE", 1))
CALLS, COMMUNICATORS, WINDOWS = int(2_500 * SCALE), int(250 * SCALE), int(1_250 * SCALE)
ALLOWED = 2 << 20  # bytes after warm-up, over 10,000 calls or 1,000 communicators


def resident() -> int:
    """Resident memory of this process, in bytes."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make_calls(k: pr.Communicator, calls: int) -> None:
    """Calls of all kinds, sizes and algorithms, out of place, in place, strided, failing locally."""
    for i in range(calls):
        n = 1 + i * 37 % 500
        x = np.arange(float(n))
        algorithm = ("naive", "ring", "mesh", "native", None)[i % 5]
        match i // 5 % 5:
            case 0:
                k.allreduce(x, algorithm=algorithm)
            case 1:
                k.allreduce(pr.IN_PLACE, x, op=pr.AVG, algorithm=algorithm)
            case 2:
                k.reduce_scatter(x[::2], algorithm=algorithm)
            case 3:
                k.allgather(x[: n // 2], algorithm=algorithm)
            case 4:
                try:
                    k.allreduce(x, np.empty(n + 1))
                except ValueError:
                    continue


def grow(work: Callable[[int], None], total: int) -> float:
    """Bytes by which memory grows over `total` pieces of work, after a quarter more to warm up.

    Four times the least of four quarters: what leaks does so in each, what is set up once (or a huge page), in one.
    """
    work(total // 4)
    marks = [resident()]
    for _ in range(4):
        work(total // 4)
        marks.append(resident())
    return 4 * float(min(np.diff(marks)))


def test_memory_is_flat_over_many_calls(world):
    with pr.Communicator(world, segment_bytes=512) as k:
        assert grow(lambda calls: make_calls(k, calls), CALLS) * 10_000 / CALLS < ALLOWED


def test_memory_is_flat_over_many_communicators(world):
    def make_communicators(number: int) -> None:
        for i in range(number):
            if i % 2:
                transport = ("shared", "rma", None, None)[i // 2 % 4]
                with pr.Communicator(world, transport=transport) as k:
                    k.allreduce(np.ones(10), algorithm="ring" if transport is None else "mesh")
            else:
                duplicate = world.Dup()
                pr.allreduce(np.ones(10), comm=duplicate, algorithm="naive")
                duplicate.Free()

    assert grow(make_communicators, COMMUNICATORS) * 1_000 / COMMUNICATORS < ALLOWED


@pytest.mark.parametrize("transport", ["shared", "rma"])
def test_row_21_memory_is_flat_over_many_windows_and_signals(world, transport):
    """200 alive at once, made and closed in every order, all in use; as many of each kind."""
    rng = np.random.default_rng(5)
    with pr.Communicator(world, transport=transport) as k:
        alive: list[pr.Window | pr.Signal] = []

        def make_windows(number: int) -> None:
            for i in range(number):
                if len(alive) >= 200:
                    for _ in range(2):
                        alive.pop(rng.integers(len(alive))).close()
                w = k.window((k.size, int(rng.integers(1, 2000))), np.int32)
                s = k.signal((k.size, 1 + i % 2) if i % 3 else k.size)
                w.local[...] = k.rank
                if s.size == k.size:
                    assert (w.reduce_scatter(s) == sum(range(k.size))).all()
                    assert not w.local[:, :0].size
                alive.extend((w, s))

        make_windows(100)
        chunks = sum(held.chunk.nbytes for held in k._arena._held)
        assert grow(make_windows, WINDOWS) * 5_000 / WINDOWS < ALLOWED
        assert sum(held.chunk.nbytes for held in k._arena._held) <= 2 * chunks
        assert len(alive) >= 199
