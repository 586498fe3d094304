"""Checks of sampling before anything is queued."""

from relax_hpc.config.engines import ROLLOUT
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.sglang import launch as sglang
from relax_hpc.environments import registry as environments
from relax_hpc.errors import ConfigError
from relax_hpc.models.architecture import Architecture
from relax_hpc.prompts import overlap
from relax_hpc.prompts.source import PromptSource
from relax_hpc.rewards import trial
from relax_hpc.rewards.contract import Sample
from relax_hpc.roles.engine import quantized
from relax_hpc.roles.engine.check import check_engine
from relax_hpc.roles.role import Say
from relax_hpc.roles.rollout import prompt_check

MOST_COMPARED = 20_000
"""Training prompts that are compared with each other and with held-out ones before a job is
queued."""


def check(config: RunConfig, shape: Architecture, say: Say) -> RunConfig:
    """Refuses a rollout that cannot work; what is read for longest comes last.

    Returns:
        The run; whether it records experts is decided.
    """
    config = with_routed_experts(config, shape)
    check_engine(config.rollout_pool, shape, routed_experts=config.replays_routing)
    check_lease(config)
    quantized.check(config, shape)
    check_prompts(config, say)
    return config


def with_routed_experts(config: RunConfig, shape: Architecture) -> RunConfig:
    """Engines of a mixture of experts say where tokens went, unless the job does not want it."""
    if config.rollout.routed_experts is not None:
        return config
    can = shape.experts is not None and config.rollout_pool.kind == "sglang"
    can &= not config.rollout.stop
    rollout = config.rollout.model_copy(update={"routed_experts": can})
    return config.model_copy(update={"rollout": rollout})


def check_lease(config: RunConfig) -> None:
    """Engines that share the actor's GPUs cover them: each of their ranks is beside one of its."""
    pool, actor = config.rollout_pool, config.actor
    if pool.placement != "actor":
        return
    on_gpus = pool.kind == "sglang"
    size = sglang.size_of(pool.args).gpus if on_gpus else 1
    if size * pool.count != actor.layout.world_size:
        each = f" of tp_size {size}" if on_gpus else ""
        raise ConfigError(
            f"engines.rollout.count = {pool.count}: engines{each} have "
            f"{size * pool.count} ranks, the actor has {actor.layout.world_size}; with "
            'engines.rollout.placement = "actor" there are as many of both'
        )
    unsaid = "mem_fraction_static" not in pool.args
    if on_gpus and actor.resources.gpus_per_node and unsaid:
        raise ConfigError(
            "engines.rollout.args.mem_fraction_static: is not set; with "
            'engines.rollout.placement = "actor" say which part of what the actor leaves free '
            "engines may take, e.g. 0.7"
        )


def check_prompts(config: RunConfig, say: Say) -> None:
    """Both files are prompts, and what is made of them fits the trainer and the model."""
    environments.make(config.rollout.environment)
    files = prompt_check.read(config)  # most mistakes are there: find them before a slow import
    from relax_hpc.prompts.tokenizer import load

    sources = prompt_check.sources_of(config, files, load(config.model.path))
    for remark in prompt_check.check_sample(config, sources):
        say(remark)
    try_reward(config, sources.train)
    found = prompt_check.overlap_of(config, files, MOST_COMPARED)
    for line in overlap.lines(found, num_examples=1):
        say(line)


def try_reward(config: RunConfig, source: PromptSource) -> None:
    """Lets the reward score a response to the first prompt, if it is somebody's own."""
    first = source.first()
    sample = Sample(first.answer, first.messages, first.answer, first.metadata)
    trial.check(config.reward, sample, [name for name in config.engines if name != ROLLOUT])
