"""Which ranks share a node. No MPI.

A node is a set of ranks that share memory: what ``Split_type(COMM_TYPE_SHARED)`` says, or, for tests and rehearsals on
one machine, what ``PYREDUCE_NODES`` says (`virtual_nodes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Topology", "virtual_nodes"]


@dataclass(frozen=True)
class Topology:
    """The nodes of a communicator.

    Parameters
    ----------
    node_of : tuple of int
        The node of every rank; nodes are numbered in the order of their first ranks.
    """

    node_of: tuple[int, ...]

    @classmethod
    def of(cls, names: Iterable[object]) -> Topology:
        """From any names of nodes, one a rank: equal names are one node."""
        numbers: dict[object, int] = {}
        return cls(tuple(numbers.setdefault(name, len(numbers)) for name in names))

    @classmethod
    def one_node(cls, nranks: int) -> Topology:
        """All ranks on one node."""
        return cls((0,) * nranks)

    @classmethod
    def even(cls, nranks: int, nnodes: int) -> Topology:
        """Ranks placed node by node, as evenly as it goes."""
        return cls.of(rank * nnodes // nranks for rank in range(nranks))

    @property
    def nranks(self) -> int:
        """Number of ranks."""
        return len(self.node_of)

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every node, in order."""
        members: list[list[int]] = [[] for _ in range(max(self.node_of) + 1)]
        for rank, node in enumerate(self.node_of):
            members[node].append(rank)
        return tuple(map(tuple, members))

    @property
    def nnodes(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    @cached_property
    def equal(self) -> bool:
        """Whether all nodes have as many ranks."""
        return len({len(ranks) for ranks in self.nodes}) == 1

    def __str__(self) -> str:
        """In words: ``4 nodes of 2 ranks``, ``nodes of 3 and 5 ranks``.

        >>> str(Topology((0, 0, 1, 1))), str(Topology((0, 0, 0, 1)))
        ('2 nodes of 2 ranks', 'nodes of 3 and 1 ranks')
        """
        sizes = Counter(len(ranks) for ranks in self.nodes)
        if len(sizes) == 1:
            ((size, count),) = sizes.items()
            return f"{count} node{'s' * (count > 1)} of {size} rank{'s' * (size > 1)}"
        if self.nnodes <= 4:
            told = [str(len(ranks)) for ranks in self.nodes]
            return f"nodes of {', '.join(told[:-1])} and {told[-1]} ranks"
        told = [f"{count} of {size}" for size, count in sorted(sizes.items())]
        return f"{self.nnodes} nodes: {', '.join(told)} ranks"


def virtual_nodes(text: str, nranks: int, source: str = "PYREDUCE_NODES") -> Topology:
    """The nodes that ``PYREDUCE_NODES`` asks for.

    Parameters
    ----------
    text : str
        ``"2"``: so many nodes, ranks placed node by node as evenly as it goes; ``"4x2"``: 4 nodes of 2 ranks, placed
        node by node; ``"0,1,0,1"``: the node of every rank; ``"3+5"``: a node of the first 3 ranks, and one of 5.
    nranks : int
    source : str
        Where the text comes from, for messages.

    Raises
    ------
    ValueError
        It is none of these, or does not fit the number of ranks.
    """
    fault = f"{source} is {text!r}, "
    try:
        if "," in text:
            names = [int(name) for name in text.split(",")]
        elif "+" in text:
            names = _lined_up(map(_positive, text.split("+")), nranks)
        elif "x" in text:
            nnodes, size = map(_positive, text.split("x"))
            if nnodes * size != nranks:
                raise ValueError(f"{fault}which is for {nnodes * size} ranks; there are {nranks}")
            names = _lined_up([size] * nnodes, nranks)
        else:
            nnodes = _positive(text)
            if nnodes > nranks:
                raise ValueError(f"{fault}more nodes than ranks ({nranks})")
            return Topology.even(nranks, nnodes)
    except ValueError as error:
        if str(error).startswith(fault):
            raise
        raise ValueError(f"{fault}needs a form like 2, 4x2, 3+5 or 0,1,0,1") from None
    if len(names) != nranks:
        more = " or more" * (len(names) > nranks and "+" in text)
        raise ValueError(f"{fault}which is for {len(names)}{more} ranks; there are {nranks}")
    return Topology.of(names)


def _lined_up(sizes: Iterable[int], nranks: int) -> list[int]:
    """The node of each rank, for nodes of these sizes one after the other; one rank too many if there are more."""
    names: list[int] = []
    for node, size in enumerate(sizes):
        names += [node] * min(size, nranks + 1 - len(names))
    return names


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number
