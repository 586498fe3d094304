"""Restarts a run that has ended, before its last step or with more steps."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from relax_hpc.bus import layout
from relax_hpc.config.job_file import read_resolved
from relax_hpc.config.run import JobConfig, RunConfig, SftRunConfig
from relax_hpc.data import order
from relax_hpc.errors import ConfigError, LaunchError, RelaxError
from relax_hpc.launch import cluster, preflight, record, submit
from relax_hpc.launch.placement import Component, place, sides
from relax_hpc.launch.slurm import MaybeQueuedError
from relax_hpc.roles.rollout import prompt_check, row_gate
from relax_hpc.roles.rollout.row_gate import Advance
from relax_hpc.roles.sft import document_check
from relax_hpc.roles.training.check import check_model
from relax_hpc.runs import status
from relax_hpc.runs.changes import Changed, another_run, change
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.files.records import read_json, retract, write_json
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.files.user_programs import ORIGIN
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import history
from relax_hpc.runtime.telemetry.events import FREQUENT, read_events
from relax_hpc.runtime.text import argument


def resume(
    run_dir: Path,
    *,
    overrides: Sequence[str] = (),
    local: bool = False,
    ended: bool = False,
    say: Callable[[str], None] = lambda _: None,
    advance: Advance = lambda *_: None,
) -> submit.Submission:
    """Restarts a run that was cancelled, ran out of time, gave up, or gets more steps.

    Continues from its newest checkpoint and its bus, with the submitted job or a changed one that
    trains the same.

    Args:
        overrides: of its job, `section.key=value`; control/ keeps the previous job.
        local: run here even though there is a Slurm.
        ended: the caller knows that a job has ended which Slurm has forgotten.
        say: gets the changes, and the programs whose originals have changed.
        advance: see `submit`; for media that no submission of this run decoded.

    Raises:
        ConfigError: not a run directory; complete without more steps; no checkpoint and no way to
            begin again; maybe still running, or resumed meanwhile; or an override that would change
            what is trained.
        LaunchError: Slurm refused it.
    """

    paths = RunPaths(run_dir.absolute())
    permissions.check_run(paths, paths.submission)
    was = read_resolved(paths.config)
    new = change(was, overrides) if overrides else Changed(was)
    config, changes = new.job, new.lines
    newest = record.read(paths.root)
    _check_ended(
        run_dir, was, status.launches(newest), ended=ended,
        is_lengthened=config.num_steps > was.num_steps,
    )  # fmt: skip
    _check_begin(config, paths)
    _check_inputs(config, paths)
    mode, components = submit.mode_of(local=local), place(config)
    if changes:
        _check_changed(new, components, mode, say)
    if mode == "slurm":
        cluster.check_preemption(
            [each for each in components if not each.on],
            cluster.Cluster(),
            save_every=config.actor.save_every,
            save_s=history.longest_save_s(read_events(paths.events_folder, but=FREQUENT)),
            say=say,
        )
    _compare_programs(paths.programs, say)
    with permissions.set_umask(permissions.UMASKS[config.launch.advanced.share]):
        row_gate.decide_media_once(config, paths, say=say, advance=advance)
    number = record.claim(paths, newest, sure=ended)
    planned = submit.plan(mode, config, components, number)
    try:
        _make_private(config, paths)
        if changes:
            write_json(paths.config_before(number), was.model_dump(mode="json"))
            write_json(paths.config, config.model_dump(mode="json"))
            say("\n".join(changes))
        _deal(config, paths)
        with permissions.set_umask(permissions.UMASKS[config.launch.advanced.share]):
            return submit.start(planned, config, paths, newest)
    except MaybeQueuedError:
        raise  # the claim stays: there may be a job
    except BaseException as error:  # also Ctrl-C
        if record.read(paths.root).number != number:  # else it was started, and is known
            _undo(was if changes else None, paths, number)
        if not isinstance(error, OSError):
            raise
        raise LaunchError(
            f"{run_dir}: cannot be written to: {error.strerror}; nothing was started. "
            "Free space or quota and resume it again"
        ) from error


def _undo(was: JobConfig | None, paths: RunPaths, number: int) -> None:
    """Reverts an unsuccessful start; `was` is the previous job if it was changed."""
    if was:
        write_json(paths.config, was.model_dump(mode="json"))
        with suppress(RelaxError):  # it may be this that could not be done
            _deal(was, paths)
    retract(paths.launch_claim(number))


def _deal(config: JobConfig, paths: RunPaths) -> None:
    """Redistributes unstarted prompts over the rollout tasks, if their number changed."""
    if isinstance(config, RunConfig) and paths.bus.header.exists():
        with permissions.set_umask(permissions.UMASKS[config.launch.advanced.share]):
            layout.deal(paths.bus, config.producers)


def _check_ended(
    run_dir: Path,
    config: JobConfig,
    found: Sequence[status.Launch],
    *,
    ended: bool,
    is_lengthened: bool,
) -> None:
    if alive := status.alive(run_dir, found, sure=ended):
        remedy = f"cancel it first: relax-hpc cancel {argument(run_dir)}"
        if alive.state == "COMPLETING":  # perhaps since it was cancelled
            remedy = "it is about to end: resume it in a moment"
        raise ConfigError(
            f"{run_dir}: is {alive.state.lower()} as job {alive.record.leader}; {remedy}"
        )
    if found[0].state == "COMPLETED" and not is_lengthened:
        steps = "sft.num_steps" if isinstance(config, SftRunConfig) else "schedule.num_steps"
        raise ConfigError(
            f"{run_dir}: is complete, {config.num_steps} steps; to go on add e.g. --set "
            f"{steps}={2 * config.num_steps}, or {another_run(config)}"
        )


def _check_begin(config: JobConfig, paths: RunPaths) -> None:
    """Checks that a run without a checkpoint can begin again."""
    folders = (paths.checkpoints, paths.checkpoints / "kept", paths.checkpoints / "best")
    there = (each for folder in folders for each in folder.glob("step_*"))
    if any(there) or not isinstance(config, RunConfig):
        return
    if paths.bus.header.exists():
        from relax_hpc.trainer.checkpoints import saving  # seconds, for torch

        saving.check_begin(paths)


def _check_inputs(config: JobConfig, paths: RunPaths) -> None:
    """Checks that the model and the data still exist, with as many rows."""
    check_model(config.model.path, config.actor)
    if isinstance(config, SftRunConfig):
        document_check.open_files(config)
        return
    assert isinstance(config, RunConfig)
    files = prompt_check.open_files(config).by_key
    before = (read_json(paths.prompt_rows(0)) or {}).get("num_rows", {})
    num_rows = {key: len(files[key]) for key in before if key in files}
    order.check_num_rows(num_rows, before, since="begun")


def _check_changed(
    new: Changed,
    components: Sequence[Component],
    mode: submit.Mode,
    say: Callable[[str], None],
) -> None:
    """Checks that the cluster offers a changed job's resources, and that it can be computed."""
    for part in sides(new.job, components):
        check_resources(part, mode)
    if new.is_computed_otherwise:
        preflight.check(new.job, components, use_slurm=mode == "slurm", say=say)


def _compare_programs(folder: Path, say: Callable[[str], None]) -> None:
    """Names user files that differ from the copies in a folder."""
    for origin in sorted(folder.glob(f"*/{ORIGIN}")):
        for copy in sorted(origin.parent.glob("*.py")):
            path = Path(origin.read_text(encoding="utf-8")).with_name(copy.name)
            with suppress(OSError):
                if path.is_file() and path.read_bytes() != copy.read_bytes():
                    say(
                        f"{path}: has changed since; this run keeps its copy. To use it, submit a "
                        "run of another name"
                    )


def check_resources(components: Sequence[Component], mode: submit.Mode) -> None:
    """Checks that the cluster offers the components' resources now."""
    for component in components:
        preflight.check_component(component)
    if mode == "slurm":
        hosts = [each for each in components if not each.on]
        slurm = cluster.Cluster()
        cluster.check_partitions(hosts, slurm.nodes)
        cluster.check_limits(hosts, slurm)


def _make_private(config: JobConfig, paths: RunPaths) -> None:
    """Adapts a run of an older version, which everybody may read, to current permissions."""
    if not paths.secret.exists():
        permissions.close_to_others(paths.root, permissions.UMASKS[config.launch.advanced.share])
        RunSecret.create(paths.secret)
