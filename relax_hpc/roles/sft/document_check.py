"""Checks that the documents of supervised fine-tuning can be trained on.

Where the run is submitted every row is read, but only some are tokenized, unless the steps have to
be counted; when it starts, the ranks tokenize all of them before the first step.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from relax_hpc.config.sft import SftRunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.models.architecture import Architecture
from relax_hpc.models.registry import read_architecture
from relax_hpc.prompts.documents import Documents, count_steps, read_text
from relax_hpc.prompts.files import open_rows
from relax_hpc.prompts.rows import SAMPLE, Rows, left_out, sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


T = TypeVar("T")


class File(NamedTuple):
    """A file of documents."""

    key: str
    path: Path
    rows: Rows


def check(config: SftRunConfig, say: Callable[[str], None]) -> SftRunConfig:
    """The documents can be trained on; how many steps their epochs are is counted."""
    files = open_files(config)
    sizes = read(config, files)  # finds most mistakes, before a slow import
    from relax_hpc.prompts.tokenizer import load

    tokenizer = load(config.model.path)
    steps, left_out = check_sample(config, files, sizes, tokenizer)
    if left_out:
        say(left_out)
    return config.model_copy(update={"sft": config.sft.model_copy(update={"num_steps": steps})})


def check_model(config: SftRunConfig, shape: Architecture) -> None:
    """The model is one of text: documents have no media."""
    if shape.vision:
        raise ConfigError(
            f"model.path = {str(config.model.path)!r}: is of model_type {shape.model_type!r}, "
            "which sees, and documents have no media; use a model of text"
        )


def open_files(config: SftRunConfig) -> list[File]:
    """The files of a run, training documents first.

    Raises:
        ConfigError: one cannot be read, or is empty.
    """
    paths = {"train": config.sft.train, "heldout": config.sft.heldout}
    return [
        File(key, path, _named(key, partial(open_rows, path)))
        for key, path in paths.items()
        if path
    ]


def read(config: SftRunConfig, files: Sequence[File]) -> list[list[int]]:
    """Reads every row.

    Returns:
        Characters of each document, by file.

    Raises:
        ConfigError: one is no document; names file and line.
    """
    template = config.sft.chat_template

    def sizes(rows: Rows) -> list[int]:
        return [read_text(rows[n], chat_template=template).size for n in range(len(rows))]

    return [_named(each.key, partial(sizes, each.rows)) for each in files]


def check_sample(
    config: SftRunConfig,
    files: Sequence[File],
    sizes: Sequence[Sequence[int]],
    tokenizer: "PreTrainedTokenizerBase",
) -> tuple[int, str | None]:
    """Tokenizes some documents, the longest among them; all, if the steps have to be counted.

    Args:
        config: the run.
        files: of it.
        sizes: what `read` gave.
        tokenizer: of the model.

    Returns:
        Steps of the run; and what was left out, for people, None if that is nothing.

    Raises:
        ConfigError: one cannot be trained on, or does not fit.
    """
    counts = config.sft.tokens_per_step is not None and config.sft.epochs is not None
    chosen = [sample(each, len(each) if counts else SAMPLE) for each in sizes]
    lengths = _check(config, files, tokenizer, chosen)
    documents = Documents(files[0].path, tokenizer, config.sft, files[0].rows)
    steps = count_steps(config.sft, documents, lengths[0])
    return steps, left_out(chosen, sizes, "documents", "anything is trained on")


def check_share(
    config: SftRunConfig,
    files: Sequence[File],
    tokenizer: "PreTrainedTokenizerBase",
    rank: int,
    size: int,
) -> None:
    """Tokenizes the documents that this one of the ranks has to look at; raises likewise."""
    _check(config, files, tokenizer, [range(rank, len(each.rows), size) for each in files])


def check_lengths(config: SftRunConfig, longest: int) -> None:
    """The longest document fits a micro-batch, a step and the model's positions."""
    budget, step = config.actor.tokens_per_micro_batch, config.sft.tokens_per_step
    if longest > budget:
        raise ConfigError(
            f"actor.tokens_per_micro_batch = {budget}: the longest document has {longest} tokens; "
            f"use {longest} or more, or lower sft.max_tokens"
        )
    if step is not None and longest > step:
        raise ConfigError(
            f"sft.tokens_per_step = {step}: the longest document has {longest} tokens; "
            f"use {longest} or more, or lower sft.max_tokens"
        )
    shape = read_architecture(config.model.path)
    if longest > shape.max_positions:
        raise ConfigError(
            f"sft.max_tokens = {config.sft.max_tokens}: the longest document has {longest} tokens "
            f"and the model {shape.said_positions}; use {shape.max_positions} or less"
        )


def _check(
    config: SftRunConfig,
    files: Sequence[File],
    tokenizer: "PreTrainedTokenizerBase",
    chosen: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Tokens of the chosen documents of each file."""

    def tokens(documents: Documents, indices: Sequence[int]) -> list[int]:
        return [len(documents.document(index).token_ids) for index in indices]

    vocab_size = read_architecture(config.model.path).vocab_size
    lengths = []
    for each, indices in zip(files, chosen, strict=True):
        documents = Documents(each.path, tokenizer, config.sft, each.rows, vocab_size)
        lengths.append(_named(each.key, partial(tokens, documents, indices)))
        count = config.sft.heldout_documents if each.key == "heldout" else len(documents)
        _named(each.key, partial(_check_left, config, documents, count))
    check_lengths(config, max((length for each in lengths for length in each), default=0))
    return lengths


def _check_left(config: SftRunConfig, documents: Documents, count: int) -> None:
    lines = range(min(count, len(documents)))
    if not any(documents.document(line).num_trained for line in lines):
        raise ConfigError(
            f"sft.max_tokens = {config.sft.max_tokens} leaves no document a token of the "
            "assistant; raise it"
        )


def _named(key: str, read: Callable[[], T]) -> T:
    """Returns what `read` makes of a file; mistakes are reported under its key."""
    try:
        return read()
    except ConfigError as error:
        raise ConfigError(f"sft.{key}: {error}") from None
