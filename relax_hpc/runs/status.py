"""The state of a run: Slurm's word on its components, joined with the facts it leaves on disk."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relax_hpc import job_file
from relax_hpc.config.run import JobConfig
from relax_hpc.errors import ConfigError
from relax_hpc.hangs import doing
from relax_hpc.hangs.doing import Doing
from relax_hpc.launch import pending, record, states
from relax_hpc.launch.local import processes
from relax_hpc.launch.record import LaunchedComponent, LaunchRecord
from relax_hpc.launch.script import exit_code_file
from relax_hpc.paths import ComponentPaths, RunPaths
from relax_hpc.runs import engine_rows, failure, verdict
from relax_hpc.runs.engine_rows import Row
from relax_hpc.runs.verdict import Verdict
from relax_hpc.telemetry.events import Event, events_of_state


@dataclass(frozen=True, slots=True)
class ComponentStatus:
    name: str
    job_id: str
    tasks: int
    finished_tasks: int
    """Tasks that returned."""
    state: str
    """Slurm's word; locally the same words, and RESTARTING between two starts of a step."""
    nodes: str

    @property
    def leader(self) -> str:
        """Id of its whole job."""
        return self.job_id.partition("+")[0]


@dataclass(frozen=True, slots=True)
class Launch:
    """The state of one launch of a run."""

    record: LaunchRecord
    components: tuple[ComponentStatus, ...]
    state: str
    """State of the job as a whole: that of the component that is worst off."""
    silence: str
    """Why it is UNREACHABLE."""
    reason: str = ""
    """Slurm's word for why it waits."""
    start: float | None = None
    """Time at which it began, or is expected to begin; None where nobody says."""
    left_s: float | None = None
    """Seconds until the time limit."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    run_dir: Path
    name: str
    mode: str
    job_id: str
    state: str
    """State of the newest launch; of an earlier one if only that one is alive."""
    components: tuple[ComponentStatus, ...]
    earlier: dict[str, str]
    """Job and state of earlier launches that are alive beside the newest, or may be."""
    silence: str
    """Why nobody knows the state, if it is UNREACHABLE."""
    reason: str
    """Why the run failed; empty if it did not, or nothing is known."""
    log: str
    """The file to read about that."""
    verdict: Verdict | None
    """The failure or end that was the last, and the answer to it."""
    queue: str
    """Slurm's word for why it waits."""
    start: float | None
    """Time at which the job began, or is expected to begin, seconds since 1970."""
    left_s: float | None
    """Seconds until the job's time limit."""
    engines: tuple[Row, ...]
    """Engines of every pool, with those that were added, that are there or failed."""
    progress: dict[str, Any]
    """Steps, held-out scores, trajectories: `roles.summary.summarize`."""
    doing: tuple[Doing, ...] = ()
    """The work of its tasks, half a minute ago at most."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str, indent=1, allow_nan=False)


_ALIVE_FIRST = ("PENDING", "RESTARTING", "RUNNING", "COMPLETING")
_WORST_FIRST = ("FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "CANCELLED")


def collect(
    run_dir: Path, *, found: list[Launch] | None = None, events: Sequence[Event] | None = None
) -> RunStatus:
    """Looks at a run without disturbing it.

    Args:
        run_dir: of the run.
        found: its launches, newest first, by who has asked for them already.
        events: of the run, by who has read them already.

    Raises:
        ConfigError: not a run directory, or nothing was started in it.
    """
    from relax_hpc.runs import summary

    run_dir = run_dir.absolute()
    found = found or of_run(run_dir)
    newest, shown = found[0], decisive(found)
    paths = RunPaths(run_dir)
    config = job_file.read_resolved(paths.config)
    events = events_of_state(paths.events_folder) if events is None else events
    why = failure.NOTHING
    if _has_failed(shown.state):
        why = failure.found(run_dir, shown.record, shown.state)
    return RunStatus(
        run_dir=run_dir,
        name=run_dir.name,
        mode=newest.record.mode,
        job_id=shown.record.leader,
        state=shown.state,
        components=shown.components,
        earlier={
            each.record.leader: each.state
            for each in found[1:]
            if each is not shown and states.is_alive(each.state)
        },
        silence=shown.silence,
        reason=why.text,
        log=why.log,
        verdict=verdict.read(run_dir),
        queue=shown.reason,
        start=shown.start,
        left_s=shown.left_s,
        engines=_engines(paths, config, _of_engines(shown), events),
        progress=summary.summed_up(paths, config, events),
        doing=tuple(doing.read(paths.doing)) if states.is_alive(shown.state) else (),
    )


def _engines(
    paths: RunPaths, config: JobConfig, job_state: str, events: Sequence[Event]
) -> tuple[Row, ...]:
    rows = engine_rows.rows(paths, config, job_state, events)
    return tuple(row for row in rows if row.state not in ("GONE", "CANCELLED"))


def _has_failed(state: str) -> bool:
    return not states.is_alive(state) and state not in ("COMPLETED", "CANCELLED")


def job_state(run_dir: Path) -> str:
    """`RunStatus.state`, without the cost of the rest."""
    return decisive(of_run(run_dir)).state


def of_run(run_dir: Path) -> list[Launch]:
    """Returns the state of every launch of a run, newest first."""
    return launches(record.read(run_dir.absolute()))


def doubt(launch: Launch) -> str:
    """Why it is not known whether a launch is alive, and what to do; empty if it is known."""
    job = f"job {launch.record.leader}"
    if not states.is_doubtful(launch.state):
        return ""
    if launch.state == states.UNKNOWN:
        return (
            f"Slurm does not know {job} any more, and it left no exit code; if it has ended "
            "(squeue says so), add --ended"
        )
    if launch.state == states.UNREACHABLE:
        return (
            f"whether {job} still runs is not known ({launch.silence}); ask again where that is "
            "answered, or, if you know that it has ended, add --ended"
        )
    return (
        f"Slurm says {launch.state} of {job}, which may mean that it runs; end it with relax-hpc "
        "cancel, or, if you know that it has ended, add --ended"
    )


def alive(run_dir: Path, found: Sequence[Launch], *, sure: bool) -> Launch | None:
    """The newest launch of a run that is alive, if there is one.

    Args:
        run_dir: of the run.
        found: its launches, newest first.
        sure: the caller knows that those have ended of which nobody can tell.

    Raises:
        ConfigError: of one it is not known; says what to do.
    """
    for launch in found:
        if not sure and (words := doubt(launch)):
            raise ConfigError(f"{run_dir}: {words}")
        if states.is_alive(launch.state) and not states.is_doubtful(launch.state):
            return launch
    return None


def launches(newest: LaunchRecord) -> list[Launch]:
    """Returns the state of every launch of a run, newest first."""
    return _launches(newest, _ask([newest]))


def decided(runs: Sequence[LaunchRecord]) -> list[Launch]:
    """Returns of each run the launch whose state is the run's, with one question to Slurm."""
    answer = _ask(runs)
    return [decisive(_launches(newest, answer)) for newest in runs]


def _ask(runs: Sequence[LaunchRecord]) -> states.Answer:
    launched = [each for newest in runs for each in newest.all]
    leaders = [leader for each in launched if each.controller is None for leader in each.leaders]
    return states.query(leaders)


def _launches(newest: LaunchRecord, answer: states.Answer) -> list[Launch]:
    found = []
    for each in newest.all:
        silence = answer.silence if each.controller is None else _elsewhere(each)
        components = tuple(_local(each) if each.controller else _slurm(each, answer))
        state = _of_jobs([_of_job(components, leader) for leader in each.leaders])
        if not states.is_alive(state) and not each.is_elsewhere and _lives(each):
            state = "COMPLETING"  # the script is still writing the summary
        silence *= state == states.UNREACHABLE
        reason, *times = _queue(each, answer)
        reason *= states.is_waiting(state)
        found.append(Launch(each, components, state, silence, reason, *times))
    return found


def _queue(launched: LaunchRecord, answer: states.Answer) -> tuple[str, float | None, float | None]:
    """Why a launch waits, when it begins or began, and the seconds that its time limit leaves."""
    if launched.controller is not None:
        return "", launched.time, None
    known = [
        answer.known[each.job_id] for each in launched.components if each.job_id in answer.known
    ]
    starts = [each.start for each in known if each.start is not None]
    left = [each.left_s for each in known if each.left_s is not None]
    # Of a heterogeneous job one component may say why the others wait; of two jobs the one that is
    # held waits for the other.
    by_hold = sorted(known, key=lambda each: each.state == "REQUEUE_HOLD")
    reason = next((each.reason for each in by_hold if each.reason), "")
    if any(each.state == "CANCELLED" for each in known) and len(launched.leaders) == 1:
        reason = pending.COMPONENT_CANCELLED
    return reason, max(starts, default=None), min(left, default=None)


def decisive(found: Sequence[Launch]) -> Launch:
    """Returns the launch whose state is the run's: the newest, or an earlier one that lives."""
    newest = found[0]
    if states.is_alive(newest.state):
        return newest
    return next((each for each in found[1:] if states.is_alive(each.state)), newest)


def _lives(launched: LaunchRecord) -> bool:
    return launched.controller is not None and launched.controller.find() is not None


def _elsewhere(launched: LaunchRecord) -> str:
    return f"it runs on {launched.node}, this is another machine" * launched.is_elsewhere


def overall(found: Sequence[str]) -> str:
    """One word for all components: alive while any may be, else that of the worst."""
    alive = [state for state in found if states.is_alive(state)]
    for state in (*_ALIVE_FIRST, *alive, *_WORST_FIRST):
        if state in found:
            return state
    return next((state for state in found if state != "COMPLETED"), "COMPLETED")


def _of_jobs(found: Sequence[str]) -> str:
    """One word for the jobs of a run: it runs while one of them does, however the other waits."""
    at_work = [each for each in found if states.is_alive(each) and not states.is_waiting(each)]
    return overall(at_work or found)


def _of_job(components: Sequence[ComponentStatus], leader: str) -> str:
    return overall([each.state for each in components if each.leader == leader])


def _of_engines(shown: Launch) -> str:
    """State of the job that has the engines."""
    is_one = len(shown.record.leaders) == 1
    return shown.state if is_one else _of_job(shown.components, shown.record.leader)


def _slurm(launched: LaunchRecord, answer: states.Answer) -> list[ComponentStatus]:
    otherwise = {
        leader: _afterwards(launched, leader, is_silent=bool(answer.silence))
        for leader in launched.leaders
    }
    return [
        _status(launched, component, found.state, found.nodes)
        for component in launched.components
        for found in [
            answer.known.get(component.job_id)
            or states.SlurmState(component.job_id, otherwise[component.leader], "")
        ]
    ]


def _local(launched: LaunchRecord) -> list[ComponentStatus]:
    if launched.is_elsewhere:
        state = _afterwards(launched, launched.leader, is_silent=True)
        return [_status(launched, each, state, launched.node or "") for each in launched.components]
    running, otherwise = _lives(launched), _afterwards(launched, launched.leader, is_silent=False)
    components = []
    for component in launched.components:
        alive = any(task.find() for task in processes(component.folder, component.leader))
        if alive:
            state = "RUNNING"
        elif _finished_tasks(component) == component.tasks:
            state = "COMPLETED"
        else:
            state = "RESTARTING" if running else otherwise
        components.append(_status(launched, component, state, "this machine"))
    return components


def _status(
    launched: LaunchRecord, component: LaunchedComponent, state: str, nodes: str
) -> ComponentStatus:
    return ComponentStatus(
        name=component.name,
        job_id=component.job_id,
        tasks=component.tasks,
        finished_tasks=_finished_tasks(component),
        state=state,
        nodes=nodes,
    )


def _finished_tasks(component: LaunchedComponent) -> int:
    left = ComponentPaths(component.folder, component.leader)
    return sum(left.done(rank).exists() for rank in range(component.tasks))


def _afterwards(launched: LaunchRecord, leader: str, *, is_silent: bool) -> str:
    """Returns how a job ended, by what its script left; one that was killed leaves nothing.

    While nobody says that the job is over, only success counts: Slurm may have requeued it since,
    which ends the script as a cancel does.
    """
    try:
        code = int(exit_code_file(launched.folder, leader).read_text())
    except (OSError, ValueError):
        if is_silent:
            return states.UNREACHABLE
        return states.UNKNOWN if launched.controller is None else "FAILED"
    if code == 0:
        return "COMPLETED"
    if is_silent and launched.controller is None:
        return states.UNREACHABLE
    return "CANCELLED" if code == 143 else "FAILED"
