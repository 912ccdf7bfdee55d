"""``python -m pyreduce.bench``: arguments and exit status."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mpi4py import MPI

from pyreduce.bench.cases import CASES
from pyreduce.bench.files import check_files, draw_plot, write_json
from pyreduce.bench.job import end_together
from pyreduce.bench.machine import Machine, describe_machine
from pyreduce.bench.measure import Bench, Row
from pyreduce.bench.options import Options, UsageError, format_size, read_options
from pyreduce.bench.report import Report, make_report, step_heading, step_lines
from pyreduce.bench.words import header, summary
from pyreduce.bench.workloads import STEPS, Workload

__all__ = ["main"]

WRONG, USAGE = 1, 2


def main(argv: Sequence[str] | None = None, comm: MPI.Intracomm = MPI.COMM_WORLD) -> int:
    """Run the benchmark; collective over `comm`.

    Returns
    -------
    int
        The exit status, the same on every rank: 0 if all is right, 1 if a result is wrong or a call failed, 2 if the
        arguments are wrong.
    """
    comm = comm.Dup()
    try:
        options = _agree_on_options(argv, comm)
        return options if isinstance(options, int) else _run(options, comm)
    finally:
        comm.Free()


def _agree_on_options(argv: Sequence[str] | None, comm: MPI.Intracomm) -> Options | int:
    """Rank 0 reads the command line for all; an exit status if there is nothing to run."""
    result: Options | int = 0
    if comm.rank == 0:
        try:
            result = read_options(argv)
            refusal = check_files(result)
            if refusal:
                raise UsageError(f"python -m pyreduce.bench: error: {refusal}")
        except UsageError as error:
            print(error, file=sys.stderr, flush=True)
            result = USAGE
        except SystemExit:  # --help
            sys.stdout.flush()
            result = 0
    result = comm.bcast(result)
    return result


def _run(options: Options, comm: MPI.Intracomm) -> int:
    machine = describe_machine(comm)
    report = make_report(comm.rank)
    report.say(header(machine, options))
    bench = Bench(comm, options)
    try:
        rows = _replay(bench, options.workload, report) if options.workload else _measure_all(bench, options, report)
    finally:
        bench.close()
    report.say(summary(rows, machine, options))
    written = comm.bcast(_write_files(options, machine, rows, report) if comm.rank == 0 else True)
    failed = any(cell.failed for row in rows for cell in (row.out_of_place, row.in_place))
    return WRONG if failed or not written else 0


def _measure_all(bench: Bench, options: Options, report: Report) -> list[Row]:
    rows: list[Row] = []
    for name in options.collectives:
        report.begin(name, len(options.sizes))
        try:
            for nbytes in options.sizes:
                report.doing(f"{name}, {format_size(nbytes)} bytes")
                measured = bench.measure(CASES[name], nbytes)
                report.show(measured)
                rows += measured
        finally:
            report.end()
    return rows


def _replay(bench: Bench, workload: Workload, report: Report) -> list[Row]:
    """Every way of synchronising a step."""
    rows: list[Row] = []
    report.say(["#", step_heading()])
    for make_step in STEPS.values():
        measured = bench.measure(make_step(workload), workload.nbytes)
        report.say(step_lines(measured))
        rows += measured
    return rows


def _write_files(options: Options, machine: Machine, rows: Sequence[Row], report: Report) -> bool:
    """Write what was asked for; whether that went well."""
    for path, write in ((options.json, write_json), (options.plot, draw_plot)):
        if path is None:
            continue
        try:
            write(path, machine, options, rows)
        except OSError as error:
            print(f"python -m pyreduce.bench: error: {error}", file=sys.stderr, flush=True)
            return False
        report.say([f"# wrote {path}"])
    return True


if __name__ == "__main__":
    end_together(main)
