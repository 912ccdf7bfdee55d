"""Settings of a communicator: arguments first, then the environment, then the defaults.

==========================  ==================================================================  ==============
environment                 meaning                                                             default
==========================  ==================================================================  ==============
PYREDUCE_SEGMENT_BYTES      a block is moved in pieces of at most so many bytes                 1 MiB
PYREDUCE_IN_FLIGHT          pieces under way at once, 1 to 8                                    2
PYREDUCE_MESSAGE_BYTES      a message is cut above so many bytes                                2**31 - 1
PYREDUCE_TIMEOUT            seconds a call may wait; 0 or unset: for ever                       none
PYREDUCE_WARN_SECONDS       a wait without a timeout logs who is missing after so long          60
PYREDUCE_CHECK              ``light``, ``full`` or ``off``                                      light
PYREDUCE_TRANSPORT          of windows and signals: ``shared`` (one node) or ``rma``            by placement
PYREDUCE_NODES              nodes to take instead of those there are, for rehearsals on one     none
                            machine (`pyreduce.topology.virtual_nodes`)
PYREDUCE_ARENA_BYTES        memory of a rank that ``shared`` works in                           1 MiB
PYREDUCE_TRACE              directory for what each rank did (`pyreduce.trace`); ranks may      none
                            differ in it
PYREDUCE_PROFILE            the file of measured times to choose by, or ``none``                see `profiles`
==========================  ==================================================================  ==============
"""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["ARENA_BYTES", "CHECKS", "TRANSPORTS", "Settings", "read_settings", "trace_directory"]

CHECKS = ("light", "full", "off")
TRANSPORTS = ("shared", "rma")
MAX_IN_FLIGHT = 8
MESSAGE_BYTES = 2**31 - 1
ARENA_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """What a communicator works with; all ranks must have the same of everything but the two times.

    `profile` is the digest of the profile in use (`pyreduce.profiles`), known when the nodes are.
    """

    segment_bytes: int
    in_flight: int
    message_bytes: int
    check: str
    timeout: float | None
    warn_seconds: float
    transport: str | None = None
    arena_bytes: int = ARENA_BYTES
    profile: str = "none"
    nodes: str | None = None


def _integer(name: str, given: int | None, variable: str, default: int, low: int, high: int) -> int:
    value: object = given if given is not None else os.environ.get(variable) or default
    source = name if given is not None else variable
    try:
        number = int(value) if isinstance(value, str) else value.__index__()  # type: ignore[attr-defined]
    except (AttributeError, ValueError):
        raise ValueError(f"{source} is {value!r}, needs an integer") from None
    if not low <= number <= high:
        raise ValueError(f"{source} is {number}, needs to be in {low}..{high}")
    return int(number)


def check_seconds(name: str, value: object) -> float:
    """`value` as a number of seconds, zero or more; `TypeError` or `ValueError` otherwise."""
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (OverflowError, ValueError):
        raise ValueError(f"{name} is {value!r}, needs a number of seconds") from None
    except TypeError:
        raise TypeError(f"{name} is {value!r}, needs a number of seconds") from None
    if not seconds >= 0:
        raise ValueError(f"{name} is {seconds}, needs zero or more seconds")
    return seconds


def trace_directory(given: str | os.PathLike[str] | None) -> str | None:
    """Where to write a trace, if anywhere; an empty path turns off what the environment says. Ranks may differ."""
    directory = os.environ.get("PYREDUCE_TRACE") if given is None else os.fspath(given)
    return directory or None


def read_settings(
    *,
    segment_bytes: int | None = None,
    in_flight: int | None = None,
    message_bytes: int | None = None,
    check: str | None = None,
    timeout: float | None = None,
    warn_seconds: float | None = None,
    transport: str | None = None,
    arena_bytes: int | None = None,
    nodes: str | None = None,
) -> Settings:
    """Settings from arguments, where given, else from the environment, else the defaults of this module."""
    check = check if check is not None else os.environ.get("PYREDUCE_CHECK") or "light"
    if check not in CHECKS:
        raise ValueError(f"check is {check!r}, needs to be one of {', '.join(CHECKS)}")
    transport = transport if transport is not None else os.environ.get("PYREDUCE_TRANSPORT") or None
    if transport is not None and transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}, needs to be one of {', '.join(TRANSPORTS)}")
    if timeout is None:
        timeout = check_seconds("PYREDUCE_TIMEOUT", os.environ.get("PYREDUCE_TIMEOUT") or 0) or None
    else:
        timeout = check_seconds("timeout", timeout)
    if warn_seconds is None:
        warn_seconds = check_seconds("PYREDUCE_WARN_SECONDS", os.environ.get("PYREDUCE_WARN_SECONDS") or 60)
    else:
        warn_seconds = check_seconds("warn_seconds", warn_seconds)
    return Settings(
        _integer("segment_bytes", segment_bytes, "PYREDUCE_SEGMENT_BYTES", 1 << 20, 1, 2**62),
        _integer("in_flight", in_flight, "PYREDUCE_IN_FLIGHT", 2, 1, MAX_IN_FLIGHT),
        _integer("message_bytes", message_bytes, "PYREDUCE_MESSAGE_BYTES", MESSAGE_BYTES, 1, MESSAGE_BYTES),
        check,
        timeout,
        warn_seconds,
        transport,
        _integer("arena_bytes", arena_bytes, "PYREDUCE_ARENA_BYTES", ARENA_BYTES, 1 << 13, 1 << 40),
        nodes=nodes if nodes is not None else os.environ.get("PYREDUCE_NODES") or None,
    )
