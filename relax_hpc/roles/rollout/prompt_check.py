"""Checks that the prompts of a run can be sampled and trained on.

Where the run is submitted every line is read, but only some are tokenized; when it starts, the
rollout tasks tokenize all of them before anything is sampled.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.models.registry import read_architecture
from relax_hpc.prompts.rows import SAMPLE, left_out
from relax_hpc.prompts.source import PromptSource, Records
from relax_hpc.rewards.registry import REWARDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Files(NamedTuple):
    """The prompt files of a run, read."""

    train: Records
    heldout: dict[str, Records]
    """Records by the name of the set, as `eval` is."""


class Sources(NamedTuple):
    """The prompts of a run."""

    train: PromptSource
    heldout: dict[str, PromptSource]

    @property
    def by_key(self) -> dict[str, PromptSource]:
        """Every file's, by the key that names the file."""
        sets = {f"eval.{name}.path": source for name, source in self.heldout.items()}
        return {"prompts.train": self.train} | sets


def read(config: RunConfig) -> Files:
    """Reads every line of all files.

    Raises:
        ConfigError: one is no prompt, or has an answer that the reward can never match.
    """
    return Files(
        _read(config, "prompts.train", config.prompts.train),
        {name: _read(config, f"eval.{name}.path", each.path) for name, each in config.eval.items()},
    )


def _read(config: RunConfig, key: str, path: Path) -> Records:
    name = config.reward.name
    try:
        records = Records(path)
        if name in REWARDS:  # a program of somebody else's is not asked here
            remedy = f"with reward.name = {name!r} {REWARDS[name].remedy}"
            records.check_answers(REWARDS[name].can_match, remedy)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    return records


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

    def source(records: Records, shuffle_seed: int | None) -> PromptSource:
        return PromptSource(
            records,
            tokenizer,
            shuffle_seed=shuffle_seed,
            chat_template=settings.chat_template,
            max_prompt_tokens=settings.max_prompt_tokens,
        )

    train = source(files.train, config.seed)
    return Sources(train, {name: source(records, None) for name, records in files.heldout.items()})


def check_sample(config: RunConfig, sources: Sources) -> str | None:
    """Tokenizes some prompts, the longest texts among them.

    Returns:
        What was left out, for people; None if that is nothing.

    Raises:
        ConfigError: one is too long, or the chat template fails on it.
    """
    every = sources.by_key.values()
    chosen = [source.records.sample(SAMPLE) for source in every]
    _check(config, sources, chosen)
    return left_out(chosen, list(every), "prompts", "anything is sampled")


def check_share(config: RunConfig, sources: Sources, rank: int, size: int) -> None:
    """Tokenizes the prompts that this one of the rollout tasks has to look at; raises likewise."""
    _check(config, sources, [range(rank, len(source), size) for source in sources.by_key.values()])


def check_lengths(config: RunConfig, longest_trained: int, longest: int) -> None:
    """A response as long as it may become still fits: trained on, and in the model's positions.

    Args:
        config: the run.
        longest_trained: tokens of the longest training prompt.
        longest: tokens of the longest prompt.
    """
    new = config.rollout.max_new_tokens
    for section, budget in _budgets(config).items():
        if longest_trained + new > budget:
            raise ConfigError(
                f"{section}.tokens_per_micro_batch = {budget}: the longest prompt has "
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


class Limits(NamedTuple):
    """The greatest lengths of a conversation, in tokens."""

    trained: int
    """Tokens if it is trained on."""
    sampled: int
    """Tokens if it is only sampled."""


def limits_of(config: RunConfig) -> Limits:
    """Returns the lengths that trainer and model can take."""
    positions = read_architecture(config.model.path).max_positions
    return Limits(min(positions, *_budgets(config).values()), positions)


def _budgets(config: RunConfig) -> dict[str, int]:
    """Tokens of the longest row that each of those who read it takes, by section of the job."""
    readers = (config.actor, config.reference_megatron)
    return {each.section: each.tokens_per_micro_batch for each in readers}


def _check(config: RunConfig, sources: Sources, chosen: Sequence[Sequence[int]]) -> None:
    lengths = []
    for (key, source), indices in zip(sources.by_key.items(), chosen, strict=True):
        try:
            lengths.append(source.longest(indices))
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None
    check_lengths(config, lengths[0], max(lengths))
