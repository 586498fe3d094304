"""Rows of a measurement: a table for people, JSON for scripts, the machine named in both."""

import os
import platform
from pathlib import Path
from typing import NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from relax_hpc.records import write_json


class Row(NamedTuple):
    """One figure, and what it is compared with."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None
    """value / baseline, measured side by side in the same run."""


def machine() -> str:
    """Where the figures come from."""
    memory = psutil.virtual_memory().total / 2**30
    return f"{platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}"


def show(rows: list[Row], console: Console, json_file: Path | None) -> None:
    """Prints a table and, if asked for, writes `{"machine", "rows"}`."""
    table = Table(title=machine())
    for column in ("what", "value", "unit", "baseline", "ratio"):
        table.add_column(column, justify="left" if column in ("what", "unit") else "right")
    for row in rows:
        table.add_row(
            row.name, f"{row.value:.4g}", row.unit, _figure(row.baseline), _figure(row.ratio)
        )
    console.print(table)
    if json_file is not None:
        write_json(json_file, {"machine": machine(), "rows": [row._asdict() for row in rows]})


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
