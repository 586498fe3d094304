"""Makes a tiny model and a task: on any machine, offline, in about a minute.

Vision and audio models get a task that only the medium solves.
"""

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerFast

from relax_hpc.cli.demo import models, tasks
from relax_hpc.cli.demo.warm_start import Example, Image, Sound, WarmStartResult, warm_start
from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.data.media.canonical import canonical
from relax_hpc.data.media.recipe import read_recipe
from relax_hpc.data.media_tokens import MediaTokens
from relax_hpc.data.records import Records
from relax_hpc.data.source import PromptSource
from relax_hpc.errors import ConfigError
from relax_hpc.runtime.files.records import read_json, write_json

NUM_TRAIN, NUM_HELDOUT = 6000, 512
NUM_SCORED = 128
"""Held-out prompts that decide when the warm start ends."""
Kind = Literal["text", "code"]
_FORMAT = 2
"""Format of the folder; increase it when its files change."""


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

    Args:
        kind: sums, or programs that pass unit tests.
        digits: of each summand.
        target: greedy held-out accuracy at which the warm start stops.

    Returns:
        The content of made.json: settings, steps and seconds taken, accuracies reached.
    """

    def build() -> WarmStartResult:
        if kind == "text":
            tasks.write_additions(folder, digits, NUM_TRAIN, NUM_HELDOUT, seed)
            tokens = models.tokenizer()
        else:
            tasks.write_programs(folder, NUM_TRAIN, NUM_HELDOUT, seed)
            tokens = models.tokenizer(words=[*models.WORDS, *tasks.WORDS])
        model = models.model(tokens, seed=seed)
        models.save(folder / "untrained", model, tokens)
        outcome = warm_start(
            model,
            _examples(folder, "train.jsonl", tokens, sees=False),
            _examples(folder, "heldout.jsonl", tokens, NUM_SCORED, sees=False),
            target=target,
            seed=seed,
            progress=progress,
        )
        models.save(folder / "model", model, tokens)
        return outcome

    task = {"digits": digits} if kind == "text" else {"kind": kind}
    return _make_once(folder, {**task, "seed": seed, "target": target}, build)


NUM_SEEN, NUM_HELDOUT_SEEN = 2048, 256
NUM_SCORED_SEEN = 64
"""Held-out prompts that decide when the warm start ends."""
_STEPS, _BATCH_SIZE = 400, 16
"""Length of the warm start: enough to learn the form of answers."""


def make_seeing(
    folder: Path, *, kind: models.MediaKind, seed: int = 0, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Writes model/, untrained/, train.jsonl, heldout.jsonl and images/; for "omni" sounds/, too.

    The warm start shows media unrelated to the answers: it teaches only the form of an answer, so
    that guesses are sometimes rewarded, and leaves colours and pitches to RL. Encoders keep their
    random weights.

    Returns:
        The content of made.json: settings, steps and seconds taken, accuracies reached.

    Raises:
        ConfigError: the library that draws images, or writes sounds, is missing.
    """
    hears = kind == "omni"
    for package, name in (("PIL", "pillow"), *([("soundfile", "soundfile")] if hears else [])):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"media need the package {name}; pip install 'relax-hpc[media]'")

    def build() -> WarmStartResult:
        write = tasks.write_tones if hears else tasks.write_shapes
        write(folder, NUM_SEEN, NUM_HELDOUT_SEEN, seed)
        tokens, model, save = models.make_media_model(kind, seed)
        save(folder / "untrained", model, tokens)
        learning = _examples(folder, "train.jsonl", tokens)
        answers = [example.response_ids for example in learning]
        random.Random(seed).shuffle(answers)
        thinker = model.thinker if hears else model
        for tower in models.towers(model).values() if hears else [model.model.visual]:
            tower.requires_grad_(False)
        pairs = zip(learning, answers, strict=True)
        outcome = warm_start(
            thinker,
            [each._replace(response_ids=answer) for each, answer in pairs],
            _examples(folder, "heldout.jsonl", tokens, NUM_SCORED_SEEN),
            # As many are right as are guessed: it ends after its steps.
            target=1.0, seed=seed, progress=progress, batch_size=_BATCH_SIZE, max_steps=_STEPS,
        )  # fmt: skip
        save(folder / "model", model, tokens)
        return outcome

    return _make_once(folder, {"kind": kind, "seed": seed}, build)


def _make_once(
    folder: Path, settings: dict[str, Any], build: Callable[[], WarmStartResult]
) -> dict[str, Any]:
    """Builds a folder, unless it exists with these settings.

    made.json comes last: it marks the folder complete, with the settings.
    """
    settings = {**settings, "format": _FORMAT}
    marker = folder / "made.json"
    made: dict[str, Any] | None = read_json(marker)
    if made is not None and made["settings"] == settings:
        return made
    marker.unlink(missing_ok=True)
    made = {"settings": settings, **build()._asdict()}
    write_json(marker, made)
    return made


def _examples(
    folder: Path,
    file: str,
    tokens: PreTrainedTokenizerFast,
    most: int | None = None,
    *,
    sees: bool = True,
) -> list[Example]:
    """The rows of a file as a rollout task would show them, and their answers."""
    settings = PromptsConfig(train=[folder / file])
    recipe = read_recipe(folder / "untrained", settings.media) if sees else None
    source = PromptSource(
        Records(settings.mixture, settings), tokens, shuffle_seed=None, settings=settings,
        media=None if recipe is None else MediaTokens(recipe, tokens),
    )  # fmt: skip
    made = []
    for prompt in map(source.prompt, range(len(source))[:most]):
        said = prompt.metadata.get("completion", f"\\boxed{{{prompt.answer}}}")
        end = [tokens.eos_token_id]
        answer = tokens.encode(said, add_special_tokens=False) + end
        shown: Image | Sound | None = None
        if recipe is not None:
            array = torch.from_numpy(canonical(prompt.measured[0], recipe).array.copy())
            if prompt.measured[0].extent.modality == "audio":
                shown = Sound(array, tokens.convert_tokens_to_ids(models.AUDIO))
            else:
                shown = Image(array, recipe.image, tokens.convert_tokens_to_ids(models.IMAGE))
        made.append(Example(prompt.token_ids, answer, shown))
    return made
