"""A thread that advances the calls of a communicator while the program computes: ``progress="thread"``.

It sleeps while nothing is outstanding. While something is, it works through the queue, with the interpreter's lock
released as long as it folds, copies or waits in the C core. When the program itself comes to wait (or to start another
call) it steps aside: one of the two works on the queue at a time.

Where every rank has a core to spare, calls end while the program computes. Where it has none, thread and program share
one: nothing is gained, and what the thread spends on looking for peers (it gives way to the others between two looks)
is lost to the computation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

__all__ = ["Progress"]

ASIDE_SECONDS = 20e-6


class Progress:
    """The thread.

    Parameters
    ----------
    push_on : callable
        ``push_on(linger=True)`` works on the queue for at most some milliseconds, and says whether anything is left.
    """

    def __init__(self, push_on: Callable[[bool], bool]) -> None:
        self._push_on = push_on
        self._mutex = threading.RLock()  # which knows whose it is
        self._work: SimpleQueue[None] = SimpleQueue()  # in C: a signal's handler cannot leave it in disorder
        self._wanted = self._stopped = False
        self._thread = threading.Thread(target=self._run, name="pyreduce-progress", daemon=True)
        self._thread.start()

    def hold(self) -> None:
        """Have the thread step aside."""
        self._wanted = True
        try:
            self._mutex.acquire()
        finally:
            self._wanted = False

    def release(self, outstanding: bool) -> None:
        """Let it work on what is outstanding."""
        if outstanding and self._work.empty():
            self._work.put(None)
        self._let_go()

    def _let_go(self) -> None:
        with suppress(RuntimeError):  # not held any more: a signal may have kept an earlier call from letting go
            while True:
                self._mutex.release()

    def stop(self) -> None:
        """End it."""
        self._let_go()
        self._stopped = True
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped:
            self._work.get()
            busy = True
            while busy and not self._stopped:
                while self._wanted and not self._stopped:
                    time.sleep(ASIDE_SECONDS)
                with self._mutex:
                    busy = not self._stopped and self._push_on(True)
