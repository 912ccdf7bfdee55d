"""Showing rows as they come: plain text, or tables and a progress line by rich on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pyreduce.bench.measure import Cell, Row, step_figures
from pyreduce.bench.options import AUTO, format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["Report", "make_report", "step_heading", "step_lines"]

COLUMNS = ("time us", "algbw", "busbw", "ratio", "#wrong")
WIDTHS = (10, 9, 9, 7, 8)
STEP_FORMATS, STEP_WIDTHS = (".2f", ".4f", ".2f", ".2f", "d"), (10, 10, 11, 7, 8)
SLOWER, FASTER = 0.95, 1.05  # between, the ratio is noise


class Report(Protocol):
    """Where a run's output goes."""

    def say(self, lines: Iterable[str]) -> None:
        """Lines of text."""

    def begin(self, collective: str, steps: int) -> None:
        """A collective, in so many steps."""

    def doing(self, what: str) -> None:
        """What is being measured now."""

    def show(self, rows: Sequence[Row]) -> None:
        """Rows that have just been measured: one step."""

    def end(self) -> None:
        """The collective is done."""


class SilentReport:
    """For the ranks that do not speak."""

    def say(self, lines: Iterable[str]) -> None: ...

    def begin(self, collective: str, steps: int) -> None: ...

    def doing(self, what: str) -> None: ...

    def show(self, rows: Sequence[Row]) -> None: ...

    def end(self) -> None: ...


class PlainReport:
    """Aligned text, line by line."""

    def say(self, lines: Iterable[str]) -> None:
        for line in lines:
            print(line, flush=True)

    def begin(self, collective: str, steps: int) -> None:
        width = sum(WIDTHS)
        names = "".join(f"{name:>{width}}" for name, width in zip(COLUMNS, WIDTHS, strict=True))
        self.say([
            "#",
            f"# {collective:20}{'':2}{'out of place':-^{width - 2}}{'':2}{'in place':-^{width - 2}}",
            f"# {'size':>6} {'algorithm':13}{names}{names}",
        ])  # fmt: skip

    def doing(self, what: str) -> None: ...

    def show(self, rows: Sequence[Row]) -> None:
        for row in rows:
            cells = "".join(_plain(cell) for cell in (row.out_of_place, row.in_place))
            self.say([f"  {format_size(row.nbytes):>6} {_name(row):13}{cells}".rstrip(), *_remarks(row, "#   ")])

    def end(self) -> None: ...


class RichReport:
    """A table a collective that grows while one watches, and a progress line below it."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False) if console is None else console
        self._live: Live | None = None
        self._rows: list[Row] = []
        self._title, self._steps, self._done, self._now = "", 0, 0, ""

    def say(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._console.print(line, style="dim" if line.startswith("#") else None, markup=False, soft_wrap=True)

    def begin(self, collective: str, steps: int) -> None:
        from rich.live import Live

        self._title, self._steps, self._done, self._rows = collective, steps, 0, []
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)
        self._live.start()

    def doing(self, what: str) -> None:
        self._now = what

    def show(self, rows: Sequence[Row]) -> None:
        self._rows += rows
        self._done += 1

    def end(self) -> None:
        assert self._live is not None
        self._live.update(self._table(self._rows), refresh=True)
        self._live.stop()
        self._live = None

    def _render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        if self._done == self._steps:
            return self._table(self._rows)
        line = Table.grid(padding=(0, 1))
        line.add_row(ProgressBar(self._steps, self._done, width=30), f"{self._done}/{self._steps} {self._now}")
        fitting = max(self._console.height - 9, 3)
        return Group(self._table(self._rows[-fitting:]), line)

    def _table(self, rows: Sequence[Row]) -> Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        shown = self._columns()
        table = Table(title=self._title, title_style="bold", title_justify="left", box=box.SIMPLE_HEAD)
        table.pad_edge, table.collapse_padding = False, True
        table.add_column("\n\nsize", justify="right", no_wrap=True)
        table.add_column("\n\nalgorithm", no_wrap=True)
        for place in ("out of\nplace", "in\nplace"):
            for index in shown:
                heading = f"{place if index == 0 else chr(10)}\n{COLUMNS[index]}"
                table.add_column(heading, justify="right", no_wrap=True)
        for index, row in enumerate(rows):
            section = index + 1 < len(rows) and rows[index + 1].nbytes != row.nbytes
            cells = [_styled(cell)[column] for cell in (row.out_of_place, row.in_place) for column in shown]
            table.add_row(format_size(row.nbytes), _name(row), *cells, end_section=section)
        remarks = dict.fromkeys(remark for row in rows for remark in _remarks(row, ""))
        table.caption = Text("\n".join(remarks), justify="left") if remarks else None
        return table

    def _columns(self) -> list[int]:
        """The columns that fit the terminal."""
        hidden = {"algbw"} if self._console.width < 106 else set()
        if self._console.width < 88:
            hidden.add("busbw")
        return [index for index, name in enumerate(COLUMNS) if name not in hidden]


def step_heading() -> str:
    """The columns of `step_lines`."""
    return f"# {'step':26}{'algorithm':20}{'steps/s':>10}{'s/step':>10}{'MB moved':>11}{'ratio':>7}{'#wrong':>8}"


def step_lines(rows: Iterable[Row]) -> list[str]:
    """Rows of a workload, and why figures are missing."""
    lines = []
    for row in rows:
        _, _, *figures = step_figures(row).values()
        shown = [f"{'-' if value is None else format(value, form):>{width}}"
                 for value, form, width in zip(figures, STEP_FORMATS, STEP_WIDTHS, strict=True)]  # fmt: skip
        lines += [f"  {row.collective:26}{_name(row):20}{''.join(shown)}", *_remarks(row, "#   ")]
    return lines


def make_report(comm_rank: int) -> Report:
    """Rank 0 speaks; by rich if it is there and somebody watches."""
    if comm_rank != 0:
        return SilentReport()
    if _is_watched():
        try:
            return RichReport()
        except ImportError:
            pass
    return PlainReport()


def _is_watched() -> bool:
    """Whether stdout is a terminal somebody looks at: Open MPI's ranks always have one, without a size if it is not."""
    try:
        return sys.stdout.isatty() and os.get_terminal_size(sys.stdout.fileno()).columns > 0
    except (OSError, ValueError):
        return False


def _name(row: Row) -> str:
    return f"{AUTO} ({row.runs})" if row.algorithm == AUTO else row.algorithm


def _figures(cell: Cell) -> list[str]:
    """The texts of `COLUMNS`."""
    wrong = "-" if cell.wrong is None else str(cell.wrong)
    if cell.median_us is None or cell.algbw is None or cell.busbw is None:
        return ["-", "-", "-", "-", wrong]
    ratio = "-" if cell.ratio is None else f"{cell.ratio:.2f}"
    return [f"{cell.median_us:.1f}", _bandwidth(cell.algbw), _bandwidth(cell.busbw), ratio, wrong]


def _bandwidth(value: float) -> str:
    return f"{value:.3f}" if value >= 0.01 or value == 0 else f"{value:.2g}"


def _plain(cell: Cell) -> str:
    return "".join(f"{text:>{width}}" for text, width in zip(_figures(cell), WIDTHS, strict=True))


def _styled(cell: Cell) -> list[str]:
    figures = _figures(cell)
    if cell.ratio is not None and not SLOWER <= cell.ratio <= FASTER:
        figures[3] = f"[{'green' if cell.ratio > 1 else 'yellow'}]{figures[3]}[/]"
    if cell.failed:
        figures[4] = f"[bold red]{figures[4]}[/]"
    return figures


def _remarks(row: Row, lead: str) -> list[str]:
    """Why figures are missing, once for both places if the reason is the same."""
    troubles: dict[str, list[str]] = {}
    for place, cell in (("out of place", row.out_of_place), ("in place", row.in_place)):
        if cell.trouble is not None:
            verb = "not served" if cell.trouble.refused else f"FAILED at {format_size(row.nbytes)}"
            troubles.setdefault(f"{verb}: {cell.trouble.text}", []).append(place)
    return [f"{lead}{_name(row)}, {' and '.join(places)}: {text}".replace("\n", f"\n{lead}  ")
            for text, places in troubles.items()]  # fmt: skip
