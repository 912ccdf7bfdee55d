"""How a vector is cut into blocks: the one partition function of the library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import accumulate

__all__ = ["check_counts", "offsets", "partition"]


def partition(rows: int, nranks: int) -> tuple[int, ...]:
    """Rows of each of `nranks` blocks, as `numpy.array_split` cuts: sizes differ by at most one, larger ones first.

    Parameters
    ----------
    rows : int
        Rows of the whole vector, zero or more.
    nranks : int
        Number of blocks, one or more.

    Returns
    -------
    tuple of int
        ``nranks`` counts that add up to `rows`.

    Examples
    --------
    >>> partition(73, 4)
    (19, 18, 18, 18)
    >>> partition(1, 3)
    (1, 0, 0)
    """
    share, extra = divmod(rows, nranks)
    return (share + 1,) * extra + (share,) * (nranks - extra)


def offsets(counts: Sequence[int]) -> tuple[int, ...]:
    """Where each block starts: the exclusive running sum of `counts`.

    >>> offsets((3, 0, 5, 2))
    (0, 3, 3, 8)
    """
    return tuple(accumulate(counts, initial=0))[: len(counts)]


def check_counts(counts: Sequence[int], nranks: int) -> tuple[int, ...]:
    """`counts` as a tuple of ints, one a rank, none negative; `TypeError` or `ValueError` otherwise."""
    try:
        if isinstance(counts, Mapping | Set):
            raise TypeError
        checked = tuple(count.__index__() for count in counts)
    except (AttributeError, TypeError):
        raise TypeError(f"counts must be a sequence of {nranks} integers, got {counts!r}") from None
    if len(checked) != nranks:
        raise ValueError(f"counts has {len(checked)} entries, needs {nranks}, one a rank")
    for rank, count in enumerate(checked):
        if count < 0:
            raise ValueError(f"counts[{rank}] is {count}; a count of rows cannot be negative")
    return checked
