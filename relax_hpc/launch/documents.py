"""What can be known to be wrong with the documents of supervised fine-tuning."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from relax_hpc.config.sft import SftRunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.prompts.rows import open_rows
from relax_hpc.records import read_json

T = TypeVar("T")


def check(config: SftRunConfig) -> SftRunConfig:
    """Reads and tokenizes every document.

    Returns:
        The run, with its number of steps.

    Raises:
        ConfigError: the first document that cannot be trained on, or does not fit.
    """
    paths = {"train": config.sft.train, "heldout": config.sft.heldout}
    for key, path in paths.items():
        _named(key, path, open_rows)  # most mistakes are here: find them before a slow import
    from relax_hpc.prompts.documents import Documents, count_steps
    from relax_hpc.prompts.tokenizer import load

    tokenizer = load(config.model.path)

    def lengths_of(path: Path) -> tuple[Documents, list[int]]:
        documents = Documents(path, tokenizer, config.sft)
        return documents, [len(documents.document(n).token_ids) for n in range(len(documents))]

    train = _named("train", config.sft.train, lengths_of)
    heldout = _named("heldout", config.sft.heldout, lengths_of)
    assert train is not None
    documents, lengths = train
    check_lengths(config, max([*lengths, *(heldout[1] if heldout else [])]))
    steps = count_steps(config.sft, documents, lengths)
    return config.model_copy(update={"sft": config.sft.model_copy(update={"num_steps": steps})})


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
    architecture: dict[str, Any] = read_json(config.model.path / "config.json") or {}
    positions = architecture.get("max_position_embeddings")
    if positions is not None and longest > positions:
        raise ConfigError(
            f"sft.max_tokens = {config.sft.max_tokens}: the longest document has {longest} tokens "
            f"and the model {positions} positions; use {positions} or less"
        )


def _named(key: str, path: Path | None, read: Callable[[Path], T]) -> T | None:
    """What `read` makes of the file, if there is one; mistakes are reported under its key."""
    if path is None:
        return None
    try:
        return read(path)
    except ConfigError as error:
        raise ConfigError(f"sft.{key}: {error}") from None
