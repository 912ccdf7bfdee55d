"""The benchmark: its arithmetic without MPI, and small runs of it on all ranks."""

from __future__ import annotations

import argparse
import functools
import io
import json
import math
from typing import Any

import numpy as np
import pytest

from pyreduce import ops

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

import pyreduce as pr
from pyreduce.bench import files, values
from pyreduce.bench.__main__ import main
from pyreduce.bench.cases import CASES, Problem, bus_factor
from pyreduce.bench.measure import Cell, Row, Trouble
from pyreduce.bench.options import UsageError, as_dtype, format_size, parse_size, read_options, sizes
from pyreduce.bench.report import RichReport
from pyreduce.bench.workloads import BUCKET, MODELS, STEPS, make_workload, pack

TINY = ["-b", "0", "-e", "100", "-f", "25", "--iters", "2"]  # 0, 4 and, not divisible by 4 ranks, 100 bytes
SHORT = ["--scale", "5000", "--iters", "2"]  # of a workload


def defined(op: str, dtype: str) -> bool:
    try:
        ops.kernel(ops.OPS[op], as_dtype(dtype))
    except TypeError:
        return False
    return True


PAIRS = [(op, dtype) for op in ops.OPS for dtype in ops.DTYPES if defined(op, dtype)]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8", 8), ("0", 0), ("64K", 65536), ("64k", 65536), ("32M", 32 << 20), ("1G", 1 << 30), ("2KiB", 2048), ("7B", 7)],
)
def test_parse_size(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes
    assert parse_size(format_size(nbytes)) == nbytes


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5M", "1X", "8 bytes"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
        parse_size(text)


def test_sizes() -> None:
    assert sizes(8, 64, 2, 4) == (8, 16, 32, 64)
    assert sizes(8, 60, 2, 4) == (8, 16, 32)
    assert sizes(0, 64, 4, 8) == (0, 8, 32)
    assert sizes(1, 20, 2, 4) == (0, 4, 8, 16)
    assert sizes(100, 100, 2, 8) == (96,)


def test_default_sizes_end_at_the_end() -> None:
    assert read_options([]).sizes == (256, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
    assert read_options(["-e", "32M"]).sizes[-1] == 32 << 20
    assert read_options(["-e", "64"]).sizes == (64,)
    assert read_options(["-b", "64M"]).sizes == (64 << 20,)


def test_options_collect_names() -> None:
    options = read_options(["--algorithm", "native,naive", "--algorithm", "auto,naive", "--collective", "allreduce"])
    assert options.algorithms == ("naive", "auto")
    assert options.collectives == ("allreduce",)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--algorithm", "rong"], "no algorithm is called 'rong'; there are auto, naive, ring, .*native"),
        (["--collective", "bcast"], "no collective is called 'bcast'"),
        (["--op", "LAND"], "LAND is not defined for dtype float32"),
        (["--op", "mean"], "invalid choice"),
        (["--dtype", "float8"], "invalid choice"),
        (["-b", "2K", "-e", "1K"], "--begin 2K is more than --end 1K"),
        (["--factor", "1"], "at least 2"),
        (["--iters", "0"], "at least 1"),
        (["--rotate", "x"], "at least 1"),
        (["--warm", "3"], "unrecognized"),
        (["--workload", "alexnet"], "invalid choice"),
        (["--workload", "gpt2", "-b", "1K"], "--begin does not go with --workload"),
        (["--workload", "gpt2", "--collective", "allreduce"], "--collective does not go with --workload"),
        (["--workload", "gpt2", "--dtype", "int32"], "AVG is not defined for dtype int32"),
        (["--scale", "2"], "--scale needs --workload"),
    ],
)
def test_wrong_arguments(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_options(argv)


def test_options_of_a_workload() -> None:
    options = read_options(["--workload", "gpt2"])
    assert (options.op, options.algorithms, options.sizes) == ("AVG", ("auto",), ())
    assert options.workload == make_workload("gpt2", 4)
    options = read_options(["--workload", "gpt2", "--op", "sum", "-d", "float16", "--bucket", "1M", "--scale", "3"])
    assert (options.op, options.workload) == ("SUM", make_workload("gpt2", 2, 1 << 20, 3))
    assert read_options([]).workload is None
    assert read_options([]).op == "SUM"


@pytest.mark.parametrize(
    ("name", "tensors", "parameters", "first", "last"),
    [
        ("resnet50", 161, 25_557_032, (64, 3, 7, 7), (1000,)),
        ("bert-base", 199, 109_482_240, (30522, 768), (768,)),
        ("gpt2", 148, 124_439_808, (50257, 768), (768,)),
    ],
)
def test_shapes(name: str, tensors: int, parameters: int, first: tuple[int, ...], last: tuple[int, ...]) -> None:
    shapes = MODELS[name]()
    assert len(shapes) == tensors
    assert sum(map(math.prod, shapes)) == parameters
    assert (shapes[0], shapes[-1]) == (first, last)


def test_shapes_of_resnet50() -> None:
    shapes = MODELS["resnet50"]()
    convolutions = [shape for shape in shapes if len(shape) == 4]
    assert len(convolutions) == 53
    second_stage = shapes[3 + 3 * 9 + 3 :]  # behind the stem and three blocks, the first with a projection
    assert second_stage[:12:3] == [(128, 256, 1, 1), (128, 128, 3, 3), (512, 128, 1, 1), (512, 256, 1, 1)]
    assert second_stage[10:12] == [(512,), (512,)]


@pytest.mark.parametrize(
    ("tensors", "limit", "buckets"),
    [
        ([], 10, []),
        ([3, 4, 3, 1], 10, [10, 1]),  # exactly full
        ([3, 4, 4], 10, [7, 4]),  # would go past
        ([3, 12, 1, 1], 10, [3, 12, 2]),  # longer than a bucket
        ([12, 12], 10, [12, 12]),
        ([1, 1], 0, [1, 1]),
    ],
)
def test_pack(tensors: list[int], limit: int, buckets: list[int]) -> None:
    assert pack(tensors, limit) == buckets


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_buckets(name: str, itemsize: int) -> None:
    workload = make_workload(name, itemsize)
    lengths = [math.prod(shape) for shape in reversed(MODELS[name]())]
    assert workload.parameters == sum(lengths)
    for bucket, following in zip(workload.buckets, [*workload.buckets[1:], None], strict=True):
        inside = []
        while sum(inside) < bucket:
            inside.append(lengths.pop(0))
        assert sum(inside) == bucket
        assert bucket * itemsize <= BUCKET or len(inside) == 1
        assert following is None or (bucket + lengths[0]) * itemsize > BUCKET
    assert lengths == []


def test_scale_keeps_every_tensor() -> None:
    workload = make_workload("resnet50", 4, scale=1 << 30)
    assert workload.parameters == workload.tensors == 161
    assert workload.bucket == 1
    assert len(make_workload("bert-base", 4, scale=1000).buckets) == pytest.approx(
        len(make_workload("bert-base", 4).buckets), abs=2
    )


def test_bus_factor() -> None:
    assert bus_factor(CASES["allreduce"], 4) == 1.5
    assert bus_factor(CASES["reduce_scatter"], 4) == bus_factor(CASES["allgather"], 4) == 0.75
    assert bus_factor(CASES["allreduce"], 1) == 0


@pytest.mark.parametrize("nranks", [1, 4, 300])
@pytest.mark.parametrize(("op", "dtype"), PAIRS)
def test_results_do_not_depend_on_fold_order(op: str, dtype: str, nranks: int) -> None:
    kind, start, stop = as_dtype(dtype), 5, 205
    given = [values.inputs(ops.OPS[op], kind, nranks, rank, start, stop) for rank in range(nranks)]
    result = values.results(ops.OPS[op], kind, nranks, start, stop)
    assert {array.dtype for array in [*given, result]} == {kind}
    assert np.array_equal(ops.fold_arrays(ops.OPS[op], given), result)
    assert np.array_equal(ops.fold_arrays(ops.OPS[op], given[::-1]), result)
    if nranks == 4:  # and it takes part whether each rank's contribution arrives
        for rank in range(nranks):
            others = ops.fold_arrays(ops.OPS[op], [*given[:rank], *given[rank + 1 :]])
            assert not np.array_equal(others, result), f"rank {rank} does not matter"


@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_gathered_inputs_differ(dtype: str) -> None:
    arrays = [values.inputs(None, as_dtype(dtype), 3, rank, 0, 1000) for rank in range(3)]
    assert len({array.tobytes() for array in arrays}) == 3
    assert np.array_equal(values.inputs(None, as_dtype(dtype), 3, 1, 300, 400), arrays[1][300:400])


def test_expected_blocks() -> None:
    problems = [Problem(11, pr.SUM, np.dtype(np.float32), 3, rank) for rank in range(3)]
    vectors = [problem.inputs(0, 11) for problem in problems]
    total = functools.reduce(np.add, vectors)
    blocks = np.array_split(total, 3)
    for problem in problems:
        assert np.array_equal(CASES["allreduce"].expected(problem), total)
        assert np.array_equal(CASES["reduce_scatter"].expected(problem), blocks[problem.rank])
        own = [CASES["allgather"].inputs(one, one.own.start, one.own.stop) for one in problems]
        assert np.array_equal(CASES["allgather"].expected(problem), np.concatenate(own))


@pytest.mark.parametrize("width", [78, 100, 130])
def test_table_on_a_terminal(width: int) -> None:
    console = pytest.importorskip("rich.console").Console(
        force_terminal=True, width=width, height=20, record=True, file=io.StringIO()
    )
    report = RichReport(console)
    fine = Cell(12.3, 10.0, 20.0, 0.5, 0.75, 1.25, 0, 10)
    wrong = Cell(12.3, 10.0, 20.0, 0.5, 0.75, 0.25, 7, 10)
    refused = Cell(trouble=Trouble("no [such] dtype", refused=True))
    report.say(["# a header"])
    report.begin("allreduce", 30)
    for power in range(30):
        report.doing("something")
        report.show([Row("allreduce", 1 << power, "native", "native", refused, refused),
                     Row("allreduce", 1 << power, "auto", "ring", fine, wrong)])  # fmt: skip
    report.end()
    text = console.export_text()
    assert "512M auto (ring)" in " ".join(text.split())
    assert text.count("native, out of place and in place: not served: no [such] dtype") == 1
    assert ("algbw" in text) == (width == 130)


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert "pip install pyreduce[bench]" in (files.check_files(read_options(["--plot", "x.png"])) or "")


def test_unwritable_files(tmp_path: Any) -> None:
    assert files.check_files(read_options(["--json", str(tmp_path / "none" / "x.json")])) is not None
    assert files.check_files(read_options(["--json", str(tmp_path)])) is not None
    assert files.check_files(read_options(["--json", str(tmp_path / "x.json")])) is None
    assert not (tmp_path / "x.json").exists()


def test_tiny_run(comm: Any, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    assert main([*TINY, "--json", str(path), "--algorithm", "auto,ring,naive"], comm) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    if comm.rank > 0:
        assert printed.out == ""
        return
    assert "# wrong elements: 0" in printed.out
    content = json.loads(path.read_text())
    assert content["machine"]["ranks"] == comm.size
    assert len(content["rows"]) == 3 * 3 * 4
    for row in content["rows"]:
        for cell in (row["out_of_place"], row["in_place"]):
            assert cell["wrong"] == 0
            assert cell["iterations"] == 2
            assert 0 < cell["min_us"] <= cell["median_us"] <= cell["p99_us"]
            assert cell["ratio"] > 0


@pytest.mark.parametrize(
    "argv",
    [
        ["--op", "AVG", "--dtype", "float16", "--sync", "none", "--rotate", "3"],
        ["--op", "MAX", "--dtype", "bool"],
        ["--op", "PROD", "--dtype", "complex64", "--warmup", "0"],
        ["--op", "AVG", "--dtype", "complex128"],
        ["--op", "BXOR", "--dtype", "uint8"],
    ],
    ids=lambda argv: "-".join(word for word in argv if not word.startswith("-")),
)
def test_run_of(comm: Any, argv: list[str]) -> None:
    assert main([*TINY, *argv], comm) == 0


def test_what_native_lacks_is_said(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--dtype", "bfloat16", "--collective", "allreduce"], comm) == 0
    printed = capsys.readouterr().out
    if comm.rank == 0:
        assert "not served: MPI has no bfloat16" in printed
        assert "# wrong elements: 0" in printed


def test_wrong_result_is_counted(
    comm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = pr.Communicator.allreduce

    def wrong_on_last_rank(self: pr.Communicator, sendbuf: Any, recvbuf: Any, **options: Any) -> Any:
        result = right(self, sendbuf, recvbuf, **options)
        if self.rank == self.size - 1:
            result[3] += 1
        return result

    monkeypatch.setattr(pr.Communicator, "allreduce", wrong_on_last_rank)
    argv = ["-b", "64", "-e", "64", "--iters", "1", "--algorithm", "ring"]
    assert main(argv, comm) == 1
    printed = capsys.readouterr().out
    if comm.rank == 0:
        assert "# wrong elements: 4\n" in printed  # out of place and in place, before and after timing


@pytest.mark.parametrize("name", ["reduce_scatter", "allgather"])
def test_written_input_is_counted(comm: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    right = getattr(pr.Communicator, name)

    def spoiling(self: pr.Communicator, sendbuf: Any, recvbuf: Any, **options: Any) -> Any:
        result = right(self, sendbuf, recvbuf, **options)
        if sendbuf is not pr.IN_PLACE:
            sendbuf[-1:] += 1
        return result

    monkeypatch.setattr(pr.Communicator, name, spoiling)
    assert main(["-b", "64", "-e", "64", "--iters", "1", "--collective", name], comm) == 1


def test_failure_on_one_rank_is_reported(
    comm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = pr.Communicator.allgather

    def failing_on_last_rank(self: pr.Communicator, *args: Any, **options: Any) -> Any:
        result = right(self, *args, **options)
        if self.rank == self.size - 1:
            raise RuntimeError("out of luck")
        return result

    monkeypatch.setattr(pr.Communicator, "allgather", failing_on_last_rank)
    assert main([*TINY, "--collective", "allgather"], comm) == 1
    printed = capsys.readouterr().out
    if comm.rank == 0:
        assert f"RuntimeError: out of luck (rank {comm.size - 1} of {comm.size})" in printed


def test_usage_error_is_printed_once(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--algorithm", "rong"], comm) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert ("no algorithm is called 'rong'" in printed.err) == (comm.rank == 0)


def test_help(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"], comm) == 0
    assert ("--collective" in capsys.readouterr().out) == (comm.rank == 0)


def test_plot(comm: Any, tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "bench.png"
    assert main([*TINY, "--plot", str(path)], comm) == 0
    if comm.rank == 0:
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "argv",
    [
        ["--workload", "resnet50", "--algorithm", "auto,ring,naive"],
        ["--workload", "bert-base", "--op", "MAX", "-d", "float64", "--rotate", "2"],
        ["--workload", "gpt2", "-d", "float16", "--bucket", "1K", "--sync", "none"],
    ],
    ids=lambda argv: argv[1],
)
def test_workload(comm: Any, argv: list[str], tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.json"
    assert main([*argv, *SHORT, "--json", str(path)], comm) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    if comm.rank > 0:
        assert printed.out == ""
        return
    assert "# wrong elements: 0" in printed.out
    content = json.loads(path.read_text())
    workload = content["parameters"]["workload"]
    nbytes = sum(workload["buckets"]) * workload["itemsize"]
    assert {row["nbytes"] for row in content["rows"]} == {nbytes}
    assert [step["step"] for step in content["steps"][:: len(content["steps"]) // 2]] == list(STEPS)
    for step in content["steps"]:
        assert step["wrong"] == 0
        if step["seconds_a_step"] is None:  # an MPI without float16
            assert step["algorithm"] == "native"
            continue
        assert step["steps_a_second"] * step["seconds_a_step"] == pytest.approx(1)
        assert step["MB_moved"] * 1e6 == pytest.approx(nbytes * 2 * (comm.size - 1) / comm.size)


def test_workload_that_native_lacks(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ml_dtypes")
    assert main(["--workload", "resnet50", "-d", "bfloat16", *SHORT], comm) == 0
    printed = capsys.readouterr().out
    if comm.rank == 0:
        assert printed.count("not served: MPI has no bfloat16") == len(STEPS)
        assert "# wrong elements: 0" in printed


@pytest.mark.parametrize("name", CASES)
def test_wrong_step_is_counted(
    comm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """One element of the last bucket is wrong on the last rank (its shard's, on all ranks after the allgather)."""
    right = getattr(pr.Communicator, name)
    buckets = make_workload("resnet50", 4, scale=5000).buckets
    calls = 0

    def wrong_in_last_bucket(self: pr.Communicator, sendbuf: Any, recvbuf: Any, **options: Any) -> Any:
        nonlocal calls
        result = right(self, sendbuf, recvbuf, **options)
        calls += 1
        if self.rank == self.size - 1 and calls % len(buckets) == 0:
            recvbuf[-1:] += 1
        return result

    monkeypatch.setattr(pr.Communicator, name, wrong_in_last_bucket)
    assert main(["--workload", "resnet50", *SHORT], comm) == 1
    printed = capsys.readouterr().out
    if comm.rank == 0:
        spread = comm.size if name == "reduce_scatter" else 1
        assert f"# wrong elements: {2 * spread}\n" in printed  # before and after timing
