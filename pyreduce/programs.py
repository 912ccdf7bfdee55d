"""Programs: what one rank does in one collective, as pure data.

An algorithm is a function ``(collective, nranks, rank) -> rounds``. It knows blocks, not bytes, dtypes or MPI. The
same program is run over MPI by `pyreduce.execute`, played for all ranks in one process by `pyreduce.simulate`,
checked by `pyreduce.verify` and printed by `pyreduce.explain`.

Vocabulary
----------
place
    ``(space, first block, count)``: `count` consecutive blocks from `first` on (numbers wrap at `nranks`), in the
    ``input`` (read-only), the ``output``, the ``scratch`` or the ``window`` space. In scratch and window a place also
    says which slots hold the blocks: block ``first + i`` lies in slot ``slot + i``. A place of count 0 is an empty
    message: it only says that its sender has come this far.
window
    Like scratch, but the peers can read it (`Get`) and write to it (`Put`) without this rank's doing.
cell
    A counter that every rank has, 0 at the start, raised by `Notify` and awaited by `Wait`; what a notify adds are
    *credits*. A rank's writes before a notify, to its own window or to a peer's, are seen after the wait that it
    satisfies. A program waits for all credits that it gives, or takes the rest back.
step
    `Send`, `Recv`, `Fold`, `Copy`, and one-sided: `Put`, `Get`, `Notify`, `Wait`.
round
    Steps that may proceed together. All sends and receives of a round start at once; when its receives have arrived
    and its waits are satisfied, all other steps run in the order written; the next round starts when all of that is
    done, sends included. So within a round nothing may write to a place that one of its sends reads.

One call after another
    Programs with one-sided steps run on two sets of window and cells, turn about: what a slow peer still reads from
    this call, the next one does not touch, and the one after that cannot begin before the peer has finished this one.
    That holds if nobody can finish a call that somebody has not begun; `pyreduce.verify` plays three calls and looks.

What the spaces hold, on rank r of P
------------------------------------
==============  =======================  ==================
collective      input                    output
==============  =======================  ==================
reduce_scatter  blocks 0..P-1            block r
allgather       block r                  blocks 0..P-1
allreduce       blocks 0..P-1            blocks 0..P-1
==============  =======================  ==================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pyreduce.errors import AlgorithmError

__all__ = [
    "COLLECTIVES",
    "MOST_CREDITS",
    "Copy",
    "Cost",
    "Fold",
    "Get",
    "Notify",
    "Place",
    "Program",
    "Put",
    "Recv",
    "RoundsFunction",
    "Send",
    "Step",
    "Wait",
    "build",
    "in_place_safe",
    "input_blocks",
    "output_blocks",
    "place_input",
    "place_output",
    "place_scratch",
    "place_window",
    "places",
    "reads",
    "remote",
    "writes",
]

COLLECTIVES = ("reduce_scatter", "allgather", "allreduce")

MOST_CREDITS = (1 << 15) - 1  # that a cell may get in a call
INPUT, OUTPUT, SCRATCH, WINDOW = "input", "output", "scratch", "window"
SLOTTED = (SCRATCH, WINDOW)


@dataclass(frozen=True, slots=True)
class Place:
    """Where `count` consecutive blocks from `first` on lie: see the module's vocabulary."""

    space: str
    first: int
    count: int = 1
    slot: int = 0

    def cells(self, nranks: int) -> tuple[tuple[str, int, int], ...]:
        """The place taken apart: ``(space, index within the space, block)`` for every block of it."""
        return _take_apart(self, nranks)


@lru_cache(maxsize=1 << 16)
def _take_apart(place: Place, nranks: int) -> tuple[tuple[str, int, int], ...]:
    blocks = [(place.first + i) % nranks for i in range(place.count)]
    if place.space in SLOTTED:
        return tuple((place.space, place.slot + i, block) for i, block in enumerate(blocks))
    return tuple((place.space, block, block) for block in blocks)


def place_input(first: int, count: int = 1) -> Place:
    """`count` blocks of the input from block `first` on."""
    return Place(INPUT, first, count)


def place_output(first: int, count: int = 1) -> Place:
    """`count` blocks of the output from block `first` on."""
    return Place(OUTPUT, first, count)


def place_scratch(slot: int, first: int, count: int = 1) -> Place:
    """`count` blocks from block `first` on, kept in scratch slots `slot`, `slot` + 1, ..."""
    return Place(SCRATCH, first, count, slot)


def place_window(slot: int, first: int, count: int = 1) -> Place:
    """`count` blocks from block `first` on, kept in window slots `slot`, `slot` + 1, ..."""
    return Place(WINDOW, first, count, slot)


@dataclass(frozen=True, slots=True)
class Send:
    """Send what lies at `src` to rank `peer`."""

    peer: int
    src: Place


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive from rank `peer` into `dst`."""

    peer: int
    dst: Place


@dataclass(frozen=True, slots=True)
class Fold:
    """``dst = ((srcs[0] op srcs[1]) op srcs[2]) ...``, block by block; `dst` may be one of `srcs`."""

    dst: Place
    srcs: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy `src` to `dst`."""

    dst: Place
    src: Place


@dataclass(frozen=True, slots=True)
class Put:
    """Copy `src` to `dst` in the window of rank `peer`."""

    peer: int
    dst: Place
    src: Place


@dataclass(frozen=True, slots=True)
class Get:
    """Copy `src` in the window of rank `peer` to `dst`."""

    peer: int
    dst: Place
    src: Place


@dataclass(frozen=True, slots=True)
class Notify:
    """Add `value` credits to cell `cell` of rank `peer`, after everything this rank has written so far.

    To this rank itself, with a negative value: take credits back that have been waited for.
    """

    peer: int
    cell: int
    value: int = 1


@dataclass(frozen=True, slots=True)
class Wait:
    """Go on when this rank's cell `cell` holds at least `value` credits."""

    cell: int
    value: int = 1


Step = Send | Recv | Fold | Copy | Put | Get | Notify | Wait
_STEPS, _MESSAGES = (Send, Recv, Fold, Copy, Put, Get, Notify, Wait), (Send, Recv)
_NAMES_PEER = (Send, Recv, Put, Get)
RoundsFunction = Callable[[str, int, int], Iterable[Sequence[Step]]]


@dataclass(frozen=True, slots=True)
class Cost:
    """What one rank's program costs, in blocks; with equal blocks a block is S/P bytes.

    Attributes
    ----------
    rounds : int
        Rounds that send, receive or wait.
    sent, received : int
        Blocks sent and received, those put into and got from peers' windows included.
    messages : int
        Messages sent.
    folds : int
        Operations by block: a fold of k places of c blocks is (k - 1) c.
    scratch, window : int
        Scratch and window slots, a block each.
    notifies : int
        Notifies to peers.
    """

    rounds: int
    sent: int
    received: int
    messages: int
    folds: int
    scratch: int
    window: int = 0
    notifies: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """The rounds of one rank for one collective."""

    collective: str
    nranks: int
    rank: int
    rounds: tuple[tuple[Step, ...], ...]
    scratch: int
    window: int = 0
    cells: int = 0

    @property
    def one_sided(self) -> bool:
        """Whether its steps use windows or cells."""
        return self.window > 0 or self.cells > 0

    def cost(self) -> Cost:
        """Count rounds, blocks, messages, folds and notifies."""
        talking = sent = received = messages = folds = notifies = 0
        for steps in self.rounds:
            talking += any(isinstance(step, Send | Recv | Wait) for step in steps)
            for step in steps:
                if isinstance(step, Send):
                    sent += step.src.count
                    messages += 1
                elif isinstance(step, Put):
                    sent += step.src.count
                elif isinstance(step, Recv | Get):
                    received += step.dst.count
                elif isinstance(step, Fold):
                    folds += (len(step.srcs) - 1) * step.dst.count
                elif isinstance(step, Notify):
                    notifies += step.peer != self.rank
        return Cost(talking, sent, received, messages, folds, self.scratch, self.window, notifies)


def input_blocks(collective: str, nranks: int, rank: int) -> range:
    """The blocks that a rank's input holds."""
    return range(rank, rank + 1) if collective == "allgather" else range(nranks)


def output_blocks(collective: str, nranks: int, rank: int) -> range:
    """The blocks that a rank's output holds in the end."""
    return range(rank, rank + 1) if collective == "reduce_scatter" else range(nranks)


def build(name: str, function: RoundsFunction, collective: str, nranks: int, rank: int) -> Program:
    """Call an algorithm's function and check what can be checked on one rank alone.

    Parameters
    ----------
    name : str
        The algorithm's name, for messages.
    function : callable
        ``(collective, nranks, rank) -> rounds``.
    collective : {"reduce_scatter", "allgather", "allreduce"}
    nranks, rank : int

    Returns
    -------
    Program

    Raises
    ------
    AlgorithmError
        A step that is no step, a peer or block out of range, a write to the input, sizes that differ within a step,
        or a write to a place that a send of the same round reads.
    Unsupported
        Passed on from `function`: it does not serve this collective or number of ranks.
    """
    where = f"{name}: {collective} with P={nranks}, rank {rank}"
    rounds = []
    for number, steps in enumerate(function(collective, nranks, rank), start=1):
        try:
            checked = tuple(steps)
        except TypeError:
            raise AlgorithmError(f"{where}: round {number} is {steps!r}, not a sequence of steps") from None
        for step in checked:
            _check_step(step, collective, nranks, rank, f"{where}, round {number}")
        _check_round(checked, nranks, f"{where}, round {number}")
        rounds.append(checked)
    steps = [step for steps in rounds for step in steps]
    named = [place for step in steps for place in (*places(step), *remote(step))]
    cells = [step.cell + 1 for step in steps if isinstance(step, Notify | Wait)]
    return Program(
        collective, nranks, rank, tuple(rounds), _slots(named, SCRATCH), _slots(named, WINDOW), max(cells, default=0)
    )


def _slots(named: Iterable[Place], space: str) -> int:
    return max((place.slot + place.count for place in named if place.space == space), default=0)


def writes(step: Step) -> tuple[Place, ...]:
    """The place of this rank that a step writes."""
    return (step.dst,) if isinstance(step, Recv | Fold | Copy | Get) else ()


def reads(step: Step) -> tuple[Place, ...]:
    """The places of this rank that a step reads."""
    if isinstance(step, Fold):
        return step.srcs
    return (step.src,) if isinstance(step, Send | Copy | Put) else ()


def places(step: Step) -> tuple[Place, ...]:
    """All places of this rank that a step names, what it writes first."""
    return (*writes(step), *reads(step))


def remote(step: Step) -> tuple[Place, ...]:
    """The place in a peer's window that a step names."""
    if isinstance(step, Put):
        return (step.dst,)
    return (step.src,) if isinstance(step, Get) else ()


def _check_step(step: Step, collective: str, nranks: int, rank: int, where: str) -> None:
    if not isinstance(step, _STEPS):
        known = ", ".join(kind.__name__ for kind in _STEPS)  # type: ignore[unreachable]
        raise AlgorithmError(f"{where}: {step!r} is not a step ({known})")
    if isinstance(step, (*_NAMES_PEER, Notify)):
        if not (isinstance(step.peer, int) and 0 <= step.peer < nranks):
            raise AlgorithmError(f"{where}: {step!r} names peer {step.peer!r}; ranks are 0..{nranks - 1}")
        if step.peer == rank and isinstance(step, _NAMES_PEER):
            raise AlgorithmError(f"{where}: {step!r} talks to its own rank; use Copy")
    if isinstance(step, Notify | Wait):
        _check_credits(step, rank, where)
        return
    if isinstance(step, Fold) and not step.srcs:
        raise AlgorithmError(f"{where}: {step!r} folds nothing")
    named = (*places(step), *remote(step))
    for place in named:
        if not isinstance(place, Place) or place.space not in (INPUT, OUTPUT, SCRATCH, WINDOW):
            raise AlgorithmError(f"{where}: {place!r} is not a place in input, output, scratch or window")
        if not (0 <= place.first < nranks and 0 <= place.count <= nranks and place.slot >= 0):
            raise AlgorithmError(f"{where}: {place!r} is out of range; blocks are 0..{nranks - 1}")
        if (place.first, place.count) != (named[0].first, named[0].count):
            raise AlgorithmError(f"{where}: {step!r} mixes blocks {_run(named[0])} and {_run(place)}")
        if place.space not in SLOTTED and (place.space == INPUT) == (collective == "allgather"):
            _check_owned(step, place, collective, nranks, rank, where)
    for place in remote(step):
        if place.space != WINDOW:
            raise AlgorithmError(f"{where}: {step!r} names the {place.space} of a peer; only windows can be reached")
    for place in writes(step):
        if place.space == INPUT:
            raise AlgorithmError(f"{where}: {step!r} writes to the input, which is read-only")


def _check_credits(step: Notify | Wait, rank: int, where: str) -> None:
    if not (isinstance(step.cell, int) and step.cell >= 0 and isinstance(step.value, int)):
        raise AlgorithmError(f"{where}: {step!r}: cells and values are integers, cells from 0 on")
    if isinstance(step, Wait) and step.value < 1:
        raise AlgorithmError(f"{where}: {step!r} waits for nothing: a cell holds 0 at the start")
    if isinstance(step, Notify) and (step.value < 0) != (step.peer == rank):
        raise AlgorithmError(f"{where}: {step!r}: credits are given to peers (value > 0), and taken back from oneself")
    if step.value > MOST_CREDITS:
        raise AlgorithmError(f"{where}: {step!r}: a cell holds at most {MOST_CREDITS} credits of a call")
    if isinstance(step, Notify) and step.value == 0:
        raise AlgorithmError(f"{where}: {step!r} adds nothing, so no wait could see it")


def _check_owned(step: Step, place: Place, collective: str, nranks: int, rank: int, where: str) -> None:
    """The block of an allgather's input, or of a reduce_scatter's output, is the rank's own."""
    have = input_blocks if place.space == INPUT else output_blocks
    owned = have(collective, nranks, rank)
    for _, block, _ in place.cells(nranks):
        if block not in owned:
            raise AlgorithmError(f"{where}: {step!r} names block {block}, which is not in its {place.space}")


def _run(place: Place) -> str:
    return f"{place.first}" if place.count == 1 else f"{place.first}..+{place.count}"


def _cells(place: Place, nranks: int) -> list[tuple[str, int]]:
    return [(space, index) for space, index, _ in place.cells(nranks)]


def _check_round(steps: tuple[Step, ...], nranks: int, where: str) -> None:
    """No step writes where a send of the round reads, and no two receives meet."""
    reading: set[tuple[str, int]] = set()
    receiving: set[tuple[str, int]] = set()
    for src in {step.src for step in steps if isinstance(step, Send)}:
        reading.update(_cells(src, nranks))
    for step in steps:
        if isinstance(step, Send):
            continue
        cells = [cell for place in writes(step) for cell in _cells(place, nranks)]
        clash = reading.intersection(cells)
        if clash:
            raise AlgorithmError(f"{where}: {step!r} writes to {min(clash)} while a send reads it")
        if isinstance(step, Recv):
            clash = receiving.intersection(cells)
            if clash:
                raise AlgorithmError(f"{where}: two receives write to {min(clash)}")
            receiving.update(cells)


def in_place_safe(program: Program) -> bool:
    """Whether the program stays right when its output lies over its input.

    Block b of an allreduce's output, and block r of an allgather's, lie over the same block of the input; block r
    of a reduce_scatter's output lies at the front of the buffer, over block 0 of the input. The program is safe if no
    input is read once (or while) something was written over it. A copy of a block onto itself does nothing.
    """
    shift = program.collective == "reduce_scatter"
    gone: set[int] = set()

    def covers(place: Place) -> set[int]:
        if place.space != OUTPUT:
            return set()
        return {0} if shift else {index for _, index, _ in place.cells(program.nranks)}

    def needs(read: Iterable[Place]) -> set[int]:
        return {i for place in read if place.space == INPUT for _, i, _ in place.cells(program.nranks)}

    for steps in program.rounds:
        sent = needs(step.src for step in steps if isinstance(step, Send))
        for step in steps:
            if isinstance(step, Recv):
                gone |= covers(step.dst)
        if sent & gone:
            return False
        for step in steps:
            if isinstance(step, _MESSAGES):
                continue
            read = needs(reads(step))
            written = {index for place in writes(step) for index in covers(place)}
            if isinstance(step, Copy) and read == written and not shift:
                continue
            if read & gone or sent & written:
                return False
            gone |= written
    return True
