"""A run in words: what `submit --follow` and `status` print."""

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from relax_hpc import errors
from relax_hpc.hangs.doing import Doing
from relax_hpc.launch import pending, states
from relax_hpc.paths import RunPaths
from relax_hpc.printable import argument, printable
from relax_hpc.runs import engine_rows, logs
from relax_hpc.runs.quiet import Quiet
from relax_hpc.runs.status import RunStatus
from relax_hpc.runs.watching import Watch
from relax_hpc.telemetry import ends
from relax_hpc.telemetry.progress import duration, short

_SHOWN = re.compile(r" relax_hpc\.(?:roles|checkpoints)\.[^:]*: (.*)")
"""Loggers whose lines tell the story of a run; the rest is in the logs."""
_POLL_S = 0.5
_MOST_TORN = 3
_SETUP = ": setup ended with exit code "
_ERROR = re.compile(r"[^:]+: [^:]+: ([a-z_]+\.)*(\w+): ")
"""The begin of why a run failed: how a component ended, the task, its error."""


def progress(run_dir: Path) -> Iterator[str]:
    """The story of a run as it happens, until it is over; also what it waits for in the queue, and
    now and then what it is at while there is no story."""
    watch, found = Watch(run_dir), logs.Logs(run_dir)
    quiet = Quiet(run_dir, watch)
    while True:
        over = watch.is_over()  # asked first, so that lines written before it became true are read
        said = [watch.news()]
        for line in found.read(to_the_end=over):
            told = _SHOWN.search(line.text)
            said.append(line.text if line.source == "job" else told[1] if told else "")
        said = [printable(line) for line in said if line]
        yield from said
        if over:
            return
        if said:
            quiet.end()
        elif line_of_status := quiet.line():
            yield line_of_status
        time.sleep(_POLL_S)


def text(run: RunStatus) -> str:
    """Components and achievements, a line each."""
    lines = [f"{run.name}: {run.state}" + (f" ({run.queue})" if run.queue else "")]
    width = max([9, *(len(c.name) for c in run.components)])
    lines += [
        f"  {c.name:<{width}} {c.job_id}  {c.state.lower()}, "
        f"{c.finished_tasks} of {c.tasks} tasks done" + (f", on {c.nodes}" if c.nodes else "")
        for c in run.components
    ]
    lines += [
        f"  {row.id:<{width}} engine of {row.pool}, {row.state.lower()}"
        + (f" on {row.node}" if row.node else "")
        + (f", {engine_rows.weights(row)}" if row.version is not None else "")
        + (f": {row.reason}" if row.reason else "")
        for row in run.engines
    ]
    lines += [
        f"  job {job_id} of an earlier start of this run: {state.lower()}"
        for job_id, state in run.earlier.items()
    ]
    # Last errors, and what rewards and engines say, are text of others.
    return printable("\n".join([*lines, *_achievements(run, RunPaths(run.run_dir))]))


def _achievements(run: RunStatus, paths: RunPaths) -> list[str]:
    done = run.progress
    rows = [("steps", f"{done['steps_done']} of {done['num_steps']}" + _pace(run))]
    rows = [*_verdict(run), *_times(run), *_doing(run), *rows, *_changes(done["changes"])]
    rows += _torn(done["torn_checkpoints"]) + _redone(done["redone"])
    rows += _announced_ends(done["announced_ends"])
    rows += _parameters(done["parameters"])
    rows += _of_sft(done) if "heldout_loss" in done else _of_rl(done)
    rows.append(("run directory", str(paths.root)))
    for name, path in (("reward curve", paths.reward_curve), ("loss curve", paths.loss_curve)):
        if path.exists() and done["steps_done"]:
            rows.append((name, str(path)))
            rows.append(("tensorboard", f"tensorboard --logdir {argument(paths.tensorboard)}"))
    width = max([13, *(len(name) for name, value in rows if value)])
    return [f"  {name:<{width}} {value}" for name, value in rows if value]


def _doing(run: RunStatus) -> list[tuple[str, str]]:
    """Tells what the tasks of each component are doing, those that do the same together."""
    rows = []
    for component in dict.fromkeys(each.component for each in run.doing):
        tasks = [each for each in run.doing if each.component == component]
        alike: dict[tuple[str, int], list[Doing]] = {}
        for each in tasks:
            alike.setdefault((each.phase, each.step), []).append(each)
        said = [
            f"{phase}{f' of step {step}' if step else ''}"
            f", for {max(each.seconds for each in same):.0f} s"
            + f" ({len(same)} of {len(tasks)} tasks)"
            * (len(alike) > 1)
            for (phase, step), same in alike.items()
        ]
        when = _ago(min(each.time for each in tasks))
        rows.append(("doing", f"{component}: {'; '.join(said)} ({when})"))
    return rows


def _changes(done: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Tells what resumes have changed of the job, each with the step that it begins with."""
    said = []
    for each in done:
        when = "for the next start" if each["time"] is None else _ago(each["time"])
        first = each["first_step"]
        begin = "" if first is None else f"from step {first} on, "
        said.append(("changed", f"{'; '.join(each['lines'])} ({begin}{when})"))
    return said


def _ago(then: float) -> str:
    return f"{duration(max(0.0, time.time() - then))} ago"


def _torn(found: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Tells which checkpoints were passed over at a start, the newest few of them."""
    said = [
        f"the {each['role']}'s checkpoint of step {each['step']} was not whole, and passed over "
        f"({_ago(each['time'])}): {each['message']}"
        for each in found[-_MOST_TORN:]
    ]
    more = len(found) - len(said)
    return [("torn", line) for line in [*[f"{more} earlier ones"] * (more > 0), *said]]


def _redone(count: dict[str, int]) -> list[tuple[str, str]]:
    """Tells what ends of the run have cost, where there is anything to tell."""
    said = []
    if count["steps"]:
        said.append(
            f"{count['steps']} steps, {short(count['tokens_trained_again'])} tokens trained again"
        )
    if count["tokens_continued"]:
        said.append(f"{short(count['tokens_continued'])} tokens of unfinished responses kept")
    if count["tokens_sampled_again"]:
        said.append(f"{short(count['tokens_sampled_again'])} tokens sampled again")
    if count["tokens_lost"]:
        said.append(f"{short(count['tokens_lost'])} tokens lost at announced ends")
    return [("redone", "; ".join(said))] if said else []


def _announced_ends(found: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Tells how long announced ends took, the longest one, and what they wasted."""
    if not found:
        return []
    longest = max(each["drained_s"] for each in found)
    most = " at most" * (len(found) > 1)
    share = ends.share_wasted([ends.End(**each) for each in found])
    said = f"{len(found)} announced: requeued {longest:.1f} s after that{most}"
    return [("ends", f"{said}; {share:.1%} of the last 10 minutes before them wasted")]


def _parameters(count: dict[str, int] | None) -> list[tuple[str, str]]:
    """Tells what learns, where it is not the whole model."""
    if count is None or not count["fixed"]:
        return []
    trained, fixed = short(count["trained"]), short(count["fixed"])
    return [("trained", f"{trained} parameters beside {fixed} that stay")]


def _of_sft(done: dict[str, Any]) -> list[tuple[str, str]]:
    loss, documents, tokens = done["heldout_loss"], done["documents"], done["tokens"]
    now = done["last_loss"]
    cut = {
        "truncated": "truncated",
        "left_out": "left out, their prompts alone are too long",
        "empty_steps": "steps without any, which updated nothing",
    }
    return [
        *([] if now is None else [("loss", f"{now:.3f} at step {done['steps_done']}")]),
        *_speed(done),
        ("held-out", "loss " + _heldout(loss["before"], loss["after"], loss["newest"])),
        ("documents", f"{documents['trained']} trained on" + _counted(documents, cut)),
        ("tokens", f"{tokens['all']}, {tokens['trained']} of them trained on"),
        ("model", done["exported_model"] or "not exported yet"),
    ]


def _of_rl(done: dict[str, Any]) -> list[tuple[str, str]]:
    count, reward = done["trajectories"], done["last_reward"]
    return [
        *([] if reward is None else [("reward", f"{reward:.3f} at step {done['steps_done']}")]),
        *_speed(done),
        *_heldout_sets(done),
        ("trajectories", f"{count['committed']} committed, {count['trained']} trained on, "
                         f"{count['trained_twice']} twice" + _dropped(count["dropped"])),
        *([("data", f"{done['rows_left_out']} rows left out, see left_out.jsonl")]
          if done.get("rows_left_out") else []),
        *((role, f"{number} trajectories scored") for role, number in done["scored"].items()),
        *_reward_errors(done.get("reward_errors"), ""),
        *_reward_errors(done.get("heldout_reward_errors"), " held-out"),
        ("staleness", f"{done['max_staleness_seen']} at most"),
        ("weights", ", ".join(f"{who} v{v}" for who, v in done["weight_versions"].items())),
        ("checksums", {True: "equal", False: "DIFFER", None: "not compared yet"}[
            done["checksums_equal"]]),
    ]  # fmt: skip


def _speed(done: dict[str, Any]) -> list[tuple[str, str]]:
    speed = done["tokens_per_s"]
    return [] if speed is None else [("speed", f"{short(speed)} tokens/s")]


def _reward_errors(count: dict[str, Any] | None, which: str) -> list[tuple[str, str]]:
    if count is None:
        return []
    said = f"{count['errors']} of {count['samples']}{which} (first: {count['first']})"
    return [("reward errors", said)]


def _dropped(counts: dict[str, int]) -> str:
    """Tells what became of those that were committed and are not trained on."""
    said = {
        "duplicates": "repeated and ignored",
        "over_age": "over age and sampled again",
        "skipped": "without spread and skipped",
        "retired": "of retired prompts and never sampled",
        "damaged": "damaged and sampled again",
        "unaccounted": "UNACCOUNTED FOR",
    }
    return _counted(counts, said)


def _counted(counts: dict[str, int], said: dict[str, str]) -> str:
    return "".join(f", {counts[key]} {text}" for key, text in said.items() if counts.get(key))


def _verdict(run: RunStatus) -> list[tuple[str, str]]:
    """Why it is not running, and what can be done."""
    if run.state == states.UNREACHABLE:
        return [("unreachable", run.silence)]
    if states.is_over(run.state) and run.state != "COMPLETED":
        why = [("reason", run.reason)] if run.reason else []
        why += [("see", run.log)] if run.log else []
        return [*_last(run), *why, *_to_go_on(run)]
    return _last(run)


def _to_go_on(run: RunStatus) -> list[tuple[str, str]]:
    """Tells what can be done; what no restart cures commonly is in the job or in a program."""
    again = f"relax-hpc resume {argument(run.run_dir)}" + " --local" * (run.mode == "local")
    if _SETUP in run.reason:
        corrected = "--set 'resources.setup=[\"...\"]'"
        return [("to go on", f"{again} {corrected}, corrected: a profile is not read again")]
    said = _ERROR.match(run.reason)
    kind = getattr(errors, said[2], None) if said else None
    # A restart may cure an error of training, but those that there were did not.
    if not (getattr(kind, "is_final", False) or kind is errors.TrainingError):
        return [("to go on", again)]
    return [
        ("to go on", "relax-hpc submit JOB --set name=NEW, with the job or the program corrected"),
        ("or", f"{again}, which keeps both as they were, if neither is the cause"),
    ]


def _last(run: RunStatus) -> list[tuple[str, str]]:
    """Tells the last verdict; of a run that failed, its reason says the error."""
    if run.verdict is None:
        return []
    words = run.verdict.words
    if run.reason and run.verdict.error:
        words = words.replace(f" ({run.verdict.error})", "")
    if run.state == "RUNNING" and run.start is not None and run.verdict.time < run.start:
        words += ", before this start"
    return [("last verdict", f"{_ago(run.verdict.time)}: {words}")]


def _times(run: RunStatus) -> list[tuple[str, str]]:
    """Rows on how long it waits, runs and may run, and on what was started again."""
    rows = []
    if states.is_waiting(run.state):
        said = [each for each in (pending.why(run.queue), pending.when(run.start)) if each]
        rows += [("queue", "; ".join(said))] if said else []
    elif run.state == "RUNNING" and run.start is not None:
        left = "" if run.left_s is None else f", {duration(run.left_s)} left of its time limit"
        rows.append(("elapsed", duration(max(0.0, time.time() - run.start)) + left))
    again = [f"{name} {count}" for name, count in run.progress["restarts"].items()]
    if run.progress["requeues"]:
        again.append(f"the job {run.progress['requeues']} (requeued)")
    return [*rows, ("started again", ", ".join(again))] if again else rows


def _pace(run: RunStatus) -> str:
    """Tells when the last step was and what is left, of a run that is running."""
    done = run.progress
    if run.state != "RUNNING" or done["steps_done"] == done["num_steps"]:
        return ""
    last, left = done["last_step_time"], done["eta_s"]
    said = f", the last {_ago(last)}" if last else ""
    return said + (f", {duration(left)} to go" if left else "")


def _heldout_sets(done: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of the held-out sets that have a score, with their names where there are several."""
    sets = done["heldout_sets"]
    return [
        ("held-out", _heldout(**each) + f" ({name})" * (len(sets) > 1))
        for name, each in sets.items()
    ]


def _heldout(before: float | None, after: float | None, newest: dict[str, Any] | None) -> str:
    """Tells the scores before and after, or of a run that has not ended so: at which step."""
    if after is None and newest is not None:
        return f"{_score(before)} before, {_score(newest['value'])} at step {newest['step']}"
    return f"{_score(before)} before, {_score(after)} after"


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
