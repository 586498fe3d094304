"""Checks of teachers before anything is queued."""

from pathlib import Path
from typing import Any

from relax_hpc import records
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.models.architecture import Architecture
from relax_hpc.roles.teacher.prompts import privileged_prompts
from relax_hpc.roles.training.check import (
    check_model,
    check_sees_alike,
    check_weights,
    check_window,
    of_key,
)

SAMPLE = 64
"""Rows of which the teacher's prompts are made, the longest among them."""


def check_teachers(config: RunConfig, shape: Architecture) -> None:
    """Teachers read the same tokens, their layouts divide them, their prompts can be made."""
    for name in config.teachers:
        _check_model(config, name, shape)
        _check_prompts(config, name)


def _check_model(config: RunConfig, name: str, shape: Architecture) -> None:
    teacher = config.teachers[name]
    path = teacher.model(config.model).path
    try:
        found = check_model(path, teacher.megatron(config.actor, name))
        check_weights(path, found)
    except ConfigError as error:
        raise of_key(f"teachers.{name}.path", error) from None
    check_sees_alike(config, path, f"teachers.{name}.path")
    if shape.vision and teacher.prompt:
        raise ConfigError(
            f"teachers.{name}.prompt: has no media, and model.path = {str(config.model.path)!r} is "
            "shown some; remove it"
        )
    key = f"teachers.{name}.path = {str(path)!r}"
    check_window(config, key, found, shape)
    remedy = "use a teacher of the same tokenizer"
    if found.vocab_size != shape.vocab_size:
        raise ConfigError(
            f"{key}: vocab_size is {found.vocab_size} in its config.json, {shape.vocab_size} in "
            f"model.path's; {remedy}"
        )
    mine, others = _tokens(config.model.path), _tokens(path)
    if mine and others and (odd := sorted({*mine.items()} ^ {*others.items()}, key=_number)):
        token, number = odd[0]
        raise ConfigError(
            f"{key}: its tokenizer.json has another token {number} than model.path's "
            f"({len(odd)} differ; the first is {token!r}); {remedy}"
        )


def _number(pair: tuple[str, int]) -> tuple[int, str]:
    return pair[1], pair[0]


def _tokens(folder: Path) -> dict[str, int]:
    """Token -> number, of a tokenizer.json, added ones included; empty where there is none."""
    found: dict[str, Any] = records.read_json(folder / "tokenizer.json") or {}
    known = found.get("model", {}).get("vocab", {})
    added = {each["content"]: each["id"] for each in found.get("added_tokens", [])}
    return {**(known if isinstance(known, dict) else {}), **added}


def _check_prompts(config: RunConfig, name: str) -> None:
    prompts = privileged_prompts(config, name)
    if prompts is None:
        return
    budget = config.teachers[name].megatron(config.actor, name).tokens_per_micro_batch
    room = budget - config.rollout.max_new_tokens
    for index in prompts.sample(SAMPLE):
        if len(prompts[index]) > room:
            raise ConfigError(
                f"teachers.{name}.prompt: makes {len(prompts[index])} tokens of row {index}; with "
                f"rollout.max_new_tokens = {config.rollout.max_new_tokens} that is more than "
                f"actor.tokens_per_micro_batch = {budget}; raise it, or use a shorter text"
            )
