"""What the command line says."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from pyreduce import algorithms, ops
from pyreduce.bench.cases import CASES
from pyreduce.bench.workloads import BUCKET, MODELS, STEPS, Workload, make_workload

__all__ = ["AUTO", "Options", "UsageError", "format_size", "parse_size", "read_options", "sizes"]

AUTO = "auto"  # what the library chooses
SMALLEST, END, FACTOR = 256, 16 << 20, 16
REPLAYS = 5  # timed steps of a workload
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class UsageError(Exception):
    """The command line is wrong; the message says how. Its first argument is the whole text to print."""


@dataclass(frozen=True)
class Options:
    """A run's parameters, the same on every rank.

    Attributes
    ----------
    sizes : tuple of int
        Bytes of the whole vector, whole elements.
    algorithms : tuple of str
        Without ``native``, which is always measured.
    iters : int or None
        Timed calls of each algorithm; None to fill a time budget.
    warmup : int
    rotate : int
        Pairs of buffers that successive calls take in turn.
    workload : Workload or None
        The step to replay, instead of measuring `collectives` on `sizes`.
    """

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    algorithms: tuple[str, ...]
    op: str
    dtype: str
    iters: int | None
    warmup: int
    sync: str
    rotate: int
    json: str | None
    plot: str | None
    workload: Workload | None = None


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing and exiting, so that one rank can do that for all."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.format_usage()}{self.prog}: error: {message}")


def read_options(argv: Sequence[str] | None = None) -> Options:
    """Parse the command line; `UsageError` if it is wrong, `SystemExit` after ``--help``."""
    parser = _make_parser()
    given = parser.parse_args(argv)
    _check_fit(parser, given)
    op = given.op or ("AVG" if given.workload else "SUM")
    collectives = _collect(given.collective) or tuple(STEPS if given.workload else CASES)
    dtype = _check_dtype(parser, given.dtype)
    if collectives != ("allgather",):
        try:
            ops.kernel(ops.OPS[op], dtype)
        except TypeError as error:
            parser.error(str(error))
    workload = None
    if given.workload:
        workload = make_workload(given.workload, dtype.itemsize, given.bucket, given.scale or 1)
    usual = (AUTO,) if workload else (AUTO, "ring")
    return Options(
        collectives=collectives,
        sizes=() if workload else _read_sizes(parser, given, dtype.itemsize),
        algorithms=tuple(n for n in _collect(given.algorithm) or usual if n != algorithms.NATIVE),
        op=op,
        dtype=given.dtype,
        iters=given.iters or (REPLAYS if workload else None),
        warmup=given.warmup,
        sync=given.sync,
        rotate=given.rotate,
        json=given.json,
        plot=given.plot,
        workload=workload,
    )


def _check_fit(parser: _Parser, given: argparse.Namespace) -> None:
    """Some options are for workloads only, some for all else."""
    others = ("bucket", "scale") if given.workload is None else ("begin", "end", "factor", "collective", "plot")
    for name in others:
        if getattr(given, name) is not None:
            parser.error(f"--{name} {'needs' if given.workload is None else 'does not go with'} --workload")


def _read_sizes(parser: _Parser, given: argparse.Namespace, itemsize: int) -> tuple[int, ...]:
    factor = given.factor or FACTOR
    end = max(END, given.begin or 0) if given.end is None else given.end
    begin = _find_begin(end, factor) if given.begin is None else given.begin
    if begin > end:
        parser.error(f"--begin {format_size(begin)} is more than --end {format_size(end)}")
    return sizes(begin, end, factor, itemsize)


def _make_parser() -> _Parser:
    parser = _Parser(
        prog="python -m pyreduce.bench",
        description="Measure pyreduce's collectives against the MPI's own, side by side, and check every result.",
        epilog="SIZE is in bytes, of the whole vector: 8, 64K, 32M, 1G. Exit status: 0 if all results are right, "
        "1 if one is wrong or a call failed, 2 for wrong arguments. Under MPI: mpirun -n 4 python -m pyreduce.bench",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-b", "--begin", type=parse_size, metavar="SIZE",
        help=f"smallest vector (default: by the factor down from the largest, to {SMALLEST} bytes or so)")  # fmt: skip
    add("-e", "--end", type=parse_size, metavar="SIZE", help=f"largest vector (default {format_size(END)})")
    add("-f", "--factor", type=_at_least(2), metavar="N", help=f"size by size (default {FACTOR})")
    add("--collective", action="append", type=_names("collective", CASES), metavar="NAME[,NAME]",
        help=f"default: {', '.join(CASES)}")  # fmt: skip
    add("--algorithm", action="append", type=_names("algorithm", [AUTO, *algorithms.names()]), metavar="NAME[,NAME]",
        help=f"{AUTO} (what the library chooses), {', '.join(algorithms.names())}; default: {AUTO},ring. "
        "native, the MPI's own collective, is always there to compare with")  # fmt: skip
    add("--op", type=str.upper, choices=list(ops.OPS), metavar="OP",
        help=f"{', '.join(ops.OPS)}; default SUM, for a workload AVG")  # fmt: skip
    add("-d", "--dtype", choices=list(ops.DTYPES), default="float32", metavar="DTYPE",
        help=f"{', '.join(ops.DTYPES)}; default float32")  # fmt: skip
    add("--iters", type=_at_least(1), metavar="N", help="timed calls a row (default: as many as fit a time budget)")
    add("--warmup", type=_at_least(0), default=1, metavar="N", help="untimed calls a row (default %(default)s)")
    add("--sync", choices=["barrier", "none"], default="barrier",
        help="a barrier before every timed call (default), so that all ranks start together, or none: calls run "
        "back to back. Do not compare times of the one with times of the other")  # fmt: skip
    add("--rotate", type=_at_least(1), default=1, metavar="N",
        help="take N pairs of buffers in turn (default %(default)s): one may stay in cache")  # fmt: skip
    add("--workload", choices=list(MODELS), metavar="MODEL",
        help=f"instead, replay how a training step synchronises all gradients of a model: {', '.join(MODELS)}. "
        f"By default {REPLAYS} timed steps by {AUTO} and by native")  # fmt: skip
    add("--bucket", type=parse_size, metavar="SIZE",
        help=f"of a workload: the limit of a bucket (default {format_size(BUCKET)}, by the scale)")  # fmt: skip
    add("--scale", type=_at_least(1), metavar="N", help="of a workload: make tensors N times shorter (default 1)")
    add("--json", metavar="FILE", help="write machine, parameters and rows")
    add("--plot", metavar="FILE.png", help="draw bus bandwidth against size (needs pyreduce[bench])")
    return parser


def parse_size(text: str) -> int:
    """Bytes: a whole number, or one with K, M, G or T for powers of 1024.

    >>> parse_size("64K"), parse_size("1g"), parse_size("32MiB")
    (65536, 1073741824, 33554432)
    """
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write bytes as 8, 64K, 32M or 1G")
    return int(match[1]) * UNITS[match[2].upper()]


def format_size(nbytes: int) -> str:
    """The inverse of `parse_size`, in the largest unit that divides.

    >>> format_size(65536), format_size(1000)
    ('64K', '1000')
    """
    for unit in ("T", "G", "M", "K"):
        if nbytes and nbytes % UNITS[unit] == 0:
            return f"{nbytes // UNITS[unit]}{unit}"
    return str(nbytes)


def _find_begin(end: int, factor: int) -> int:
    """The smallest size from which the factor leads to `end`, of no less than `SMALLEST` bytes."""
    begin = end
    while begin >= SMALLEST * factor:
        begin //= factor
    return begin


def sizes(begin: int, end: int, factor: int, itemsize: int) -> tuple[int, ...]:
    """Every size from `begin` to `end` by `factor`, cut to whole elements; after 0 comes one element."""
    found: list[int] = []
    size = begin
    while size <= end:
        found.append(size // itemsize * itemsize)
        size = size * factor if size else itemsize
    return tuple(dict.fromkeys(found))


def _at_least(least: int) -> Any:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return number


def _names(what: str, known: Iterable[str]) -> Any:
    def names(text: str) -> list[str]:
        found = [name.strip() for name in text.split(",") if name.strip()]
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"no {what} is called {name!r}; there are {', '.join(known)}")
        return found

    return names


def _collect(lists: list[list[str]] | None) -> tuple[str, ...]:
    """What a repeatable option was given, each name once."""
    return tuple(dict.fromkeys(name for names in lists or [] for name in names))


def _check_dtype(parser: _Parser, name: str) -> np.dtype[Any]:
    try:
        return as_dtype(name)
    except ImportError:
        parser.error(f"--dtype {name} needs ml_dtypes: pip install ml_dtypes")


def as_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a name in `pyreduce.ops.DTYPES`."""
    if name == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name)
