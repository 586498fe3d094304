"""Summarises a run in one dictionary, from events and the bus.

Counts of trajectories are cached per user, so that a growing bus is not read again.
"""

import hashlib
import json
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from relax_hpc.bus.audit import BusAudit, Tally
from relax_hpc.config import job_file
from relax_hpc.config.run import JobConfig, RunConfig, SftRunConfig
from relax_hpc.errors import LaunchError
from relax_hpc.roles.table import count_gpus
from relax_hpc.roles.training import unlearned
from relax_hpc.runs import changes
from relax_hpc.runs.scale.records import RUN_ENDED, ScaleState
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.files.storage import names
from relax_hpc.runtime.paths import BusPaths, RunPaths
from relax_hpc.runtime.telemetry import curve, history
from relax_hpc.runtime.telemetry.events import FREQUENT, Event, read_events
from relax_hpc.trainer.checkpoints.best import find_best

KEPT_RECORDS = 500
"""Least records of the plan for which counts are cached."""
_FORMAT = 2
_MOST_KEPT = 200


def folder() -> Path:
    """Returns the cache folder: `relax-hpc/counts` below the XDG cache folder."""
    said = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(said) if Path(said).is_absolute() else Path.home() / ".cache"
    return base / "relax-hpc" / "counts"


def count(bus: BusPaths) -> BusAudit:
    """Counts all trajectories so far.

    Raises:
        BusError: not a bus of this format, or a damaged log.
    """
    try:
        kept = folder() / f"{_name_of(bus)}.json"
    except (OSError, RuntimeError):  # RuntimeError: no home
        return Tally.of(bus).counts()
    before = _read(kept)
    tally = Tally.of(bus, before)
    if tally.num_new_records >= KEPT_RECORDS:
        with suppress(OSError, LaunchError):
            _keep(kept, tally)
    return tally.counts()


def _name_of(bus: BusPaths) -> str:
    """Returns a cache name unique to the run, even if another had the same path."""
    found = bus.header.stat()
    said = [str(bus.root.resolve()), found.st_ino, found.st_mtime_ns, _FORMAT]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def _read(path: Path) -> Any:  # noqa: ANN401 - `Tally.of` judges it
    """Reads this user's cached counts; None if missing, or if others may have written them."""
    try:
        permissions.check_own(path.parent, path)
        with path.open(encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError, LaunchError):
        return None


def _keep(path: Path, tally: Tally) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    permissions.check_own(path.parent)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:16]}.tmp")
    try:
        with os.fdopen(
            os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
        ) as file:
            json.dump(tally.to_record(), file, allow_nan=False, separators=(",", ":"))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    every = [path.parent / name for name in names(path.parent)]
    for old in sorted(every, key=lambda each: each.stat().st_mtime)[:-_MOST_KEPT]:
        old.unlink(missing_ok=True)


NOTHING = BusAudit(0, 0, 0, 0, 0, 0, 0)


def write(run_dir: Path) -> dict[str, Any]:
    """Writes summary.json and reward.png or loss.png to the run directory."""
    summary = summarize(run_dir)
    write_json(RunPaths(run_dir).summary, summary)
    (curve.plot_loss if "heldout_loss" in summary else curve.plot)(run_dir)
    return summary


def summarize(run_dir: Path) -> dict[str, Any]:
    """Summarises the run so far; None for missing values.

    Raises:
        ConfigError: not a run directory.
        BusError: the bus is damaged.
    """
    paths = RunPaths(run_dir)
    config = job_file.read_resolved(paths.config)
    return sum_up(paths, config, read_events(paths.events_folder, but=FREQUENT))


def sum_up(paths: RunPaths, config: JobConfig, events: Sequence[Event]) -> dict[str, Any]:
    """Does as `summarize`, with job and events already read."""
    done = history.steps(events)
    progress = _progress(events, config.num_steps)
    progress["announced_ends"] = _list_announced_ends(paths, events)
    progress["gpu_hours"] = _cost(config, events, progress["eta_s"])
    progress["changes"] = [_change(each, events) for each in changes.of_run(paths)]
    if isinstance(config, SftRunConfig):
        return progress | _of_sft(paths, events, done, config.num_steps)
    assert isinstance(config, RunConfig)
    last = done[-1] if done else None
    counts = count(paths.bus) if paths.bus.header.exists() else NOTHING
    seen = [int(e["staleness/max"]) for e in done if "staleness/max" in e]
    return {
        **progress,
        **_heldout(events, config.num_steps),
        "best_policy": _best(paths, config),
        "trajectories": {
            "committed": counts.committed,
            "trained": sum(e.get("num_trajectories", 0) for e in done),
            "trained_twice": counts.planned_twice,
            "dropped": {
                "duplicates": counts.duplicates,
                "over_age": counts.over_age,
                "skipped": counts.skipped - counts.retired,
                "retired": counts.retired,
                "damaged": counts.damaged,
                "unaccounted": counts.dropped,
            },
        },
        "rows_left_out": _rows_left_out(paths),
        "scored": _count_scored(events),
        "max_staleness_seen": max([counts.max_staleness, *seen]),
        "weight_versions": (versions := _weight_versions(events)),
        "engines_removed": _list_removed(paths, config, versions),
        "engines_joined_by": _describe_joins(events),
        "checksums_equal": _checksums_equal(events),
        "last_reward": last.get("reward/mean") if last else None,
        "last_truncated": last.get("response/truncated") if last else None,
        "not_learned_from": unlearned.summarize(done, config),
        "reward_errors": _reward_errors(events, heldout=False),
        "heldout_reward_errors": _reward_errors(events, heldout=True),
    }


def _change(change: changes.Change, events: Sequence[Event]) -> dict[str, Any]:
    """Describes a resume's changes, and the first step trained with them; None before it."""
    began = math.inf if change.time is None else change.time
    since = (e["step"] for e in events if e["event"] == "step" and e["time"] > began)
    return {**change.to_json(), "first_step": next(since, None), "lines": change.lines()}


def _best(paths: RunPaths, config: JobConfig) -> dict[str, Any] | None:
    """Describes the best policy that has a checkpoint; None where nobody asked for it."""
    found = find_best(paths, config)
    return found and {**found._asdict(), "folder": str(found.folder.relative_to(paths.root))}


def _count_scored(events: Sequence[Event]) -> dict[str, int]:
    found = dict[str, int]()
    for event in events:
        if event["event"] == "scored":
            found[event["role"]] = found.get(event["role"], 0) + event["num_trajectories"]
    return found


def _rows_left_out(paths: RunPaths) -> int:
    try:
        with paths.left_out.open(encoding="utf-8") as file:
            return sum(1 for _ in file)
    except FileNotFoundError:
        return 0


def _progress(events: Sequence[Event], num_steps: int) -> dict[str, Any]:
    """Describes the progress; after a resume, the highest step done so far."""
    last, done = history.present_step(events), history.steps(events)
    pace = history.seconds_per_step(done)
    return {
        "steps_done": last,
        "num_steps": num_steps,
        "parameters": _parameters(events),
        "last_step_time": newest["time"] if (newest := history.newest(events, "step")) else None,
        "tokens_per_s": history.tokens_per_s(done),
        "eta_s": None if pace is None else pace * (num_steps - last),
        "redone": _redone(events),
        "restarts": _restarts(events),
        "requeues": _requeues(events),
        "torn_checkpoints": [
            {key: event[key] for key in ("time", "role", "step", "message")}
            for event in events
            if event["event"] == "checkpoint_torn"
        ],
    }


def _cost(
    config: JobConfig, events: Sequence[Event], eta_s: float | None
) -> dict[str, float | None] | None:
    """Describes the GPU-hours of all attempts, and those to go at the present pace; None without
    GPUs."""
    gpus = count_gpus(config)
    used_s = history.elapsed_s(history.attempts(events), math.inf)
    left = None if eta_s is None else eta_s * gpus / 3600
    return {"used": used_s * gpus / 3600, "left": left} if gpus else None


def _parameters(events: Sequence[Event]) -> dict[str, int] | None:
    """Counts trained and frozen parameters."""
    newest = history.newest(events, "parameters")
    return newest and {key: newest[key] for key in ("trained", "fixed")}


def _redone(events: Sequence[Event]) -> dict[str, int]:
    """Counts work lost at ends of the run: steps and tokens trained again; tokens of unfinished
    responses kept, sampled again, and lost at announced ends."""
    times: dict[int, int] = {}
    num_tokens = 0
    for event in events:
        if event["event"] == "step":
            num_tokens += event.get("num_tokens", 0) * (event["step"] in times)
            times[event["step"]] = times.get(event["step"], 0) + 1
    continued = [event for event in events if event["event"] == "continued"]
    return {
        "steps": sum(each - 1 for each in times.values()),
        "tokens_trained_again": num_tokens,
        "tokens_continued": sum(event["num_tokens"] for event in continued),
        "tokens_sampled_again": sum(event["num_dropped"] for event in continued),
        "tokens_lost": sum(event.get("num_damaged", 0) for event in continued)
        + sum(e.get("num_lost", 0) for e in events if e["event"] == "unfinished"),
    }


def _list_announced_ends(paths: RunPaths, events: Sequence[Event]) -> list[dict[str, Any]]:
    said = {attempt: read_json(path) or {} for attempt, path in paths.all_endings().items()}
    return [end._asdict() for end in history.sum_up_ends(said, events)]


def _restarts(events: Sequence[Event]) -> dict[str, int]:
    """Counts restarts of a step by component, within attempts of a job."""
    starts: dict[tuple[str, str, int], int] = {}
    for event in events:
        if event["event"] == "start":
            key = (event["role"], str(event.get("attempt")), int(event.get("step_from", 0)))
            starts[key] = max(starts.get(key, 1), int(event.get("start", 1)))
    found: dict[str, int] = {}
    for (component, _, _), start in starts.items():
        if start > 1:
            found[component] = found.get(component, 0) + start - 1
    return found


def _requeues(events: Sequence[Event]) -> int:
    """Counts Slurm's requeues; an attempt is "JOB.COUNT"."""
    newest: dict[str, int] = {}
    for event in events:
        if event["event"] == "start":
            job, _, count = str(event.get("attempt")).rpartition(".")
            newest[job] = max(newest.get(job, 0), int(count) if count.isdigit() else 0)
    return sum(newest.values())


def _of_sft(
    paths: RunPaths, events: Sequence[Event], done: Sequence[Event], num_steps: int
) -> dict[str, Any]:
    """Returns what supervised fine-tuning has instead of rewards and a bus."""
    measured = history.heldout_losses(events)
    after = [event["loss"] for event in measured if event["step"] == num_steps]
    newest = measured[-1] if measured and measured[-1]["step"] else None
    exported = paths.exported_model
    return {
        "last_loss": done[-1].get("loss") if done else None,
        "heldout_loss": {
            "before": measured[0]["loss"] if measured else None,
            "after": after[-1] if after else None,
            "newest": newest and {"step": newest["step"], "value": newest["loss"]},
        },
        "documents": {
            "trained": sum(e.get("num_documents", 0) for e in done),
            "truncated": sum(e.get("data/truncated", 0) for e in done),
            "left_out": sum(e.get("data/left_out", 0) for e in done),
            "empty_steps": sum(e.get("num_trained_tokens") == 0 for e in done),
        },
        "tokens": {
            "all": sum(e.get("num_tokens", 0) for e in done),
            "trained": sum(e.get("num_trained_tokens", 0) for e in done),
        },
        "exported_model": str(exported) if exported.exists() else None,
    }


def _heldout(events: Sequence[Event], num_steps: int) -> dict[str, Any]:
    """Scores of the job's first set, and by name of each."""
    named = {e["name"]: e["headline"] for e in events if e["event"] == "eval"}
    sets = {
        name: _of_set([e for e in events if e["event"] == "eval" and e["name"] == name], num_steps)
        for name in sorted(named, key=lambda name: not named[name])
    }
    first = next((each for name, each in sets.items() if named[name]), _of_set([], num_steps))
    return {f"heldout_{key}": value for key, value in first.items()} | {"heldout_sets": sets}


def _of_set(events: Sequence[Event], num_steps: int) -> dict[str, Any]:
    """First score, the last policy's, and the newest after the first; by these names, the policies
    that sampled and the part of the samples that was cut off."""
    points = history.heldout(events, every_set=True)
    before = [p for p in points if p.when == "before"]
    # Of the run's last step: it may have had fewer steps before. Older versions wrote 0.
    at_end = [e for e in events if e["number"] in (0, num_steps)]
    after = [p for p in history.heldout(at_end, every_set=True) if p.when == "after"]
    since = [p for p in points if p.when != "before"]
    told = {"before": before[:1], "after": after[-1:], "newest": since[-1:]}
    return {
        "before": before[0].reward if before else None,
        "after": after[-1].reward if after else None,
        "newest": {"step": since[-1].version, "value": since[-1].reward} if since else None,
        "policies": {n: [p.version, p.version_max] for n, found in told.items() for p in found},
        "truncated": {n: p.truncated for n, found in told.items() for p in found},
    }


def _reward_errors(events: Sequence[Event], *, heldout: bool) -> dict[str, Any] | None:
    """Counts failed rewards, of held-out or training prompts; None if none failed."""
    every = [event for event in events if event["event"] == "reward_errors"]
    said = [event for event in every if event.get("heldout", False) == heldout]
    if not said:
        return None
    return {
        "errors": sum(event["num_errors"] for event in said),
        "samples": sum(event["num_samples"] for event in said),
        "first": said[0]["first"],
    }


def _weight_versions(events: Sequence[Event]) -> dict[str, int]:
    """Newest policy the trainer published, and the newest each engine is known to hold."""
    versions: dict[str, int] = {}
    for event in events:
        if event["event"] == "publish":
            versions["trainer"] = event["version"]
        if event["event"] in ("publish", "loaded", "verify"):
            versions |= dict.fromkeys(event["members"], event["version"])
    return versions


def _describe_joins(events: Sequence[Event]) -> str:
    """Says how engines joined the newest group of weights; "" if none was formed."""
    formed = [event["invited"] for event in events if event.get("invited")]
    ways = sorted(set(formed[-1].values())) if formed else []
    return ", ".join(way.replace("mpi", "MPI").replace("http", "HTTP") for way in ways)


def _list_removed(paths: RunPaths, config: JobConfig, versions: Mapping[str, int]) -> list[str]:
    """Names engines that had weights and are gone: removed, or of an earlier start."""
    extras = state.extras if (state := ScaleState.read(paths)) else {}
    stay = {name for name, e in extras.items() if not e.ended or e.reason == RUN_ENDED}
    if isinstance(config, RunConfig):
        stay |= {"trainer", *(id for pool in config.engines for id in config.engines_in(pool))}
    return [name for name in versions if name not in stay]


def _checksums_equal(events: Sequence[Event]) -> bool | None:
    """Returns the last comparison of every engine; None if there was none."""
    found = dict[str, bool]()
    for event in events:
        if event["event"] == "verify":
            found |= dict.fromkeys(event["members"] or [""], _is_equal(event))
    return all(found.values()) if found else None


def _is_equal(verify: Event) -> bool:
    """A trainer that knows the engines' digests reports the result itself."""
    if "equal" in verify:
        return bool(verify["equal"])
    return set(verify["members"].values()) == {verify["trainer"]}
