"""Generates the script that runs a job, for Slurm and for this machine.

Slurm runs it as a batch script on the first node of component 0; locally bash runs it. The two
differ in the `#SBATCH` lines and in the launcher of a step: `srun`, or our `local_step`. All other
lines are the same.
"""

import itertools
import re
import shlex
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_hpc.config.run import RESTART_DELAYS_S, RESTART_WINDOW_S
from relax_hpc.launch import interpreter, requeue
from relax_hpc.launch.placement import PASSED_ON, SAME_NAME, Component, groups
from relax_hpc.launch.supervision import (
    BEGIN,
    INHERITED,
    KEEP,
    PLAIN,
    RING,
    SET_ASIDE,
    SUPERVISION,
    WAIT,
)
from relax_hpc.roles.role import Side
from relax_hpc.runtime.paths import RunPaths

# Options that only mean something once in a heterogeneous job: component 0 says them.
_LEADER_ONLY = {
    *("output", "open-mode", "requeue", "job-name", "comment", "mail-user", "mail-type"),
    *("dependency",),
}

_STOPPED = "the job was told to end: cancelled, preempted, or out of time"
_NO_HOLDER = "the process that gives idle nodes back fails again and again; resume the run"


@dataclass(frozen=True, slots=True)
class Job:
    """The facts for the script besides its components."""

    name: str
    run_dir: Path
    max_restarts: int = 0
    restart_delays_s: tuple[float, ...] = RESTART_DELAYS_S
    has_summary: bool = True
    """Whether to write a summary at the end; false for toy jobs in tests."""
    task: tuple[str, ...] = ("-P", "-m", "relax_hpc.launch.entry")
    """Python's arguments in every task."""
    look_every_s: float = 15.0
    """Seconds between checks that a step over several components is alive."""
    umask: int = 0o077
    """Umask of all tasks and logs."""
    comment: str | None = None
    mail: str | None = None
    """Address for Slurm's mails."""
    dependency: str | None = None
    exports: tuple[str, ...] = ()
    """Services that get the curves."""
    seen: Path | None = None
    """Folder mounted in images; default is the run directory's parent."""
    side: Side | None = None
    """The run's side that is this job; None for a single job."""
    next_claim: Path | None = None
    """Exists once the run was started anew: then a late job must end at once."""

    @property
    def seen_folder(self) -> Path:
        return self.seen or self.run_dir.parent

    @property
    def folder(self) -> Path:
        return RunPaths(self.run_dir).submission

    def component_folder(self, component: Component) -> Path:
        return RunPaths(self.run_dir).component(component.name)


def make_folders(job: Job, components: Sequence[Component]) -> None:
    for component in components:
        job.component_folder(component).mkdir(parents=True, exist_ok=True)


def slurm_script(job: Job, components: Sequence[Component]) -> str:
    """Returns the batch script of a job, heterogeneous if it has several components.

    Its log is FOLDER/<job id>_batch.log.
    """
    head, group_of, before = ["#!/bin/bash"], groups(components), set[str]()
    for index, component in enumerate(components):
        if component.on is None:
            head += ["#SBATCH hetjob"] if group_of[index] else []
            head += [f"# component {group_of[index]}: {component.name}"]
            head += _directives(job, index, component, before)
            before |= {name for name in PASSED_ON if getattr(component.resources, name)}
    several = max(group_of) > 0
    ranks_before = itertools.accumulate((each.tasks for each in components), initial=0)
    steps = [
        (k, ranks, _srun(job, k, each, first_rank, ranks, group=group_of[k] if several else None))
        for k, (each, first_rank) in enumerate(zip(components, ranks_before, strict=False))
        for ranks in each.steps
    ]
    pmix = any(each.has_pmix for each in components)
    prepare = [
        f"unset {INHERITED}",
        f"export SLURM_UMASK={job.umask:04o}",  # srun would give tasks that of sbatch
        "export SLURM_EXPORT_ENV=ALL",  # whatever of its environment sbatch was told to export
        "export SUBMITIT_EXECUTOR=hetslurm PYTHONUTF8=1",  # whatever locale `setup` sets
        "job_id=$SLURM_JOB_ID",
        'ask_controller=(squeue --noheader --jobs="$job_id")',
        *([RING] if pmix else []),
    ]
    return _assemble(head, prepare, job, components, steps, [])


def local_script(job: Job, components: Sequence[Component]) -> str:
    """Returns the same without Slurm: run as `bash SCRIPT JOB_ID`."""
    first, first_gpu = dict[str, int](), 0
    for component in components:
        if component.on is None:
            first[component.name] = first_gpu
            first_gpu += component.resources.gpus_per_node
    steps = [
        (k, range(each.tasks), _local_step(job, each, first[each.on or each.name]))
        for k, each in enumerate(components)
    ]
    prepare = [
        *("unset SLURM_RESTART_COUNT", "export SUBMITIT_EXECUTOR=local PYTHONUTF8=1", "job_id=$1"),
        "ask_controller=(true)",
    ]
    return _assemble(["#!/bin/bash"], prepare, job, components, steps, ["--local"])


def batch_log(folder: Path, job_id: str) -> Path:
    """Returns the script's own log: starts, restarts, and why it gave up."""
    return folder / f"{job_id}_batch.log"


def exit_code_file(folder: Path, job_id: str) -> Path:
    """Returns the file that the script writes last; 143 means cancelled."""
    return folder / f"{job_id}_exit_code"


def _assemble(
    head: list[str],
    prepare: list[str],
    job: Job,
    components: Sequence[Component],
    steps: Sequence[tuple[int, range, str]],
    scaler_options: list[str],
) -> str:
    code = f'{shlex.quote(str(job.folder))}/"$job_id"_exit_code'
    lines = [
        *head, BEGIN, SET_ASIDE, f"umask {job.umask:04o}", *prepare,
        *_check_superseded(job),
        f"rm -f {code} # of an attempt that Slurm requeued",
        f"max_restarts={job.max_restarts}",
        f"restart_delays_s=({' '.join(map(str, job.restart_delays_s))})",
        f"restart_window_s={RESTART_WINDOW_S:.0f}",
        f"look_every_s={job.look_every_s}",
        f"verdict=({shlex.join(_verdict(job)) if job.has_summary else ''})", "",
        SUPERVISION, KEEP,
        '[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || tell requeued --before',
    ]  # fmt: skip
    if components[0].bootstrap == "mpi_job":
        whole = " : ".join(step for _, _, step in steps)
        lines += _supervise(job, dict(enumerate(components)), steps[0][1], whole)
    else:
        for index, ranks, step in steps:
            lines += _supervise(job, {index: components[index]}, ranks, step)
    if job.has_summary and any(each.held_nodes > each.nodes for each in components):
        module = _module(job, "relax_hpc.runs.scale.scaler")
        scaler = shlex.join([*module, *scaler_options])
        lines += [f'serve scaler {scaler} --job-id "$job_id" --controller "$$" & server=$!', ""]
    for each in _holder(job):  # without it nobody would start the other side
        gone = f'tell ended --words {shlex.quote(_NO_HOLDER)}; kill -USR1 "$$"'
        lines += [f'{{ serve holder {each} --controller "$$" || {{ {gone}; }}; }} & server=$!', ""]
    sums_up = job.has_summary and job.side != "training"  # rollout ends last
    if sums_up:
        module = _module(job, "relax_hpc.runs.boards.follower")
        for board in ("tensorboard", *job.exports):
            follower = shlex.join([*module, "--to", board])
            lines.append(f'{follower} --job-id "$job_id" --controller "$$" & boards+=($!)')
        lines.append("")
    lines.append(WAIT)
    lines += [f'[ -n "$stopping" ] || {each} --leave' for each in _holder(job)]
    if job.has_summary:
        finish = shlex.join(_module(job, "relax_hpc.runs.boards.finish"))
        told = '--exit-code "$exit_code" "${ended[@]}"'
        lines.append(f'[ -z "$stopping" ] || tell stopped --words {shlex.quote(_STOPPED)}')
    if sums_up:
        lines.append(f'[ -n "$stopping" ] || {finish} {told} || exit_code=1')
    lines += [
        '[ -z "$stopping" ] || exit_code=143',
        f'echo "$exit_code" > {code}',
        'exit "$exit_code"',
        "",
    ]
    return "\n".join(lines)


def _holder(job: Job) -> list[str]:
    """Lines for the process that gives idle nodes back, if the job is one side of a run."""
    if job.side is None:
        return []
    module = _module(job, "relax_hpc.launch.holder")
    return [f'{shlex.join([*module, "--side", job.side])} --job-id "$job_id"']


def _module(job: Job, name: str) -> list[str]:
    """Command for a module of ours; `-P` keeps files of the working directory from shadowing
    modules."""
    return [sys.executable, "-P", "-m", name, str(job.run_dir)]


def _verdict(job: Job) -> list[str]:
    return _module(job, "relax_hpc.runs.verdict")


def _check_superseded(job: Job) -> list[str]:
    """Lines that end a requeued job if its run was resumed or cancelled meanwhile."""
    if job.next_claim is None:
        return []
    claim = shlex.quote(str(job.next_claim))
    cancelled = f'{shlex.quote(str(RunPaths(job.run_dir).control))}/cancelled-"$job_id".json'
    # What starts for the first time is ended by scancel: Slurm then says that it was cancelled.
    of_a_requeued = f'[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || [ ! -e {cancelled} ]'
    return [
        f'[ ! -e {claim} ] || {{ echo "the run was resumed meanwhile: ending"; exit 1; }}',
        f'{of_a_requeued} || {{ echo "the run was cancelled: ending; resume it"; exit 1; }}',
    ]


def _supervise(job: Job, components: Mapping[int, Component], own: range, step: str) -> list[str]:
    """Lines of a function that keeps one step going, and the line that starts it.

    Args:
        components: of the step, by their index in the job.
        own: ranks of the step, if it has one component.
        step: its command.
    """
    names = "+".join(component.name for component in components.values())
    tasks = sum(component.tasks for component in components.values())
    folders = [str(job.component_folder(component)) for component in components.values()]
    setup = [line for each in components.values() for line in set_up(names, each.resources.setup)]
    name, ranks = f"component_{min(components)}", list[str]()
    if len(components) == 1 and len(own) < tasks:
        tasks, name = len(own), f"{name}_{own.start}"
        ranks = [f"  local ranks=({' '.join(map(str, own))})"]
    return [
        f"{name}() {{",
        *(f"  {line}" for line in setup),
        *ranks,
        f"  supervise {shlex.join([names, str(tasks), *folders])} -- {step}",
        "}",
        f"{name} & components+=($!) names+=({shlex.quote(names)})",
        "",
    ]


def set_up(name: str, commands: Sequence[str]) -> list[str]:
    """Lines that run a job's set-up commands in its own shell; `setup_failed` names a failing one.

    They follow `BEGIN`, and in a job's script `KEEP`.
    """
    # A newline before the brace: the command may end in a comment.
    run = '{{ {}\n  }} || setup_failed {} "$?" {}'.format
    lines = [run(line, shlex.quote(name), shlex.quote(line)) for line in commands]
    return [each for line in lines for each in (line, PLAIN)]


def _environment(component: Component) -> list[str]:
    """Lines for the environment of tasks on GPUs, unless the submitter sets it."""
    if not component.environment or not component.resources.gpus_per_node:
        return []
    values = component.environment.items()
    return ["env", *(f'{name}="${{{name}:-{value}}}"' for name, value in values)]


def _directives(job: Job, index: int, component: Component, before: Set[str]) -> list[str]:
    """Options of sbatch for a component; `before` are those of `PASSED_ON` already set."""
    resources = component.resources
    options: dict[str, Any] = {
        "job-name": job.name,
        "nodes": component.held_nodes,
        "ntasks-per-node": component.tasks_per_node,
        "gpus-per-node": component.gpus,
        "comment": job.comment,
        "mail-user": job.mail,
        "mail-type": job.mail and "BEGIN,END,FAIL,REQUEUE",
        "dependency": job.dependency,
        "open-mode": "append",
        "requeue": "",  # whatever the cluster does with jobs that do not ask for it
        "output": batch_log(job.folder, "%j"),
        "signal": f"{requeue.SIGNAL.name.removeprefix('SIG')}@{requeue.SIGNAL_AHEAD_S}",
        **{name.replace("_", "-"): getattr(resources, name) for name in SAME_NAME},
    }
    said = {
        name: value
        for name, value in sorted(options.items())
        if value is not None and not (index and name in _LEADER_ONLY)
    }
    return [
        *(
            f"#SBATCH --{name}" + f"={shlex.quote(str(value))}" * (value != "")
            for name, value in said.items()
        ),
        *(f"#SBATCH --{name}=" for name in sorted(before) if not getattr(resources, name)),
        *(f"#SBATCH {_quote(option)}" for option in resources.sbatch),
    ]


def _quote(option: str) -> str:
    """Quotes an option of sbatch for a script line, where spaces, #, quotes and backslashes are
    special.

    Leaves quoted values, and options with a separate value ("-p main").
    """
    name, _, value = option.partition("=")
    if re.search(r"\s", name) or not re.search(r"""[\s#'"\\]""", value) or value[0] in "'\"":
        return option
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'{name}="{escaped}"'


def _srun(
    job: Job, index: int, component: Component, first_rank: int, ranks: range, *, group: int | None
) -> str:
    resources, nodes = component.resources, component.nodes_of(ranks)
    is_part = len(ranks) < component.tasks
    # Its own nodes are the first; the others are for engines that are added later.
    is_placed = is_part or component.held_nodes > component.nodes
    # Of several steps on a node each sees all of it, and its task takes a part: `--overlap` would
    # give each the same CPUs, and NCCL copies from GPU to GPU only where a process sees both.
    per_node = len(ranks) // len(nodes)
    beside = component.tasks_per_node // per_node
    cpus = (resources.cpus_per_task or 0) * beside
    options = [
        *(["srun"] if component.bootstrap != "mpi_job" or not index else []),
        *([] if group is None else [f"--het-group={group}"]),
        f"--job-name={component.name}{f'-{ranks.start}' if is_part else ''}",
        *(["--overlap"] if component.on or beside > 1 else []),
        f"--nodes={len(nodes)}",
        f"--ntasks={len(ranks)}",
        f"--ntasks-per-node={per_node}",
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        *([f"--gpus-per-node={component.gpus}"] if component.gpus else []),
        f"--mpi={'none' if component.bootstrap == 'files' else resources.mpi}",
        # A step is restarted whole: a dead task must end it.
        "--kill-on-bad-exit=1",
        "--wait=0",  # one that is done must not, however much later the others are
        "--unbuffered",
        "--open-mode=append",
        *interpreter.srun_options(resources, job.seen_folder),
    ]
    own = ranks if is_part else None
    command = _entry(job, component, first_rank, own, by_slurm=True)
    # Until a task opens its own. Not %t: Slurm 24.11 counts from -1 in a step of a hetjob's part.
    logs = _logs(job, component, str(ranks.start) if len(ranks) == 1 else "%N")
    where = f'--nodelist="$(hosts {group or 0} {nodes.start} {len(nodes)})" ' if is_placed else ""
    return f"{shlex.join(options)} {where}{logs} {command}"


def _local_step(job: Job, component: Component, first_gpu: int) -> str:
    options = [
        sys.executable,
        *("-P", "-m", "relax_hpc.launch.local_step", "--tasks", str(component.tasks)),
        *("--first-gpu", str(first_gpu), "--gpus", str(component.resources.gpus_per_node)),
    ]
    folder = shlex.quote(str(job.component_folder(component)))
    process = f'--controller "$$" --job-id "$job_id" --processes {folder}/"$job_id"_processes.json'
    logs = _logs(job, component, "%t")
    return f"{shlex.join(options)} {process} {logs} -- {_entry(job, component)}"


def _logs(job: Job, component: Component, names: str) -> str:
    # Not %j, the component's own id: tasks name their files by SLURM_JOB_ID, which is the leader's.
    prefix = f'{shlex.quote(str(job.component_folder(component)))}/"$job_id"_{names}_log'
    return f"--output={prefix}.out --error={prefix}.err"


def _entry(
    job: Job, component: Component, first_rank: int = 0, ranks: range | None = None,
    *, by_slurm: bool = False,
) -> str:  # fmt: skip
    command = [
        *interpreter.command(component.resources, job.seen_folder, sys.executable),
        *("-u", *job.task),
        *(str(job.run_dir), component.name, "--start", "@start@"),
        *(["--gpus", str(gpus)] if (gpus := component.resources.gpus_per_node) else []),
        *(["--by-slurm"] if by_slurm else []),
        *(["--bootstrap", component.bootstrap] if component.bootstrap != "files" else []),
    ]
    if component.bootstrap == "mpi_job":
        command += ["--first-rank", str(first_rank), "--tasks", str(component.tasks)]
    if ranks is not None:
        command += ["--apart-from", str(ranks.start), "--tasks", str(component.tasks)]
    if ranks is not None and len(ranks) < component.tasks_per_node:
        command += ["--on-node", str(component.tasks_per_node)]
        command += ["--cpus", str(cpus)] if (cpus := component.cpus_to_take) else []
    return " ".join([*_environment(component), shlex.join(command)])
