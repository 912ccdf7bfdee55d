"""Arrays in memory that all ranks of a node reach: `Communicator.empty`.

Such an array is a block of symmetric memory (`pyreduce.arena`) with a NumPy array over it. The shared-memory engine
knows that memory; an input that lies there is read in place by the peers.

When the last reference to an array has gone, its block is free on that rank; it can be used again when it is free on
all. Ranks agree on that whenever they make another array: the safe point. Since they make arrays in the same order, a
bit a block says which are free.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any
from weakref import finalize

import numpy as np

from pyreduce.arena import Agree, Arena, Region
from pyreduce.arrays import Array
from pyreduce.calls import Call
from pyreduce.transports import Chunk

__all__ = ["SharedArrays"]

ASKED_AT_ONCE = 62  # bits of a word that ranks exchange


class _Owner:
    """What an array's memory belongs to: NumPy keeps it alive as the base of all views."""

    def __init__(self, root: Array, address: int, nbytes: int) -> None:
        self._root = root  # by which the chunk knows that it is in use
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, False)}


class _Block:
    """A region, and whether its array has gone."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.gone = self.given_back = False

    def leave(self) -> None:
        self.gone = True


class SharedArrays:
    """The arrays of one communicator.

    Parameters
    ----------
    arena : Arena
        Of shared memory.
    agree : callable
        See `pyreduce.arena`.
    """

    def __init__(self, arena: Arena, agree: Agree) -> None:
        self._arena = arena
        self._agree = agree
        self._blocks: list[_Block] = []  # in the order of making

    @property
    def chunks(self) -> Sequence[Chunk]:
        """The memory that the arrays lie in."""
        return self._arena.chunks

    def facts(self) -> tuple[tuple[str, str], ...]:
        """What ranks must agree on when they make another."""
        return tuple(("arrays in shared memory so far", told) for _, told in self._arena.facts())

    def make(self, shape: tuple[int, ...], dtype: np.dtype[Any], call: Call, timeout: float | None) -> Array:
        """Another array, not initialised; collective. Shapes may differ from rank to rank.

        Raises
        ------
        WindowMemoryError
            On all ranks.
        MismatchError, CollectiveTimeout, BrokenCommunicatorError
        """
        self._give_back(call, timeout)
        nbytes = math.prod(shape) * dtype.itemsize
        largest = max(self._agree(call, nbytes, timeout))
        region = self._arena.allocate(largest, call, timeout)
        block = _Block(region)
        self._blocks.append(block)
        owner = _Owner(region.chunk.root, region.chunk.base + region.offset, nbytes)
        finalize(owner, block.leave).atexit = False
        flat: Array = np.asarray(owner)
        return flat.view(dtype).reshape(shape)

    def _give_back(self, call: Call, timeout: float | None) -> None:
        """Free the blocks whose arrays have gone on all ranks."""
        for start in range(0, len(self._blocks), ASKED_AT_ONCE):
            asked = self._blocks[start : start + ASKED_AT_ONCE]
            gone = sum(1 << i for i, block in enumerate(asked) if block.gone)
            everywhere = functools.reduce(int.__and__, self._agree(call, gone, timeout))
            for i, block in enumerate(asked):
                if everywhere >> i & 1:
                    self._arena.give_back(block.region)
                    block.given_back = True
        self._blocks = [block for block in self._blocks if not block.given_back]

    def close(self) -> None:
        """Free the memory; collective. What arrays still lie over is kept for them."""
        self._arena.close()
        self._blocks.clear()
