"""hierarchical: memory within a node, messages between nodes, one lane of messages for each rank of a node.

Source
    Leader schemes are folklore; that all ranks of a node drive its link, each with its share, is the multi-lane
    decomposition of Träff and Hunold, "Decomposing MPI collectives for exploiting multi-lane communication", IEEE
    Cluster (2020).
Cost
    With n nodes a node's link carries S(n-1)/n bytes each way for reduce_scatter and allgather, twice that for
    allreduce, whatever the number of ranks on it: a flat ring carries S(P-1)/P. ceil(log2 n) rounds of messages, or
    twice as many; the rest goes through the shared-memory engine of the node.
Restrictions
    Memory for the engine on every node. Folds in rank order within a node, then as the program between nodes does.
Best for
    Several ranks on each of several nodes.

The vector is cut into units, one for every lane and node: unit (j, l) is what lane l brings to node j, or takes from
there. Lane l of a node is its l-th rank, as many lanes as the smallest node has ranks; with equal nodes the unit of a
reduce_scatter and an allgather is just the block of that rank. An allreduce is cut evenly. Segment k of a call is
piece k of every unit, and runs as

    A    reduce_scatter within the node, by the engine: the l-th rank gets the pieces of lane l, of its node's sum
    B    the program between the l-th ranks of all nodes: messages
    C    allgather within the node, by the engine

of which a reduce_scatter leaves out C, and an allgather A. A few segments are under way at once: while B of one is on
the wire, the node does A and C of others. The engine does one thing at a time, and all ranks of a node must give it
the same things in the same order: it is A0 A1 .. C0 A2 C1 A3 .., whatever becomes ready first.

With unequal nodes a unit does not end at the boundary of a block: a reduce_scatter then hands the units out within the
node in the end, an allgather first collects the node's blocks.

Bits do not depend on the segments: which unit, and which block of the program, an element falls in depends on the
sizes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from os import sched_yield
from typing import TYPE_CHECKING, Any, NamedTuple

from pyreduce import ops
from pyreduce.algorithms.shared import LINGER_NS, Engine, SharedExecution, SharedPlan
from pyreduce.blocks import offsets, partition
from pyreduce.calls import Call
from pyreduce.topology import Topology

if TYPE_CHECKING:  # so that explain can read this file where there is no MPI
    from pyreduce.algorithms import Algorithm
    from pyreduce.execute import Execution, Plan, ShortExecution

__all__ = ["HierarchicalExecution", "HierarchicalPlan", "Layout", "lay_out"]

Fragments = tuple[tuple[int, int], ...]  # first element and number of elements, in the vector
Move = tuple[int, int, int]  # offset in the vector, offset in the packed buffer, length; bytes

SCRATCH_BYTES = 32 << 20
LEAST_SEGMENT_BYTES = 64 << 10  # smaller pieces are not worth their messages
PIECES = 4  # into so many pieces a unit is cut, if they are not smaller or larger than allowed
SHORT_LINGER_NS = 20_000  # of waiting for the node while messages are under way
MOST_IN_FLIGHT = 8
DOUBLING_BYTES = 4096  # of a lane's share: up to here fewer rounds beat fewer bytes between nodes
PRE, A, C, POST = range(4)


class Layout(NamedTuple):
    """How a call is cut.

    Attributes
    ----------
    lanes : int
    units : tuple
        ``units[lane][node]``: the fragments of the vector that the unit consists of.
    whole : bool
        Whether units are blocks or evenly cut, so that nothing is handed out or collected within nodes.
    """

    lanes: int
    units: tuple[tuple[Fragments, ...], ...]
    whole: bool

    def length(self, lane: int, node: int) -> int:
        """Elements of a unit."""
        return sum(count for _, count in self.units[lane][node])

    @property
    def longest(self) -> int:
        """Elements of the longest unit."""
        return max(self.length(lane, node) for lane in range(self.lanes) for node in range(len(self.units[0])))


def lay_out(collective: str, counts: Sequence[int], topology: Topology) -> Layout:
    """Cut the vector into units.

    Parameters
    ----------
    collective : str
    counts : sequence of int
        Elements of every rank's block.
    topology : Topology
    """
    lanes, starts = min(map(len, topology.nodes)), offsets(counts)
    if collective == "allreduce":
        cut = partition(sum(counts), lanes * topology.nnodes)
        begin = offsets(cut)
        even = tuple((piece,) for piece in zip(begin, cut, strict=True))
        first = range(0, len(even), topology.nnodes)
        return Layout(lanes, tuple(even[at : at + topology.nnodes] for at in first), True)
    if topology.equal:
        owners = [[ranks[lane] for ranks in topology.nodes] for lane in range(lanes)]
        return Layout(lanes, tuple(tuple(((starts[r], counts[r]),) for r in ranks) for ranks in owners), True)
    units: list[list[Fragments]] = [[] for _ in range(lanes)]
    for ranks in topology.nodes:
        blocks = [(starts[rank], counts[rank]) for rank in ranks]
        cut = partition(sum(count for _, count in blocks), lanes)
        for lane, (at, count) in enumerate(zip(offsets(cut), cut, strict=True)):
            units[lane].append(clip(blocks, at, at + count))
    return Layout(lanes, tuple(map(tuple, units)), False)


def clip(fragments: Sequence[tuple[int, int]], low: int, high: int) -> Fragments:
    """Elements low..high-1 of what the fragments hold one after the other.

    >>> clip([(0, 3), (10, 4)], 2, 5)
    ((2, 1), (10, 2))
    """
    found, passed = [], 0
    for start, count in fragments:
        first, last = max(low - passed, 0), min(high - passed, count)
        if first < last:
            found.append((start + first, last - first))
        passed += count
    return tuple(found)


def inner_algorithm(collective: str, nnodes: int, nbytes: int) -> str:
    """The program between nodes, for so many bytes of a lane: few rounds for what is tiny, few bytes else."""
    return "recursive_doubling" if collective == "allreduce" and nbytes <= DOUBLING_BYTES else "circulant"


class HierarchicalPlan:
    """A call prepared for its sizes; the face of `pyreduce.execute.Plan`.

    Parameters
    ----------
    call : Call
    engine : Engine
        Of the ranks of this node.
    topology : Topology
    find : callable
        ``find(name)``: the algorithm between nodes.
    """

    def __init__(self, call: Call, engine: Engine, topology: Topology, find: Callable[[str], Algorithm]) -> None:
        self.call = call
        self.why = ""
        self.engine = engine
        self.work_dtype = call.work_dtype
        self.itemsize = call.work_dtype.itemsize
        self.in_place_safe = call.collective != "reduce_scatter"
        self.node = topology.node_of[call.rank]
        self.ranks = topology.nodes[self.node]
        self.local = self.ranks.index(call.rank)
        self.layout = layout = lay_out(call.collective, call.counts, topology)
        self.lane = self.local if self.local < layout.lanes else None
        self.nnodes = topology.nnodes
        self.reduces, self.gathers = call.collective != "allgather", call.collective != "reduce_scatter"
        lane_bytes = (
            max(sum(layout.length(lane, node) for node in range(self.nnodes)) for lane in range(layout.lanes))
            * self.itemsize
        )
        self.inner = inner_algorithm(call.collective, self.nnodes, lane_bytes)
        between = find(self.inner)
        self.program = between.program(call.collective, self.nnodes, self.node)
        self.scratch_slots = between.scratch(call.collective, self.nnodes)
        self.lane_ranks = [ranks[self.lane] for ranks in topology.nodes] if self.lane is not None else []
        self.in_flight = min(call.settings.in_flight + 1, MOST_IN_FLIGHT)
        self._cut()
        self._between: dict[tuple[int, ...], Plan] = {}
        self._within: dict[tuple[str, tuple[int, ...]], SharedPlan] = {}
        self._moves: dict[int, list[Move]] = {}
        self.schedule = tuple(self._order())
        self.talking = self.program.cost().rounds

    def _cut(self) -> None:
        """Segments, and the parts of scratch: pieces are as long as the longest one of all."""
        layout, size = self.layout, self.itemsize
        longest = layout.longest
        slots = layout.lanes * self.nnodes * 2 + (self.nnodes + self.scratch_slots) * self.in_flight
        room = max(SCRATCH_BYTES // slots, LEAST_SEGMENT_BYTES)
        wished = max(LEAST_SEGMENT_BYTES, -(-longest * size // PIECES))
        self.segment = max(1, min(self.call.settings.segment_bytes, room, wished) // size)
        self.segments = max(1, -(-longest // self.segment))
        piece = min(self.segment, max(longest, 1)) * size
        node_bytes = sum(self.call.counts[rank] for rank in self.ranks) * size
        self.parts: list[int] = []  # offsets in scratch: packed, gathered, node's blocks, own units, then lane by lane
        at = 0
        share = piece * self.nnodes
        sizes = [share * layout.lanes, share * layout.lanes, 0, 0]
        if not layout.whole:
            sizes[2:] = [node_bytes, longest * size]
        program = self.program.scratch * piece + 64 * self.program.scratch
        for nbytes in (*sizes, *[share, share, program] * self.in_flight):
            self.parts.append(at)
            at += -(-nbytes // 64) * 64
        self.scratch_bytes = at

    def _order(self) -> Iterator[tuple[int, int]]:
        """What the engine is given, in order: the same on all ranks of the node."""
        if self.reduces and self.gathers:
            for k in range(self.segments + self.in_flight):
                if k >= self.in_flight:
                    yield C, k - self.in_flight
                if k < self.segments:
                    yield A, k
        elif self.reduces:
            yield from ((A, k) for k in range(self.segments))
            if not self.layout.whole:
                yield POST, 0
        else:
            if not self.layout.whole:
                yield PRE, 0
            yield from ((C, k) for k in range(self.segments))

    def piece(self, lane: int, node: int, k: int) -> Fragments:
        """Piece k of a unit."""
        return clip(self.layout.units[lane][node], k * self.segment, (k + 1) * self.segment)

    def lengths(self, lane: int, k: int) -> tuple[int, ...]:
        """Elements of piece k of a lane's units, node by node."""
        low = k * self.segment
        return tuple(max(0, min(self.layout.length(lane, node) - low, self.segment)) for node in range(self.nnodes))

    def shares(self, k: int) -> tuple[int, ...]:
        """Elements of segment k that every rank of the node has as its lane's."""
        return self._by_lane(lambda lane: sum(self.lengths(lane, k)))

    def unit_lengths(self) -> tuple[int, ...]:
        """Elements of the unit of this node that every rank of it has as its lane's."""
        return self._by_lane(lambda lane: self.layout.length(lane, self.node))

    def _by_lane(self, elements: Callable[[int], int]) -> tuple[int, ...]:
        """What every rank of the node has as its lane's: nothing if it has no lane."""
        lanes = self.layout.lanes
        return tuple(elements(local) if local < lanes else 0 for local in range(len(self.ranks)))

    def moves(self, k: int) -> list[Move]:
        """Where the pieces of segment k lie in the vector, and in a buffer, lane by lane and node by node."""
        found = self._moves.get(k)
        if found is None:
            found, at, size = [], 0, self.itemsize
            for lane in range(self.layout.lanes):
                for node in range(self.nnodes):
                    for start, count in self.piece(lane, node, k):
                        source, nbytes = start * size, count * size
                        if found and found[-1][0] + found[-1][2] == source:
                            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + nbytes)
                        else:
                            found.append((source, at, nbytes))
                        at += nbytes
            self._moves[k] = found
        return found

    def within(self, collective: str, counts: tuple[int, ...]) -> SharedPlan:
        """The engine's plan for these elements of the node's ranks."""
        plan = self._within.get((collective, counts))
        if plan is None:
            op = self.call.op if self.call.op is None or not self.call.divides else ops.SUM
            call = self.call.like(
                collective=collective,
                op=None if collective == "allgather" else op,
                dtype=self.work_dtype,
                counts=counts,
                rank=self.local,
            )
            plan = self._within[collective, counts] = SharedPlan(call, self.engine)
        return plan

    def between(self, counts: tuple[int, ...]) -> Plan:
        """The program between nodes, compiled for these elements of the nodes."""
        from pyreduce.execute import Plan

        plan = self._between.get(counts)
        if plan is None:
            call = self.call.like(
                dtype=self.work_dtype,
                counts=counts,
                rank=self.node,
                settings=replace(self.call.settings, segment_bytes=self.segment * self.itemsize, in_flight=1),
            )
            plan = Plan(self.program, call, ranks=self.lane_ranks, divisor=self.call.nranks, scratch=self.scratch_slots)
            self._between[counts] = plan
        return plan

    def start(self, comm: Any, bases: tuple[int, int, int], tag: int) -> HierarchicalExecution:
        """Begin; see `pyreduce.execute.Plan.start`."""
        return HierarchicalExecution(self, comm, bases, tag)


class HierarchicalExecution:
    """A call under way on one rank."""

    def __init__(self, plan: HierarchicalPlan, comm: Any, bases: tuple[int, int, int], tag: int) -> None:
        self._plan = plan
        self._comm = comm
        self._tag = tag
        self._source, self._target, scratch = bases
        self._parts = [scratch + at for at in plan.parts]
        self._at = 0  # in the schedule
        self._work: SharedExecution | None = None
        self._sending: dict[int, Execution | ShortExecution] = {}  # segments that are between nodes
        self._ended: set[int] = set()  # segments for which that is done; they end in any order
        self._begun = 0
        self.mismatched = ""
        self._moved = 0
        self.moves = self.sent = self.received = 0
        self.talking = plan.talking
        if not plan.reduces and plan.layout.whole:
            self._begin_between(plan.in_flight)

    def advance(self) -> bool:
        """Do what can be done without waiting; True when the whole call is done on this rank."""
        while self._push():
            self._moved += 1
        self.moves = self._moved + sum(execution.moves for execution in self._sending.values())
        return self._at == len(self._plan.schedule) and not self._sending

    def linger(self) -> None:
        """Nothing can be done: wait a little for the node, or give way."""
        if self._work is not None:
            self._work.linger(SHORT_LINGER_NS if self._sending else LINGER_NS)
        else:
            sched_yield()

    def awaited(self) -> tuple[list[int], int]:
        """Peers that are waited for, and the segment."""
        peers: set[int] = set()
        for execution in self._sending.values():
            peers.update(execution.awaited()[0])
        if self._work is not None:
            peers.update(self._plan.ranks[local] for local in self._work.awaited()[0])
        return sorted(peers), min(self._at + 1, len(self._plan.schedule))

    def _push(self) -> bool:
        """One thing more, if one can be done."""
        plan = self._plan
        done = [k for k, execution in self._sending.items() if execution.advance()]
        for k in done:
            self._end_between(k)
        if self._work is not None:
            if not self._work.advance():
                self.mismatched = self._work.mismatched
                return bool(done)
            self._work = None
            kind, k = plan.schedule[self._at]
            self._at += 1
            self._end_within(kind, k)
            return True
        if self._at < len(plan.schedule):
            kind, k = plan.schedule[self._at]
            if self._may_begin(kind, k):
                self._work = self._begin_within(kind, k)
                return True
        return bool(done)

    # ---- within the node

    def _may_begin(self, kind: int, k: int) -> bool:
        plan = self._plan
        if plan.lane is None or kind == PRE:
            return True
        if kind == A:  # the lane's buffers are those of an earlier segment
            return k < plan.in_flight or k - plan.in_flight in self._ended
        if kind == C:
            return k in self._ended
        return len(self._ended) == plan.segments

    def _begin_within(self, kind: int, k: int) -> SharedExecution:
        plan = self._plan
        packed, gathered, blocks, units = self._parts[:4]
        if kind == A:
            counts = plan.shares(k)
            moves = plan.moves(k)
            if len(moves) == 1:
                source = self._source + moves[0][0]
            else:
                source = packed
                for at, to, nbytes in moves:
                    ops.copy(nbytes, packed + to, self._source + at)
            return self._within("reduce_scatter", counts, source, self._lane_part(k, 0))
        if kind == C:
            counts, moves = plan.shares(k), plan.moves(k)
            target = self._target + moves[0][0] if len(moves) == 1 else gathered
            return self._within("allgather", counts, self._lane_part(k, 1), target)
        if kind == PRE:
            counts = tuple(plan.call.counts[rank] for rank in plan.ranks)
            return self._within("allgather", counts, self._source, blocks)
        return self._within("allgather", plan.unit_lengths(), units, blocks)

    def _within(self, collective: str, counts: tuple[int, ...], source: int, target: int) -> SharedExecution:
        plan = self._plan.within(collective, counts)
        self.sent += plan.sent
        self.received += plan.received
        return plan.start(None, (source, target, 0), 0)

    def _end_within(self, kind: int, k: int) -> None:
        plan, size = self._plan, self._plan.itemsize
        _, gathered, blocks, _ = self._parts[:4]
        if kind == A:
            self._begin_between(k + 1)
        elif kind == C:
            moves = plan.moves(k)
            if len(moves) > 1:
                for at, to, nbytes in moves:
                    ops.copy(nbytes, self._target + at, gathered + to)
            if not plan.reduces:
                self._begin_between(k + 1 + plan.in_flight)
        elif kind == PRE:
            self._begin_between(plan.in_flight)
        else:
            before = sum(plan.call.counts[rank] for rank in plan.ranks[: plan.local])
            ops.copy(plan.call.counts[plan.call.rank] * size, self._target, blocks + before * size)

    # ---- between nodes

    def _lane_part(self, k: int, which: int) -> int:
        """Where a segment's pieces of this lane lie: 0 before messages, 1 after, 2 the program's scratch."""
        return self._parts[4 + 3 * (k % self._plan.in_flight) + which]

    def _begin_between(self, end: int) -> None:
        """Begin segments up to `end`."""
        plan = self._plan
        for k in range(self._begun, min(end, plan.segments)):
            self._begun = k + 1
            if plan.lane is None:
                continue
            counts = plan.lengths(plan.lane, k)
            source, target = self._lane_part(k, 0), self._lane_part(k, 1)
            offset = k * plan.segment * plan.itemsize
            if not plan.reduces:
                source = self._source if plan.layout.whole else self._parts[2] + self._unit_start()
                source += offset
            if not plan.gathers:
                target = (self._target if plan.layout.whole else self._parts[3]) + offset
            bases = (source, target, self._lane_part(k, 2))
            self._sending[k] = plan.between(counts).start(self._comm, bases, self._tag | k % plan.in_flight)

    def _unit_start(self) -> int:
        """Where this lane's unit begins in the node's blocks, in bytes."""
        plan = self._plan
        assert plan.lane is not None
        return sum(plan.unit_lengths()[: plan.lane]) * plan.itemsize

    def _end_between(self, k: int) -> None:
        execution = self._sending.pop(k)
        self.sent += execution.sent
        self.received += execution.received
        self._moved += execution.moves
        self._ended.add(k)
