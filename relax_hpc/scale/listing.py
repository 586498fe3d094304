"""The engines of a run, those it started with and those that were added, one row each."""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from relax_hpc import job_file
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.client import EngineClient
from relax_hpc.errors import ConfigError, EngineError, LaunchError
from relax_hpc.fleet import members
from relax_hpc.fleet.scaling import Outcome, Request, ScaleState, pending
from relax_hpc.fleet.standing import ENDED
from relax_hpc.launch import states
from relax_hpc.paths import RunPaths
from relax_hpc.run_secret import RunSecret
from relax_hpc.runs import engine_rows, status
from relax_hpc.runs.engine_rows import Row
from relax_hpc.telemetry.events import events_of_state
from relax_hpc.telemetry.progress import duration
from relax_hpc.telemetry.tables import align

_LOAD_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Listing:
    rows: tuple[Row, ...]
    free: int
    """Engines that can be added, now or once the job is no longer pending."""
    last: Request | None
    """The newest request."""
    outcome: Outcome | None
    over: bool
    """Whether the run has ended."""
    pending: bool
    """Whether its job waits to be started, for the first time or again."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, allow_nan=False)


def collect(run_dir: Path) -> Listing:
    """Looks at the records, and asks the engines how much they have to do.

    Raises:
        ConfigError: not a run directory, nothing was started in it, or it has no engines.
    """
    paths = RunPaths(run_dir.absolute())
    found = status.job_state(run_dir)
    over, waits = states.is_over(found), states.is_waiting(found)
    config = job_file.read_resolved(paths.config)
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{run_dir}: is supervised fine-tuning, which has no engines")
    state = ScaleState.read(paths)
    rows = engine_rows.rows(paths, config, found, events_of_state(paths.events_folder))
    if not over and not waits:
        rows = _with_load(paths, rows)
    number, request = pending(paths, state) if state else (0, None)
    last = request or (Request.read(paths, number) if number else None)
    outcome = state.requests.get(last.id) if state and last else None
    free = len(state.free) if state and not waits else _room(config)
    return Listing(tuple(rows), 0 if over else free, last, outcome, over, waits)


def text(listing: Listing) -> str:
    """A table, and what the newest request has come to."""
    head = ("engine", "pool", "state", "node", "version", "since", "requests", "")
    lines = [align([head, *(_cells(row) for row in listing.rows)])]
    if listing.last:
        lines.append(f"{listing.last}: {_of_request(listing)}")
    if not listing.over:
        when = ", once the run has been started" if listing.pending else ""
        lines.append(f"room for {listing.free} more{when}")
    return "\n".join(lines)


def _of_request(listing: Listing) -> str:
    outcome = listing.outcome
    if outcome is None or not outcome.final:
        return "not settled when the run ended" if listing.over else "pending"
    return outcome.state.lower() + (f": {outcome.reason}" if outcome.reason else "")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.id,
        row.pool,
        row.state.lower(),
        row.node or "-",
        engine_rows.weights(row),
        "-" if row.since is None else f"{duration(time.time() - row.since)} ago",
        "-" if row.requests is None else str(row.requests),
        row.reason,
    )


def _room(config: RunConfig) -> int:
    """Engines that the nodes which a run holds besides those it starts on have room for."""
    resources = config.rollout_pool.resources
    idle = (resources.max_nodes or resources.nodes) - resources.nodes
    return idle * (config.rollout_pool.count // resources.nodes)


def _with_load(paths: RunPaths, rows: Sequence[Row]) -> list[Row]:
    try:
        secret = RunSecret.read(paths.secret)
    except LaunchError:  # somebody else's run, of which we may see the rest
        return list(rows)

    def ask(row: Row) -> Row:
        member = None if row.state in ENDED else members.find(paths, row.id)
        if member is None or not member.url:
            return row
        token = secret.engine_token(member.id, member.start)
        try:
            with EngineClient(member.url, token, timeout_s=_LOAD_TIMEOUT_S) as engine:
                return replace(row, requests=engine.num_requests())
        except EngineError:
            return row

    with ThreadPoolExecutor(max_workers=32) as threads:
        return list(threads.map(ask, rows))
