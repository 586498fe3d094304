"""Shows a run on a live screen, for `relax-hpc watch`."""

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

from relax_hpc.launch import states
from relax_hpc.runs import report, status
from relax_hpc.runs.status import RunStatus, Watch
from relax_hpc.runtime.telemetry import history
from relax_hpc.runtime.telemetry.events import Event
from relax_hpc.runtime.telemetry.progress import duration, short
from relax_hpc.runtime.text import printable

_EVERY_S = 2.0
_PART = 10
"""Pause between looks, as a multiple of their duration."""
_CURVE = (64, 6)
"""Columns and lines of the curve."""
_LOWEST = 3
"""Least lines of a curve beside many held-out sets."""
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_COLOURS = {"RUNNING": "green", "COMPLETED": "green", "PENDING": "yellow", "CANCELLED": "yellow"}
_MOST_ENGINES = 12
_UNKNOWN = {"before": None, "newest": None}
_POINTS = 6
"""Newest points shown of a held-out set."""


def watch(run_dir: Path, console: Console) -> None:
    """Shows a run until it is over; only once without a terminal.

    The last screen stays on the terminal, also after Ctrl-C.
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
    found = status.gather(run_dir, seen.launches())
    run, events = status.judge(found), found.events
    parts: list[RenderableType] = [_head(run), *_curve(events), _components(run)]
    parts += [Text(printable(said)) for _, said in report.doing(run)]
    if run.engines:
        parts.append(_engines(run, events))
    return Group(*parts)


def _head(run: RunStatus) -> RenderableType:
    done = run.progress
    colour = _COLOURS.get(run.state, "red" if states.is_over(run.state) else "yellow")
    title = Text.assemble((printable(run.name), "bold"), " ", (run.state, f"bold {colour}"))
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
    warned = done.get("not_learned_from", {}).get("said", ())
    shown = [Text(printable(line)) for line in lines]
    shown += [Text(printable(line), style="yellow") for line in warned]
    return Panel(
        Group(bar, *shown),
        title=title,
        title_align="left",
        box=box.ROUNDED,
    )


def _results(done: dict[str, Any]) -> list[str]:
    said = []
    for name in ("reward", "loss"):
        if (value := done.get(f"last_{name}")) is not None:
            said.append(f"{name} {value:.3f}")
    sets = done.get("heldout_sets") or {"": done.get("heldout_loss", _UNKNOWN)}
    for name, each in sets.items():
        before, newest = each["before"], each["newest"]
        if before is not None and newest is not None:
            which = f" {name}" * (len(sets) > 1)
            first, last = (_several(each, name) for name in ("before", "newest"))
            said.append(f"held-out{which} {before:.3f}{first} -> {newest['value']:.3f}{last}")
    if cut := done.get("last_truncated"):
        said.append(f"{cut:.1%} cut off")
    if done["tokens_per_s"] is not None:
        said.append(f"trained {short(done['tokens_per_s'])} tok/s")
    if "max_staleness_seen" in done:
        said.append(f"staleness <= {done['max_staleness_seen']}")
    return said


def _several(of_set: dict[str, Any], name: str) -> str:
    """Describes the policies behind a held-out score, if they are several."""
    oldest, newest = of_set.get("policies", {}).get(name, (0, 0))
    return f" ({history.describe_policies(oldest, newest)})" if oldest < newest else ""


def _facts(run: RunStatus) -> list[str]:
    """Describes queue reason, duration, restarts and failure."""
    said = [f"job {run.job_id}"]
    if states.is_waiting(run.state):
        said += [f"({run.queue})"] if run.queue else []
        said += [each for each in (states.why(run.queue), states.when(run.start)) if each]
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
            heldout, (width, height) = list(_heldout(events)), _CURVE
            lines = drawn([v for _, v in points], width, max(height - len(heldout), _LOWEST))
            yield Text("\n".join([*lines, *heldout]))
            return


def _heldout(events: Sequence[Event]) -> Iterator[str]:
    """Formats the newest points of each held-out set, a line each."""
    points = [
        (p.name, history.describe_policies(p.version, p.version_max), p.reward)
        for p in history.heldout(events, every_set=True)
    ]
    points += [
        ("loss", str(e["step"]), float(e["loss"]))
        for e in history.heldout_losses(events)
        if e["loss"] is not None
    ]
    for name in dict.fromkeys(name for name, _, _ in points):
        own = [f"{value:.3f} ({step})" for of, step, value in points if of == name]
        yield printable(f"held-out {name}, after step: {' '.join(own[-_POINTS:])}")


def drawn(values: Sequence[float], width: int, height: int) -> list[str]:
    """Draws bars in `height` lines, at most `width` of them, with the range at the left. With more
    values each bar is a mean. Bars begin at 0, unless a value is below it."""
    width = min(width, len(values))
    cuts = [round(place * len(values) / width) for place in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(0.0, *means), max(0.0, *means)
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
        table.add_row(*_cells(each.name, each.state.lower(), tasks, each.nodes or "-"))
    return table


def _engines(run: RunStatus, events: Sequence[Event]) -> RenderableType:
    newest = {(event["id"], event["rank"]): event for event in history.loads(events)}
    loads = defaultdict[str, list[Event]](list)
    for (id, _), event in newest.items():
        loads[id].append(event)
    table = _table("engine", "state", "node", "weights", "sampled/s", "in flight")
    for row in run.engines[:_MOST_ENGINES]:
        figures = _load(loads[row.id]) if row.id in loads else ("-", "-")
        table.add_row(*_cells(row.id, row.state.lower(), row.node or "-", row.weights, *figures))
    if more := len(run.engines) - _MOST_ENGINES:
        table.caption = f"and {more} more" if more > 0 else None
    return table


def _load(of_tasks: Sequence[Event]) -> tuple[str, str]:
    """Tokens per second of an engine, and its requests, over all tasks."""
    speed = sum(event["num_tokens"] / event["seconds"] for event in of_tasks)
    return short(speed), str(sum(event["in_flight"] for event in of_tasks))


def _cells(*texts: str) -> list[Text]:
    """Table cells, with foreign text made harmless."""
    return [Text(printable(text)) for text in texts]


def _table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for head in heads:
        table.add_column(head, no_wrap=True, overflow="ellipsis")
    return table
