"""The plans of a communicator: which algorithm a call runs, and what it works with.

`Plans.find` chooses the algorithm (`pyreduce.selection`), compiles its program for the sizes at hand, and keeps the
result. `Plans.room_for` and `Plans.open_engine` get the memory that windows of programs and the shared-memory engine
need: at the first call that wants it, all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from pyreduce import algorithms, ops
from pyreduce.algorithms.native import NativePlan
from pyreduce.algorithms.shared import Engine, SharedPlan, open_engine
from pyreduce.arena import Agree, Arena, Region
from pyreduce.arguments import Arguments
from pyreduce.calls import Call, Facts
from pyreduce.errors import Unsupported, WindowMemoryError
from pyreduce.execute import Plan, Room
from pyreduce.ops import Op
from pyreduce.pending import AnyPlan
from pyreduce.selection import check_algorithm, choose
from pyreduce.settings import Settings

__all__ = ["Plans"]

PLANS_KEPT = 256

Found = tuple[AnyPlan, "int | None"]  # a plan, and the digest that its tags carry


class Plans:
    """What the calls of one communicator have been compiled to.

    Parameters
    ----------
    comm : MPI.Intracomm
        The library's own.
    settings : Settings
    algorithm : str or None
        What calls use that name none.
    deterministic : bool
    agree : callable
        See `pyreduce.arena`.
    forget : callable
        Called when plans that have been handed out are not kept any more.
    count : callable
        Called when ranks have agreed on what is not part of the call that follows.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        settings: Settings,
        algorithm: str | None,
        deterministic: bool,
        agree: Agree,
        forget: Callable[[], None],
        count: Callable[[], None],
    ) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.settings = settings
        self.deterministic = deterministic
        self.engine: Engine | None = None
        self.refusal: str | None = None  # why there is no engine; None while nobody has asked for one
        self._algorithm = algorithm
        self._forget = forget
        self._count = count
        self._plans: dict[Any, Found] = {}
        self._registrations = algorithms.registrations()
        # Two: what one carves does not move the other, whose layout is fixed.
        self._engine_arena = Arena(comm, "shared", settings.message_bytes, agree)
        self._room_arena = Arena(comm, settings.transport, settings.message_bytes, agree)
        self._room: Room | None = None
        self._room_region: Region | None = None
        if settings.transport == "rma":
            self.refusal = "transport 'rma' asks for no shared memory"

    def close(self) -> None:
        """Free the memory; collective."""
        self.engine = None
        self._engine_arena.close()
        self._room_arena.close()

    def clear(self) -> None:
        """Keep none of the plans."""
        self._forget()
        self._plans.clear()

    def find(
        self,
        collective: str,
        arguments: Arguments,
        op: Op | None,
        algorithm: str | None,
        timeout: float | None,
        facts: Facts | None = None,
        told_dtype: np.dtype[Any] | None = None,
        fresh: bool = False,
    ) -> Found:
        """The plan of a call and the digest that its tags carry, from the cache if it has been made before.

        `facts` and `told_dtype` are compared instead of the rows and dtype that move, when lengths are agreed on. A
        `fresh` plan is nobody else's. The first call that may be served by the engine makes it, and waits for all
        ranks.

        Raises
        ------
        TypeError, ValueError
            The algorithm asked for does not serve this call.
        WindowMemoryError
            On all ranks: ``shared`` was asked for, and there is no memory for it.
        MismatchError, CollectiveTimeout, BrokenCommunicatorError
        """
        if self._registrations != algorithms.registrations():
            self._registrations = algorithms.registrations()
            self.clear()
        dtype = arguments.vector.dtype
        key = (collective, op, algorithm, dtype, arguments.shape, arguments.rows, facts, told_dtype)
        found = self._plans.get(key)
        if found is not None and not fresh:
            return found
        row = int(np.prod(arguments.row_shape, dtype=np.int64))
        counts = tuple(count * row for count in arguments.rows)
        nbytes = sum(counts) * dtype.itemsize
        if op is not None:
            ops.kernel(op, dtype)
        if facts is None:
            facts = _facts(collective, arguments) + ((("persistent", "yes"),) if fresh else ())
        call = Call(collective, "", op, dtype, counts, facts, self.rank, self.settings)
        if len(self._plans) >= PLANS_KEPT:
            self.clear()
        asked = algorithm if algorithm is not None else self._algorithm
        name, why = self._choose(asked, call, nbytes, timeout)
        plan = self._make(name, why, call)
        if told_dtype is not None:
            plan.call = plan.call.like(dtype=told_dtype)
        digest = None if self.settings.check == "off" else plan.call.digest()
        if not fresh:
            self._plans[key] = plan, digest
        return plan, digest

    def _choose(self, asked: str | None, call: Call, nbytes: int, timeout: float | None) -> tuple[str, str]:
        """The name of the algorithm, and why; the one asked for must serve the call."""
        op, dtype, limit = call.op, call.dtype, self.settings.message_bytes
        if asked is not None:
            check_algorithm(asked, call.collective, nbytes, self.size, self.rank, op, dtype, limit)
            if self.deterministic and op is not None and not algorithms.folds_in_rank_order(asked):
                raise ValueError(
                    f"algorithm {asked!r} does not fold in rank order, as deterministic=True demands; use 'shared', "
                    "'mesh' or 'naive'"
                )
        if asked in (None, algorithms.SHARED):
            self.open_engine(call, timeout)
        if asked == algorithms.SHARED and self.refusal is not None:
            raise Unsupported(f"{call.collective}: shared cannot serve this communicator: {self.refusal}")
        if asked is not None:
            return asked, "asked for"
        return choose(call.collective, nbytes, self.size, op, dtype, self.deterministic, limit, self.refusal)

    def _make(self, name: str, why: str, call: Call) -> AnyPlan:
        facts = call.rows
        program = (
            "" if algorithms.has_no_program(name) else algorithms.get(name).fingerprint(call.collective, self.size)
        )
        if program:
            facts = (*facts, ("program", program))
        call = call.like(algorithm=name, rows=facts)
        plan: AnyPlan
        if name == algorithms.SHARED:
            assert self.engine is not None
            plan = SharedPlan(call, self.engine)
        elif name == algorithms.NATIVE:
            plan = NativePlan(call)
        else:
            plan = Plan(algorithms.get(name).program(call.collective, self.size, self.rank), call)
        plan.why = why
        return plan

    def open_engine(self, call: Call, timeout: float | None) -> None:
        """Make the engine, if nobody has tried yet; collective."""
        if self.engine is not None or self.refusal is not None:
            return
        named = call.like(algorithm="shared")
        try:
            self.engine = open_engine(self._engine_arena, self.settings.arena_bytes, named, self.size, timeout)
        except (WindowMemoryError, ValueError) as error:  # on all ranks
            self.refusal = str(error)
        if self.engine is not None and not self.engine.holds_peers:
            self.refusal = f"an arena of {self.settings.arena_bytes} bytes a rank is too small for {self.size} ranks"
            self.engine = None
        if self.engine is None:
            self._count()  # the call that follows is another one than was agreed on

    def room_for(self, plan: Plan, timeout: float | None) -> Room:
        """Windows and cells for a plan's one-sided steps: kept from call to call, replaced when they are too small."""
        room = self._room
        if room is None or not room.holds(plan):
            ncells, window_bytes = plan.program.cells, plan.window_bytes
            if room is not None and self._room_region is not None:
                ncells, window_bytes = max(ncells, room.ncells), max(window_bytes, room.window_bytes)
                self._room_arena.give_back(self._room_region)
                self._room = self._room_region = None
            lanes = self.settings.in_flight
            region = self._room_arena.allocate(Room.size(lanes, ncells, window_bytes), plan.call, timeout)
            room = Room.carve(region.chunk, region.offset, lanes, ncells, window_bytes, self.size)
            self._room, self._room_region = room, region
        plan.bind(room.shared)
        return room


def _facts(collective: str, arguments: Arguments) -> Facts:
    """What ranks must agree on of the arrays."""
    if collective == "allreduce":
        return (("shape", str(arguments.shape)),)
    return (
        ("rows", str(sum(arguments.rows))),
        ("counts", str(arguments.rows)),
        ("row shape", str(arguments.row_shape)),
    )
