"""Profiles: how long every algorithm took, where, as ``python -m pyreduce.tune`` measured it. No MPI.

A profile is a JSON file::

    {
      "format": 1,
      "where": {"nranks": 4, "nodes": "2x2", "mpi": "mpich", "mpi_version": "5.0.2", "pyreduce": "...",
                "machine": "..."},
      "made": "2026-01-31",
      "table": {"allreduce": [[8, {"naive": 6.1e-05, "ring": 0.00012}], [32, {...}], ...], ...}
    }

`nodes` is the placement in the words of ``PYREDUCE_NODES`` (`pyreduce.topology.virtual_nodes`), sizes are bytes of the
whole vector, times seconds. It holds where there are as many ranks, so placed, under the same MPI, of whatever version.

Where profiles are looked for, in this order: the file that ``PYREDUCE_PROFILE`` names (``none``: nowhere at all);
``pyreduce-profile.json`` in the current folder; ``pyreduce/`` in ``$XDG_CONFIG_HOME`` or ``~/.config``, where many lie,
named ``4-2x2-mpich.json``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import exp, inf, log
from pathlib import Path
from typing import Any

from pyreduce.model import in_bytes, in_seconds
from pyreduce.programs import COLLECTIVES
from pyreduce.topology import Topology, virtual_nodes

__all__ = [
    "FORMAT",
    "NONE",
    "PROJECT_FILE",
    "VARIABLE",
    "Profile",
    "Shelf",
    "Where",
    "configuration_folder",
    "find",
    "load",
    "name_mpi",
    "nodes_text",
]

FORMAT = 1
NONE = "none"  # the digest of no profile; as PYREDUCE_PROFILE: look for none
VARIABLE = "PYREDUCE_PROFILE"
PROJECT_FILE = "pyreduce-profile.json"
TIE = 1.03  # times that differ by less are equal
FAR = 4  # times the largest size measured: further out a profile has no say
NAMED = 3  # algorithms that a reason tells the times of
LONGEST = 32  # characters of a placement in a file's name

Row = tuple[int, Mapping[str, float]]  # bytes, seconds by algorithm
Table = Mapping[str, Sequence[Row]]

logger = logging.getLogger("pyreduce")


@dataclass(frozen=True)
class Where:
    """What a profile was measured on.

    Attributes
    ----------
    nranks : int
    nodes : str
        A form of `pyreduce.topology.virtual_nodes`.
    mpi, mpi_version : str
        See `name_mpi`.
    pyreduce : str
        Its version.
    machine : str
    """

    nranks: int
    nodes: str
    mpi: str
    mpi_version: str = ""
    pyreduce: str = ""
    machine: str = ""

    @cached_property
    def topology(self) -> Topology:
        """The placement."""
        return virtual_nodes(self.nodes, self.nranks, "where.nodes")

    def differs(self, topology: Topology, mpi: str | None) -> str | None:
        """Why a profile measured there does not hold here, or None; `mpi` None is any."""
        if self.nranks != topology.nranks:
            return f"it was made with {self.nranks} ranks, here are {topology.nranks}"
        if self.topology != topology:
            return f"it was made on {self.nodes} (nodes x ranks), here is {nodes_text(topology)}"
        if mpi is not None and self.mpi != mpi:
            return f"it was made under {self.mpi}, this is {mpi}"
        return None

    @property
    def file_name(self) -> str:
        """What a profile is called in the configuration folder: ``4-2x2-mpich.json``."""
        nodes = self.nodes
        if len(nodes) > LONGEST:
            nodes = f"{self.topology.nnodes}nodes-{zlib.crc32(nodes.encode()):08x}"
        return f"{self.nranks}-{nodes}-{self.mpi}.json"


@dataclass(frozen=True)
class Profile:
    """Measured times.

    Attributes
    ----------
    where : Where
    table : dict
        By collective, rows of ``(bytes, {algorithm: seconds})``, by rising size.
    made : str
        The day.
    path : str
        The file it was read from, or empty.
    """

    where: Where
    table: Table
    made: str = ""
    path: str = field(default="", compare=False)

    @cached_property
    def digest(self) -> str:
        """Tells tables apart: ranks that use different ones must not choose each for itself."""
        told = json.dumps(_plain(self.table), sort_keys=True)
        return hashlib.blake2b(told.encode(), digest_size=6).hexdigest()

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"profile {Path(self.path).name}" if self.path else "profile"

    def times(self, collective: str, nbytes: int) -> dict[str, float]:
        """Seconds of every algorithm that was measured around a size.

        Between two measured sizes the times are interpolated, their logarithms over that of the size; an algorithm
        that was measured at one of the two only is left out. Beyond the ends they are those of the end, up to four
        times the largest size; of what is larger a profile knows nothing.
        """
        rows = self.table.get(collective) or ()
        if not rows or nbytes > FAR * rows[-1][0]:
            return {}
        if nbytes <= rows[0][0]:
            return dict(rows[0][1])
        for (low, below), (high, above) in pairwise(rows):
            if nbytes == high:
                return dict(above)
            if nbytes < high:
                share = log(nbytes / max(low, 1)) / log(high / max(low, 1))
                return {
                    name: exp((1 - share) * log(below[name]) + share * log(above[name]))
                    for name in below
                    if name in above
                }
        return dict(rows[-1][1])

    def choose(
        self, collective: str, nbytes: int, serves: Callable[[str], bool] = lambda name: True
    ) -> tuple[str, str] | None:
        """The fastest algorithm of those that serve a call, and why; None if none of them was measured.

        Of times within 3 %, that algorithm is taken which wins at the nearest measured size.
        """
        times = {name: seconds for name, seconds in self.times(collective, nbytes).items() if serves(name)}
        if not times:
            return None
        ranking = sorted(times, key=lambda name: (times[name], name))
        tied = [name for name in ranking if times[name] <= TIE * times[ranking[0]]]
        nearest = self._nearest(collective, nbytes)
        best = min(tied, key=lambda name: (nearest.get(name, inf), name))
        others = [name for name in ranking if name != best][: NAMED - 1]
        told = [f"{best} {in_seconds(times[best])} at {in_bytes(nbytes)}"]
        told += [f"{name} {in_seconds(times[name])}" for name in others]
        return best, f"{self.name}: {', '.join(told)}{self._beyond(collective, nbytes)}"

    def _nearest(self, collective: str, nbytes: int) -> Mapping[str, float]:
        return min(self.table[collective], key=lambda row: abs(log(max(row[0], 1)) - log(max(nbytes, 1))))[1]

    def _beyond(self, collective: str, nbytes: int) -> str:
        """Words on sizes beyond those that were measured."""
        smallest, largest = self.table[collective][0][0], self.table[collective][-1][0]
        if nbytes > largest:
            return f" (as at {in_bytes(largest)}, the most that was measured)"
        return f" (as at {in_bytes(smallest)}, the least that was measured)" if nbytes < smallest else ""

    def to_json(self) -> str:
        """The text of the file, a size a line."""
        head = {"format": FORMAT, "where": asdict(self.where), "made": self.made}
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        tables = []
        for collective, rows in _plain(self.table).items():
            body = ",\n".join(f"      {json.dumps(row)}" for row in rows)
            tables.append(f"    {json.dumps(collective)}: [\n{body}\n    ]" if rows else f'    "{collective}": []')
        return "\n".join(["{", *lines, '  "table": {', ",\n".join(tables), "  }", "}"]) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all; folders are made.

        Raises
        ------
        OSError
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(self.to_json())
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise


def _plain(table: Table) -> dict[str, list[list[Any]]]:
    return {collective: [[nbytes, dict(times)] for nbytes, times in rows] for collective, rows in sorted(table.items())}


# ------------------------------------------------------------------------------------------------------ from a file


def load(path: str | os.PathLike[str]) -> Profile:
    """Read a profile.

    Raises
    ------
    ValueError
        The file cannot be read, or is none; the message names it and says what is wrong.
    """
    fault = f"profile {os.fspath(path)}: "
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        raise ValueError(f"{fault}there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{fault}cannot be read: {error}") from None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{fault}is no JSON: {error}") from None
    try:
        return replace(_from_json(data), path=os.fspath(path))
    except ValueError as error:
        raise ValueError(f"{fault}{error}") from None


def _from_json(data: object) -> Profile:
    """`ValueError` says what is wrong."""
    if not isinstance(data, dict):
        raise ValueError("needs to be an object with format, where, made and table")
    if data.get("format") != FORMAT:
        raise ValueError(f"format is {data.get('format')!r}, this version reads {FORMAT}; tune again")
    where = _where(data.get("where"))
    table = data.get("table")
    if not isinstance(table, dict):
        raise ValueError(f"table is {table!r:.60}, needs an object: rows by collective")
    made = data.get("made", "")
    if not isinstance(made, str):
        raise ValueError(f"made is {made!r:.60}, needs a day")
    return Profile(where, {collective: _rows(collective, rows) for collective, rows in table.items()}, made)


def _where(data: object) -> Where:
    if not isinstance(data, dict):
        raise ValueError(f"where is {data!r:.60}, needs an object with nranks, nodes and mpi")
    nranks = data.get("nranks")
    if not isinstance(nranks, int) or isinstance(nranks, bool) or nranks < 1:
        raise ValueError(f"where.nranks is {nranks!r:.60}, needs a number of ranks")
    words = {}
    for name in ("nodes", "mpi", "mpi_version", "pyreduce", "machine"):
        value = data.get(name, None if name in ("nodes", "mpi") else "")
        if not isinstance(value, str):
            raise ValueError(f"where.{name} is {value!r:.60}, needs a text")
        words[name] = value
    where = Where(nranks, **words)
    _ = where.topology  # which says what is wrong with the nodes
    return where


def _rows(collective: str, data: object) -> list[Row]:
    where = f"table.{collective}"
    if collective not in COLLECTIVES:
        raise ValueError(f"{where}: no collective is called so; there are {', '.join(COLLECTIVES)}")
    if not isinstance(data, list):
        raise ValueError(f"{where} is {data!r:.60}, needs a list of [bytes, {{algorithm: seconds}}]")
    rows: list[Row] = []
    for number, row in enumerate(data):
        if not (isinstance(row, list) and len(row) == 2 and isinstance(row[1], dict)):
            raise ValueError(f"{where}[{number}] is {row!r:.60}, needs [bytes, {{algorithm: seconds}}]")
        nbytes, times = row
        if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 0:
            raise ValueError(f"{where}[{number}]: {nbytes!r:.60} is no number of bytes")
        if rows and nbytes <= rows[-1][0]:
            raise ValueError(f"{where}[{number}]: {nbytes} bytes come after {rows[-1][0]}; sizes must rise")
        if not times:
            raise ValueError(f"{where}[{number}]: has no times")
        for name, seconds in times.items():
            if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds < inf:
                raise ValueError(f"{where}[{number}]: {name} takes {seconds!r:.60}, needs seconds above zero")
        rows.append((nbytes, {name: float(seconds) for name, seconds in times.items()}))
    return rows


# ------------------------------------------------------------------------------------------------ where they lie


@dataclass(frozen=True)
class Shelf:
    """The profiles that a communicator may use, read when it is made: which one holds is seen when nodes are known.

    Attributes
    ----------
    named : Profile or None
        The one that ``PYREDUCE_PROFILE`` names: it, or none.
    project : Profile or None
        The one in the current folder.
    configured : tuple of Profile
        Those in the configuration folder for so many ranks.
    """

    named: Profile | None = None
    project: Profile | None = None
    configured: tuple[Profile, ...] = ()

    def pick(self, topology: Topology, mpi: str | None, warn: bool = False) -> tuple[Profile | None, str]:
        """The profile that holds here, and its file; or None, and why.

        Parameters
        ----------
        topology : Topology
        mpi : str or None
            Any, if None.
        warn : bool
            Log, once a process, that one which lies ready does not hold.
        """
        reasons = []
        for profile in (self.named, self.project):
            if profile is None:
                continue
            reason = profile.where.differs(topology, mpi)
            if reason is None:
                return profile, profile.path
            reasons.append(f"{profile.path} is not used: {reason}")
            if warn:
                _warn_once(f"profile {reasons[-1]}; python -m pyreduce.tune makes another")
        for profile in self.configured:
            if profile.where.differs(topology, mpi) is None:
                return profile, profile.path
        return None, "; ".join(reasons) or "there is no profile for these ranks, nodes and MPI"


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        logger.warning(text)


def configuration_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the user's profiles lie."""
    base = environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config")
    return Path(base) / "pyreduce"


def find(nranks: int, environ: Mapping[str, str] = os.environ) -> Shelf:
    """Read the profiles that so many ranks may use; local, each rank for itself.

    Raises
    ------
    ValueError
        The file that ``PYREDUCE_PROFILE`` names is missing, or one of the files is broken.
    """
    named = environ.get(VARIABLE) or ""
    if nranks == 1 or named == NONE:
        return Shelf()
    if named:
        try:
            return Shelf(named=load(named))
        except ValueError as error:
            raise ValueError(f"{error} ({VARIABLE})") from None
    project = load(PROJECT_FILE) if os.path.exists(PROJECT_FILE) else None
    folder = configuration_folder(environ)
    try:
        files = sorted(name for name in os.listdir(folder) if re.fullmatch(rf"{nranks}-.*\.json", name))
    except OSError:
        files = []
    return Shelf(None, project, tuple(load(folder / name) for name in files))


# -------------------------------------------------------------------------------------------------------------- words


def name_mpi(library_version: str) -> tuple[str, str]:
    """The MPI's name and version, out of what ``MPI.Get_library_version()`` says.

    >>> name_mpi("Open MPI v5.0.11, package: Open MPI someone")
    ('openmpi', '5.0.11')
    """
    text = library_version.strip("\0 \n").split("\n")[0]
    found = re.search(r"\d+(\.\d+)+\w*", text)
    version = found[0] if found else ""
    for name, sign in (("intelmpi", "intel"), ("openmpi", "open mpi"), ("mvapich", "mvapich"), ("mpich", "mpich")):
        if sign in text.lower():
            return name, version
    before = re.split(r"[\d,:]", text)[0].lower()
    return re.sub(r"[^a-z]+", "", before)[:20] or "mpi", version


def nodes_text(topology: Topology) -> str:
    """The placement as ``PYREDUCE_NODES`` takes it.

    >>> nodes_text(Topology((0, 0, 1, 1))), nodes_text(Topology((0, 0, 1))), nodes_text(Topology((0, 1, 0)))
    ('2x2', '2+1', '0,1,0')
    """
    sizes = [len(ranks) for ranks in topology.nodes]
    if list(topology.node_of) != sorted(topology.node_of):
        return ",".join(map(str, topology.node_of))
    return f"{len(sizes)}x{sizes[0]}" if topology.equal else "+".join(map(str, sizes))
