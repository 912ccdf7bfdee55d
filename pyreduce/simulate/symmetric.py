"""The time of programs that are the same on every rank, up to rotation: one step over arrays of ranks a round.

Rank r's program is rank 0's with r added to every peer and block (mod P): rings, skips, pairwise exchange. Then round k
of a rank talks with round k of its peers, and if a rank has one message each way in a round, its ports are free when
the round begins. So a round is ``start = max(begin, peer's begin)`` on arrays, and its times are those of `events`, bit
for bit. Where moreover nothing tells the ranks apart (equal blocks, no jitter, nobody slow, one kind of message), all
ranks have one time, and so have programs of many messages a round: i-th messages start together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyreduce.programs import Copy, Fold, Recv, RoundsFunction, Send
from pyreduce.simulate.network import FOLD, MESSAGE, Blocks, Hop, Network, uniforms

__all__ = ["Pattern", "Result", "find", "play"]

ALL_STEPS = 400_000  # of all ranks together: so many are compared completely
SAMPLED_STEPS = 300_000  # of the ranks that are compared if there are more
LEAST_RANKS = 12  # that are compared in any case
KEPT = 32  # arrays of alphas and betas by distance

Times = NDArray[np.float64]


class Round(NamedTuple):
    """A round of rank 0: sends and receives are (peer, first block, count); folds (first block, count, operations)."""

    sends: tuple[tuple[int, int, int], ...]
    recvs: tuple[tuple[int, int, int], ...]
    folds: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Pattern:
    """What all ranks do, told for rank 0; `compared` says how many ranks' programs were looked at."""

    rounds: tuple[Round, ...]
    nranks: int
    compared: int


@dataclass
class Result:
    """When every rank has finished, and what made the last one late."""

    finish: Times
    critical: tuple[Hop, ...]


def relative_rounds(
    function: RoundsFunction, collective: str, nranks: int, rank: int, equal: bool
) -> list[Round] | None:
    """A rank's rounds as seen from it; None if it has one-sided steps. Where blocks are equal, only counts matter."""

    def run(first: int, count: int) -> tuple[int, int]:
        return (0 if equal or count in (0, nranks) else (first - rank) % nranks), count

    rounds = []
    for steps in function(collective, nranks, rank):
        sends, recvs, folds = [], [], []
        for step in steps:
            if isinstance(step, Send):
                sends.append(((step.peer - rank) % nranks, *run(step.src.first, step.src.count)))
            elif isinstance(step, Recv):
                recvs.append(((step.peer - rank) % nranks, *run(step.dst.first, step.dst.count)))
            elif isinstance(step, Fold):
                folds.append((*run(step.dst.first, step.dst.count), len(step.srcs) - 1))
            elif not isinstance(step, Copy):
                return None
        rounds.append(Round(tuple(sends), tuple(recvs), tuple(folds)))
    return rounds


@lru_cache(maxsize=16)
def find(function: RoundsFunction, collective: str, nranks: int, equal: bool) -> Pattern | None:
    """The pattern of an algorithm; None if it has none.

    All ranks are compared with rank 0 if they have few steps together; else the first ones, the last ones, those
    around powers of two and halves, and some at random.
    """
    own = relative_rounds(function, collective, nranks, 0, equal)
    if own is None or not all(_pairs_up(steps, nranks) for steps in own):
        return None
    weight = sum(len(steps.sends) + len(steps.recvs) + len(steps.folds) + 1 for steps in own) or 1
    ranks = _to_compare(nranks, weight)
    if any(relative_rounds(function, collective, nranks, rank, equal) != own for rank in ranks):
        return None
    return Pattern(tuple(own), nranks, len(ranks) + 1)


def _pairs_up(steps: Round, nranks: int) -> bool:
    """Whether the i-th message a rank sends is the one that its peer receives as i-th from so far away."""
    seen: dict[int, list[tuple[int, int]]] = {}
    for peer, first, count in steps.sends:
        seen.setdefault(peer, []).append((first, count))
    for peer, first, count in steps.recvs:
        distance = -peer % nranks
        waiting = seen.get(distance)
        if not waiting:
            return False
        sent, sent_count = waiting.pop(0)
        # What rank 0 sends from block `sent` on, rank -distance sends from `sent - distance` on.
        same = count in (0, nranks) or sent == first == 0 or (sent - distance) % nranks == first
        if count != sent_count or not same:
            return False
    return not any(seen.values())


def _to_compare(nranks: int, weight: int) -> list[int]:
    if nranks * weight <= ALL_STEPS:
        return list(range(1, nranks))
    many = min(max(SAMPLED_STEPS // weight, LEAST_RANKS), nranks - 1)
    telling = [1, nranks - 1, nranks // 2, 2, nranks - 2, nranks // 2 - 1, nranks // 2 + 1, nranks // 3]
    telling += [power + more for power in (4, 16, 64, 256, 1024, 4096) for more in (0, -1)]
    telling += [int(rank) for rank in np.random.default_rng(nranks).permutation(nranks)[:many]]
    chosen = list(dict.fromkeys(rank for rank in telling if 0 < rank < nranks))
    return chosen if many >= len(chosen) else chosen[: many // 2] + chosen[many // 2 - many :]


def alike(blocks: Blocks, network: Network, pattern: Pattern) -> bool:
    """Whether nothing tells the ranks apart, so that all have one time."""
    nodes = network.topology
    one_kind = nodes is None or nodes.nnodes in (1, nodes.nranks)
    whole = all(
        run[1] in (0, pattern.nranks)
        for steps in pattern.rounds
        for run in (*(send[1:] for send in steps.sends), *steps.folds)
    )
    return one_kind and not network.jitter and not network.slow and (blocks.extra == 0 or whole)


def links_free(pattern: Pattern, network: Network) -> bool:
    """Whether no node has two ranks that send to other nodes, or two that receive from them: no link is shared."""
    nodes = network.topology
    if nodes is None or nodes.nnodes in (1, nodes.nranks):
        return True
    node_of = np.array(nodes.node_of)
    out, into = (np.zeros(nodes.nranks, dtype=bool) for _ in range(2))
    for distance in {peer for steps in pattern.rounds for peer, _, _ in steps.sends}:
        leaves = node_of != np.roll(node_of, -distance)
        out |= leaves
        into |= np.roll(leaves, distance)
    return all(np.bincount(node_of[ranks]).max(initial=0) <= 1 for ranks in (out, into))


def play(pattern: Pattern, blocks: Blocks, network: Network) -> Result | None:
    """The times; None if a round's messages may meet at a port or link, which `events` has to sort out."""
    if alike(blocks, network, pattern):
        return _play_one(pattern, blocks, network)
    if any(len(steps.sends) > 1 for steps in pattern.rounds) or not links_free(pattern, network):
        return None
    return _Arrays(pattern, blocks, network).play()


def _play_one(pattern: Pattern, blocks: Blocks, network: Network) -> Result:
    """All ranks are alike: one clock."""
    now, hops = 0.0, []
    alpha, beta = network.rates(0, 1) if pattern.nranks > 1 else (0.0, 0.0)
    for number, steps in enumerate(pattern.rounds, start=1):
        for peer, first, count in steps.sends:
            nbytes = blocks.nbytes(first, count)
            start, now = now, now + (alpha + nbytes * beta)
            hops.append(Hop(MESSAGE, -peer % pattern.nranks, 0, number, nbytes, start, now, alpha, nbytes * beta))
        nbytes = sum(blocks.nbytes(first, count) * times for first, count, times in steps.folds)
        if nbytes and network.gamma:
            start, now = now, now + nbytes * network.gamma
            hops.append(Hop(FOLD, 0, 0, number, nbytes, start, now, gamma=nbytes * network.gamma))
    # Every message comes from a rank that is as late: the chain is told walking back around.
    rank, chain = pattern.nranks - 1, []
    for hop in reversed(hops):
        source = (rank + hop.rank) % pattern.nranks
        chain.append(hop._replace(rank=source if hop.kind == MESSAGE else rank, peer=rank))
        rank = source if hop.kind == MESSAGE else rank
    return Result(np.full(pattern.nranks, now), tuple(reversed(chain)))


def _rolled(x: Any, distance: int) -> Any:
    """What the rank `distance` further on has."""
    return np.concatenate((x[distance:], x[:distance])) if isinstance(x, np.ndarray) else x


class _Arrays:
    """A clock a rank."""

    def __init__(self, pattern: Pattern, blocks: Blocks, network: Network) -> None:
        self.pattern, self.blocks, self.network = pattern, blocks, network
        self.nranks = nranks = pattern.nranks
        ends = np.arange(3 * nranks + 1)
        self.large = ends // nranks * blocks.extra + np.minimum(ends % nranks, blocks.extra)
        self.slow = np.array([network.slow.get(rank, 1.0) for rank in range(nranks)]) if network.slow else None
        self.node_of = np.array(network.topology.node_of) if network.topology is not None else None
        self.rates: dict[int, tuple[Any, Any, Any]] = {}
        self.sent = 0

    def play(self) -> Result:
        """From the first round to the last, then back along what was waited for."""
        begin = np.zeros(self.nranks)
        late: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []
        for steps in self.pattern.rounds:
            fold = self.fold_seconds(steps.folds)
            if not steps.sends:
                begin = begin + fold
                late.append((np.zeros(0, np.uint8), np.zeros(0, np.uint8)))
                continue
            ((distance, first, count),) = steps.sends
            peers = _rolled(begin, distance)
            stop = np.maximum(begin, peers) + self.seconds(distance, first, count)
            self.sent += 1
            done = _rolled(stop, self.nranks - distance) + fold
            late.append((np.packbits(done >= stop), np.packbits(peers > begin)))
            begin = np.maximum(stop, done)
        return Result(begin, self.walk_back(begin, late))

    def run_bytes(self, first: int, count: int) -> Any:
        """Bytes of the run of blocks that every rank means; one number if they are equal."""
        if not self.blocks.extra or count in (0, self.nranks):
            return self.blocks.nbytes(first, count)
        end = first + count
        large = self.large[end : end + self.nranks] - self.large[first : first + self.nranks]
        return large * self.blocks.large[0] + (count - large) * self.blocks.small[0]

    def seconds(self, distance: int, first: int, count: int) -> Any:
        """What the message of every rank takes."""
        alpha, beta, factor = self.rates_at(distance)
        taken = alpha + self.run_bytes(first, count) * beta
        if self.slow is not None:
            taken = taken * factor
        if self.network.jitter:
            taken = taken * (1.0 + self.network.jitter * uniforms(self.network.seed, self.nranks, self.sent))
        return taken

    def rates_at(self, distance: int) -> tuple[Any, Any, Any]:
        """Alpha, beta and slowness of every rank's message to the rank so far away."""
        if distance not in self.rates:
            alpha: Any = self.network.alpha
            beta: Any = self.network.beta
            if self.node_of is not None:
                apart = self.node_of != _rolled(self.node_of, distance)
                alpha = np.where(apart, alpha, self.network.within[0])
                beta = np.where(apart, beta, self.network.within[1])
            factor = np.maximum(self.slow, _rolled(self.slow, distance)) if self.slow is not None else 1.0
            if len(self.rates) >= KEPT:
                self.rates.clear()
            self.rates[distance] = alpha, beta, factor
        return self.rates[distance]

    def fold_seconds(self, folds: Sequence[tuple[int, int, int]]) -> Any:
        """What the folds of a round take on every rank."""
        if not folds or not self.network.gamma:
            return 0.0
        nbytes = sum(self.run_bytes(first, count) * times for first, count, times in folds)
        taken = nbytes * self.network.gamma
        return taken * self.slow if self.slow is not None else taken

    def walk_back(self, finish: Times, late: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]) -> tuple[Hop, ...]:
        """From the rank that is last, round by round, to whoever it waited for."""
        rank, now = int(finish.argmax()), float(finish.max())
        hops: list[Hop] = []
        for number in range(len(late), 0, -1):
            steps = self.pattern.rounds[number - 1]
            by_fold, by_peer = late[number - 1]
            source = rank
            if steps.sends:
                ((distance, first, count),) = steps.sends
                self.sent -= 1
            if not steps.sends or _bit(by_fold, rank):
                nbytes = sum(self.blocks.nbytes((rank + f) % self.nranks, c) * times for f, c, times in steps.folds)
                taken = nbytes * self.network.gamma * self.network.slow.get(rank, 1.0)
                if taken:
                    hops.append(Hop(FOLD, rank, rank, number, nbytes, now - taken, now, gamma=taken))
                    now -= taken
                if not steps.sends:
                    continue
                source = (rank - distance) % self.nranks
            target = (source + distance) % self.nranks
            nbytes = self.blocks.nbytes((source + first) % self.nranks, count)
            alpha, beta = self.network.parts(source, target, nbytes, self.sent)
            hops.append(Hop(MESSAGE, source, target, number, nbytes, now - alpha - beta, now, alpha, beta))
            now -= alpha + beta
            rank = target if _bit(by_peer, source) else source
        if hops:
            hops[-1] = hops[-1]._replace(start=0.0)  # but for what rounding has left
        return tuple(reversed(hops))


def _bit(packed: NDArray[np.uint8], index: int) -> bool:
    return bool(packed[index >> 3] >> (7 - (index & 7)) & 1)
