"""Checks that the documents of supervised fine-tuning can be trained on.

Submission reads every row, but tokenizes only some, unless it has to count the steps. At the start
the ranks tokenize all of them before the first step.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from relax_hpc.config.run import SftRunConfig
from relax_hpc.data import tokenizer as tokenizers
from relax_hpc.data.documents import Documents, count_steps, read_text
from relax_hpc.data.rows import (
    SAMPLE,
    DataRows,
    TaskShare,
    describe_left_out,
    naming,
    open_rows,
    sample,
)
from relax_hpc.errors import ConfigError
from relax_hpc.trainer.models.architecture import Architecture
from relax_hpc.trainer.models.registry import read_architecture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DocumentFile(NamedTuple):
    key: str
    path: Path
    rows: DataRows


def check(config: SftRunConfig, shape: Architecture, say: Callable[[str], None]) -> SftRunConfig:
    """Checks that the documents can be trained on; counts the steps of their epochs."""
    files = open_files(config)
    sizes = read(config, files)  # finds most mistakes, before a slow import
    tokenizer = tokenizers.load(config.model.path, shape.model_type)
    steps, left_out = check_sample(config, files, sizes, tokenizer, shape)
    if left_out:
        say(left_out)
    return config.model_copy(update={"sft": config.sft.model_copy(update={"num_steps": steps})})


def check_model(config: SftRunConfig, shape: Architecture) -> None:
    """Checks that the model is a text model: documents have no media."""
    if shape.vision:
        raise ConfigError(
            f"model.path = {str(config.model.path)!r}: is of model_type {shape.model_type!r}, "
            "which sees, and documents have no media; use a model of text"
        )


def open_files(config: SftRunConfig) -> list[DocumentFile]:
    """Opens the files of a run, training documents first.

    Raises:
        ConfigError: one cannot be read, or is empty.
    """
    files = []
    for key, path in {"sft.train": config.sft.train, "sft.heldout": config.sft.heldout}.items():
        if path:
            with naming(key):
                files.append(DocumentFile(key, path, open_rows(path)))
    return files


def read(config: SftRunConfig, files: Sequence[DocumentFile]) -> list[list[int]]:
    """Reads every row.

    Returns:
        Characters of each document, by file.

    Raises:
        ConfigError: a row is no document; names file and line.
    """
    sizes, template = [], config.sft.chat_template
    for key, _, rows in files:
        with naming(key):
            texts = (read_text(rows[n], chat_template=template) for n in range(len(rows)))
            sizes.append([text.size for text in texts])
    return sizes


def check_sample(
    config: SftRunConfig,
    files: Sequence[DocumentFile],
    sizes: Sequence[Sequence[int]],
    tokenizer: "PreTrainedTokenizerBase",
    shape: Architecture | None = None,
) -> tuple[int, str | None]:
    """Tokenizes some documents, the longest among them; all, if the steps have to be counted.

    Args:
        sizes: of `read`.

    Returns:
        Steps of the run; and a remark on documents left out, None if there are none.

    Raises:
        ConfigError: a document cannot be trained on, or does not fit.
    """
    counts = config.sft.tokens_per_step is not None and config.sft.epochs is not None
    chosen = [sample(each, len(each) if counts else SAMPLE) for each in sizes]
    lengths = _check(config, files, tokenizer, chosen, shape)
    documents = Documents(files[0].path, tokenizer, config.sft, files[0].rows)
    steps = count_steps(config.sft, documents, lengths[0])
    return steps, describe_left_out(chosen, sizes, "documents", "anything is trained on")


def check_share(
    config: SftRunConfig,
    files: Sequence[DocumentFile],
    tokenizer: "PreTrainedTokenizerBase",
    rank: int,
    size: int,
) -> None:
    """Tokenizes this rank's share of the documents; raises as `check_sample`."""
    share = TaskShare(rank, size)
    _check(config, files, tokenizer, [share.rows(len(each.rows)) for each in files])


def check_lengths(config: SftRunConfig, shape: Architecture, longest: int) -> None:
    """Checks that the longest document fits a micro-batch, a step and the model's positions."""
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
    if longest > shape.max_positions:
        raise ConfigError(
            f"sft.max_tokens = {config.sft.max_tokens}: the longest document has {longest} tokens "
            f"and the model {shape.said_positions}; use {shape.max_positions} or less"
        )


def _check(
    config: SftRunConfig,
    files: Sequence[DocumentFile],
    tokenizer: "PreTrainedTokenizerBase",
    chosen: Sequence[Sequence[int]],
    shape: Architecture | None = None,
) -> list[list[int]]:
    shape = shape or read_architecture(config.model.path)
    lengths = []
    for (key, path, rows), indices in zip(files, chosen, strict=True):
        documents = Documents(path, tokenizer, config.sft, rows, shape.vocab_size)
        with naming(key):
            lengths.append([len(documents.document(index).token_ids) for index in indices])
            count = config.sft.heldout_documents if key == "sft.heldout" else len(documents)
            _check_left(config, documents, count)
    check_lengths(config, shape, max((length for each in lengths for length in each), default=0))
    return lengths


def _check_left(config: SftRunConfig, documents: Documents, count: int) -> None:
    lines = range(min(count, len(documents)))
    if not any(documents.document(line).num_trained for line in lines):
        raise ConfigError(
            f"sft.max_tokens = {config.sft.max_tokens} leaves no document a token of the "
            "assistant; raise it"
        )
