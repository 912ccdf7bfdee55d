"""The examples, run in process by all ranks together: exit status and what they print."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

try:
    from mpi4py import MPI
except (ImportError, RuntimeError):  # RuntimeError: mpi4py is there, but no MPI library
    pytest.skip("the examples run over MPI", allow_module_level=True)

Run = Callable[..., tuple[int, str]]
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def load(name: str) -> ModuleType:
    """Import an example by its path, under a name that meets no other module."""
    spec = importlib.util.spec_from_file_location(f"pyreduce_examples_{name}", EXAMPLES / f"{name}.py")
    assert isinstance(spec, ModuleSpec)
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(world: MPI.Intracomm, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call an example's main on every rank; the exit status and rank 0's output, the same on all ranks."""

    def call(module: ModuleType, *argv: str) -> tuple[int, str]:
        capsys.readouterr()
        status = module.main(list(argv))
        outcomes = world.allgather((status, capsys.readouterr().out))
        assert {s for s, _ in outcomes} == {status}, f"exit statuses differ between ranks: {outcomes}"
        assert not any(out for _, out in outcomes[1:]), "a rank other than 0 prints"
        return status, outcomes[0][1]

    return call


@pytest.fixture
def walkthrough() -> ModuleType:
    return load("walkthrough")


@pytest.fixture
def train_digits() -> ModuleType:
    pytest.importorskip("sklearn", reason="train_digits needs scikit-learn for its images")
    return load("train_digits")


def blocks_of_sum(nranks: int) -> list[str]:
    """The lines of the walk-through's numbers after reduce_scatter, computed here from scratch."""
    total = sum(100 * rank + np.arange(1, 13) for rank in range(nranks))
    return ["[" + " ".join(f"{value:3d}" for value in block) + "]" for block in np.array_split(total, nranks)]


def test_walkthrough(walkthrough: ModuleType, run: Run) -> None:
    nranks = MPI.COMM_WORLD.size if MPI.COMM_WORLD.size > 1 else 4  # alone, four are simulated
    for _ in range(2):
        status, out = run(walkthrough)
        assert status == 0, out
        assert out.endswith("\nOK\n")
        assert f"reduce_scatter on {nranks} ranks" in out
        assert ("mpirun -n 4" in out) == (MPI.COMM_WORLD.size == 1)
        assert re.findall(r"Round (\d+) of", out) == [str(number) for number in range(1, nranks)]
        after = re.findall(r"^  rank (\d+)  \S+ = (\[.*\])$", out, re.MULTILINE)
        assert after == [(str(rank), block) for rank, block in enumerate(blocks_of_sum(nranks))]


def test_walkthrough_tells_the_primer(walkthrough: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """With 4 ranks, the primer's story."""
    walkthrough.tell(walkthrough.run_in_simulator(4))
    out = capsys.readouterr().out
    for line in (
        "rank 3  D0 [301 302 303]  D1 [304 305 306]  D2 [307 308 309]  D3 [310 311 312]",
        "rank 2  sends C0 C1 C2 C3 to every other rank; adds up all 4 blocks; keeps A2+B2+C2+D2",
        "Each rank sends 288 bytes. Even the ring's allreduce would send 144 bytes.",
        "rank 0 sends A3 to rank 1, which adds B3:  A3+B3\n",
        "rank 3 sends C1+D1 to rank 0, which adds A1:  C1+D1+A1\n",
        "rank 3 sends B0+C0+D0 to rank 0, which adds A0:  B0+C0+D0+A0   complete\n",
        "Each rank sends 72 bytes",
        "rank 1  C1+D1+A1+B1 = [616 620 624]",
    ):
        assert line in out
    assert out.count("complete") == 4
    assert out.count("[604 608 612 616 620 624 628 632 636 640 644 648]") == 8


def test_walkthrough_on_any_communicator(walkthrough: ModuleType, comm: MPI.Intracomm) -> None:
    ranks = walkthrough.run_on_mpi(comm)
    assert (ranks is None) == (comm.rank > 0)
    assert ranks is None or walkthrough.check(ranks) == []


@pytest.mark.parametrize("nranks", [1, 2, 3, 5, 13, 27])
def test_walkthrough_simulates_any_number(
    walkthrough: ModuleType, capsys: pytest.CaptureFixture[str], nranks: int
) -> None:
    ranks = walkthrough.run_in_simulator(nranks)
    assert walkthrough.check(ranks) == []
    walkthrough.tell(ranks)
    out = capsys.readouterr().out
    assert out.count("complete") == (nranks if nranks > 1 else 0)
    assert all(block in out for block in blocks_of_sum(nranks))


@pytest.mark.parametrize("field", ["vector", "naive_block", "block", "full", "total"])
def test_walkthrough_checks_every_result(walkthrough: ModuleType, field: str) -> None:
    ranks = walkthrough.run_in_simulator(4)
    ranks[3] = ranks[3]._replace(**{field: getattr(ranks[3], field)[::-1]})
    (wrong,) = walkthrough.check(ranks)
    assert f"rank 3 of 4: {field} is" in wrong


def test_walkthrough_notices_a_wrong_result(walkthrough: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyreduce as pr

    right = pr.allreduce

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **kwargs) + 1

    monkeypatch.setattr(pr, "allreduce", wrong)
    status, out = run(walkthrough)
    assert status == 1
    assert "WRONG: rank 0 of" in out
    assert "OK" not in out


def test_train_digits_equals_training_alone(train_digits: ModuleType, run: Run) -> None:
    status, out = run(train_digits, "--epochs", "4")
    assert status == 0, out
    assert out.endswith("\nOK\n")
    lines = re.findall(r"^ +(\d+)   (\S+)   (\S+)$", out, re.MULTILINE)
    assert [epoch for epoch, _, _ in lines] == ["1", "2", "3", "4"]
    together, alone = np.array([line[1:] for line in lines], float).T
    np.testing.assert_allclose(together, alone, rtol=1e-9)
    assert alone[-1] < alone[0] / 4
    assert float(re.findall(r"test images: (\S+)", out)[0]) > 0.9


@pytest.mark.parametrize("algorithm", ["naive", "ring", "shared", "native"])
def test_train_digits_by_every_algorithm(train_digits: ModuleType, run: Run, algorithm: str) -> None:
    """The last of the three batches, of 1437 images in all, is a single image: most shards are empty."""
    status, out = run(train_digits, "--epochs", "1", "--batch", "718", "--hidden", "8", "--algorithm", algorithm)
    assert status == 0, out
    assert out.endswith("\nOK\n")


def test_train_digits_on_any_communicator(train_digits: ModuleType, comm: MPI.Intracomm) -> None:
    """The same losses as alone; the same weights on all ranks; the same bits when repeated."""
    images, _ = train_digits.load_images()
    options = train_digits.parse_options(["--epochs", "1", "--algorithm", "ring"])
    weights, losses = train_digits.train_together(images, options, comm)
    again, losses_again = train_digits.train_together(images, options, comm)
    assert weights.tobytes() == again.tobytes()
    assert losses == losses_again
    assert losses == pytest.approx(train_digits.train_alone(images, options), rel=1e-9)
    assert len(set(comm.allgather(weights.tobytes()))) == 1, "ranks hold different weights"


def test_train_digits_without_comparison(train_digits: ModuleType, run: Run) -> None:
    status, out = run(train_digits, "--epochs", "1", "--no-compare")
    assert status == 0, out
    assert "alone" not in out


def test_train_digits_notices_a_deviation(train_digits: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = train_digits.train_alone
    monkeypatch.setattr(
        train_digits, "train_alone", lambda images, options: [loss * (1 + 1e-8) for loss in alone(images, options)]
    )
    status, out = run(train_digits, "--epochs", "1")
    assert status == 1
    assert "NOT within" in out
    assert "WRONG" in out


@pytest.mark.parametrize("hidden", [1, 8])
def test_train_digits_gradient(train_digits: ModuleType, hidden: int) -> None:
    """The gradient that both runs share, against finite differences."""
    images, _ = train_digits.load_images()
    few = train_digits.Images(images.pixels[:5], images.digits[:5])
    weights = train_digits.initial_weights(hidden)
    _, gradient = train_digits.loss_and_gradient(weights, few)
    for index in range(0, len(weights), 7):
        nudge = np.zeros_like(weights)
        nudge[index] = 1e-5
        up, down = (train_digits.loss_and_gradient(weights + sign * nudge, few)[0] for sign in (1, -1))
        assert gradient[index] == pytest.approx((up - down) / 2e-5, abs=1e-6)


def test_train_digits_weights_divide_unevenly(train_digits: ModuleType) -> None:
    weights = train_digits.initial_weights(train_digits.parse_options([]).hidden)
    assert all(len(weights) % nranks for nranks in (2, 3, 4))


@pytest.fixture
def reduce_scatter() -> ModuleType:
    return load("reduce_scatter")


@pytest.mark.parametrize("transport", ["shared", "rma"])
@pytest.mark.parametrize("mode", ["hand", "builtin"])
def test_reduce_scatter_is_golden(reduce_scatter: ModuleType, run: Run, mode: str, transport: str) -> None:
    for size in ("2", "64", "5000"):
        assert run(reduce_scatter, "--mode", mode, "--size", size, "--transport", transport) == (0, "OK\n")


@pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="mistakes show on two ranks or more")
@pytest.mark.parametrize(
    ("mistake", "shows", "mend"),
    [
        (
            "own-block",
            r"rank 0: .*short by exactly its own block\nrank 1: .*short by exactly its own block",
            "row of the",
        ),
        ("row-zero", r"rank 0: .*: equal\nrank 1: .*this is block 0", "row of its own number"),
        ("offset", r"rank 0: .*: equal\nrank 1: .*the block begins 1 elements early", r"c \* SIZE"),
        (
            "one-barrier",
            r"rank 0 writes slot 1 .* rank 1 may still read it .*write-after-read race",
            "a second barrier",
        ),
    ],
)
def test_reduce_scatter_mistakes(reduce_scatter: ModuleType, run: Run, mistake: str, shows: str, mend: str) -> None:
    status, text = run(reduce_scatter, "--break", mistake)
    assert status == 1
    assert text.startswith(f"--break {mistake}, {MPI.COMM_WORLD.size} ranks")
    assert re.search(shows, text), text
    assert re.search(mend, text)
    assert "\nMend: " in text
    assert text.endswith("\nWRONG\n")


def test_reduce_scatter_notices_a_wrong_result(
    reduce_scatter: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = reduce_scatter.golden
    monkeypatch.setattr(reduce_scatter, "golden", lambda rank, *rest: right(rank, *rest) + (rank == 0))
    status, text = run(reduce_scatter)
    assert status == 1
    assert "rank 0: got" in text
    assert text.endswith("WRONG\n")


def test_reduce_scatter_refuses_options_that_make_no_sense(
    reduce_scatter: ModuleType, world: MPI.Intracomm, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {
        "needs at least 2": ["--size", "1"],
        "--mode hand": ["--break", "offset", "--mode", "builtin"],
        "invalid choice": ["--break", "two-barriers"],
    }
    for text, argv in refused.items():
        with pytest.raises(SystemExit):
            reduce_scatter.main(argv)
        assert text in capsys.readouterr().err or world.size == 1


def test_torus(run: Run) -> None:
    """Where ranks form a grid, checked against NumPy; elsewhere it says so."""
    nranks = MPI.COMM_WORLD.size
    torus = load("torus")
    for _ in range(2):
        status, out = run(torus)
        assert status == 0, out
        if nranks in (2, 3, 5, 7):
            assert out.startswith("nothing to run: torus needs a grid")
            assert out.endswith(f"; {nranks} ranks have none\n")
        else:
            assert out.startswith(f"torus: {nranks} ranks, ")
            assert out.endswith("\nOK\n")


def test_torus_notices_a_wrong_result(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyreduce as pr

    torus, right = load("torus"), pr.allreduce
    monkeypatch.setattr(pr, "allreduce", lambda *args, **kwargs: right(*args, **kwargs) + 1)
    status, out = run(torus)
    if out.startswith("torus"):
        assert status == 1
        assert "rank 0: allreduce of 1 numbers gives" in out
        assert out.endswith("WRONG\n")


def test_torus_sends_no_more_than_a_ring() -> None:
    from pyreduce.programs import build
    from pyreduce.verify import verify

    torus = load("torus")
    assert [torus.grid(nranks) for nranks in (4, 6, 12, 36, 1024)] == [(2, 2), (2, 3), (3, 4), (6, 6), (32, 32)]
    for collective, times in (("reduce_scatter", 1), ("allgather", 1), ("allreduce", 2)):
        verify("torus", torus.torus, collective, 30)
        cost = build("torus", torus.torus, collective, 30, 7).cost()
        assert (cost.rounds, cost.sent) == (times * 9, times * 29)


ROOT = EXAMPLES.parent
DOCUMENTS = ["README.md", "docs/signals.md"]
BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name in DOCUMENTS
    if (ROOT / name).is_file()
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL), start=1)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_programs_of_the_documents_run(block: str, world: MPI.Intracomm, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "<document>", "exec"), {})
    capsys.readouterr()
    world.Barrier()
