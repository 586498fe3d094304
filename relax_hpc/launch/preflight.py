"""Checks of a job before anything is queued. Each refusal names a remedy."""

import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from relax_hpc import kernel_cache, permissions, user_files
from relax_hpc.comm import gpus
from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.launch import interpreter, known_runs, partitions, trial
from relax_hpc.launch.placement import Component, sides
from relax_hpc.roles import table
from relax_hpc.roles.training.check import (
    check_first_weights,
    check_model,
    check_rate,
    check_weights,
)

_REMEDY = "choose a folder of yours that every node sees"
_INHERITED = ("account", "qos")
"""Fields of resources that a component of a heterogeneous job has from those before it, and for
which there is no word for none."""
# Slurm replaces %x in file names, and reads a backslash as "replace nothing".
_REPLACED = "%\\\n"


def _silent(_: str) -> None:
    pass


def check(
    config: JobConfig,
    components: Sequence[Component],
    *,
    use_slurm: bool,
    say: Callable[[str], None] = _silent,
    lacks: Callable[[str], None] = interpreter.refuse,
) -> JobConfig:
    """Refuses a run that cannot work. Its directory is looked at by `check_run_dir`.

    Args:
        config: with absolute paths.
        components: what the run asks for, site profile included.
        use_slurm: also ask Slurm whether partitions and GPUs exist.
        say: is told what is left to be checked when the job starts.
        lacks: is told of packages and GPUs that are missing here, and may refuse that.

    Returns:
        The run; how many steps the epochs of supervised fine-tuning are has been counted.

    Raises:
        ConfigError: the first mistake found.
    """
    shape = check_model(config.model.path, config.actor)
    check_weights(config.model.path, shape)
    check_first_weights(config.model.weights, shape)
    table.check_columns(config)
    for role in table.ROLES:
        config = role.checked(config, shape, say)
    check_boards(config)
    check_notify(config)
    check_rate(config, say)
    for component in components:
        check_component(component)
    doubt_times(components, say)
    for component in components:
        interpreter.check(
            component.key, component.resources, use_slurm=use_slurm, say=say,
            packages=_packages(config, component), lacks=lacks,
        )  # fmt: skip
    if use_slurm:
        hosts = [each for each in components if not each.on]
        for part in sides(config, hosts):
            partitions.check_partitions(part, partitions.partitions())
            partitions.check_limits(part)
            tell_inherited(part, say)
            trial.check_number(part)
        every = config.actor.save_every
        whose, save_s = known_runs.longest_save(config.model.path)
        partitions.check_preemption(hosts, save_every=every, save_s=save_s, whose=whose, say=say)
    else:
        check_gpus(components, lacks)
    check_kernel_cache(config, components, say)
    return config


def tell_inherited(components: Sequence[Component], say: Callable[[str], None]) -> None:
    """Says what sbatch passes on to the components behind one that asked for it.

    Args:
        components: of one job, in order, each with nodes of its own.
        say: is told.
    """
    for name in _INHERITED:
        said: Component | None = None
        for each in components:
            value = getattr(each.resources, name)
            if value is None and said is not None:
                say(
                    f"{said.key}.{name} = {getattr(said.resources, name)!r}: Slurm gives it to "
                    f"{each.key} as well, which names none; to have another, say {each.key}.{name}"
                )
            said = each if value is not None else said


def _packages(config: JobConfig, component: Component) -> list[str]:
    """Packages that the tasks of a component import, and that this one may be without."""
    pool = config.engines.get(component.name) if isinstance(config, RunConfig) else None
    return ["sglang"] if pool and pool.kind == "sglang" else []


def check_gpus(
    components: Sequence[Component], lacks: Callable[[str], None] = interpreter.refuse
) -> None:
    """Tells `lacks` if this machine has not the GPUs of all components side by side."""
    hosts = [each for each in components if each.on is None and each.resources.gpus_per_node]
    asked = sum(each.resources.gpus_per_node for each in hosts)
    if asked and (found := gpus.count()) < asked:
        said = ", ".join(
            f"{each.key}.gpus_per_node = {each.resources.gpus_per_node}" for each in hosts
        )
        lacks(
            f"{said}: {asked} GPUs of this machine, where the run is to be, and it shows {found}; "
            "ask for fewer (0 computes on CPUs), or start the run with Slurm"
        )


def check_kernel_cache(
    config: JobConfig, components: Sequence[Component], say: Callable[[str], None] = _silent
) -> None:
    """Checks that nobody else can put kernels where ours are kept, and says where that is."""
    root = config.launch.kernel_cache
    if root is None:
        if any(each.resources.gpus_per_node for each in components):
            say(
                "kernels: torch's are kept in each node's temporary folder, SGLang's in the caches "
                "of your home; launch.kernel_cache names one place for all, by version"
            )
        return
    if os.path.lexists(root):
        kernel_cache.check(root)
    name = kernel_cache.folder_of(root).name
    say(f"kernels: are kept in {root}, those of this interpreter's versions in {name}")


def check_notify(config: JobConfig) -> None:
    """Checks that messages can be sent, without sending one."""
    command, webhook = config.notify.command, config.notify.webhook
    if command and shutil.which(command[0]) is None:
        raise ConfigError(
            f"notify.command = {command}: there is no program {command[0]} here; give its path"
        )
    if webhook is None:
        return
    url = user_files.read_text(webhook, "name a file with the URL of a webhook").strip()
    if not url.startswith(("https://", "http://")) or len(url.split()) != 1:
        raise ConfigError(f"notify.webhook = {str(webhook)!r}: holds no URL; put only that there")
    if webhook.stat().st_mode & 0o077:
        raise ConfigError(
            f"notify.webhook = {str(webhook)!r}: others may read the URL; chmod 600 {webhook}"
        )


def check_boards(config: JobConfig) -> None:
    """Checks that what sends curves is installed."""
    for name in config.boards.export:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"boards.export = {config.boards.export}: the package {name} is not installed "
                f"here; pip install 'relax-hpc[{name}]'"
            )


def check_run_dir(run_dir: Path, name: str, *, say: Callable[[str], None] = _silent) -> None:
    """Refuses a run directory that cannot be made, and says where others may replace it."""
    key = f"run_root = {str(run_dir.parent)!r}"
    if any(character in str(run_dir) for character in _REPLACED):
        raise ConfigError(
            f"{key}: Slurm replaces '%' and '\\' in the names of log "
            "files; choose a folder without them"
        )
    try:
        if os.path.lexists(run_dir):
            raise ConfigError(
                f"name = {name!r}: {run_dir} exists and a run directory is used once; "
                f"choose another name, say --set name={name}-2"
            )
        existing = next(parent for parent in run_dir.parents if parent.exists())
        dangling = next((p for p in run_dir.parents if p.is_symlink() and not p.exists()), None)
        target = dangling and dangling.readlink()
        writable = os.access(existing, os.W_OK | os.X_OK, effective_ids=True)
    except OSError as error:
        raise ConfigError(f"{key}: {error.filename}: {error.strerror}; {_REMEDY}") from None
    if dangling:
        raise ConfigError(
            f"{key}: {dangling} is a link to {target}, which is not there; make that folder, or "
            "choose another"
        )
    if not existing.is_dir():
        raise ConfigError(f"{key}: {existing} is not a folder; {_REMEDY}")
    if not writable:
        raise ConfigError(f"{key}: {existing} cannot be written to; {_REMEDY}")
    for folder, mode in permissions.open_above(run_dir).items():
        say(
            f"{key}: {folder} has mode {mode:04o}: others may put a run directory of theirs in the "
            f"place of yours there; chmod +t {folder}, which its owner may, or choose another"
        )


def check_component(component: Component) -> None:
    """Checks that one component's requests make sense by themselves."""
    key, resources = component.key, component.resources
    if resources.time is not None:
        try:
            partitions.minutes(resources.time)
        except ValueError:
            raise ConfigError(
                f'{key}.time = {resources.time!r}: is not a time limit; '
                'use "D-HH:MM:SS", "HH:MM:SS", minutes or "UNLIMITED"'
            ) from None  # fmt: skip
    check_max_nodes(component)
    if 0 < resources.gpus_per_node < component.tasks_per_node:
        raise ConfigError(
            f"{key}.gpus_per_node = {resources.gpus_per_node}: {component.tasks_per_node} tasks "
            f"run on each node; ask for {component.tasks_per_node}, or for more nodes"
        )


def doubt_times(components: Sequence[Component], say: Callable[[str], None]) -> None:
    """Says of "1:30", once, that Slurm reads minutes and seconds."""
    keys = {each.resources.time: f"{each.key}.time" for each in reversed(components)}
    for time, key in keys.items():
        if time and re.fullmatch(r"\d+:\d+", time):
            say(
                f"{key} = {time!r}: is {partitions.minutes(time)} min, as Slurm reads it "
                f'(minutes:seconds); hours are written "{time}:00"'
            )


def check_max_nodes(component: Component) -> None:
    """Nodes held for engines to come are a scalable role's, and its own nodes are among them."""
    resources = component.resources
    if resources.max_nodes is None:
        return
    key = f"{component.key}.max_nodes = {resources.max_nodes}"
    if not component.is_scalable:
        able = " or ".join(table.scalable())
        raise ConfigError(
            f"{key}: only {able} can be scaled; remove it (a profile has it in [{able}])"
        )
    if resources.max_nodes < resources.nodes:
        raise ConfigError(
            f"{key}: is less than {component.key}.nodes = {resources.nodes}; "
            "use as many or more, or remove it"
        )
