"""The way from a job file to a queued job: a run directory, a script, a record of what was
started."""

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

from relax_hpc import permissions
from relax_hpc.bus import layout
from relax_hpc.config import programs
from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.config.rollout import RolloutConfig
from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.config.sft import SftConfig, SftRunConfig
from relax_hpc.errors import ConfigError, LaunchError, RelaxError
from relax_hpc.launch import known_runs, preflight, profiles, record, script, trial
from relax_hpc.launch import local as local_job
from relax_hpc.launch.jobs import StartedJob
from relax_hpc.launch.placement import Component, place, sides
from relax_hpc.launch.record import LaunchedComponent, LaunchRecord
from relax_hpc.launch.slurm import HetSlurmExecutor
from relax_hpc.paths import RunPaths
from relax_hpc.prompts import order
from relax_hpc.records import write_json
from relax_hpc.roles import table
from relax_hpc.roles.rollout import broken_media
from relax_hpc.roles.rollout.decode_check import Advance
from relax_hpc.run_secret import RunSecret
from relax_hpc.sections import Resources, Section
from relax_hpc.user_files import absolute_data
from relax_hpc.user_programs import absolute_place

Mode = Literal["slurm", "local"]
S = TypeVar("S", bound=Section)

_RECORDED = ("relax-hpc", "torch", "megatron-core", "transformers", "sglang", "submitit", "mpi4py")


class _NameInUseError(ConfigError):
    """The run directory is somebody else's."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A submission as `submit` made it, or would make it."""

    run_dir: Path
    mode: Mode
    script: str
    components: tuple[Component, ...]
    number: int
    """Number of the launch: 1 for `submit`, one more for every `resume`."""
    job: StartedJob | None
    """None after a dry run."""

    @property
    def job_ids(self) -> dict[str, str]:
        """Component -> what `squeue` and `scancel` call its component."""
        ids = self.job.component_ids if self.job else ()
        return {each.name: job_id for each, job_id in zip(self.components, ids, strict=False)}

    @property
    def job_id(self) -> str | None:
        return self.job.job_id if self.job else None


def submit(
    config: JobConfig,
    *,
    local: bool = False,
    dry_run: bool = False,
    say: Callable[[str], None] = lambda _: None,
    advance: Advance = lambda *_: None,
) -> Submission:
    """Checks a run, makes its directory and starts it: through Slurm, or here without one.

    Args:
        config: as the user wrote it; relative paths count from the current directory.
        local: run here even though there is a Slurm.
        dry_run: check and write the script, but create and start nothing.
        say: is told what is left to be checked when the job starts.
        advance: is told how many rows' media were decoded, where the job asks for that.

    Raises:
        ConfigError: the run cannot work; nothing was created.
        LaunchError: Slurm refused it; the run directory was removed again.
    """
    mode = mode_of(local=local)
    config, components = resolve(config)
    preflight.check_run_dir(config.run_dir, config.name, say=say)
    config = preflight.check(config, components, use_slurm=mode == "slurm", say=say)
    planned = plan(mode, config, components, 1)
    if dry_run:
        return planned
    broken = broken_media.decide(config, say=say, advance=advance)
    paths = RunPaths(config.run_dir)
    parents = [parent for parent in paths.root.parents if not parent.exists()]
    try:
        make_run_dir(config, paths)
        with permissions.masked(permissions.UMASKS[config.launch.share]):
            if broken:
                broken.keep(paths)
            return start(planned, config, paths)
    except _NameInUseError:
        raise
    except (OSError, RelaxError) as error:
        # What there is was made a moment ago, and nothing runs in it.
        shutil.rmtree(paths.root, ignore_errors=True)
        for parent in parents:
            with suppress(OSError):
                parent.rmdir()  # unless somebody else uses it by now
        if isinstance(error, RelaxError):
            raise
        raise LaunchError(
            f"{paths.root}: cannot be written to: {error.strerror}; nothing was started or left. "
            "Free space or quota, or choose another run_root"
        ) from error


def mode_of(*, local: bool) -> Mode:
    return "slurm" if not local and shutil.which("sbatch") else "local"


def plan(mode: Mode, config: JobConfig, components: Sequence[Component], number: int) -> Submission:
    """Plans a submission, as the launch of that number."""
    if mode == "local":  # MPI's ranks would need Slurm, or mpirun, to start them
        components = [replace(component, bootstrap="files") for component in components]
    job = _job(config, number)
    if mode == "local":
        text = script.local_script(job, components)
    else:
        text = "\n".join(
            script.slurm_script(each, part) for each, part in jobs_of(config, job, components)
        )
    return Submission(config.run_dir, mode, text, tuple(components), number, None)


def jobs_of(
    config: JobConfig, job: script.Job, components: Sequence[Component]
) -> list[tuple[script.Job, list[Component]]]:
    """The Slurm jobs of a run and the components of each; of two, rollout's comes first."""
    if config.launch.layout == "hetjob":
        return [(job, list(components))]
    return [(replace(job, side=part[0].side), part) for part in sides(config, components)]


def expected_start(config: JobConfig, components: Sequence[Component]) -> str:
    """Has Slurm try out a run that `preflight` has passed, and queues nothing.

    Raises:
        ConfigError: Slurm would refuse it.
    """
    jobs = jobs_of(config, _job(config, 1), components)
    said = [trial.expected_start(job, part) for job, part in jobs]
    names = (f"{job.side}: " if job.side else "" for job, _ in jobs)
    return "; ".join(f"{name}{each}" for name, each in zip(names, said, strict=True))


def _job(config: JobConfig, number: int) -> script.Job:
    return script.Job(
        config.name,
        config.run_dir,
        config.launch.max_restarts,
        exports=tuple(dict.fromkeys(config.boards.export)),
        next_claim=RunPaths(config.run_dir).launch_claim(number + 1),
        umask=permissions.UMASKS[config.launch.share],
        comment=config.resources.comment,
        mail=config.resources.mail,
        dependency=config.resources.dependency if number == 1 else None,
    )


def resolve(config: JobConfig) -> tuple[JobConfig, list[Component]]:
    """The run with nothing left to look up: absolute paths, and the site profile filled in."""
    components = place(config)
    profile, kernels = profiles.chosen(config.launch.profile), config.launch.kernel_cache
    resolved: dict[str, Any] = {
        "model": config.model.model_copy(
            update={
                "path": config.model.path.absolute(),
                "weights": config.model.weights and config.model.weights.absolute(),
            }
        ),
        "launch": config.launch.model_copy(
            update={"profile": profile, "kernel_cache": kernels and kernels.absolute()}
        ),
        "resources": profiles.load(profile).shared(config.resources),
    }
    if isinstance(config, RunConfig):
        rollout = _rollout_found_anywhere(config.rollout)
        resolved["engines"] = {
            name: pool.model_copy(update={"model": pool.model and pool.model.absolute()})
            for name, pool in config.engines.items()
        }
        resolved |= {"rollout": rollout, "prompts": _found_anywhere(config.prompts)}
        resolved["algorithm"] = config.algorithm.with_names(absolute_place)
        resolved["reward"] = config.reward.with_names(absolute_place)
        resolved["eval"] = {
            name: each.model_copy(update={"path": [absolute_data(path) for path in each.path]})
            for name, each in config.eval.items()
        }
        path = config.reference.path
        known = {"path": path and path.absolute()}
        resolved["reference"] = config.reference.model_copy(update=known)
        if config.critic:
            paths = {"path": config.critic.path, "weights": config.critic.weights}
            known = {name: path and path.absolute() for name, path in paths.items()}
            resolved["critic"] = config.critic.model_copy(update=known)
        resolved["teachers"] = {
            name: each.model_copy(update={"path": each.path and each.path.absolute()})
            for name, each in config.teachers.items()
        }
    elif isinstance(config, SftRunConfig):
        resolved["sft"] = _with_absolute_paths(config.sft)
    webhook = config.notify.webhook
    known = {"webhook": webhook and webhook.absolute()}
    resolved["notify"] = config.notify.model_copy(update=known)
    absolute = config.model_copy(update={"run_root": config.run_root.absolute(), **resolved})
    for each in components:
        if each.section:
            absolute = _with_resources(absolute, each.section.split("."), each.resources)
    return absolute, components


def _with_resources(section: S, names: Sequence[str], resources: Resources) -> S:
    """A section in which the table that `names` lead to asks for these resources."""
    if not names:
        return section.model_copy(update={"resources": resources})
    inner: Section | dict[str, Section] = getattr(section, names[0])
    changed: Section | dict[str, Section]
    if isinstance(inner, dict):  # tables by name
        changed = inner | {names[1]: _with_resources(inner[names[1]], names[2:], resources)}
    else:
        changed = _with_resources(inner, names[1:], resources)
    return section.model_copy(update={names[0]: changed})


def _found_anywhere(prompts: PromptsConfig) -> PromptsConfig:
    sources = {
        name: each.model_copy(update={"path": [absolute_data(path) for path in each.path]})
        for name, each in prompts.sources.items()
    }
    train = [absolute_data(path) for path in prompts.train]
    folder = prompts.media.folder and prompts.media.folder.absolute()
    media = prompts.media.model_copy(update={"folder": folder} if folder else {})
    return prompts.model_copy(update={"train": train, "sources": sources, "media": media})


def _rollout_found_anywhere(rollout: RolloutConfig) -> RolloutConfig:
    program = rollout.program
    if program is not None:
        program = program.model_copy(update={"folder": program.folder.absolute()})
    environment = absolute_place(rollout.environment)
    return rollout.model_copy(update={"environment": environment, "program": program})


def _with_absolute_paths(section: SftConfig) -> Section:
    paths = {"train": section.train, "heldout": section.heldout}
    known = {key: path and absolute_data(path) for key, path in paths.items()}
    return section.model_copy(update=known)


def make_run_dir(config: JobConfig, paths: RunPaths) -> None:
    """Makes a run directory with everything a role expects to find.

    Raises:
        ConfigError: the name is in use, or the folder cannot be made.
    """
    try:
        paths.root.parent.mkdir(parents=True, exist_ok=True)
        with permissions.masked(permissions.UMASKS[config.launch.share]):
            paths.root.mkdir()  # whoever makes it has the name
        permissions.close_to_others(paths.root, permissions.UMASKS[config.launch.share])
    except LaunchError:
        paths.root.rmdir()
        raise
    except FileExistsError:
        raise _NameInUseError(
            f"name = {config.name!r}: {paths.root} exists and a run directory is used once; "
            "choose another name"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"run_root = {str(config.run_root)!r}: {paths.root} cannot be made: {error.strerror}; "
            "choose a folder of yours that every node sees"
        ) from error
    with permissions.masked(permissions.UMASKS[config.launch.share]):
        RunSecret.create(paths.secret)
        for folder in (paths.submission, paths.control):
            folder.mkdir()
        config = programs.keep(config, paths.programs)
        write_json(paths.config, config.model_dump(mode="json"))
        if isinstance(config, RunConfig):
            drawn = {"seed": config.seed, "order": order.VERSION}
            header = {"name": config.name, **drawn, **provenance()}
            writers = table.sidecar_writers(config)
            layout.create(paths.bus, config.producers, header, sidecar_writers=writers)


def provenance() -> dict[str, Any]:
    """Versions of what computes, and the revision of this package where it is a checkout."""
    versions = {}
    for name in _RECORDED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "revision": _git_revision()}


def start(
    planned: Submission, config: JobConfig, paths: RunPaths, before: LaunchRecord | None = None
) -> Submission:
    """Starts a job of a run and records it; what cannot be recorded is ended again."""
    job = _job(config, planned.number)
    jobs = jobs_of(config, job, planned.components) if planned.mode == "slurm" else None
    started = start_job(planned, job, paths, before, jobs)
    known_runs.remember(paths.root)
    return started


def start_job(
    planned: Submission,
    job: script.Job,
    paths: RunPaths,
    before: LaunchRecord | None = None,
    jobs: Sequence[tuple[script.Job, list[Component]]] | None = None,
) -> Submission:
    """Does as `start`, with a job of any kind.

    Args:
        planned: what is to be started.
        job: facts of it.
        paths: of the run.
        before: the launch before this one.
        jobs: of Slurm, with the components of each; unset is one.
    """
    components = planned.components
    if planned.mode == "slurm":
        submitted = _queued(jobs or [(job, list(components))])
    else:
        submitted = local_job.start(job, components)
    launched = LaunchRecord(
        planned.mode,
        submitted.job_id,
        tuple(
            LaunchedComponent(
                component.name, job_id, component.tasks, job.component_folder(component)
            )
            for component, job_id in zip(components, submitted.component_ids, strict=True)
        ),
        time.time(),
        submitted.controller,
        socket.gethostname(),
        planned.number,
        tuple(reversed(before.all)) if before else (),
    )
    try:
        record.write(paths, launched, provenance())
    except OSError:
        submitted.cancel()
        raise
    return replace(planned, job=submitted)


def _queued(jobs: Sequence[tuple[script.Job, list[Component]]]) -> StartedJob:
    """Queues all jobs of a run, or none."""
    queued = list[StartedJob]()

    def cancel() -> None:
        for each in queued:
            each.cancel()

    try:
        for job, components in jobs:
            queued.append(HetSlurmExecutor(job.folder).submit_het(job, components))
    except (OSError, RelaxError):
        cancel()
        raise
    ids = tuple(job_id for each in queued for job_id in each.component_ids)
    return StartedJob(queued[0].job_id, ids, cancel)


def _git_revision() -> str | None:
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return answer.stdout.strip() or None
