"""When every rank has finished: a discrete-event model of time for programs. No MPI.

The model
---------
message
    Takes ``alpha + bytes * beta``, or ``alpha_node + bytes * beta_node`` between ranks of one node, and for all that
    time holds the send port of its sender, the receive port of its receiver and, between nodes, the outgoing link of
    the one node and the incoming link of the other. Each of these carries one message at a time.
rendezvous
    A message can start when both its sender and its receiver have begun the rounds that name it (as an MPI's large
    messages: nothing is buffered). Of the messages that can start, the one starts first that could first; of those, the
    one written first in its round; of those, the one from the lowest rank. A message whose ports are not all free lets
    others pass. A send is finished when its message is: its bytes are there.
round
    Begins on a rank when the rank's previous round is over. Sends start at once; folds run when all receives have come,
    not waiting for the sends; the round is over when folds and sends are (`pyreduce.programs`).
fold
    Takes ``gamma`` a byte and operation: k places of n bytes take ``(k-1) n gamma``. Copies take no time.
slow ranks, jitter
    A rank's factor multiplies what its folds take; of a message, the larger factor of its two ranks does. Jitter makes
    every message longer by a random fraction of its own, which depends on the seed, the sender and how many messages
    the sender had before.
windows
    `Put`, `Get` and `Notify` (0 bytes) are messages that need no rendezvous: only the ports. A rank does them one after
    the other, in the order written, each when the one before has finished. A `Get` travels from the window's owner to
    the reader, and its request takes nothing. A `Wait` is over when enough notifies have finished.
segments
    Each is a run of the same program on its slice of every block. Two (`lanes`) are in flight, as `pyreduce.execute`
    has it; they share ports, links and the one folding rank.

Not in the model: what a rank's software takes, memory's speed, routes within the network, other jobs.

Two ways, the same times
------------------------
`events` plays message by message, for any program. Programs that are the same on every rank up to rotation go through
`symmetric`: arrays of ranks, a step a round.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyreduce.errors import AlgorithmError, Unsupported
from pyreduce.programs import COLLECTIVES, Copy, Fold, Get, Notify, Put, Recv, RoundsFunction, Send, Step, Wait
from pyreduce.simulate import symmetric
from pyreduce.simulate.network import FOLD, MESSAGE, Blocks, Hop, Network, lower_bound

__all__ = ["MOST_MESSAGES", "Network", "Timing", "predict"]

MOST_MESSAGES = 10_000_000  # that are played one by one: a minute or two, and a gigabyte
PATHS = ("auto", "events", "symmetric")

_TWO_SIDED, _PUT, _NOTIFY = range(3)
_FOLDS = -1

Counts = NDArray[np.int64]
# What can start when, its place among the sends of its round, source, a number that no other has; then target, bytes,
# which of its source's messages it is, the span that made it ready, the ranks' actors (or who does it, and -1), what
# kind it is, the round, and of a notify the cell and its credits.
Message = tuple[float, int, int, int, int, int, int, int, int, int, int, int, Any]


@dataclass(frozen=True)
class Timing:
    """When a collective is over, and why not earlier. Seconds throughout.

    Attributes
    ----------
    name, collective : str
    nranks, nbytes : int
    finish : ndarray
        When each rank is done.
    rounds, messages, sent, received, folds : ndarray of int
        Of each rank, as `pyreduce.programs.Cost` counts them (blocks; of one segment).
    bytes_sent : ndarray of int
        Of each rank, of all segments.
    critical : tuple of Hop
        The chain of messages and folds that made the last rank late, first things first.
    bound : float
        What no algorithm without overlap goes below (`pyreduce.simulate.network.lower_bound`).
    path : {"events", "symmetric"}
        How it was computed.
    compared : int
        How many ranks' programs were looked at: all, unless they seem to be rotations of each other.
    spans : tuple of Hop
        Everything that took time, if it was asked for.
    """

    name: str
    collective: str
    nranks: int
    nbytes: int
    finish: NDArray[np.float64]
    rounds: Counts
    messages: Counts
    sent: Counts
    received: Counts
    folds: Counts
    bytes_sent: Counts
    critical: tuple[Hop, ...]
    bound: float
    path: str
    compared: int
    spans: tuple[Hop, ...] = ()

    @property
    def time(self) -> float:
        """When the last rank is done."""
        return float(self.finish.max())

    @property
    def last(self) -> int:
        """The rank that is done last; of several, the first."""
        return int(self.finish.argmax())

    @cached_property
    def shares(self) -> tuple[float, float, float]:
        """Seconds of alpha, beta and gamma on the critical path: together the time."""
        parts = [(hop.alpha, hop.beta, hop.gamma) for hop in self.critical]
        alpha, beta, gamma = (float(sum(column)) for column in zip(*parts, strict=True)) if parts else (0.0, 0.0, 0.0)
        return alpha, beta, gamma

    @property
    def efficiency(self) -> float:
        """The lower bound as a share of the time."""
        return self.bound / self.time if self.time else 1.0


def predict(
    rounds: RoundsFunction,
    collective: str,
    nranks: int,
    nbytes: int,
    network: Network,
    *,
    name: str = "program",
    segments: int = 1,
    lanes: int = 2,
    path: str = "auto",
    spans: bool = False,
    most: int = MOST_MESSAGES,
) -> Timing:
    """Predict how long a collective takes.

    Nothing is verified here (`pyreduce.verify` does that); but a program whose messages do not fit or that waits for
    ever is refused.

    Parameters
    ----------
    rounds : callable
        The algorithm, ``(collective, nranks, rank) -> rounds``: ``pyreduce.algorithms.get("ring").rounds``.
    collective : {"reduce_scatter", "allgather", "allreduce"}
    nranks : int
    nbytes : int
        Bytes of the whole vector, cut into blocks as `pyreduce.blocks.partition` does.
    network : Network
    name : str
        What to call the algorithm in messages.
    segments : int
        Into how many segments every block is cut.
    lanes : int
        How many of them are in flight.
    path : {"auto", "events", "symmetric"}
        ``"auto"`` takes the fast way where it gives the same times; ``"symmetric"`` insists on it.
    spans : bool
        Keep everything that took time, for drawing; implies ``path="events"``.
    most : int
        How many messages and folds may be played one by one.

    Returns
    -------
    Timing

    Raises
    ------
    Unsupported
        The algorithm does not serve this; there are too many messages to play them one by one; or
        ``path="symmetric"``, and the program or the network is not symmetric enough.
    AlgorithmError
        Messages do not fit, or ranks wait for each other.

    Examples
    --------
    >>> from pyreduce import algorithms
    >>> timing = predict(algorithms.get("ring").rounds, "reduce_scatter", 4, 4000, Network(1.0, 0.001, 0.0001))
    >>> round(timing.time, 6)  # 3 rounds of 1 + 1000 * 0.001 + 1000 * 0.0001
    6.3
    """
    _check(collective, nranks, nbytes, network, segments, lanes, path)
    blocks = Blocks(nbytes, nranks, segments)
    pattern = None
    if path != "events" and segments == 1 and not spans:
        pattern = symmetric.find(rounds, collective, nranks, blocks.extra == 0)
    result = symmetric.play(pattern, blocks, network) if pattern is not None else None
    kept: tuple[Hop, ...] = ()
    if pattern is not None and result is not None:
        way, compared, counts = "symmetric", pattern.compared, _count(pattern, blocks)
    elif path == "symmetric":
        why = "messages may meet at ports or links" if pattern else "ranks' programs are not rotations of each other"
        raise Unsupported(f"{name}: {collective} with P={nranks}: {why}; leave out path='symmetric'")
    else:
        events = _Events(rounds, collective, nranks, blocks, network, name, segments, min(lanes, segments), most)
        events.run()
        way, compared, counts = "events", nranks, [np.array(count) for count in events.counts]
        result = symmetric.Result(np.array(events.finish), events.chain())
        kept = tuple(map(events.hop, range(len(events.end)))) if spans else ()
    talking, messages, sent, received, folds, bytes_sent = counts
    return Timing(
        name, collective, nranks, nbytes, result.finish, talking, messages, sent, received, folds, bytes_sent,
        result.critical, lower_bound(collective, nranks, nbytes, network), way, compared, kept,
    )  # fmt: skip


def _check(collective: str, nranks: int, nbytes: int, network: Network, segments: int, lanes: int, path: str) -> None:
    if collective not in COLLECTIVES:
        raise ValueError(f"no collective is called {collective!r}; there are {', '.join(COLLECTIVES)}")
    if path not in PATHS:
        raise ValueError(f"path is {path!r}; there are {', '.join(PATHS)}")
    for word, value, least in (("nranks", nranks, 1), ("nbytes", nbytes, 0), ("segments", segments, 1),
                               ("lanes", lanes, 1)):  # fmt: skip
        if value < least:
            raise ValueError(f"{word} is {value}; needs {least} at least")
    network.check(nranks)


def _count(pattern: symmetric.Pattern, blocks: Blocks) -> list[Counts]:
    """Rounds, messages, blocks sent, received and folded, bytes sent, of every rank."""
    nranks = pattern.nranks
    sends = [send for steps in pattern.rounds for send in steps.sends]
    numbers = [
        sum(bool(steps.sends or steps.recvs) for steps in pattern.rounds),
        len(sends),
        sum(count for _, _, count in sends),
        sum(count for steps in pattern.rounds for _, _, count in steps.recvs),
        sum(count * times for steps in pattern.rounds for _, count, times in steps.folds),
    ]
    if not blocks.extra:
        nbytes = np.full(nranks, numbers[2] * blocks.share)
    else:  # how often rank r sends block r + i, then all ranks' blocks by their sizes
        often = np.zeros(2 * nranks + 1, dtype=np.int64)
        for _, first, count in sends:
            often[first] += 1
            often[first + count] -= 1
        often = np.cumsum(often)[:-1]
        around = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.tile(often[:nranks] + often[nranks:], 2))])
        # The large blocks are 0..extra-1: seen from rank r, those from -r on.
        start = -np.arange(nranks) % nranks
        nbytes = numbers[2] * blocks.share + around[start + blocks.extra] - around[start]
    return [*(np.full(nranks, number) for number in numbers), nbytes]


class _Events:
    """All ranks, message by message. An actor is a lane of a rank: ``rank * lanes + lane``."""

    def __init__(
        self,
        function: RoundsFunction,
        collective: str,
        nranks: int,
        blocks: Blocks,
        network: Network,
        name: str,
        segments: int,
        lanes: int,
        most: int,
    ) -> None:
        self.function, self.collective, self.nranks = function, collective, nranks
        self.blocks, self.network, self.segments, self.lanes = blocks, network, segments, lanes
        self.most = most
        self.where = f"{name}: {collective} with P={nranks}"
        self.node_of = network.topology.node_of if network.topology is not None else None
        nnodes = network.topology.nnodes if network.topology is not None else 0
        self.first_link = 2 * nranks
        self.nnodes = nnodes
        self.finish = [0.0] * nranks
        self.finished_by = [-1] * nranks
        self.counts = [[0] * nranks for _ in range(6)]
        # Of every actor:
        actors = nranks * lanes
        self.segment = [actor % lanes for actor in range(actors)]
        self.rounds: list[Iterator[Sequence[Step]]] = [
            iter(function(collective, nranks, actor // lanes)) for actor in range(actors)
        ]
        self.number = [0] * actors
        self.sends, self.recvs = [0] * actors, [0] * actors  # of the round, not finished
        self.others: list[list[tuple[int, Any]]] = [[] for _ in range(actors)]  # what is left to do, the next one last
        self.working = [False] * actors  # others are not all done
        self.cause = [-1] * actors  # the span that ended the round before
        self.unfinished = actors
        # Of every rank:
        self.numbered = [0] * nranks  # messages so far
        self.folding = [0.0] * nranks  # until when
        self.folded_by = [-1] * nranks
        # Messages:
        self.posted_sends: dict[int, deque[tuple[Any, ...]]] = {}
        self.posted_recvs: dict[int, deque[tuple[Any, ...]]] = {}
        self.fresh: list[tuple[Message, int]] = []
        self.busy = bytearray(2 * nranks + 2 * nnodes)  # ports, then links
        self.freed_by = [-1] * len(self.busy)
        self.waiting: dict[int, list[Message]] = {}
        self.serial = 0
        # Windows:
        self.cells: dict[tuple[int, int, int], int] = {}
        self.waits: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        # What will end: when, a number, what (a message, or whose fold) and its span.
        self.heap: list[tuple[float, int, Message | int, int]] = []
        # Spans: what took time.
        self.source, self.target, self.round, self.made_by = (array("i") for _ in range(4))
        self.index, self.size = array("q"), array("q")
        self.start, self.end = array("d"), array("d")

    # ------------------------------------------------------------------------------------------------------- the clock

    def run(self) -> None:
        """From 0 until nothing happens any more."""
        for actor in range(len(self.rounds)):
            self._begin(actor, 0.0, -1)
        self._start_messages(0.0, [])
        heap = self.heap
        while heap:
            now, freed = heap[0][0], []
            while heap and heap[0][0] == now:
                _, _, what, span = heappop(heap)
                if isinstance(what, int):
                    if self._work(what, now, span):
                        self._begin(what, now, span)
                else:
                    for resource in self._resources(what[2], what[4]):
                        self.busy[resource] = 0
                        self.freed_by[resource] = span
                        freed.append(resource)
                    self._arrive(what, now, span)
            self._start_messages(now, freed)
        if self.unfinished:
            raise AlgorithmError(f"{self.where}: deadlock: {self._stuck()}")

    def _resources(self, source: int, target: int) -> tuple[int, ...]:
        """The ports of a message, and its links."""
        node_of = self.node_of
        if node_of is None or node_of[source] == node_of[target]:
            return source, self.nranks + target
        first = self.first_link
        return source, self.nranks + target, first + node_of[source], first + self.nnodes + node_of[target]

    def _start_messages(self, now: float, freed: list[int]) -> None:
        """Start what can start, by rank of who could first; others wait at the first port or link that is not free."""
        candidates, self.fresh = self.fresh, []
        for resource in freed:
            queue = self.waiting.get(resource)
            if queue:
                candidates.append((heappop(queue), resource))
        heapify(candidates)
        busy = self.busy
        while candidates:
            message, origin = heappop(candidates)
            resources = self._resources(message[2], message[4])
            for resource in resources:
                if busy[resource]:
                    heappush(self.waiting.setdefault(resource, []), message)
                    break
            else:
                made_by = message[7]
                for resource in resources:
                    busy[resource] = 1
                    if now > message[0] and self.freed_by[resource] >= 0 and self.end[self.freed_by[resource]] == now:
                        made_by = self.freed_by[resource]
                _, _, source, serial, target, nbytes, index, _, _, _, _, number, _ = message
                end = now + self.network.seconds(source, target, nbytes, index)
                heappush(self.heap, (end, serial, message, self._span(source, target, number, index, nbytes, now, end,
                                                                      made_by)))  # fmt: skip
            if origin >= 0 and not busy[origin]:
                queue = self.waiting.get(origin)
                if queue:
                    heappush(candidates, (heappop(queue), origin))

    def _span(
        self, source: int, target: int, number: int, index: int, nbytes: int, start: float, end: float, made_by: int
    ) -> int:
        self.source.append(source)
        self.target.append(target)
        self.round.append(number)
        self.index.append(index)
        self.size.append(nbytes)
        self.start.append(start)
        self.end.append(end)
        self.made_by.append(made_by)
        return len(self.end) - 1

    # ----------------------------------------------------------------------------------------------------------- rounds

    def _begin(self, actor: int, now: float, cause: int) -> None:
        """A rank's next round, and those after it that take no time."""
        rank = actor // self.lanes
        while True:
            steps = next(self.rounds[actor], None)
            if steps is None:
                segment = self.segment[actor] + self.lanes
                if segment >= self.segments:
                    self.unfinished -= 1
                    if now >= self.finish[rank]:
                        self.finish[rank], self.finished_by[rank] = now, cause
                    return
                self.segment[actor], self.number[actor] = segment, 0
                self.rounds[actor] = iter(self.function(self.collective, self.nranks, rank))
                continue
            self.number[actor] += 1
            self.cause[actor] = cause
            self.sends[actor] = self.recvs[actor] = 0
            self.working[actor] = True
            self._post(actor, rank, steps, now)
            if self.recvs[actor] or not self._work(actor, now, cause):
                return

    def _post(self, actor: int, rank: int, steps: Sequence[Step], now: float) -> None:
        """Sends, receives and waits of a round; its other steps are put down for later."""
        segment, talks, position = self.segment[actor], False, 0
        others: list[tuple[int, Any]] = []
        for step in steps:
            if isinstance(step, Send):
                talks = True
                self.sends[actor] += 1
                self._post_send(actor, rank, step, position, now)
                position += 1
            elif isinstance(step, Recv):
                talks = True
                self.recvs[actor] += 1
                self._post_recv(actor, rank, step, now)
            elif isinstance(step, Fold):
                count, times = step.dst.count, len(step.srcs) - 1
                nbytes = self.blocks.nbytes(step.dst.first, count, segment) * times
                if segment == 0:
                    self.counts[4][rank] += count * times
                if others and others[-1][0] == _FOLDS:
                    nbytes += others.pop()[1]
                others.append((_FOLDS, nbytes))
            elif isinstance(step, Wait):
                talks = True
                where = (rank, segment, step.cell)
                if self.cells.get(where, 0) < step.value:
                    self.recvs[actor] += 1
                    self.waits.setdefault(where, []).append((step.value, actor))
            elif isinstance(step, Put | Get | Notify):
                others.append((_PUT, step))
            elif not isinstance(step, Copy):
                raise AlgorithmError(f"{self.where}: rank {rank}, round {self.number[actor]}: {step!r} is not a step")
        if segment == 0:
            self.counts[0][rank] += talks
        others.reverse()
        self.others[actor] = others

    def _post_send(self, actor: int, rank: int, step: Send, position: int, now: float) -> None:
        first, count = step.src.first, step.src.count
        nbytes = self.blocks.nbytes(first, count, self.segment[actor])
        if self.segment[actor] == 0:
            self.counts[1][rank] += 1
            self.counts[2][rank] += count
        self.counts[5][rank] += nbytes
        sent = (actor, first, count, nbytes, position, self.numbered[rank], self.number[actor])
        self.numbered[rank] += 1
        key = (rank * self.nranks + step.peer) * self.lanes + actor % self.lanes
        recvs = self.posted_recvs.get(key)
        if recvs:
            self._pair(sent, recvs.popleft(), now, self.cause[actor])
            if not recvs:
                del self.posted_recvs[key]
        else:
            self.posted_sends.setdefault(key, deque()).append(sent)

    def _post_recv(self, actor: int, rank: int, step: Recv, now: float) -> None:
        if self.segment[actor] == 0:
            self.counts[3][rank] += step.dst.count
        received = (actor, step.dst.first, step.dst.count, self.number[actor])
        key = (step.peer * self.nranks + rank) * self.lanes + actor % self.lanes
        sends = self.posted_sends.get(key)
        if sends:
            self._pair(sends.popleft(), received, now, self.cause[actor])
            if not sends:
                del self.posted_sends[key]
        else:
            self.posted_recvs.setdefault(key, deque()).append(received)

    def _pair(self, sent: tuple[Any, ...], received: tuple[Any, ...], now: float, cause: int) -> None:
        """A send and its receive have met."""
        actor, first, count, nbytes, position, index, number = sent
        peer = received[0]
        source, target = actor // self.lanes, peer // self.lanes
        if (first, count) != received[1:3]:
            raise AlgorithmError(
                f"{self.where}: rank {source} sends {count} blocks from {first} on to rank {target} in its round "
                f"{number}, where rank {target} receives {received[2]} from {received[1]} on in its round {received[3]}"
            )
        self._offer((now, position, source, self._next(), target, nbytes, index, cause, actor, peer, _TWO_SIDED, number,
                     None))  # fmt: skip

    def _next(self) -> int:
        self.serial += 1
        if self.serial > self.most:
            raise Unsupported(
                f"{self.where}: more than {self.most:,} messages and folds, too many to play one by one; only programs "
                "that are rotations of each other, on networks whose links no two ranks share, go further"
            )
        return self.serial

    def _offer(self, message: Message) -> None:
        self.fresh.append((message, -1))

    def _work(self, actor: int, now: float, cause: int) -> bool:
        """Do the next of the steps that come after the receives; whether all of the round is over."""
        others, rank = self.others[actor], actor // self.lanes
        while others:
            kind, step = others.pop()
            if kind == _FOLDS:
                taken = step * self.network.gamma
                if self.network.slow:
                    taken *= self.network.slow.get(rank, 1.0)
                if taken:
                    start = max(now, self.folding[rank])
                    made_by = cause if start == now else self.folded_by[rank]
                    end = start + taken
                    span = self._span(rank, rank, self.number[actor], -1, step, start, end, made_by)
                    self.folding[rank], self.folded_by[rank] = end, span
                    heappush(self.heap, (end, self._next(), actor, span))
                    return False
            elif isinstance(step, Notify) and step.peer == rank:
                self.cells[rank, self.segment[actor], step.cell] += step.value
            else:
                self._offer_one_sided(actor, rank, step, now, cause)
                return False
        self.working[actor] = False
        return self.sends[actor] == 0

    def _offer_one_sided(self, actor: int, rank: int, step: Put | Get | Notify, now: float, cause: int) -> None:
        segment, kind, credits = self.segment[actor], _PUT, None
        nbytes, source, target = 0, rank, step.peer
        if isinstance(step, Notify):
            kind, credits = _NOTIFY, ((step.peer, segment, step.cell), step.value)
        else:
            nbytes = self.blocks.nbytes(step.dst.first, step.dst.count, segment)
            if isinstance(step, Get):
                source, target = step.peer, rank
            if segment == 0:
                self.counts[3 if isinstance(step, Get) else 2][rank] += step.dst.count
            self.counts[5][source] += nbytes
        index = self.numbered[source]
        self.numbered[source] += 1
        self._offer((now, 0, source, self._next(), target, nbytes, index, cause, actor, -1, kind, self.number[actor],
                     credits))  # fmt: skip

    def _arrive(self, message: Message, now: float, span: int) -> None:
        """A message has finished, for both sides."""
        actor, peer, kind, credits = message[8], message[9], message[10], message[12]
        if kind == _TWO_SIDED:
            self.sends[actor] -= 1
            if not self.sends[actor] and not self.working[actor]:
                self._begin(actor, now, span)
            self._received(peer, now, span)
            return
        if kind == _NOTIFY:
            where, value = credits
            self.cells[where] = held = self.cells.get(where, 0) + value
            waits = self.waits.get(where)
            if waits:
                self.waits[where] = [wait for wait in waits if wait[0] > held]
                for wait in waits:
                    if wait[0] <= held:
                        self._received(wait[1], now, span)
        if self._work(actor, now, span):
            self._begin(actor, now, span)

    def _received(self, actor: int, now: float, span: int) -> None:
        self.recvs[actor] -= 1
        if not self.recvs[actor] and self._work(actor, now, span):
            self._begin(actor, now, span)

    # ---------------------------------------------------------------------------------------------------------- results

    def hop(self, span: int) -> Hop:
        """A span in words and numbers."""
        source, target, nbytes = self.source[span], self.target[span], self.size[span]
        start, end, number = self.start[span], self.end[span], self.round[span]
        if self.index[span] < 0:
            return Hop(FOLD, source, target, number, nbytes, start, end, gamma=end - start)
        alpha, beta = self.network.parts(source, target, nbytes, self.index[span])
        return Hop(MESSAGE, source, target, number, nbytes, start, end, alpha, beta)

    def chain(self) -> tuple[Hop, ...]:
        """What made the last rank late, from the first thing on."""
        span = self.finished_by[max(range(self.nranks), key=self.finish.__getitem__)]
        hops = []
        while span >= 0:
            hops.append(self.hop(span))
            span = self.made_by[span]
        return tuple(reversed(hops))

    def _stuck(self) -> str:
        """Who waits for whom: a few of them."""
        told = []
        for key, recvs in self.posted_recvs.items():
            source, target = divmod(key // self.lanes, self.nranks)
            told.append(f"rank {target} waits in round {recvs[0][-1]} for a message that rank {source} does not send")
        for key, sends in self.posted_sends.items():
            source, target = divmod(key // self.lanes, self.nranks)
            told.append(f"rank {source} waits in round {sends[0][-1]} for rank {target} to receive")
        for (rank, _, cell), waits in self.waits.items():
            told += [f"rank {rank} waits for its cell {cell} to reach {value}" for value, _ in waits]
        more = f"; and {len(told) - 4} more" if len(told) > 4 else ""
        return "; ".join(told[:4]) + more
