"""Checks that the prompts of a run can be sampled and trained on.

Submission reads every row, but tokenizes only some. At the start the rollout tasks tokenize all of
them before anything is sampled.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from relax_hpc.config.prompts import Columns, MediaConfig, SourceConfig
from relax_hpc.config.run import RunConfig
from relax_hpc.data import overlap
from relax_hpc.data import tokenizer as tokenizers
from relax_hpc.data.media.kinds import MODALITIES
from relax_hpc.data.media.recipe import Recipe, read_recipe
from relax_hpc.data.media.workers import Decoders
from relax_hpc.data.media_tokens import MediaTokens
from relax_hpc.data.overlap import Overlap
from relax_hpc.data.records import PromptRecord, Records
from relax_hpc.data.rows import SAMPLE, describe_left_out, naming
from relax_hpc.data.source import Examined, PromptSource
from relax_hpc.environments.rewards.registry import REWARDS, Term, terms_of
from relax_hpc.errors import ConfigError, nearest, show
from relax_hpc.roles.facts import Facts
from relax_hpc.trainer.models.architecture import Architecture
from relax_hpc.trainer.models.registry import read_architecture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TRAIN = "prompts.train"
_MAY_LACK = ("tools", "source", *(f"{modality}s" for modality in MODALITIES))
T = TypeVar("T")


class Sets(NamedTuple, Generic[T]):
    """The data of a run."""

    train: T
    heldout: dict[str, T]
    """By name of the set in `eval`."""
    train_key: str = TRAIN
    """Key of the training file; without training, of the set that replaces it."""

    @property
    def by_key(self) -> dict[str, T]:
        """Returns all sets, by the key that names the file."""
        heldout = {f"eval.{name}.path": each for name, each in self.heldout.items()}
        return {self.train_key: self.train} | heldout


Files = Sets[Records]
Sources = Sets[PromptSource]


def open_files(config: RunConfig, *, is_trained: bool = True) -> Files:
    """Opens all data; rows are read on demand.

    Args:
        is_trained: whether there is training; else the first held-out set replaces its data.

    Raises:
        ConfigError: a file cannot be opened.
    """
    prompts = config.prompts
    heldout = {
        name: _records(
            config,
            f"eval.{name}.path",
            {"": SourceConfig(path=each.path, columns=each.columns)},
            f"eval.{name}",
            title=name,
        )
        for name, each in config.eval.items()
    }
    if not is_trained:
        name, first = next(iter(heldout.items()))
        return Files(first, heldout, f"eval.{name}.path")
    key = "prompts.sources" if prompts.sources else TRAIN
    train = _records(config, key, prompts.mixture, "prompts", graded_by=prompts.curriculum)
    return Files(train, heldout)


def read(config: RunConfig, *, is_trained: bool = True) -> Files:
    """Opens all data, and reads every row; of very many, some.

    Args:
        is_trained: as in `open_files`.

    Raises:
        ConfigError: a row is no prompt, or has an answer that the reward can never match.
    """
    files = open_files(config, is_trained=is_trained)
    for key, records in files.by_key.items():
        with naming(key):
            records.read()
    return files


def _wrong(terms: Sequence[Term], answer: str, source: str) -> str:
    """Returns why no response could be right, with a remedy; "" if one could."""
    terms = [term for term in terms if term.is_for(source)]
    if not terms:
        return (
            f"source = {show(source)}: no term of the reward scores it; name it in the `sources` "
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
    return f"answer = {show(answer)}: can never be matched; {' and '.join(remedies)}"


def _records(
    config: RunConfig,
    key: str,
    sources: Mapping[str, SourceConfig],
    section: str,
    graded_by: str = "",
    title: str = "",
) -> Records:
    with naming(key):
        return Records(
            sources,
            config.prompts,
            wrong=partial(_wrong, terms_of(config.reward)),
            graded_by=graded_by,
            section=section,
            title=title,
        )


def open_sources(config: RunConfig) -> Sources:
    """Opens all data, as engines take them; raises as `open_files` and `sources_of`."""
    return sources_of(config, open_files(config), tokenizers.load(config.model.path))


def sources_of(
    config: RunConfig,
    files: Files,
    tokenizer: "PreTrainedTokenizerBase",
    facts: Facts | None = None,
) -> Sources:
    """Returns the prompts as engines take them.

    Raises:
        ConfigError: a chat template is missing, or ignores an argument; or the job sets media
            limits that its model or engine does not support.
    """
    settings = config.prompts
    path = config.model.path
    recipe = read_recipe(path, settings.media, facts.config(path).record if facts else None)
    _check_media(config, recipe)
    media = recipe and MediaTokens(recipe, tokenizer, Decoders(settings.media.advanced.workers))
    if settings.chat_template and not tokenizer.chat_template:
        raise ConfigError(
            f"prompts.chat_template = True: the tokenizer in {config.model.path} has none; "
            "set it to false, or add a chat_template.jinja"
        )

    vocab_size = (facts.shape if facts else read_architecture(path)).vocab_size

    def source(records: Records, shuffle_seed: int | None) -> PromptSource:
        return PromptSource(
            records, tokenizer, shuffle_seed=shuffle_seed, settings=settings, media=media,
            vocab_size=vocab_size,
        )  # fmt: skip

    train = source(files.train, config.seed)
    train.conversation.check_args("prompts.template_args", settings.template_args)
    heldout = {name: source(records, None) for name, records in files.heldout.items()}
    return Sources(train, heldout, files.train_key)


def _check_media(config: RunConfig, recipe: Recipe | None) -> None:
    path, settings = config.model.path, config.prompts.media
    if recipe is None and settings != MediaConfig():
        own = settings.model_dump(exclude_unset=True)
        further = own.pop("advanced", {})
        [key, *_] = [*sorted(own), *(f"advanced.{key}" for key in further)]
        raise ConfigError(
            f"prompts.media.{key}: the model in {path} reads text only; remove it, or use a model "
            "that takes media"
        )
    if recipe is not None and config.rollout_pool.kind == "embedded":
        raise ConfigError(
            'engines.rollout.kind = "embedded": it takes no images, videos or sounds, and the '
            f'model in {path} does; use "sglang"'
        )


def check_sample(
    config: RunConfig, sources: Sources, shape: Architecture | None = None
) -> list[str]:
    """Tokenizes some prompts, the longest texts among them.

    Returns:
        Remarks for people: rows left out of the run, and rows not checked.

    Raises:
        ConfigError: a prompt is too long, or the chat template fails on it.
    """
    every = sources.by_key
    chosen = {
        key: sorted({*source.records.sample(SAMPLE), *source.records.bad})
        for key, source in every.items()
    }
    found = examine(sources, chosen)
    _check_system(config.prompts.system, sources.train)
    good = dict[str, list[int]]()
    for key, source in every.items():
        bad = dict(found[key].bad)
        good[key] = [row for row in chosen[key] if row not in bad]
        is_train = key == sources.train_key
        _check_columns(config.prompts.columns, source.records, good[key], is_train=is_train)
    check_lengths(config, {key: each.longest for key, each in found.items()}, shape)
    for key, each in found.items():
        if len(each.bad) == every[key].num_rows:
            raise ConfigError(f"{key}: no row can be used; the first: {each.bad[0][1]}")
    said = [
        f"{key}: {len(each.bad):,} of {len(chosen[key]):,} rows that were looked at cannot be used "
        f"and are left out; the first: {each.bad[0][1]}"
        for key, each in found.items()
        if each.bad
    ]
    train, rows = sources.train.records, good[sources.train_key]
    if answered := sum(_is_answered(train[row]) for row in rows):
        said.append(
            f"{sources.train_key}: {answered:,} of {len(rows):,} prompts that were looked at end "
            "with what the assistant says, and the policy is asked behind it; remove it if it is "
            "the answer"
        )
    rest = describe_left_out(
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


def _is_answered(record: PromptRecord) -> bool:
    return isinstance(record.prompt, list) and record.prompt[-1]["role"] == "assistant"


def _check_columns(job: Columns, records: Records, rows: Sequence[int], *, is_train: bool) -> None:
    """Checks that an optional field named by the job occurs in at least one row.

    Args:
        job: names for the whole job, which held-out rows may lack.
        is_train: whether they are trained on.
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
            close = nearest(name, names)
            raise ConfigError(
                f"{place} = {name!r}: none of the {len(found):,} rows that were looked at has it; "
                f"the first has {', '.join(names)}{close and f'; {close}'}"
            )


def examine(
    sources: Sources, rows: Mapping[str, Sequence[int]], *, is_decoded: bool = False
) -> dict[str, Examined]:
    """Tokenizes rows of every file.

    Args:
        is_decoded: see `PromptSource.examine`.

    Returns:
        The results, by key.

    Raises:
        ConfigError: a row is unusable, and may not be skipped.
    """
    found = {}
    for key, source in sources.by_key.items():
        with naming(key):
            found[key] = source.examine(rows[key], is_decoded=is_decoded)
    return found


def overlap_of(config: RunConfig, files: Files, most: int | None = None) -> Overlap:
    """Finds duplicate prompts, and held-out ones that are trained on.

    Args:
        most: training prompts to compare; None is all.
    """
    used = {
        name: (records, min(config.eval[name].num_prompts, len(records)))
        for name, records in files.heldout.items()
    }
    return overlap.find(files.train, used, most)


def check_lengths(
    config: RunConfig, longest: Mapping[str, int], shape: Architecture | None = None
) -> None:
    """Checks that a response of maximal length fits the trainer and the model's positions.

    Args:
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
    shape = shape or read_architecture(config.model.path)
    if tokens + new > shape.max_positions:
        left = shape.max_positions - tokens
        remedy = f"use {left} or less" if left > 0 else "lower prompts.max_prompt_tokens"
        raise ConfigError(
            f"{key} = {new}: the longest prompt has {tokens} tokens and the model "
            f"{shape.said_positions}; {remedy}"
        )


class LengthLimits(NamedTuple):
    trained: int
    sampled: int


def limits_of(config: RunConfig) -> LengthLimits:
    positions = read_architecture(config.model.path).max_positions
    return LengthLimits(min(positions, *_budgets(config).values()), positions)


def _budgets(config: RunConfig) -> dict[str, int]:
    """Returns the row limit of each component that reads rows, by section of the job."""
    readers = [config.actor, config.reference_megatron]
    if config.critic:
        readers.append(config.critic.megatron(config.actor))
    readers += [each.megatron(config.actor, name) for name, each in config.teachers.items()]
    return {each.section: each.tokens_per_micro_batch for each in readers}
