"""What an algorithm should take, by an alpha-beta-gamma model: for choosing where nothing has been measured. No MPI.

A message takes ``alpha + bytes * beta``, folding ``bytes * gamma``; ranks of a node share the node's link, so a round
takes as long as its busiest link: ``alpha + k * b * beta`` if k ranks of a node send b bytes each to other nodes at
once, and ``alpha_node + b * beta_node`` if nobody does. To that comes what a call and a round cost the processor.

The formulas for the classic algorithms are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005; that of the circulant one is Träff's, arXiv 2410.14234. The model ranks
algorithms; it does not predict a machine's times, least of all with its built-in figures. Measure with
``python -m pyreduce.tune``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np

from pyreduce.topology import Topology

__all__ = ["DEFAULT", "MODELLED", "Figures", "in_bytes", "in_seconds", "predict"]


@dataclass(frozen=True)
class Figures:
    """Seconds, and seconds a byte.

    The defaults: between nodes, Ethernet of 1 to 25 Gbit/s, the geometric mean of the two, through TCP; within a node,
    what ``benchmarks/results/compare-2-*.json`` and ``bench-32M-*.json`` show, rounded.

    Attributes
    ----------
    alpha, beta : float
        A message between nodes; a byte through a node's link.
    gamma : float
        Folding a byte.
    alpha_node, beta_node : float
        The same between two ranks of a node, through the MPI.
    beta_shared : float
        A byte copied or folded by the shared-memory engine.
    call, call_shared : float
        What a call costs before anything moves: of a program, or of ``shared``.
    round, message : float
        What a round, and every message after its first, costs the processor.
    wait_shared : float
        One rank's word for another through the engine.
    native_call : float
        What the MPI's own collective costs before anything moves.
    native_bytes : float
        How much longer the MPI's own takes for the same bytes: 1/0.6 on hosts with links of 1 Gbit/s, where a plain
        ring takes 1/0.9 of the wire's time.
    incast : float
        What share longer a link takes for every further rank that sends to it at once.
    changing : float
        How much longer it takes if the peer changes from round to round, so that no stream gets into its stride: 3 to
        15 % with 4 hosts at 1 Gbit/s.
    call_hierarchical : float
        What a call of ``hierarchical`` costs before anything moves.
    segment_bytes : int
        A block is moved in pieces of so many bytes, each with rounds of its own.
    """

    alpha: float = 30e-6
    beta: float = 1 / 625e6
    gamma: float = 0.15e-9
    alpha_node: float = 2e-6
    beta_node: float = 0.5e-9
    beta_shared: float = 0.1e-9
    call: float = 20e-6
    call_shared: float = 1e-6
    round: float = 2e-6
    message: float = 2e-6
    wait_shared: float = 0.3e-6
    native_call: float = 15e-6
    native_bytes: float = 1.5
    incast: float = 0.025
    changing: float = 1.05
    call_hierarchical: float = 100e-6
    segment_bytes: int = 1 << 20


DEFAULT = Figures()


def predict(
    algorithm: str, collective: str, nbytes: int, topology: Topology, figures: Figures = DEFAULT
) -> float | None:
    """Seconds that a call should take.

    Parameters
    ----------
    algorithm, collective : str
    nbytes : int
        Bytes S of the whole vector.
    topology : Topology
    figures : Figures, optional

    Returns
    -------
    float or None
        None if the algorithm has no formula here, or does not run on such nodes.
    """
    formula = _FORMULAS.get(algorithm)
    return None if formula is None else formula(collective, nbytes, topology, figures)


# ------------------------------------------------------------------------------------------------------------- rounds


def _crossing(topology: Topology, partner: Iterable[int]) -> int:
    """How many ranks of a node talk to other nodes at once, at most, if every rank r talks to ``partner[r]``."""
    node_of = np.array(topology.node_of)
    apart = node_of != node_of[np.fromiter(partner, int, topology.nranks)]
    return int(np.bincount(node_of[apart], minlength=1).max()) if apart.any() else 0


@lru_cache(maxsize=16)
def _crossings_by_shift(topology: Topology) -> tuple[int, ...]:
    """`_crossing` for rank r talking to rank r + shift, for every shift."""
    nranks = topology.nranks
    if topology.nnodes == 1:
        return (0,) * nranks
    ranks = np.arange(nranks)
    return tuple(_crossing(topology, (ranks + shift) % nranks) for shift in range(nranks))


@lru_cache(maxsize=16)
def _crossings_by_doubling(topology: Topology) -> tuple[int, ...]:
    """`_crossing` for every round of recursive doubling, handing in and out included."""
    nranks = topology.nranks
    doublings = nranks.bit_length() - 1
    pairs = nranks - (1 << doublings)  # of each of the first pairs one rank works for both
    working = [*range(0, 2 * pairs, 2), *range(2 * pairs, nranks)]
    crossings = []
    for distance in (1 << i for i in range(doublings)):
        partner = list(range(nranks))
        for index, rank in enumerate(working):
            partner[rank] = working[index ^ distance]
        crossings.append(_crossing(topology, partner))
    if pairs:
        paired = _crossing(topology, [rank ^ 1 if rank < 2 * pairs else rank for rank in range(nranks)])
        crossings = [paired, *crossings, paired]
    return tuple(crossings)


def _wire(crossing: int, nbytes: float, figures: Figures) -> float:
    """A round in which every rank sends so many bytes, `crossing` of a node's ranks to other nodes."""
    if crossing == 0:
        return figures.alpha_node + nbytes * figures.beta_node
    return figures.alpha + max(crossing * nbytes * figures.beta, nbytes * figures.beta_node)


def _crowd(pairs: int, figures: Figures) -> float:
    """How much longer a link takes if so many send through it at once."""
    return 1 + figures.incast * (pairs - 1)


def _segments(nbytes: float, nranks: int, figures: Figures) -> int:
    """Pieces that a block is moved in."""
    return max(1, ceil(nbytes / nranks / figures.segment_bytes))


def _halvings(nranks: int) -> Iterable[tuple[int, int]]:
    """The circulant's rounds: the shift, and the blocks sent."""
    hi = nranks
    while hi > 1:
        lo = (hi + 1) // 2
        yield lo, hi - lo
        hi = lo


def _phases(collective: str) -> int:
    """allreduce is reduce_scatter, then allgather."""
    return 2 if collective == "allreduce" else 1


def _folded(collective: str, nbytes: float, nranks: int, figures: Figures) -> float:
    """Folding every block once with all others: S (P-1)/P gamma."""
    return 0.0 if collective == "allgather" else nbytes * (nranks - 1) / nranks * figures.gamma


def _shifting(
    rounds: Iterable[tuple[int, int]],
    collective: str,
    nbytes: float,
    topology: Topology,
    figures: Figures,
    slower: float = 1.0,
) -> float:
    """A program whose rounds are ``(shift, blocks)``: every rank r sends so many blocks to rank r + shift.

    Between nodes its bytes take `slower` times as long.
    """
    if topology.nnodes == 1 or topology.nranks == 2:
        slower = 1.0
    nranks, crossings = topology.nranks, _crossings_by_shift(topology)
    block, segments = nbytes / nranks, _segments(nbytes, nranks, figures)
    one_way = sum(
        _wire(crossings[shift % nranks], slower * blocks * block, figures) + segments * figures.round
        for shift, blocks in rounds
    )
    return figures.call + _phases(collective) * one_way + _folded(collective, nbytes, nranks, figures)


# ----------------------------------------------------------------------------------------------------------- formulas


def _naive(collective: str, nbytes: int, topology: Topology, figures: Figures) -> float:
    """One round: everybody sends all it has, b bytes (S, for allgather S/P), to everybody.

    ``alpha + m (P-m) b beta + (P-1) b gamma`` with m ranks a node, or ``alpha_node + (P-1) b (beta_node + gamma)`` on
    one; P-1 messages a rank, and the crowd that `direct` has.
    """
    nranks = topology.nranks
    sent = nbytes / nranks if collective == "allgather" else float(nbytes)
    within = (nranks - 1) * sent * figures.beta_node
    if topology.nnodes == 1:
        wire = figures.alpha_node + within
    else:
        pairs = max(len(ranks) * (nranks - len(ranks)) for ranks in topology.nodes)
        wire = figures.alpha + max(_crowd(pairs, figures) * pairs * sent * figures.beta, within)
    folding = 0.0 if collective == "allgather" else (nranks - 1) * sent * figures.gamma
    rounds = _segments(nbytes, nranks, figures) * (figures.round + (nranks - 1) * figures.message)
    return figures.call + rounds + wire + folding


def _ring(collective: str, nbytes: int, topology: Topology, figures: Figures) -> float:
    """``(P-1) (alpha + k S/P beta) + S (P-1)/P gamma``, k ranks of a node having their neighbour on another."""
    rounds = ((1, 1) for _ in range(topology.nranks - 1))
    return _shifting(rounds, collective, nbytes, topology, figures)


def _circulant(collective: str, nbytes: int, topology: Topology, figures: Figures) -> float:
    """``ceil(log2 P) alpha + S (P-1)/P (beta + gamma)``: halving rounds, the first with half of the blocks."""
    return _shifting(_halvings(topology.nranks), collective, nbytes, topology, figures, figures.changing)


def _pairwise(collective: str, nbytes: int, topology: Topology, figures: Figures) -> float:
    """``(P-1) alpha + S (P-1)/P (beta + gamma)``: in round i every rank sends one block to the rank i away."""
    rounds = ((shift, 1) for shift in range(1, topology.nranks))
    return _shifting(rounds, collective, nbytes, topology, figures, figures.changing)


def _direct(collective: str, nbytes: int, topology: Topology, figures: Figures) -> float:
    """``alpha + m (P-m) S/P beta + S (P-1)/P gamma`` with m ranks a node: pairwise in one round, P-1 messages a rank.

    Where many send to one at once, some of it is dropped and sent again.
    """
    nranks, block = topology.nranks, nbytes / topology.nranks
    within = (nranks - 1) * block * figures.beta_node
    if topology.nnodes == 1:
        wire = figures.alpha_node + within
    else:
        pairs = max(len(ranks) * (nranks - len(ranks)) for ranks in topology.nodes)
        wire = figures.alpha + max(_crowd(pairs, figures) * pairs * block * figures.beta, within)
    rounds = _segments(nbytes, nranks, figures) * (figures.round + (nranks - 1) * figures.message)
    return figures.call + _phases(collective) * (wire + rounds) + _folded(collective, nbytes, nranks, figures)


def _recursive_doubling(collective: str, nbytes: int, topology: Topology, figures: Figures) -> float | None:
    """``log2 P (alpha + S (beta + gamma))``, and two rounds more if P is no power of two; allreduce only."""
    if collective != "allreduce":
        return None
    crossings = _crossings_by_doubling(topology)
    each = nbytes * figures.gamma + _segments(nbytes, topology.nranks, figures) * figures.round
    return figures.call + sum(_wire(crossing, nbytes, figures) + each for crossing in crossings)


def _mesh(collective: str, nbytes: int, topology: Topology, figures: Figures) -> float | None:
    """One node: S staged, a barrier, S (P-1)/P read and folded; for allreduce a second barrier, and S (P-1)/P read."""
    if topology.nnodes > 1:
        return None
    nranks, phases = topology.nranks, _phases(collective)
    staged = nbytes / nranks if collective == "allgather" else float(nbytes)
    staged += nbytes / nranks if collective == "allreduce" else 0.0
    moved = staged + phases * nbytes * (nranks - 1) / nranks
    steps = phases * (2 * figures.round + 2 * (nranks - 1) * figures.message)
    folding = _folded(collective, nbytes, nranks, figures)
    return figures.call + _segments(nbytes, nranks, figures) * steps + moved * figures.beta_shared + folding


def _engine(collective: str, nbytes: float, nranks: int, figures: Figures) -> float:
    """A word to every peer a phase, and every byte that is staged, folded or copied, by ``beta_shared``."""
    moved = {"reduce_scatter": 2 - 1 / nranks, "allgather": 1 + 1 / nranks, "allreduce": 3 - 2 / nranks}[collective]
    return _phases(collective) * nranks * figures.wait_shared + moved * nbytes * figures.beta_shared


def _shared(collective: str, nbytes: int, topology: Topology, figures: Figures) -> float | None:
    """One node: every rank stages S (P-1)/P, folds S, and for allreduce copies S (P-1)/P; allgather: S (1 + 1/P)."""
    if topology.nnodes > 1:
        return None
    return figures.call_shared + _engine(collective, nbytes, topology.nranks, figures)


def _hierarchical(collective: str, nbytes: int, topology: Topology, figures: Figures) -> float | None:
    """``shared`` within the nodes; between them, each of a node's m ranks runs the circulant on S/m among n nodes.

    The m lanes share the node's link: ``ceil(log2 n) alpha + S (n-1)/n beta`` a phase, as if one rank sent it all. An
    allreduce that recursive doubling brings there faster, ``log2 n (alpha + S beta)``, is run so.
    """
    lanes = min(len(ranks) for ranks in topology.nodes)
    crowd = max(len(ranks) for ranks in topology.nodes)
    nnodes = topology.nnodes
    if nnodes == 1 or crowd == 1:
        return None
    within = {"reduce_scatter": ["reduce_scatter"], "allgather": ["allgather"]}.get(
        collective, ["reduce_scatter", "allgather"]
    )
    seconds = figures.call_hierarchical + sum(_engine(part, nbytes, crowd, figures) for part in within)
    turns = _segments(nbytes / lanes, nnodes, figures) * figures.round
    between = _folded(collective, nbytes / lanes, nnodes, figures)
    for _, blocks in _halvings(nnodes):
        between += _phases(collective) * (figures.alpha + blocks / nnodes * nbytes * figures.beta + turns)
    if collective == "allreduce":
        doublings = len(_crossings_by_doubling(Topology.even(nnodes, nnodes)))
        once = figures.alpha + nbytes * figures.beta + nbytes / lanes * figures.gamma + turns
        between = min(between, doublings * once)
    return seconds + between


def _native(collective: str, nbytes: int, topology: Topology, figures: Figures) -> float:
    """The best of recursive doubling and Rabenseifner's (halving, then doubling), after we have agreed.

    ``ceil(log2 P) alpha + min(log2 P (alpha + S (beta + gamma)), 2 log2 P alpha + 2 S (P-1)/P beta + S (P-1)/P gamma)``
    for allreduce; of reduce_scatter and allgather one half of the latter. The agreement is `pyreduce.algorithms.native`
    's, in rounds like any program's; the MPI's own rounds come after it.
    """
    nranks, by_shift = topology.nranks, _crossings_by_shift(topology)
    agreeing, shift = 0.0, 1
    while shift < nranks:
        agreeing += _wire(by_shift[shift], 0, figures) + figures.round
        shift *= 2
    block, slow = nbytes / nranks, figures.native_bytes
    halving = sum(_wire(by_shift[lo % nranks], slow * blocks * block, figures) for lo, blocks in _halvings(nranks))
    seconds = _phases(collective) * halving + _folded(collective, nbytes, nranks, figures)
    if collective == "allreduce":
        doubling = sum(
            _wire(crossing, slow * nbytes, figures) + nbytes * figures.gamma
            for crossing in _crossings_by_doubling(topology)
        )
        seconds = min(seconds, doubling)
    return figures.call + agreeing + figures.native_call + seconds


_FORMULAS: dict[str, Callable[[str, int, Topology, Figures], float | None]] = {
    "naive": _naive,
    "ring": _ring,
    "direct": _direct,
    "circulant": _circulant,
    "pairwise": _pairwise,
    "recursive_doubling": _recursive_doubling,
    "mesh": _mesh,
    "shared": _shared,
    "hierarchical": _hierarchical,
    "native": _native,
}
MODELLED = tuple(_FORMULAS)


# -------------------------------------------------------------------------------------------------------------- words


def in_seconds(seconds: float) -> str:
    """A time in words.

    >>> in_seconds(1.234e-3), in_seconds(56e-6), in_seconds(2.5)
    ('1.2 ms', '56 us', '2.5 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * scale:
            return f"{_short(seconds / scale)} {unit}"
    return f"{_short(seconds * 1e6)} us"


def _short(number: float) -> str:
    return f"{number:.1f}" if number < 9.95 else f"{number:.0f}"


def in_bytes(nbytes: int) -> str:
    """A size in words.

    >>> in_bytes(8), in_bytes(65536), in_bytes(1 << 20), in_bytes(1000)
    ('8 B', '64 KiB', '1 MiB', '1000 B')
    """
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale and nbytes % scale == 0:
            return f"{nbytes // scale} {unit}"
    return f"{nbytes} B"
