"""A run as a screen: what `relax-hpc watch` shows, and shows again as it changes."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from relax_hpc.launch import pending, states
from relax_hpc.paths import RunPaths
from relax_hpc.printable import printable
from relax_hpc.runs import engine_rows, status
from relax_hpc.runs.status import RunStatus
from relax_hpc.runs.watching import Watch
from relax_hpc.telemetry import history
from relax_hpc.telemetry.events import Event, events_of_state
from relax_hpc.telemetry.progress import duration, short

_EVERY_S = 2.0
_PART = 10
"""A look that takes long comes that many times its duration after the one before."""
_CURVE = (64, 6)
"""Columns and lines of the curve."""
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_COLOURS = {"RUNNING": "green", "COMPLETED": "green", "PENDING": "yellow", "CANCELLED": "yellow"}
_MOST_ENGINES = 12


def watch(run_dir: Path, console: Console) -> None:
    """Shows a run until it is over; where there is no terminal, once.

    What was shown last stays on the terminal, also after Ctrl-C.
    """
    seen = Watch(run_dir)
    if not console.is_terminal:
        console.print(frame(run_dir, seen))
        return
    shown: RenderableType = ""
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                begin = time.monotonic()
                shown = frame(run_dir, seen)
                live.update(shown, refresh=True)
                if seen.is_over():
                    return
                time.sleep(max(_EVERY_S, _PART * (time.monotonic() - begin)))
    finally:
        console.print(shown)


def frame(run_dir: Path, seen: Watch) -> RenderableType:
    """A run as it is now."""
    events = events_of_state(RunPaths(run_dir.absolute()).events_folder)
    run = status.collect(run_dir, found=seen.launches(), events=events)
    parts: list[RenderableType] = [_head(run), *_curve(events), _components(run)]
    if run.engines:
        parts.append(_engines(run, events))
    return Group(*parts)


def _head(run: RunStatus) -> RenderableType:
    done = run.progress
    colour = _COLOURS.get(run.state, "red" if states.is_over(run.state) else "yellow")
    title = Text.assemble((run.name, "bold"), " ", (run.state, f"bold {colour}"))
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    steps, total = done["steps_done"], done["num_steps"]
    left = "" if run.state != "RUNNING" or done["eta_s"] is None else duration(done["eta_s"])
    bar.add_row(
        f"step {steps}/{total}", ProgressBar(total=total, completed=steps), left and f"{left} to go"
    )
    lines = [" · ".join(each) for each in (_results(done), _facts(run)) if each]
    return Panel(
        Group(bar, *(Text(printable(line)) for line in lines)),
        title=title,
        title_align="left",
        box=box.ROUNDED,
    )


def _results(done: dict[str, Any]) -> list[str]:
    said = []
    for name in ("reward", "loss"):
        if (value := done.get(f"last_{name}")) is not None:
            said.append(f"{name} {value:.3f}")
    before, newest = done.get("heldout_before"), done.get("heldout_newest")
    if before is not None and newest is not None:
        said.append(f"held-out {before:.3f} -> {newest['value']:.3f}")
    if done["tokens_per_s"] is not None:
        said.append(f"{short(done['tokens_per_s'])} tokens/s")
    if "max_staleness_seen" in done:
        said.append(f"staleness {done['max_staleness_seen']} at most")
    return said


def _facts(run: RunStatus) -> list[str]:
    """Why it waits, how long it runs, what was started again, why it failed."""
    said = [f"job {run.job_id}"]
    if states.is_waiting(run.state):
        said += [f"({run.queue})"] if run.queue else []
        said += [each for each in (pending.why(run.queue), pending.when(run.start)) if each]
    elif run.state == "RUNNING" and run.start is not None:
        said.append(f"running for {duration(max(0.0, time.time() - run.start))}")
        said += [] if run.left_s is None else [f"time limit in {duration(run.left_s)}"]
    said += [f"{name} started again {n}x" for name, n in run.progress["restarts"].items()]
    if run.progress["requeues"]:
        said.append(f"requeued {run.progress['requeues']}x")
    return [*said, *(each for each in (run.silence, run.reason) if each)]


def _curve(events: Sequence[Event]) -> Iterator[RenderableType]:
    """Draws the reward of each step, or the loss; nothing before the second."""
    done = history.steps(events)
    for key, name in (("reward/mean", "reward"), ("loss", "loss")):
        points = [(int(e["step"]), float(e[key])) for e in done if e.get(key) is not None]
        if len(points) > 1:
            yield Text(f"{name}, steps {points[0][0]} to {points[-1][0]}", style="bold")
            yield Text("\n".join(drawn([value for _, value in points], *_CURVE)))
            return


def drawn(values: Sequence[float], width: int, height: int) -> list[str]:
    """Draws bars in `height` lines, at most `width` of them, with the range at the left; of more
    values than that each bar is a mean."""
    width = min(width, len(values))
    cuts = [round(place * len(values) / width) for place in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    steps = [round((v - low) / ((high - low) or 1.0) * (height * 8 - 1)) + 1 for v in means]
    lines = []
    for line in range(height):
        floor = (height - 1 - line) * 8
        bars = "".join(_EIGHTHS[min(max(step - floor, 0), 8)] for step in steps)
        label = {0: f"{high:.3f}", height - 1: f"{low:.3f}"}.get(line, "")
        lines.append(f"{label:>8} {bars}".rstrip())
    return lines


def _components(run: RunStatus) -> RenderableType:
    table = _table("role", "state", "tasks done", "nodes")
    for each in run.components:
        tasks = f"{each.finished_tasks} of {each.tasks}"
        table.add_row(each.name, each.state.lower(), tasks, each.nodes or "-")
    return table


def _engines(run: RunStatus, events: Sequence[Event]) -> RenderableType:
    newest = {(event["id"], event["rank"]): event for event in history.loads(events)}
    loads = defaultdict[str, list[Event]](list)
    for (id, _), event in newest.items():
        loads[id].append(event)
    table = _table("engine", "state", "node", "weights", "tokens/s", "in flight")
    for row in run.engines[:_MOST_ENGINES]:
        figures = _load(loads[row.id]) if row.id in loads else ("-", "-")
        table.add_row(
            row.id, row.state.lower(), row.node or "-", engine_rows.weights(row), *figures
        )
    if more := len(run.engines) - _MOST_ENGINES:
        table.caption = f"and {more} more" if more > 0 else None
    return table


def _load(of_tasks: Sequence[Event]) -> tuple[str, str]:
    """Tokens a second that an engine samples, and the requests in it, of all who ask it."""
    speed = sum(event["num_tokens"] / event["seconds"] for event in of_tasks)
    return short(speed), str(sum(event["in_flight"] for event in of_tasks))


def _table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for head in heads:
        table.add_column(head, no_wrap=True, overflow="ellipsis")
    return table
