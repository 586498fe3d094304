"""A model and a task to try everything with: on any machine, offline, in about a minute."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.demo import arithmetic, checkpoint, programs
from relax_hpc.demo.warm_start import Example, warm_start
from relax_hpc.prompts.records import Records
from relax_hpc.prompts.source import PromptSource
from relax_hpc.records import read_json, write_json

NUM_TRAIN, NUM_HELDOUT = 6000, 512
NUM_SCORED = 128
"""Held-out prompts that decide when the warm start is over."""
Kind = Literal["text", "code"]
_FORMAT = 2
"""Format of the folder; raised when other files are to be in it."""


def make(
    folder: Path,
    *,
    kind: Kind = "text",
    digits: int = 2,
    seed: int = 0,
    target: float = 0.45,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Writes model/, untrained/ (the model before its warm start), train.jsonl and heldout.jsonl.

    At once if they are there.

    made.json comes last: it marks the folder complete, and says with which settings.

    Args:
        kind: sums, or programs that pass unit tests.
        digits: of each summand.
        target: greedy held-out accuracy to stop the warm start at.

    Returns:
        What made.json holds: settings, steps and seconds taken, accuracies reached.
    """
    task = {"digits": digits} if kind == "text" else {"kind": kind}
    settings = {**task, "seed": seed, "target": target, "format": _FORMAT}
    marker = folder / "made.json"
    made: dict[str, Any] | None = read_json(marker)
    if made is not None and made["settings"] == settings:
        return made
    marker.unlink(missing_ok=True)
    if kind == "text":
        arithmetic.write(folder, digits, NUM_TRAIN, NUM_HELDOUT, seed)
        tokens = checkpoint.tokenizer()
    else:
        programs.write(folder, NUM_TRAIN, NUM_HELDOUT, seed)
        tokens = checkpoint.tokenizer(words=[*checkpoint.WORDS, *programs.WORDS])
    model = checkpoint.model(tokens, seed=seed)
    checkpoint.save(folder / "untrained", model, tokens)

    def examples(file: str) -> list[Example]:
        settings = PromptsConfig(train=[folder / file])
        records = Records(settings.mixture, settings)
        source = PromptSource(records, tokens, shuffle_seed=None, settings=settings)
        prompts = map(source.prompt, range(len(source)))
        end = [tokens.eos_token_id]
        return [
            Example(
                p.token_ids, tokens.encode(p.metadata["completion"], add_special_tokens=False) + end
            )
            for p in prompts
        ]

    outcome = warm_start(
        model,
        examples("train.jsonl"),
        examples("heldout.jsonl")[:NUM_SCORED],
        target=target,
        seed=seed,
        progress=progress,
    )
    checkpoint.save(folder / "model", model, tokens)
    made = {"settings": settings, **outcome._asdict()}
    write_json(marker, made)
    return made
