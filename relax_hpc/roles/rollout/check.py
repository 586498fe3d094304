"""Checks of sampling before anything is queued."""

from collections.abc import Collection, Iterator
from contextlib import suppress

from relax_hpc.config.engines import ROLLOUT
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.sglang import launch as sglang
from relax_hpc.environments import registry as environments
from relax_hpc.errors import ConfigError
from relax_hpc.models.architecture import Architecture
from relax_hpc.prompts import overlap
from relax_hpc.prompts.source import Prompt, PromptSource
from relax_hpc.rewards import trial
from relax_hpc.rewards.contract import Sample
from relax_hpc.roles.engine import quantized
from relax_hpc.roles.engine.check import check_engine
from relax_hpc.roles.role import Say
from relax_hpc.roles.rollout import prompt_check

MOST_TRIED = 1000
"""Prompts of a set among which those of a source are looked for."""
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
    check_evaluations(config)
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


def check_evaluations(config: RunConfig) -> None:
    """Several responses to a held-out prompt differ."""
    if config.rollout.environment != "single_turn":
        return  # what it says may differ
    for name, held in config.eval.items():
        if held.samples_per_prompt > 1 and not held.temperature:
            raise ConfigError(
                f"eval.{name}.samples_per_prompt = {held.samples_per_prompt}: are all alike, since "
                f"temperature = 0 is greedy; set eval.{name}.temperature, say to 1, or sample one"
            )


def check_prompts(config: RunConfig, say: Say) -> None:
    """Both files are prompts, and what is made of them fits the trainer and the model."""
    environments.make(config.rollout)
    files = prompt_check.read(config)  # most mistakes are there: find them before a slow import
    from relax_hpc.prompts.tokenizer import load

    sources = prompt_check.sources_of(config, files, load(config.model.path))
    for remark in [*prompt_check.check_sample(config, sources), *few_rows(config, sources)]:
        say(remark)
    try_reward(config, sources.train)
    for remark in unscored(config, files):
        say(remark)
    found = prompt_check.overlap_of(config, files, MOST_COMPARED)
    for line in overlap.lines(found, num_examples=1):
        say(line)


def few_rows(config: RunConfig, sources: prompt_check.Sources) -> Iterator[str]:
    """Says where the data has fewer rows than the job asks for at once."""
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
    """Lets the reward score a response to the first prompt, if it is somebody's own."""
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
    """The first prompt of each of these sources that is among the rows that are looked at."""
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


def unscored(config: RunConfig, files: prompt_check.Files) -> Iterator[str]:
    """Says for which sources a term is that no prompt was seen of."""
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
