"""The first interpreter of programs: over MPI point-to-point messages and the one-sided layer.

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
    A tag is (digest of the call, call number mod 31, lane). A call that differs has another tag: its messages are not
    matched, and whoever waits for them finds them (see `pyreduce.peers`) before a byte is used.

Windows and cells
    The one-sided steps of a program happen in a `Room`: for every lane two sets of window and cells (`Turn`), used turn
    about. Why two are enough: a program does not end on any rank before all ranks have begun it, since every rank's
    result holds something of every rank's (and where a block is empty, the steps are the same). So when a rank begins
    run m+2 on a lane, all ranks have begun run m+1, hence ended run m, and nobody reads or writes its set of windows or
    cells any more. (`pyreduce.verify` plays three runs.)

    A credit carries the digest of its call: it is ``CREDIT + digest``, so a cell tells how many credits came, and that
    they came from the same call; a cell only grows, and what earlier runs have spent is subtracted. On a user's window
    there is one set, with the user's cells; the program takes back what it has spent. There a peer may be one credit
    ahead, in the next call, whatever its digest is; that call finds out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import chain
from os import sched_yield
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from pyreduce import ops
from pyreduce._core import ffi, lib
from pyreduce.arena import LINE
from pyreduce.arrays import Array
from pyreduce.blocks import offsets
from pyreduce.calls import Call
from pyreduce.libmpi import lend, raise_for
from pyreduce.programs import (
    INPUT,
    OUTPUT,
    SCRATCH,
    WINDOW,
    Copy,
    Fold,
    Get,
    Notify,
    Place,
    Program,
    Put,
    Recv,
    Send,
    Step,
    Wait,
    in_place_safe,
    places,
    reads,
    writes,
)
from pyreduce.trace import Shape, Trace
from pyreduce.transports import Chunk

__all__ = ["CELL", "LEAST_CREDIT", "Execution", "Plan", "Room", "ShortExecution", "Tags", "TracedShortExecution"]

SCRATCH_BYTES = 32 << 20  # a program that wants more scratch than this gets smaller segments
LEAST_SEGMENT_BYTES = 4096
APART_BYTES = 16 << 10  # larger pieces of a message are messages of their own
LANE_BITS, NUMBER_BITS = 3, 5
NO_NUMBER = (1 << NUMBER_BITS) - 1  # calls are numbered modulo this
NOTICE_TAG = 0
# Where the bases of a run lie: input, output, scratch, own window, and from PEERS on every rank's window.
SPACES = {INPUT: 0, OUTPUT: 1, SCRATCH: 2, WINDOW: 3}
PEERS = 4
CELL = LINE  # bytes from one cell to the next
TURNS = 2
DIGEST_BITS = 32
CREDIT_BITS = 48  # one credit is worth 1 << CREDIT_BITS and the digest: 2**16 of them add up without a carry
LEAST_CREDIT = 1 << CREDIT_BITS - 1  # what a cell holds that is smaller is no credit of a call
WORD = (1 << 64) - 1

FOLD, COPY, PUT, GET, NOTIFY = range(5)
WORKS = {FOLD: lib.PR_WORK_FOLD, COPY: lib.PR_WORK_COPY}
LINGER_NS = 200_000
CLOCK_AHEAD = perf_counter() - lib.pr_clock() * 1e-9  # of the core's clock, which on Linux is the same

Fragment = tuple[int, int]  # address, bytes
Local = tuple[int, int, Any, Any]  # kind, peer, and for data target and sources, for a notify cell and value
Round = tuple[list[Any], list[Any], list[Local], list[tuple[int, int]]]  # receives, sends, the rest, waits


class Tags:
    """Tags of a communicator's calls: as many bits of the digest as the MPI's largest tag leaves room for."""

    def __init__(self, largest: int) -> None:
        bits = min(largest + 1, 1 << 31).bit_length() - 1
        self.digests = (1 << (bits - LANE_BITS - NUMBER_BITS)) - 3

    def tag(self, digest: int | None, number: int) -> int:
        """The tag of lane 0; None stands for calls that are not told apart (``check="off"``)."""
        kept = 2 if digest is None else 3 + digest % self.digests
        return ((kept << NUMBER_BITS) | number % NO_NUMBER) << LANE_BITS

    @staticmethod
    def without_number(tag: int) -> int:
        """The tag for messages that are prepared once, for calls of many numbers."""
        return tag | NO_NUMBER << LANE_BITS

    def neutral(self, number: int) -> int:
        """The tag under which calls are compared (``check="full"``), whatever they are."""
        return ((1 << NUMBER_BITS) | number % NO_NUMBER) << LANE_BITS

    @staticmethod
    def same_number(one: int, other: int) -> bool:
        """Whether two tags belong to calls of the same number."""
        return not ((one ^ other) >> LANE_BITS) & ((1 << NUMBER_BITS) - 1)

    @staticmethod
    def same_call(one: int, other: int) -> bool:
        """Whether two tags belong to the same call."""
        return one >> LANE_BITS == other >> LANE_BITS


def _count_spent(program: Program) -> list[tuple[int, int]]:
    """Of every cell: the credits that are spent and not taken back in a run, and those that are given in it."""
    waited, taken = [0] * program.cells, [0] * program.cells
    for steps in program.rounds:
        for step in steps:
            if isinstance(step, Wait):
                waited[step.cell] = max(waited[step.cell], step.value)
            elif isinstance(step, Notify) and step.value < 0:
                taken[step.cell] -= step.value
    return [(most if not back else 0, max(most, back)) for most, back in zip(waited, taken, strict=True)]


class Where:
    """A place, compiled: its space and, for every block, the byte offset and the number of elements.

    In a call of a single segment, `whole` is (offset, bytes) of the place if it is in one piece; `message` if it also
    travels in one.
    """

    __slots__ = ("blocks", "message", "space", "whole")

    def __init__(self, space: int, blocks: tuple[tuple[int, int], ...], itemsize: int, single: bool) -> None:
        self.space = space
        self.blocks = blocks
        pieces = [(o, n * itemsize) for o, n in blocks if n]
        joined = _join(pieces) if single else []
        self.whole: Fragment | None = joined[0] if len(joined) == 1 else None
        self.message = None if _travel_apart(pieces) else self.whole


class Plan:
    """A program compiled for the sizes of one call: offsets, segments and scratch.

    Parameters
    ----------
    program : Program
    call : Call
    in_window : bool
        The window is a user's: rows of the size of a block.
    result : sequence of Place, optional
        What is divided in the end; default the output.
    ranks : sequence of int, optional
        The communicator's ranks that the program's ranks are; default: all of it.
    divisor : int, optional
        Of a mean; default the number of ranks.
    scratch : int, optional
        The most scratch slots that any rank's program has, where they differ: all ranks must cut the same segments.

    Attributes
    ----------
    scratch_bytes : int
        What `start` needs as scratch: slots x segment x lanes.
    window_bytes : int
        What each turn of a lane needs as window.
    one_sided : bool
        Whether `start` needs a room.
    in_place_safe : bool
        Whether the output may lie over the input (see `pyreduce.programs.in_place_safe`).
    """

    def __init__(
        self,
        program: Program,
        call: Call,
        *,
        in_window: bool = False,
        result: Sequence[Place] | None = None,
        ranks: Sequence[int] | None = None,
        divisor: int | None = None,
        scratch: int | None = None,
    ) -> None:
        assert ranks is None or not program.one_sided
        self.ranks = range(call.nranks) if ranks is None else ranks
        self.call = call
        self.counts = call.counts  # what moves, when the call is told as another one
        self.shape: Shape | None = None  # for traces
        self.why = ""
        self.work_dtype = call.work_dtype
        self.program = program
        self.kernel = ops.kernel(call.op, call.work_dtype) if call.op is not None else (0, 0)
        self.divisor = (divisor or call.nranks) if call.divides else 0
        self.itemsize = self.work_dtype.itemsize
        self.limit = call.settings.message_bytes
        self.scratch_slots = program.scratch if scratch is None else scratch
        self.one_sided = program.one_sided
        self.kept: dict[tuple[int, int, bool], tuple[list[MPI.Prequest], int]] | None = None
        self.own_scratch: Array | None = None
        self._cut(call, in_window)
        self._lay_out(program, call, in_window)
        self.rounds: list[Round] = []
        self.short: Short | None = None
        self.shared: bool | None = None
        self.credit = 0  # what a credit of this call is worth
        if not self.one_sided:
            self._compile_rounds()
        self.talking = program.cost().rounds
        self.bytes_put, self.bytes_got = self._count_bytes(Put), self._count_bytes(Get)
        self.result: list[Where] = []
        if self.divisor:
            divided = [Place(OUTPUT, b) for b in self._output_blocks()] if result is None else result
            self.result = [self._where(place) for place in divided]
        if not self.one_sided and self.segments == 1 and lend():
            self.short = Short(self)
        self.in_place_safe = in_place_safe(program)
        if program.collective == "reduce_scatter":
            self.in_place_safe &= call.counts[0] >= call.counts[call.rank]

    def traced_shape(self) -> Shape:
        """What a trace says of its rounds."""
        if self.shape is None:
            self.shape = Shape(self.program, self.counts, self.segment, self.itemsize)
        return self.shape

    def persistent(self) -> Plan:
        """The same plan, with scratch of its own and messages that are prepared once: for one place of the data."""
        plan = copy(self)
        plan.kept = {}
        plan.short = self.short and self.short.persistent()
        plan.own_scratch = np.empty(self.scratch_bytes, np.uint8)
        return plan

    def free(self) -> None:
        """Give back a persistent plan's messages; none may be under way."""
        for requests, _ in (self.kept or {}).values():
            for request in requests:
                request.Free()
        self.kept = {}
        if self.short is not None:
            self.short.free()

    def bind(self, shared: bool) -> None:
        """Compile the rounds for a transport: with shared memory, what is got for a fold is folded where it lies."""
        if self.shared is not shared:
            self.shared = shared
            self.credit = 1 << CREDIT_BITS
            if self.call.settings.check != "off":
                self.credit += self.call.digest() & ((1 << DIGEST_BITS) - 1)
            self._compile_rounds()

    def _cut(self, call: Call, in_window: bool) -> None:
        """Segments; a call on a user's window is one, since each would need cells of its own."""
        largest = max(call.counts)
        segment = call.settings.segment_bytes
        slots = (self.scratch_slots + TURNS * self.program.window) * call.settings.in_flight
        if slots:
            segment = min(segment, max(SCRATCH_BYTES // slots, LEAST_SEGMENT_BYTES))
        self.segment = max(1, largest if in_window else segment // self.itemsize)
        self.segments = max(1, -(-largest // self.segment))
        self.lanes = min(call.settings.in_flight, self.segments)

    def _lay_out(self, program: Program, call: Call, in_window: bool) -> None:
        """Offsets of blocks in input and output, and of slots in scratch and window.

        A scratch slot is as large as the largest piece of any block it ever holds, so that slots which always hold the
        same neighbouring blocks are contiguous, as those blocks are. Window slots are as large as the largest piece
        of all, since every rank must know where its peers' slots lie.
        """
        starts = offsets(call.counts)
        own = {INPUT: "allgather", OUTPUT: "reduce_scatter"}
        self.starts = {
            space: (0,) * call.nranks if program.collective == single else starts for space, single in own.items()
        }
        sizes = [0] * program.scratch
        for steps in program.rounds:
            for step in steps:
                for place in places(step):
                    if place.space == SCRATCH:
                        for _, slot, block in place.cells(call.nranks):
                            sizes[slot] = max(sizes[slot], min(call.counts[block], self.segment))
        largest = min(max(call.counts), self.segment)
        window = largest if in_window else -(-largest // 8) * 8
        self.slot_starts = {SCRATCH: offsets(sizes), WINDOW: tuple(window * slot for slot in range(program.window))}
        lane_bytes = sum(sizes) * self.itemsize
        self.lane_bytes = -(-lane_bytes // 64) * 64
        self.scratch_bytes = self.lane_bytes * self.lanes
        self.window_bytes = window * self.itemsize * program.window
        self.spent = _count_spent(program)

    def _output_blocks(self) -> Sequence[int]:
        return [self.call.rank] if self.program.collective == "reduce_scatter" else range(self.call.nranks)

    def _where(self, place: Place, peer: int | None = None) -> Where:
        """A place, compiled; with `peer`, in that rank's window."""
        counts = self.call.counts
        cells = place.cells(len(counts))
        starts = self.slot_starts.get(place.space)
        if starts is None:
            starts = self.starts[place.space]
        blocks = tuple((starts[index] * self.itemsize, counts[block]) for _, index, block in cells)
        space = SPACES[place.space] if peer is None else PEERS + peer
        return Where(space, blocks, self.itemsize, self.segments == 1)

    def _count_bytes(self, kind: type[Put] | type[Get]) -> int:
        """Bytes put or got in a whole call, by whichever transport."""
        counts = self.call.counts
        moved = [step.dst for steps in self.program.rounds for step in steps if isinstance(step, kind)]
        return sum(counts[block] for place in moved for _, _, block in place.cells(len(counts))) * self.itemsize

    def _compile_rounds(self) -> None:
        self.rounds = [self._compile(steps, number) for number, steps in enumerate(self.program.rounds)]

    def _compile(self, steps: Sequence[Step], number: int) -> Round:
        recvs = [(self.ranks[step.peer], self._where(step.dst)) for step in steps if isinstance(step, Recv)]
        sends = [(self.ranks[step.peer], self._where(step.src)) for step in steps if isinstance(step, Send)]
        waits = [(step.cell, step.value) for step in steps if isinstance(step, Wait)]
        local: list[Local] = []
        where_it_lies: dict[Place, Where] = {}

        def find(place: Place) -> Where:
            return where_it_lies.get(place) or self._where(place)

        for at, step in enumerate(steps):
            if isinstance(step, Fold):
                local.append((FOLD, 0, self._where(step.dst), tuple(find(src) for src in step.srcs)))
            elif isinstance(step, Copy):
                local.append((COPY, 0, self._where(step.dst), (find(step.src),)))
            elif isinstance(step, Get):
                source = self._where(step.src, step.peer)
                if self.shared and self._only_read_next(step, number, at):
                    where_it_lies[step.dst] = source
                else:
                    local.append((COPY if self.shared else GET, step.peer, self._where(step.dst), (source,)))
            elif isinstance(step, Put):
                target = self._where(step.dst, step.peer)
                local.append((COPY if self.shared else PUT, step.peer, target, (find(step.src),)))
            elif isinstance(step, Notify):
                local.append((NOTIFY, step.peer, step.cell, step.value))
        return recvs, sends, local, waits

    def _only_read_next(self, get: Get, number: int, at: int) -> bool:
        """Whether what step `at` of round `number` gets into scratch may be read where it lies instead.

        So it is if it is read in the rest of that round only, as a whole, and until then nothing changes the scratch or
        the peer's window: no step of ours, and no step of others, who may write there from our next notify on.
        """
        place = get.dst
        if place.space != SCRATCH:
            return False
        slots = set(range(place.slot, place.slot + place.count))

        def touches(named: Sequence[Place]) -> bool:
            return any(p.space == SCRATCH and slots & set(range(p.slot, p.slot + p.count)) for p in named)

        changed = False
        for other, steps in enumerate(self.program.rounds):
            for index, step in enumerate(steps):
                if touches(reads(step)):
                    whole = all(p == place for p in reads(step) if touches([p]))
                    if other != number or index < at or changed or not whole or isinstance(step, Send):
                        return False
                if other == number and index > at:
                    changed |= isinstance(step, Notify) or touches(writes(step))
                    changed |= isinstance(step, Put) and step.peer == get.peer
        return True

    def start(
        self,
        comm: MPI.Intracomm,
        bases: tuple[int, int, int],
        tag: int,
        room: Room | None = None,
        trace: Trace | None = None,
    ) -> Execution | ShortExecution:
        """Begin: post the first round of the first segments.

        Parameters
        ----------
        comm : MPI.Intracomm
        bases : tuple of int
            Addresses of the input, the output and the scratch.
        tag : int
            From `Tags`.
        room : Room, optional
            Where one-sided steps happen; the plan must be bound to its transport.
        trace : Trace, optional
            What is told of its rounds.
        """
        if self.short is not None:
            if trace is not None:
                return TracedShortExecution(self, comm, bases, tag, trace)
            return ShortExecution(self.short, comm, bases, tag)
        if trace is not None:
            return TracedExecution(self, comm, bases, tag, room, trace)
        return Execution(self, comm, bases, tag, room)

    def pieces(self, where: Where, bases: Sequence[int], segment: int) -> list[Fragment]:
        """Address and bytes of every block's piece of a segment; empty pieces are left out."""
        base, itemsize, length = bases[where.space], self.itemsize, self.segment
        low = segment * length
        shift = low * itemsize if where.space <= SPACES[OUTPUT] else 0
        found = []
        for offset, count in where.blocks:
            count = min(count - low, length)
            if count > 0:
                found.append((base + offset + shift, count * itemsize))
        return found

    def messages(self, where: Where, bases: Sequence[int], segment: int) -> list[Any]:
        """What to hand to MPI for a place: one buffer a message.

        Messages are cut by the sizes of the pieces alone, which both sides know: pieces that are not small travel
        apart; small ones together, as a derived datatype if they lie apart. Nothing to move in the first segment is
        still a message.
        """
        if where.message is not None and where.message[1] <= self.limit:
            offset, nbytes = where.message
            return [MPI.buffer.fromaddress(bases[where.space] + offset, nbytes)]
        return [_buffer(fragments) for fragments in self.cut_messages(where, bases, segment)]

    def cut_messages(self, where: Where, bases: Sequence[int], segment: int) -> list[list[Fragment]]:
        """The messages of a place, each by what it is made of."""
        pieces = self.pieces(where, bases, segment)
        if not pieces:
            return [[]] if segment == 0 else []
        apart = _travel_apart(pieces)
        cut: list[list[Fragment]] = [[]]
        room = self.limit
        for address, nbytes in pieces:
            if apart and cut[-1]:
                cut.append([])
                room = self.limit
            while nbytes:
                if room == 0:
                    cut.append([])
                    room = self.limit
                taken = min(nbytes, room)
                cut[-1].append((address, taken))
                address, nbytes, room = address + taken, nbytes - taken, room - taken
        return [_join(fragments) for fragments in cut]


class Turn:
    """One set of window and cells of a lane: where it lies, and what earlier runs have spent of its cells.

    Attributes
    ----------
    windows : tuple of int
        The bases of one's own window and of every rank's: addresses, or offsets in the chunk where only MPI gets there.
    """

    def __init__(
        self, data: Chunk, data_offset: int, cells: Chunk, cells_offset: int, ncells: int, nranks: int
    ) -> None:
        self.data = data
        self.cells = cells
        self.offset = cells_offset
        self.own_cells = cells.base + cells_offset
        self.spent = [0] * ncells
        bases = [data.peer_base(peer) + data_offset if data.shared else data_offset for peer in range(nranks)]
        self.windows = (data.base + data_offset, *bases)

    def look(self, cell: int, value: int, total: int, credit: int) -> bool | None:
        """Whether a cell holds `value` credits of this call, of `total` that it will get; None: of another call."""
        held = (self.cells.read(self.own_cells + cell * CELL) - self.spent[cell]) & WORD
        credits, digests = held >> CREDIT_BITS, held & ((1 << CREDIT_BITS) - 1)
        if credits < value:
            return False
        ahead = max(credits - total, 0)
        rest = digests - (credits - ahead) * (credit & ((1 << DIGEST_BITS) - 1))
        return True if 0 <= rest < (ahead << DIGEST_BITS) + 1 else None


class Room:
    """The windows and cells in which the one-sided steps of programs happen, lane by lane, turn about."""

    def __init__(self, turns: Sequence[Sequence[Turn]], ncells: int, window_bytes: int) -> None:
        self._turns = turns
        self._next = [0] * len(turns)
        self.ncells = ncells
        self.window_bytes = window_bytes

    @staticmethod
    def size(lanes: int, ncells: int, window_bytes: int) -> int:
        """Bytes of a region for `carve`."""
        return lanes * TURNS * (ncells * CELL + -(-window_bytes // CELL) * CELL)

    @classmethod
    def carve(cls, chunk: Chunk, offset: int, lanes: int, ncells: int, window_bytes: int, nranks: int) -> Room:
        """A room in a region of `size` zeroed bytes."""
        set_bytes = cls.size(1, ncells, window_bytes) // TURNS
        starts = [[offset + (lane * TURNS + turn) * set_bytes for turn in range(TURNS)] for lane in range(lanes)]
        turns = [
            [Turn(chunk, start + ncells * CELL, chunk, start, ncells, nranks) for start in lane] for lane in starts
        ]
        return cls(turns, ncells, window_bytes)

    @property
    def shared(self) -> bool:
        """Whether peers' windows are read where they lie."""
        return self._turns[0][0].data.shared

    def holds(self, plan: Plan) -> bool:
        """Whether a plan's runs find room here."""
        return plan.program.cells <= self.ncells and plan.window_bytes <= self.window_bytes

    def take(self, lane: int) -> Turn:
        """The turn of a lane's next run."""
        turns = self._turns[lane]
        self._next[lane] += 1
        return turns[(self._next[lane] - 1) % len(turns)]


class Execution:
    """A plan under way on one rank. `advance` does what can be done and says whether all is done.

    Attributes
    ----------
    moves : int
        Grows whenever something was achieved.
    mismatched : str
        That a credit of another call has come, if so.
    sent, received : int
        Bytes so far; those that are put and got count from the start.
    """

    __slots__ = (
        "_bases", "_comm", "_credit", "_lanes", "_live", "_plan", "_room", "_tag", "_turns",
        "mismatched", "moves", "received", "sent", "talking",
    )  # fmt: skip

    def __init__(
        self, plan: Plan, comm: MPI.Intracomm, bases: tuple[int, int, int], tag: int, room: Room | None = None
    ) -> None:
        self._plan = plan
        self._comm = comm
        self._tag = tag
        self._room = room
        self.moves = 0
        self.sent, self.received = plan.bytes_put, plan.bytes_got
        self.mismatched = ""
        self.talking = plan.talking
        inp, out, scratch = bases
        self._bases: list[tuple[int, ...]] = [
            (inp, out, scratch + lane * plan.lane_bytes) for lane in range(plan.lanes)
        ]
        self._turns: list[Turn] = []
        self._credit = plan.credit
        if room is not None:
            self._turns = [room.take(lane) for lane in range(plan.lanes)]
            self._bases = [base + turn.windows for base, turn in zip(self._bases, self._turns, strict=True)]
        # A lane: [segment, round, receives under way, sends under way, waits not yet satisfied]
        self._lanes: list[list[Any]] = [[lane, -1, None, None, None] for lane in range(plan.lanes)]
        self._live = plan.lanes
        for lane in self._lanes:
            self._next_round(lane)

    def advance(self) -> bool:
        """Do what can be done without waiting; True when the whole call is done on this rank."""
        if self._live:
            for lane in self._lanes:
                self._push(lane)
        return not self._live

    def linger(self) -> None:
        """Give way: ranks may outnumber cores."""
        sched_yield()

    def awaited(self) -> tuple[list[int], int]:
        """Peers that are still to be heard from, and the round (from 1) of the slowest lane."""
        peers: set[int] = set()
        slowest = len(self._plan.rounds)
        for segment, number, recvs, _, waits in self._lanes:
            if segment < self._plan.segments and number < len(self._plan.rounds):
                slowest = min(slowest, number + 1)
                if recvs:
                    peers.update(peer for peer, _ in self._plan.rounds[number][0])
                if waits:  # whose credits are missing, a cell does not say
                    peers.update(peer for peer in range(self._plan.call.nranks) if peer != self._plan.call.rank)
        return sorted(peers), slowest

    def _push(self, lane: list[Any]) -> None:
        """Move one lane as far as it goes."""
        while lane[0] < self._plan.segments:
            if lane[2]:
                if not _all_done(lane[2]):
                    return
                lane[2] = None
                self.moves += 1
                if self._turns:  # a message orders windows as a wait does
                    self._turns[lane[0] % self._plan.lanes].data.fence()
            if lane[4]:
                if not self._satisfied(lane):
                    return
                lane[4] = None
                self.moves += 1
            if lane[2] is None:
                self._work(lane)
                lane[2] = ()
            if lane[3]:
                if not _all_done(lane[3]):
                    return
                lane[3] = None
            self._next_round(lane)

    def _satisfied(self, lane: list[Any]) -> bool:
        """Whether the waits of a lane's round are satisfied; those that are, are not looked at again."""
        plan, turn = self._plan, self._turns[lane[0] % self._plan.lanes]
        waits = lane[4]
        while waits:
            cell, value = waits[-1]
            seen = turn.look(cell, value, plan.spent[cell][1], self._credit)
            if not seen:
                if seen is None:
                    self.mismatched = f"a cell of rank {plan.call.rank} holds credits that this call did not give"
                turn.cells.poke()
                return False
            waits.pop()
        return True

    def _next_round(self, lane: list[Any]) -> None:
        """Post the next round of a lane: of its next segment if this one has none left."""
        plan = self._plan
        lane[1] += 1
        self.moves += 1
        number = lane[0] % plan.lanes
        if lane[1] == len(plan.rounds):
            self._divide(lane)
            if self._turns:
                self._settle(number)
            lane[0] += plan.lanes
            lane[1] = 0
            if lane[0] >= plan.segments:
                self._live -= 1
                return
            if self._room is not None:
                self._turns[number] = turn = self._room.take(number)
                self._bases[number] = self._bases[number][: PEERS - 1] + turn.windows
        bases, tag, comm = self._bases[number], self._tag | number, self._comm
        recvs, sends, _, waits = plan.rounds[lane[1]]
        if sends and self._turns:
            self._turns[number].data.fence()
        if plan.kept is None:
            lane[2], self.received = self._post(recvs, comm.Irecv, bases, lane[0], tag, self.received)
            lane[3], self.sent = self._post(sends, comm.Isend, bases, lane[0], tag, self.sent)
        else:
            lane[2], moved = self._start_kept(recvs, comm.Recv_init, bases, (lane[0], lane[1], False), number)
            self.received += moved
            lane[3], moved = self._start_kept(sends, comm.Send_init, bases, (lane[0], lane[1], True), number)
            self.sent += moved
        lane[4] = waits[::-1]
        if not lane[2]:
            lane[2] = None

    def _post(
        self, messages: Sequence[Any], post: Any, bases: Sequence[int], segment: int, tag: int, moved: int
    ) -> tuple[list[MPI.Request], int]:
        """Begin a round's messages of one direction; the requests, and the bytes that have been moved by then."""
        posted = []
        for peer, where in messages:
            for message in self._plan.messages(where, bases, segment):
                posted.append(post(message, peer, tag))
                moved += _release(message)
        return posted, moved

    def _start_kept(
        self, messages: Sequence[Any], make: Any, bases: Sequence[int], key: tuple[int, int, bool], lane: int
    ) -> tuple[list[MPI.Prequest], int]:
        """The same with persistent requests, which are made when they are first needed.

        Their tag bears no call's number. It needs none: the calls of a communicator follow each other, so the n-th
        message of a tag between two ranks meets the n-th receive, whichever calls they belong to.
        """
        plan = self._plan
        assert plan.kept is not None
        kept = plan.kept.get(key)
        if kept is None:
            tag = Tags.without_number(self._tag)
            made, nbytes = self._post(messages, make, bases, key[0], tag | lane, 0)
            plan.kept[key] = kept = [request for request in made if isinstance(request, MPI.Prequest)], nbytes
        requests, nbytes = kept
        MPI.Prequest.Startall(requests)
        return list(requests), nbytes

    def _settle(self, number: int) -> None:
        """A run is over: what its program has waited for, and not taken back, is spent."""
        turn = self._turns[number]
        for cell, (left, _) in enumerate(self._plan.spent):
            turn.spent[cell] = (turn.spent[cell] + left * self._credit) & WORD

    def _work(self, lane: list[Any]) -> None:
        """The steps of a lane's round that wait for nothing, in order."""
        plan = self._plan
        segment, number = lane[0], lane[0] % plan.lanes
        bases = self._bases[number]
        begun = -1
        under_way: set[int] = set()  # peers with whom puts or gets have only been started
        notified: set[int] = set()
        for kind, peer, dst, srcs in plan.rounds[lane[1]][2]:
            if under_way and kind != begun:
                self._complete(self._turns[number].data, under_way)
            if kind == NOTIFY:
                turn = self._turns[number]
                if peer in notified:
                    turn.cells.flush(peer)
                turn.cells.notify(peer, turn.cells.target(peer, turn.offset + dst * CELL), srcs * self._credit)
                notified.add(peer)
                continue
            for nbytes, target, sources in _rows(plan, dst, srcs, bases, segment):
                if kind == FOLD:
                    ops.fold(plan.kernel, nbytes // plan.itemsize, target, sources)
                elif kind == COPY:
                    if target != sources[0]:
                        ops.copy(nbytes, target, sources[0])
                elif kind == GET:
                    self._turns[number].data.get(peer, sources[0], target, nbytes)
                else:
                    self._turns[number].data.put(peer, target, sources[0], nbytes)
            if kind in (GET, PUT):
                begun = kind
                under_way.add(peer)
        if under_way:
            self._complete(self._turns[number].data, under_way)
        if notified:
            self._complete(self._turns[number].cells, notified)

    @staticmethod
    def _complete(chunk: Chunk, peers: set[int]) -> None:
        for peer in peers:
            chunk.flush(peer)
        peers.clear()

    def _divide(self, lane: list[Any]) -> None:
        plan = self._plan
        for where in plan.result:
            for address, nbytes in plan.pieces(where, self._bases[lane[0] % plan.lanes], lane[0]):
                ops.divide(plan.kernel[1], nbytes // plan.itemsize, address, address, plan.divisor)


class Short:
    """A plan of messages in one segment as the C core runs it (`csrc/rounds.c`), for calls that should cost little.

    What does not depend on where the data lie is worked out here, once.

    Attributes
    ----------
    rounds, talking : int
        Rounds, and those in which messages travel.
    peers : list of list of int
        From whom each round receives.
    sent, received : int
        Bytes.
    """

    def __init__(self, plan: Plan) -> None:
        self.kept = False
        self.rounds, self.talking = len(plan.rounds), plan.talking
        self.peers = [sorted({peer for peer, _ in recvs}) for recvs, _, _, _ in plan.rounds]
        self.sent = self.received = 0
        self._idle: list[Any] = []
        self._fold = (*plan.kernel, plan.itemsize, plan.divisor)
        nowhere = [0] * (len(SPACES) + 1)
        words, most, together = [], 0, 0
        for number, (recvs, sends, local, _) in enumerate(plan.rounds):
            received, sent = (
                [(peer, where.space, cut) for peer, where in named for cut in plan.cut_messages(where, nowhere, 0)]
                for named in (recvs, sends)
            )
            self.received += sum(nbytes for _, _, cut in received for _, nbytes in cut)
            self.sent += sum(nbytes for _, _, cut in sent for _, nbytes in cut)
            works = [
                (WORKS[kind], nbytes, dst.space, target, list(zip((src.space for src in srcs), sources, strict=True)))
                for kind, _, dst, srcs in local
                for nbytes, target, sources in _rows(plan, dst, srcs, nowhere, 0)
            ]
            if number == self.rounds - 1:
                works += [
                    (lib.PR_WORK_DIVIDE, nbytes, where.space, target, [])
                    for where in plan.result
                    for target, nbytes in plan.pieces(where, nowhere, 0)
                ]
            words += [len(received), len(sent), len(works)]
            for peer, space, cut in received + sent:
                words += [peer, space, len(cut), *chain.from_iterable(cut)]
            for *head, sources in works:
                words += [*head, len(sources), *chain.from_iterable(sources)]
            most = max(most, len(received) + len(sent))
            together += len(received) + len(sent)
        self._words = ffi.new("int64_t[]", [self.rounds, most, together, *words])

    def persistent(self) -> Short:
        """The same with messages that are prepared once, by the first run."""
        short = copy(self)
        short.kept = True
        short._idle = []
        return short

    def take(self) -> Any:
        """A run that is not under way."""
        if self._idle:
            return self._idle.pop()
        run = lib.pr_run_new(self._words, *self._fold, self.kept)
        if run == ffi.NULL:
            raise MemoryError("no memory for the messages of a call")
        return ffi.gc(run, lib.pr_run_free)

    def put(self, run: Any) -> None:
        """Give back a run that is over."""
        self._idle.append(run)

    def free(self) -> None:
        """Give the prepared messages back to the MPI."""
        for run in self._idle:
            raise_for(run, lib.pr_run_give_back(run))


class ShortExecution:
    """A call of messages in one segment under way in the C core: the same as `Execution`, for small calls.

    A round's work begins when its sends are done as well, not only its receives.
    """

    __slots__ = ("_run", "_short", "moves", "received", "sent")

    mismatched = ""
    waited_seconds = None

    def __init__(self, short: Short, comm: MPI.Intracomm, bases: tuple[int, int, int], tag: int) -> None:
        self._short = short
        self.sent, self.received = short.sent, short.received
        self._run = short.take()
        if short.kept:
            tag = Tags.without_number(tag)
        self._follow(lib.pr_run_start(self._run, MPI._handleof(comm), tag, *bases))

    @property
    def talking(self) -> int:
        """Rounds in which messages travel."""
        return self._short.talking

    def advance(self) -> bool:
        """Do what can be done without waiting; True when the whole call is done on this rank."""
        return self._run is None or self._follow(lib.pr_run_advance(self._run, 0, 0))

    def linger(self) -> None:
        """Wait a moment for the next message; other ranks may have the core."""
        if self._run is not None:
            self._follow(lib.pr_run_advance(self._run, LINGER_NS, self._short.rounds))

    def awaited(self) -> tuple[list[int], int]:
        """Peers that are still to be heard from, and the round, from 1."""
        if self._run is None:
            return [], self._short.rounds
        return self._short.peers[self.moves], self.moves + 1

    def _follow(self, rounds: int) -> bool:
        """So many rounds are over."""
        if rounds < 0:
            raise_for(self._run, rounds)
        self.moves = rounds
        if rounds < self._short.rounds:
            return False
        self._short.put(self._run)
        self._run = None
        return True


class TracedShortExecution(ShortExecution):
    """One that tells a trace, when it is over, what the core has noted of its rounds."""

    __slots__ = ("_shape", "_trace")

    def __init__(self, plan: Plan, comm: MPI.Intracomm, bases: tuple[int, int, int], tag: int, trace: Trace) -> None:
        assert plan.short is not None
        self._shape, self._trace = plan.traced_shape(), trace
        super().__init__(plan.short, comm, bases, tag)

    def linger(self) -> None:
        """Wait a moment for what the round waits for: a wait is for one round's peers."""
        if self._run is not None:
            self._follow(lib.pr_run_advance(self._run, LINGER_NS, self.moves + 1))

    def tell(self) -> None:
        """What has been done of a call that will not be completed."""
        if self._run is not None:
            self._tell(self._run)

    def sample(self) -> tuple[Any, ...]:
        """See `TracedExecution`."""
        waits = self._run is not None
        return self._shape, (self.moves if waits else 0, waits, False)

    def _follow(self, rounds: int) -> bool:
        run = self._run
        done = ShortExecution._follow(self, rounds)
        if done:
            self._tell(run)
        return done

    def _tell(self, run: Any) -> None:
        times = ffi.unpack(lib.pr_run_times(run), self.moves + 1)
        self._trace.append(("rounds", self._trace.lane_tid, CLOCK_AHEAD, 0.0, times, self._shape))


class TracedExecution(Execution):
    """An execution that tells a trace when each lane was through with each round."""

    __slots__ = ("_append", "_begun", "_shape", "_tid")

    waited_seconds = None  # nobody counts but the waiting loop

    def __init__(
        self,
        plan: Plan,
        comm: MPI.Intracomm,
        bases: tuple[int, int, int],
        tag: int,
        room: Room | None,
        trace: Trace,
    ) -> None:
        self._shape = plan.traced_shape()
        self._append, self._tid = trace.append, trace.lane_tid
        self._begun = [0.0] * plan.lanes
        super().__init__(plan, comm, bases, tag, room)

    def _next_round(self, lane: list[Any]) -> None:
        now, number = perf_counter(), lane[0] % self._plan.lanes
        if lane[1] >= 0:
            self._append(("round", self._tid + number, self._begun[number], now, lane[0], lane[1], self._shape))
        self._begun[number] = now
        Execution._next_round(self, lane)

    def sample(self) -> tuple[Any, ...]:
        """What tells, later, whom a wait is for: the rounds that lanes are in, and what they wait for there."""
        if len(self._lanes) == 1:
            _, number, recvs, _, waits = self._lanes[0]
            return self._shape, (number, bool(recvs), bool(waits))
        return (self._shape, *[(lane[1], bool(lane[2]), bool(lane[4])) for lane in self._lanes])


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


def _travel_apart(pieces: Sequence[Fragment]) -> bool:
    """Whether a place's pieces are messages of their own: what an MPI packs for a derived datatype it copies twice."""
    return len(pieces) > 1 and max(nbytes for _, nbytes in pieces) >= APART_BYTES


def _join(fragments: Sequence[Fragment]) -> list[Fragment]:
    joined: list[Fragment] = []
    for address, nbytes in fragments:
        if joined and sum(joined[-1]) == address:
            joined[-1] = (joined[-1][0], joined[-1][1] + nbytes)
        else:
            joined.append((address, nbytes))
    return joined


def _buffer(fragments: Sequence[Fragment]) -> Any:
    """What to hand to MPI for fragments that lie apart."""
    if len(fragments) == 1:
        return MPI.buffer.fromaddress(*fragments[0])
    if not fragments:
        return [None, 0, MPI.BYTE]
    scattered = MPI.BYTE.Create_hindexed([n for _, n in fragments], [a for a, _ in fragments]).Commit()
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
