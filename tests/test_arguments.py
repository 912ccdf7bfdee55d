"""Wrong arguments: an error on the rank that gave them, before any communication, that says what, where and why."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import COLLECTIVES, REDUCTIONS, call, run_checked

import pyreduce as pr
from pyreduce.settings import Settings, read_settings

MPI = pytest.importorskip("mpi4py.MPI")

MakeCommunicator = Callable[..., pr.Communicator]
every_collective = pytest.mark.parametrize("collective", COLLECTIVES)


def check_refused(
    c: pr.Communicator, error: type[Exception], text: str, function: Callable[..., Any], *arguments: Any, **options: Any
) -> None:
    """The last rank alone makes a wrong call; then all make a right one, which must not notice."""
    try:
        if c.rank == c.size - 1:
            for _ in range(2):
                with pytest.raises(error) as caught:
                    function(*arguments, **options)
                message = str(caught.value)
                assert type(caught.value) is error, message
                assert re.search(text, message), message
                assert message.startswith(f"{function.__name__}: "), message
                assert message.endswith(f" (rank {c.rank} of {c.size})"), message
                assert caught.value.__suppress_context__, "the traceback shows how the error was reworded"
    finally:  # whatever happened there, the others must not wait
        run_checked(c, "allreduce", "int32", 9, times=1)


def read_only(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


# ------------------------------------------------------------------------------------------------------ buffers

NOT_ARRAYS = {
    "list": ([1.0, 2.0], "is a list, .*pass numpy.asarray"),
    "string": ("spam", "is a str"),
    "None": (None, "is a NoneType"),
    "masked": (np.ma.masked_greater(np.arange(4), 2), r"is a masked array, .*pass x\.filled"),
}
NOT_REDUCIBLE = {
    "big-endian": (np.zeros(4, ">f8"), "native byte order"),
    "structured": (np.zeros(4, "i4,f8"), "fields one by one"),
    "datetime": (np.zeros(4, "M8[s]"), "view"),
    "objects": (np.zeros(4, object), "mpi4py"),
    "text": (np.zeros(4, "U3"), "text"),
    "clongdouble": (np.zeros(4, "G"), "complex128"),
    "float8": (np.zeros(4, ml_dtypes.float8_e4m3fn), "float32"),
}


@every_collective
@pytest.mark.parametrize("what", NOT_ARRAYS)
def test_what_is_no_array(communicator: pr.Communicator, collective: str, what: str) -> None:
    thing, text = NOT_ARRAYS[what]
    function = getattr(communicator, collective)
    check_refused(communicator, TypeError, f"sendbuf {text}", function, thing)
    check_refused(communicator, TypeError, f"sendbuf {text}", function, thing, np.zeros(4))
    if thing is not None:
        check_refused(communicator, TypeError, f"recvbuf {text}", function, np.zeros(4), thing)


@every_collective
@pytest.mark.parametrize("what", NOT_REDUCIBLE)
def test_dtypes_that_are_not_served(communicator: pr.Communicator, collective: str, what: str) -> None:
    array, text = NOT_REDUCIBLE[what]
    function = getattr(communicator, collective)
    check_refused(communicator, TypeError, f"dtype .* is not supported: .*{text}.*Supported are bool", function, array)
    check_refused(communicator, TypeError, text, function, pr.IN_PLACE, array.copy())


@every_collective
def test_dtypes_must_be_the_same(communicator: pr.Communicator, collective: str) -> None:
    function, size = getattr(communicator, collective), communicator.size
    text = "sendbuf is float64, recvbuf is float32; they must be the same"
    check_refused(communicator, TypeError, text, function, np.zeros(size), np.zeros(size, np.float32))


@every_collective
def test_recvbuf_must_be_writable(communicator: pr.Communicator, collective: str) -> None:
    function, size = getattr(communicator, collective), communicator.size
    for recvbuf in (read_only(np.zeros(size)), b"12345678" * size):
        check_refused(communicator, ValueError, "recvbuf is read-only", function, np.zeros(size), recvbuf)
    check_refused(communicator, ValueError, "recvbuf is read-only", function, pr.IN_PLACE, read_only(np.zeros(size)))


@every_collective
def test_in_place_needs_recvbuf(communicator: pr.Communicator, collective: str) -> None:
    function = getattr(communicator, collective)
    for in_place in (pr.IN_PLACE, MPI.IN_PLACE):
        check_refused(communicator, ValueError, "IN_PLACE needs recvbuf", function, in_place)
        if collective != "allreduce":
            counts = [1] * communicator.size
            check_refused(communicator, ValueError, "IN_PLACE needs recvbuf", function, in_place, counts=counts)


@every_collective
def test_buffers_may_not_overlap_in_part(communicator: pr.Communicator, collective: str) -> None:
    size, function = communicator.size, getattr(communicator, collective)
    x = np.arange(20.0 * size)
    pairs = {
        "allreduce": (x[:10], x[1:11]),
        "reduce_scatter": (x[: 3 * size], x[2:5]),
        "allgather": (x[4:7], x[5 : 5 + 3 * size]),
    }
    check_refused(communicator, ValueError, "sendbuf and recvbuf overlap; pass", function, *pairs[collective])
    if collective == "allreduce":
        check_refused(communicator, ValueError, "overlap", function, x, x[::-1])
        interleaved = communicator.allreduce(x[::2], x[1::2])  # side by side is no overlap
        assert interleaved[1] == 2.0 * size


@every_collective
def test_recvbuf_may_not_overlap_itself(communicator: pr.Communicator, collective: str) -> None:
    function, size = getattr(communicator, collective), communicator.size
    rows = 2 if collective == "reduce_scatter" else 2 * size
    folded = np.lib.stride_tricks.as_strided(np.zeros(rows + 2), (rows, 3), (8, 8))
    given = np.zeros((2 if collective == "allgather" else 2 * size, 3))
    check_refused(communicator, ValueError, "share memory .*pass a copy", function, given, folded)


@pytest.mark.parametrize("collective", ["reduce_scatter", "allgather"])
def test_arrays_without_rows(communicator: pr.Communicator, collective: str) -> None:
    function = getattr(communicator, collective)
    text = r"0-dimensional and has no rows; pass x\.reshape\(1\)"
    for options in ({}, {"counts": [1] * communicator.size}):
        check_refused(communicator, ValueError, text, function, np.array(1.0), **options)
        check_refused(communicator, ValueError, text, function, np.array(1.0), np.zeros(1), **options)


@pytest.mark.parametrize("collective", ["reduce_scatter", "allgather"])
def test_recvbuf_without_rows(communicator: pr.Communicator, collective: str) -> None:
    function = getattr(communicator, collective)
    check_refused(communicator, ValueError, "recvbuf is 0-dimensional", function, np.zeros(1), np.array(1.0))


# --------------------------------------------------------------------------------------------- shapes and counts


def test_allreduce_shapes(communicator: pr.Communicator) -> None:
    c = communicator
    check_refused(c, ValueError, "recvbuf has 10 rows, needs 12", c.allreduce, np.zeros(12), np.zeros(10))
    check_refused(c, ValueError, "recvbuf has 13 rows, needs 12", c.allreduce, np.zeros((12, 2)), np.zeros((13, 2)))
    check_refused(c, ValueError, r"recvbuf is \(3, 4\)", c.allreduce, np.zeros((4, 3)), np.zeros((3, 4)))
    check_refused(c, ValueError, r"recvbuf is \(12,\)", c.allreduce, np.zeros((4, 3)), np.zeros(12))
    check_refused(c, ValueError, r"recvbuf is \(1,\)", c.allreduce, np.zeros(()), np.zeros(1))


def test_reduce_scatter_shapes(communicator: pr.Communicator) -> None:
    c, size = communicator, communicator.size
    x = np.zeros(3 * size)
    check_refused(c, ValueError, "recvbuf has 2 rows, needs 3", c.reduce_scatter, x, np.zeros(2))
    check_refused(c, ValueError, "recvbuf has 4 rows, needs 3", c.reduce_scatter, x, np.zeros(4))
    check_refused(c, ValueError, "recvbuf has 4 rows, needs 5", c.reduce_scatter, np.zeros(5 * size), np.zeros(4),
                  counts=[5] * size)  # fmt: skip
    check_refused(
        c, ValueError, f"sendbuf has {3 * size} rows, needs {4 * size}", c.reduce_scatter, x, counts=[4] * size
    )
    check_refused(c, ValueError, f"recvbuf has {3 * size} rows, needs {4 * size}", c.reduce_scatter, pr.IN_PLACE, x,
                  counts=[4] * size)  # fmt: skip
    check_refused(c, ValueError, r"rows of sendbuf are \(2,\), rows of recvbuf are \(\)", c.reduce_scatter,
                  np.zeros((3 * size, 2)), np.zeros(3))  # fmt: skip


def test_allgather_shapes(communicator: pr.Communicator) -> None:
    c, size = communicator, communicator.size
    needs = "sendbuf has 2 rows, needs 3 .*pass counts"
    check_refused(c, ValueError, needs, c.allgather, np.zeros(2), np.zeros(3 * size))
    check_refused(c, ValueError, needs.replace("2", "4"), c.allgather, np.zeros(4), np.zeros(3 * size))
    check_refused(c, ValueError, f"recvbuf has {3 * size} rows, needs {4 * size}", c.allgather, np.zeros(4),
                  np.zeros(3 * size), counts=[4] * size)  # fmt: skip
    check_refused(c, ValueError, "sendbuf has 3 rows, needs 4", c.allgather, np.zeros(3), counts=[4] * size)
    check_refused(c, ValueError, f"recvbuf has {size} rows, needs {4 * size}", c.allgather, pr.IN_PLACE, np.zeros(size),
                  counts=[4] * size)  # fmt: skip
    check_refused(c, ValueError, r"rows of sendbuf are \(2,\), rows of recvbuf are \(3,\)", c.allgather,
                  np.zeros((1, 2)), np.zeros((size, 3)))  # fmt: skip


@pytest.mark.parametrize("collective", ["reduce_scatter", "allgather"])
def test_counts(communicator: pr.Communicator, collective: str) -> None:
    c, size, function = communicator, communicator.size, getattr(communicator, collective)
    x = np.zeros(4 * size)
    negative = [1] * (size - 1) + [-1]
    check_refused(c, ValueError, rf"counts\[{size - 1}\] is -1; .*cannot be negative", function, x, counts=negative)
    for counts in ([1] * (size + 1), [1] * (size - 1)):
        text = f"counts has {len(counts)} entries, needs {size}, one a rank"
        check_refused(c, ValueError, text, function, x, counts=counts)
    for wrong in ([1.0] * size, ["1"] * size, 3, [None] * size, np.ones(size)):
        check_refused(c, TypeError, f"counts must be a sequence of {size} integers", function, x, counts=wrong)
    got = function(np.arange(2.0 * size), counts=np.full(size, 2, np.uint8))  # any integers will do
    assert len(got) == (2 if collective == "reduce_scatter" else 2 * size)


# --------------------------------------------------------------------------------------- ops, algorithms, timeouts


@pytest.mark.parametrize("collective", REDUCTIONS)
def test_ops(communicator: pr.Communicator, collective: str) -> None:
    c, function, x = communicator, getattr(communicator, collective), np.zeros(5, np.int32)
    check_refused(c, ValueError, "unknown op 'foo': choose from SUM, PROD", function, x, op="foo")
    check_refused(c, ValueError, r"MPI\.MAXLOC is not offered: choose from SUM", function, x, op=MPI.MAXLOC)
    check_refused(c, ValueError, r"MPI\.OP_NULL is not offered", function, x, op=MPI.OP_NULL)
    mine = MPI.Op.Create(lambda a, b, datatype: None)
    check_refused(c, ValueError, "user-defined MPI op is not offered", function, x, op=mine)
    mine.Free()
    for wrong in (3, sum, np.add, [pr.SUM]):
        check_refused(c, TypeError, "op must be an op or its name, not ", function, x, op=wrong)
    for op in (MPI.SUM, pr.SUM, "sum", "Sum", "SUM"):
        call(c, collective, x, op=op)


@pytest.mark.parametrize("collective", REDUCTIONS)
def test_a_reduction_needs_an_op(communicator: pr.Communicator, collective: str) -> None:
    for dtype in (np.int32, bool):
        with pytest.raises(TypeError, match=f"{collective}: op must be an op or its name, not NoneType"):
            call(communicator, collective, np.zeros(5, dtype), op=None, algorithm="naive")


@every_collective
def test_algorithm_names(communicator: pr.Communicator, collective: str) -> None:
    function = getattr(communicator, collective)
    for wrong in ("rings", "", "NAIVE", 3):
        text = f"no algorithm is called {re.escape(repr(wrong))}; there are naive, ring.*native"
        check_refused(communicator, ValueError, text, function, np.zeros(5), algorithm=wrong)
        with pytest.raises(ValueError, match=text):  # before any communication: all ranks may do so, or one
            pr.Communicator(MPI.COMM_SELF, algorithm=wrong)


@every_collective
def test_an_algorithm_that_has_no_hash(communicator: pr.Communicator, collective: str) -> None:
    text = r"no algorithm is called \['ring'\]"
    check_refused(communicator, ValueError, text, getattr(communicator, collective), np.zeros(5), algorithm=["ring"])


@every_collective
def test_timeouts(communicator: pr.Communicator, collective: str) -> None:
    function = getattr(communicator, collective)
    for wrong in (-1, -0.001, float("nan"), "soon"):
        check_refused(communicator, ValueError, "timeout is .*seconds", function, np.zeros(5), timeout=wrong)
    check_refused(communicator, TypeError, "timeout is .*needs a number", function, np.zeros(5), timeout=[1])
    for right in (10, 0.5e2, np.float32(10), float("inf")):
        function(np.zeros(5), timeout=right)


@pytest.mark.parametrize("collective", REDUCTIONS)
def test_what_native_does_not_serve(communicator: pr.Communicator, collective: str) -> None:
    c, function = communicator, getattr(communicator, collective)
    advice = "use algorithm=None"
    x = np.zeros(5, ml_dtypes.bfloat16)
    check_refused(c, pr.Unsupported, f"MPI has no bfloat16; {advice}", function, x, algorithm="native")
    for op in ("MIN", "MAX"):
        text = f"MPI's {op} need not propagate NaN; {advice}"
        check_refused(c, pr.Unsupported, text, function, np.zeros(5, np.float32), op=op, algorithm="native")
    assert issubclass(pr.Unsupported, ValueError)
    c.allgather(x, algorithm="native")


def test_options_are_keyword_only(communicator: pr.Communicator) -> None:
    for collective in COLLECTIVES:
        with pytest.raises(TypeError, match="positional argument"):
            getattr(communicator, collective)(np.zeros(3), np.zeros(3), "SUM")
    with pytest.raises(TypeError, match="positional argument"):
        pr.Communicator(MPI.COMM_SELF, "ring")
    with pytest.raises(TypeError, match="counts"):
        communicator.allreduce(np.zeros(3), counts=[3])


# ------------------------------------------------------------------------------------------ communicators, settings


def test_what_is_no_communicator(communicator: pr.Communicator) -> None:
    x = np.zeros(3)
    for wrong, error, text in (
        ("world", TypeError, "comm is a str, not an mpi4py communicator"),
        (3, TypeError, "comm is a int, not an mpi4py communicator"),
        (communicator, TypeError, "comm is a Communicator, not an mpi4py communicator"),
        (MPI.COMM_NULL, ValueError, "COMM_NULL; this rank is not part"),
        (MPI.GROUP_EMPTY, TypeError, "comm is a Group"),
    ):
        for make in (pr.Communicator, lambda comm: pr.allreduce(x, comm=comm), lambda comm: pr.allgather(x, comm=comm)):
            with pytest.raises(error, match=text):
                make(wrong)


@pytest.mark.ranks(2, 3, 4)
def test_intercommunicators_are_refused(comm: Any) -> None:
    half = comm.Split(comm.rank % 2)
    inter = half.Create_intercomm(0, comm, (comm.rank + 1) % 2, tag=9)
    with pytest.raises(TypeError, match=r"intercommunicator; merge it first \(comm\.Merge\(\)\)"):
        pr.Communicator(inter)
    with pytest.raises(TypeError, match="intercommunicator"):
        pr.allreduce(np.zeros(3), comm=inter)
    inter.Free()
    half.Free()


def test_close_and_context_manager(comm: Any) -> None:
    with pr.Communicator(comm) as c:
        assert (c.rank, c.size) == (comm.rank, comm.size)
        run_checked(c, "allreduce", "int32", 9)
        assert repr(c) == f"<pyreduce.Communicator rank {c.rank} of {c.size}, 2 calls>"
    assert "closed" in repr(c)
    c.close()
    c.close()
    for collective in COLLECTIVES:
        with pytest.raises(ValueError, match=f"{collective}: this communicator is closed"):
            call(c, collective, np.zeros(3))
    with pytest.raises(KeyError, match="torn"), pr.Communicator(comm) as torn:
        raise KeyError("torn")
    assert "closed" in repr(torn)
    assert comm.allreduce(1) == comm.size  # the user's communicator lives on


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"segment_bytes": 0}, ValueError, "segment_bytes is 0, needs to be in 1.."),
        ({"segment_bytes": 1.5}, ValueError, "segment_bytes is 1.5, needs an integer"),
        ({"in_flight": 0}, ValueError, "in_flight is 0, needs to be in 1..8"),
        ({"in_flight": 9}, ValueError, "in_flight is 9, needs to be in 1..8"),
        ({"message_bytes": -1}, ValueError, "message_bytes is -1"),
        ({"message_bytes": 2**31}, ValueError, "message_bytes is 2147483648"),
        ({"check": "heavy"}, ValueError, "check is 'heavy', needs to be one of light, full, off"),
        ({"timeout": -1}, ValueError, "timeout is -1.0, needs zero or more seconds"),
        ({"timeout": "x"}, ValueError, "timeout is 'x', needs a number of seconds"),
        ({"timeout": []}, TypeError, "timeout is"),
        ({"transport": "tcp"}, ValueError, "transport is 'tcp', needs to be one of shared, rma"),
        ({"warn_seconds": float("nan")}, ValueError, "warn_seconds is nan"),
    ],
    ids=str,
)
def test_settings_out_of_range(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        pr.Communicator(MPI.COMM_SELF, **settings)


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("PYREDUCE_SEGMENT_BYTES", "many", "PYREDUCE_SEGMENT_BYTES is 'many', needs an integer"),
        ("PYREDUCE_SEGMENT_BYTES", "-5", "PYREDUCE_SEGMENT_BYTES is -5, needs to be in"),
        ("PYREDUCE_IN_FLIGHT", "0", "PYREDUCE_IN_FLIGHT is 0, needs to be in 1..8"),
        ("PYREDUCE_MESSAGE_BYTES", "3e9", "PYREDUCE_MESSAGE_BYTES is '3e9', needs an integer"),
        ("PYREDUCE_TIMEOUT", "-1", "PYREDUCE_TIMEOUT is -1.0, needs zero or more"),
        ("PYREDUCE_TIMEOUT", "later", "PYREDUCE_TIMEOUT is 'later', needs a number of seconds"),
        ("PYREDUCE_WARN_SECONDS", "x", "PYREDUCE_WARN_SECONDS is 'x'"),
        ("PYREDUCE_TRANSPORT", "pigeon", "transport is 'pigeon', needs to be one of shared, rma"),
        ("PYREDUCE_CHECK", "maybe", "'maybe', needs to be one of light, full, off"),
    ],
)
def test_environment_out_of_range(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, text: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=re.escape(text)):
        pr.Communicator(MPI.COMM_SELF)


def test_arguments_come_before_the_environment_before_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PYREDUCE_TIMEOUT", "PYREDUCE_TRANSPORT"):
        monkeypatch.delenv(variable, raising=False)
    assert read_settings() == Settings(1 << 20, 2, 2**31 - 1, "light", None, 60.0, None)
    for name, value in {"SEGMENT_BYTES": "4096", "IN_FLIGHT": "3", "MESSAGE_BYTES": "99", "TIMEOUT": "2.5",
                        "WARN_SECONDS": "7", "CHECK": "full", "TRANSPORT": "rma"}.items():  # fmt: skip
        monkeypatch.setenv(f"PYREDUCE_{name}", value)
    assert read_settings() == Settings(4096, 3, 99, "full", 2.5, 7.0, "rma")
    given = {
        "segment_bytes": 1,
        "in_flight": 8,
        "message_bytes": 7,
        "check": "off",
        "timeout": 0,
        "warn_seconds": 1,
        "transport": "shared",
    }
    assert read_settings(**given) == Settings(1, 8, 7, "off", 0.0, 1.0, "shared")
    monkeypatch.setenv("PYREDUCE_TIMEOUT", "0")
    assert read_settings().timeout is None
