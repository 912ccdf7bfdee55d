"""What the programs for people that need no MPI share on their command lines."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["parse_bytes", "reporting_by", "run_file"]


def parse_bytes(text: str) -> int:
    """``4096``, ``64K``, ``32M`` or ``1G``."""
    scale = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper())
    try:
        nbytes = int(text) if scale is None else int(text[:-1]) << scale
    except ValueError:
        nbytes = -1
    if not 0 <= nbytes < 1 << 62:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes: 4096, 64K, 32M or 1G")
    return nbytes


def run_file(path: str) -> None:
    """Run a file that registers algorithms; it may import what lies beside it, as when Python runs it."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    runpy.run_path(path)


@contextmanager
def reporting_by(parser: argparse.ArgumentParser, load: str | None) -> Iterator[None]:
    """Run the file to load, if there is one, and what the context holds; what is wrong is an error of the parser.

    Whoever reads the output may have gone before its end.
    """
    try:
        if load:
            try:
                run_file(load)
            except (ImportError, SyntaxError) as error:
                parser.error(f"--load {load}: {error}")
        yield
    except BrokenPipeError:
        sys.stderr.close()
    except (ValueError, OSError) as error:
        parser.error(str(error))
