"""`media_figures.py RUN`: a run of a model that sees in few lines: gaps, digests, times, pauses."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

run = Path(sys.argv[1])


def events(name: str) -> Iterator[dict[str, Any]]:
    """All events of a name, by time."""
    found = []
    for file in sorted(run.glob("events/*.jsonl")):
        for line in file.read_text().splitlines():
            event = json.loads(line)
            found += [event] if event["event"] == name else []
    yield from sorted(found, key=lambda event: event["time"])


def shown(event: dict[str, Any], *beginnings: str) -> str:
    """The numbers of an event whose names begin so."""
    return ", ".join(
        f"{key} {value:.4g}"
        for key, value in event.items()
        if isinstance(value, int | float) and key.startswith(beginnings)
    )


for step in events("step"):
    print(f"step {step['step']}: {shown(step, 'logprob_gap/', 'engine_gap/', 'num_', 'grad_norm')}")
    print(f"  {shown(step, 'time/', 'train/', 'memory/', 'tokens_per_s')}")
for publish in events("publish"):
    print(f"update {publish['version']}: {shown(publish, 'pause_', 'num_bytes', 'sync/')}")
for verify in events("verify"):
    print(f"version {verify['version']}: digests {'equal' if verify['equal'] else 'DIFFER'}")
for name in ("media", "portion", "generated", "error"):
    for event in list(events(name))[-3:]:
        print(f"{name}: {json.dumps(event)[:400]}")
