"""The state of a run, for whoever follows it while nobody says anything: a line now and then."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from relax_hpc import job_file
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import RelaxError
from relax_hpc.launch import states
from relax_hpc.paths import RunPaths
from relax_hpc.runs import status
from relax_hpc.runs.engine_rows import Row
from relax_hpc.runs.status import RunStatus
from relax_hpc.runs.watching import Watch
from relax_hpc.telemetry.events import Event, events_of_state
from relax_hpc.telemetry.history import shares_of

EVERY_S = 25.0
"""Seconds without a line after which there is one."""
_PART = 10
"""A look that takes long comes that many times its duration after the one before."""
_NAMED = 2
"""Engines that are named at most; more are counted."""


class Quiet:
    """Looks at a run when it has been quiet for a while, as `status` does."""

    def __init__(self, run_dir: Path, watch: Watch) -> None:
        self._run_dir, self._watch = run_dir, watch
        self.end()

    def end(self, pause_s: float = EVERY_S) -> None:
        """Takes note that a line was printed."""
        self._next = time.monotonic() + pause_s

    def line(self) -> str:
        """Says what the run is at, if it is time to; one that waits in the queue has said so."""
        begin = time.monotonic()
        if begin < self._next or states.is_waiting(self._watch.look().state):
            return ""
        said = ""
        with suppress(RelaxError, OSError):  # whoever asks for the status is told
            said = at_work(self._run_dir, self._watch)
        self.end(max(EVERY_S, _PART * (time.monotonic() - begin)))
        return said


def at_work(run_dir: Path, watch: Watch) -> str:
    """Says in a line which engines are not there yet, and how far evaluation and batch are."""
    paths = RunPaths(run_dir)
    events = events_of_state(paths.events_folder)
    run = status.collect(run_dir, found=watch.launches(), events=events)
    config = job_file.read_resolved(paths.config)
    said = [run.state.lower()] if run.state != "RUNNING" else []
    said += _engines(run.engines)
    if isinstance(config, RunConfig):
        said += _heldout(run, config, paths, events)
        said += _batch(run, config)
    return "; ".join(said) or f"{run.progress['steps_done']} of {config.num_steps} steps"


def _engines(rows: Sequence[Row]) -> Iterator[str]:
    late = [row for row in rows if row.state in ("PENDING", "WAITING", "STARTING", "FENCED")]
    words = [row.state.lower() + (f" ({row.reason})" if row.reason else "") for row in late]
    if len(late) <= _NAMED:
        yield from (f"engine {row.id} {word}" for row, word in zip(late, words, strict=True))
    else:
        counts = (f"{count} {word}" for word, count in Counter(words).most_common(_NAMED))
        yield f"of {len(rows)} engines {', '.join(counts)}"


def _heldout(
    run: RunStatus, config: RunConfig, paths: RunPaths, events: Sequence[Event]
) -> Iterator[str]:
    """Counts the prompts of evaluations that training waits for, or that wait for its end."""
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
    """Tells how much of the next batch is committed."""
    done, counts = run.progress["steps_done"], run.progress["trajectories"]
    if done == config.num_steps:
        return
    used = counts["trained"] + sum(counts["dropped"].values()) - counts["dropped"]["unaccounted"]
    size = config.schedule.prompts_per_step * config.rollout.samples_per_prompt
    there = min(max(counts["committed"] - used, 0), size)
    yield f"batch {done + 1}: {there} of {size} responses"
