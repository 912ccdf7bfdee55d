"""The protocol of csrc/shared_engine.c as a model, and an explorer of all its interleavings.

Every rank runs a fixed program, which follows from the calls that all make: `program` writes it down as a list of
`Action`. All memory that ranks share (lines, slots, inputs, counters) is written by its owner alone. So what it holds
follows from how far its owner has come, a state is the tuple of the ranks' positions, and `explore` visits all states
that can be reached.

How actions map to the C source, in the order of `pr_shared_start` and `move`:

=========================  ==========================================================================================
``S(k) data``              `pr_stage`: the stage slot ``k & 1``, or the line's data, are written; not if peers read
                           the input where it is
``S(k) where``             `publish`, of a call's first piece: the line's `fingerprint` and `where` are written
``S(k)``                   `publish`: the store to ``line->piece``
``look S(k) of p``         `all_staged`: one load of a peer's ``line->piece``; ``seen`` says which comes next
``compare(k)``             `same_call`: the peers' lines are read
``F(k)``                   `pr_consume` of a fold: the own input and all peers' slots, lines or inputs are read; the
                           result slot is written, and the input where the result replaces it
``F(k) of p``              `gather`: one peer's slot, line or input is copied
``folded(k)``              `move`: the store to ``folded``
``look folded(k) of p``    `all_folded`: one load of a peer's ``folded``
``C(k) of p``              `pr_collect`: one peer's result slot is copied, over a block of the input if in place
``over``                   the call has returned, and its caller overwrites the input that peers could read
=========================  ==========================================================================================

An access to data takes time. The rank is in its midst whenever it stands before the action: what comes before has begun
it, the action ends it. So one action stands for two, and two accesses overlap in some run if and only if both ranks
stand before them in some state. A fold's accesses are one, since it goes through all of them element by element. A look
that fails changes nothing, so a look is an action that is not possible yet. Looks and stores are taken as sequentially
consistent; whether release and acquire suffice is for the thread sanitizer (tests/c/shared_stress.c) to say. That all
ranks make the same call is assumed.

In every state is checked that no access overlaps a write to the same place; that what a rank reads is of the piece and
call it expects; that nothing is overwritten that a peer has still to read; and that somebody can go on unless all are
done. Each of these but the last is about two ranks' positions, so what was found for a pair is remembered.

A `Protocol` with other values than the defaults is one that is known to be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "ALLGATHER",
    "REDUCE_SCATTER",
    "SMALL",
    "TWO_PHASES",
    "Action",
    "Call",
    "Protocol",
    "Violation",
    "explore",
    "program",
]

REDUCE_SCATTER, ALLGATHER, SMALL, TWO_PHASES = "reduce_scatter", "allgather", "small allreduce", "allreduce"

Value = int | str


class Place(NamedTuple):
    """Memory, or a counter, that only its owner writes."""

    what: str
    owner: int
    which: tuple[int, ...] = ()

    @property
    def initially(self) -> Value:
        return "data" if self.what == "input" else 0


@dataclass(frozen=True)
class Protocol:
    """What can be broken."""

    stage_slots: int = 2
    lines: int = 2
    result_slots: int = 2
    stages_before_fold: bool = False
    folded_before_fold: bool = False
    owner_waits: bool = True
    in_place_is_staged: bool = True


@dataclass(frozen=True)
class Call:
    """One call; ranks may differ in where they have their input and whether the result replaces it."""

    kind: str
    pieces: int = 1
    shared: tuple[bool, ...] = (False, False, False)
    in_place: tuple[bool, ...] = (False, False, False)
    fits_line: bool = False

    def is_shared(self, rank: int, protocol: Protocol) -> bool:
        """Whether peers read the rank's input where it is: `writes_early` of `pr_shared_start`."""
        early = self.kind == REDUCE_SCATTER and self.in_place[rank] and protocol.in_place_is_staged
        return self.shared[rank] and self.kind != SMALL and not self.fits_line and not early


class Action(NamedTuple):
    """The smallest step: one look or one store, or else an access to data."""

    name: str
    look: tuple[Place, int, bool] | None = None  # a counter, its value, whether exactly
    store: tuple[Place, int] | None = None
    reads: tuple[tuple[Place, Value], ...] = ()  # with what must be found there
    writes: tuple[tuple[Place, Value], ...] = ()  # with what is there afterwards


class Violation(AssertionError):
    """The protocol is wrong."""


# ---- programs ----


@dataclass(frozen=True)
class Author:
    """Writes the part of a rank's program that belongs to one call."""

    rank: int
    nranks: int
    number: int
    call: Call
    first: int
    protocol: Protocol

    @property
    def last(self) -> int:
        return self.first + self.call.pieces - 1

    @property
    def two(self) -> bool:
        return self.call.kind == TWO_PHASES

    def peers(self) -> list[int]:
        """The other ranks, in the order in which they are read."""
        return [(self.rank + ahead) % self.nranks for ahead in range(1, self.nranks)]

    def line(self, rank: int, k: int) -> Place:
        return Place("line", rank, (k % self.protocol.lines,))

    def published(self, rank: int, k: int) -> Place:
        return Place("piece", rank, (k % self.protocol.lines,))

    def staged_at(self, rank: int, k: int) -> Place:
        return self.line(rank, k) if self.call.fits_line else Place("slot", rank, (k % self.protocol.stage_slots,))

    def result(self, rank: int, k: int) -> Place:
        return Place("result", rank, (k % self.protocol.result_slots,))

    def input_of(self, rank: int, block: int, k: int) -> Place:
        return Place("input", rank, (self.number, block, k - self.first))

    def blocks_for(self, reader: int, owner: int) -> list[int]:
        """The blocks that a rank reads of the owner's input."""
        if self.call.kind == SMALL:
            return list(range(self.nranks))
        return [owner if self.call.kind == ALLGATHER else reader]

    def stage(self, k: int) -> Iterator[Action]:
        shared = self.call.is_shared(self.rank, self.protocol)
        if not shared:
            blocks = {b for p in self.peers() for b in self.blocks_for(p, self.rank)}
            reads = tuple((self.input_of(self.rank, b, k), "data") for b in sorted(blocks))
            yield Action(f"S({k}) data", reads=reads, writes=((self.staged_at(self.rank, k), k),))
        if k == self.first and (shared or not self.call.fits_line):
            yield Action(f"S({k}) where", writes=((self.line(self.rank, k), k),))
        yield Action(f"S({k})", store=(self.published(self.rank, k), k))

    def look_staged(self, k: int) -> Iterator[Action]:
        for p in self.peers():
            yield Action(f"look S({k}) of {p}", look=(self.published(p, k), k, True))

    def look_folded(self, k: int) -> Iterator[Action]:
        for p in self.peers():
            yield Action(f"look folded({k}) of {p}", look=(Place("folded", p), k, False))

    def data_of(self, p: int, k: int) -> tuple[tuple[Place, Value], ...]:
        """What is read of a peer's data for piece k."""
        if self.call.is_shared(p, self.protocol):
            return tuple((self.input_of(p, b, k), "data") for b in self.blocks_for(self.rank, p))
        return ((self.staged_at(p, k), k),)

    def overwritten_by_fold(self, k: int) -> list[int]:
        """The blocks of the input whose piece k the result replaces; of a reduce_scatter's equal blocks the first."""
        if not self.call.in_place[self.rank]:
            return []
        if self.call.kind == REDUCE_SCATTER:
            return [0]
        return self.blocks_for(self.rank, self.rank)

    def fold(self, k: int) -> Action:
        own = [(self.input_of(self.rank, b, k), "data") for b in self.blocks_for(self.rank, self.rank)]
        reads = [read for p in self.peers() for read in self.data_of(p, k)]
        writes = [(self.input_of(self.rank, b, k), "result") for b in self.overwritten_by_fold(k)]
        kept = [(self.result(self.rank, k), k)] if self.two else []
        return Action(f"F({k})", reads=(*own, *reads), writes=(*writes, *kept))

    def consume(self, k: int) -> Iterator[Action]:
        if k == self.first:
            yield Action(f"compare({k})", reads=tuple((self.line(p, k), k) for p in self.peers()))
        if self.call.kind != ALLGATHER:
            yield self.fold(k)
            return
        for p in self.peers():
            yield Action(f"F({k}) of {p}", reads=self.data_of(p, k))

    def collect(self, k: int) -> Iterator[Action]:
        for p in self.peers():
            writes = ((self.input_of(self.rank, p, k), "result"),) if self.call.in_place[self.rank] else ()
            yield Action(f"C({k}) of {p}", reads=((self.result(p, k), k),), writes=writes)

    def consume_and_say(self, k: int) -> Iterator[Action]:
        said = [Action(f"folded({k})", store=(Place("folded", self.rank), k))] if self.two or k == self.last else []
        early = self.protocol.folded_before_fold
        yield from said if early else []
        yield from self.consume(k)
        yield from said if not early else []

    def actions(self) -> Iterator[Action]:
        """The whole call."""
        early, shared = self.protocol.stages_before_fold, self.call.is_shared(self.rank, self.protocol)
        yield from self.stage(self.first)
        for k in range(self.first, self.last + 1):
            following = list(self.stage(k + 1)) if k < self.last else []
            yield from following if early else []
            yield from self.look_staged(k)
            yield from self.consume_and_say(k)
            yield from following if not early else []
            if self.two:
                yield from self.look_folded(k)
                yield from self.collect(k)
        if shared and not self.two and self.protocol.owner_waits:
            yield from self.look_folded(self.last)
        if shared:
            everything = [(b, k) for b in range(self.nranks) for k in range(self.first, self.last + 1)]
            yield Action("over", writes=tuple((self.input_of(self.rank, b, k), "junk") for b, k in everything))


def program(rank: int, nranks: int, calls: Sequence[Call], protocol: Protocol) -> list[Action]:
    """All that a rank does in a sequence of calls."""
    actions: list[Action] = []
    first = 1
    for number, call in enumerate(calls):
        actions += Author(rank, nranks, number, call, first, protocol).actions()
        first += call.pieces
    return actions


# ---- exploring ----

State = tuple[int, ...]
"""Before which of its actions every rank stands."""


def history(actions: Sequence[Action]) -> dict[Place, list[Value]]:
    """What a program's places and counters hold when their owner stands before each of its actions, or at its end."""
    held: dict[Place, list[Value]] = {}
    for at, action in enumerate(actions):
        for place, value in action.writes if action.store is None else (action.store,):
            values = held.setdefault(place, [place.initially] * (len(actions) + 1))
            values[at + 1 :] = [value] * (len(actions) - at)
    return held


class Run:
    """The programs of all ranks, and what is known of pairs of positions."""

    def __init__(self, nranks: int, calls: Sequence[Call], protocol: Protocol) -> None:
        self.programs = [program(r, nranks, calls, protocol) for r in range(nranks)]
        self.start: State = (0,) * nranks
        self.ends: State = tuple(map(len, self.programs))
        self.held = [history(actions) for actions in self.programs]
        self.opens = [[self.opened(action) for action in actions] for actions in self.programs]
        self.last_reads = [
            {read: at for at, action in enumerate(actions) for read in action.reads} for actions in self.programs
        ]
        self.faults: list[tuple[int, int, dict[tuple[int, int], str]]] = [
            (r, p, {}) for r in range(nranks) for p in range(nranks) if p != r
        ]

    def action(self, rank: int, at: int) -> Action:
        return self.programs[rank][at] if at < self.ends[rank] else Action("the end")

    def holds(self, place: Place, at: int) -> Value:
        """What a place or counter holds when its owner stands at a position."""
        values = self.held[place.owner].get(place)
        return place.initially if values is None else values[at]

    def opened(self, action: Action) -> tuple[int, list[bool]] | None:
        """Of a look: the peer, and at which of its positions the look succeeds."""
        if action.look is None:
            return None
        counter, expected, exactly = action.look
        values = [int(self.holds(counter, at)) for at in range(self.ends[counter.owner] + 1)]
        return counter.owner, [value == expected if exactly else value >= expected for value in values]

    def bad_write(self, rank: int, at: int, peer: int, peer_at: int) -> str:
        """What is wrong with what a rank writes at a position, given a peer's; empty if nothing is."""
        mine, other = self.action(rank, at), self.action(peer, peer_at)
        touched = {place for place, _ in (*other.reads, *other.writes)}
        for place, _ in mine.writes:
            if place in touched:
                return f"{mine.name} of {rank} writes {place} during {other.name} of {peer}"
            if self.last_reads[peer].get((place, self.holds(place, at)), -1) >= peer_at:
                return f"{mine.name} of {rank} writes {place} before {peer} has read it"
        return ""

    def bad_read(self, rank: int, at: int, peer: int, peer_at: int) -> str:
        """What is wrong with what a rank reads at a position, of its own or a peer's."""
        mine = self.action(rank, at)
        for place, expected in mine.reads:
            if place.owner in (rank, peer):
                found = self.holds(place, at if place.owner == rank else peer_at)
                if found != expected:
                    return f"{mine.name} of {rank} finds {found} in {place}"
        return ""

    def fault(self, state: State) -> str:
        """What is wrong in a state; empty if nothing is."""
        for r, p, known in self.faults:
            pair = (state[r], state[p])
            if pair not in known:
                known[pair] = self.bad_write(r, pair[0], p, pair[1]) or self.bad_read(r, pair[0], p, pair[1])
            if known[pair]:
                return known[pair]
        return ""

    def following(self, state: State) -> list[State]:
        """The states that one action leads to."""
        found = []
        for r, at in enumerate(state):
            if at < self.ends[r]:
                opens = self.opens[r][at]
                if opens is None or opens[1][state[opens[0]]]:
                    found.append((*state[:r], at + 1, *state[r + 1 :]))
        return found

    def way_to(self, state: State, parents: dict[State, State | None]) -> str:
        """The actions that led to a state."""
        steps: list[str] = []
        before = parents[state]
        while before is not None:
            rank = next(r for r, at in enumerate(before) if at != state[r])
            steps.append(f"{rank}: {self.action(rank, before[rank]).name}")
            state, before = before, parents[before]
        return "\n  ".join(reversed(steps))


def explore(nranks: int, calls: Sequence[Call], protocol: Protocol | None = None) -> int:
    """Visit all states that can be reached; returns how many, or raises `Violation` with the way to a wrong one."""
    run = Run(nranks, calls, protocol or Protocol())
    parents: dict[State, State | None] = {run.start: None}
    stack = [run.start]
    while stack:
        state = stack.pop()
        fault, following = run.fault(state), run.following(state)
        if not following and state != run.ends:
            fault = fault or "nobody can go on"
        if fault:
            raise Violation(f"{fault}, after\n  {run.way_to(state, parents)}")
        for after in following:
            if after not in parents:
                parents[after] = state
                stack.append(after)
    return len(parents)
