"""The algorithms by name. One file an algorithm; each is a pure function ``(collective, nranks, rank) -> rounds``.

``native``, the MPI's own collective, ``shared``, the shared-memory engine, and ``hierarchical``, which is the engine
within nodes and a program between them, have no rounds of their own; they sit here behind the same names.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from dataclasses import replace as changed
from functools import lru_cache

from pyreduce.algorithms.circulant import circulant, pairwise
from pyreduce.algorithms.direct import direct
from pyreduce.algorithms.mesh import mesh
from pyreduce.algorithms.naive import naive
from pyreduce.algorithms.recursive_doubling import recursive_doubling
from pyreduce.algorithms.ring import ring
from pyreduce.programs import Program, RoundsFunction, build
from pyreduce.verify import verify, verify_all

__all__ = [
    "HIERARCHICAL",
    "NATIVE",
    "SHARED",
    "Algorithm",
    "folds_in_rank_order",
    "get",
    "has_no_program",
    "names",
    "register_algorithm",
    "registrations",
]

NATIVE, SHARED, HIERARCHICAL = "native", "shared", "hierarchical"
NO_PROGRAM = {
    NATIVE: "the MPI's own collective",
    SHARED: "the shared-memory engine (csrc/shared_engine.c)",
    HIERARCHICAL: "the shared-memory engine within nodes, and another algorithm between them",
}
VERIFIED_UP_TO = 16


@dataclass(frozen=True)
class Algorithm:
    """An algorithm that is a program.

    Attributes
    ----------
    name : str
    rounds : callable
        ``(collective, nranks, rank) -> rounds``.
    rank_order : bool
        Whether every block is folded in rank order 0, 1, ..., P-1.
    trusted : bool
        Whether the project's tests have verified it for many P; if not, a P above 16 is verified when first used.
    """

    name: str
    rounds: RoundsFunction
    rank_order: bool
    trusted: bool = False
    _verified: set[tuple[str, int]] = field(default_factory=set, compare=False, repr=False)

    def program(self, collective: str, nranks: int, rank: int) -> Program:
        """The program of one rank; `Unsupported` if the algorithm does not serve this collective or P."""
        if not self.trusted and nranks > VERIFIED_UP_TO and (collective, nranks) not in self._verified:
            verify(self.name, self.rounds, collective, nranks)
            self._verified.add((collective, nranks))
        program = _build(self, collective, nranks, rank)
        if self.trusted:  # ours name as many on every rank: tested
            return program
        window, cells = _symmetric(self, collective, nranks)
        return changed(program, window=window, cells=cells)

    def scratch(self, collective: str, nranks: int) -> int:
        """The most scratch slots that any rank's program has: by it all ranks cut a call into the same segments."""
        ranks = ROLES if self.trusted and nranks > len(ROLES) else range(nranks)
        return _most_scratch(self, collective, nranks, tuple(ranks))

    def fingerprint(self, collective: str, nranks: int) -> str:
        """A digest of all ranks' programs, equal on all ranks if they registered the same; of ours, nothing."""
        if self.trusted:
            return ""
        rounds = [program.rounds for program in self.programs(collective, nranks)]
        return f"{zlib.crc32(repr(rounds).encode()):08x}"

    def programs(self, collective: str, nranks: int) -> list[Program]:
        """The programs of all ranks, for `pyreduce.simulate`."""
        return [self.program(collective, nranks, rank) for rank in range(nranks)]


@lru_cache(maxsize=1024)
def _build(algorithm: Algorithm, collective: str, nranks: int, rank: int) -> Program:
    return build(algorithm.name, algorithm.rounds, collective, nranks, rank)


@lru_cache(maxsize=256)
def _most_scratch(algorithm: Algorithm, collective: str, nranks: int, ranks: tuple[int, ...]) -> int:
    return max(_build(algorithm, collective, nranks, rank % nranks).scratch for rank in ranks)


@lru_cache(maxsize=64)
def _symmetric(algorithm: Algorithm, collective: str, nranks: int) -> tuple[int, int]:
    """Window slots and cells that some rank's program names: every rank has as many, for they lie at one place."""
    programs = [_build(algorithm, collective, nranks, rank) for rank in range(nranks)]
    return max(program.window for program in programs), max(program.cells for program in programs)


ROLES = (0, 1, -1)  # ranks, among which of our own algorithms every rank's amount of scratch is found: tested

_ALGORITHMS: dict[str, Algorithm] = {
    "naive": Algorithm("naive", naive, rank_order=True, trusted=True),
    "ring": Algorithm("ring", ring, rank_order=False, trusted=True),
    "direct": Algorithm("direct", direct, rank_order=True, trusted=True),
    "circulant": Algorithm("circulant", circulant, rank_order=False, trusted=True),
    "pairwise": Algorithm("pairwise", pairwise, rank_order=True, trusted=True),
    "recursive_doubling": Algorithm("recursive_doubling", recursive_doubling, rank_order=False, trusted=True),
    "mesh": Algorithm("mesh", mesh, rank_order=True, trusted=True),
}


_registrations = 0


def registrations() -> int:
    """How many algorithms have been registered so far: plans made before the last may be out of date."""
    return _registrations


def names() -> list[str]:
    """Names that ``algorithm=`` takes."""
    return [*_ALGORITHMS, SHARED, HIERARCHICAL, NATIVE]


def has_no_program(name: str) -> bool:
    """Whether an algorithm is not made of rounds."""
    return name in NO_PROGRAM


def folds_in_rank_order(name: str) -> bool:
    """Whether every block is folded in rank order 0, 1, ..., P-1, whatever the sizes."""
    return name == SHARED or (name not in NO_PROGRAM and get(name).rank_order)


def get(name: str) -> Algorithm:
    """The algorithm of that name.

    Raises
    ------
    ValueError
        No such name; the message lists those there are.
    """
    try:
        return _ALGORITHMS[name]
    except (KeyError, TypeError):
        if isinstance(name, str) and name in NO_PROGRAM:
            raise ValueError(f"{name} is {NO_PROGRAM[name]}: it has no program to look at") from None
        raise ValueError(f"no algorithm is called {name!r}; there are {', '.join(names())}") from None


def register_algorithm(
    name: str, function: RoundsFunction | None = None, *, replace: bool = False
) -> Algorithm | Callable[[RoundsFunction], RoundsFunction]:
    """Add an algorithm of one's own, after verifying it for P = 1..16 and all three collectives.

    Every rank must register it before the first call that names it.

    Parameters
    ----------
    name : str
        What ``algorithm=`` will call it.
    function : callable, optional
        ``(collective, nranks, rank) -> rounds``: an iterable of rounds, each a sequence of `Send`, `Recv`, `Fold` and
        `Copy`. It raises `Unsupported` for a collective or number of ranks it does not serve. Without `function` this
        is a decorator.
    replace : bool
        Allow a name that is taken (not that of a built-in).

    Returns
    -------
    Algorithm
        Or, used as a decorator, the function itself.

    Raises
    ------
    AlgorithmError
        The program is wrong, or serves nothing; the message names P, the block, the rank and the contribution that is
        missing, doubled or never received, or who waits for whom.
    ValueError
        The name is taken.
    """
    if function is None:

        def decorate(decorated: RoundsFunction) -> RoundsFunction:
            register_algorithm(name, decorated, replace=replace)
            return decorated

        return decorate
    if not isinstance(name, str) or not name:
        raise TypeError(f"an algorithm's name is a non-empty string, got {name!r}")
    if not callable(function):
        raise TypeError(f"{name}: an algorithm is a function (collective, nranks, rank) -> rounds, got {function!r}")
    taken = _ALGORITHMS.get(name)
    if name in NO_PROGRAM or (taken is not None and (taken.trusted or not replace)):
        hint = "" if taken is None or taken.trusted else "; replace=True puts another in its place"
        raise ValueError(f"the name {name!r} is taken; there are {', '.join(names())}{hint}")
    reports = verify_all(name, function, range(1, VERIFIED_UP_TO + 1))
    algorithm = Algorithm(name, function, all(report.rank_order for report in reports.values()))
    _ALGORITHMS[name] = algorithm
    global _registrations
    _registrations += 1
    return algorithm
