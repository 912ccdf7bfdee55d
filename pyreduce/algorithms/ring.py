"""ring: partial results travel once around a ring of neighbours.

Source
    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib.
    Comput. 69 (2009); the ring of Thakur, Rabenseifner and Gropp (2005).
Cost
    reduce_scatter and allgather: P-1 rounds, S(P-1)/P bytes sent and received a rank, the least possible; folds
    S(P-1)/P. allreduce: both one after the other, 2(P-1) rounds. Scratch: 2 blocks.
Restrictions
    None on P. The operator must commute. Block b is folded in the order of ranks b+1, b+2, ..., b (mod P): the order
    is fixed for a P, but it is another one for each block.
Best for
    Large vectors: it is optimal in bytes and every rank talks to two neighbours only. Rounds grow with P, so small
    vectors on many ranks are better served elsewhere.

Worked example, reduce_scatter with P = 5. Each row is a round; "b:ijk" on rank r stands for block b holding the sum of
ranks i, j and k after the round; rank r sends what it holds to rank r+1.

    rank          0        1        2        3        4
    sends first   4        0        1        2        3       (block r-1 of its own input)
    round 1       3:40     4:01     0:12     1:23     2:34
    round 2       2:340    3:401    4:012    0:123    1:234
    round 3       1:2340   2:3401   3:4012   4:0123   0:1234
    round 4       0:12340  1:23401  2:34012  3:40123  4:01234  (block r is complete on rank r)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pyreduce.programs import Copy, Fold, Recv, Send, Step, place_input, place_output, place_scratch

__all__ = ["ring"]


def ring(collective: str, nranks: int, rank: int) -> Iterator[Sequence[Step]]:
    """Rounds of the ring algorithm for one rank."""
    if nranks == 1:
        own = place_input(0)
        yield [Copy(place_output(0), own) if collective == "allgather" else Fold(place_output(0), (own,))]
        return
    if collective == "reduce_scatter":
        yield from _reduce_around(nranks, rank)
    elif collective == "allgather":
        yield from _gather_around(nranks, rank, own_in_input=True)
    else:
        yield from _reduce_around(nranks, rank)
        yield from _gather_around(nranks, rank, own_in_input=False)


def _reduce_around(nranks: int, rank: int) -> Iterator[Sequence[Step]]:
    right, left = (rank + 1) % nranks, (rank - 1) % nranks
    held = place_input((rank - 1) % nranks)
    for hop in range(nranks - 1):
        block = (rank - 2 - hop) % nranks
        arriving = place_scratch(hop % 2, block)
        folded = place_output(rank) if block == rank else arriving
        yield [Send(right, held), Recv(left, arriving), Fold(folded, (arriving, place_input(block)))]
        held = folded


def _gather_around(nranks: int, rank: int, own_in_input: bool) -> Iterator[Sequence[Step]]:
    right, left = (rank + 1) % nranks, (rank - 1) % nranks
    own = place_input(rank) if own_in_input else place_output(rank)
    for hop in range(nranks - 1):
        held = own if hop == 0 else place_output((rank - hop) % nranks)
        steps: list[Step] = [Send(right, held), Recv(left, place_output((rank - 1 - hop) % nranks))]
        if hop == 0 and own_in_input:
            steps.append(Copy(place_output(rank), own))
        yield steps
