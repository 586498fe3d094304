"""Checks of a job before anything is queued. Each refusal names a remedy."""

import difflib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from relax_hpc.config.run import JobConfig
from relax_hpc.errors import ConfigError
from relax_hpc.launch import script
from relax_hpc.launch.jobs import output_of, words_of
from relax_hpc.launch.placement import Component
from relax_hpc.roles import table
from relax_hpc.roles.training.check import check_first_weights, check_model, check_weights

_REMEDY = "choose a folder of yours that every node sees"
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
) -> JobConfig:
    """Refuses a run that cannot work.

    Args:
        config: with absolute paths.
        components: what the run asks for, site profile included.
        use_slurm: also ask Slurm whether partitions and GPUs exist.
        say: is told what is left to be checked when the job starts.

    Returns:
        The run; how many steps the epochs of supervised fine-tuning are has been counted.

    Raises:
        ConfigError: the first mistake found.
    """
    check_run_dir(config.run_dir, config.name)
    shape = check_model(config.model.path, config.actor)
    check_weights(config.model.path, shape)
    check_first_weights(config.model.weights, shape)
    table.check_columns(config)
    for role in table.ROLES:
        config = role.checked(config, shape, say)
    for component in components:
        check_component(component)
    if use_slurm:
        check_partitions([each for each in components if not each.on], _partitions())
    return config


def check_run_dir(run_dir: Path, name: str) -> None:
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
                "choose another name"
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


def check_component(component: Component) -> None:
    """Checks that one component's requests make sense by themselves."""
    key, resources = component.key, component.resources
    if resources.time is not None:
        try:
            script.minutes(resources.time)
        except ValueError:
            raise ConfigError(
                f'{key}.time = {resources.time!r}: is not a time limit; '
                'use "D-HH:MM:SS", "HH:MM:SS" or minutes'
            ) from None  # fmt: skip
    check_max_nodes(component)
    if 0 < resources.gpus_per_node < component.tasks_per_node:
        raise ConfigError(
            f"{key}.gpus_per_node = {resources.gpus_per_node}: {component.tasks_per_node} tasks "
            f"run on each node; ask for {component.tasks_per_node}, or for more nodes"
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


class Partitions(dict[str, dict[str, int]]):
    """Partition -> node -> its GPUs; `default` is where a job goes that names none."""

    default: str | None = None


def check_partitions(components: Sequence[Component], partitions: Partitions) -> None:
    """The partitions exist and have the nodes and GPUs asked for, though maybe not free now."""
    wanted: dict[str, int] = {}
    for component in components:
        name = component.resources.partition or partitions.default
        if name is None:
            continue  # sbatch will say what it takes instead
        nodes = _nodes(component, name, partitions)
        gpus = component.resources.gpus_per_node
        key = component.key
        fit = sum(have >= gpus for have in nodes.values())
        if fit < min(component.held_nodes, len(nodes)):
            most = max(nodes.values(), default=0)
            raise ConfigError(
                f"{key}.gpus_per_node = {gpus}: {fit} nodes of partition {name} have as many, "
                f"{component.held_nodes} are needed; its nodes have up to {most}"
            )
        wanted[name] = wanted.get(name, 0) + component.held_nodes
        if wanted[name] > len(nodes):
            asked = "nodes" if component.held_nodes == component.nodes else "max_nodes"
            raise ConfigError(
                f"{key}.{asked} = {component.held_nodes}: partition {name} has {len(nodes)} nodes "
                f"and the run needs {wanted[name]}, since components do not share a node; "
                "ask for fewer"
            )


def _nodes(component: Component, names: str, partitions: Partitions) -> dict[str, int]:
    nodes: dict[str, int] = {}
    for name in names.split(","):
        if name not in partitions:
            close = difflib.get_close_matches(name, partitions, n=1)
            hint = f"did you mean {close[0]}?" if close else f"use {', '.join(partitions)}"
            raise ConfigError(f"{component.key}.partition = {name!r}: no such partition; {hint}")
        nodes |= partitions[name]
    return nodes


def _partitions() -> Partitions:
    answer = output_of(["sinfo", "-h", "-N", "-o", "%P|%N|%G"])
    if answer.returncode:
        raise ConfigError(
            f"{words_of(answer)}; work where Slurm answers; with --local nobody asks it, and "
            "submit runs the job on this machine"
        )
    return parse_sinfo(answer.stdout)


def parse_sinfo(text: str) -> Partitions:
    """Reads lines of `sinfo -N -o "%P|%N|%G"`: "main*|n1|gpu:h100:4(S:0-1),nvme:1"."""
    partitions = Partitions()
    for line in text.splitlines():
        name, node, gres = line.split("|")
        if name.endswith("*"):
            name = partitions.default = name[:-1]
        partitions.setdefault(name, {})[node] = _gpus(gres)
    return partitions


def _gpus(gres: str) -> int:
    count = 0
    # Strip "(S:0-1)" first: it may hold commas.
    plain = "".join(part.split(")")[-1] for part in gres.split("("))
    for resource in plain.split(","):
        name, *rest = resource.split(":")
        if name == "gpu" and rest:
            count += int(rest[-1])
    return count
