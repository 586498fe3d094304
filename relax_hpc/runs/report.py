"""Describes a run in words, for `submit --follow` and `status`.

While a followed run logs nothing, a line now and then says what it is doing.
"""

import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from relax_hpc import errors
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import RelaxError
from relax_hpc.launch import states
from relax_hpc.runs import logs, status
from relax_hpc.runs.status import EngineRow, RunStatus, Watch
from relax_hpc.runtime.heartbeat import Doing
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import history
from relax_hpc.runtime.telemetry.events import Event
from relax_hpc.runtime.telemetry.history import shares_of
from relax_hpc.runtime.telemetry.progress import duration, short
from relax_hpc.runtime.text import argument, printable

EVERY_S = 25.0
"""Seconds without output before a status line."""
_PART = 10
"""Pause between looks, as a multiple of their duration."""
_NAMED = 2
"""Most engines named; more are counted."""


class Quiet:
    """Looks at a run that has been silent for a while, as `status` does."""

    def __init__(self, run_dir: Path, watch: Watch) -> None:
        self._run_dir, self._watch = run_dir, watch
        self.end()

    def end(self) -> None:
        """Notes that a line was printed."""
        self._said, self._pause_s = "", EVERY_S
        self._next = time.monotonic() + EVERY_S

    def line(self) -> str:
        """Returns a status line if one is due; the queue is reported elsewhere.

        The interval doubles while the line stays the same.
        """
        begin = time.monotonic()
        if begin < self._next or states.is_waiting(self._watch.look().state):
            return ""
        said = ""
        with suppress(RelaxError, OSError):  # whoever asks for the status is told
            said = at_work(self._run_dir, self._watch)
        self._pause_s = 2 * self._pause_s if said == self._said else EVERY_S
        self._said = said
        now = time.monotonic()
        self._next = now + max(self._pause_s, _PART * (now - begin))
        return said


def at_work(run_dir: Path, watch: Watch) -> str:
    """Describes missing engines, and the progress of evaluation and batch."""
    seen = status.gather(run_dir, watch.launches())
    run, config = status.judge(seen), seen.config
    said = [run.state.lower()] if run.state != "RUNNING" else []
    said += _engines(run.engines)
    if isinstance(config, RunConfig):
        said += _heldout_line(run, config, seen.paths, seen.events)
        said += _batch(run, config)
    return "; ".join(said) or f"{run.progress['steps_done']} of {config.num_steps} steps"


def _engines(rows: Sequence[EngineRow]) -> Iterator[str]:
    late = [row for row in rows if row.state in ("PENDING", "WAITING", "STARTING", "FENCED")]
    words = [row.state.lower() + (f" ({row.reason})" if row.reason else "") for row in late]
    if len(late) <= _NAMED:
        yield from (f"engine {row.id} {word}" for row, word in zip(late, words, strict=True))
    else:
        counts = (f"{count} {word}" for word, count in Counter(words).most_common(_NAMED))
        yield f"of {len(rows)} engines {', '.join(counts)}"


def _heldout_line(
    run: RunStatus, config: RunConfig, paths: RunPaths, events: Sequence[Event]
) -> Iterator[str]:
    """Counts the prompts of evaluations before training starts or the run ends."""
    done = run.progress["steps_done"]
    when, number = {0: ("before", 0), config.num_steps: ("after", done)}.get(done, ("", 0))
    if not when:
        return
    for name, held in config.eval.items():
        shares = {
            rank: event["num_samples"] + event.get("num_masked", 0)
            for rank, event in shares_of(events).get((name, when, number), {}).items()
        }
        size = config.rollout_pool.num_hosts
        parts = (paths.eval_part(name, when, number, task, size) for task in range(size))
        begun = list(map(_lines, parts))
        if any(lines is not None for lines in begun):
            count = sum(shares.values()) // held.samples_per_prompt + sum(n or 0 for n in begun)
            yield f"held-out {when}: {count} of up to {held.num_prompts} prompts ({name})"


def _lines(part: Path) -> int | None:
    """Prompts that a task has scored for an evaluation; None if it has not begun."""
    try:
        return part.read_bytes().count(b"\n")
    except FileNotFoundError:
        return None


def _batch(run: RunStatus, config: RunConfig) -> Iterator[str]:
    done, counts = run.progress["steps_done"], run.progress["trajectories"]
    if done == config.num_steps:
        return
    used = counts["trained"] + sum(counts["dropped"].values()) - counts["dropped"]["unaccounted"]
    size = config.schedule.prompts_per_step * config.rollout.samples_per_prompt
    there = min(max(counts["committed"] - used, 0), size)
    yield f"batch {done + 1}: {there} of {size} responses"


_SHOWN = re.compile(r" relax_hpc\.(?:roles|checkpoints)\.[^:]*: (.*)")
"""Loggers whose lines tell the story of a run; the rest is in the logs."""
_POLL_S = 0.5
_MOST_TORN = 3
_SETUP = ": setup ended with exit code "
_ERROR = re.compile(r"[^:]+: [^:]+: ([a-z_]+\.)*(\w+): ")
"""Prefix of a failure reason: how a component ended, the task, its error."""


def progress(run_dir: Path) -> Iterator[str]:
    """Yields the story of a run until it is over, including its wait in the queue, and status lines
    during silence."""
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
    """Describes components and progress, a line each."""
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
        + (f", {row.weights}" if row.version is not None else "")
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
    rows = [*_verdict(run), *_times(run), *doing(run), *rows, *_changes(done["changes"])]
    rows += _cost(done["gpu_hours"])
    rows += _torn(done["torn_checkpoints"]) + _redone(done["redone"])
    rows += _describe_announced_ends(done["announced_ends"])
    rows += _parameters(done["parameters"])
    rows.append(("clocks", history.describe_clocks(history.find_late_clocks(paths.events_folder))))
    rows += _of_sft(done) if "heldout_loss" in done else _of_rl(done)
    rows.append(("run directory", str(paths.root)))
    for name, path in (("reward curve", paths.reward_curve), ("loss curve", paths.loss_curve)):
        if path.exists() and done["steps_done"]:
            rows.append((name, str(path)))
            rows.append(("tensorboard", f"tensorboard --logdir {argument(paths.tensorboard)}"))
    width = max([13, *(len(name) for name, value in rows if value)])
    return [f"  {name:<{width}} {value}" for name, value in rows if value]


def doing(run: RunStatus) -> list[tuple[str, str]]:
    """Describes the tasks of each component, equal ones together."""
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
    """Describes what resumes changed in the job, each with its first step."""
    said = []
    for each in done:
        when = "for the next start" if each["time"] is None else _ago(each["time"])
        first = each["first_step"]
        begin = "" if first is None else f"from step {first} on, "
        said.append(("changed", f"{'; '.join(each['lines'])} ({begin}{when})"))
    return said


def _ago(then: float) -> str:
    return f"{duration(max(0.0, time.time() - then))} ago"


def _cost(hours: dict[str, float | None] | None) -> list[tuple[str, str]]:
    if hours is None:
        return []
    left = f", about {hours['left']:.2f} to go" if hours["left"] else ""
    return [("cost", f"{hours['used']:.2f} GPU-hours{left}")]


def _torn(found: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Names the newest damaged checkpoints that a start skipped."""
    said = [
        f"the {each['role']}'s checkpoint of step {each['step']} was not whole, and passed over "
        f"({_ago(each['time'])}): {each['message']}"
        for each in found[-_MOST_TORN:]
    ]
    more = len(found) - len(said)
    return [("torn", line) for line in [*[f"{more} earlier ones"] * (more > 0), *said]]


def _redone(count: dict[str, int]) -> list[tuple[str, str]]:
    """Describes the work lost at ends of the run, if any."""
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


def _describe_announced_ends(found: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    if not found:
        return []
    longest = max(each["drained_s"] for each in found)
    most = " at most" * (len(found) > 1)
    share = history.share_wasted([history.AttemptEnd(**each) for each in found])
    said = f"{len(found)} announced: requeued {longest:.1f} s after that{most}"
    return [("ends", f"{said}; {share:.1%} of the last 10 minutes before them wasted")]


def _parameters(count: dict[str, int] | None) -> list[tuple[str, str]]:
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
        ("documents", f"{documents['trained']} trained on" + _describe_counts(documents, cut)),
        ("tokens", f"{tokens['all']}, {tokens['trained']} of them trained on"),
        ("model", done["exported_model"] or "not exported yet"),
    ]


def _of_rl(done: dict[str, Any]) -> list[tuple[str, str]]:
    count, reward, cut = done["trajectories"], done["last_reward"], done.get("last_truncated")
    of_cut = f", {cut:.1%} of responses cut off" if cut else ""
    at = f"at step {done['steps_done']}{of_cut}"
    return [
        *([] if reward is None else [("reward", f"{reward:.3f} {at}")]),
        *map(_split, done.get("not_learned_from", {}).get("said", ())),
        *_speed(done),
        *_heldout_sets(done),
        *([("best", "step {step}, {score:.3f} ({name}), {folder}".format_map(done["best_policy"]))]
          if done.get("best_policy") else []),
        ("trajectories", f"{count['committed']} committed, {count['trained']} trained on, "
                         f"{count['trained_twice']} twice" + _describe_dropped(count["dropped"])),
        *([("data", f"{done['rows_left_out']} rows left out, see left_out.jsonl")]
          if done.get("rows_left_out") else []),
        *((role, f"{number} trajectories scored") for role, number in done["scored"].items()),
        *_reward_errors(done.get("reward_errors"), ""),
        *_reward_errors(done.get("heldout_reward_errors"), " held-out"),
        ("staleness", f"{done['max_staleness_seen']} at most"),
        ("weights", _weights(done["weight_versions"], done.get("engines_removed", ()))),
        *([("joined by", done["engines_joined_by"])] if done.get("engines_joined_by") else []),
        ("checksums", {True: "equal", False: "DIFFER", None: "not compared yet"}[
            done["checksums_equal"]]),
    ]  # fmt: skip


def _weights(versions: Mapping[str, int], removed: Collection[str]) -> str:
    there = [f"{who} v{version}" for who, version in versions.items() if who not in removed]
    gone = [f"{who} removed at v{version}" for who, version in versions.items() if who in removed]
    return "; ".join(", ".join(each) for each in (there, gone) if each)


def _split(line: str) -> tuple[str, str]:
    head, _, words = line.partition(": ")
    return head, words


def _speed(done: dict[str, Any]) -> list[tuple[str, str]]:
    speed = done["tokens_per_s"]
    return [] if speed is None else [("speed", f"{short(speed)} tokens/s trained, with prompts")]


def _reward_errors(count: dict[str, Any] | None, which: str) -> list[tuple[str, str]]:
    if count is None:
        return []
    said = f"{count['errors']} of {count['samples']}{which} (first: {count['first']})"
    return [("reward errors", said)]


def _describe_dropped(counts: dict[str, int]) -> str:
    """Explains why committed trajectories were not trained on."""
    said = {
        "duplicates": "repeated and ignored",
        "over_age": "over age and sampled again",
        "skipped": "without spread and skipped",
        "retired": "of retired prompts and never sampled",
        "damaged": "damaged and sampled again",
        "unaccounted": "UNACCOUNTED FOR",
    }
    return _describe_counts(counts, said)


def _describe_counts(counts: dict[str, int], said: dict[str, str]) -> str:
    return "".join(f", {counts[key]} {text}" for key, text in said.items() if counts.get(key))


def _verdict(run: RunStatus) -> list[tuple[str, str]]:
    """Explains why it is not running, and what to do."""
    if run.state == states.UNREACHABLE:
        return [("unreachable", run.silence)]
    if states.is_over(run.state) and run.state != "COMPLETED":
        why = [("reason", run.reason)] if run.reason else []
        why += [("see", run.log)] if run.log else []
        return [*_last(run), *why, *_to_go_on(run)]
    return _last(run)


def _to_go_on(run: RunStatus) -> list[tuple[str, str]]:
    """Says what to do; failures that no restart cures are mostly in the job or a program."""
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
    """Describes the last verdict; for a failed run the reason has the error."""
    if run.verdict is None:
        return []
    words = run.verdict.words
    if run.reason and run.verdict.error:
        words = words.replace(f" ({run.verdict.error})", "")
    if run.state == "RUNNING" and run.start is not None and run.verdict.time < run.start:
        words += ", before this start"
    return [("last verdict", f"{_ago(run.verdict.time)}: {words}")]


def _times(run: RunStatus) -> list[tuple[str, str]]:
    """Rows about waiting, running and remaining time, and restarts."""
    rows = []
    if states.is_waiting(run.state):
        said = [each for each in (states.why(run.queue), states.when(run.start)) if each]
        rows += [("queue", "; ".join(said))] if said else []
    elif run.state == "RUNNING" and run.start is not None:
        left = "" if run.left_s is None else f", {duration(run.left_s)} left of its time limit"
        rows.append(("elapsed", duration(max(0.0, time.time() - run.start)) + left))
    again = [f"{name} {count}" for name, count in run.progress["restarts"].items()]
    if run.progress["requeues"]:
        again.append(f"the job {run.progress['requeues']} (requeued)")
    return [*rows, ("started again", ", ".join(again))] if again else rows


def _pace(run: RunStatus) -> str:
    """Describes the last step's age and the remaining time of a running run."""
    done = run.progress
    if run.state != "RUNNING" or done["steps_done"] == done["num_steps"]:
        return ""
    last, left = done["last_step_time"], done["eta_s"]
    said = f", the last {_ago(last)}" if last else ""
    return said + (f", {duration(left)} to go" if left else "")


def _heldout_sets(done: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of held-out sets with a score, named if there are several."""
    sets = done["heldout_sets"]
    return [
        ("held-out", _heldout(**each) + f" ({name})" * (len(sets) > 1))
        for name, each in sets.items()
    ]


def _heldout(
    before: float | None,
    after: float | None,
    newest: dict[str, Any] | None,
    policies: Mapping[str, Sequence[int]] = MappingProxyType({}),
    truncated: Mapping[str, float | None] = MappingProxyType({}),
) -> str:
    """Formats the scores before and after; for an unfinished run the newest with its step. Behind
    them what is not as one would think: several policies, responses that were cut off."""

    def note(name: str) -> str:
        oldest, last = policies.get(name, (0, 0))
        said = [f"policies {history.describe_policies(oldest, last)}"] * (oldest < last)
        if name == "before" and oldest == last > 0:
            said = [f"policy {oldest}"]
        if part := truncated.get(name):
            said.append(f"{part:.1%} cut off")
        return f" ({', '.join(said)})" if said else ""

    begun = f"{_score(before)} before{note('before')}"
    if after is None and newest is not None:
        return f"{begun}, {_score(newest['value'])} at step {newest['step']}{note('newest')}"
    return f"{begun}, {_score(after)} after{note('after')}"


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
