"""naive: everybody sends everything to everybody, then folds alone.

Source
    Folklore; every textbook's first version. Its reduce_scatter is what primers call naive: the whole allreduce, of
    which a rank keeps its own block and drops the rest.
Cost
    One round. allreduce and reduce_scatter: S(P-1) bytes sent and received a rank, S(P-1) folds; scratch P-1 vectors,
    and one more for reduce_scatter's whole result. allgather: S(P-1)/P bytes, no scratch. (The executor needs that
    scratch for the segments in flight only.)
Restrictions
    None on P. Folds in rank order 0, 1, ..., P-1: exactly ``functools.reduce(op, [x0, x1, ...])``.
Best for
    Tiny vectors on few ranks, where one round beats fewer bytes; and as the yardstick that others are checked against.

Worked example, reduce_scatter with P = 5, rank 2:

    round 1   send blocks 0..4 of x2 to ranks 3, 4, 0, 1; receive x1, x0, x4, x3 from ranks 1, 0, 4, 3
    round 2   fold blocks 0..4: (((x0 op x1) op x2) op x3) op x4; keep block 2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pyreduce.programs import Copy, Fold, Place, Recv, Send, Step, place_input, place_output, place_scratch

__all__ = ["naive"]


def naive(collective: str, nranks: int, rank: int) -> Iterator[Sequence[Step]]:
    """Rounds of the naive algorithm for one rank."""
    hops = range(1, nranks)
    if collective == "allgather":
        sends: list[Step] = [Send((rank + hop) % nranks, place_input(rank)) for hop in hops]
        recvs: list[Step] = [Recv((rank - hop) % nranks, place_output((rank - hop) % nranks)) for hop in hops]
        yield [*sends, *recvs, Copy(place_output(rank), place_input(rank))]
        return
    whole = place_input(0, nranks)
    vectors: dict[int, Place] = {rank: whole}
    for index, hop in enumerate(hops):
        vectors[(rank - hop) % nranks] = place_scratch(index * nranks, 0, nranks)
    if nranks > 1:
        yield [
            *(Send((rank + hop) % nranks, whole) for hop in hops),
            *(Recv(peer, vector) for peer, vector in vectors.items() if peer != rank),
        ]
    in_rank_order = tuple(vectors[peer] for peer in range(nranks))
    if collective == "allreduce":
        yield [Fold(place_output(0, nranks), in_rank_order)]
    else:
        slot = (nranks - 1) * nranks
        yield [
            Fold(place_scratch(slot, 0, nranks), in_rank_order),
            Copy(place_output(rank), place_scratch(slot + rank, rank)),
        ]
