"""circulant: partial results travel in few rounds, over skips that shrink from P to 1; and pairwise, its slow twin.

Source
    Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", arXiv 2410.14234 (2024), with skips that
    halve; with linear skips it is the pairwise exchange of Thakur, Rabenseifner and Gropp (2005). The allgather is the
    same backwards: Bruck, Ho, Kipnis, Upfal and Weathersby (1997).
Cost
    circulant: reduce_scatter and allgather take ceil(log2 P) rounds, and S(P-1)/P bytes sent and received a rank, the
    least possible of both; folds S(P-1)/P. pairwise: P-1 rounds and as many bytes. allreduce: both halves one after the
    other. Scratch: circulant about three quarters of the vector, pairwise P-1 blocks.
Restrictions
    None on P. circulant: the operator must commute; every block is folded as a tree, another for each block, fixed for
    a P. pairwise folds in rank order.
Best for
    circulant: vectors of every size between nodes, but for the smallest (recursive_doubling, naive). pairwise: large
    vectors whose bits must be those of rank order.

On rank r, R[i] stands for a partial result of block (r+i) mod P, i = 0..P-1. A round that goes from hi to lo sends
R[lo..hi-1] to rank r+lo, receives R[0..hi-lo-1] of rank r-lo (the same blocks), and folds them. In the end R[0], block
r, is complete.

Invariant: for every block x, the partial results held by the ranks r with (x-r) mod P < hi hold together every
contribution to x exactly once. It holds for hi = P; the round moves those with lo <= (x-r) mod P < hi to ranks with
(x-r) mod P < hi-lo <= lo. So any sequence of skips serves that no more than halves at a time.

Worked example, reduce_scatter with P = 5, skips 5, 3, 2, 1. "b:ijk" on rank r stands for block b holding the sum of
ranks i, j and k after the round.

    rank                 0            1            2            3            4
    round 1 (5 to 3)     0:02 1:02    1:13 2:13    2:24 3:24    3:30 4:30    4:41 0:41
    round 2 (3 to 2)     0:023        1:134        2:240        3:301        4:412
    round 3 (2 to 1)     0:02341      1:13402      2:24013      3:30124      4:41230
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise as steps_of

from pyreduce.programs import Copy, Fold, Place, Recv, Send, Step, place_input, place_output, place_scratch

__all__ = ["circulant", "pairwise"]


def circulant(collective: str, nranks: int, rank: int) -> Iterator[Sequence[Step]]:
    """Rounds for one rank with halving skips."""
    if nranks == 1:
        yield _alone(collective)
        return
    if collective != "allgather":
        yield from _reduce_halving(nranks, rank)
    if collective != "reduce_scatter":
        yield from _gather(nranks, rank, halving_skips(nranks), own_in_input=collective == "allgather")


def pairwise(collective: str, nranks: int, rank: int) -> Iterator[Sequence[Step]]:
    """Rounds for one rank with linear skips."""
    if nranks == 1:
        yield _alone(collective)
        return
    if collective != "allgather":
        yield from _reduce_in_rank_order(nranks, rank)
    if collective != "reduce_scatter":
        yield from _gather(nranks, rank, [*range(nranks, 0, -1)], own_in_input=collective == "allgather")


def halving_skips(nranks: int) -> list[int]:
    """P, ceil(P/2), ceil(P/4), ..., 1.

    >>> halving_skips(5)
    [5, 3, 2, 1]
    """
    skips = [nranks]
    while skips[-1] > 1:
        skips.append(-(-skips[-1] // 2))
    return skips


def _alone(collective: str) -> Sequence[Step]:
    own = place_input(0)
    return [Copy(place_output(0), own) if collective == "allgather" else Fold(place_output(0), (own,))]


def _reduce_halving(nranks: int, rank: int) -> Iterator[Sequence[Step]]:
    """R[i] lies in the input until something is folded into it, then in scratch slot i; R[0] ends in the output."""
    skips = halving_skips(nranks)
    folded = 0  # R[0..folded-1] lie in scratch

    def block(i: int) -> int:
        return (rank + i) % nranks

    for hi, lo in steps_of(skips):
        count = hi - lo
        # The first message is received where R[0..] will lie; later ones above what the round before has left.
        arriving = place_scratch(hi if folded else 0, rank, count)
        sent = place_scratch(lo, block(lo), count) if folded else place_input(block(lo), count)
        steps: list[Step] = [Send(block(lo), sent), Recv((rank - lo) % nranks, arriving)]
        own = place_scratch(0, rank, count) if folded else place_input(rank, count)
        target: Place = place_scratch(0, rank, count) if lo > 1 else place_output(rank)
        steps.append(Fold(target, (own, arriving)))
        if not folded and lo > 1:
            folded = count
            if lo > count:  # an odd one, which nobody folds this time: it goes along in the next message
                steps.append(Copy(place_scratch(count, block(count)), place_input(block(count))))
        yield steps


def _reduce_in_rank_order(nranks: int, rank: int) -> Iterator[Sequence[Step]]:
    """Only R[0] is ever folded: all that comes for it is kept, and folded in the end."""
    kept: dict[int, Place] = {rank: place_input(rank)}
    for lo in range(nranks - 1, 0, -1):
        target, source = (rank + lo) % nranks, (rank - lo) % nranks
        kept[source] = place_scratch(lo - 1, rank)
        steps: list[Step] = [Send(target, place_input(target)), Recv(source, kept[source])]
        if lo == 1:
            steps.append(Fold(place_output(rank), tuple(kept[source] for source in range(nranks))))
        yield steps


def _gather(nranks: int, rank: int, skips: Sequence[int], own_in_input: bool) -> Iterator[Sequence[Step]]:
    own = place_input(rank) if own_in_input else place_output(rank)
    for lo, hi in steps_of(skips[::-1]):
        held = own if lo == 1 else place_output(rank, hi - lo)
        peer = (rank + lo) % nranks
        steps: list[Step] = [Send((rank - lo) % nranks, held), Recv(peer, place_output(peer, hi - lo))]
        if lo == 1 and own_in_input:
            steps.append(Copy(place_output(rank), own))
        yield steps
