"""What a run is doing: Slurm's word on its components, joined with the facts it leaves on disk."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from submitit.core.utils import JobPaths

from relax_hpc.launch import record, scale_rows, states
from relax_hpc.launch.entry import succeeded
from relax_hpc.launch.local import processes
from relax_hpc.launch.record import LaunchedComponent, LaunchRecord
from relax_hpc.launch.scale_rows import Row
from relax_hpc.launch.script import exit_code_file
from relax_hpc.paths import RunPaths


@dataclass(frozen=True, slots=True)
class ComponentStatus:
    role: str
    job_id: str
    tasks: int
    finished_tasks: int
    """Tasks that returned."""
    state: str
    """Slurm's word; locally the same words, and RESTARTING between two starts of a step."""
    nodes: str


@dataclass(frozen=True, slots=True)
class RunStatus:
    run_dir: Path
    name: str
    mode: str
    job_id: str
    state: str
    """Of the job as a whole: that of the component that is worst off."""
    components: tuple[ComponentStatus, ...]
    extras: tuple[Row, ...]
    """Engines that were added and are there, or failed."""
    progress: dict[str, Any]
    """Steps, held-out scores, trajectories: `roles.summary.summarize`."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str, indent=1, allow_nan=False)


_WORST_FIRST = ("FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "CANCELLED", "UNKNOWN")
ACTIVE = ("PENDING", "RESTARTING", "RUNNING", "COMPLETING")


def collect(run_dir: Path) -> RunStatus:
    """Looks at a run without disturbing it.

    Raises:
        ConfigError: not a run directory, or nothing was started in it.
    """
    from relax_hpc.roles import summary

    run_dir = run_dir.absolute()
    launched = record.read(run_dir)
    components = tuple(_components(launched))
    return RunStatus(
        run_dir=run_dir,
        name=run_dir.name,
        mode=launched.mode,
        job_id=launched.leader,
        state=_state(launched, components),
        components=components,
        extras=tuple(scale_rows.extras(RunPaths(run_dir))),
        progress=summary.summarize(run_dir),
    )


def job_state(run_dir: Path) -> str:
    """`RunStatus.state`, without the cost of the rest."""
    launched = record.read(run_dir.absolute())
    return _state(launched, _components(launched))


def _state(launched: LaunchRecord, components: Sequence[ComponentStatus]) -> str:
    state = overall([component.state for component in components])
    if state not in ACTIVE and launched.controller is not None and launched.controller.find():
        return "COMPLETING"  # the script is still writing the summary
    return state


def _components(launched: LaunchRecord) -> list[ComponentStatus]:
    return _local(launched) if launched.controller else _slurm(launched)


def overall(found: list[str]) -> str:
    """One word for all components: active while any is, else that of the worst."""
    for state in (*ACTIVE, *_WORST_FIRST):
        if state in found:
            return state
    return found[0]


def _slurm(launched: LaunchRecord) -> list[ComponentStatus]:
    known = states.query(launched.leader)
    unknown = _afterwards(launched)
    return [
        _status(launched, component, found.state, found.nodes)
        for component in launched.components
        for found in [known.get(component.job_id, states.SlurmState(component.job_id, unknown, ""))]
    ]


def _local(launched: LaunchRecord) -> list[ComponentStatus]:
    assert launched.controller is not None
    running = launched.controller.find() is not None
    components = []
    for component in launched.components:
        alive = any(task.find() for task in processes(component.folder, launched.leader))
        if alive:
            state = "RUNNING"
        elif _finished_tasks(launched, component) == component.tasks:
            state = "COMPLETED"
        else:
            state = "RESTARTING" if running else _afterwards(launched)
        components.append(_status(launched, component, state, "this machine"))
    return components


def _status(
    launched: LaunchRecord, component: LaunchedComponent, state: str, nodes: str
) -> ComponentStatus:
    return ComponentStatus(
        role=component.role,
        job_id=component.job_id,
        tasks=component.tasks,
        finished_tasks=_finished_tasks(launched, component),
        state=state,
        nodes=nodes,
    )


def _finished_tasks(launched: LaunchRecord, component: LaunchedComponent) -> int:
    tasks = range(component.tasks)
    return sum(
        succeeded(JobPaths(component.folder, launched.leader, task).result_pickle) for task in tasks
    )


def _afterwards(launched: LaunchRecord) -> str:
    """How the job ended, by what its script left; a script that was killed leaves nothing."""
    try:
        code = int(exit_code_file(launched.folder, launched.leader).read_text())
    except (FileNotFoundError, ValueError):
        return "UNKNOWN" if launched.controller is None else "FAILED"
    return {0: "COMPLETED", 143: "CANCELLED"}.get(code, "FAILED")
