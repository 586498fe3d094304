"""A model that sees, and a task that only the image tells: on any machine, offline."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.demo import seeing, shapes
from relax_hpc.demo.warm_start import Example, warm_start
from relax_hpc.errors import ConfigError
from relax_hpc.media.recipe import read_recipe
from relax_hpc.prompts.records import Records
from relax_hpc.prompts.source import PromptSource
from relax_hpc.records import read_json, write_json

NUM_TRAIN, NUM_HELDOUT = 2048, 256
NUM_SCORED = 64
"""Held-out prompts that decide when the warm start is over."""
_STEPS, _BATCH_SIZE = 150, 16
"""Length of the warm start: enough for the form, which is all that there is to learn."""
_FORMAT = 1
"""Format of the folder; raised when other files are to be in it."""


def make(
    folder: Path, *, kind: seeing.Kind, seed: int = 0, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Writes model/, untrained/, train.jsonl, heldout.jsonl and images/.

    At once if they are there. The warm start shows no images: it teaches the form of an answer, so
    that a guess is rewarded now and then, and leaves the colours to RL.

    made.json comes last: it marks the folder complete, and says with which settings.

    Returns:
        What made.json holds: settings, steps and seconds taken, accuracies reached.

    Raises:
        ConfigError: the library that draws images is missing.
    """
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError("images need the package pillow; pip install 'relax-hpc[media]'")
    settings = {"kind": kind, "seed": seed, "format": _FORMAT}
    marker = folder / "made.json"
    made: dict[str, Any] | None = read_json(marker)
    if made is not None and made["settings"] == settings:
        return made
    marker.unlink(missing_ok=True)
    shapes.write(folder, NUM_TRAIN, NUM_HELDOUT, seed)
    tokens = seeing.tokenizer()
    model = seeing.model(kind, tokens, seed=seed)
    seeing.save(folder / "untrained", model, tokens)

    def examples(file: str, most: int | None = None) -> list[Example]:
        settings = PromptsConfig(train=[folder / file])
        source = PromptSource(
            Records(settings.mixture, settings), tokens, shuffle_seed=None, settings=settings,
            recipe=read_recipe(folder / "untrained", settings.media),
        )  # fmt: skip
        prompts = map(source.prompt, range(len(source))[:most])
        end = [tokens.eos_token_id]
        return [
            Example(p.token_ids, tokens.encode(f"\\boxed{{{p.answer}}}") + end) for p in prompts
        ]

    outcome = warm_start(
        model, examples("train.jsonl"), examples("heldout.jsonl", NUM_SCORED),
        # As many are right as are guessed: it ends after its steps.
        target=1.0, seed=seed, progress=progress, batch_size=_BATCH_SIZE, max_steps=_STEPS,
    )  # fmt: skip
    seeing.save(folder / "model", model, tokens)
    made = {"settings": settings, **outcome._asdict()}
    write_json(marker, made)
    return made
