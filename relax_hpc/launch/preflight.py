"""What can be known to be wrong before anything is queued. Each refusal names a remedy."""

import difflib
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from relax_hpc import user_files
from relax_hpc.config.layout import MegatronLayout
from relax_hpc.config.rollout import RolloutConfig
from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.config.sft import SftRunConfig
from relax_hpc.engines import optional_packages
from relax_hpc.engines.embedded import launch as embedded
from relax_hpc.engines.megatron import fit
from relax_hpc.engines.sglang import launch as sglang
from relax_hpc.environments import registry as environments
from relax_hpc.errors import CheckpointError, ConfigError
from relax_hpc.launch import quantized, script
from relax_hpc.launch.jobs import output_of, words_of
from relax_hpc.launch.placement import Component
from relax_hpc.models import fields as hf_fields
from relax_hpc.models import registry
from relax_hpc.models.architecture import Architecture
from relax_hpc.models.config_json import ConfigJson
from relax_hpc.models.hf_check import check_names, check_shapes
from relax_hpc.models.hf_files import HfFiles
from relax_hpc.roles.rollout import prompt_check
from relax_hpc.roles.sft import document_check

log = logging.getLogger(__name__)

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
    if isinstance(config, RunConfig):
        check_engine(config.rollout, shape)
        check_lease(config)
        quantized.check(config, shape)
        check_reference(config, shape)
    check_trainer(config)
    if isinstance(config, RunConfig):
        check_prompts(config, say)
    elif isinstance(config, SftRunConfig):
        config = check_documents(config, say)
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


def check_model(path: Path, layout: MegatronLayout) -> Architecture:
    """The model is of an architecture that can be trained, and the grid divides it."""
    shape = registry.read_architecture(path)
    for doubt in hf_fields.doubts(ConfigJson(path)):
        log.warning("%s", doubt)
    fit.check(layout, shape)
    return shape


def check_weights(path: Path, shape: Architecture) -> None:
    """The folder holds all of the model's tensors, and they are what its config.json says."""
    with HfFiles(path, framework="np") as files:
        check_names(files, shape, registry.parameters(shape))
        check_shapes(files, registry.parameters(shape))


def check_first_weights(folder: Path | None, shape: Architecture) -> None:
    """The checkpoint that training starts from is whole, and one of this model."""
    if folder is None:
        return
    key = f"model.weights = {str(folder)!r}"
    remedy = "name a checkpoint: checkpoints/step_... of a run, or what relax-hpc convert made"
    user_files.check_folder(key, folder, remedy)
    for name, what in (("run.json", "is a run"), ("config.json", "is a Hugging Face folder")):
        if (folder / name).exists():
            raise ConfigError(f"{key}: {what}; {remedy}")
    optional_packages.hush()
    from relax_hpc.engines.megatron.checkpoint.conversion import check_fits  # a second, for torch

    try:
        check_fits(folder, shape)
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"{key}: {error}; {remedy}") from None


def check_reference(config: RunConfig, shape: Architecture) -> None:
    """The reference reads the same tokens; in the trainer's place it has the trainer's shape."""
    reference = config.reference
    if reference.placement == "none":
        return
    path = config.reference_model.path
    try:
        its = check_model(
            path, config.reference_layout if reference.placement == "own" else config.actor
        )
        check_weights(path, its)
    except ConfigError as error:
        raise ConfigError(f"reference: {error}") from None
    names = [field.name for field in fields(Architecture) if field.name != "max_positions"]
    own = reference.placement == "own"
    for name in ["vocab_size"] if own else names:
        if getattr(its, name) != getattr(shape, name):
            raise ConfigError(
                f"reference.path = {str(path)!r}: {name} is {getattr(its, name)} in its "
                f"config.json, {getattr(shape, name)} in model.path's; use a model of the same "
                f"{'tokenizer' if own else 'shape, or placement = own'}"
            )


def check_engine(rollout: RolloutConfig, shape: Architecture) -> None:
    """The engine computes the model, and its own parser takes `rollout.engine_args`."""
    if rollout.engine == "embedded" and shape.model_type != "qwen3":
        raise ConfigError(
            f"rollout.engine = 'embedded': does not compute models of model_type "
            f"{shape.model_type!r}; use 'sglang'"
        )
    if rollout.engine == "sglang" and shape.rope.unfit_for_sglang:
        raise ConfigError(f"config.json of the model: rope_scaling: {shape.rope.unfit_for_sglang}")
    if rollout.routed_experts and shape.experts is None:
        raise ConfigError(
            f"rollout.routed_experts = true: a model of model_type {shape.model_type!r} has no "
            "experts; leave it out"
        )
    parser = {"embedded": embedded.check, "sglang": sglang.check}[rollout.engine]
    parser(rollout.engine_args)
    if rollout.engine == "sglang":
        _check_size(rollout, shape)


def _check_size(rollout: RolloutConfig, shape: Architecture) -> None:
    size, resources = sglang.size_of(rollout.engine_args), rollout.resources
    shared_by = size.tensor // size.data if size.attention_data else size.tensor
    if shared_by == 0 or shape.num_heads % shared_by:
        raise ConfigError(
            f"rollout.engine_args.tp_size = {size.tensor}: {shape.num_heads} attention heads do "
            f"not divide by {shared_by or 'less than one rank'}; use a divisor"
        )
    if size.gpus % rollout.nodes_per_engine:
        raise ConfigError(
            f"rollout.engine_args.tp_size = {size.tensor}: does not divide over "
            f"{rollout.nodes_per_engine} nodes (rollout.nodes_per_engine)"
        )
    wanted = size.gpus * rollout.num_engines // resources.nodes
    if 0 < resources.gpus_per_node < wanted:
        raise ConfigError(
            f"rollout.resources.gpus_per_node = {resources.gpus_per_node}: the engines of a node "
            f"take {wanted}; lower rollout.num_engines or tp_size, or raise resources.nodes"
        )


def check_lease(config: RunConfig) -> None:
    """Engines that share the actor's GPUs cover them: each of their ranks is beside one of its."""
    rollout, actor = config.rollout, config.actor
    if rollout.placement != "actor":
        return
    on_gpus = rollout.engine == "sglang"
    size = sglang.size_of(rollout.engine_args).gpus if on_gpus else 1
    if size * rollout.num_engines != actor.world_size:
        each = f" of tp_size {size}" if on_gpus else ""
        raise ConfigError(
            f"rollout.num_engines = {rollout.num_engines}: engines{each} have "
            f"{size * rollout.num_engines} ranks, the actor has {actor.world_size}; with "
            'rollout.placement = "actor" there are as many of both'
        )
    unsaid = "mem_fraction_static" not in rollout.engine_args
    if on_gpus and actor.resources.gpus_per_node and unsaid:
        raise ConfigError(
            'rollout.engine_args.mem_fraction_static: is not set; with rollout.placement = "actor" '
            "say which part of what the actor leaves free engines may take, e.g. 0.7"
        )


def check_trainer(config: JobConfig) -> None:
    """Megatron-core takes the pass-through tables of the actor."""
    actor = config.actor
    if not (actor.transformer or actor.optimizer.ddp or actor.optimizer.megatron):
        return  # nothing to ask, and asking takes seconds: Megatron-core has to be imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of optional packages it could do without
        from relax_hpc.engines.megatron.optimizer import settings
        from relax_hpc.engines.megatron.transformer import transformer_config

        model = config.model
        transformer_config(actor, registry.read_architecture(model.path), model.dtype)
        settings.check(actor.optimizer, model.dtype)


def check_prompts(config: RunConfig, say: Callable[[str], None] = _silent) -> None:
    """Both files are prompts, and what is made of them fits the trainer and the model."""
    environments.make(config.rollout.environment)
    files = prompt_check.read(config)  # most mistakes are there: find them before a slow import
    from relax_hpc.prompts.tokenizer import load

    sources = prompt_check.sources_of(config, files, load(config.model.path))
    if left_out := prompt_check.check_sample(config, sources):
        say(left_out)


def check_documents(config: SftRunConfig, say: Callable[[str], None] = _silent) -> SftRunConfig:
    """The documents can be trained on; how many steps their epochs are is counted."""
    files = document_check.open_files(config)
    sizes = document_check.read(config, files)  # finds most mistakes, before a slow import
    from relax_hpc.prompts.tokenizer import load

    tokenizer = load(config.model.path)
    steps, left_out = document_check.check_sample(config, files, sizes, tokenizer)
    if left_out:
        say(left_out)
    return config.model_copy(update={"sft": config.sft.model_copy(update={"num_steps": steps})})


def check_component(component: Component) -> None:
    """What one component asks for makes sense by itself."""
    key, resources = f"{component.role}.resources", component.resources
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
    """Nodes held for engines to come are rollout's, and its own nodes are among them."""
    resources = component.resources
    if resources.max_nodes is None:
        return
    key = f"{component.role}.resources.max_nodes = {resources.max_nodes}"
    if component.role != "rollout":
        raise ConfigError(
            f"{key}: only rollout can be scaled; remove it (a profile has it in [rollout])"
        )
    if resources.max_nodes < resources.nodes:
        raise ConfigError(
            f"{key}: is less than rollout.resources.nodes = {resources.nodes}; "
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
        key = f"{component.role}.resources"
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
            raise ConfigError(
                f"{component.role}.resources.partition = {name!r}: no such partition; {hint}"
            )
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
