"""The pictures of ``python -m pyreduce.simulate``; matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from math import exp, log
from pathlib import Path
from typing import Any

from pyreduce.simulate.events import Timing
from pyreduce.simulate.network import FOLD, MESSAGE

__all__ = ["FORMATS", "crossovers", "draw_gantt", "draw_times", "gantt_name", "why_not"]

FORMATS = (".png", ".svg")
SEND, RECEIVE, FOLDING, WAITING = "#4477aa", "#66ccee", "#cc6677", "#eeeeee"
FAR = 5  # times as long as the fastest: algorithms that slow are left out where bars are compared
LABELLED = 200  # messages in a picture above which they do not name their peers

Words = Callable[[float], str]


def why_not() -> str | None:
    """Why nothing can be drawn; None if it can."""
    return None if find_spec("matplotlib") else "--plot needs matplotlib: pip install pyreduce[bench]"


def gantt_name(path: str) -> str:
    """The name of the second picture: ``times-gantt.png`` for ``times.png``."""
    file = Path(path)
    return str(file.with_name(f"{file.stem}-gantt{file.suffix}"))


def crossovers(sizes: Sequence[int], lines: Mapping[str, Sequence[float]]) -> list[tuple[float, float, str, str]]:
    """Where another algorithm becomes the fastest: size, time, the one before and the one after.

    Between two sizes that were computed lines are taken to be straight on logarithmic scales.
    """
    found = []
    best = [min(lines, key=lambda name: lines[name][i]) for i in range(len(sizes))]
    for i in range(1, len(sizes)):
        before, after = best[i - 1], best[i]
        if before == after or not all(lines[name][j] > 0 for name in (before, after) for j in (i - 1, i)):
            continue
        left = log(lines[after][i - 1]) - log(lines[before][i - 1])
        right = log(lines[before][i]) - log(lines[after][i])
        share = left / (left + right) if left + right > 0 else 0.0
        size = exp(log(sizes[i - 1]) + share * (log(sizes[i]) - log(sizes[i - 1])))
        time = exp(log(lines[after][i - 1]) + share * (log(lines[after][i]) - log(lines[after][i - 1])))
        found.append((size, time, before, after))
    return found


def _figure(width: float, height: float, rows: int = 1) -> tuple[Any, Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, 1, figsize=(width, height), squeeze=False, sharex=True, layout="constrained")
    return pyplot, figure, [row[0] for row in axes]


def draw_times(
    path: str,
    title: str,
    sizes: Sequence[int],
    lines: Mapping[str, Sequence[float]],
    bound: Sequence[float],
    bytes_in_words: Words,
    seconds_in_words: Words,
) -> None:
    """Time against size, a line an algorithm, with the sizes where another becomes the fastest."""
    pyplot, figure, (axis,) = _figure(8, 5.5)
    for index, (name, times) in enumerate(lines.items()):  # those below are wider, so that all are seen
        width = 1.5 + 1.2 * (len(lines) - 1 - index)
        axis.plot(sizes, times, marker=".", linewidth=width, label=name)
    axis.plot(sizes, bound, ":", color="#888888", label="lower bound")
    for size, time, before, after in crossovers(sizes, lines):
        axis.axvline(size, color="#bbbbbb", linewidth=0.8)
        axis.plot([size], [time], "ko", markersize=5, markerfacecolor="white")
        text = f"{bytes_in_words(size)}\n{before} | {after}"
        axis.annotate(text, (size, time), xytext=(6, -6), textcoords="offset points", va="top", fontsize=8)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sizes[::2], [bytes_in_words(size) for size in sizes[::2]], fontsize=8)
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(lambda value, _: seconds_in_words(value))
    axis.set_xlabel("size of the whole vector")
    axis.set_ylabel("time, predicted")
    axis.grid(True, color="#dddddd", linewidth=0.6)
    axis.legend(frameon=False)
    axis.set_title(title, fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_gantt(path: str, title: str, timings: Sequence[Timing], seconds_in_words: Words) -> None:
    """For every algorithm and rank what it sends, receives and folds when, and where it waits."""
    near = [timing for timing in timings if timing.time <= FAR * timings[0].time]
    if len(near) < len(timings):
        far = ", ".join(timing.name for timing in timings[len(near) :])
        title, timings = f"{title} (more than {FAR} times as long: {far})", near
    nranks = timings[0].nranks
    height = 1.2 + len(timings) * max(1.6, 0.32 * nranks + 0.5)
    pyplot, figure, axes = _figure(11, height, len(timings))
    for axis, timing in zip(axes, timings, strict=True):
        _draw_ranks(axis, timing)
        axis.set_title(f"{timing.name}: {seconds_in_words(timing.time)}", fontsize=10, loc="left")
    axes[-1].xaxis.set_major_formatter(lambda value, _: seconds_in_words(value))
    axes[-1].set_xlim(left=0)
    keys = [(SEND, "sends to"), (RECEIVE, "receives from"), (FOLDING, "folds"), (WAITING, "waits")]
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color, _ in keys]
    figure.legend(handles, [word for _, word in keys], loc="outside lower center", ncols=len(keys), frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_ranks(axis: Any, timing: Timing) -> None:
    """A band a rank: sends above, receives below them, folds over both."""
    labelled = sum(span.kind == MESSAGE for span in timing.spans) <= LABELLED
    axis.barh(range(timing.nranks), timing.finish, height=0.8, color=WAITING)
    for span in timing.spans:
        start, length = span.start, span.end - span.start
        if span.kind == FOLD:
            axis.barh(span.rank, length, left=start, height=0.8, color=FOLDING)
            continue
        for rank, other, shift, color in ((span.rank, span.peer, -0.2, SEND), (span.peer, span.rank, 0.2, RECEIVE)):
            axis.barh(rank + shift, length, left=start, height=0.4, color=color, edgecolor="white", linewidth=0.4)
            if labelled and length > 0.02 * timing.time:
                axis.text(start + length / 2, rank + shift, str(other), ha="center", va="center", fontsize=6)
    axis.set_yticks(range(timing.nranks), [f"rank {rank}" for rank in range(timing.nranks)], fontsize=8)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
