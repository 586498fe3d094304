"""Trains a step of a run again from its shards, and compares the result with the record.

Job, logs and events go to `replay/step_<step>-<number>/` in the run directory.
"""

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from relax_hpc.bus.plan import Chain, PlanPosition, PlanRecord, read_chain
from relax_hpc.config import job_file
from relax_hpc.config.actor import ActorConfig
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import BusError, ConfigError, LaunchError
from relax_hpc.launch import script, states, submit
from relax_hpc.launch.placement import Bootstrap, Component, place
from relax_hpc.roles.context import Replay
from relax_hpc.roles.table import ACTOR, REPLAY
from relax_hpc.runs import changes, status, verdict
from relax_hpc.runs.resume import check_resources
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.files.records import finite, write_json
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import BusPaths, RunPaths
from relax_hpc.runtime.telemetry.events import FREQUENT, read_events
from relax_hpc.runtime.text import argument
from relax_hpc.trainer.checkpoints import store

TOLERANCE = 1e-5
"""Tolerance for another grid: relative for the gradient's norm, absolute for a loss."""
_FREE = re.compile(
    r"actor\.(layout|resources)\.\w+|actor\.tokens_per_micro_batch|actor\.advanced\.attention"
    r"|resources\.\w+"
)
"""Keys about how and where a step is computed."""
_POLL_S = {"local": 0.3, "slurm": 3.0}


@dataclass(frozen=True, slots=True)
class Number:
    """A number of the step, recorded and recomputed."""

    name: str
    recorded: float | None
    replayed: float | None
    is_relative: bool = False

    @property
    def difference(self) -> float:
        if self.recorded is None or self.replayed is None:  # not finite
            return 0.0 if self.recorded is self.replayed else float("inf")
        found = abs(self.recorded - self.replayed)
        largest = max(abs(self.recorded), abs(self.replayed))
        return found / largest if self.is_relative and largest else found


@dataclass(frozen=True, slots=True)
class Compared:
    """A step that was trained again, beside the run's record."""

    replay: Replay
    folder: Path
    """Directory of the replay."""
    is_same_grid: bool
    numbers: tuple[Number, ...]

    @property
    def difference(self) -> float:
        """The largest difference of the decisive numbers."""
        return max(each.difference for each in self.numbers if each.name in _JUDGED)

    @property
    def is_equal(self) -> bool:
        """Whether the step is reproduced: bit for bit, or nearly with another grid."""
        return self.difference <= (0.0 if self.is_same_grid else TOLERANCE)

    def to_json(self) -> str:
        rows = [asdict(each) | {"difference": each.difference} for each in self.numbers]
        fields = asdict(self.replay) | {"folder": self.folder, "is_same_grid": self.is_same_grid}
        fields |= {"is_equal": self.is_equal, "numbers": rows}
        said, _ = finite(fields, str)
        return json.dumps(said, allow_nan=False)


_JUDGED = {"loss": False, "grad_norm": True}
"""Decisive numbers, and whether they are compared relatively."""
_SHOWN = ("entropy", "lr", "reward/mean", "num_tokens")


def replay(
    run_dir: Path,
    step: int,
    *,
    overrides: Sequence[str] = (),
    local: bool = False,
    ended: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Compared:
    """Trains a step of a run again, as a job with the actor's resources, and waits for it.

    Args:
        run_dir: of a run that is over.
        step: one that it has trained.
        overrides: of the actor's layout and resources, `section.key=value`.
        local: run here even though there is a Slurm.
        ended: the caller knows that a job has ended which Slurm has forgotten.
        say: gets progress messages.

    Raises:
        ConfigError: the step cannot be trained again; says why.
        LaunchError: the job could not be started, or failed.
    """
    paths = RunPaths(run_dir.absolute())
    permissions.check_run(paths)
    _check_over(run_dir, ended=ended)
    recorded = read_step(paths, step)
    [was] = _jobs_of(paths, [recorded])
    config = change(was, overrides)
    asked = plan(paths, was, step)
    say(_words(asked))
    folder, mode = _make(paths, config, asked), submit.mode_of(local=local)
    _wait(_start(folder, paths, config, mode), folder, say)
    found = _steps(folder, REPLAY.name)[step]
    same = _is_same_grid(paths, config, range(asked.first, step + 1))
    return Compared(asked, folder.root, same, numbers(recorded, found))


def _jobs_of(paths: RunPaths, recorded: Sequence[Mapping[str, Any]]) -> list[RunConfig]:
    """Returns the jobs that trained the steps; later resumes may have changed them."""
    jobs = changes.jobs_at(paths, [each["time"] for each in recorded])
    found = [job for job in jobs if isinstance(job, RunConfig)]
    if len(found) < len(jobs):
        raise ConfigError(f"{paths.root}: a run of supervised fine-tuning has no shards to replay")
    return found


def _is_same_grid(paths: RunPaths, config: RunConfig, trained: range) -> bool:
    recorded = _steps(paths, ACTOR.name)
    jobs = _jobs_of(paths, [recorded[step] for step in trained])
    return all(_grid(job.actor) == _grid(config.actor) for job in jobs)


def _grid(actor: ActorConfig) -> tuple[object, ...]:
    """Returns what changes the order of sums."""
    return actor.layout, actor.tokens_per_micro_batch, actor.advanced.attention


def change(was: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Returns the job with another grid, or other resources.

    Raises:
        ConfigError: a key changes what is trained.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not _FREE.fullmatch(key):
            raise ConfigError(
                f"--set {override}: a step is trained again with the settings of its run; what may "
                "differ is how and where: actor.layout, actor.resources, resources, "
                "actor.tokens_per_micro_batch, actor.advanced.attention"
            )
    tree = was.model_dump(mode="json")
    config = job_file.with_overrides(tree, overrides, source="replay --set")
    assert isinstance(config, RunConfig)
    return config


def _check_over(run_dir: Path, *, ended: bool) -> None:
    if alive := status.alive(run_dir, status.of_run(run_dir), sure=ended):
        raise ConfigError(
            f"{run_dir}: is {alive.state.lower()} as job {alive.record.leader} and deletes shards "
            f"as it goes; wait, or cancel it first: relax-hpc cancel {argument(run_dir)}"
        )


def read_step(paths: RunPaths, step: int) -> dict[str, Any]:
    """Returns the newest record of a step.

    Raises:
        ConfigError: it was not trained.
    """
    steps = _steps(paths, ACTOR.name)
    if step in steps:
        return steps[step]
    trained = f"1 to {max(steps)}" if steps else "no step"
    raise ConfigError(f"--step {step}: {paths.root} has trained {trained}; choose one of them")


def _steps(paths: RunPaths, role: str) -> dict[int, dict[str, Any]]:
    events = read_events(paths.events_folder, but=FREQUENT)
    return {e["step"]: e for e in events if (e["event"], e["role"]) == ("step", role)}


def plan(paths: RunPaths, config: RunConfig, step: int) -> Replay:
    """Finds the checkpoint to begin with.

    Raises:
        ConfigError: there is none to train the step from.
    """
    chain = read_chain(paths.bus)
    portions = _portions(chain)
    if not _is_there(paths.bus, portions, step):
        raise ConfigError(_explain_freed(paths, config, portions, step))
    checkpoints = store.whole(paths.checkpoints, PlanPosition, lambda at: _is_on(chain, at))
    before = [each for each in checkpoints if each.step < step]
    found = before[-1] if before else None
    first = found.step + 1 if found else 1
    if missing := [s for s in range(first, step) if not _is_there(paths.bus, portions, s)]:
        begin = f"checkpoint {found.step}" if found else "the model"
        raise ConfigError(
            f"--step {step}: there is no checkpoint of step {step - 1}, and from {begin}, the one "
            f"before, step {missing[0]} is in the way, whose shards were deleted; in the next run "
            f"set bus.keep_steps (here {config.bus.keep_steps}), or actor.keep_every and "
            f"actor.save_every (here {config.actor.save_every})"
        )
    return Replay(paths.root, step, first, found.folder if found else None)


def _is_on(chain: Chain, position: PlanPosition) -> bool:
    try:
        chain.check(position)
    except BusError:
        return False
    return True


def _portions(chain: Chain) -> dict[int, list[PlanRecord]]:
    found: dict[int, list[PlanRecord]] = {}
    for record in chain.steps:
        found.setdefault(record.step, []).append(record)
    return found


def _is_there(bus: BusPaths, portions: Mapping[int, Sequence[PlanRecord]], step: int) -> bool:
    records = portions.get(step, ())
    return bool(records) and records[-1].last and all(map(Path.exists, _files(bus, records)))


def _files(bus: BusPaths, records: Sequence[PlanRecord]) -> Iterator[Path]:
    for record in records:
        for part in record.parts:
            yield bus.shard(part.producer, part.fence, part.seq)
        for sidecars in record.sidecars.values():
            for each in sidecars.values():
                yield bus.shard(each.writer, each.fence, each.seq)


def _explain_freed(
    paths: RunPaths, config: RunConfig, portions: Mapping[int, Sequence[PlanRecord]], step: int
) -> str:
    left = [each for each in sorted(portions) if _is_there(paths.bus, portions, each)]
    can = f"{left[0]} to {left[-1]} are there" if left else "none are there"
    return (
        f"--step {step}: its shards were deleted once a checkpoint had passed them; of {can}; "
        f"bus.keep_steps (here {config.bus.keep_steps}) keeps more of them in the next run"
    )


def _words(asked: Replay) -> str:
    begin = f"checkpoint {asked.first - 1}" if asked.checkpoint else "the model of the job"
    if asked.first == asked.step:
        return f"step {asked.step} again, from {begin}"
    return (
        f"step {asked.step} again: there is no checkpoint of step {asked.step - 1}, so from "
        f"{begin}, steps {asked.first} to {asked.step}"
    )


def _make(paths: RunPaths, config: RunConfig, asked: Replay) -> RunPaths:
    with permissions.set_umask(permissions.umask_of(paths.root)):
        for number in itertools.count(1):
            folder = paths.replay(asked.step, number)
            folder.root.parent.mkdir(exist_ok=True)
            try:
                folder.root.mkdir()
                break
            except FileExistsError:
                continue
        for each in (folder.submission, folder.control):
            each.mkdir()
        RunSecret.create(folder.secret)
        own = {"run_root": folder.root.parent, "name": folder.root.name}
        write_json(folder.config, config.model_copy(update=own).model_dump(mode="json"))
        asked.write(folder.replayed)
    return folder


def _start(
    folder: RunPaths, paths: RunPaths, config: RunConfig, mode: submit.Mode
) -> submit.Submission:
    component = component_of(config, mode)
    check_resources([component], mode)
    job = script.Job(
        f"{config.name}-replay",
        folder.root,
        has_summary=False,
        umask=permissions.umask_of(paths.root),
        comment=config.resources.comment,
        seen=paths.root.parent,
    )
    planned = submit.Submission(folder.root, mode, "", (component,), 1, None)
    with permissions.set_umask(permissions.umask_of(paths.root)):
        return submit.start_job(planned, job, folder)


def component_of(config: RunConfig, mode: submit.Mode) -> Component:
    """Returns a replay's only component: the actor's ranks."""
    actor = next(each for each in place(config) if each.name == ACTOR.name)
    bootstrap: Bootstrap = "files" if actor.bootstrap == "files" or mode == "local" else "mpi"
    return replace(actor, name=REPLAY.name, bootstrap=bootstrap, environment=REPLAY.environment)


def _wait(started: submit.Submission, folder: RunPaths, say: Callable[[str], None]) -> None:
    """Waits for the end of the job; an interrupt ends the job, too."""
    assert started.job is not None
    say(f"job {started.job.job_id}, in {folder.root}")
    try:
        while not states.is_over(state := status.job_state(folder.root)):
            time.sleep(_POLL_S[started.mode])
    except KeyboardInterrupt:
        started.job.cancel()
        raise
    if state != "COMPLETED":
        launched = status.of_run(folder.root)[0].record
        why = verdict.explain(folder.root, launched, state)
        raise LaunchError(f"{folder.root}: {state}: {why.text}; see {why.log}")


def numbers(recorded: dict[str, Any], found: dict[str, Any]) -> tuple[Number, ...]:
    """Returns the compared numbers of a step, decisive ones first."""
    names = [*_JUDGED, *(name for name in _SHOWN if name in recorded)]
    return tuple(
        Number(name, recorded.get(name), found.get(name), _JUDGED.get(name, False))
        for name in names
    )


def text(compared: Compared) -> str:
    """Formats a table for people, and its meaning."""
    rows = [("", "recorded", "replayed", "difference")]
    rows += [
        (each.name, _show(each.recorded), _show(each.replayed), f"{each.difference:.3g}")
        for each in compared.numbers
    ]
    lines = [f"{name:<14}{a:>24}{b:>24}{c:>13}" for name, a, b, c in rows]
    if compared.difference == 0:
        meant = "the same, bit by bit"
    elif compared.is_equal:
        meant = f"the same within {TOLERANCE:g}, at another grid"
    elif compared.is_same_grid:
        meant = "differs, at the same grid: the step is not what it was"
    else:
        meant = f"differs by more than {TOLERANCE:g}, at another grid"
    return "\n".join([*lines, f"step {compared.replay.step}: {meant}"])


def _show(value: float | None) -> str:
    return "not finite" if value is None else repr(value)
