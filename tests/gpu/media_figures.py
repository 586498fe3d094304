"""`media_figures.py RUN`: a run of a model that sees in few lines: gaps, digests, times, pauses.

With a file of `relax-hpc bench media --json` in place of RUN: its rows.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def events(run: Path, name: str) -> Iterator[dict[str, Any]]:
    """All events of a name, by time."""
    found = []
    for file in sorted(run.glob("events/*.jsonl")):
        every = map(json.loads, file.read_text().splitlines())
        found += [event for event in every if event["event"] == name]
    yield from sorted(found, key=lambda event: event["time"])


def numbers(event: dict[str, Any], *beginnings: str) -> str:
    """The numbers of an event whose names begin so."""
    return ", ".join(
        f"{key} {value:.3g}"
        for key, value in event.items()
        if isinstance(value, int | float) and key.startswith(beginnings)
    )


def of_run(run: Path) -> Iterator[str]:
    for step in events(run, "step"):
        counts = "num_trajectories", "num_tokens", "media", "grad_norm"
        yield f"step {step['step']}: {numbers(step, 'logprob_gap/', 'engine_gap/', *counts)}"
        yield f"  {numbers(step, 'time/', 'train/', 'memory/')}"
    for publish in events(run, "publish"):
        parts = "pause_", "num_bytes", "sync/total", "sync/received", "sync/gb_per_s"
        yield f"update {publish['version']}: {numbers(publish, *parts)}"
    for verify in events(run, "verify"):
        said = "equal" if verify["equal"] else "DIFFER"
        yield f"version {verify['version']}: digests of engine and trainer {said}"
    for error in events(run, "error"):
        yield f"error of {error['role']}: {error['message'][:1500]}"


def of_bench(file: Path) -> Iterator[str]:
    measured = json.loads(file.read_text())
    yield measured["machine"]
    for row in measured["rows"]:
        yield ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row.items()
            if value not in (None, "")
        )


if __name__ == "__main__":
    where = Path(sys.argv[1])
    print("\n".join((of_run if where.is_dir() else of_bench)(where)))
