"""native: the MPI's own collective behind the face of the others.

Source
    The MPI underneath.
Cost
    The MPI's nonblocking collective, plus ceil(log2 P) empty messages a rank before it.
Restrictions
    No bfloat16 (but for AVG and allgather), no MIN and MAX of floats (MPI's need not propagate NaN), no SUM of 8- and
    16-bit integers (Open MPI's saturates), no vector longer than the message limit. The fold order is the MPI's secret.
Best for
    Where the MPI knows a better way than ours, or hardware that helps.

Calls that do not match hang inside an MPI or give wrong results. So the ranks first agree, by the rounds below (the
dissemination barrier of Hensgen, Finkel and Manber, 1988), whose messages carry the call's digest in their tags like
all others; only when every rank has come with the same call do they enter the MPI's. With ``check="off"`` they enter
at once. The MPI's call is a nonblocking one, so that our waiting loop keeps its deadline and hears of peers that have
given up: a rank which comes late can find every message of the agreement there, and nobody left.
"""

from __future__ import annotations

from os import sched_yield
from typing import Any

import numpy as np
from mpi4py import MPI

from pyreduce import ops
from pyreduce.blocks import offsets
from pyreduce.calls import Call
from pyreduce.errors import Unsupported
from pyreduce.execute import Execution, Plan, ShortExecution
from pyreduce.programs import Place, Program, Recv, Send, Step

__all__ = ["NativePlan", "agreement"]

NOTHING = Place("input", 0, 0)


def agreement(nranks: int, rank: int) -> Program:
    """The dissemination barrier: after round i a rank knows that 2^i ranks before it have come with the same call."""
    rounds: list[tuple[Step, ...]] = []
    distance = 1
    while distance < nranks:
        rounds.append((Send((rank + distance) % nranks, NOTHING), Recv((rank - distance) % nranks, NOTHING)))
        distance *= 2
    return Program("allreduce", nranks, rank, tuple(rounds), 0)


class NativePlan:
    """The MPI's collective, prepared for the sizes of one call; the face of `pyreduce.execute.Plan`."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.why = ""
        self.work_dtype = call.work_dtype
        self.scratch_bytes = 0
        self.in_place_safe = call.collective != "reduce_scatter"
        self.agree = call.settings.check != "off" and call.nranks > 1
        nothing = Call(
            "allreduce", "native", None, np.dtype(np.uint8), (0,) * call.nranks, (), call.rank, call.settings
        )
        self.agreement = Plan(agreement(call.nranks, call.rank), nothing)
        self.kernel = ops.kernel(call.op, call.work_dtype) if call.op is not None else (0, 0)
        self.datatype = MPI.BYTE if call.op is None else mpi_datatype(call.work_dtype)
        self.op = mpi_op(call) if call.op is not None else MPI.OP_NULL

    def start(self, comm: MPI.Intracomm, bases: tuple[int, int, int], tag: int) -> NativeExecution:
        """Begin to agree; see `pyreduce.execute.Plan.start`."""
        return NativeExecution(self, comm, bases, tag)


class NativeExecution:
    """A native collective under way: agreement, then the MPI's nonblocking call."""

    def __init__(self, plan: NativePlan, comm: MPI.Intracomm, bases: tuple[int, int, int], tag: int) -> None:
        self._plan = plan
        self._comm = comm
        self._bases = bases
        self._agreement: Execution | ShortExecution | None = (
            plan.agreement.start(comm, bases, tag) if plan.agree else None
        )
        self._request: MPI.Request | None = None
        self._done, self.mismatched = False, ""
        self.moves = self.sent = self.received = 0
        self.talking = plan.agreement.talking if plan.agree else 0

    def advance(self) -> bool:
        """Agree; when all have agreed, start the MPI's collective; see whether it is done."""
        if self._done:
            return True
        if self._request is None:
            if self._agreement is not None:
                agreed = self._agreement.advance()
                self.moves = self._agreement.moves
                if not agreed:
                    return False
            self._request = self._start()
            self.moves += 1
        if not self._request.Test():
            return False
        if self._plan.call.divides:
            self._divide()
        self._done = True
        return True

    def linger(self) -> None:
        """Give way: ranks may outnumber cores."""
        sched_yield()

    def awaited(self) -> tuple[list[int], int]:
        """Peers that have not agreed yet, and the round."""
        if self._agreement is not None and self._request is None:
            return self._agreement.awaited()
        return [], self.talking + 1

    def _start(self) -> MPI.Request:
        plan, call, comm = self._plan, self._plan.call, self._comm
        source, target, _ = self._bases
        counts, total, size = call.counts, sum(call.counts), plan.work_dtype.itemsize
        own = counts[call.rank]
        if call.op is None:
            nbytes = [count * size for count in counts]
            sent: Any = [MPI.buffer.fromaddress(source, own * size), own * size, MPI.BYTE]
            if source == target + offsets(nbytes)[call.rank] and own:
                sent = MPI.IN_PLACE
            received = MPI.buffer.fromaddress(target, total * size)
            if len(set(counts)) == 1:
                return comm.Iallgather(sent, [received, nbytes[0], MPI.BYTE])
            return comm.Iallgatherv(sent, [received, nbytes, None, MPI.BYTE])
        vector: Any = [MPI.buffer.fromaddress(source, total * size), total, plan.datatype]
        if call.collective == "allreduce":
            result = [MPI.buffer.fromaddress(target, total * size), total, plan.datatype]
            return comm.Iallreduce(MPI.IN_PLACE if source == target else vector, result, plan.op)
        result = [MPI.buffer.fromaddress(target, own * size), own, plan.datatype]
        if len(set(counts)) == 1:
            return comm.Ireduce_scatter_block([vector[0], own, plan.datatype], result, plan.op)
        return comm.Ireduce_scatter(vector, result, list(counts), plan.op)

    def _divide(self) -> None:
        call, target = self._plan.call, self._bases[1]
        folded = call.counts[call.rank] if call.collective == "reduce_scatter" else sum(call.counts)
        ops.divide(self._plan.kernel[1], folded, target, target, call.nranks)


def mpi_datatype(dtype: np.dtype[Any]) -> MPI.Datatype:
    """The MPI's datatype for a dtype; `Unsupported` if this MPI has none."""
    datatype = MPI.FLOAT16_T if dtype.name == "float16" else MPI.Datatype.fromcode(dtype.char)
    if datatype == MPI.DATATYPE_NULL:
        raise Unsupported(f"native cannot reduce {dtype.name}: this MPI has no datatype for it; use algorithm='ring'")
    return datatype


def mpi_op(call: Call) -> MPI.Op:
    """The MPI op; MPI's bitwise ops, MIN and MAX are not for bool, where the logical ones are the same."""
    assert call.op is not None
    name = "SUM" if call.divides else call.op.name
    if call.dtype.kind == "b":
        name = {"MIN": "LAND", "MAX": "LOR", "BAND": "LAND", "BOR": "LOR", "BXOR": "LXOR"}.get(name, name)
    op: MPI.Op = getattr(MPI, name)
    return op
