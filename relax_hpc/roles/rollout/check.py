"""Checks sampling before a job is queued."""

from collections.abc import Collection, Iterator
from contextlib import suppress

from relax_hpc.config.engines import ROLLOUT
from relax_hpc.config.run import RunConfig
from relax_hpc.data import overlap
from relax_hpc.data import tokenizer as tokenizers
from relax_hpc.data.source import Prompt, PromptSource
from relax_hpc.environments import registry as environments
from relax_hpc.environments.rewards import trial
from relax_hpc.environments.rewards.contract import Sample
from relax_hpc.environments.rewards.registry import terms_of
from relax_hpc.errors import ConfigError
from relax_hpc.inference.sglang import launch as sglang
from relax_hpc.roles.engine.check import check_engine, check_quantized
from relax_hpc.roles.facts import Facts
from relax_hpc.roles.role import Say
from relax_hpc.roles.rollout import prompt_check
from relax_hpc.trainer.models.architecture import Architecture

MOST_TRIED = 1000
"""Prompts of a set in which sources are searched."""
MOST_COMPARED = 20_000
"""Training prompts compared with each other and with held-out ones before a job is queued."""


def check(config: RunConfig, facts: Facts, say: Say) -> RunConfig:
    """Rejects a rollout that cannot work; the slowest checks come last.

    Returns:
        The run, with the recording of experts decided.
    """
    shape = facts.shape
    config = with_routed_experts(config, shape)
    check_engine(config.rollout_pool, shape, routed_experts=config.replays_routing)
    check_lease(config)
    check_quantized(config, shape)
    check_evaluations(config)
    check_prompts(config, facts, say)
    check_lowest_rewards(config)
    return config


def with_routed_experts(config: RunConfig, shape: Architecture) -> RunConfig:
    """Turns on the recording of experts for a mixture of experts, unless the job turns it off."""
    if config.rollout.advanced.routed_experts is not None:
        return config
    can = shape.experts is not None and config.rollout_pool.kind == "sglang"
    can &= not config.rollout.stop
    advanced = config.rollout.advanced.model_copy(update={"routed_experts": can})
    rollout = config.rollout.model_copy(update={"advanced": advanced})
    return config.model_copy(update={"rollout": rollout})


def check_lease(config: RunConfig) -> None:
    """Checks that engines on the actor's GPUs cover them: each engine rank shares one GPU, and as
    many as `engines_per_gpu` share the same."""
    pool, actor = config.rollout_pool, config.actor
    if pool.placement != "actor":
        return
    on_gpus, of_rank = pool.kind == "sglang", pool.lanes_per_rank
    size = sglang.size_of(pool.args).gpus if on_gpus else 1
    if size * pool.count != actor.layout.world_size * of_rank:
        each = f" of tp_size {size}" if on_gpus else ""
        wanted = "as many of both" if of_rank == 1 else f"{of_rank} to a rank (engines_per_gpu)"
        raise ConfigError(
            f"engines.rollout.count = {pool.count}: engines{each} have "
            f"{size * pool.count} ranks, the actor has {actor.layout.world_size}; with "
            f'engines.rollout.placement = "actor" there are {wanted}'
        )
    unsaid = "mem_fraction_static" not in pool.args
    if on_gpus and actor.resources.gpus_per_node and unsaid:
        raise ConfigError(
            "engines.rollout.args.mem_fraction_static: is not set; with "
            'engines.rollout.placement = "actor" say which part of what the actor leaves free '
            "engines may take, e.g. 0.7"
        )


def check_evaluations(config: RunConfig) -> None:
    """Checks that several responses to a held-out prompt can differ."""
    if config.rollout.environment != "single_turn":
        return  # what it says may differ
    for name, held in config.eval.items():
        if held.samples_per_prompt > 1 and not held.temperature:
            raise ConfigError(
                f"eval.{name}.samples_per_prompt = {held.samples_per_prompt}: are all alike, since "
                f"temperature = 0 is greedy; set eval.{name}.temperature, say to 1, or sample one"
            )


def check_lowest_rewards(config: RunConfig) -> None:
    """Checks that no built-in reward is below 0 where the advantage takes none."""
    for term in terms_of(config.reward):
        if config.algorithm.advantage.name == "max_rl" and term.if_failed < 0:
            raise ConfigError(
                f"{term.key}.name = {term.name!r}: can be {term.if_failed:g}, and "
                "algorithm.advantage.name = 'max_rl' takes no reward below 0; use another reward, "
                "or another advantage"
            )


def check_prompts(config: RunConfig, facts: Facts, say: Say) -> None:
    """Checks that all files hold prompts that fit the trainer and the model."""
    files, sources = read_prompts(config, facts, say)
    found = prompt_check.overlap_of(config, files, MOST_COMPARED)
    for remark in [
        *few_rows(config, sources),
        *find_unscored(config, files),
        *overlap.lines(found, num_examples=1),
    ]:
        say(remark)


def read_prompts(
    config: RunConfig, facts: Facts, say: Say, *, is_trained: bool = True
) -> tuple[prompt_check.Files, prompt_check.Sources]:
    """Reads all data, and rejects prompts that cannot be sampled or scored.

    Args:
        say: told which rows are left out, or not checked yet.
        is_trained: as in `prompt_check.open_files`.
    """
    environments.make(config.rollout)
    # Most mistakes are there: find them before the slow import of a tokenizer.
    files = prompt_check.read(config, is_trained=is_trained)
    tokenizer = tokenizers.load(config.model.path, facts.shape.model_type)
    sources = prompt_check.sources_of(config, files, tokenizer, facts)
    for remark in prompt_check.check_sample(config, sources, facts.shape):
        say(remark)
    try_reward(config, sources.train)
    return files, sources


def few_rows(config: RunConfig, sources: prompt_check.Sources) -> Iterator[str]:
    """Reports data with fewer rows than the job samples at once."""
    size, rows = config.schedule.prompts_per_step, sources.train.num_rows
    if rows < size:
        yield (
            f"schedule.prompts_per_step = {size:,}: rows in {sources.train_key}: {rows:,}, so "
            "every step has prompts more than once"
        )
    for name, source in sources.heldout.items():
        held = config.eval[name]
        if "num_prompts" in held.model_fields_set and source.num_rows < held.num_prompts:
            yield (
                f"eval.{name}.num_prompts = {held.num_prompts:,}: rows in eval.{name}.path: "
                f"{source.num_rows:,}, and all of them are used"
            )


def try_reward(config: RunConfig, source: PromptSource) -> None:
    """Scores a response to the first prompt with a user's own reward, as a trial."""
    first = source.first()
    names = {name for term in config.reward.terms.values() for name in term.sources}
    firsts = [first, *first_of_each(source, names - {first.source})]
    samples = [
        Sample(each.answer, each.messages, each.answer, each.metadata, source=each.source)
        for each in firsts
    ]
    pools = [name for name in config.engines if name != ROLLOUT]
    trial.check(config.reward, samples[0], pools, samples[1:])


def first_of_each(source: PromptSource, names: Collection[str]) -> Iterator[Prompt]:
    """Yields the first prompt of each source among the rows checked."""
    left = set(names)
    for index in source.records.sample(MOST_TRIED) if left else ():
        try:
            prompt = source.prompt(index)
        except ConfigError:
            continue  # it was told already, or is left out
        if prompt.source in left:
            left.discard(prompt.source)
            yield prompt
        if not left:
            return


def find_unscored(config: RunConfig, files: prompt_check.Files) -> Iterator[str]:
    """Reports reward terms whose sources appear in no prompt checked."""
    if not any(term.sources for term in config.reward.terms.values()):
        return
    seen = {*config.prompts.sources, *config.eval}
    for records in (files.train, *files.heldout.values()):
        for index in records.sample(MOST_TRIED):
            with suppress(ConfigError):  # it was told already, or is left out
                seen.add(records[index].source)
    for title, term in config.reward.terms.items():
        if missing := sorted(set(term.sources) - seen):
            yield (
                f"reward.terms.{title}.sources: no prompt that was looked at is of "
                f"{', '.join(missing)}; there are {', '.join(sorted(seen - {''}))}"
            )
