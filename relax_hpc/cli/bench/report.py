"""Formats rows of a measurement: a table for people, JSON for scripts, the machine named in
both."""

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from relax_hpc.runtime.files.records import write_json
from relax_hpc.runtime.telemetry import picture


class ReportRow(NamedTuple):
    """One figure, and its comparison."""

    name: str
    value: float
    unit: str
    against: str = ""
    """Baseline: "raw" (the same bytes by plain system calls), "TransferQueue", ..."""
    baseline: float | None = None
    ratio: float | None = None
    """How much better it is than the baseline: the median over repeats of the ratios within one."""
    aim: float | None = None
    """Target of the ratio, or of the value without a ratio."""


def compare(
    name: str,
    size: int,
    ours: Sequence[float],
    theirs: Sequence[float],
    against: str,
    aim: float | None,
) -> ReportRow:
    """Compares throughputs from paired measurements in seconds."""
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    speeds = (size / statistics.median(seconds) / 1e9 for seconds in (ours, theirs))
    return ReportRow(name, next(speeds), "GB/s", against, next(speeds), ratio, aim)


def machine() -> str:
    """Describes the machine, and its load averages over 1 and 5 minutes."""
    memory = psutil.virtual_memory().total / 2**30
    one, five, _ = os.getloadavg()
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}, "
        f"load {one:.1f} {five:.1f}"
    )


def show(rows: list[ReportRow], console: Console, json_file: Path | None, before: str) -> None:
    """Prints a table and, if requested, writes `{"machine", "rows"}`.

    Args:
        rows: if empty, prints nothing.
        before: `machine()` when the measurement began.
    """
    if not rows:
        return
    table = Table(title=before)
    columns = ("what", "value", "unit", "against", "baseline", "ratio", "aim")
    for column in columns:
        table.add_column(column, justify="left" if column in ("what", "unit") else "right")
    for row in rows:
        figures = (_figure(row.baseline), _figure(row.ratio), _figure(row.aim))
        table.add_row(row.name, f"{row.value:.3g}", row.unit, row.against, *figures)
    console.print(table)
    if json_file is not None:
        write_json(
            json_file,
            {"machine": before, "after": machine(), "rows": [row._asdict() for row in rows]},
        )


def plot(rows: list[ReportRow], path: Path, title: str) -> None:
    """Draws bars of the ratios with their targets to a PNG."""
    ratios = [row for row in rows if row.ratio is not None]
    figure = picture.figure(9, 0.8 + 0.28 * len(ratios), dpi=110)
    axes = figure.add_subplot()
    names = [f"{row.name} / {row.against}" for row in ratios]
    colors = ["tab:blue" if row.against == "raw" else "tab:green" for row in ratios]
    axes.barh(names, [row.ratio or 0.0 for row in ratios], color=colors)
    for at, row in enumerate(ratios):
        axes.annotate(f" {row.ratio:.2f}", (row.ratio or 0, at), va="center", fontsize=8)
        if row.aim is not None:
            axes.plot([row.aim, row.aim], [at - 0.45, at + 0.45], color="black", linewidth=2)
    axes.invert_yaxis()
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks(ticks := (0.2, 0.5, 1, 2, 5, 10, 20), [f"{tick:g}" for tick in ticks])
    axes.set_xlim(0.15, 2 * max(2.0, *(row.ratio or 0.0 for row in ratios)))
    axes.set_xlabel("times better than what it is compared with; black: aim")
    axes.set_title(title, fontsize=9)
    picture.save(figure, path)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
