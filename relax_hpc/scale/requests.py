"""The work of `relax-hpc scale`: writes down what is wanted, and tells what there is.

The scaler, a process inside the job, does the work; so nothing here outlives the command.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, get_args

from relax_hpc import job_file
from relax_hpc.config.rollout import Transport
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError, LaunchError, PeerTimeoutError
from relax_hpc.fleet.scaling import Kind, Outcome, Request, ScaleState, pending
from relax_hpc.launch import states
from relax_hpc.paths import RunPaths
from relax_hpc.printable import argument
from relax_hpc.records import write_json_once
from relax_hpc.runs import status

_POLL_S = 0.5
_SCALER_START_S = 30
_MARGIN_S = 120
"""Seconds for Slurm to start and end steps, besides what engines are given."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The outcome of a request to scale."""

    request: Request | None
    """None: there is nothing to do."""
    repeated: bool
    """The same had been asked before and is under way."""
    engines: int
    """Engines that the run has, or shall have once its requests are settled."""


def out(run_dir: Path, engines: int, transport: str | None = None) -> Asked:
    """Asks for engines to be added until the run has `engines` in all.

    Args:
        run_dir: of a run that is running.
        engines: how many there shall be.
        transport: how weights get to those that are added, if not as the run's setting says.

    Raises:
        ConfigError: it cannot be; nothing was changed.
    """
    if engines < 1:
        raise ConfigError(f"--engines {engines}: is not positive; say how many there shall be")
    config, paths, state = _running(run_dir)
    wanted = replace(_wanted("out", engines), transport=_transport(transport))
    return _ask(
        paths,
        wanted,
        lambda: _check_out(config, state(), engines),
        state,
        config.rollout_pool.count,
    )


def scale_in(run_dir: Path, *, engines: int | None, member: str | None, drain_s: float) -> Asked:
    """Asks for engines to be removed: one of them, or until the run has `engines` in all.

    Raises:
        ConfigError: it cannot be; nothing was changed.
    """
    if (engines is None) == (member is None):
        raise ConfigError("scale in: say either --engines or --member")
    if engines is not None and engines < 1:
        raise ConfigError(f"--engines {engines}: is not positive; say how many there shall be")
    config, paths, state = _running(run_dir)
    wanted = replace(_wanted("in", engines or 0), member=member, drain_s=drain_s)
    return _ask(
        paths, wanted, lambda: _check_in(config, state(), wanted), state, config.rollout_pool.count
    )


def cancel(run_dir: Path) -> Request:
    """Takes back the request under way; what was started for it is ended.

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


class Settled(NamedTuple):
    request: Request
    outcome: Outcome


def wait(run_dir: Path, request: Request) -> Settled:
    """Waits until a request is settled.

    Raises:
        LaunchError: the run ended before.
        PeerTimeoutError: the scaler did not settle it in time.
    """
    paths = RunPaths(run_dir.absolute())
    config = job_file.read_resolved(paths.config)
    assert isinstance(config, RunConfig)
    patience = config.rollout_pool.start_timeout_s + config.launch.peer_timeout_s
    timeout_s = _MARGIN_S + (request.drain_s if request.kind == "in" else patience)
    deadline = time.monotonic() + timeout_s
    while True:
        state = ScaleState.read(paths)
        outcome = state.requests.get(request.id) if state else None
        if outcome is not None and outcome.final:
            return Settled(request, outcome)
        if states.is_over(status.job_state(run_dir)):
            raise LaunchError(f"{run_dir}: ended before {request} was settled")
        if time.monotonic() > deadline:
            raise PeerTimeoutError(
                f"{run_dir}: its scaler has not settled {request} within {timeout_s:.0f} s; "
                f"see relax-hpc logs {argument(run_dir)} for lines of job: scaler"
            )
        time.sleep(_POLL_S)


def _transport(name: str | None) -> Transport | None:
    if name is None or name in get_args(Transport):
        return name  # type: ignore[return-value]
    raise ConfigError(f"--transport {name}: unknown; it is one of {', '.join(get_args(Transport))}")


def _wanted(kind: Kind, engines: int) -> Request:
    return Request(0, kind, engines, None, 0.0, time.time())


def _running(run_dir: Path) -> tuple[RunConfig, RunPaths, Callable[[], ScaleState]]:
    """A run that can be scaled, and how to read its scaler's state."""
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
    wanted: Request,
    needed: Callable[[], bool],
    state: Callable[[], ScaleState],
    initial: int,
) -> Asked:
    """Writes a request down, unless it is there, or has nothing to do, or another is under way."""
    while True:
        number, under_way = pending(paths, state())
        if under_way is not None:
            if under_way.asks_the_same(wanted):
                return Asked(under_way, repeated=True, engines=under_way.engines)
            raise ConfigError(
                f"{under_way} is under way, one at a time; wait for it, "
                f"or: relax-hpc scale cancel {argument(paths.root)}"
            )
        if not needed():
            _check_running(paths.root)  # or it has ended, and its added engines with it
            return Asked(None, repeated=False, engines=initial + len(state().staying))
        request = replace(wanted, id=number + 1)
        record = {name: getattr(request, name) for name in request.__slots__}
        if write_json_once(paths.scale_request(request.id), record):
            return Asked(request, repeated=False, engines=request.engines)


def _check_out(config: RunConfig, state: ScaleState, engines: int) -> bool:
    """Returns whether there is anything to do; raises ConfigError if there is no room for it."""
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


def _check_in(config: RunConfig, state: ScaleState, wanted: Request) -> bool:
    """Returns whether there is anything to do; raises ConfigError if it cannot be done."""
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
