"""`table.py OUT`: of all runs in OUT seconds a step, tokens/s and what the steps are made of.

Ours leave OUT/NAME.relax.jsonl (the trainer's events), verl's OUT/NAME.verl.jsonl (its own log
of metrics), run_trl.py OUT/NAME.trl.jsonl. Steps are from the end of one to the end of the next,
without the save that ours has at its end, since verl is told to save nothing, and without TRL's
evaluations; the first two do not count.
"""

import json
import statistics
import sys
from pathlib import Path

WARM_UP = 2
PARTS = {
    "relax": ("wait", "read", "forward_backward", "update", "publish", "lease", "save"),
    "verl": ("gen", "old_log_prob", "adv", "update_actor", "update_weights", "switch_wait"),
    "trl": ("generate",),
}


def steps(path, kind):
    """(time, tokens, seconds of parts) of each step."""
    found, clock = [], 0.0
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if kind == "relax":
            if row["event"] == "step":
                parts = {part: row.get(f"time/{part}") for part in PARTS[kind]}
                found.append((row["time"], row["num_tokens"], parts))
        elif kind == "trl":
            if "seconds" in row:
                clock += row["seconds"]
                found.append((clock, row["tokens"], {"generate": row["generate"]}))
        elif "timing_s/step" in (data := row["data"]):
            parts = {part: data.get(f"timing_s/{part}") for part in PARTS[kind]}
            found.append((row["time"], data["perf/total_num_tokens"], parts))
    return found


def show(path):
    name, kind, _ = path.name.rsplit(".", 2)
    found = steps(path, kind)
    warm = list(zip(found[WARM_UP - 1 :], found[WARM_UP:], strict=False))
    if not warm:
        return f"| {name} | {kind} | {len(found)} steps | | | |"
    walls = [after[0] - before[0] - (after[2].get("save") or 0.0) for before, after in warm]
    tokens = [after[1] for _, after in warm]
    parts = {
        part: statistics.median(values)
        for part in PARTS[kind]
        if (values := [after[2][part] for _, after in warm if after[2][part] is not None])
    }
    told = ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items() if seconds >= 0.01)
    seconds = f"{statistics.fmean(walls):.2f} ({min(walls):.2f} to {max(walls):.2f})"
    speed = f"{sum(tokens) / sum(walls):,.0f}"
    return f"| {name} | {kind} | {len(walls)} | {seconds} | {speed} | {told} |"


print("| work | who | steps | s/step, mean (range) | tokens/s | medians of parts [s] |")
print("|---|---|---|---|---|---|")
for each in sorted(Path(sys.argv[1]).glob("*.jsonl")):
    print(show(each))
