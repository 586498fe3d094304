"""Implements `relax-hpc scale`: writes requests for the scaler, and lists engines.

The scaler, a process inside the job, executes them, so nothing here outlives the command.
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

from relax_hpc.config import job_file
from relax_hpc.config.rollout import TransportName
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError, EngineError, LaunchError, PeerTimeoutError
from relax_hpc.inference import members
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.members import ENDED
from relax_hpc.launch import states
from relax_hpc.runs import status
from relax_hpc.runs.scale.records import Kind, ScaleOutcome, ScaleRequest, ScaleState, pending
from relax_hpc.runs.status import EngineRow
from relax_hpc.runtime.files.records import write_json_once
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import events_of_state
from relax_hpc.runtime.telemetry.progress import duration
from relax_hpc.runtime.text import align, argument

_POLL_S = 0.5
_SCALER_START_S = 30
_MARGIN_S = 120
"""Seconds for Slurm to start and end steps, besides the engines' own."""


@dataclass(frozen=True, slots=True)
class ScaleResponse:
    """The outcome of a request to scale."""

    request: ScaleRequest | None
    """None if there is nothing to do."""
    repeated: bool
    """Whether the same request is already pending."""
    engines: int
    """Number of engines once the run's requests are settled."""


def out(run_dir: Path, engines: int, transport: str | None = None) -> ScaleResponse:
    """Requests engines until the run has `engines` in all.

    Args:
        run_dir: of a running run.
        transport: of weights to the added engines; default is the run's.

    Raises:
        ConfigError: impossible; nothing was changed.
    """
    if engines < 1:
        raise ConfigError(f"--engines {engines}: is not positive; say how many there shall be")
    config, paths, state = _running(run_dir)
    wanted = replace(_make_request("out", engines), transport=_transport(transport))
    return _ask(
        paths,
        wanted,
        lambda: _check_out(config, state(), engines),
        state,
        config.rollout_pool.count,
    )


def scale_in(
    run_dir: Path, *, engines: int | None, member: str | None, drain_s: float
) -> ScaleResponse:
    """Requests the removal of one engine, or until the run has `engines` in all.

    Raises:
        ConfigError: impossible; nothing was changed.
    """
    if (engines is None) == (member is None):
        raise ConfigError("scale in: say either --engines or --member")
    if engines is not None and engines < 1:
        raise ConfigError(f"--engines {engines}: is not positive; say how many there shall be")
    config, paths, state = _running(run_dir)
    wanted = replace(_make_request("in", engines or 0), member=member, drain_s=drain_s)
    return _ask(
        paths, wanted, lambda: _check_in(config, state(), wanted), state, config.rollout_pool.count
    )


def cancel(run_dir: Path) -> ScaleRequest:
    """Withdraws the pending request; what was started for it is ended.

    Raises:
        ConfigError: there is none, or it removes engines.
    """
    _, paths, state = _running(run_dir)
    _, request = pending(paths, state())
    if request is None:
        raise ConfigError(
            f"{run_dir}: no request is under way; see relax-hpc scale list {argument(run_dir)}"
        )
    if request.kind == "in":
        raise ConfigError(
            f"{request}: engines that drain do not come back; "
            f"once it is done, add others: relax-hpc scale out {argument(run_dir)}"
        )
    write_json_once(paths.scale_cancel(request.id), {"time": time.time()})
    return request


def wait(run_dir: Path, request: ScaleRequest) -> ScaleOutcome:
    """Waits until a request is settled.

    Raises:
        LaunchError: the run ended before.
        PeerTimeoutError: the scaler did not settle it in time.
    """
    paths = RunPaths(run_dir.absolute())
    config = job_file.read_resolved(paths.config)
    assert isinstance(config, RunConfig)
    patience = config.rollout_pool.advanced.start_timeout_s + config.launch.advanced.peer_timeout_s
    timeout_s = _MARGIN_S + (request.drain_s if request.kind == "in" else patience)
    deadline = time.monotonic() + timeout_s
    while True:
        state = ScaleState.read(paths)
        outcome = state.requests.get(request.id) if state else None
        if outcome is not None and outcome.final:
            return outcome
        if states.is_over(status.job_state(run_dir)):
            raise LaunchError(f"{run_dir}: ended before {request} was settled")
        if time.monotonic() > deadline:
            raise PeerTimeoutError(
                f"{run_dir}: its scaler has not settled {request} within {timeout_s:.0f} s; "
                f"see relax-hpc logs {argument(run_dir)} for lines of job: scaler"
            )
        time.sleep(_POLL_S)


def _transport(name: str | None) -> TransportName | None:
    if name is None or name in get_args(TransportName):
        return name  # type: ignore[return-value]
    raise ConfigError(
        f"--transport {name}: unknown; it is one of {', '.join(get_args(TransportName))}"
    )


def _make_request(kind: Kind, engines: int) -> ScaleRequest:
    return ScaleRequest(0, kind, engines, None, 0.0, time.time())


def _running(run_dir: Path) -> tuple[RunConfig, RunPaths, Callable[[], ScaleState]]:
    """Returns a scalable run, and a reader of its scaler's state."""
    paths = RunPaths(run_dir.absolute())
    config = job_file.read_resolved(paths.config)
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{run_dir}: is supervised fine-tuning, which has no engines to scale")
    _check_running(run_dir)
    if config.rollout_pool.placement == "actor":
        raise ConfigError(
            f'{run_dir}: engines.rollout.placement = "actor": its engines are those on the '
            "actor's GPUs, however weights get to them; to add others, submit a run whose "
            'engines.rollout.placement is "own"'
        )
    if config.rollout_pool.nodes_per_engine > 1:
        raise ConfigError(
            f"{run_dir}: engines.rollout.nodes_per_engine = "
            f"{config.rollout_pool.nodes_per_engine}: engines that span nodes cannot be "
            "added; submit a run with more of them"
        )
    resources = config.rollout_pool.resources
    if (resources.max_nodes or 0) <= resources.nodes:
        raise ConfigError(
            f"{run_dir}: no idle node: rollout holds {_count(resources.nodes, 'node')}, all used "
            "by the engines it started with; submit a run with more "
            "engines.rollout.resources.max_nodes"
        )

    def state() -> ScaleState:
        deadline = time.monotonic() + _SCALER_START_S
        while (read := ScaleState.read(paths)) is None:
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"{run_dir}: its scaler has not started within {_SCALER_START_S} s; "
                    f"see relax-hpc logs {argument(run_dir)} for lines of job: scaler"
                )
            time.sleep(_POLL_S)
        return read

    return config, paths, state


def _check_running(run_dir: Path) -> None:
    found = status.job_state(run_dir)
    if found not in ("RUNNING", "RESTARTING"):
        raise ConfigError(f"{run_dir}: is {found.lower()}; only a run that is running is scaled")


def _ask(
    paths: RunPaths,
    wanted: ScaleRequest,
    needed: Callable[[], bool],
    state: Callable[[], ScaleState],
    initial: int,
) -> ScaleResponse:
    """Writes a request, unless it exists, changes nothing, or another is pending."""
    while True:
        number, under_way = pending(paths, state())
        if under_way is not None:
            if under_way.asks_the_same(wanted):
                return ScaleResponse(under_way, repeated=True, engines=under_way.engines)
            raise ConfigError(
                f"{under_way} is under way, one at a time; wait for it, "
                f"or: relax-hpc scale cancel {argument(paths.root)}"
            )
        if not needed():
            _check_running(paths.root)  # or it has ended, and its added engines with it
            return ScaleResponse(None, repeated=False, engines=initial + len(state().staying))
        request = replace(wanted, id=number + 1)
        record = {name: getattr(request, name) for name in request.__slots__}
        if write_json_once(paths.scale_request(request.id), record):
            return ScaleResponse(request, repeated=False, engines=request.engines)


def _check_out(config: RunConfig, state: ScaleState, engines: int) -> bool:
    """Whether there is anything to do; raises ConfigError without room."""
    missing = engines - config.rollout_pool.count - len(state.staying)
    if missing > len(state.free):
        nodes = config.rollout_pool.resources.nodes
        used = len({extra.node for extra in state.live})
        raise ConfigError(
            f"--engines {engines}: no idle node for {_count(missing, 'more engine')}: rollout "
            f"holds {_count(nodes + len(state.nodes), 'node')}, {nodes} used by the engines it "
            f"started with, {used} by added ones; room is left for {len(state.free)}, so use "
            f"{engines - missing + len(state.free)} or less"
        )
    return missing > 0


def _check_in(config: RunConfig, state: ScaleState, wanted: ScaleRequest) -> bool:
    """Whether there is anything to do; raises ConfigError if impossible."""
    initial = config.rollout_pool.count
    if wanted.member is None:
        if wanted.engines < initial:
            raise ConfigError(
                f"--engines {wanted.engines}: the {_count(initial, 'engine')} that the run started "
                f"with cannot be removed; use {initial} or more"
            )
        return wanted.engines < initial + len(state.staying)
    if wanted.member in state.extras:
        return not state.extras[wanted.member].ended
    known = ", ".join(extra.id for extra in state.staying) or "none"
    if wanted.member.startswith("rollout-"):
        raise ConfigError(
            f"--member {wanted.member}: is one that the run started with, which cannot be removed; "
            f"added engines: {known}"
        )
    raise ConfigError(f"--member {wanted.member}: no such engine; added engines: {known}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


_LOAD_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Listing:
    rows: tuple[EngineRow, ...]
    free: int
    """Engines that can be added, now or once the job runs."""
    last: ScaleRequest | None
    outcome: ScaleOutcome | None
    over: bool
    pending: bool
    """Whether its job waits to be started, for the first time or again."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, allow_nan=False)


def collect(run_dir: Path) -> Listing:
    """Reads the records, and asks the engines for their load.

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
    rows = status.list_engines(paths, config, found, events_of_state(paths.events_folder))
    if not over and not waits:
        rows = _with_load(paths, rows)
    number, request = pending(paths, state) if state else (0, None)
    last = request or (ScaleRequest.read(paths, number) if number else None)
    outcome = state.requests.get(last.id) if state and last else None
    free = len(state.free) if state and not waits else _room(config)
    return Listing(tuple(rows), 0 if over else free, last, outcome, over, waits)


def text(listing: Listing) -> str:
    """Formats a table, and the result of the newest request."""
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


def _cells(row: EngineRow) -> tuple[str, ...]:
    return (
        row.id,
        row.pool,
        row.state.lower(),
        row.node or "-",
        row.weights,
        "-" if row.since is None else f"{duration(time.time() - row.since)} ago",
        "-" if row.requests is None else str(row.requests),
        row.reason,
    )


def _room(config: RunConfig) -> int:
    """Engines that fit on the held nodes beyond the initial ones."""
    resources = config.rollout_pool.resources
    idle = (resources.max_nodes or resources.nodes) - resources.nodes
    return idle * (config.rollout_pool.count // resources.nodes)


def _with_load(paths: RunPaths, rows: Sequence[EngineRow]) -> list[EngineRow]:
    try:
        secret = RunSecret.read(paths.secret)
    except LaunchError:  # somebody else's run, of which we may see the rest
        return list(rows)

    def ask(row: EngineRow) -> EngineRow:
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
