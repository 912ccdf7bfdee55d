"""One collective call as every rank must make it: the facts that are compared, and their digest. No MPI."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pyreduce.errors import name_ranks
from pyreduce.ops import Op
from pyreduce.settings import Settings

__all__ = ["Call", "Facts", "Fingerprint", "compare", "describe"]

Facts = tuple[tuple[str, str], ...]
Fingerprint = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """What a call is, apart from where its data lie.

    Attributes
    ----------
    collective, algorithm : str
    op : Op or None
        None for allgather.
    dtype : numpy.dtype
        Of the user's arrays.
    counts : tuple of int
        Elements of each block, one a rank.
    rows : str
        The vector's rows, counts of rows and row shape in words, as they are compared.
    rank : int
    settings : Settings
    """

    collective: str
    algorithm: str
    op: Op | None
    dtype: np.dtype[Any]
    counts: tuple[int, ...]
    rows: Facts
    rank: int
    settings: Settings

    @property
    def nranks(self) -> int:
        """Number of ranks."""
        return len(self.counts)

    @property
    def work_dtype(self) -> np.dtype[Any]:
        """The dtype that is folded and sent: float32 for the mean of 16-bit floats, so that it is rounded once."""
        if self.divides and self.dtype.itemsize == 2:
            return np.dtype(np.float32)
        return self.dtype

    @property
    def divides(self) -> bool:
        """Whether the result is divided by the number of ranks."""
        return self.op is not None and self.op.name == "AVG"

    def like(self, **changes: Any) -> Call:
        """The same call but for these attributes."""
        return replace(self, **changes)

    def fingerprint(self) -> Fingerprint:
        """Names and values of everything that all ranks must agree on."""
        settings = self.settings
        return (
            ("collective", self.collective),
            ("algorithm", self.algorithm),
            ("op", self.op.name if self.op is not None else "none"),
            ("dtype", self.dtype.name),
            *self.rows,
            ("check", settings.check),
            ("segment_bytes", str(settings.segment_bytes)),
            ("in_flight", str(settings.in_flight)),
            ("message_bytes", str(settings.message_bytes)),
            ("transport", settings.transport or "none"),
            ("arena_bytes", str(settings.arena_bytes)),
            ("profile", settings.profile),
            ("nodes", settings.nodes or "as they are"),
        )

    def digest(self) -> int:
        """64 bits that differ, in all likelihood, between calls that differ."""
        told = hashlib.blake2b(repr(self.fingerprint()).encode(), digest_size=8)
        return int.from_bytes(told.digest(), "little")


def describe(fingerprint: Fingerprint) -> str:
    """A fingerprint in one line of words, settings left out."""
    facts = dict(fingerprint)
    words = [facts.pop("collective"), "by", facts.pop("algorithm")]
    for setting in ("check", "segment_bytes", "in_flight", "message_bytes", "arena_bytes", "profile", "nodes"):
        facts.pop(setting, None)
    return " ".join(words) + "".join(f", {name} {value}" for name, value in facts.items() if value != "none")


def compare(
    fingerprints: Mapping[int, Fingerprint], silent: Sequence[int] = ()
) -> tuple[str, dict[str, list[int]]] | None:
    """Group ranks by what they called.

    Parameters
    ----------
    fingerprints : dict
        By rank.
    silent : sequence of int
        Ranks that gave no answer.

    Returns
    -------
    tuple or None
        None if all agree; else the text of the disagreement (which facts differ, and both sides by rank), and the
        groups.
    """
    sides: dict[Fingerprint, list[int]] = {}
    for rank in sorted(fingerprints):
        sides.setdefault(fingerprints[rank], []).append(rank)
    if len(sides) < 2:
        return None
    facts: dict[str, dict[str, list[int]]] = {}
    for side, ranks in sides.items():
        for name, value in side:
            facts.setdefault(name, {}).setdefault(value, []).extend(ranks)
    total = len(fingerprints)
    differing = {
        name: values for name, values in facts.items() if len(values) > 1 and sum(map(len, values.values())) == total
    }
    lines = []
    for name in sorted(differing, key=lambda name: name == "algorithm"):  # which may follow from the others
        values = differing[name]
        told = [f"{value} on {name_ranks(ranks)}" for value, ranks in sorted(values.items(), key=lambda v: len(v[1]))]
        lines.append(f"  {name}: {', '.join(told)}")
    groups: dict[str, list[int]] = {}
    for side, ranks in sides.items():
        text = describe(side)
        if text in groups or any(describe(other) == text for other in sides if other != side):
            text += "".join(f", {name} {value}" for name, value in side if name in differing)
        groups[text] = ranks
    ordered = sorted(groups.items(), key=lambda item: len(item[1]))
    lines.extend(f"  {name_ranks(ranks)} called {text}" for text, ranks in ordered)
    if silent:
        groups["no answer"] = sorted(silent)
        lines.append(f"  {name_ranks(silent)} gave no answer")
    return "\n".join(lines), groups
