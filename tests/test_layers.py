"""The layers of DESIGN.md, section 3: imports go down only, and few modules know MPI."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pyreduce

PACKAGE = Path(pyreduce.__file__).parent

# Top to bottom. Modules of one layer may import each other, and all below. A name stands for all that lies in it,
# but for what is named with its package.
LAYERS = [
    {"bench", "explain", "tune", "simulate.__main__", "commandline"},
    {"collectives"},
    {"communicator"},
    {"windows", "signals"},
    {"onesided"},
    {"requests"},
    {"plans"},
    {"pending"},
    {"progress", "memory"},
    {"selection"},
    {"algorithms"},
    {"peers", "launcher"},
    {"execute"},
    {"arena"},
    {"transports"},
    {"simulate", "verify", "trace"},
    {"profiles", "model"},
    {"libmpi"},
    {"programs", "topology", "calls", "blocks", "arguments", "arrays", "settings", "ops", "errors"},
    {"_core"},
]
# The list of algorithms verifies what users register; native is the one algorithm that runs instead of being run.
KNOW_MPI = {
    "bench",
    "collectives",
    "communicator",
    "launcher",
    "pending",
    "plans",
    "peers",
    "tune",
    "execute",
    "libmpi",
    "arena",
    "transports",
    "algorithms.native",
}
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def layer_of(module: str) -> int:
    for name in (".".join(module.split(".")[:2]), module.split(".")[0]):
        for number, names in enumerate(LAYERS):
            if name in names:
                return number
    raise AssertionError(f"pyreduce.{module} is in no layer: name it here and in DESIGN.md")


def imported_modules(path: Path) -> list[str]:
    """Full names of everything a file imports, anywhere in it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_go_down_only(path: Path) -> None:
    own = module_name(path)
    for name in imported_modules(path):
        if name.startswith("pyreduce.") and name.split(".")[1] != "__version__":
            other = name.removeprefix("pyreduce.")
            assert layer_of(other) >= layer_of(own), f"pyreduce.{own} imports pyreduce.{other}, which lies above it"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_few_modules_know_mpi(path: Path) -> None:
    own = module_name(path)
    if own in KNOW_MPI or own.split(".")[0] in KNOW_MPI:
        return
    assert not [name for name in imported_modules(path) if name.split(".")[0] == "mpi4py"]


def test_the_package_itself_imports_nothing_that_knows_mpi() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    for node in tree.body:  # what stands under TYPE_CHECKING is not run
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}".removeprefix("pyreduce.") for alias in node.names}
            assert not {name for name in names if name.split(".")[0] in KNOW_MPI | {"mpi4py"}}


def test_the_core_knows_neither_mpi_nor_python() -> None:
    sources = PACKAGE.parent / "csrc"
    if not sources.is_dir():
        pytest.skip("an installed package has no C sources")
    for path in [*sources.glob("*.c"), *sources.glob("*.h")]:
        included = [line for line in path.read_text().splitlines() if line.lstrip().startswith("#include")]
        assert not [line for line in included if "mpi.h" in line or "Python.h" in line], path
