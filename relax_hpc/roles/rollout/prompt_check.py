"""Whether the prompts of a run can be sampled and trained on.

Where the run is submitted every line is read, but only some are tokenized; when it starts, the
rollout tasks tokenize all of them before anything is sampled.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.models.registry import read_architecture
from relax_hpc.prompts.source import PromptSource, Records
from relax_hpc.rewards.registry import REWARDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLE = 1000
"""Prompts of a file that are tokenized where the run is submitted."""


class Files(NamedTuple):
    """The prompt files of a run, read."""

    train: Records
    heldout: Records


class Sources(NamedTuple):
    """The prompts of a run."""

    train: PromptSource
    heldout: PromptSource


def read(config: RunConfig) -> Files:
    """Reads every line of both files.

    Raises:
        ConfigError: one is no prompt, or has an answer that the reward can never match.
    """
    reward = REWARDS[config.reward.name]
    files = []
    for key, path in (("train", config.prompts.train), ("heldout", config.prompts.heldout)):
        try:
            records = Records(path)
            records.check_answers(
                reward.can_match, f"with reward.name = {config.reward.name!r} {reward.remedy}"
            )
        except ConfigError as error:
            raise ConfigError(f"prompts.{key}: {error}") from None
        files.append(records)
    return Files(*files)


def sources_of(config: RunConfig, files: Files, tokenizer: "PreTrainedTokenizerBase") -> Sources:
    """The prompts as engines take them.

    Raises:
        ConfigError: there is no chat template, and one is asked for.
    """
    settings = config.prompts
    if settings.chat_template and not tokenizer.chat_template:
        raise ConfigError(
            f"prompts.chat_template = True: the tokenizer in {config.model.path} has none; "
            "set it to false, or add a chat_template.jinja"
        )
    train, heldout = (
        PromptSource(
            records,
            tokenizer,
            shuffle_seed=seed,
            chat_template=settings.chat_template,
            max_prompt_tokens=settings.max_prompt_tokens,
        )
        for records, seed in ((files.train, settings.shuffle_seed), (files.heldout, None))
    )
    return Sources(train, heldout)


def check_sample(config: RunConfig, sources: Sources) -> str | None:
    """Tokenizes some prompts, the longest texts among them.

    Returns:
        What was left out, for people; None if that is nothing.

    Raises:
        ConfigError: one is too long, or the chat template fails on it.
    """
    chosen = [source.records.sample(SAMPLE) for source in sources]
    _check(config, sources, chosen)
    count, total = sum(map(len, chosen)), sum(map(len, sources))
    if count == total:
        return None
    return (
        f"checked {count:,} of {total:,} prompts; all are checked when the job starts, before "
        "anything is sampled"
    )


def check_share(config: RunConfig, sources: Sources, rank: int, size: int) -> None:
    """Tokenizes the prompts that this one of the rollout tasks has to look at; raises likewise."""
    _check(config, sources, [range(rank, len(source), size) for source in sources])


def check_lengths(config: RunConfig, longest_trained: int, longest: int) -> None:
    """A response as long as it may become still fits: trained on, and in the model's positions.

    Args:
        config: the run.
        longest_trained: tokens of the longest training prompt.
        longest: tokens of the longest prompt.
    """
    new = config.rollout.max_new_tokens
    for layout in (config.actor, config.reference_layout):
        budget = layout.tokens_per_micro_batch
        if longest_trained + new > budget:
            raise ConfigError(
                f"{layout.section}.tokens_per_micro_batch = {budget}: the longest prompt has "
                f"{longest_trained} tokens and rollout.max_new_tokens = {new}; "
                f"use {longest_trained + new} or more"
            )
    positions = read_architecture(config.model.path).max_positions
    if longest + new > positions:
        left = positions - longest
        remedy = f"use {left} or less" if left > 0 else "lower prompts.max_prompt_tokens"
        raise ConfigError(
            f"rollout.max_new_tokens = {new}: the longest prompt has {longest} tokens and the "
            f"model {positions} positions; {remedy}"
        )


def _check(config: RunConfig, sources: Sources, chosen: Sequence[Sequence[int]]) -> None:
    lengths = []
    for key, source, indices in zip(Sources._fields, sources, chosen, strict=True):
        try:
            lengths.append(source.longest(indices))
        except ConfigError as error:
            raise ConfigError(f"prompts.{key}: {error}") from None
    check_lengths(config, lengths[0], max(lengths))
