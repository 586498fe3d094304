"""A model that sees, and a task that only the image tells: on any machine, offline."""

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.demo import seeing, shapes
from relax_hpc.demo.warm_start import Example, Image, warm_start
from relax_hpc.errors import ConfigError
from relax_hpc.media.canonical import canonical
from relax_hpc.media.recipe import read_recipe
from relax_hpc.prompts.records import Records
from relax_hpc.prompts.source import PromptSource
from relax_hpc.records import read_json, write_json

NUM_TRAIN, NUM_HELDOUT = 2048, 256
NUM_SCORED = 64
"""Held-out prompts that decide when the warm start is over."""
_STEPS, _BATCH_SIZE = 400, 16
"""Length of the warm start: enough for the form, which is all that there is to learn."""
_FORMAT = 2
"""Format of the folder; raised when other files are to be in it."""


def make(
    folder: Path, *, kind: seeing.Kind, seed: int = 0, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Writes model/, untrained/, train.jsonl, heldout.jsonl and images/.

    At once if they are there. The warm start shows images whose colours are not the answers: it
    teaches the form of an answer, so that a guess is rewarded now and then, and leaves the colours
    to RL. The tower stays as it was drawn.

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

    learning = _examples(folder, "train.jsonl", tokens)
    answers = [example.response_ids for example in learning]
    random.Random(seed).shuffle(answers)
    model.model.visual.requires_grad_(False)
    outcome = warm_start(
        model,
        [
            each._replace(response_ids=answer)
            for each, answer in zip(learning, answers, strict=True)
        ],
        _examples(folder, "heldout.jsonl", tokens, NUM_SCORED),
        # As many are right as are guessed: it ends after its steps.
        target=1.0, seed=seed, progress=progress, batch_size=_BATCH_SIZE, max_steps=_STEPS,
    )  # fmt: skip
    seeing.save(folder / "model", model, tokens)
    made = {"settings": settings, **outcome._asdict()}
    write_json(marker, made)
    return made


def _examples(
    folder: Path, file: str, tokens: PreTrainedTokenizerFast, most: int | None = None
) -> list[Example]:
    """The rows of a file as a rollout task would show them, and their answers."""
    settings = PromptsConfig(train=[folder / file])
    recipe = read_recipe(folder / "untrained", settings.media)
    assert recipe is not None, "the tiny model sees"
    source = PromptSource(
        Records(settings.mixture, settings), tokens, shuffle_seed=None, settings=settings,
        recipe=recipe,
    )  # fmt: skip
    token = tokens.convert_tokens_to_ids(seeing.IMAGE)
    made = []
    for prompt in map(source.prompt, range(len(source))[:most]):
        pixels = torch.from_numpy(canonical(prompt.measured[0], recipe).array.copy())
        answer = [*tokens.encode(f"\\boxed{{{prompt.answer}}}"), tokens.eos_token_id]
        made.append(Example(prompt.token_ids, answer, Image(pixels, recipe.image, token)))
    return made
