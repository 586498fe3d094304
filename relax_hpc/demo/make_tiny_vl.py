"""A model that sees or hears, and a task that only the medium tells: on any machine, offline."""

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerFast

from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.demo import hearing, seeing, shapes, tones
from relax_hpc.demo.warm_start import Example, Image, Sound, warm_start
from relax_hpc.errors import ConfigError
from relax_hpc.media.canonical import canonical
from relax_hpc.media.recipe import read_recipe
from relax_hpc.prompts.media_tokens import MediaTokens
from relax_hpc.prompts.records import Records
from relax_hpc.prompts.source import PromptSource
from relax_hpc.records import read_json, write_json

Kind = seeing.Kind | Literal["omni"]
NUM_TRAIN, NUM_HELDOUT = 2048, 256
NUM_SCORED = 64
"""Held-out prompts that decide when the warm start is over."""
_STEPS, _BATCH_SIZE = 400, 16
"""Length of the warm start: enough for the form, which is all that there is to learn."""
_FORMAT = 2
"""Format of the folder; raised when other files are to be in it."""


def make(
    folder: Path, *, kind: Kind, seed: int = 0, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Writes model/, untrained/, train.jsonl, heldout.jsonl and images/; of "omni" sounds/, too.

    At once if they are there. The warm start shows media that are not of the answers: it teaches
    the form of an answer, so that a guess is rewarded now and then, and leaves colours and pitches
    to RL. Towers stay as they were drawn.

    made.json comes last: it marks the folder complete, and says with which settings.

    Returns:
        What made.json holds: settings, steps and seconds taken, accuracies reached.

    Raises:
        ConfigError: the library that draws images, or writes sounds, is missing.
    """
    hears = kind == "omni"
    for package, name in (("PIL", "pillow"), *([("soundfile", "soundfile")] if hears else [])):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"media need the package {name}; pip install 'relax-hpc[media]'")
    settings = {"kind": kind, "seed": seed, "format": _FORMAT}
    marker = folder / "made.json"
    made: dict[str, Any] | None = read_json(marker)
    if made is not None and made["settings"] == settings:
        return made
    marker.unlink(missing_ok=True)
    (tones if hears else shapes).write(folder, NUM_TRAIN, NUM_HELDOUT, seed)
    tokens, model, save = _drawn(kind, seed)
    save(folder / "untrained", model, tokens)

    learning = _examples(folder, "train.jsonl", tokens)
    answers = [example.response_ids for example in learning]
    random.Random(seed).shuffle(answers)
    thinker = model.thinker if hears else model
    for tower in hearing.towers(model).values() if hears else [model.model.visual]:
        tower.requires_grad_(False)
    outcome = warm_start(
        thinker,
        [
            each._replace(response_ids=answer)
            for each, answer in zip(learning, answers, strict=True)
        ],
        _examples(folder, "heldout.jsonl", tokens, NUM_SCORED),
        # As many are right as are guessed: it ends after its steps.
        target=1.0, seed=seed, progress=progress, batch_size=_BATCH_SIZE, max_steps=_STEPS,
    )  # fmt: skip
    save(folder / "model", model, tokens)
    made = {"settings": settings, **outcome._asdict()}
    write_json(marker, made)
    return made


def _drawn(kind: Kind, seed: int) -> tuple[PreTrainedTokenizerFast, Any, Callable[..., None]]:
    """The tokenizer, the model, and what saves both."""
    if kind == "omni":
        tokens = hearing.tokenizer()
        return tokens, hearing.model(tokens, seed=seed), hearing.save
    tokens = seeing.tokenizer()
    return tokens, seeing.model(kind, tokens, seed=seed), seeing.save


def _examples(
    folder: Path, file: str, tokens: PreTrainedTokenizerFast, most: int | None = None
) -> list[Example]:
    """The rows of a file as a rollout task would show them, and their answers."""
    settings = PromptsConfig(train=[folder / file])
    recipe = read_recipe(folder / "untrained", settings.media)
    assert recipe is not None, "the tiny model sees"
    source = PromptSource(
        Records(settings.mixture, settings), tokens, shuffle_seed=None, settings=settings,
        media=MediaTokens(recipe, tokens),
    )  # fmt: skip
    made = []
    for prompt in map(source.prompt, range(len(source))[:most]):
        array = torch.from_numpy(canonical(prompt.measured[0], recipe).array.copy())
        answer = [*tokens.encode(f"\\boxed{{{prompt.answer}}}"), tokens.eos_token_id]
        shown: Image | Sound = Image(
            array, recipe.image, tokens.convert_tokens_to_ids(seeing.IMAGE)
        )
        if prompt.measured[0].extent.modality == "audio":
            shown = Sound(array, tokens.convert_tokens_to_ids(hearing.AUDIO))
        made.append(Example(prompt.token_ids, answer, shown))
    return made
