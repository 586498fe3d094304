"""The engines of a run as users see them: of every pool, and those that were added."""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal

from relax_hpc.config.engines import ROLLOUT, follows_policy
from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.fleet import members
from relax_hpc.fleet.roster import Roster
from relax_hpc.fleet.scaling import Extra, ScaleState
from relax_hpc.fleet.standing import ENDED, Standing, standing
from relax_hpc.launch import states
from relax_hpc.paths import RunPaths
from relax_hpc.sampling.slow import slow as slow_of
from relax_hpc.telemetry.events import Event

_RECENT_S = 60.0


@dataclass(frozen=True, slots=True)
class Row:
    """One engine."""

    pool: str
    """Name of the pool in the job."""
    id: str
    state: Standing
    node: str
    version: int | Literal["fixed"] | None
    """Policy version of its weights, as far as the trainer knows; fixed: they stay as they were
    loaded."""
    since: float | None
    """Time at which it got into this state, seconds since 1970; of an initial engine, since it
    answers."""
    requests: int | None
    """Requests that run or wait in it now; None where that cannot be learned from here."""
    reason: str = ""


def rows(paths: RunPaths, config: JobConfig, job_state: str, events: Sequence[Event]) -> list[Row]:
    """The engines that a run started with, pool by pool, then those that were added.

    Args:
        paths: of the run.
        config: its job; one of supervised fine-tuning has no engines.
        job_state: of its job, which tells what records mean that nobody is alive to change.
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
    late = slow(events)
    return [replace(row, reason=row.reason or late.get(row.id, "")) for row in found]


def slow(events: Sequence[Event]) -> dict[str, str]:
    """Engines that sample less than half as fast as the median engine, each with how fast it is.

    What counts is tokens per second and request of the last minute; of two engines nobody can say
    which is slow.
    """
    loads = [event for event in events if event["event"] == "load" and event["in_flight"]]
    since = max((event["time"] for event in loads), default=0.0) - _RECENT_S
    tokens, seconds = defaultdict[str, float](float), defaultdict[str, float](float)
    for event in loads:
        if event["time"] > since:
            tokens[event["id"]] += event["num_tokens"]
            seconds[event["id"]] += event["seconds"] * event["in_flight"]
    rates = {name: tokens[name] / spent for name, spent in seconds.items() if spent}
    found = {name: _how_slow(rate, middle) for name, rate, middle in slow_of(rates)}
    now = max((event["time"] for event in events), default=0.0)
    for event in events:
        if event["event"] == "rests" and event["time"] + event["seconds"] > now:
            said = _how_slow(event["rate"], event["median"])
            found[event["id"]] = f"{said}; a task asks nothing new of it"
    return found


def _how_slow(rate: float, middle: float) -> str:
    return f"slow: {rate:.3g} tokens/s per request, the median engine {middle:.3g}"


def _nodes(events: Sequence[Event]) -> dict[str, str]:
    """Returns the node on which each task was started last."""
    starts = [event for event in events if event["event"] == "start"]
    return {f"{event['role']}-{event['rank']}": str(event["node"]) for event in starts}


def _initial(
    paths: RunPaths,
    config: RunConfig,
    roster: Roster | None,
    added: Set[str],
    nodes: Mapping[str, str],
) -> list[Row]:
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


def _of_initial(paths: RunPaths, pool: str, engine: str, node: str, roster: Roster | None) -> Row:
    record, member = paths.member(engine), members.find(paths, engine)
    given = roster.members.get(engine) if roster else None
    version = given.version if given else None
    if roster is None and member and member.version >= 0:  # it loads by itself
        version = member.version
    return Row(
        pool,
        engine,
        standing(member, roster),
        node,
        version if follows_policy(pool) else "fixed",
        record.stat().st_mtime if member else None,
        None,
        member.reason if member and member.state in ("STARTING", "WAITING") else "",
    )


def _of_extra(paths: RunPaths, extra: Extra, roster: Roster | None) -> Row:
    state, version = extra.state, None
    if extra.process and not extra.ended and not extra.ending:
        state = standing(members.find(paths, extra.id), roster)
    if roster and extra.id in roster.members and not extra.ended:
        version = roster.members[extra.id].version
    return Row(ROLLOUT, extra.id, state, extra.node, version, extra.since, None, extra.reason)


def _over(row: Row) -> Row:
    """Returns the row of an engine after the run."""
    return (
        _unloaded(row) if row.state in ENDED else _unloaded(replace(row, state="GONE", reason=""))
    )


def _pending(row: Row) -> Row:
    """Returns the row of a job that waits: what an earlier attempt of it left is no engine."""
    if row.state in ENDED:
        return row
    return replace(_unloaded(row), state="PENDING", node="", since=None, reason="")


def weights(row: Row) -> str:
    """The version of its weights in a word."""
    if row.version is None:
        return "-"
    return row.version if row.version == "fixed" else f"v{row.version}"


def _unloaded(row: Row) -> Row:
    return replace(row, version="fixed" if row.version == "fixed" else None)
