"""What a run leaves behind: JSON for machines, a picture for people."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pyreduce.bench.machine import Machine
from pyreduce.bench.measure import Row, step_figures
from pyreduce.bench.options import AUTO, Options, format_size

__all__ = ["check_files", "draw_plot", "write_json"]

COLORS = {"native": "#7a7a7a", AUTO: "#d1495b", "ring": "#00798c", "naive": "#edae49"}
MARKERS = "osD^vPX"


def check_files(options: Options) -> str | None:
    """Why a file that was asked for cannot be written in the end, or None."""
    if options.plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            return "--plot needs matplotlib: pip install pyreduce[bench]"
        if os.path.splitext(options.plot)[1].lower() not in (".png", ".svg", ".pdf"):
            return f"--plot {options.plot}: the name must end in .png (or .svg, .pdf)"
    for name, path in (("--json", options.json), ("--plot", options.plot)):
        if path is None:
            continue
        folder = os.path.dirname(path) or "."
        if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
            return f"{name} {path}: cannot be written"
    return None


def write_json(path: str, machine: Machine, options: Options, rows: Sequence[Row]) -> None:
    """Everything, the times of every row included."""
    content: dict[str, Any] = {
        "machine": {**asdict(machine), "oversubscribed": machine.oversubscribed},
        "parameters": asdict(options),
        "units": {"nbytes": "bytes of the whole vector", "_us": "microseconds", "algbw": "GB/s", "busbw": "GB/s"},
        "rows": [asdict(row) for row in rows],
    }
    if options.workload:
        content["steps"] = [step_figures(row) for row in rows]
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")


def draw_plot(path: str, machine: Machine, options: Options, rows: Sequence[Row]) -> None:
    """A panel a collective: bus bandwidth (time, for one rank) against size, a line an algorithm, dashed in place."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = machine.ranks == 1
    figure, axes = pyplot.subplots(
        1, len(options.collectives), figsize=(4.6 * len(options.collectives) + 0.6, 4.8), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, collective in zip(axes[0], options.collectives, strict=True):
        _draw_panel(axis, [row for row in rows if row.collective == collective and row.nbytes], timed)
        axis.set_title(collective)
    axes[0][0].set_ylabel("time, us" if timed else "busbw, GB/s")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels) or 1, frameon=False)
    crowded = f" ({machine.cores} cores)" if machine.oversubscribed else ""
    figure.suptitle(f"{machine.mpi}, {machine.ranks} ranks{crowded}, {options.op} {options.dtype}", fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_panel(axis: Any, rows: Sequence[Row], timed: bool) -> None:
    for index, name in enumerate(dict.fromkeys(row.algorithm for row in rows)):
        for place, style in (("out of place", "-"), ("in place", "--")):
            cells = [(row.nbytes, row.out_of_place if style == "-" else row.in_place)
                     for row in rows if row.algorithm == name]  # fmt: skip
            points = [(nbytes, cell.median_us if timed else cell.busbw) for nbytes, cell in cells]
            points = [(nbytes, value) for nbytes, value in points if value]
            axis.plot(
                [nbytes for nbytes, _ in points], [value for _, value in points], style,
                color=COLORS.get(name, f"C{index}"), marker=MARKERS[index % len(MARKERS)], markersize=4.5,
                markerfacecolor=None if style == "-" else "white", linewidth=1.5, label=f"{name}, {place}",
            )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted({row.nbytes for row in rows})
    ticks = ticks[:: -(-len(ticks) // 8)] if ticks else ticks
    axis.set_xticks(ticks, [format_size(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel("size of the whole vector, bytes")
    axis.grid(True, color="#dddddd", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
