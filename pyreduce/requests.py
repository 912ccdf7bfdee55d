"""Requests: calls that have been started and not been waited for, and calls that are settled once and started often.

A request belongs to the queue of its communicator (`pyreduce.pending`): calls run in the order in which they were
started, and to wait for one completes those before it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from pyreduce import arrays
from pyreduce._core import lib
from pyreduce.algorithms.shared import SharedPlan
from pyreduce.arrays import Array
from pyreduce.execute import Plan
from pyreduce.peers import keep_for_ever
from pyreduce.pending import AnyPlan, Operation, Pending, Staging
from pyreduce.settings import check_seconds

if TYPE_CHECKING:
    from pyreduce.plans import Plans

__all__ = ["PersistentRequest", "Request", "waitall"]

_start, _wait, OK, SHUT = lib.pr_door_start, lib.pr_door_wait, lib.PR_OK, lib.PR_SHUT


class Request:
    """A nonblocking call under way. Made by `Communicator.iallreduce` and its siblings.

    The buffers must be left alone until it is complete; it keeps them alive. One that is dropped before it was waited
    for warns, and its call still completes when a later one is waited for.
    """

    def __init__(self, pending: Pending, operation: Operation, staging: Staging) -> None:
        self._pending = pending
        self._operation: Operation | None = operation
        self._staging = staging
        self._result: Array | None = None

    def __repr__(self) -> str:
        operation = self._operation
        state = (
            "complete" if operation is None else f"call {operation.number}, {'done' if operation.done else 'under way'}"
        )
        return f"<pyreduce.Request {state}>"

    def test(self) -> bool:
        """Do what can be done without waiting; whether the call is complete, and `wait` will return at once.

        Raises
        ------
        MismatchError, CollectiveTimeout, BrokenCommunicatorError
            The call, or one before it on the communicator, cannot be completed.
        """
        if self._operation is not None and self._pending.test(self._operation):
            self._take()
        return self._operation is None

    def wait(self, timeout: float | None = None) -> Array:
        """Wait until the call is complete.

        Parameters
        ----------
        timeout : float, optional
            Seconds from now; default: the communicator's. Afterwards the communicator is broken, as after any call that
            passed its deadline; to look without that, `test`.

        Returns
        -------
        ndarray
            What the blocking call returns; the same again if called again.

        Raises
        ------
        MismatchError, CollectiveTimeout, BrokenCommunicatorError
            The call, or one before it on the communicator, cannot be completed.
        """
        if self._operation is not None:
            seconds = self._pending.settings.timeout if timeout is None else check_seconds("timeout", timeout)
            self._pending.complete(self._operation, seconds)
            self._take()
        assert self._result is not None
        return self._result

    @staticmethod
    def waitall(requests: Sequence[Request], timeout: float | None = None) -> list[Array]:
        """`pyreduce.waitall`."""
        return waitall(requests, timeout)

    def _take(self) -> None:
        self._result = self._staging.write()
        self._operation = None

    def __del__(self) -> None:
        operation = getattr(self, "_operation", None)
        if operation is not None and operation.error is None:
            warnings.warn(
                f"a request of {operation.plan.call.collective} (call {operation.number}) was dropped before it was "
                "waited for; its result may not be complete",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )


def waitall(requests: Sequence[Request | PersistentRequest], timeout: float | None = None) -> list[Array]:
    """Wait for all of these, of any communicators; their results, in the order given.

    Parameters
    ----------
    requests : sequence of Request or PersistentRequest
    timeout : float, optional
        Seconds for all together; default: for each that of its communicator.

    Raises
    ------
    MismatchError, CollectiveTimeout, BrokenCommunicatorError
    """
    end = None if timeout is None else perf_counter() + check_seconds("timeout", timeout)
    results = []
    for request in requests:
        left = None if end is None else max(end - perf_counter(), 0.0)
        results.append(request.wait(left))
    return results


class PersistentRequest:
    """A call whose arguments are settled, to be started again and again. Made by `Communicator.allreduce_init` ...

    What the arrays hold is read at each `start`. Without `recvbuf` every call gives the same array, written anew. Use
    it as a context manager, or `free` it; it is freed with its communicator at the latest.
    """

    def __init__(self, pending: Pending, plans: Plans, plan: AnyPlan, digest: int | None, staging: Staging) -> None:
        self._pending = pending
        self._plans = plans
        self._plan = plan.persistent() if isinstance(plan, Plan) and not plan.one_sided else plan
        if isinstance(self._plan, Plan) and self._plan.kept is not None:
            pending.persistent.add(self._plan)
        self._digest = digest
        self._staging = staging
        self._source, self._target = arrays.address(staging.source), arrays.address(staging.target)
        self._operation: Operation | None = None
        self._active = self._light = self._freed = False
        self._result = staging.result if staging.direct else None
        # Of the short way: the plan as the engine knows it.
        quick = pending.settings.check != "full" and pending.progress is None and pending.trace is None
        self._handle: Any = plan.handle if quick and isinstance(plan, SharedPlan) else None

    def __repr__(self) -> str:
        state = "freed" if self._freed else "under way" if self._active else "inactive"
        return f"<pyreduce.PersistentRequest of {self._plan.call.collective}, {state}>"

    def __enter__(self) -> PersistentRequest:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.free()
        else:  # peers may not come to end a call that is under way
            self._let_go()

    def start(self) -> None:
        """Begin a call with what the arrays hold now; they must be left alone until it is complete.

        Raises
        ------
        ValueError
            The last one has not been waited for; or it has been freed.
        MismatchError, BrokenCommunicatorError
        """
        if self._active:
            raise ValueError(self._worded("start: the call under way has not been waited for"))
        if self._result is None:
            self._staging.read()
        if self._handle is not None:
            self._active = self._light = True
            try:
                code = _start(self._handle, self._source, self._target)
                if code == OK:
                    self._light = False
                if code != SHUT:
                    return
                self._active = self._light = False
            except BaseException as error:  # of a signal, whose handler runs when the C call is over
                self._pending.leave_light(error, self._plan)
                raise
        self._start_long()

    def _start_long(self) -> None:
        if self._freed:
            raise ValueError(self._worded("start: this request has been freed"))
        self._operation = self._new_operation()
        self._pending.start(self._operation)
        self._active, self._light = True, False

    def _new_operation(self) -> Operation:
        plan, room = self._plan, None
        if isinstance(plan, Plan) and plan.one_sided:
            room = self._plans.room_for(plan, self._pending.settings.timeout)
        buffers = (self._staging.source, self._staging.target)
        return Operation(plan, self._digest, self._source, self._target, buffers, room)

    def wait(self, timeout: float | None = None) -> Array:
        """Wait until the call is complete, and return its result; see `Request.wait`.

        Raises
        ------
        ValueError
            It has not been started.
        MismatchError, CollectiveTimeout, BrokenCommunicatorError
        """
        if self._light:
            try:
                if timeout is None and _wait(self._handle) == OK:
                    self._light = self._active = False
                    return self._staging.write() if self._result is None else self._result
            except BaseException as error:
                self._pending.leave_light(error, self._plan)
                raise
        elif self._operation is None:
            if not self._active:
                raise ValueError(self._worded("wait: it has not been started"))
            self._active = False
            return self._staging.write() if self._result is None else self._result
        return self._wait_long(timeout)

    def _wait_long(self, timeout: float | None) -> Array:
        seconds = self._pending.settings.timeout if timeout is None else check_seconds("timeout", timeout)
        if self._light:
            self._become_operation()
        try:
            if self._operation is not None:
                self._pending.complete(self._operation, seconds)
        finally:
            self._light = self._active = False
            self._operation = None
        return self._staging.write()

    def test(self) -> bool:
        """Whether the call under way is complete; do what can be done without waiting. True if none is under way."""
        if self._light:
            self._become_operation()
        if self._operation is not None and self._pending.test(self._operation):
            self._operation = None
        return self._operation is None

    def _become_operation(self) -> None:
        """The short way is over: find the call in the queue, or put it there."""
        self._operation = self._pending.find_light(self._plan)
        self._light = False

    def __call__(self, timeout: float | None = None) -> Array:
        """`start`, then `wait`."""
        if self._handle is None and not self._active and not self._freed:
            seconds = self._pending.settings.timeout if timeout is None else check_seconds("timeout", timeout)
            if self._result is None:
                self._staging.read()
            self._pending.run(self._new_operation(), seconds)
            return self._staging.write() if self._result is None else self._result
        self.start()
        return self.wait(timeout)

    def free(self) -> None:
        """Give back what the MPI keeps for it. Harmless when repeated; a call under way is waited for."""
        if self._active and self._pending.peers.broken is None and not self._pending.closed:
            self.wait()
        self._let_go()

    def _let_go(self) -> None:
        """Free it as it is."""
        if self._active and self._light:
            keep_for_ever((self._plan, self._staging))  # the engine still works on them
        self._freed = True
        self._handle = None
        self._pending.free_later(self._plan)

    def __del__(self) -> None:
        if getattr(self, "_freed", True):
            return
        if self._active:
            text = f"a persistent request of {self._plan.call.collective} was dropped while it was under way"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)
        self._let_go()

    def _worded(self, what: str) -> str:
        peers = self._pending.peers
        return f"{self._plan.call.collective}: {what} (rank {peers.rank} of {peers.size})"
