"""Nodes: their numbering, words for them, and PYREDUCE_NODES."""

from __future__ import annotations

import pytest

from pyreduce.topology import Topology, virtual_nodes


def test_nodes_are_numbered_by_their_first_ranks() -> None:
    found = Topology.of(["b", "a", "b", "c"])
    assert found.node_of == (0, 1, 0, 2)
    assert found.nodes == ((0, 2), (1,), (3,))
    assert (found.nranks, found.nnodes, found.equal) == (4, 3, False)


@pytest.mark.parametrize(
    ("text", "node_of"),
    [
        ("1", (0, 0, 0, 0)),
        ("2", (0, 0, 1, 1)),
        ("3", (0, 0, 1, 2)),
        ("4", (0, 1, 2, 3)),
        ("2x2", (0, 0, 1, 1)),
        ("4x1", (0, 1, 2, 3)),
        ("1+3", (0, 1, 1, 1)),
        ("7,3,7,3", (0, 1, 0, 1)),
    ],
)
def test_virtual_nodes(text: str, node_of: tuple[int, ...]) -> None:
    assert virtual_nodes(text, 4).node_of == node_of


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("5", r"more nodes than ranks \(4\)"),
        ("2x3", "which is for 6 ranks; there are 4"),
        ("0,1", "which is for 2 ranks; there are 4"),
        ("0", "needs a form like"),
        ("2x0", "needs a form like"),
        ("two", "needs a form like"),
        ("2x2x1", "needs a form like"),
        ("1+", "needs a form like"),
    ],
)
def test_what_is_wrong_with_virtual_nodes(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"PYREDUCE_NODES is {text.replace('+', '[+]')!r}, .*{told}"):
        virtual_nodes(text, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1", "1 node of 4 ranks"),
        ("4", "4 nodes of 1 rank"),
        ("2x2", "2 nodes of 2 ranks"),
        ("1+3", "nodes of 1 and 3 ranks"),
    ],
)
def test_words(text: str, words: str) -> None:
    assert str(virtual_nodes(text, 4)) == words
