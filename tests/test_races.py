"""One-sided programs in the simulator: races and deadlocks found by name, right ones passed, run over MPI as well."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import COLLECTIVES, run_checked

import pyreduce as pr
from pyreduce import Copy, Fold, Get, Notify, Put, Recv, Send, Wait
from pyreduce import place_input as inp
from pyreduce import place_output as out
from pyreduce import place_scratch as scratch
from pyreduce import place_window as window
from pyreduce.algorithms.mesh import mesh, mesh_in_window
from pyreduce.explain import explain, main
from pyreduce.programs import Step, build
from pyreduce.simulate import Simulation
from pyreduce.verify import fold_symbols, verify

Rounds = Iterator[Sequence[Step]]
Change = Callable[[int, Step], bool]


def without(function: Any, drop: Callable[[int, int, Step], bool]) -> Any:
    """An algorithm with some of its steps left out: ``drop(rank, round, step)``."""

    def changed(collective: str, nranks: int, rank: int) -> Rounds:
        for number, steps in enumerate(function(collective, nranks, rank), start=1):
            yield [step for step in steps if not drop(rank, number, step)]

    return changed


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("nranks", [1, 2, 3, 4, 5, 8])
def test_calls_on_a_window_are_right_call_after_call(collective: str, nranks: int) -> None:
    report = verify("mesh_in_window", mesh_in_window, collective, nranks, turns=1)
    assert report.rank_order
    barriers = 3 if collective == "allreduce" else 2
    for rank, cost in enumerate(report.costs if nranks > 1 else ()):
        assert cost.received == (2 if collective == "allreduce" else 1) * (nranks - 1)
        assert cost.notifies == barriers * (nranks - 1)
        program = build("mesh", mesh_in_window, collective, nranks, rank)
        taken = [s for steps in program.rounds for s in steps if isinstance(s, Notify) and s.peer == rank]
        assert [step.value for step in taken] == [-barriers] * (nranks - 1)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("nranks", [2, 3, 5])
def test_every_wait_of_mesh_is_needed(collective: str, nranks: int) -> None:
    """Whichever wait is left out, on whichever rank: the simulator finds a race."""
    for function, turns in ((mesh, 2), (mesh_in_window, 1)):
        for victim in range(nranks):
            program = build("mesh", function, collective, nranks, victim)
            for number, steps in enumerate(program.rounds, start=1):
                for wait in (step for step in steps if isinstance(step, Wait)):
                    left_out = (victim, number, wait)
                    changed = without(function, lambda r, n, s, left_out=left_out: (r, n, s) == left_out)
                    with pytest.raises(pr.AlgorithmError, match=r"race, no wait stands between|is left at"):
                        verify("mesh", changed, collective, nranks, turns=turns)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("nranks", [2, 3, 5])
def test_every_notify_of_mesh_is_needed(collective: str, nranks: int) -> None:
    """Whichever notify is left out: a deadlock, which names who waits for what."""
    for function, turns in ((mesh, 2), (mesh_in_window, 1)):
        for source, target in ((0, 1), (nranks - 1, 0)):
            changed = without(
                function, lambda r, n, s, a=source, b=target: r == a and isinstance(s, Notify) and s.peer == b
            )
            text = (
                rf"deadlock: .*rank {target} waits in round \d+ of call 1 for its cell {source} to reach 1: it holds 0"
            )
            with pytest.raises(pr.AlgorithmError, match=text):
                verify("mesh", changed, collective, nranks, turns=turns)


def test_one_barrier_in_place_is_a_write_after_read_race() -> None:
    """The result back in the window, and the window staged again, with nothing that says the peers have read."""

    def one_barrier(collective: str, nranks: int, rank: int) -> Rounds:
        peers = [peer for peer in range(nranks) if peer != rank]
        rows = {rank: window(rank, rank), **{peer: scratch(peer, rank) for peer in peers}}
        yield [Copy(window(0, 0, nranks), inp(0, nranks)), *(Notify(peer, rank) for peer in peers)]
        yield [
            *(Wait(peer) for peer in peers),
            *(Get(peer, rows[peer], window(rank, rank)) for peer in peers),
            Fold(window(rank, rank), tuple(rows[peer] for peer in range(nranks))),
            *(Notify(rank, peer, -1) for peer in peers),
        ]
        yield [Copy(out(rank), window(rank, rank))]

    for nranks in (2, 3, 4):
        with pytest.raises(pr.AlgorithmError) as info:
            verify("one barrier", one_barrier, "reduce_scatter", nranks, turns=1)
        assert (
            "rank 0 writes slot 1 of its own window in round 1 of call 2, while rank 1 may still read it in round 2 of "
            "call 1: a write-after-read race" in str(info.value)
        )


def test_a_result_at_the_front_of_the_window_meets_the_owner_of_that_row() -> None:
    """MPI's place for a result, row 0, is a row that rank 0 reads: with one barrier a race within one call."""

    def at_the_front(collective: str, nranks: int, rank: int) -> Rounds:
        peers = [peer for peer in range(nranks) if peer != rank]
        rows = {rank: window(rank, rank), **{peer: scratch(peer, rank) for peer in peers}}
        yield [Copy(window(0, 0, nranks), inp(0, nranks)), *(Notify(peer, rank) for peer in peers)]
        yield [
            *(Wait(peer) for peer in peers),
            *(Get(peer, rows[peer], window(rank, rank)) for peer in peers),
            Fold(window(0, rank), tuple(rows[peer] for peer in range(nranks))),
            Copy(out(rank), window(0, rank)),
        ]

    with pytest.raises(pr.AlgorithmError, match=r"slot 0 of .* of call 1.*race"):
        verify("front", at_the_front, "reduce_scatter", 3)


def put_around(collective: str, nranks: int, rank: int) -> Rounds:
    """allgather: every block is put once around the ring, from window to window; slot b for block b."""
    if collective != "allgather":
        raise pr.Unsupported("allgather only")
    right, left = (rank + 1) % nranks, (rank - 1) % nranks
    yield [Copy(window(rank, rank), inp(rank))]
    for hop in range(nranks - 1):
        block = (rank - hop) % nranks
        steps: list[Step] = [Wait(left, hop)] if hop else []
        yield [*steps, Put(right, window(block, block), window(block, block)), Notify(right, rank)]
    yield [*([Wait(left, nranks - 1)] if nranks > 1 else []), Copy(out(0, nranks), window(0, 0, nranks))]


def test_a_ring_of_puts_is_right() -> None:
    for nranks in (1, 2, 3, 4, 7, 16):
        report = verify("put_around", put_around, "allgather", nranks)
        assert all(cost.sent == cost.notifies == nranks - 1 for cost in report.costs)


def test_a_put_before_the_peer_has_done_with_the_place_is_a_race() -> None:
    def into_one_slot(collective: str, nranks: int, rank: int) -> Rounds:
        """Slot 1 for whatever comes: the next block is put there while the last one is still read."""
        right, left = (rank + 1) % nranks, (rank - 1) % nranks
        held = inp(rank)
        for hop in range(nranks - 1):
            arriving = window(0, (rank - 1 - hop) % nranks)
            yield [Put(right, window(0, (rank - hop) % nranks), held), Notify(right, rank)]
            yield [Wait(left, hop + 1), Copy(out(arriving.first), arriving), Copy(scratch(0, arriving.first), arriving)]
            held = scratch(0, arriving.first)
        yield [Copy(out(rank), inp(rank))]

    with pytest.raises(pr.AlgorithmError, match=r"writes slot 0 of rank \d's window .*may still read it"):
        verify("into_one_slot", into_one_slot, "allgather", 3)


def test_credits_that_stay_behind_are_named() -> None:
    def generous(collective: str, nranks: int, rank: int) -> Rounds:
        for steps in mesh(collective, nranks, rank):
            yield [s for step in steps for s in ([step, step] if isinstance(step, Notify) and rank == 0 else [step])]

    with pytest.raises(pr.AlgorithmError, match=r"cell 0 of rank 1 is left at 2: the most that is waited for is 1"):
        verify("mesh", generous, "allgather", 2)
    careless = without(mesh_in_window, lambda r, n, s: isinstance(s, Notify) and s.value < 0 and r == 0)
    with pytest.raises(pr.AlgorithmError, match=r"race|is left at"):
        verify("mesh", careless, "reduce_scatter", 2, turns=1)


def test_messages_order_windows_too() -> None:
    """A receive says as much as a wait: stage, tell by an empty message, get."""

    def by_message(collective: str, nranks: int, rank: int) -> Rounds:
        peers = [peer for peer in range(nranks) if peer != rank]
        nothing = pr.programs.Place("input", rank, 0)
        yield [Copy(window(0, rank), inp(rank))]
        yield [*(Send(p, nothing) for p in peers), *(Recv(p, pr.programs.Place("input", p, 0)) for p in peers)]
        yield [*(Get(p, out(p), window(0, p)) for p in peers), Copy(out(rank), inp(rank))]

    # Zero-length messages name blocks, so that both sides agree on them.
    def agreed(collective: str, nranks: int, rank: int) -> Rounds:
        for steps in by_message(collective, nranks, rank):
            yield [
                Send(s.peer, scratch(0, s.src.first, 0)) if isinstance(s, Send)
                else Recv(s.peer, scratch(0, s.dst.first, 0)) if isinstance(s, Recv) else s
                for s in steps
            ]  # fmt: skip

    for nranks in (2, 3, 5):
        verify("by_message", agreed, "allgather", nranks)


def test_a_shared_counter_cannot_be_trusted_to_be_everybodys() -> None:
    """Two credits in one cell, of three that may come: who gave them is not known."""

    def counter(collective: str, nranks: int, rank: int) -> Rounds:
        peers = [peer for peer in range(nranks) if peer != rank]
        yield [Copy(window(0, rank), inp(rank)), *(Notify(peer, 0, 2 if rank == 1 else 1) for peer in peers)]
        yield [Wait(0, nranks - 1), *(Get(p, out(p), window(0, p)) for p in peers), Copy(out(rank), inp(rank))]
        yield [Wait(0, nranks - 1 + (rank != 1))]

    with pytest.raises(pr.AlgorithmError, match="race"):
        verify("counter", counter, "allgather", 3)


def test_the_simulator_plays_calls_one_after_the_other() -> None:
    programs = [build("mesh", mesh, "allreduce", 3, rank) for rank in range(3)]
    inputs = [dict.fromkeys(range(3), rank) for rank in range(3)]
    for calls in (1, 2, 5):
        outputs = Simulation(programs, inputs, fold_symbols, "mesh", calls=calls).run()
        assert all(output == dict.fromkeys(range(3), (0, 1, 2)) for output in outputs)


def test_users_one_sided_algorithms_run_over_mpi(make_communicator: Any, comm: Any) -> None:
    pr.register_algorithm("put_around", put_around)
    for transport in ("shared", "rma"):
        c = make_communicator(transport=transport, segment_bytes=64)
        for rows in (0, 1, comm.size, 100, 1001):
            run_checked(c, "allgather", "float32", rows, algorithm="put_around")
            run_checked(c, "allreduce", "float32", rows, algorithm="mesh", op="MAX")
        assert c.stats["allgather", "put_around"].bytes_sent > 0 or comm.size == 1


def stage(nranks: int, rank: int) -> list[Step]:
    return [Copy(window(0, 0, nranks), inp(0, nranks)), *(Notify(p, rank) for p in range(nranks) if p != rank)]


def running_sum(collective: str, nranks: int, rank: int) -> Rounds:
    """reduce_scatter: what was got into scratch is folded there, one by one, so it must have been got."""
    if collective != "reduce_scatter" or nranks == 1:
        raise pr.Unsupported("reduce_scatter of several")
    peers = [peer for peer in range(nranks) if peer != rank]
    yield stage(nranks, rank)
    yield [
        *(Wait(peer) for peer in peers),
        *(Get(peer, scratch(peer, rank), window(rank, rank)) for peer in peers),
        Copy(scratch(rank, rank), inp(rank)),
        *(Fold(scratch(0, rank), (scratch(0, rank), scratch(peer, rank))) for peer in range(1, nranks)),
        Copy(out(rank), scratch(0, rank)),
    ]


def overwritten_at_once(collective: str, nranks: int, rank: int) -> Rounds:
    """reduce_scatter: what was got is overwritten at the peer, by this rank itself, before the fold."""
    if collective != "reduce_scatter" or nranks == 1:
        raise pr.Unsupported("reduce_scatter of several")
    peers = [peer for peer in range(nranks) if peer != rank]
    vectors = [inp(rank) if peer == rank else scratch(peer, rank) for peer in range(nranks)]
    yield stage(nranks, rank)
    yield [
        *(Wait(peer) for peer in peers),
        *(Get(peer, scratch(peer, rank), window(rank, rank)) for peer in peers),
        *(Put(peer, window(rank, rank), inp(rank)) for peer in peers),
        Fold(out(rank), tuple(vectors)),
    ]


@pytest.mark.parametrize("function", [running_sum, overwritten_at_once], ids=lambda function: function.__name__)
def test_what_was_got_is_kept_where_it_lay_only_if_nothing_changes(
    make_communicator: Any, comm: Any, function: Any
) -> None:
    if comm.size == 1:
        return
    name = function.__name__
    pr.register_algorithm(name, function)
    for transport in ("shared", "rma"):
        c = make_communicator(transport=transport, segment_bytes=64)
        for rows in (comm.size, 100):
            x = np.arange(float(rows)) * 10.0**comm.rank
            got = c.reduce_scatter(x, algorithm=name)
            assert (got == c.reduce_scatter(x, algorithm="naive")).all(), transport


@pytest.mark.parametrize("credits", [(1 << 15, 1), (20_000, 2)])
def test_more_credits_than_a_cell_can_hold_are_refused(credits: tuple[int, int]) -> None:
    value, sources = credits

    def generous(collective: str, nranks: int, rank: int) -> Rounds:
        peers = [peer for peer in range(nranks) if peer != rank]
        yield [Copy(window(0, rank), inp(rank)), *(Notify(p, rank if sources == 1 else 0, value) for p in peers)]
        waits = [Wait(p, value) for p in peers] if sources == 1 else [Wait(0, value * (nranks - 1))]
        yield [*waits, *(Get(p, out(p), window(0, p)) for p in peers), Copy(out(rank), inp(rank))]

    with pytest.raises(pr.AlgorithmError, match=r"at most 32767"):
        verify("generous", generous, "allgather", 3)


# -------------------------------------------------------------------------------------------------------------- explain


def test_explain_tells_both_modes_and_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = {
        "hand": "  round 2: wait for 1 credit in cells 1-3; get block 0 from window slot 0 of ranks 1-3; fold block 0 "
        "into the result: own, then what came from rank 1",
        "builtin": "  round 4: wait for 2 credits in cells 1-3; copy block 0 to window slot 0; take 2 credits back "
        "from cells 1-3",
    }
    for mode, line in lines.items():
        assert main(["reduce_scatter", "--algorithm", "mesh", "--mode", mode, "-n", "4"]) == 0
        text = capsys.readouterr().out
        assert f"reduce_scatter by mesh, P=4 ranks, mode {mode}\n" in text
        assert line in text
        assert "  round 1: copy blocks 0-3 to window slots 0-3" in text
        assert "  receives  3 S/4 bytes a rank (3 blocks)\n" in text
        for row in ("  stores        4 blocks to one's own window  4 blocks to one's own window\n",
                    "  barriers      1                             2\n",
                    "  remote reads  3 blocks                      3 blocks\n",
                    "  result        written straight out          back to the window, then out of it\n",
                    "  credits       1 a cell and call             2 a cell and call\n",
                    "  clean-up      none                          2 credits taken back from each cell\n"):  # fmt: skip
            assert row in text
    for collective in COLLECTIVES:
        for nranks in (1, 2, 3):
            assert "what differs" in "\n".join(explain(collective, "mesh", nranks, mode="builtin"))
    with pytest.raises(SystemExit):
        main(["allreduce", "--algorithm", "ring", "--mode", "hand"])
    assert "--mode is for --algorithm mesh" in capsys.readouterr().err


def test_explain_loads_a_file_that_imports_its_neighbour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_it.py").write_text("from pyreduce.algorithms.mesh import mesh\n")
    text = (
        'import pyreduce as pr\nfrom beside_it import mesh\n\n@pr.register_algorithm("loaded")\ndef loaded(*which):\n'
    )
    (tmp_path / "loaded.py").write_text(f'{text}    "One line about it."\n    return mesh(*which)\n')
    assert main(["allgather", "--load", str(tmp_path / "loaded.py"), "--algorithm", "loaded", "-n", "3"]) == 0
    assert "allgather by loaded, P=3 ranks\n  One line about it.\n" in capsys.readouterr().out


def test_explain_tells_puts(capsys: pytest.CaptureFixture[str]) -> None:
    pr.register_algorithm("put_around", put_around)
    text = "\n".join(explain("allgather", "put_around", 3))
    assert "round 2: put block 0 into window slot 0 of rank 1; notify cell 0 of rank 1" in text
    assert np.all([f"rank {rank}" in text for rank in range(3)])
