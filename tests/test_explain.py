"""``python -m pyreduce.explain`` of what has no program, and of what would be chosen (of programs: test_races.py)."""

from __future__ import annotations

import pytest

from pyreduce.algorithms.shared import SMALL_BYTES
from pyreduce.explain import main
from pyreduce.selection import choose


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints."""
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("collective", ["reduce_scatter", "allgather", "allreduce"])
def test_the_engine_in_words(capsys: pytest.CaptureFixture[str], collective: str) -> None:
    text = told(capsys, collective, "--algorithm", "shared", "-n", "3", "--rank", "1")
    assert f"{collective} by shared, P=3 ranks of a node" in text
    assert "rank 1" in text
    assert "\nrank 0" not in text
    assert "wait until ranks 0 and 2 published j" in text
    assert ("every block: ((x0 + x1) + x2)" in text) == (collective != "allgather")
    assert ("  collect  " in text) == (collective == "allreduce")
    assert (f"up to {SMALL_BYTES} bytes" in text) == (collective == "allreduce")
    assert f"read from peers {4 if collective == 'allreduce' else 2}/3 S" in text


def test_the_engine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert "copy the input to the result" in told(capsys, "allreduce", "-a", "shared", "-n", "1")


def test_what_would_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "allreduce", "--bytes", "1M", "-n", "4").splitlines()
    assert lines[0] == "allreduce of 1048576 bytes (float32, SUM) on 4 ranks"
    names = [line[40:].split()[0] for line in lines[1:]]
    assert names == ["shared", "shared", "ring", "naive"]


@pytest.mark.parametrize("size", ["1x", "-4", ""])
def test_a_size_that_is_none(capsys: pytest.CaptureFixture[str], size: str) -> None:
    with pytest.raises(SystemExit):
        main(["allreduce", f"--bytes={size}"])
    assert "no number of bytes" in capsys.readouterr().err


def test_a_size_and_an_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["allreduce", "--bytes", "8", "-a", "ring"])
    assert "leave out --algorithm" in capsys.readouterr().err


def test_the_reason_tells_why_there_is_no_engine() -> None:
    import numpy as np

    name, why = choose("allgather", 8, 2, None, np.dtype(np.float64), no_engine="the dog ate it")
    assert name == "naive"
    assert why.endswith("(no shared memory: the dog ate it)")
