"""mesh: everybody shows its vector in a window, everybody reads what it needs there.

Source
    The direct (all-to-all) reduce-scatter of the one-sided world: stage, barrier, read one's own row of every peer.
Cost
    reduce_scatter: 1 barrier, nothing sent, S(P-1)/P bytes read a rank, S(P-1)/P folds; a window of S. allgather the
    same with a window of S/P and no folds. allreduce: both, 2 barriers. Every barrier is P-1 notifies a rank.
Restrictions
    None on P. Folds in rank order 0, 1, ..., P-1: exactly ``functools.reduce(op, [x0, x1, ...])``.
Best for
    Ranks that share memory, a few of them: every rank reads every peer.

Worked example, reduce_scatter with P = 5, rank 2:

    round 1   copy blocks 0..4 of x2 to window slots 0..4; notify cell 2 of ranks 3, 4, 0, 1
    round 2   wait for cells 3, 4, 0, 1; get slot 2 of their windows; fold x0, x1, own slot 2, x3, x4 to the result

The result goes where no peer reads, so one barrier is enough (`pyreduce.programs` says why the next call is safe too).
`mesh_in_window` is the same with the result in the window itself, for calls on a user's window (`pyreduce.windows`):
whoever comes back from such a call may write to its window at once, so it must not come back before all peers have read
theirs: a second barrier, and since the user's cells serve the next call too, the credits are taken back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pyreduce.programs import (
    Copy,
    Fold,
    Get,
    Notify,
    Place,
    Step,
    Wait,
    place_input,
    place_output,
    place_scratch,
    place_window,
)

__all__ = ["barrier_rounds", "mesh", "mesh_in_window", "window_rounds"]


def mesh(collective: str, nranks: int, rank: int) -> Iterator[Sequence[Step]]:
    """Rounds of the mesh algorithm for one rank."""
    if nranks == 1:
        own = place_input(0)
        yield [Copy(place_output(0), own) if collective == "allgather" else Fold(place_output(0), (own,))]
        return
    if collective == "allgather":
        yield [Copy(place_window(0, rank), place_input(rank)), *_notify(nranks, rank)]
        yield [*_wait(nranks, rank, 1), *_gather(nranks, rank, 0), Copy(place_output(rank), place_input(rank))]
        return
    yield [_stage(nranks), *_notify(nranks, rank)]
    if collective == "reduce_scatter":
        yield [*_wait(nranks, rank, 1), *_reduce(nranks, rank, place_output(rank))]
        return
    result = place_window(nranks, rank)
    yield [*_wait(nranks, rank, 1), *_reduce(nranks, rank, result), *_notify(nranks, rank)]
    yield [*_wait(nranks, rank, 2), *_gather(nranks, rank, nranks), Copy(place_output(rank), result)]


def mesh_in_window(collective: str, nranks: int, rank: int) -> Iterator[Sequence[Step]]:
    """A call on a window as a whole: stage, `window_rounds`, take the result out."""
    if collective == "allgather":
        yield [Copy(place_window(rank, rank), place_input(rank))]
    else:
        yield [_stage(nranks)]
    yield from window_rounds(collective, nranks, rank)
    if collective == "reduce_scatter":
        yield [Copy(place_output(rank), place_window(rank, rank))]
    else:
        yield [Copy(place_output(0, nranks), place_window(0, 0, nranks))]


def window_rounds(collective: str, nranks: int, rank: int) -> Iterator[Sequence[Step]]:
    """The call itself, for windows whose row b holds block b; the result stays there.

    reduce_scatter: all rows are staged; row `rank` becomes the reduced block. allgather: row `rank` is staged; all rows
    become the peers'. allreduce: both. The last barrier is there for the peers, who may still read this rank's rows.
    """
    peers = _peers(nranks, rank)
    if not peers:
        return
    own = place_window(rank, rank)
    yield _notify(nranks, rank)
    if collective == "reduce_scatter":
        folded = place_scratch(nranks - 1, rank)
        yield [*_wait(nranks, rank, 1), *_reduce(nranks, rank, folded), *_notify(nranks, rank)]
        yield [*_wait(nranks, rank, 2), Copy(own, folded), *_take_back(nranks, rank, 2)]
        return
    barriers = 1
    if collective == "allreduce":
        yield [*_wait(nranks, rank, 1), *_reduce(nranks, rank, own), *_notify(nranks, rank)]
        barriers = 2
    gets = [Get(peer, place_window(peer, peer), place_window(peer, peer)) for peer in peers]
    yield [*_wait(nranks, rank, barriers), *gets, *_notify(nranks, rank)]
    yield [*_wait(nranks, rank, barriers + 1), *_take_back(nranks, rank, barriers + 1)]


def barrier_rounds(collective: str, nranks: int, rank: int) -> Iterator[Sequence[Step]]:
    """A barrier and nothing else, for cells that serve the next one too; the same for every collective."""
    yield _notify(nranks, rank)
    yield [*_wait(nranks, rank, 1), *_take_back(nranks, rank, 1)]


def _peers(nranks: int, rank: int) -> list[int]:
    return [(rank + hop) % nranks for hop in range(1, nranks)]


def _stage(nranks: int) -> Copy:
    return Copy(place_window(0, 0, nranks), place_input(0, nranks))


def _notify(nranks: int, rank: int) -> list[Step]:
    """One half of a barrier: a credit to this rank's cell at every peer."""
    return [Notify(peer, rank) for peer in _peers(nranks, rank)]


def _wait(nranks: int, rank: int, credits: int) -> list[Step]:
    """The other half: every peer's cell here holds so many credits."""
    return [Wait(peer, credits) for peer in _peers(nranks, rank)]


def _take_back(nranks: int, rank: int, credits: int) -> list[Step]:
    """What has been waited for goes off this rank's own cells: they serve the next call."""
    return [Notify(rank, peer, -credits) for peer in _peers(nranks, rank)]


def _reduce(nranks: int, rank: int, dst: Place) -> list[Step]:
    """Fold row `rank` of all windows, in rank order; one's own contribution is in one's own window."""
    peers = _peers(nranks, rank)
    rows = {rank: place_window(rank, rank)}
    rows.update((peer, place_scratch(peer - (peer > rank), rank)) for peer in peers)
    gets: list[Step] = [Get(peer, rows[peer], place_window(rank, rank)) for peer in peers]
    return [*gets, Fold(dst, tuple(rows[peer] for peer in range(nranks)))]


def _gather(nranks: int, rank: int, slot: int) -> list[Step]:
    """Get every peer's block from a slot of its window."""
    return [Get(peer, place_output(peer), place_window(slot, peer)) for peer in _peers(nranks, rank)]
