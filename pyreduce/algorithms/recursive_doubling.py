"""recursive_doubling: whole vectors are exchanged with ever farther partners.

Source
    Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", Int. J. High
    Perform. Comput. Appl. 19 (2005).
Cost
    allreduce: log2 P rounds, S log2 P bytes sent and received a rank, folds S log2 P. If P is no power of two, two
    rounds more: the first ranks pair up, one of each pair does the work, and tells the other. Scratch: three vectors.
Restrictions
    allreduce only. The operator must commute and associate; the order is a tree, the same for all blocks and ranks.
Best for
    Tiny vectors on many ranks, where rounds are all that counts.

Worked example, P = 5 (rank 0 works for rank 1 too; numbered among those that work: rank 0 is 0, rank 2 is 1, ...).

    rank          0          1          2          3          4
    fold in       01         -          2          3          4         (rank 1 sends to rank 0)
    round 1       01,2       -          01,2       3,4        3,4
    round 2       012,34     -          012,34     012,34     012,34
    hand out      012,34     012,34     ...                             (rank 0 sends to rank 1)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pyreduce.errors import Unsupported
from pyreduce.programs import Fold, Place, Recv, Send, Step, place_input, place_output, place_scratch

__all__ = ["recursive_doubling"]


def recursive_doubling(collective: str, nranks: int, rank: int) -> Iterator[Sequence[Step]]:
    """Rounds of the algorithm for one rank."""
    if collective != "allreduce":
        raise Unsupported(
            f"recursive_doubling serves allreduce only, not {collective}, where it would move P times the bytes; "
            "use 'circulant'"
        )
    held, result = place_input(0, nranks), place_output(0, nranks)
    arriving = place_scratch(0, 0, nranks)
    between = [place_scratch(turn * nranks, 0, nranks) for turn in (1, 2)]  # what a send reads, no fold may write
    workers = 1 << nranks.bit_length() - 1  # a power of two
    pairs = nranks - workers  # ranks 0..2 pairs - 1 work two by two

    def rank_of(worker: int) -> int:
        return 2 * worker if worker < pairs else worker + pairs

    if nranks == 1:
        yield [Fold(result, (held,))]
        return
    if rank < 2 * pairs and rank % 2:
        yield [Send(rank - 1, held)]
        yield [Recv(rank - 1, result)]
        return
    turn = 0
    if rank < 2 * pairs:
        yield [Recv(rank + 1, arriving), Fold(between[turn], (held, arriving))]
        held, turn = between[turn], 1 - turn
    worker = rank // 2 if rank < 2 * pairs else rank - pairs
    distance = 1
    while distance < workers:
        peer = rank_of(worker ^ distance)
        target: Place = result if 2 * distance == workers else between[turn]
        operands = (held, arriving) if rank < peer else (arriving, held)
        yield [Send(peer, held), Recv(peer, arriving), Fold(target, operands)]
        held, turn = target, 1 - turn
        distance *= 2
    if rank < 2 * pairs:
        yield [Send(rank + 1, result)]
