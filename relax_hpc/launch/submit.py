"""The way from a job file to a queued job: a run directory, a script, a record of what was
started."""

import errno
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from relax_hpc.bus import layout
from relax_hpc.config import programs
from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.data import order
from relax_hpc.errors import ConfigError, LaunchError
from relax_hpc.launch import cluster, known_runs, preflight, profiles, record, script
from relax_hpc.launch import local as local_job
from relax_hpc.launch.placement import Component, place, sides
from relax_hpc.launch.record import LaunchedComponent, LaunchRecord
from relax_hpc.launch.slurm import HetSlurmExecutor, cancelling
from relax_hpc.launch.states import StartedJob, output_of
from relax_hpc.roles import table
from relax_hpc.roles.rollout import row_gate
from relax_hpc.roles.rollout.row_gate import Advance
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.files.records import write_json
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths

Mode = Literal["slurm", "local"]

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
    config, components = resolve(preflight.with_free_name(config, say))
    preflight.check_run_dir(config.run_dir, say=say)
    config = preflight.check(config, components, use_slurm=mode == "slurm", say=say)
    planned = plan(mode, config, components, 1)
    if dry_run:
        return planned
    broken = row_gate.decide_media(config, say=say, advance=advance)
    paths = RunPaths(config.run_dir)
    parents = [parent for parent in paths.root.parents if not parent.exists()]
    try:
        make_run_dir(config, paths)
        with permissions.set_umask(permissions.UMASKS[config.launch.advanced.share]):
            if broken:
                broken.keep(paths)
            return start(planned, config, paths)
    except _NameInUseError:
        raise
    except BaseException as error:  # also Ctrl-C
        if _may_be_recorded(paths):
            raise  # `status` and `cancel` know what was started
        # What there is was made a moment ago, and nothing runs in it.
        shutil.rmtree(paths.root, ignore_errors=True)
        for parent in parents:
            with suppress(OSError):
                parent.rmdir()  # unless somebody else uses it by now
        if not isinstance(error, OSError):
            raise
        raise LaunchError(
            f"{paths.root}: cannot be written to: {error.strerror}; nothing was started or left. "
            "Free space or quota, or choose another run_root"
        ) from error


def mode_of(*, local: bool) -> Mode:
    return "slurm" if not local and shutil.which("sbatch") else "local"


def plan(mode: Mode, config: JobConfig, components: Sequence[Component], number: int) -> Submission:
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


def estimate_start(config: JobConfig, components: Sequence[Component]) -> str:
    """Has Slurm try out a run that `preflight` has passed, and queues nothing.

    Raises:
        ConfigError: Slurm would refuse it.
    """
    jobs = jobs_of(config, _job(config, 1), components)
    said = [cluster.estimate_start(job, part) for job, part in jobs]
    names = (f"{job.side}: " if job.side else "" for job, _ in jobs)
    return "; ".join(f"{name}{each}" for name, each in zip(names, said, strict=True))


def _job(config: JobConfig, number: int) -> script.Job:
    return script.Job(
        config.name,
        config.run_dir,
        config.launch.max_restarts,
        exports=tuple(dict.fromkeys(config.boards.export)),
        next_claim=RunPaths(config.run_dir).launch_claim(number + 1),
        umask=permissions.UMASKS[config.launch.advanced.share],
        comment=config.resources.comment,
        mail=config.resources.mail,
        dependency=config.resources.dependency if number == 1 else None,
    )


def resolve(config: JobConfig) -> tuple[JobConfig, list[Component]]:
    """The run with nothing left to look up: absolute paths, and the site profile filled in."""
    preflight.check_names(config.run_dir)
    components = place(config)
    profile = profiles.chosen(config.launch.profile)
    site = profiles.load(profile)
    resolved = programs.make_absolute(config)
    network = {"network": config.launch.advanced.network or site.network}
    advanced = resolved.launch.advanced.model_copy(update=network)
    launch = {"profile": profile, "advanced": advanced}
    known = {
        "launch": resolved.launch.model_copy(update=launch),
        "resources": site.merge_shared(config.resources),
    }
    resolved = resolved.model_copy(update=known)
    for each in components:
        if each.section:
            resolved = _with_resources(resolved, each)
    return resolved, components


def _with_resources(config: JobConfig, component: Component) -> JobConfig:
    return programs.rewrite(config, [component.key], lambda _: component.resources)


def _may_be_recorded(paths: RunPaths) -> bool:
    try:
        return paths.launch_record.exists()
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG  # then nothing can be there


def make_run_dir(config: JobConfig, paths: RunPaths) -> None:
    """Makes a run directory with everything a role expects to find.

    Raises:
        ConfigError: the name is in use, or the folder cannot be made.
    """
    try:
        paths.root.parent.mkdir(parents=True, exist_ok=True)
        with permissions.set_umask(permissions.UMASKS[config.launch.advanced.share]):
            paths.root.mkdir()  # whoever makes it has the name
        permissions.close_to_others(paths.root, permissions.UMASKS[config.launch.advanced.share])
    except LaunchError:
        paths.root.rmdir()
        raise
    except FileExistsError:
        raise _NameInUseError(
            f"name = {config.name!r}: {paths.root} was made in this moment; submit again"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"run_root = {str(config.run_root)!r}: {paths.root} cannot be made: {error.strerror}; "
            "choose a folder of yours that every node sees"
        ) from error
    with permissions.set_umask(permissions.UMASKS[config.launch.advanced.share]):
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
    components, started = planned.components, list[StartedJob]()
    made_by = provenance()
    with _raising_signals(), cancelling(started):
        if planned.mode == "slurm":
            started.append(_queue(jobs or [(job, list(components))]))
        else:
            started.append(local_job.start(job, components))
        [submitted] = started
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
        record.write(paths, launched, made_by)
    return replace(planned, job=submitted)


@contextmanager
def _raising_signals() -> Iterator[None]:
    """Has what tells this process to end raise SystemExit, as Ctrl-C raises: a job that was queued
    and is not recorded yet must be cancelled first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _queue(jobs: Sequence[tuple[script.Job, list[Component]]]) -> StartedJob:
    queued = list[StartedJob]()

    def cancel() -> None:
        for each in queued:
            each.cancel()

    with cancelling(queued):
        for job, components in jobs:
            queued.append(HetSlurmExecutor(job.folder).submit_het(job, components))
    ids = tuple(job_id for each in queued for job_id in each.component_ids)
    return StartedJob(queued[0].job_id, ids, cancel)


def _git_revision() -> str | None:
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40"]
    return output_of(command, timeout_s=30).stdout.strip() or None
