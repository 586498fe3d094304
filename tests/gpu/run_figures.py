"""`run_figures.py RUN`: what a run says of its steps, updates and comparisons, a line a figure."""

import json
import sys
from pathlib import Path
from statistics import median

run = Path(sys.argv[1])
events = [
    json.loads(line) for file in sorted((run / "events").iterdir()) for line in file.open()
]  # fmt: skip
steps = [each for each in events if each["event"] == "step" and each["role"] == "actor"]
shown = (
    "time/", "media", "tower", "logprob_gap", "engine_gap", "mfu", "sync/", "num_tokens", "tokens",
    "memory", "routing", "loss", "grad_norm",
)  # fmt: skip
print(f"{len(steps)} steps; from the second on, medians:")
for key in sorted({key for each in steps for key in each}):
    values = [each[key] for each in steps[1:] if isinstance(each.get(key), int | float)]
    if values and key.startswith(shown):
        print(f"  {key}: {median(values):.6g} ({min(values):.6g} to {max(values):.6g})")
for each in events:
    if each["event"] in ("engine_gap", "verify", "error", "engine", "engine_end", "skipped"):
        hidden = ("time", "rank", "pid", "members", "trainer", "url", "role")
        print(f"  {each['event']}:", {key: each[key] for key in each if key not in hidden})
    if each["event"] == "publish":
        print("  publish:", each["version"], {k: v for k, v in each.items() if k[:5] == "pause"})
