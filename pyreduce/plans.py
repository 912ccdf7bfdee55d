"""The plans of a communicator: which algorithm a call runs, and what it works with.

`Plans.find` chooses the algorithm (`pyreduce.selection`), compiles its program for the sizes at hand, and keeps the
result. `Plans.room_for` and `Plans.open_engine` get the memory that windows of programs and the shared-memory engine
need: at the first call that wants it, all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from mpi4py import MPI

from pyreduce import algorithms, ops
from pyreduce.algorithms.hierarchical import HierarchicalPlan
from pyreduce.algorithms.native import NativePlan
from pyreduce.algorithms.shared import Engine, SharedPlan, open_engine
from pyreduce.arena import Agree, Arena, Region
from pyreduce.arguments import Arguments
from pyreduce.calls import Call, Facts
from pyreduce.errors import Unsupported, WindowMemoryError
from pyreduce.execute import Plan, Room
from pyreduce.launcher import find_nodes
from pyreduce.ops import Op
from pyreduce.pending import AnyPlan
from pyreduce.profiles import Profile, Shelf, name_mpi
from pyreduce.selection import check_algorithm, choose
from pyreduce.settings import Settings
from pyreduce.topology import Topology

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
    shelf : Shelf
        The profiles to choose from.
    virtual : Topology, optional
        Nodes to take instead of those that the ranks are on.
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
        shelf: Shelf,
        virtual: Topology | None = None,
    ) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.settings = settings
        self.deterministic = deterministic
        self.engine: Engine | None = None
        self.refusal: str | None = None  # why there is no engine; None while nobody has asked for one
        self.profile: Profile | None = None  # by which calls choose; its digest is among the settings
        self._shelf: Shelf | None = shelf  # None when the profile has been picked
        self._algorithm = algorithm
        self._forget = forget
        self._count = count
        self._plans: dict[Any, Found] = {}
        self._registrations = algorithms.registrations()
        self._comm = comm
        self._agree = agree
        self._agreed: int | None = None  # digest of what the ranks have agreed on for the call that follows
        self._virtual = virtual
        self.topology: Topology | None = None  # None until the first call that needs to know
        self.node_engine: Engine | None = None  # among the ranks of this node, where there are several nodes
        self.node_refusal: str | None = None
        self._node_comm: MPI.Intracomm | None = None
        self._node_arena: Arena | None = None
        # Two: what one carves does not move the other, whose layout is fixed.
        self._engine_arena = Arena(comm, "shared", settings.message_bytes, agree)
        self._room_arena = Arena(comm, settings.transport, settings.message_bytes, agree)
        self._room: Room | None = None
        self._room_region: Region | None = None
        if settings.transport == "rma":
            self.refusal = "transport 'rma' asks for no shared memory"

    def close(self) -> None:
        """Free the memory; collective."""
        self.engine = self.node_engine = None
        if self._node_arena is not None:
            self._node_arena.close()
        if self._node_comm is not None:
            self._node_comm.Free()
        self._engine_arena.close()
        self._room_arena.close()

    def forget(self) -> None:
        """The communicator is broken: who comes late to the engine of a node finds out there."""
        if self.node_engine is not None:
            self.node_engine.give_up()

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
        told = None
        try:
            name, why = self._choose(asked, call, nbytes, timeout)
            plan = self._make(name, why, call)
            if told_dtype is not None:
                plan.call = plan.call.like(dtype=told_dtype)
            told = plan.call.digest()
        finally:
            self._follow(told)
        digest = None if self.settings.check == "off" else told
        if not fresh:
            self._plans[key] = plan, digest
        return plan, digest

    def _choose(self, asked: str | None, call: Call, nbytes: int, timeout: float | None) -> tuple[str, str]:
        """The name of the algorithm, and why; the one asked for must serve the call."""
        op, dtype, limit = call.op, call.dtype, self.settings.message_bytes
        if asked is not None:
            call = call.like(algorithm=asked)
            check_algorithm(asked, call.collective, nbytes, self.size, self.rank, op, dtype, limit)
            if self.deterministic and op is not None and not algorithms.folds_in_rank_order(asked):
                raise ValueError(
                    f"algorithm {asked!r} does not fold in rank order, as deterministic=True demands; use 'shared', "
                    "'mesh', 'direct', 'pairwise' or 'naive'"
                )
        if asked == algorithms.SHARED:
            self._open_engine(call, timeout)
            if self.engine is None:
                raise Unsupported(f"{call.collective}: shared cannot serve this communicator: {self.refusal}")
        elif asked == algorithms.HIERARCHICAL:
            self._open_node_engine(call, timeout)
            if self.node_engine is None:
                raise Unsupported(
                    f"{call.collective}: hierarchical cannot serve this communicator: {self.node_refusal}"
                )
        if asked is not None:
            return asked, "asked for"
        topology = self._find_nodes(call, timeout)
        self._open_engine(call, timeout)
        name, why = choose(
            call.collective, nbytes, topology, op, dtype, self.deterministic, limit, self.refusal, self.node_refusal,
            self.profile,
        )  # fmt: skip
        if name == algorithms.HIERARCHICAL:
            self._open_node_engine(call, timeout)
            if self.node_engine is None:
                return self._choose(asked, call, nbytes, timeout)
        return name, why

    def _begin(self, call: Call) -> Call:
        """The call under whose name ranks now agree on something.

        Messages of one number must be of one call: what is agreed on for the call that follows, under its name, shares
        its number; everything else has one of its own.
        """
        self._follow(call.digest())
        self._agreed = call.digest()
        return call

    def _follow(self, digest: int | None) -> None:
        """What follows is this call, or none."""
        if self._agreed is not None and self._agreed != digest:
            self._count()
        self._agreed = None

    def _pick_profile(self, topology: Topology) -> None:
        """Take the profile that holds on these nodes, once; from then on calls carry its digest."""
        if self._shelf is None:
            return
        mpi, _ = name_mpi(MPI.Get_library_version())
        self.profile, _ = self._shelf.pick(topology, mpi, warn=self.rank == 0)
        self._shelf = None
        if self.profile is not None:
            self.settings = replace(self.settings, profile=self.profile.digest)

    def _make(self, name: str, why: str, call: Call) -> AnyPlan:
        facts = call.rows
        program = (
            "" if algorithms.has_no_program(name) else algorithms.get(name).fingerprint(call.collective, self.size)
        )
        if program:
            facts = (*facts, ("program", program))
        call = call.like(algorithm=name, rows=facts, settings=self.settings)
        plan: AnyPlan
        if name == algorithms.SHARED:
            assert self.engine is not None
            plan = SharedPlan(call, self.engine)
        elif name == algorithms.NATIVE:
            plan = NativePlan(call)
        elif name == algorithms.HIERARCHICAL:
            assert self.node_engine is not None
            assert self.topology is not None
            plan = HierarchicalPlan(call, self.node_engine, self.topology, algorithms.get)
            why = f"{why}; {plan.inner} between {self.topology}"
        else:
            algorithm = algorithms.get(name)
            most = algorithm.scratch(call.collective, self.size)
            plan = Plan(algorithm.program(call.collective, self.size, self.rank), call, scratch=most)
        plan.why = why
        return plan

    def open_engine(self, call: Call, timeout: float | None) -> None:
        """Make the engine, if nobody has tried yet, before the call that follows; collective."""
        try:
            self._open_engine(call, timeout)
        finally:
            self._follow(call.digest())

    def _open_engine(self, call: Call, timeout: float | None) -> None:
        if self.engine is not None or self.refusal is not None:
            return
        topology = self._find_nodes(call, timeout)
        if topology.nnodes > 1:
            self.refusal = f"the ranks are on several nodes: {topology}"
        else:
            self.engine, self.refusal = self._make_engine(
                self._engine_arena, call, algorithms.SHARED, range(self.size), timeout
            )

    def _open_node_engine(self, call: Call, timeout: float | None) -> None:
        """Make the engines of all nodes, if nobody has tried yet; collective."""
        if self.node_engine is not None or self.node_refusal is not None:
            return
        node = self._find_nodes(call, timeout).node_of[self.rank]
        node_comm = self._comm.Split(node, self.rank)
        assert isinstance(node_comm, MPI.Intracomm)
        self._node_comm = node_comm
        self._node_arena = Arena(node_comm, "shared", self.settings.message_bytes, self._agree)
        assert self.topology is not None
        self.node_engine, self.node_refusal = self._make_engine(
            self._node_arena, call, algorithms.HIERARCHICAL, self.topology.nodes[node], timeout
        )

    def _make_engine(
        self, arena: Arena, call: Call, name: str, ranks: Sequence[int], timeout: float | None
    ) -> tuple[Engine | None, str | None]:
        """An engine for some ranks, or why there is none; the same on all ranks of the communicator."""
        assert self.topology is not None
        named = self._begin(call.like(algorithm=name, settings=self.settings))
        nbytes = self.settings.arena_bytes
        try:
            engine = open_engine(arena, nbytes, named, ranks, timeout, counted=name == algorithms.SHARED)
        except (WindowMemoryError, ValueError) as error:  # on all ranks
            return None, str(error)
        fullest = max(map(len, self.topology.nodes))
        if not engine.holds(fullest):
            return None, f"an arena of {nbytes} bytes a rank is too small for {fullest} ranks"
        return engine, None

    def _find_nodes(self, call: Call, timeout: float | None) -> Topology:
        """Which ranks share a node, and the profile that holds there; collective the first time."""
        if self.topology is None:
            named = self._begin(call.like(algorithm=call.algorithm or algorithms.SHARED))
            self._agree(named, 0, timeout)  # now all ranks are here
            self.topology = self._virtual
            if self.topology is not None:
                self._comm.Barrier()  # as allgather is: nobody waits for what was agreed on above any more
            else:
                self.topology = find_nodes(self._comm)
            self._pick_profile(self.topology)
            # The same call, whose profile is known now. It keeps its number whatever profile this rank has found, or
            # ranks that have found different ones would not meet in a call, and tell each other.
            self._agreed = named.like(settings=self.settings).digest()
        return self.topology

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
