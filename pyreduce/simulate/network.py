"""What a network and its ranks cost, in three numbers, and what no algorithm can go below. Pure arithmetic.

The rules that both ways of computing a time (`events`, `symmetric`) follow are told in `events`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyreduce.blocks import partition
from pyreduce.topology import Topology

__all__ = ["FOLD", "MESSAGE", "Blocks", "Hop", "Network", "lower_bound", "uniform", "uniforms"]

MESSAGE, FOLD = "message", "fold"
_MASK = (1 << 64) - 1
_SEED, _RANK, _NUMBER = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class Network:
    """What messages and folds take.

    Parameters
    ----------
    alpha : float
        Seconds a message, whatever its size.
    beta, gamma : float
        Seconds a byte of a message, and of a fold.
    topology : Topology, optional
        Which ranks share a node; default: every rank has a network link of its own, and there is one kind of message.
    alpha_node, beta_node : float, optional
        The same between ranks of one node; default as between nodes.
    jitter : float
        A message takes up to this fraction longer, at random.
    seed : int
        Of the random numbers: equal seeds give equal times.
    slow : mapping of int to float
        By what factor the alpha, beta and gamma of some ranks are larger. Of a message, the larger factor of its two
        ranks counts.
    """

    alpha: float
    beta: float
    gamma: float = 0.0
    topology: Topology | None = None
    alpha_node: float | None = None
    beta_node: float | None = None
    jitter: float = 0.0
    seed: int = 0
    slow: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        for word in ("alpha", "beta", "gamma", "alpha_node", "beta_node", "jitter"):
            value = getattr(self, word)
            if value is not None and not (isfinite(value) and value >= 0):
                raise ValueError(f"{word} is {value}; needs a number from 0 on")
        for rank, factor in self.slow.items():
            if not (isfinite(factor) and factor > 0):
                raise ValueError(f"the factor of rank {rank} is {factor}; needs a number above 0")

    def check(self, nranks: int) -> None:
        """`ValueError` if it is not one for so many ranks."""
        if self.topology is not None and self.topology.nranks != nranks:
            raise ValueError(f"the nodes are those of {self.topology.nranks} ranks; there are {nranks}")
        for rank in self.slow:
            if not 0 <= rank < nranks:
                raise ValueError(f"a factor is given for rank {rank}; ranks are 0..{nranks - 1}")

    @cached_property
    def within(self) -> tuple[float, float]:
        """Alpha and beta between ranks of one node."""
        return (
            self.alpha if self.alpha_node is None else self.alpha_node,
            self.beta if self.beta_node is None else self.beta_node,
        )

    def rates(self, source: int, target: int) -> tuple[float, float]:
        """Alpha and beta from one rank to another, before anybody's slowness."""
        if self.topology is None or self.topology.node_of[source] != self.topology.node_of[target]:
            return self.alpha, self.beta
        return self.within

    def factor(self, source: int, target: int) -> float:
        """By how much the slower of two ranks is slow."""
        return max(self.slow.get(source, 1.0), self.slow.get(target, 1.0)) if self.slow else 1.0

    def seconds(self, source: int, target: int, nbytes: int, number: int) -> float:
        """What a message takes; `number` counts the messages of `source`."""
        alpha, beta = self.rates(source, target)
        taken = alpha + nbytes * beta
        if self.slow:
            taken *= self.factor(source, target)
        if self.jitter:
            taken *= 1.0 + self.jitter * uniform(self.seed, source, number)
        return taken

    def parts(self, source: int, target: int, nbytes: int, number: int) -> tuple[float, float]:
        """How much of a message's time is alpha's and beta's; `number` counts the messages of `source`."""
        alpha, beta = self.rates(source, target)
        factor = self.factor(source, target)
        if self.jitter:
            factor *= 1.0 + self.jitter * uniform(self.seed, source, number)
        return alpha * factor, nbytes * beta * factor


def uniform(seed: int, rank: int, number: int) -> float:
    """A random number from 0 to 1 (without 1) that depends on its arguments alone."""
    x = (seed * _SEED + rank * _RANK + number * _NUMBER + _SEED) & _MASK
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return float((x ^ (x >> 31)) >> 11) * 2.0**-53


def uniforms(seed: int, nranks: int, number: int) -> NDArray[np.float64]:
    """`uniform` of all ranks."""
    start = np.uint64((seed * _SEED + number * _NUMBER + _SEED) & _MASK)
    x = np.arange(nranks, dtype=np.uint64) * np.uint64(_RANK) + start
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    numbers: NDArray[np.float64] = ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


class Hop(NamedTuple):
    """One thing that took time: a message from `rank` to `peer`, or a fold on `rank` (`peer` is then `rank` too)."""

    kind: str
    rank: int
    peer: int
    round: int
    nbytes: int
    start: float
    end: float
    alpha: float = 0.0
    beta: float = 0.0
    gamma: float = 0.0


class Blocks:
    """Bytes of runs of blocks: `nbytes` cut into `nranks` blocks as `pyreduce.blocks.partition`, each into segments."""

    def __init__(self, nbytes: int, nranks: int, segments: int = 1) -> None:
        self.nranks = nranks
        self.share, self.extra = divmod(nbytes, nranks)  # the first `extra` blocks have a byte more
        self.small, self.large = partition(self.share, segments), partition(self.share + 1, segments)

    def nbytes(self, first: int, count: int, segment: int = 0) -> int:
        """Bytes of a segment of `count` blocks from `first` on, which wrap."""
        large = self._large(first + count) - self._large(first) if self.extra else 0
        return large * self.large[segment] + (count - large) * self.small[segment]

    def _large(self, end: int) -> int:
        around, rest = divmod(end, self.nranks)
        return around * self.extra + min(rest, self.extra)


def lower_bound(collective: str, nranks: int, nbytes: int, network: Network) -> float:
    """What a collective takes at least, if nothing overlaps: rounds, bytes and folds, each as few as possible.

    - ``alpha * ceil(log2 P)``: what is known on k ranks is known on 2k at most after one more message. With nodes it is
      the larger of ``ceil(log2 N)`` messages between N nodes and ``ceil(log2 P)`` of the cheaper kind.
    - ``beta * S (P-1)/P``: a reduce_scatter sends, and an allgather receives, so many bytes on every rank; an allreduce
      does twice that (in no fewer rounds than one of them). With nodes, a node's link carries all that is not the
      node's own, ``S (N-1)/N`` if they are alike (twice that for allreduce), and the larger of the two counts.
    - ``gamma * S (P-1)/P``, but not of an allgather.

    An algorithm that is optimal in all three at once takes their sum (reduce_scatter and allgather have one:
    ``circulant``). Segments that fold while others travel can go below it, but not below the largest of the three.
    """
    if nranks == 1:
        return 0.0
    times = 2 if collective == "allreduce" else 1
    most = nbytes * (nranks - 1) / nranks
    alpha, beta = network.within if network.topology is not None else (network.alpha, network.beta)
    alpha, beta = min(alpha, network.alpha), min(beta, network.beta)
    rounds, moving = alpha * (nranks - 1).bit_length(), beta * times * most
    if network.topology is not None and network.topology.nnodes > 1:
        blocks = Blocks(nbytes, nranks)
        own: float = min(sum(blocks.nbytes(rank, 1) for rank in ranks) for ranks in network.topology.nodes)
        if collective == "allreduce":  # nobody says whose blocks are whose
            own = nbytes / network.topology.nnodes
        rounds = max(rounds, network.alpha * (network.topology.nnodes - 1).bit_length())
        moving = max(moving, network.beta * times * (nbytes - own))
    elif network.topology is not None:
        rounds, moving = network.within[0] * (nranks - 1).bit_length(), network.within[1] * times * most
    return rounds + moving + (0.0 if collective == "allgather" else network.gamma * most)
