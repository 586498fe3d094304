"""Checks of a model, and of Megatron-core's settings, before a job."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path

from relax_hpc import user_files
from relax_hpc.config.actor import ActorConfig
from relax_hpc.config.layout import MegatronConfig
from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.engines import optional_packages
from relax_hpc.engines.megatron import fit
from relax_hpc.errors import CheckpointError, ConfigError
from relax_hpc.media.recipe import read_recipe
from relax_hpc.models import fields as hf_fields
from relax_hpc.models import registry
from relax_hpc.models.architecture import Architecture
from relax_hpc.models.config_json import ConfigJson
from relax_hpc.models.hf_check import check_names, check_shapes
from relax_hpc.models.hf_files import HfFiles

log = logging.getLogger(__name__)


def check_model(path: Path, config: MegatronConfig) -> Architecture:
    """The model is of an architecture that can be trained, and the layout divides it.

    Raises:
        ConfigError: it is not.
    """
    shape = registry.read_architecture(path)
    for doubt in hf_fields.doubts(ConfigJson(path)):
        log.warning("%s", doubt)
    fit.check(config, shape)
    if isinstance(config, ActorConfig):
        fit.check_frozen(config.frozen, shape, config.layout)
        fit.check_lora(config.lora, config.frozen, shape)
    return shape


def of_key(key: str, error: ConfigError) -> ConfigError:
    """Returns what is wrong with a model, said of the key of the job that names it."""
    said = str(error).removeprefix("model.path = ")
    section = key.rpartition(".")[0]
    if said != str(error):
        return ConfigError(f"{key} = {said}")
    return ConfigError(said if said.startswith(section) else f"{section}: {said}")


def check_sees_alike(config: RunConfig, path: Path, key: str) -> None:
    """A model that is given the policy's rows is shown their media as the policy is.

    Args:
        config: of the run.
        path: folder of the model.
        key: that names it, for messages.
    """
    settings = config.prompts.media
    if read_recipe(path, settings) != read_recipe(config.model.path, settings):
        raise ConfigError(
            f"{key} = {str(path)!r}: its images are made otherwise than model.path's (by its "
            "config.json and the files of its preprocessor); use a model of the same preprocessor"
        )


def check_window(config: RunConfig, key: str, found: Architecture, shape: Architecture) -> None:
    """Tokens of the policy's rows see all before them in another model, too.

    Args:
        config: of the run.
        key: that names the other model, with its folder, for messages.
        found: the other model.
        shape: the policy.
    """
    longest = min(shape.max_positions, config.actor.tokens_per_micro_batch)
    if found.is_window and found.max_positions < longest:
        raise ConfigError(
            f"{key}: has {found.said_positions}, and a row may have {longest} tokens; use "
            f"actor.tokens_per_micro_batch = {found.max_positions}, or another model"
        )


def check_weights(path: Path, shape: Architecture) -> None:
    """The folder holds all of the model's tensors, and they are what its config.json says."""
    with HfFiles(path, framework="np") as files:
        check_names(files, shape, registry.parameters(shape))
        check_shapes(files, registry.parameters(shape))


def check_first_weights(
    folder: Path | None, shape: Architecture, *, section: str = "model", has_vocabulary: bool = True
) -> None:
    """The checkpoint that training starts from is whole, and one of this model.

    Args:
        folder: of it.
        shape: of the model.
        section: of the job, that has the key `weights`.
        has_vocabulary: whether it needs an output layer.
    """
    if folder is None:
        return
    key = f"{section}.weights = {str(folder)!r}"
    remedy = "name a checkpoint: checkpoints/step_... of a run, or what relax-hpc convert made"
    there = sorted(each.name for each in folder.parent.glob("step_*"))
    user_files.check_folder(key, folder, f"there are {', '.join(there)}" if there else remedy)
    for name, what in (("run.json", "is a run"), ("config.json", "is a Hugging Face folder")):
        if (folder / name).exists():
            raise ConfigError(f"{key}: {what}; {remedy}")
    optional_packages.hush()
    from relax_hpc.engines.megatron.checkpoint.conversion import check_fits  # a second, for torch

    try:
        check_fits(folder, shape, has_vocabulary=has_vocabulary)
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"{key}: {error}; {remedy}") from None


def check_rate(config: JobConfig, say: Callable[[str], None]) -> None:
    """Says that the run is over before the learning rate has risen."""
    optimizer, steps = config.actor.optimizer, config.num_steps
    if isinstance(config, RunConfig):
        steps -= config.steps_of_critic_alone
    if optimizer.warmup_steps > steps:
        reached = optimizer.lr * steps / optimizer.warmup_steps
        say(
            f"actor.optimizer.warmup_steps = {optimizer.warmup_steps}: the policy learns in "
            f"{steps} steps, so the learning rate rises to {reached:.3g} only, not to "
            f"{optimizer.lr:g}"
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
