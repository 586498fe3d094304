"""Checks models and Megatron-core settings before a job: the policy, and the models beside it."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from relax_hpc.config.actor import ActorConfig
from relax_hpc.config.model import MegatronConfig
from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.data.media.recipe import read_recipe
from relax_hpc.errors import CheckpointError, ConfigError
from relax_hpc.roles.facts import Facts
from relax_hpc.roles.teacher.prompts import make_privileged_prompts
from relax_hpc.runtime.files import user_files
from relax_hpc.trainer.megatron import fit
from relax_hpc.trainer.models.architecture import Architecture

SAMPLE = 64
"""Rows of which a teacher's prompts are made, the longest among them."""


def check_model(path: Path, config: MegatronConfig, facts: Facts | None = None) -> Architecture:
    """Checks that the model can be trained, and that the layout divides it.

    Raises:
        ConfigError: it cannot.
    """
    facts = facts or Facts(path)
    shape = facts.architecture(path)
    facts.tell_doubts(path)
    fit.check(config, shape)
    if isinstance(config, ActorConfig):
        fit.check_frozen(config.frozen, shape, config.layout)
        fit.check_lora(config.lora, config.frozen, shape)
    return shape


def of_key(key: str, error: ConfigError) -> ConfigError:
    """Returns a model's error, attributed to the key of the job that names the model."""
    said = str(error).removeprefix("model.path = ")
    section = key.rpartition(".")[0]
    if said != str(error):
        return ConfigError(f"{key} = {said}")
    return ConfigError(said if said.startswith(section) else f"{section}: {said}")


def check_reference(config: RunConfig, facts: Facts) -> None:
    """Checks that the reference reads the same tokens and, inside the trainer, has its shape."""
    reference, path = config.reference, config.reference_model.path
    if reference.placement == "none":
        return
    is_own = reference.placement == "own"
    megatron = config.reference_megatron if is_own else config.actor
    found = _check_other("reference.path", path, megatron, facts)
    key = f"reference.path = {str(path)!r}"
    _check_sees_alike(config, path, key, facts)
    check_window(config, key, found, facts.shape)
    of_length = {"max_positions", "is_window"}
    names = [field.name for field in fields(Architecture) if field.name not in of_length]
    same = "tokenizer" if is_own else "shape, or placement = own"
    names = ["vocab_size"] if is_own else names
    _check_same(key, names, found, facts.shape, f"use a model of the same {same}")


def check_critic(config: RunConfig, facts: Facts) -> None:
    """Checks that the critic reads the same tokens, fits its layout, and has its own weights."""
    critic = config.critic
    if critic is None:
        return
    if facts.shape.vision:
        raise ConfigError(
            f"critic: is shown no media, and model.path = {str(config.model.path)!r} is; use an "
            "algorithm without one, e.g. algorithm.preset = 'grpo'"
        )
    path = critic.model(config.model).path
    found = _check_other("critic.path", path, critic.megatron(config.actor), facts)
    key, remedy = f"critic.path = {str(path)!r}", "use a model of the same tokenizer"
    _check_same(key, ["vocab_size"], found, facts.shape, remedy)
    check_first_weights(
        critic.advanced.weights, found, section="critic.advanced", has_vocabulary=False
    )


def check_teachers(config: RunConfig, facts: Facts) -> None:
    """Checks that teachers read the same tokens, fit their layouts, and get valid prompts."""
    for name, teacher in config.teachers.items():
        path, megatron = teacher.model(config.model).path, teacher.megatron(config.actor, name)
        found = _check_other(f"teachers.{name}.path", path, megatron, facts)
        key = f"teachers.{name}.path = {str(path)!r}"
        _check_sees_alike(config, path, key, facts)
        if facts.shape.vision and teacher.prompt:
            raise ConfigError(
                f"teachers.{name}.prompt: has no media, and model.path = "
                f"{str(config.model.path)!r} is shown some; remove it"
            )
        check_window(config, key, found, facts.shape)
        remedy = "use a teacher of the same tokenizer"
        _check_same(key, ["vocab_size"], found, facts.shape, remedy)
        mine, others = facts.tokens(config.model.path), facts.tokens(path)
        if mine and others and (odd := sorted({*mine.items()} ^ {*others.items()}, key=_number)):
            token, number = odd[0]
            raise ConfigError(
                f"{key}: its tokenizer.json has another token {number} than model.path's "
                f"({len(odd)} differ; the first is {token!r}); {remedy}"
            )
        _check_prompts(config, name, megatron.tokens_per_micro_batch)


def _check_other(key: str, path: Path, megatron: MegatronConfig, facts: Facts) -> Architecture:
    try:
        found = check_model(path, megatron, facts)
        facts.check_weights(path)
    except ConfigError as error:
        raise of_key(key, error) from None
    return found


def _check_same(
    key: str, names: Sequence[str], found: Architecture, shape: Architecture, remedy: str
) -> None:
    for name in names:
        other, own = getattr(found, name), getattr(shape, name)
        if other != own:
            raise ConfigError(
                f"{key}: {name} is {other} in its config.json, {own} in model.path's; {remedy}"
            )


def _check_sees_alike(config: RunConfig, path: Path, key: str, facts: Facts) -> None:
    """Checks that a model that reads the policy's rows gets their media in the same form."""
    folders = path, config.model.path
    mine, own = (read_recipe(f, config.prompts.media, facts.config(f).record) for f in folders)
    if mine != own:
        raise ConfigError(
            f"{key}: its images are made otherwise than model.path's (by its config.json and the "
            "files of its preprocessor); use a model of the same preprocessor"
        )


def check_window(config: RunConfig, key: str, found: Architecture, shape: Architecture) -> None:
    """Checks that another model's attention window covers the policy's rows.

    Args:
        key: that names the other model, with its folder, for messages.
    """
    longest = min(shape.max_positions, config.actor.tokens_per_micro_batch)
    if found.is_window and found.max_positions < longest:
        raise ConfigError(
            f"{key}: has {found.said_positions}, and a row may have {longest} tokens; use "
            f"actor.tokens_per_micro_batch = {found.max_positions}, or another model"
        )


def _number(pair: tuple[str, int]) -> tuple[int, str]:
    return pair[1], pair[0]


def _check_prompts(config: RunConfig, name: str, budget: int) -> None:
    prompts = make_privileged_prompts(config, name)
    if prompts is None:
        return
    room = budget - config.rollout.max_new_tokens
    for index in prompts.sample(SAMPLE):
        if len(prompts[index]) > room:
            raise ConfigError(
                f"teachers.{name}.prompt: makes {len(prompts[index])} tokens of row {index}; with "
                f"rollout.max_new_tokens = {config.rollout.max_new_tokens} that is more than "
                f"actor.tokens_per_micro_batch = {budget}; raise it, or use a shorter text"
            )


def check_first_weights(
    folder: Path | None, shape: Architecture, *, section: str = "model", has_vocabulary: bool = True
) -> None:
    """Checks that the initial checkpoint is complete, and of this model.

    Args:
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
    from relax_hpc.runtime import devices  # with torch

    devices.hush()
    from relax_hpc.trainer.checkpoints.convert import check_fits  # a second, for torch

    try:
        check_fits(folder, shape, has_vocabulary=has_vocabulary)
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"{key}: {error}; {remedy}") from None


LEAST_ADAPTED_LR = 5e-5
"""Learning rate of adapters, times their scale, above which a bfloat16 model follows the first
updates; see docs/explanation/trainer.md."""


def check_rate(config: JobConfig, say: Callable[[str], None]) -> None:
    """Warns if the run ends before the learning rate has risen, or if a 16-bit model hardly follows
    its adapters."""
    lora, lr = config.actor.lora, config.actor.optimizer.lr
    is_rounded = lora.rank > 0 and config.model.dtype == "bfloat16"
    if is_rounded and lr * lora.scale < LEAST_ADAPTED_LR:
        say(
            f"actor.optimizer.lr = {lr:g}: what adapters learn in the first hundred updates is "
            "mostly below the last digit of a bfloat16 weight, and lost until it has grown; "
            f"{1e-4 / lora.scale:g} loses less (docs/explanation/trainer.md, Low-rank adaptation)"
        )
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


def check_trainer(config: JobConfig, shape: Architecture) -> None:
    actor = config.actor
    if not (actor.transformer or actor.optimizer.ddp or actor.optimizer.megatron):
        return  # nothing to ask, and asking takes seconds: Megatron-core has to be imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of optional packages it could do without
        from relax_hpc.trainer.megatron import settings
        from relax_hpc.trainer.megatron.settings import transformer_config

        model = config.model
        transformer_config(actor, shape, model.dtype)
        settings.check_optimizer(actor.optimizer, model.dtype)
