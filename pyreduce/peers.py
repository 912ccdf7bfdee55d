"""What a rank knows of its peers: the one waiting loop over MPI, deadlines, and how trouble reaches everybody.

The waiting loop
    `Peers.wait` advances an execution; when nothing moves it yields the core between tries (which costs next to
    nothing where nobody else wants it), and every millisecond *attends* to its peers: deadline, notices, messages that
    fit no receive.

Trouble
    Whoever finds a mismatch, passes its deadline or is torn out of a call sends every other rank a *notice* (tag 0)
    with its own call, and collects theirs. A rank that hears a notice for the call it is in, or an earlier one, does
    the same. So after at most one exchange (and `GRACE` seconds) every rank that is in a call has the same evidence:
    different calls are a `MismatchError`, equal ones a `CollectiveTimeout` that names the ranks which sent nothing.
    The communicator is broken from then on.

Why a mismatch is always found
    Calls are numbered. A message of call n that carries another digest is never matched by a receive (its tag
    differs), so its bytes are never used, and its receiver, who waits for call n's message from that very peer, sees
    it among the unmatched ones: messages of one sender arrive in order, so the first unmatched one from that peer
    either belongs to call n, and then the digest must be ours, or to a later call. Where two ranks only wait for each
    other, the query that every rank sends after `QUERY_AFTER` idle seconds brings the two calls together.

No request is ever cancelled. What was under way when a communicator broke is kept for the life of the process, so that
a late message finds the memory it was meant for.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import NoReturn, Protocol
from weakref import WeakSet

import numpy as np
from mpi4py import MPI

from pyreduce.calls import Call, Fingerprint, compare
from pyreduce.errors import BrokenCommunicatorError, CollectiveTimeout, MismatchError, name_ranks
from pyreduce.execute import NOTICE_TAG, Tags
from pyreduce.trace import Trace

__all__ = ["ATTEND_SECONDS", "Peers", "Started", "Watch", "compare_clocks", "duplicate", "keep_for_ever"]

log = logging.getLogger("pyreduce")

ATTEND_SECONDS = 1e-3  # idle time between looks at notices: long against a message, short against a deadline
QUERY_AFTER = 1.0  # idle seconds after which peers are asked which call they are in
GRACE = 0.5  # seconds to collect notices in, after a timeout: who has not come by then is missing
MISMATCH_GRACE = 5.0  # the same after a mismatch, where all ranks are expected to come

CLOCK_TAG = 1
CLOCK_SECONDS = 10.0  # that ranks have, at least, to compare their clocks in
CLOCK_TURNS = 16  # questions after the time; the one that was answered soonest counts

POLLS = 4  # looks for notices after a pause: an MPI that made no progress meanwhile needs a few to pull them in
QUIET = ("query", "here")


class Started(Protocol):
    """What the waiting loop needs of anything under way."""

    moves: int
    mismatched: str  # what has shown that a peer is in another call, if so

    def advance(self) -> bool:
        """Do what can be done; True when done."""

    def linger(self) -> None:
        """Nothing can be done: give way, or wait a little."""

    def awaited(self) -> tuple[list[int], int]:
        """Peers still to be heard from, and the round."""


class Breakable(Protocol):
    """What wants to hear that a communicator is broken."""

    def forget(self) -> None:
        """Take no short ways any more."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A word from one rank to another about the call it is in.

    `kind` is ``query`` and ``here`` (nothing wrong), or one of those by which the sender is out: ``mismatch``,
    ``timeout``, ``left`` (an exception tore it out) and ``joined`` (it heard one of the others).
    """

    kind: str
    number: int
    fingerprint: Fingerprint
    round: int
    detail: str


def _how_it_left(rank: int, notice: Notice) -> str:
    """Words for a rank that will not come any more; without a fingerprint it was between two calls."""
    if notice.fingerprint:
        return f"rank {rank} left call {notice.number} by {notice.detail or notice.kind}"
    return f"rank {rank} gave up before call {notice.number}: {notice.detail or notice.kind}"


class _NotStarted:
    """Stands for a call of which nothing has been sent."""

    moves = 0
    mismatched = ""

    def advance(self) -> bool:
        return False

    def linger(self) -> None:
        pass

    def awaited(self) -> tuple[list[int], int]:
        return [], 0


NOT_STARTED = _NotStarted()


def keep_for_ever(objects: object) -> None:
    """Never free these, not even when the interpreter ends: MPI reads and writes them until its own end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(objects))


def duplicate(comm: MPI.Intracomm, timeout: float | None, warn_seconds: float) -> MPI.Intracomm:
    """A duplicate of `comm` for the library's own messages; collective, with a deadline like every other wait.

    Who has not come cannot be told: nothing may be sent on a communicator that is the user's.

    Raises
    ------
    CollectiveTimeout
    """
    made, request = comm.Idup()
    begun, warned = perf_counter(), False
    where = f"Communicator (rank {comm.rank} of {comm.size})"
    while not request.Test():
        os.sched_yield()
        waited = perf_counter() - begun
        if timeout is not None and waited > timeout:
            keep_for_ever((made, request))
            raise CollectiveTimeout(
                f"{where}: not all ranks had come to make it when this one gave up after {timeout:g} s; all ranks make "
                "it together, by the first call of a function on their communicator or by pyreduce.Communicator"
            )
        if not warned and timeout is None and waited > warn_seconds:
            warned = True
            log.warning("%s has waited %.0f s for all ranks to come and make it", where, waited)
    made.Set_errhandler(MPI.ERRORS_RETURN)
    return made


def compare_clocks(
    comm: MPI.Intracomm, own: tuple[int, int, int], timeout: float | None
) -> tuple[list[list[int]], float, float]:
    """Who is traced, and what this rank's clock is ahead of the first traced rank's; collective.

    All ranks of a new duplicate take part, also those that are not traced, so that it does no harm if only some are:
    what follows the exchange is between traced ranks alone.

    Parameters
    ----------
    comm : MPI.Intracomm
    own : tuple of int
        Rank in ``COMM_WORLD``, stamp (0: not traced), number of the communicator in the trace.
    timeout : float or None

    Returns
    -------
    tuple
        All ranks' `own`; seconds this clock is ahead; seconds that the quickest answer took.

    Raises
    ------
    CollectiveTimeout
    """
    begun = perf_counter()
    limit = None if timeout is None else max(timeout, CLOCK_SECONDS)  # all have come: they made the duplicate
    told = np.zeros((comm.size, 3), np.int64)

    def wait(request: MPI.Request, kept: object, missing: list[int]) -> None:
        while not request.Test():
            os.sched_yield()
            if limit is not None and perf_counter() - begun > limit:
                keep_for_ever((request, kept))
                text = f"Communicator (rank {comm.rank} of {comm.size}): {name_ranks(missing)} did not answer within "
                raise CollectiveTimeout(f"{text}{limit:g} s when ranks compared clocks", missing)

    sent = np.array(own, np.int64)
    wait(comm.Iallgather(sent, told), (sent, told), [rank for rank in range(comm.size) if rank != comm.rank])
    traced = [rank for rank in range(comm.size) if told[rank, 1]]
    offset, quickest = 0.0, 0.0
    question, answer = np.zeros(1), np.zeros(1)
    if comm.rank in traced[:1]:
        for peer in traced[1:]:
            for _ in range(CLOCK_TURNS):
                wait(comm.Irecv(question, peer, CLOCK_TAG), question, [peer])
                answer[0] = perf_counter()
                wait(comm.Isend(answer, peer, CLOCK_TAG), answer, [peer])
    elif comm.rank in traced:
        quickest = float("inf")
        for _ in range(CLOCK_TURNS):
            asked = perf_counter()
            wait(comm.Isend(question, traced[0], CLOCK_TAG), question, traced[:1])
            wait(comm.Irecv(answer, traced[0], CLOCK_TAG), answer, traced[:1])
            now = perf_counter()
            if now - asked < quickest:
                quickest, offset = now - asked, (asked + now) / 2 - float(answer[0])
    return told.tolist(), offset, quickest


class Peers:
    """The state of a communicator that waiting and failing need.

    Parameters
    ----------
    comm : MPI.Intracomm
        The library's own duplicate.
    warn_seconds : float
        A wait without a timeout logs who is missing after so long.
    """

    def __init__(self, comm: MPI.Intracomm, warn_seconds: float) -> None:
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.warn_seconds = warn_seconds
        self._broken: BaseException | None = None
        self._on_break: WeakSet[Breakable] = WeakSet()
        self.waited = 0.0
        self.trace: Trace | None = None
        self._pending: dict[int, Notice] = {}  # the latest notice of each peer for a call not yet over here
        self._asked: set[int] = set()  # peers that have asked, and got no answer yet
        self._sending: list[MPI.Request] = []
        self._arriving: list[tuple[int, MPI.Request]] = []
        self._sent_to = np.zeros(self.size, np.int64)
        self._heard_from = np.zeros(self.size, np.int64)
        self._status = MPI.Status()

    @property
    def broken(self) -> BaseException | None:
        """The first error that made the communicator unusable."""
        return self._broken

    @broken.setter
    def broken(self, error: BaseException) -> None:
        self._broken = error
        for told in self._on_break:
            told.forget()

    def tell_when_broken(self, told: Breakable) -> None:
        """Have ``told.forget()`` called when the communicator breaks: what takes short ways then finds the long one."""
        self._on_break.add(told)

    def check_usable(self) -> None:
        """Raise if the communicator is broken, with the first cause."""
        if self.broken is not None:
            first = str(self.broken) or type(self.broken).__name__
            raise BrokenCommunicatorError(
                f"this communicator is broken since an earlier call: {first}\n"
                "make a new one (pyreduce.Communicator, or comm.Dup()) once the cause is mended"
            ) from self.broken

    def wait(
        self,
        started: Started,
        call: Call,
        number: int,
        tag: int,
        timeout: float | None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Advance `started` until it is done.

        Parameters
        ----------
        started : Started
        call : Call
        number : int
            The call's number on this communicator.
        tag : int
            Its tag, lane 0.
        timeout : float or None
            Seconds from now.
        meanwhile : callable, optional
            Called every millisecond of waiting.

        Raises
        ------
        MismatchError, CollectiveTimeout, BrokenCommunicatorError
        """
        if not started.advance():
            Watch(self, started, call, number, tag, timeout).run(meanwhile)

    def leave(self, error: BaseException, call: Call, number: int, keep: object) -> None:
        """Torn out of a call by `error`: break the communicator and tell the peers, unless that is what it says.

        `keep` is what MPI may still read or write; what has been posted hangs on the error's traceback.
        """
        keep_for_ever((error, error.__traceback__, keep))
        if self.broken is not None:
            return
        if isinstance(error, MPI.Exception):  # perhaps because a peer has left: then that is told
            self.hear(number, call, 0)
            if self.trouble(number, call.fingerprint()) is not None:
                self.fail("joined", call, number, NOT_STARTED, "")
        self.broken = error
        detail = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._tell(Notice("left", number, call.fingerprint(), 0, detail))

    def quit(self, error: BaseException, number: int) -> None:
        """`error` takes this rank away between two calls: tell the peers that it will not come to call `number`."""
        if self.broken is None:
            self.broken = error
            self._tell(Notice("left", number, (), 0, type(error).__name__ + (f": {error}" if str(error) else "")))

    def check_notices(self, call: Call, number: int) -> None:
        """Before a call that follows a pause: whether the peers have given up on it meanwhile."""
        for _ in range(POLLS):
            self.hear(number, call, 0)
        if self._pending and self.trouble(number, call.fingerprint()) is not None:
            self.fail("joined", call, number, NOT_STARTED, "")

    def fail(self, kind: str, call: Call, number: int, started: Started, detail: str) -> NoReturn:
        """Tell everybody, hear everybody, and raise what the evidence says."""
        peers, round_number = started.awaited()
        own = Notice(kind, number, call.fingerprint(), round_number, detail)
        self._tell(own)
        heard = self._collect(number, kind)
        heard[self.rank] = own
        error = self._judge(call, number, peers, round_number, heard)
        self.broken = error
        raise error

    def _tell(self, notice: Notice, peer: int | None = None) -> None:
        """Send a notice to one peer or to all others. The requests are small and never waited for."""
        self._sending = [request for request in self._sending if not request.Test()]
        for target in range(self.size) if peer is None else (peer,):
            if target != self.rank:
                self._sending.append(self.comm.isend(notice, target, NOTICE_TAG))
                self._sent_to[target] += 1

    def hear(self, number: int, call: Call | None, round_number: int) -> None:
        """Take in notices that have arrived; answer queries, those that came between two calls when one is made."""
        for source, notice in self._arrived():
            if notice.kind == "query" and notice.number >= number:
                self._asked.add(source)
            before = self._pending.get(source)
            if before is None or before.kind in QUIET or notice.kind not in QUIET:
                self._pending[source] = notice
        if call is not None and self._asked:
            for source in self._asked:
                self._tell(Notice("here", number, call.fingerprint(), round_number, ""), source)
            self._asked.clear()

    def listen(self, where: str, number: int) -> None:
        """Between two calls, `number` being the next: raise if a peer will not come any more."""
        self.hear(number, None, 0)
        for source, notice in self._pending.items():
            if notice.kind not in QUIET and notice.number <= number:
                told = notice.detail  # of a rank that has joined: what it was told itself
                if notice.kind != "joined" or not told:
                    told = _how_it_left(source, notice)
                error = BrokenCommunicatorError(f"{where}: {told}")
                self.broken = error
                self._tell(Notice("joined", number, (), 0, told))
                raise error

    def _arrived(self) -> list[tuple[int, Notice]]:
        """Notices that have come in whole, by sender.

        Never a blocking receive: the head of a notice can be here while its sender, gone into the end of its program,
        pushes the rest no more.
        """
        status = self._status
        while (message := self.comm.improbe(MPI.ANY_SOURCE, NOTICE_TAG, status)) is not None:
            self._arriving.append((status.source, message.irecv()))
        found: list[tuple[int, Notice]] = []
        arriving: list[tuple[int, MPI.Request]] = []
        for source, request in self._arriving:
            done, notice = request.test()
            if done and notice is not None:
                found.append((source, notice))
                self._heard_from[source] += 1
            else:
                arriving.append((source, request))
        self._arriving = arriving
        return found

    def drain(self, timeout: float | None) -> bool:
        """Take in every notice that was ever sent here; collective. Whether the communicator may be freed.

        Before a communicator is freed no message of it may be left: MPIs give its context to the next one made, which
        would receive them. Peers that have left it, or do not come, are not waited for: then it is kept.
        """
        if self.broken is not None:
            return False
        expected = np.full(self.size, -1, np.int64)
        request = self.comm.Ialltoall(self._sent_to, expected)
        end = perf_counter() + (timeout if timeout is not None else self.warn_seconds)
        while not request.Test() or (self._heard_from < expected).any() or not MPI.Request.Testall(self._sending):
            gone = [source for source, notice in self._arrived() if notice.kind not in QUIET]
            if gone or perf_counter() > end:
                if not gone:
                    log.warning(
                        "close (rank %d of %d): not all ranks close; the communicator is kept", self.rank, self.size
                    )
                keep_for_ever((request, expected, self))
                return False
            os.sched_yield()
        return True

    def trouble(self, number: int, fingerprint: Fingerprint) -> Notice | None:
        """A pending notice that means call `number` cannot end well."""
        for notice in self._pending.values():
            if notice.kind not in QUIET:
                if notice.number <= number:
                    return notice
            elif notice.number == number and notice.fingerprint != fingerprint:
                return notice
        return None

    def present(self, number: int) -> set[int]:
        """Peers known to have come as far as call `number`."""
        return {peer for peer, notice in self._pending.items() if notice.number >= number}

    def _collect(self, number: int, kind: str) -> dict[int, Notice]:
        """Every peer's notice about call `number`, waiting some time for those that stay silent."""
        begun = perf_counter()
        grace = MISMATCH_GRACE if kind == "mismatch" else GRACE
        said: dict[int, Notice] = {p: n for p, n in self._pending.items() if n.kind not in QUIET}
        while (len(said) < self.size - 1 or not MPI.Request.Testall(self._sending)) and (
            perf_counter() < begun + grace
        ):
            arrived = self._arrived()
            for source, notice in arrived:
                self._pending[source] = notice
                if notice.kind not in QUIET:
                    said[source] = notice
                if notice.kind == "mismatch":
                    grace = MISMATCH_GRACE
            if not arrived:
                os.sched_yield()
        return {**{p: n for p, n in self._pending.items() if n.number >= number}, **said}

    def _judge(
        self, call: Call, number: int, peers: list[int], round_number: int, heard: dict[int, Notice]
    ) -> Exception:
        silent = [rank for rank in range(self.size) if rank not in heard]
        same = {r: notice.fingerprint for r, notice in heard.items() if notice.number == number and notice.fingerprint}
        where = f"{call.collective} (call {number}, rank {self.rank} of {self.size})"
        disagreement = compare(same, silent)
        if disagreement is not None:
            text, groups = disagreement
            return MismatchError(f"{where}: the ranks made different calls\n{text}", groups)
        left = {rank: notice for rank, notice in heard.items() if notice.kind == "left"}
        if left:
            told = "; ".join(_how_it_left(rank, notice) for rank, notice in sorted(left.items()))
            return BrokenCommunicatorError(f"{where}: {told}")
        gave_up = sorted(rank for rank, notice in heard.items() if notice.kind == "timeout")
        if not gave_up:
            apart = {rank: notice.number for rank, notice in heard.items() if notice.number != number}
            told = "; ".join(f"rank {rank} is in call {other}" for rank, other in sorted(apart.items()))
            told = told or "; ".join(sorted({n.detail for n in heard.values() if n.detail})) or "no rank says why"
            return BrokenCommunicatorError(f"{where}: the ranks are out of step: {told}")
        details = ", ".join(sorted({heard[rank].detail for rank in gave_up}))
        earlier = sorted({heard[rank].number for rank in gave_up} - {number})
        if earlier:
            message = (
                f"{where}: {name_ranks(gave_up)} {details} in call {', '.join(map(str, earlier))}, and will not come"
            )
        elif silent:
            waited = f"; rank {self.rank} was in round {round_number}"
            absent = [peer for peer in peers if peer in silent] or peers
            waited += f", waiting for {name_ranks(absent)}" if absent else ""
            message = f"{where}: {name_ranks(silent)} had not arrived when {name_ranks(gave_up)} {details}{waited}"
        else:
            message = f"{where}: {name_ranks(gave_up)} {details}; all ranks are in the call by now"
        return CollectiveTimeout(message, silent)


class Watch:
    """One wait: how long it has been idle, what has been asked.

    `run` waits to the end; `glance` is for those who look in now and then.
    """

    def __init__(
        self, peers: Peers, started: Started, call: Call, number: int, tag: int, timeout: float | None
    ) -> None:
        self.peers = peers
        self.started = started
        self.call = call
        self.number = number
        self.tag = tag
        self.timeout = timeout
        self.begun = self.idle_since = self.attended = perf_counter()
        self.moves = started.moves
        self.asked = self.warned = False

    def glance(self) -> None:
        """What `run` does in a turn in which nothing could be done, if it is time for it."""
        now = perf_counter()
        if self.started.moves != self.moves:
            self.moves, self.idle_since = self.started.moves, now
        if now - self.attended > ATTEND_SECONDS:
            self.attended = now
            self.attend(now, self.idle_since)

    def run(self, meanwhile: Callable[[], None] | None) -> None:
        """Wait to the end."""
        started, advance, linger = self.started, self.started.advance, self.started.linger
        moves, idle_since, attend_at, tries = started.moves, self.begun, self.begun, 0
        trace = self.peers.trace
        while not advance():
            if started.moves != moves:
                moves = started.moves
                if tries:
                    now = perf_counter()
                    self.peers.waited += now - idle_since
                    tries = 0
                    if trace is not None:
                        trace.resume(now, started)
                continue
            if tries == 0:
                idle_since = perf_counter()
                attend_at = idle_since + ATTEND_SECONDS
                if trace is not None:
                    trace.pause(started, idle_since)
            tries += 1
            linger()
            now = perf_counter()
            if now > attend_at:
                if trace is not None:
                    trace.look(started, now)
                self.attend(now, idle_since)
                if meanwhile is not None:
                    meanwhile()
                attend_at = now + ATTEND_SECONDS
        if tries:
            now = perf_counter()
            self.peers.waited += now - idle_since
            if trace is not None:
                trace.resume(now, started)

    def attend(self, now: float, idle_since: float) -> None:
        """Look at notices, strange messages and the clock."""
        peers, call, number = self.peers, self.call, self.number
        awaited, round_number = self.started.awaited()
        peers.hear(number, call, round_number)
        fingerprint = call.fingerprint() if peers._pending else ()
        bad = peers.trouble(number, fingerprint)
        if bad is not None:
            peers.fail("mismatch" if bad.kind in (*QUIET, "mismatch") else "joined", call, number, self.started, "")
        if self.started.mismatched:
            peers.fail("mismatch", call, number, self.started, self.started.mismatched)
        for peer in awaited:
            if peers.comm.Iprobe(peer, MPI.ANY_TAG, peers._status):
                tag = peers._status.tag
                if tag != NOTICE_TAG and Tags.same_number(tag, self.tag) and not Tags.same_call(tag, self.tag):
                    peers.fail("mismatch", call, number, self.started, "")
        if self.timeout is not None:
            if now - self.begun > self.timeout:
                peers.fail("timeout", call, number, self.started, f"gave up after {self.timeout:g} s")
        elif not self.warned and now - idle_since > peers.warn_seconds:
            self.warn(now - idle_since, round_number, awaited)
        if not self.asked and now - idle_since > min(QUERY_AFTER, peers.warn_seconds / 2):
            self.asked = True
            peers._tell(Notice("query", number, call.fingerprint(), round_number, ""))

    def warn(self, seconds: float, round_number: int, awaited: list[int]) -> None:
        self.warned = True
        present = self.peers.present(self.number) | {self.peers.rank}
        missing = [rank for rank in range(self.peers.size) if rank not in present]
        if missing:
            who = f"{name_ranks(missing)} not arrived"
        else:
            who = f"waiting for {name_ranks(awaited)}" if awaited else "all ranks have come"
        log.warning(
            "%s (call %d, rank %d of %d) has waited %.0f s in round %d: %s",
            self.call.collective, self.number, self.peers.rank, self.peers.size, seconds, round_number, who,
        )  # fmt: skip
