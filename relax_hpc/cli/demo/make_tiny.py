"""Makes a tiny model and a task: on any machine, offline, in about a minute.

Vision and audio models get a task that only the medium solves.
"""

import importlib.util
import inspect
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from relax_hpc.cli.demo import models, tasks
from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.data.media.canonical import canonical
from relax_hpc.data.media.patches import patches
from relax_hpc.data.media.recipe import VisionRecipe, read_recipe
from relax_hpc.data.media_tokens import MediaTokens
from relax_hpc.data.records import Records
from relax_hpc.data.source import PromptSource
from relax_hpc.errors import ConfigError
from relax_hpc.runtime.files.records import read_json, write_json


class Image(NamedTuple):
    pixels: Tensor
    """[1, height, width, 3] uint8, canonical."""
    vision: VisionRecipe
    """The recipe that made them."""
    token_id: int
    """Placeholder of its features."""

    @property
    def grid(self) -> list[int]:
        """Patches in time, y and x."""
        return [1, *(side // self.vision.patch for side in self.pixels.shape[1:3])]


class Sound(NamedTuple):
    mel: Tensor
    """[bins, frames] float32, canonical."""
    token_id: int
    """Placeholder of its features."""


class Example(NamedTuple):
    """A prompt and the wanted response, which ends with the end-of-turn token."""

    prompt_ids: list[int]
    response_ids: list[int]
    medium: Image | Sound | None = None
    """Either all examples have one, or none."""


class WarmStartResult(NamedTuple):
    """Steps taken, and accuracies reached as fractions of held-out prompts."""

    steps: int
    seconds: float
    greedy: float
    sampled: float
    """Accuracy at temperature 1, as a rollout samples."""


def warm_start(
    model: PreTrainedModel,
    train: Sequence[Example],
    heldout: Sequence[Example],
    *,
    target: float,
    seed: int,
    progress: Callable[[str], None],
    lr: float = 2e-3,
    batch_size: int = 64,
    warmup_steps: int = 50,
    eval_every: int = 25,
    max_steps: int = 2000,
) -> WarmStartResult:
    """Trains in place until greedy held-out accuracy reaches `target`, or for `max_steps`.

    One thread: the model is too small to gain from more, and so `seed` alone decides the result.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(seed)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=lr, weight_decay=0.01, betas=(0.9, 0.98))
    start, step, greedy = time.perf_counter(), 0, 0.0
    while step < max_steps and greedy < target:
        step += 1
        optimizer.param_groups[0]["lr"] = lr * min(1.0, step / warmup_steps)
        picks = torch.randint(len(train), (batch_size,), generator=draws).tolist()
        loss = _loss(model, [train[i] for i in picks])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        # Addition is grasped suddenly: look often from then on, so as not to overshoot.
        if step % (eval_every if greedy < target / 3 else 5) == 0:
            greedy = accuracy(model, heldout)
            progress(f"warm start: step {step}, loss {loss.item():.3f}, held-out {greedy:.3f}")
    seconds = time.perf_counter() - start
    sampled = accuracy(model, heldout, sampling=draws)
    torch.set_num_threads(threads)
    return WarmStartResult(step, seconds, greedy, sampled)


@torch.no_grad()
def accuracy(
    model: PreTrainedModel, examples: Sequence[Example], *, sampling: torch.Generator | None = None
) -> float:
    """Fraction answered with exactly the wanted tokens, greedily unless `sampling` is given."""
    by_length = defaultdict(list)  # equal lengths need no padding, hence no attention mask
    for example in examples:
        by_length[len(example.prompt_ids)].append(example)
    correct = 0
    for group in by_length.values():
        tokens = torch.tensor([example.prompt_ids for example in group])
        start, longest = tokens.shape[1], max(len(e.response_ids) for e in group)
        for _ in range(longest):
            logits = _logits(model, group, tokens, 1)[:, -1]
            for medium in (example.medium for example in group if example.medium is not None):
                logits[:, medium.token_id] = -torch.inf  # one would be taken for more of the medium
            tokens = torch.cat([tokens, _choose(logits, sampling)], 1)
        for example, row in zip(group, tokens[:, start:].tolist(), strict=True):
            correct += row[: len(example.response_ids)] == example.response_ids
    return correct / len(examples)


def _choose(logits: Tensor, sampling: torch.Generator | None) -> Tensor:
    if sampling is None:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial(logits.softmax(-1), 1, generator=sampling)


def _logits(model: PreTrainedModel, batch: Sequence[Example], tokens: Tensor, kept: int) -> Tensor:
    """Returns [rows, kept, vocabulary] for the last tokens."""
    shown = _build_media_arguments(batch, tokens)
    if "input_features" not in inspect.signature(model.forward).parameters:
        shown["logits_to_keep"] = kept
    logits: Tensor = model(tokens, use_cache=False, **shown).logits
    return logits[:, -kept:]


def _build_media_arguments(batch: Sequence[Example], tokens: Tensor) -> dict[str, Any]:
    """Returns a model's arguments for the media of a batch; none for text."""
    images = [example.medium for example in batch if isinstance(example.medium, Image)]
    sounds = [example.medium for example in batch if isinstance(example.medium, Sound)]
    found: dict[str, Any] = {}
    if images:
        seen = [patches(image.pixels, image.vision, torch.float32) for image in images]
        found["pixel_values"] = torch.cat(seen)
        found["image_grid_thw"] = torch.tensor([image.grid for image in images])
        found["mm_token_type_ids"] = (tokens == images[0].token_id).int()
    if sounds:
        longest = max(sound.mel.shape[1] for sound in sounds)
        filled = torch.zeros(len(sounds), sounds[0].mel.shape[0], longest)
        for place, sound in zip(filled, sounds, strict=True):
            place[:, : sound.mel.shape[1]] = sound.mel
        lengths = torch.tensor([[sound.mel.shape[1]] for sound in sounds])
        found["input_features"] = filled
        found["feature_attention_mask"] = (torch.arange(longest) < lengths).long()
    if images or sounds:
        found["attention_mask"] = torch.ones_like(tokens)
    return found


def _loss(model: PreTrainedModel, batch: Sequence[Example]) -> Tensor:
    """Mean negative log-likelihood per response token, nats."""
    rows = [example.prompt_ids + example.response_ids for example in batch]
    length, given = max(map(len, rows)), min(len(e.prompt_ids) for e in batch)
    tokens = torch.zeros(len(rows), length, dtype=torch.long)  # causal: right padding is inert
    labels = torch.full((len(rows), length), -100)
    for i, (example, row) in enumerate(zip(batch, rows, strict=True)):
        tokens[i, : len(row)] = torch.tensor(row)
        labels[i, len(example.prompt_ids) : len(row)] = torch.tensor(example.response_ids)
    # Positions before the shortest prompt's last token predict nothing: no logits for them.
    asked = tokens[:, :-1]
    logits = _logits(model, batch, asked, length - given)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, given:].flatten())


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
