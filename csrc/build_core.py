"""Build pyreduce._core from csrc with cffi: the only file that knows cffi.

core.h is both the C header and the cdef; the lines that start with ``#`` are for the compiler alone.
"""

import os
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
SOURCES = [
    "kernels.c",
    "copy.c",
    "fold.c",
    "cells.c",
    "rounds.c",
    "shared_engine.c",
    "shared_pieces.c",
    "shared_door.c",
]

# The rounding of every kernel is part of its contract: no fused multiply-add, no reordering, and no -march.
FLAGS = ["-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]

cdef = "\n".join(line for line in (HERE / "core.h").read_text().splitlines() if not line.startswith("#"))

ffibuilder = FFI()
ffibuilder.cdef(cdef)
ffibuilder.set_source(
    "pyreduce._core",
    '#include "core.h"',
    # setuptools wants paths relative to setup.py
    sources=[os.path.relpath(HERE / name, HERE.parent) for name in SOURCES],
    include_dirs=[os.path.relpath(HERE, HERE.parent)],
    depends=[os.path.relpath(path, HERE.parent) for path in sorted(HERE.glob("*.h"))],
    extra_compile_args=FLAGS,
)
