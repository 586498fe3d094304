"""Figures of a mode, from the events of its run: steps, and what both sides waited for."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relax_hpc.bench.modes.jobs import COLOCATE, Mode, Work
from relax_hpc.paths import RunPaths
from relax_hpc.records import write_json
from relax_hpc.telemetry import history, timeline
from relax_hpc.telemetry.events import Event, read_events


@dataclass(frozen=True)
class Figures:
    """One mode; seconds are of a step, the mean unless it says otherwise."""

    mode: str
    steps: int = 0
    """Steps that were measured."""
    num_tokens: int = 0
    """Tokens that were trained on in them, prompts included."""
    median_s: float = 0.0
    """From the end of a step to that of the next; the median."""
    step_s: float = 0.0
    """Likewise, the mean: the time of the same work in every mode."""
    trained_per_s: float = 0.0
    """Tokens per second."""
    sampled_per_s: float = 0.0
    """Tokens per second, of the responses that were trained on."""
    wait_data_s: float = 0.0
    """The trainer waits for a batch."""
    wait_update_s: float = 0.0
    """The trainer waits for engines to have the weights."""
    wait_lease_s: float = 0.0
    """The trainer waits for the GPUs."""
    engines_idle_s: float = 0.0
    """All that may be sampled is, or engines sleep: they wait for the trainer's next policy."""
    engines_paused_s: float = 0.0
    """Engines that sample stand still for new weights."""
    first_step_s: float = 0.0
    """From the first sign of a task to the end of step 1."""
    failure: str = ""
    """Why there are no figures; empty if there are."""


def read(mode: Mode, work: Work, prompts_per_step: int, run_dir: Path) -> Figures:
    """The figures of a run that has done all steps that are measured."""
    events = read_events(RunPaths(run_dir).events_folder)
    ends = {event["step"]: event["time"] for event in history.steps(events)}
    steps = [e for e in history.steps(events) if work.warm_up < e["step"] <= work.last]
    begin, end = ends[work.warm_up], ends[work.last]
    seconds, count = end - begin, work.steps
    gaps = [ends[event["step"]] - ends[event["step"] - 1] for event in steps]

    def mean(name: str) -> float:
        spent: list[float] = [event.get(f"time/{name}", 0.0) for event in steps]
        return sum(spent) / count

    seen = timeline.read(run_dir, first=work.warm_up + 1, last=work.last)
    sampled = sum(event["response/mean"] * event["num_trajectories"] for event in steps)
    idle = list(_idle(events, mode.lag, prompts_per_step, end))
    pauses = [[(p.start, p.start + p.seconds) for p in each] for each in seen.pauses.values()]
    paused = sum(_overlap(pause, (begin, end)) - _overlaps(pause, idle)
                 for each in pauses for pause in each)  # fmt: skip
    num_tokens = sum(event["num_tokens"] for event in steps)
    return Figures(
        mode.name,
        steps=count,
        num_tokens=num_tokens,
        median_s=statistics.median(gaps),
        step_s=seconds / count,
        trained_per_s=num_tokens / seconds,
        sampled_per_s=sampled / seconds,
        wait_data_s=mean("wait"),
        wait_update_s=mean("publish"),
        wait_lease_s=mean("lease"),
        engines_idle_s=_overlaps((begin, end), idle) / count,
        engines_paused_s=max(paused, 0.0) / max(len(pauses), 1) / count,
        first_step_s=ends[1] - events[0]["time"],
    )


Span = tuple[float, float]


def _idle(events: Sequence[Event], lag: int, prompts_per_step: int, end: float) -> Iterator[Span]:
    """Times in which every group that may be sampled is committed, up to `end`.

    The batch of step b may be sampled once there is version b - 1 - lag.
    """
    committed, version, since = 0, 0, None
    for event in events:
        if event["time"] > end:
            break
        if event["event"] == "shard":
            committed += event["num_groups"]
        elif event["event"] == "publish":
            version = max(version, event["version"])
        else:
            continue
        is_idle = committed >= prompts_per_step * (version + 1 + lag)
        if is_idle and since is None:
            since = event["time"]
        elif not is_idle and since is not None:
            yield since, event["time"]
            since = None
    if since is not None:
        yield since, end


def _overlap(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def _overlaps(one: Span, others: Sequence[Span]) -> float:
    """The overlap with spans that have none among themselves."""
    return sum(_overlap(one, other) for other in others)


def speedup(figures: Figures, results: Sequence[Figures]) -> float | None:
    """How many times faster than colocated the same steps were; None if nobody can say."""
    base = next((each for each in results if each.mode == COLOCATE and not each.failure), None)
    same = base is not None and base.num_tokens == figures.num_tokens
    return base.step_s / figures.step_s if base and same and not figures.failure else None


def markdown(results: Sequence[Figures]) -> str:
    """A table of the results, a failure being a row as well."""
    lines = [
        "| mode | s/step, median | mean | x colocate | tokens/s trained | sampled "
        "| trainer waits for data [s] | update | lease | engines wait for the trainer [s] | update "
        "| first step [s] | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    work = next((each.num_tokens for each in results if not each.failure), 0)
    for each in results:
        if each.failure:
            cells = [""] * 11 + [f"failed: {each.failure.replace('|', '/')}"]
        else:
            factor = speedup(each, results)
            cells = [
                f"{each.median_s:.2f}", f"{each.step_s:.2f}",
                "" if factor is None else f"{factor:.2f}",
                f"{each.trained_per_s:,.0f}", f"{each.sampled_per_s:,.0f}",
                f"{each.wait_data_s:.2f}", f"{each.wait_update_s:.2f}", f"{each.wait_lease_s:.2f}",
                f"{each.engines_idle_s:.2f}", f"{each.engines_paused_s:.2f}",
                f"{each.first_step_s:.0f}",
                "" if each.num_tokens == work else f"other work: {each.num_tokens:,} tokens",
            ]  # fmt: skip
        lines.append(f"| {each.mode} | {' | '.join(cells)} |")
    return "\n".join(lines)


def save(path: Path, results: Sequence[Figures], work: Work, machine: str) -> None:
    """Writes `{"machine", "work", "modes"}`, ratios included."""
    shown: dict[str, Any] = {
        "machine": machine,
        "work": work._asdict() | {"lengths": work.lengths._asdict()},
        "modes": [asdict(each) | {"times_colocate": speedup(each, results)} for each in results],
    }
    write_json(path, shown)
