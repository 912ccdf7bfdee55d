"""The exceptions of pyreduce.

Wrong arguments of one rank alone are a plain `TypeError` or `ValueError`, raised before any communication.
The classes here are for what takes more than one rank to go wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AlgorithmError",
    "BrokenCommunicatorError",
    "CollectiveTimeout",
    "CoreError",
    "MismatchError",
    "PyreduceError",
    "Unsupported",
    "WindowMemoryError",
    "name_ranks",
]


class PyreduceError(Exception):
    """Base class of every exception that pyreduce defines."""


class CoreError(PyreduceError, RuntimeError):
    """The compiled core refused a call; this is a bug of pyreduce, never of its user."""


class AlgorithmError(PyreduceError, ValueError):
    """A program is wrong: a contribution is missing, doubled or never received, or ranks wait for each other."""


class Unsupported(PyreduceError, ValueError):
    """An algorithm cannot serve this call; the message says why and what can. Raised before any communication."""


class WindowMemoryError(PyreduceError, MemoryError):
    """There is no memory for a window or signal, on some rank; raised on all, and nothing has been touched."""


class MismatchError(PyreduceError, RuntimeError):
    """Ranks made different calls.

    Attributes
    ----------
    groups : dict
        What each side called, in words, mapped to the ranks that called it. A rank that gave no answer in time is
        listed under ``"no answer"``.
    """

    def __init__(self, message: str, groups: dict[str, list[int]] | None = None) -> None:
        super().__init__(message)
        self.groups = groups or {}


class CollectiveTimeout(PyreduceError, TimeoutError):
    """A deadline passed before all ranks had arrived.

    Attributes
    ----------
    missing : tuple of int
        Ranks that had not arrived in this call (of the communicator the call was made on).
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class BrokenCommunicatorError(PyreduceError, RuntimeError):
    """The communicator cannot be used any more; the message and ``__cause__`` give the first failure."""


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in words: ``rank 3``, ``ranks 0, 2 and 5``, ``ranks 0-6 and 9``."""
    ordered = sorted(set(ranks))
    if not ordered:
        return "no rank"
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words: list[str] = []
    for first, last in runs:
        if last - first >= 2:
            words.append(f"{first}-{last}")
        else:
            words.extend(str(rank) for rank in range(first, last + 1))
    if len(ordered) == 1:
        return f"rank {words[0]}"
    return "ranks " + (" and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0])
