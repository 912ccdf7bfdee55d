"""direct: every block goes straight from everybody to its owner, and back, all messages at once.

Source
    The spread-out exchange of Thakur, Rabenseifner and Gropp (2005), without its order; pairwise does the same one
    message after the other.
Cost
    reduce_scatter and allgather: 1 round, P-1 messages, S(P-1)/P bytes sent and received a rank, the least possible;
    folds S(P-1)/P. allreduce: both one after the other. Scratch: P-1 blocks.
Restrictions
    None on P. Folds in rank order.
Best for
    Few ranks on a network that stands P-1 messages to one rank at once: fewest bytes, and no waiting from hop to hop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pyreduce.programs import Copy, Fold, Recv, Send, Step, place_input, place_output, place_scratch

__all__ = ["direct"]


def direct(collective: str, nranks: int, rank: int) -> Iterator[Sequence[Step]]:
    """Rounds for one rank; peers in rotated order, so that not all begin with the same one."""
    peers = [(rank + distance) % nranks for distance in range(1, nranks)]
    if collective != "allgather":
        arriving = {peer: place_scratch(slot, rank) for slot, peer in enumerate(peers)}
        arriving[rank] = place_input(rank)
        yield [
            *(Send(peer, place_input(peer)) for peer in peers),
            *(Recv(peer, arriving[peer]) for peer in peers[::-1]),
            Fold(place_output(rank), tuple(arriving[peer] for peer in range(nranks))),
        ]
    if collective != "reduce_scatter":
        own = place_input(rank) if collective == "allgather" else place_output(rank)
        steps: list[Step] = [Send(peer, own) for peer in peers]
        steps += [Recv(peer, place_output(peer)) for peer in peers[::-1]]
        if collective == "allgather":
            steps.append(Copy(place_output(rank), own))
        if steps:
            yield steps
