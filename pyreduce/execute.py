"""The first interpreter of programs: over MPI point-to-point messages.

Segments
    Every block is cut into pieces of at most ``segment_bytes``; segment k of a call is the whole program run on piece k
    of every block. Segments do not know of each other: nothing is shared but the input and output, of which each has
    its own part, so folding one overlaps moving the next. ``in_flight`` *lanes* run at once; lane l runs segments
    l, l + L, l + 2L, ... one after the other, in its own scratch.

Order
    Between two ranks, messages of one lane are posted in program order on both sides, segment after segment, and MPI
    does not let messages of one tag overtake each other; lanes have different tags. So the n-th send of a lane meets
    the n-th receive of the same lane, whatever the timing, and no message needs a header.

Tags
    A tag is (digest of the call, call number mod 32, lane). A call that differs has another tag: its messages are not
    matched, and whoever waits for them finds them (see `pyreduce.peers`) before a byte is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mpi4py import MPI

from pyreduce import ops
from pyreduce.blocks import offsets
from pyreduce.calls import Call
from pyreduce.programs import INPUT, OUTPUT, Copy, Fold, Place, Program, Recv, Send, in_place_safe, places

__all__ = ["Execution", "Plan", "Tags"]

SCRATCH_BYTES = 32 << 20  # a program that wants more scratch than this gets smaller segments
LEAST_SEGMENT_BYTES = 4096
LANE_BITS, NUMBER_BITS = 3, 5
NOTICE_TAG = 0
SPACES = {INPUT: 0, OUTPUT: 1}
SCRATCH_SPACE = 2

Fragment = tuple[int, int]  # address, bytes


class Tags:
    """Tags of a communicator's calls: as many bits of the digest as the MPI's largest tag leaves room for."""

    def __init__(self, largest: int) -> None:
        bits = min(largest + 1, 1 << 31).bit_length() - 1
        self.digests = (1 << (bits - LANE_BITS - NUMBER_BITS)) - 3

    def tag(self, digest: int | None, number: int) -> int:
        """The tag of lane 0; None stands for calls that are not told apart (``check="off"``)."""
        kept = 2 if digest is None else 3 + digest % self.digests
        return ((kept << NUMBER_BITS) | (number & ((1 << NUMBER_BITS) - 1))) << LANE_BITS

    def neutral(self, number: int) -> int:
        """The tag under which calls are compared (``check="full"``), whatever they are."""
        return ((1 << NUMBER_BITS) | (number & ((1 << NUMBER_BITS) - 1))) << LANE_BITS

    @staticmethod
    def same_number(one: int, other: int) -> bool:
        """Whether two tags belong to calls of the same number."""
        return not ((one ^ other) >> LANE_BITS) & ((1 << NUMBER_BITS) - 1)

    @staticmethod
    def same_call(one: int, other: int) -> bool:
        """Whether two tags belong to the same call."""
        return one >> LANE_BITS == other >> LANE_BITS


class Where:
    """A place, compiled: its space and, for every block, the byte offset and the number of elements.

    In a call of a single segment, `whole` is (offset, bytes) of the place if it is in one piece.
    """

    __slots__ = ("blocks", "space", "whole")

    def __init__(self, space: int, blocks: tuple[tuple[int, int], ...], itemsize: int, single: bool) -> None:
        self.space = space
        self.blocks = blocks
        joined = _join([(o, n * itemsize) for o, n in blocks if n]) if single else []
        self.whole: Fragment | None = joined[0] if len(joined) == 1 else None


class Plan:
    """A program compiled for the sizes of one call: offsets, segments and scratch.

    Parameters
    ----------
    program : Program
    call : Call

    Attributes
    ----------
    scratch_bytes : int
        What `start` needs as scratch: slots x segment x lanes.
    in_place_safe : bool
        Whether the output may lie over the input (see `pyreduce.programs.in_place_safe`).
    """

    def __init__(self, program: Program, call: Call) -> None:
        self.call = call
        self.work_dtype = call.work_dtype
        self.program = program
        self.kernel = ops.kernel(call.op, call.work_dtype) if call.op is not None else (0, 0)
        self.divisor = call.nranks if call.divides else 0
        self.itemsize = self.work_dtype.itemsize
        self.limit = call.settings.message_bytes
        self._cut(call)
        self._lay_out(program, call)
        self.rounds = [self._compile(steps) for steps in program.rounds]
        self.talking = program.cost().rounds
        self.result = [self._where(Place(OUTPUT, b)) for b in self._output_blocks()] if self.divisor else []
        self.in_place_safe = in_place_safe(program)
        if call.collective == "reduce_scatter":
            self.in_place_safe &= call.counts[0] >= call.counts[call.rank]

    def _cut(self, call: Call) -> None:
        largest = max(call.counts)
        segment = call.settings.segment_bytes
        slots = self.program.scratch * call.settings.in_flight
        if slots:
            segment = min(segment, max(SCRATCH_BYTES // slots, LEAST_SEGMENT_BYTES))
        self.segment = max(1, segment // self.itemsize)
        self.segments = max(1, -(-largest // self.segment))
        self.lanes = min(call.settings.in_flight, self.segments)

    def _lay_out(self, program: Program, call: Call) -> None:
        """Offsets of blocks in input and output, and of slots in scratch.

        A slot is as large as the largest piece of any block it ever holds, so that slots which always hold the same
        neighbouring blocks are contiguous, as those blocks are.
        """
        starts = offsets(call.counts)
        own = {INPUT: "allgather", OUTPUT: "reduce_scatter"}
        self.starts = {
            space: (0,) * call.nranks if call.collective == single else starts for space, single in own.items()
        }
        sizes = [0] * program.scratch
        for steps in program.rounds:
            for step in steps:
                for place in places(step):
                    if place.space not in SPACES:
                        for _, slot, block in place.cells(call.nranks):
                            sizes[slot] = max(sizes[slot], min(call.counts[block], self.segment))
        self.slot_starts = offsets(sizes)
        lane_bytes = sum(sizes) * self.itemsize
        self.lane_bytes = -(-lane_bytes // 64) * 64
        self.scratch_bytes = self.lane_bytes * self.lanes

    def _output_blocks(self) -> Sequence[int]:
        return [self.call.rank] if self.call.collective == "reduce_scatter" else range(self.call.nranks)

    def _where(self, place: Place) -> Where:
        counts = self.call.counts
        cells = place.cells(len(counts))
        if place.space in SPACES:
            starts = self.starts[place.space]
            blocks = tuple((starts[block] * self.itemsize, counts[block]) for _, block, _ in cells)
            return Where(SPACES[place.space], blocks, self.itemsize, self.segments == 1)
        blocks = tuple((self.slot_starts[slot] * self.itemsize, counts[block]) for _, slot, block in cells)
        return Where(SCRATCH_SPACE, blocks, self.itemsize, self.segments == 1)

    def _compile(self, steps: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        recvs = [(step.peer, self._where(step.dst)) for step in steps if isinstance(step, Recv)]
        sends = [(step.peer, self._where(step.src)) for step in steps if isinstance(step, Send)]
        local = []
        for step in steps:
            if isinstance(step, Fold):
                local.append((True, self._where(step.dst), tuple(self._where(src) for src in step.srcs)))
            elif isinstance(step, Copy):
                local.append((False, self._where(step.dst), (self._where(step.src),)))
        return recvs, sends, local

    def start(self, comm: MPI.Intracomm, bases: tuple[int, int, int], tag: int) -> Execution:
        """Begin: post the first round of the first segments.

        Parameters
        ----------
        comm : MPI.Intracomm
        bases : tuple of int
            Addresses of the input, the output and the scratch.
        tag : int
            From `Tags`.
        """
        return Execution(self, comm, bases, tag)

    def pieces(self, where: Where, bases: Sequence[int], segment: int) -> list[Fragment]:
        """Address and bytes of every block's piece of a segment; empty pieces are left out."""
        base, itemsize, length = bases[where.space], self.itemsize, self.segment
        low = segment * length
        shift = 0 if where.space == SCRATCH_SPACE else low * itemsize
        found = []
        for offset, count in where.blocks:
            count = min(count - low, length)
            if count > 0:
                found.append((base + offset + shift, count * itemsize))
        return found

    def messages(self, where: Where, bases: Sequence[int], segment: int) -> list[Any]:
        """What to hand to MPI for a place: one buffer a message.

        Messages are cut by the sizes of the pieces alone, which both sides know; a message whose pieces lie apart
        travels as a derived datatype. Nothing to move in the first segment is still a message.
        """
        if where.whole is not None and where.whole[1] <= self.limit:
            offset, nbytes = where.whole
            return [MPI.buffer.fromaddress(bases[where.space] + offset, nbytes)]
        pieces = self.pieces(where, bases, segment)
        if not pieces:
            return [[None, 0, MPI.BYTE]] if segment == 0 else []
        cut: list[list[Fragment]] = [[]]
        room = self.limit
        for address, nbytes in pieces:
            while nbytes:
                if room == 0:
                    cut.append([])
                    room = self.limit
                taken = min(nbytes, room)
                cut[-1].append((address, taken))
                address, nbytes, room = address + taken, nbytes - taken, room - taken
        return [_buffer(fragments) for fragments in cut]


class Execution:
    """A plan under way on one rank. `advance` does what can be done and says whether all is done.

    Attributes
    ----------
    moves : int
        Grows whenever something was achieved.
    sent, received : int
        Bytes so far.
    """

    __slots__ = ("_bases", "_comm", "_lanes", "_live", "_plan", "_tag", "moves", "received", "sent", "talking")

    def __init__(self, plan: Plan, comm: MPI.Intracomm, bases: tuple[int, int, int], tag: int) -> None:
        self._plan = plan
        self._comm = comm
        self._tag = tag
        self.moves = self.sent = self.received = 0
        self.talking = plan.talking
        inp, out, scratch = bases
        self._bases = [(inp, out, scratch + lane * plan.lane_bytes) for lane in range(plan.lanes)]
        # A lane: [segment, round, receives under way, sends under way]
        self._lanes: list[list[Any]] = [[lane, -1, None, None] for lane in range(plan.lanes)]
        self._live = plan.lanes
        for lane in self._lanes:
            self._next_round(lane)

    def advance(self) -> bool:
        """Do what can be done without waiting; True when the whole call is done on this rank."""
        if self._live:
            for lane in self._lanes:
                self._push(lane)
        return not self._live

    def awaited(self) -> tuple[list[int], int]:
        """Peers whose messages are still to come, and the round (from 1) of the slowest lane."""
        peers: set[int] = set()
        slowest = len(self._plan.rounds)
        for segment, number, recvs, _ in self._lanes:
            if segment < self._plan.segments and number < len(self._plan.rounds):
                slowest = min(slowest, number + 1)
                if recvs:
                    peers.update(peer for peer, _ in self._plan.rounds[number][0])
        return sorted(peers), slowest

    def _push(self, lane: list[Any]) -> None:
        """Move one lane as far as it goes."""
        while lane[0] < self._plan.segments:
            if lane[2]:
                if not _all_done(lane[2]):
                    return
                lane[2] = None
                self.moves += 1
            if lane[2] is None:
                self._work(lane)
                lane[2] = ()
            if lane[3]:
                if not _all_done(lane[3]):
                    return
                lane[3] = None
            self._next_round(lane)

    def _next_round(self, lane: list[Any]) -> None:
        """Post the next round of a lane: of its next segment if this one has none left."""
        plan = self._plan
        lane[1] += 1
        self.moves += 1
        if lane[1] == len(plan.rounds):
            self._divide(lane)
            lane[0] += plan.lanes
            lane[1] = 0
            if lane[0] >= plan.segments:
                self._live -= 1
                return
        number = lane[0] % plan.lanes
        bases, tag, comm = self._bases[number], self._tag | number, self._comm
        recvs, sends, _ = plan.rounds[lane[1]]
        lane[2] = posted = []
        for peer, where in recvs:
            for message in plan.messages(where, bases, lane[0]):
                posted.append(comm.Irecv(message, peer, tag))
                self.received += _release(message)
        lane[3] = posted = []
        for peer, where in sends:
            for message in plan.messages(where, bases, lane[0]):
                posted.append(comm.Isend(message, peer, tag))
                self.sent += _release(message)
        if not lane[2]:
            lane[2] = None

    def _work(self, lane: list[Any]) -> None:
        """The folds and copies of a lane's round."""
        plan = self._plan
        segment, bases = lane[0], self._bases[lane[0] % plan.lanes]
        for folds, dst, srcs in plan.rounds[lane[1]][2]:
            for nbytes, target, sources in _rows(plan, dst, srcs, bases, segment):
                if folds:
                    ops.fold(plan.kernel, nbytes // plan.itemsize, target, sources)
                elif target != sources[0]:
                    ops.copy(nbytes, target, sources[0])

    def _divide(self, lane: list[Any]) -> None:
        plan = self._plan
        for where in plan.result:
            for address, nbytes in plan.pieces(where, self._bases[lane[0] % plan.lanes], lane[0]):
                ops.divide(plan.kernel[1], nbytes // plan.itemsize, address, address, plan.divisor)


def _rows(
    plan: Plan, dst: Where, srcs: Sequence[Where], bases: Sequence[int], segment: int
) -> Iterator[tuple[int, int, list[int]]]:
    """Bytes, target and sources of each contiguous piece of a fold; one piece where all is in one piece."""
    sources = [bases[src.space] + src.whole[0] for src in srcs if src.whole is not None]
    if dst.whole is not None and len(sources) == len(srcs):
        yield dst.whole[1], bases[dst.space] + dst.whole[0], sources
        return
    for target, *rest in zip(*(plan.pieces(where, bases, segment) for where in (dst, *srcs)), strict=True):
        yield target[1], target[0], [source for source, _ in rest]


def _join(fragments: Sequence[Fragment]) -> list[Fragment]:
    joined: list[Fragment] = []
    for address, nbytes in fragments:
        if joined and sum(joined[-1]) == address:
            joined[-1] = (joined[-1][0], joined[-1][1] + nbytes)
        else:
            joined.append((address, nbytes))
    return joined


def _buffer(fragments: Sequence[Fragment]) -> Any:
    joined = _join(fragments)
    if len(joined) == 1:
        return MPI.buffer.fromaddress(*joined[0])
    scattered = MPI.BYTE.Create_hindexed([n for _, n in joined], [a for a, _ in joined]).Commit()
    return [MPI.BOTTOM, 1, scattered]


def _release(message: Any) -> int:
    """Bytes of a message; a derived datatype is given back, which MPI keeps until the message has gone."""
    if type(message) is MPI.buffer:
        return message.nbytes
    if message[1] == 0:
        return 0
    nbytes = int(message[2].Get_size())
    message[2].Free()
    return nbytes


def _all_done(requests: list[MPI.Request]) -> bool:
    if len(requests) == 1:
        return requests[0].Test()
    return MPI.Request.Testall(requests)
