"""Determines the state of a run from Slurm's states and the files on disk, once or continuously."""

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from relax_hpc.config import job_file
from relax_hpc.config.engines import ROLLOUT, follows_policy
from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.inference import members
from relax_hpc.inference.members import ENDED, Roster, Standing, reason_of, standing
from relax_hpc.launch import record, states
from relax_hpc.launch.local import processes
from relax_hpc.launch.record import LaunchedComponent, LaunchRecord
from relax_hpc.launch.script import exit_code_file
from relax_hpc.runs import verdict
from relax_hpc.runs.scale.records import Extra, ScaleState
from relax_hpc.runs.verdict import Verdict
from relax_hpc.runtime import heartbeat
from relax_hpc.runtime.heartbeat import Doing
from relax_hpc.runtime.paths import ComponentPaths, RunPaths
from relax_hpc.runtime.telemetry.events import Event, events_of_state


@dataclass(frozen=True, slots=True)
class ComponentStatus:
    name: str
    job_id: str
    tasks: int
    finished_tasks: int
    state: str
    """Slurm's state; locally the same words, and RESTARTING between two starts of a step."""
    nodes: str

    @property
    def leader(self) -> str:
        return self.job_id.partition("+")[0]


@dataclass(frozen=True, slots=True)
class Launch:
    record: LaunchRecord
    components: tuple[ComponentStatus, ...]
    state: str
    """State of the whole job: that of its worst component."""
    silence: str
    """Why it is UNREACHABLE."""
    reason: str = ""
    """Slurm's reason for waiting."""
    start: float | None = None
    """Actual or expected start; None if unknown."""
    left_s: float | None = None


_RECENT_S = 60.0


@dataclass(frozen=True, slots=True)
class EngineRow:
    pool: str
    id: str
    state: Standing
    node: str
    version: int | Literal["fixed"] | None
    """Policy version of its weights, as the trainer knows it; fixed: they never change."""
    since: float | None
    """When its state began, seconds since 1970; for an initial engine, when it first answered."""
    requests: int | None
    """Running and waiting requests; None if unknown here."""
    reason: str = ""

    @property
    def weights(self) -> str:
        """The version of its weights in a word."""
        if self.version is None:
            return "-"
        return self.version if self.version == "fixed" else f"v{self.version}"


@dataclass(frozen=True, slots=True)
class RunStatus:
    run_dir: Path
    name: str
    mode: str
    job_id: str
    state: str
    """State of the newest launch; of an earlier one if only that is alive."""
    components: tuple[ComponentStatus, ...]
    earlier: dict[str, str]
    """Job and state of earlier launches that are, or may be, alive as well."""
    silence: str
    """Why the state is UNREACHABLE."""
    reason: str
    """Why the run failed; empty if it did not, or is unknown."""
    log: str
    """The log to read."""
    verdict: Verdict | None
    """The last failure or end, and the reaction to it."""
    queue: str
    """Slurm's reason for waiting."""
    start: float | None
    """Actual or expected start of the job, seconds since 1970."""
    left_s: float | None
    engines: tuple[EngineRow, ...]
    """Engines of every pool, added ones included, that run or failed."""
    progress: dict[str, Any]
    """Steps, held-out scores, trajectories: from `summary.summarize`."""
    doing: tuple[Doing, ...] = ()
    """The tasks' work, at most half a minute old."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str, indent=1, allow_nan=False)


_ALIVE_FIRST = ("PENDING", "RESTARTING", "RUNNING", "COMPLETING")
_WORST_FIRST = ("FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "CANCELLED")


class RunRecords(NamedTuple):
    """All that a run's state is judged by, read once."""

    paths: RunPaths
    config: JobConfig
    launches: Sequence[Launch]
    """Newest first."""
    events: Sequence[Event]


def gather(run_dir: Path, launches: Sequence[Launch] = ()) -> RunRecords:
    """Reads a run without disturbing it.

    Args:
        launches: if already known.

    Raises:
        ConfigError: not a run directory, or nothing was started in it.
    """
    paths = RunPaths(run_dir.absolute())
    launches = launches or of_run(paths.root)
    config = job_file.read_resolved(paths.config)
    return RunRecords(paths, config, launches, events_of_state(paths.events_folder))


def collect(run_dir: Path) -> RunStatus:
    """Looks at a run without disturbing it.

    Raises:
        ConfigError: not a run directory, or nothing was started in it.
    """
    return judge(gather(run_dir))


def judge(run: RunRecords) -> RunStatus:
    from relax_hpc.runs import summary

    paths, config, found, events = run
    newest, shown = found[0], decisive(found)
    engines = list_engines(paths, config, _of_engines(shown), events)
    why = verdict.NOTHING
    if _has_failed(shown.state):
        why = verdict.explain(paths.root, shown.record, shown.state)
    return RunStatus(
        run_dir=paths.root,
        name=paths.root.name,
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
        verdict=verdict.read(paths.root),
        queue=shown.reason,
        start=shown.start,
        left_s=shown.left_s,
        engines=tuple(row for row in engines if row.state not in ("GONE", "CANCELLED")),
        progress=summary.sum_up(paths, config, events),
        doing=tuple(heartbeat.read_doing(paths.doing)) if states.is_alive(shown.state) else (),
    )


def _has_failed(state: str) -> bool:
    return not states.is_alive(state) and state not in ("COMPLETED", "CANCELLED")


def job_state(run_dir: Path) -> str:
    """Returns only `RunStatus.state`, which is cheaper."""
    return decisive(of_run(run_dir)).state


def of_run(run_dir: Path) -> list[Launch]:
    return launches(record.read(run_dir.absolute()))


def doubt(launch: Launch) -> str:
    """Says why a launch may be alive, and what to do; empty if its state is known."""
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
    """Returns the newest living launch of a run, if any.

    Args:
        found: its launches, newest first.
        sure: the caller knows that launches in an unknown state have ended.

    Raises:
        ConfigError: a launch's state is unknown; says what to do.
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


def decide(runs: Sequence[LaunchRecord]) -> list[Launch]:
    """Returns each run's decisive launch, with a single request to Slurm."""
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
    """Why a launch waits, its actual or expected start, and its remaining seconds."""
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
        reason = states.COMPONENT_CANCELLED
    return reason, max(starts, default=None), min(left, default=None)


def decisive(found: Sequence[Launch]) -> Launch:
    """Returns the launch whose state is the run's: the newest, or an earlier living one."""
    newest = found[0]
    if states.is_alive(newest.state):
        return newest
    return next((each for each in found[1:] if states.is_alive(each.state)), newest)


def _lives(launched: LaunchRecord) -> bool:
    return launched.controller is not None and launched.controller.find() is not None


def _elsewhere(launched: LaunchRecord) -> str:
    return f"it runs on {launched.node}, this is another machine" * launched.is_elsewhere


def overall(found: Sequence[str]) -> str:
    """Summarises components in a state: alive while any may be, else the worst."""
    alive = [state for state in found if states.is_alive(state)]
    for state in (*_ALIVE_FIRST, *alive, *_WORST_FIRST):
        if state in found:
            return state
    return next((state for state in found if state != "COMPLETED"), "COMPLETED")


def _of_jobs(found: Sequence[str]) -> str:
    """Summarises the jobs of a run: it runs while any of them does."""
    at_work = [each for each in found if states.is_alive(each) and not states.is_waiting(each)]
    return overall(at_work or found)


def _of_job(components: Sequence[ComponentStatus], leader: str) -> str:
    return overall([each.state for each in components if each.leader == leader])


def _of_engines(shown: Launch) -> str:
    """State of the job with the engines."""
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
        elif _count_finished_tasks(component) == component.tasks:
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
        finished_tasks=_count_finished_tasks(component),
        state=state,
        nodes=nodes,
    )


def _count_finished_tasks(component: LaunchedComponent) -> int:
    left = ComponentPaths(component.folder, component.leader)
    return sum(left.done(rank).exists() for rank in range(component.tasks))


def _afterwards(launched: LaunchRecord, leader: str, *, is_silent: bool) -> str:
    """Returns how a job ended, by its script's exit code file; a killed one has none.

    Until the job is known to be over, only success counts: Slurm may have requeued it since, which
    ends the script like a cancel.
    """
    try:
        code = int(exit_code_file(launched.folder, leader).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        if is_silent:
            return states.UNREACHABLE
        return states.UNKNOWN if launched.controller is None else "FAILED"
    if code == 0:
        return "COMPLETED"
    if is_silent and launched.controller is None:
        return states.UNREACHABLE
    return "CANCELLED" if code == 143 else "FAILED"


ASK_S = 10.0
"""Seconds between requests to Slurm; local processes are checked each time."""
_ENDING_S = 1.0
"""The same, once the job's script has written its exit code."""
_MOVED_S = 600.0
"""A smaller move of the expected start is not reported."""


class Watch:
    """The current state of a run, from Slurm's last answer."""

    def __init__(self, run_dir: Path, *, every_s: float = ASK_S) -> None:
        """Args:
        every_s: seconds between requests to Slurm.
        """
        self._run_dir, self._every_s = run_dir, every_s
        self._found = list[Launch]()
        self._asked = 0.0
        self._told: Launch | None = None

    def launches(self) -> list[Launch]:
        """Returns every launch of the run, newest first."""
        if not self._found or self._is_due():
            self._found = of_run(self._run_dir)
            self._asked = time.monotonic()
        return self._found

    def look(self) -> Launch:
        """Returns the launch whose state is the run's."""
        return decisive(self.launches())

    def is_over(self) -> bool:
        return states.is_over(self.look().state)

    def news(self) -> str:
        """Reports once that the run waits, why and how long, or that it waits no more."""
        found, told = self.look(), self._told
        if not states.is_waiting(found.state):
            self._told = None
            return found.state if told and found.state == "RUNNING" else ""
        if told and (told.state, told.reason) == (found.state, found.reason):
            moved = abs((found.start or 0.0) - (told.start or 0.0))
            if moved < _MOVED_S:
                return ""
        self._told = found
        return waiting(found)

    def _is_due(self) -> bool:
        launch = decisive(self._found)
        if launch.record.controller is not None:
            return True
        every_s = self._every_s
        left = (exit_code_file(launch.record.folder, each) for each in launch.record.leaders)
        if any(each.exists() for each in left):
            every_s = min(_ENDING_S, every_s)
        return time.monotonic() - self._asked >= every_s


def waiting(launch: Launch) -> str:
    """Formats a waiting launch: state, Slurm's reason with explanation, expected start."""
    head = launch.state + (f" ({launch.reason})" if launch.reason else "")
    words = [each for each in (states.why(launch.reason), states.when(launch.start)) if each]
    return f"{head}: {'; '.join(words)}" if words else head


def list_engines(
    paths: RunPaths, config: JobConfig, job_state: str, events: Sequence[Event]
) -> list[EngineRow]:
    """Returns the engines that a run started with, pool by pool, then the added ones.

    Args:
        config: supervised fine-tuning has no engines.
        job_state: of its job, to interpret records that nobody updates any more.
        events: of the run.
    """
    if not isinstance(config, RunConfig):
        return []
    state, roster = ScaleState.read(paths), Roster.read(paths)
    added = state.extras if state else {}
    found = _initial(paths, config, roster, added.keys(), _nodes(events))
    found += [_of_extra(paths, each, roster) for each in added.values()]
    if states.is_over(job_state):
        return [_over(row) for row in found]
    if states.is_waiting(job_state):
        return [_pending(row) for row in found]
    there = {row.id for row in found if row.state not in ENDED}
    late = find_slow([each for each in events if each.get("id", "") in there or "id" not in each])
    return [replace(row, reason=row.reason or late.get(row.id, "")) for row in found]


def find_slow(events: Sequence[Event]) -> dict[str, str]:
    """Engines that sample less than half as fast as the median engine, with their speed.

    Compares tokens per second and request of the last minute. Needs three engines.
    """
    from relax_hpc.inference.pool_client import slow  # with httpx

    loads = [event for event in events if event["event"] == "load" and event["in_flight"]]
    since = max((event["time"] for event in loads), default=0.0) - _RECENT_S
    tokens, seconds = defaultdict[str, float](float), defaultdict[str, float](float)
    for event in loads:
        if event["time"] > since:
            tokens[event["id"]] += event["num_tokens"]
            seconds[event["id"]] += event["seconds"] * event["in_flight"]
    rates = {name: tokens[name] / spent for name, spent in seconds.items() if spent}
    found = {name: _how_slow(rate, middle) for name, rate, middle in slow(rates)}
    now = max((event["time"] for event in events), default=0.0)
    for event in events:
        if event["event"] == "rests" and event["time"] + event["seconds"] > now:
            said = _how_slow(event["rate"], event["median"])
            found[event["id"]] = f"{said}; a task asks nothing new of it"
    return found


def _how_slow(rate: float, middle: float) -> str:
    return f"slow: {rate:.3g} tokens/s per request, the median engine {middle:.3g}"


def _nodes(events: Sequence[Event]) -> dict[str, str]:
    """Maps each task to the node of its last start."""
    starts = [event for event in events if event["event"] == "start"]
    return {f"{event['role']}-{event['rank']}": str(event["node"]) for event in starts}


def _initial(
    paths: RunPaths,
    config: RunConfig,
    roster: Roster | None,
    added: Set[str],
    nodes: Mapping[str, str],
) -> list[EngineRow]:
    found = []
    for name, pool in config.engines.items():
        engines = config.engines_in(name)
        tasks = [
            f"{name}-{index // pool.engines_per_task * pool.nodes_per_engine}"
            for index in range(len(engines))
        ]
        if follows_policy(name) and roster:  # of an earlier attempt
            others = sorted({*roster.members} - {*engines} - added)
            engines, tasks = [*engines, *others], [*tasks, *others]
        found += [
            _of_initial(paths, name, engine, nodes.get(task, ""), roster)
            for engine, task in zip(engines, tasks, strict=True)
        ]
    return found


def _of_initial(
    paths: RunPaths, pool: str, engine: str, node: str, roster: Roster | None
) -> EngineRow:
    record, member = paths.member(engine), members.find(paths, engine)
    given = roster.members.get(engine) if roster else None
    version = given.version if given else None
    if roster is None and member and member.version >= 0:  # it loads by itself
        version = member.version
    return EngineRow(
        pool,
        engine,
        standing(member, roster),
        node,
        version if follows_policy(pool) else "fixed",
        record.stat().st_mtime if member else None,
        None,
        reason_of(member, roster),
    )


def _of_extra(paths: RunPaths, extra: Extra, roster: Roster | None) -> EngineRow:
    state, version, reason = extra.state, None, extra.reason
    if extra.process and not extra.ended and not extra.ending:
        member = members.find(paths, extra.id)
        state, reason = standing(member, roster), reason or reason_of(member, roster)
    if roster and extra.id in roster.members and not extra.ended:
        version = roster.members[extra.id].version
    return EngineRow(ROLLOUT, extra.id, state, extra.node, version, extra.since, None, reason)


def _over(row: EngineRow) -> EngineRow:
    return (
        _clear_version(row)
        if row.state in ENDED
        else _clear_version(replace(row, state="GONE", reason=""))
    )


def _pending(row: EngineRow) -> EngineRow:
    """A waiting job has no engines: records are from an earlier attempt."""
    if row.state in ENDED:
        return row
    return replace(_clear_version(row), state="PENDING", node="", since=None, reason="")


def _clear_version(row: EngineRow) -> EngineRow:
    return replace(row, version="fixed" if row.version == "fixed" else None)
