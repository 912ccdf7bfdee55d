"""Time the fold kernels against NumPy: `python benchmarks/kernels.py [--quick] [--json FILE]`.

Both sides run in this process on the same arrays, taking turns, and each turn gives one ratio; the table shows the
median of the ratios, so that a change of the machine's speed hits both sides alike. Our side goes through
`pyreduce.ops.fold`, as the library does, call overhead included. A ratio above 1 means that pyreduce is faster. Times
never make the program fail: the last column says OK or short of the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pyreduce import ops

KIB, MIB = 1 << 10, 1 << 20
FLOAT_SIZES = [KIB * 4**i for i in range(9)]  # 1 KiB .. 64 MiB
NARROW_SIZES = [64 * KIB * 4**i for i in range(5)]  # 64 KiB .. 16 MiB
TURN = 1e-3  # seconds a side runs per turn, at least one call


@dataclass
class Row:
    what: str
    bytes: int
    ours_us: float
    numpy_us: float
    ratio: float
    bound: float

    @property
    def verdict(self) -> str:
        return "OK" if self.ratio >= self.bound else "short"


def make_arrays(dtype: np.dtype[Any], nbytes: int, count: int) -> list[np.ndarray]:
    """Arrays of distinct values (every page touched), and one more for the result."""
    rng = np.random.default_rng(nbytes)
    n = nbytes // dtype.itemsize
    return [rng.uniform(1, 2, n).astype(dtype) for _ in range(count)] + [np.ones(n, dtype)]


def time_calls(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def compare(ours: Callable[[], object], theirs: Callable[[], object], turns: int) -> tuple[float, float, float]:
    """Return the median seconds of both sides, and the median of the turns' ratios theirs / ours."""
    ours(), theirs()
    count = max(1, int(TURN / max(time_calls(theirs, 3), 1e-7)))
    pairs = []
    for turn in range(turns):
        if turn % 2:
            second = time_calls(theirs, count)
            first = time_calls(ours, count)
        else:
            first = time_calls(ours, count)
            second = time_calls(theirs, count)
        pairs.append((first, second))
    times = [statistics.median(side) for side in zip(*pairs, strict=True)]
    return times[0], times[1], statistics.median(second / first for first, second in pairs)


def measure_sum(dtype: Any, nbytes: int, k: int, bound: float, turns: int) -> Row:
    """SUM of k arrays, one fold against k - 1 calls of numpy.add into the same result."""
    dtype = np.dtype(dtype)
    *sources, out = make_arrays(dtype, nbytes, k)
    kernel = ops.kernel(ops.SUM, dtype)
    addresses = [a.ctypes.data for a in sources]
    n, to = out.size, out.ctypes.data

    def ours() -> None:
        ops.fold(kernel, n, to, addresses)

    if k == 2:
        a, b = sources

        def theirs() -> None:
            np.add(a, b, out=out)
    else:

        def theirs() -> None:
            np.add(sources[0], sources[1], out=out)
            for source in sources[2:]:
                np.add(out, source, out=out)

    mine, other, ratio = compare(ours, theirs, turns)
    return Row(f"{dtype.name} SUM k={k}", nbytes, mine * 1e6, other * 1e6, ratio, bound)


def measure_all(quick: bool, report: Callable[[Row], None]) -> list[Row]:
    turns = 11 if quick else 41
    cases: list[tuple[Any, int, int, float]] = []
    for dtype in (np.float32, np.float64):
        cases += [(dtype, nbytes, 2, 0.95) for nbytes in (FLOAT_SIZES[::4] if quick else FLOAT_SIZES)]
    cases += [(dtype, 64 * MIB, 4, 1.5) for dtype in (np.float32, np.float64)]
    for dtype in (np.float16, ml_dtypes.bfloat16):
        cases += [(dtype, nbytes, 2, 5.0) for nbytes in (NARROW_SIZES[::2] if quick else NARROW_SIZES)]
    rows = []
    for case in cases:
        rows.append(measure_sum(*case, turns))
        report(rows[-1])
    return rows


def name_cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def describe_machine() -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpu": name_cpu(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "ml_dtypes": ml_dtypes.__version__,
        "isa": ops.isa(),
    }


def format_bytes(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def print_row(row: Row) -> None:
    times = f"{row.ours_us:12.2f} {row.numpy_us:12.2f}"
    ratio = f"{row.ratio:8.2f} {row.bound:8.2f}"
    print(f"{row.what:20} {format_bytes(row.bytes):>8} {times} {ratio}  {row.verdict}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and turns: a few seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the machine's description")
    options = parser.parse_args(arguments)
    machine = describe_machine()
    for key, value in machine.items():
        print(f"# {key}: {value}")
    print("# bytes are those of one array; ratio = NumPy's time / pyreduce's, median over turns")
    print(f"{'':20} {'bytes':>8} {'pyreduce us':>12} {'numpy us':>12} {'ratio':>8} {'bound':>8}")
    rows = measure_all(options.quick, print_row)
    short = sum(row.verdict != "OK" for row in rows)
    print(f"# {len(rows) - short} of {len(rows)} within bounds")
    if options.json:
        table = [{**asdict(row), "verdict": row.verdict} for row in rows]
        options.json.write_text(json.dumps({"machine": machine, "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
