"""Checks that the prompts of a run can be sampled and trained on.

Where the run is submitted every line is read, but only some are tokenized; when it starts, the
rollout tasks tokenize all of them before anything is sampled.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from relax_hpc.config.media import MediaConfig
from relax_hpc.config.prompts import Columns, SourceConfig
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError, shown
from relax_hpc.media.kinds import MODALITIES
from relax_hpc.media.recipe import Recipe, read_recipe
from relax_hpc.media.workers import Decoders
from relax_hpc.models.registry import read_architecture
from relax_hpc.prompts import overlap
from relax_hpc.prompts.media_tokens import MediaTokens
from relax_hpc.prompts.overlap import Overlap
from relax_hpc.prompts.record import Record, nearest
from relax_hpc.prompts.records import Records
from relax_hpc.prompts.rows import SAMPLE, left_out
from relax_hpc.prompts.source import Examined, PromptSource
from relax_hpc.rewards.registry import REWARDS, Term, terms_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TRAIN = "prompts.train"
_MAY_LACK = ("tools", "source", *(f"{modality}s" for modality in MODALITIES))
"""Columns that a row may lack."""
T = TypeVar("T")


class Files(NamedTuple):
    """The prompt files of a run, read."""

    train: Records
    heldout: dict[str, Records]
    """Records by the name of the set, as `eval` is."""

    @property
    def by_key(self) -> dict[str, Records]:
        """All of them, by the key that names the file."""
        return {TRAIN: self.train} | heldout_by_key(self.heldout)


class Sources(NamedTuple):
    """The prompts of a run."""

    train: PromptSource
    heldout: dict[str, PromptSource]
    train_key: str = TRAIN
    """Key that names the training file; where nothing is trained on, that of a set in its place."""

    @property
    def by_key(self) -> dict[str, PromptSource]:
        """Every file's, by the key that names the file."""
        return {self.train_key: self.train} | heldout_by_key(self.heldout)


def open_files(config: RunConfig) -> Files:
    """Opens all data; rows are read when they are asked for.

    Raises:
        ConfigError: some of it cannot be opened.
    """
    prompts = config.prompts
    key = "prompts.sources" if prompts.sources else TRAIN
    train = _records(config, key, prompts.mixture, "prompts", graded_by=prompts.curriculum)
    return Files(train, open_heldout(config))


def open_heldout(config: RunConfig) -> dict[str, Records]:
    """Does as `open_files`, of the held-out sets only."""
    return {
        name: _records(
            config,
            f"eval.{name}.path",
            {"": SourceConfig(path=each.path, columns=each.columns)},
            f"eval.{name}",
            title=name,
        )
        for name, each in config.eval.items()
    }


def read(config: RunConfig) -> Files:
    """Opens all data, and reads every row; of very many, some.

    Raises:
        ConfigError: one is no prompt, or has an answer that the reward can never match.
    """
    files = open_files(config)
    read_rows(files.by_key)
    return files


def heldout_by_key(heldout: Mapping[str, T]) -> dict[str, T]:
    """Returns the sets by the key that names the file of each."""
    return {f"eval.{name}.path": each for name, each in heldout.items()}


def read_rows(files: Mapping[str, Records]) -> None:
    """Reads every row, or some; raises as `read`.

    Args:
        files: by key.
    """
    for key, records in files.items():
        try:
            records.read()
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None


def _wrong(terms: Sequence[Term], answer: str, source: str) -> str:
    """Says why no response could be right, and what to do; "" if one could."""
    terms = [term for term in terms if term.is_for(source)]
    if not terms:
        return (
            f"source = {shown(source)}: no term of the reward scores it; name it in the `sources` "
            "of one of [reward.terms]"
        )
    # A program of somebody else's is not asked here.
    rewards = [(term, REWARDS[term.name]) for term in terms if term.name in REWARDS]
    if all(reward.can_match(answer) for _, reward in rewards):
        return ""
    remedies = [
        f"with {term.key}.name = {term.name!r} {reward.remedy}"
        for term, reward in rewards
        if reward.remedy
    ]
    return f"answer = {shown(answer)}: can never be matched; {' and '.join(remedies)}"


def _records(
    config: RunConfig,
    key: str,
    sources: Mapping[str, SourceConfig],
    section: str,
    graded_by: str = "",
    title: str = "",
) -> Records:
    try:
        return Records(
            sources,
            config.prompts,
            wrong=partial(_wrong, terms_of(config.reward)),
            graded_by=graded_by,
            section=section,
            title=title,
        )
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def sources_of(config: RunConfig, files: Files, tokenizer: "PreTrainedTokenizerBase") -> Sources:
    """The prompts as engines take them.

    Raises:
        ConfigError: there is no chat template and one is asked for, or it ignores an argument; or
            the job bounds media that its model or its engine cannot take.
    """
    settings = config.prompts
    recipe = read_recipe(config.model.path, settings.media)
    _check_media(config, recipe)
    media = recipe and MediaTokens(recipe, tokenizer, Decoders(settings.media.workers))
    if settings.chat_template and not tokenizer.chat_template:
        raise ConfigError(
            f"prompts.chat_template = True: the tokenizer in {config.model.path} has none; "
            "set it to false, or add a chat_template.jinja"
        )

    vocab_size = read_architecture(config.model.path).vocab_size

    def source(records: Records, shuffle_seed: int | None) -> PromptSource:
        return PromptSource(
            records, tokenizer, shuffle_seed=shuffle_seed, settings=settings, media=media,
            vocab_size=vocab_size,
        )  # fmt: skip

    train = source(files.train, config.seed)
    train.conversation.check_args("prompts.template_args", settings.template_args)
    return Sources(train, {name: source(records, None) for name, records in files.heldout.items()})


def _check_media(config: RunConfig, recipe: Recipe | None) -> None:
    path, settings = config.model.path, config.prompts.media
    if recipe is None and settings != MediaConfig():
        [key, *_] = sorted(settings.model_fields_set)
        raise ConfigError(
            f"prompts.media.{key}: the model in {path} reads text only; remove it, or use a model "
            "that takes media"
        )
    if recipe is not None and config.rollout_pool.kind == "embedded":
        raise ConfigError(
            'engines.rollout.kind = "embedded": it takes no images, videos or sounds, and the '
            f'model in {path} does; use "sglang"'
        )


def check_sample(config: RunConfig, sources: Sources) -> list[str]:
    """Tokenizes some prompts, the longest texts among them.

    Returns:
        Remarks for people: what is left out of the run, and what was not looked at.

    Raises:
        ConfigError: one is too long, or the chat template fails on it.
    """
    every = sources.by_key
    chosen = {
        key: sorted({*source.records.sample(SAMPLE), *source.records.bad})
        for key, source in every.items()
    }
    found = examine(sources, chosen)
    _check_system(config.prompts.system, sources.train)
    bad = dict(found[sources.train_key].bad)
    rows = [row for row in chosen[sources.train_key] if row not in bad]
    records = [sources.train.records[row] for row in rows]
    for key, source in every.items():
        bad = dict(found[key].bad)
        good = [row for row in chosen[key] if row not in bad]
        is_train = key == sources.train_key
        _check_columns(config.prompts.columns, source.records, good, is_train=is_train)
    check_lengths(config, {key: each.longest for key, each in found.items()})
    for key, each in found.items():
        if len(each.bad) == every[key].num_rows:
            raise ConfigError(f"{key}: no row can be used; the first: {each.bad[0][1]}")
    said = [
        f"{key}: {len(each.bad):,} of {len(chosen[key]):,} rows that were looked at cannot be used "
        f"and are left out; the first: {each.bad[0][1]}"
        for key, each in found.items()
        if each.bad
    ]
    if answered := sum(_is_answered(record) for record in records):
        said.append(
            f"{sources.train_key}: {answered:,} of {len(rows):,} prompts that were looked at end "
            "with what the assistant says, and the policy is asked behind it; remove it if it is "
            "the answer"
        )
    rest = left_out(
        list(chosen.values()), [source.records for source in every.values()], "prompts",
        "anything is sampled",
    )  # fmt: skip
    return [*said, rest] if rest else said


def _check_system(system: str, source: PromptSource) -> None:
    if not system:
        return
    first = source.first()
    text = source.conversation.text(first.where, first.messages, first.tools, first.template_args)
    is_asked = any(message["content"] == system for message in first.messages)
    if is_asked and system.strip() not in text:
        raise ConfigError(
            "prompts.system: the chat template leaves system messages out; write the text into "
            "prompts.user, or use another template"
        )


def _is_answered(record: Record) -> bool:
    return isinstance(record.prompt, list) and record.prompt[-1]["role"] == "assistant"


def _check_columns(job: Columns, records: Records, rows: Sequence[int], *, is_train: bool) -> None:
    """A field that a row may lack, and that the job names, is there in one of them.

    Args:
        job: names of the whole job, which held-out rows may lack.
        records: of the rows.
        rows: to look at.
        is_train: they are trained on.
    """
    looked = dict[tuple[str, str], list[int]]()
    for row in rows:
        columns, table = records.columns(row)
        for key in _MAY_LACK:
            is_own = (name := getattr(columns, key)) != getattr(job, key)
            if name != getattr(Columns(), key) and (is_own or is_train):
                place = f"{table if is_own else 'prompts.columns'}.{key}"
                looked.setdefault((place, key), []).append(row)
    for (place, key), found in looked.items():
        if not any(records.has(row, key) for row in found):
            columns, _ = records.columns(found[0])
            names = [columns.prompt, columns.answer, *records[found[0]].metadata]
            name = getattr(columns, key)
            raise ConfigError(
                f"{place} = {name!r}: none of the {len(found):,} rows that were looked at has it; "
                f"the first has {', '.join(names)}{nearest(name, names)}"
            )


def examine(
    sources: Sources, rows: Mapping[str, Sequence[int]], *, is_decoded: bool = False
) -> dict[str, Examined]:
    """Tokenizes rows of every file.

    Args:
        sources: the prompts.
        rows: by the key that names the file.
        is_decoded: see `PromptSource.examine`.

    Returns:
        What was found, by key.

    Raises:
        ConfigError: a row cannot be used, and may not be skipped.
    """
    found = {}
    for key, source in sources.by_key.items():
        try:
            found[key] = source.examine(rows[key], is_decoded=is_decoded)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None
    return found


def overlap_of(config: RunConfig, files: Files, most: int | None = None) -> Overlap:
    """Looks for prompts that are in the data twice, and held-out ones that are trained on.

    Args:
        config: the run.
        files: of it.
        most: training prompts to look at; None is all.
    """
    used = {
        name: (records, min(config.eval[name].num_prompts, len(records)))
        for name, records in files.heldout.items()
    }
    return overlap.find(files.train, used, most)


def check_lengths(config: RunConfig, longest: Mapping[str, int]) -> None:
    """A response as long as it may become still fits: trained on, and in the model's positions.

    Args:
        config: the run.
        longest: tokens of the longest prompt by the key that names the file.
    """
    new, key = config.rollout.max_new_tokens, "rollout.max_new_tokens"
    trained = longest.get(TRAIN)
    for section, budget in _budgets(config).items():
        if trained is not None and trained + new > budget:
            raise ConfigError(
                f"{section}.tokens_per_micro_batch = {budget}: the longest prompt has "
                f"{trained} tokens and rollout.max_new_tokens = {new}; "
                f"use {trained + new} or more"
            )
    own = {f"eval.{name}": each.max_new_tokens for name, each in config.eval.items()}
    lengths = []
    for name, tokens in longest.items():
        section = name.removesuffix(".path")
        limit = own.get(section)
        place = (limit, f"{section}.max_new_tokens") if limit else (new, key)
        lengths.append((tokens, *place))
    tokens, new, key = max(lengths, key=lambda each: each[0] + each[1])
    shape = read_architecture(config.model.path)
    if tokens + new > shape.max_positions:
        left = shape.max_positions - tokens
        remedy = f"use {left} or less" if left > 0 else "lower prompts.max_prompt_tokens"
        raise ConfigError(
            f"{key} = {new}: the longest prompt has {tokens} tokens and the model "
            f"{shape.said_positions}; {remedy}"
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
    readers = [config.actor, config.reference_megatron]
    if config.critic:
        readers.append(config.critic.megatron(config.actor))
    readers += [each.megatron(config.actor, name) for name, each in config.teachers.items()]
    return {each.section: each.tokens_per_micro_batch for each in readers}
