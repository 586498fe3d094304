"""Computes the figures of a run's evaluations from their samples."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from relax_hpc.algorithms.statistics import (
    Figure,
    ScoredResponse,
    Statistics,
    by_prompt,
    by_source,
    statistics,
)
from relax_hpc.environments.rewards.answers import final_text, last_box, last_line
from relax_hpc.environments.rewards.equality import quantity, tidy
from relax_hpc.errors import ConfigError, nearest
from relax_hpc.runtime.files.records import finite
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import history
from relax_hpc.runtime.telemetry.events import FREQUENT, Event, read_events
from relax_hpc.runtime.text import align_lines

_MOST_CHARACTERS = 2000
"""Longest answer that is compared."""
WHENS = ("before", "during", "after")


class Evaluation(NamedTuple):
    """One evaluation of a held-out set, over all tasks with samples."""

    name: str
    when: str
    """before, during or after training."""
    version: int
    """Oldest policy that sampled a token; -1 if there is none."""
    version_max: int
    """Newest policy that sampled a token."""
    missing_tasks: int
    """Tasks without samples so far."""
    reward_errors: int
    """Samples whose reward failed."""
    masked: int
    """Failed samples excluded from all figures, with reward.on_error = "mask"."""
    all: Statistics
    """Figures of the whole set."""
    subsets: dict[str, Statistics]
    """Figures by `source`; empty if there is only one."""


def collect(
    run_dir: Path, *, ks: Sequence[int] = (), name: str | None = None, right: float = 1.0
) -> list[Evaluation]:
    """Returns the evaluations of a run, by set and policy.

    Args:
        ks: of pass@k, pass^k and maj@k; default is 1 and the samples per prompt.
        name: only this set.
        right: score from which on a sample is right.

    Raises:
        ConfigError: no evaluation, or none of that set, is kept; a k exceeds the samples of a
            prompt; a file of samples is damaged.
    """
    paths = RunPaths(run_dir)
    tasks = history.shares_of(read_events(paths.events_folder, but=FREQUENT))
    names = {found for found, _, _ in tasks}
    if name is not None and name not in names:
        there = ", ".join(sorted(names)) or "none yet"
        hint = nearest(name, names) or f"there are: {there}"
        raise ConfigError(f"--set {name}: no evaluation of it is in {run_dir}; {hint}")
    found = [
        evaluation
        for (each, when, _), events in tasks.items()
        if name in (None, each)
        and (evaluation := _evaluation(paths, each, when, events, ks, right)) is not None
    ]
    if not found:
        raise ConfigError(f"{run_dir}: keeps no samples of an evaluation that have a score (yet)")
    return sorted(found, key=lambda e: (e.name, e.version, WHENS.index(e.when)))


def text(evaluations: Sequence[Evaluation]) -> str:
    """Formats a table per set: a row per evaluation, and one per subset below it."""
    lines = list[str]()
    for name in dict.fromkeys(evaluation.name for evaluation in evaluations):
        of_set = [evaluation for evaluation in evaluations if evaluation.name == name]
        ks = sorted({k for evaluation in of_set for k in evaluation.all.pass_at})
        rows = [["policy", "when", "prompts", "samples", "score", *_titles(ks), "truncated"]]
        for each in of_set:
            rows.append([_policy(each), each.when, *_cells(each.all, ks)])
            rows += [
                ["", f"  {source or '-'}", *_cells(s, ks)] for source, s in each.subsets.items()
            ]
        table = [f"  {line}" for line in align_lines(rows, left=2)]
        lines += [name, *table, *_remarks(of_set)]
    return "\n".join(lines)


def to_json(evaluations: Sequence[Evaluation]) -> str:
    """Returns a list with an object per evaluation; non-finite numbers become null."""
    said, _ = finite({"evaluations": [_plain(each) for each in evaluations]})
    return json.dumps(said["evaluations"], indent=2, allow_nan=False)


def final_answer(response: str, *, in_thought: bool = False) -> str | None:
    """Returns the answer that a response votes for; None without one.

    It is the last box after the thought, or else the text after the last `Answer:`. Numbers compare
    by value, with or without a unit; other answers without spaces.
    """
    final = final_text(response, in_thought)
    found = last_box(final)
    found = last_line(final) if found is None else found
    if found is None:
        return None
    value = quantity(found)
    return "".join(tidy(found[:_MOST_CHARACTERS]).split()) if value is None else str(value)


def _evaluation(
    paths: RunPaths,
    name: str,
    when: str,
    tasks: dict[int, Event],
    ks: Sequence[int],
    right: float,
) -> Evaluation | None:
    """Returns the figures so far; None without samples."""
    files = {
        rank: paths.eval_rows(name, event["version"], when, event["number"], rank)
        for rank, event in tasks.items()
        if event["num_samples"] + event.get("num_masked", 0)
    }
    there = {rank: path for rank, path in files.items() if path.exists()}
    rows = [row for path in there.values() for row in _read(path)]
    samples = [row.sample for row in rows if row.sample is not None]
    if not samples:
        return None
    sources = by_source(samples)
    ks = sorted(set(ks)) or sorted({1, min(map(len, by_prompt(samples).values()))})
    versions = [v for rank in there if (v := tasks[rank]["version"]) >= 0]
    try:
        return Evaluation(
            name=name,
            when=when,
            version=min(versions, default=-1),
            version_max=max(tasks[rank]["version_max"] for rank in there),
            missing_tasks=len(files) - len(there) + history.count_missing(tasks),
            reward_errors=sum(row.failed for row in rows),
            masked=len(rows) - len(samples),
            all=statistics(samples, ks, right=right),
            subsets={source: statistics(each, ks, right=right) for source, each in sources.items()}
            if len(sources) > 1
            else {},
        )
    except ConfigError as error:
        raise ConfigError(f"{name}, {when}: {error}") from None


class _HeldoutRow(NamedTuple):
    sample: ScoredResponse | None
    """None without a score."""
    failed: bool


def _read(path: Path) -> list[_HeldoutRow]:
    rows = []
    for number_of_line, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            found = None if row["score"] is None else _sample(row)
            rows.append(_HeldoutRow(found, bool(row.get("failed", False))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}, line {number_of_line}: is no sample of an evaluation ({error!r}); "
                "remove the file to leave this task's samples out"
            ) from None
    return rows


def _sample(row: dict[str, Any]) -> ScoredResponse:
    return ScoredResponse(
        prompt=int(row["prompt"]),
        score=float(row["score"]),
        is_truncated=row["finish"] == "length",
        answer=_answer(row["texts"], in_thought=bool(row.get("in_thought", False))),
        source=row.get("source", ""),
    )


def _answer(texts: Sequence[str], *, in_thought: bool) -> str | None:
    return final_answer(texts[-1], in_thought=in_thought) if texts else None


def _titles(ks: Sequence[int]) -> list[str]:
    return [f"pass@{k}" for k in ks] + [title for k in ks if k > 1 for title in _of_several(k)]


def _of_several(k: int) -> tuple[str, str]:
    return f"pass^{k}", f"maj@{k}"


def _cells(found: Statistics, ks: Sequence[int]) -> list[str]:
    several = [k for k in ks if k > 1]
    figures = [found.pass_at.get(k) for k in ks]
    figures += [of.get(k) for k in several for of in (found.pass_all, found.majority_at)]
    counts = [str(found.num_prompts), str(found.num_samples)]
    return [*counts, *map(_figure, [found.mean, *figures, found.truncated])]


def _figure(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    return f"{figure.value:.3f}" + ("" if figure.error is None else f" ± {figure.error:.3f}")


def _policy(found: Evaluation) -> str:
    return history.describe_policies(found.version, found.version_max)


def _remarks(evaluations: Sequence[Evaluation]) -> list[str]:
    missing = sum(evaluation.missing_tasks for evaluation in evaluations)
    draws = max(d for e in evaluations for d in [0.0, *e.all.majority_draws.values()])
    lines = [f"  tasks whose samples are missing: {missing}"] if missing else []
    for each in evaluations:
        if each.reward_errors:
            masked = f", {each.masked} of them in no figure" if each.masked else ""
            which = f"{each.when}, policy {_policy(each)}"
            lines.append(f"  rewards that failed, {which}: {each.reward_errors}{masked}")
    return [*lines, f"  maj@k by draws, which add ± {draws:.4f} at most"] if draws else lines


def _plain(value: Any) -> Any:  # noqa: ANN401
    """Converts named tuples to objects, which JSON would write as lists."""
    if isinstance(value, Statistics | Figure | Evaluation):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: _plain(inside) for key, inside in value.items()}
    return value
