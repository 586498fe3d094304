"""Writes tiny tasks: name a shape's colour or a tone's pitch, add numbers, or write a line of
Python."""

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL.Image import Image

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 70, 220),
    "yellow": (230, 210, 40),
}
SHAPES = ("circle", "square", "triangle")
SHAPE_QUESTION = "colour?"
SIDES = (64, 96, 128)
"""Pixels per side of an image, in whole tokens of 32."""


def write_shapes(folder: Path, num_train: int, num_heldout: int, seed: int) -> None:
    """Writes train.jsonl, heldout.jsonl and their images, equally many of every colour.

    Only the pixels show the colour, and the two files share no image: even the grain of two
    backgrounds differs.
    """
    draws = random.Random(seed)
    for file, count in (("train", num_train), ("heldout", num_heldout)):
        (folder / f"{file}.jsonl").write_text(
            "".join(shape_rows(folder, file, count, draws)), encoding="utf-8"
        )


def shape_rows(folder: Path, file: str, count: int, draws: random.Random) -> list[str]:
    (folder / "images").mkdir(parents=True, exist_ok=True)
    lines = []
    for number, name in enumerate(_draw_evenly(COLOURS, count, draws)):
        image = f"images/{file}-{number:05}.png"
        draw_shape(name, draws).save(folder / image, compress_level=1)
        lines.append(_line(f"<image>{SHAPE_QUESTION}", images=[image], answer=name))
    return lines


def _draw_evenly(names: Iterable[str], count: int, draws: random.Random) -> list[str]:
    """Draws names in random order, each as often as the others."""
    drawn = list(itertools.islice(itertools.cycle(names), count))
    draws.shuffle(drawn)
    return drawn


def _line(prompt: str, **fields: Any) -> str:  # noqa: ANN401
    """Returns a line of a prompt file."""
    return json.dumps({"prompt": [{"role": "user", "content": prompt}], **fields}) + "\n"


def draw_shape(colour: str, draws: random.Random) -> "Image":
    """Draws a shape of that colour, with random kind, size, place and background."""
    import numpy as np
    from PIL import Image, ImageDraw

    width, height = draws.choice(SIDES), draws.choice(SIDES)
    noise = np.random.default_rng(draws.getrandbits(64))
    grey = draws.randint(60, 200) + noise.integers(-12, 13, (height, width, 1))
    made = Image.fromarray(np.repeat(grey, 3, axis=2).astype(np.uint8))
    size = draws.randint(28, 48)
    left, top = draws.randint(4, width - size - 4), draws.randint(4, height - size - 4)
    right, bottom = left + size, top + size
    rgb = tuple(max(0, min(255, level + draws.randint(-20, 20))) for level in COLOURS[colour])
    canvas, kind = ImageDraw.Draw(made), draws.choice(SHAPES)
    if kind == "circle":
        canvas.ellipse((left, top, right, bottom), fill=rgb)
    elif kind == "square":
        canvas.rectangle((left, top, right, bottom), fill=rgb)
    else:
        canvas.polygon(((left, bottom), (right, bottom), ((left + right) // 2, top)), fill=rgb)
    return made


PITCHES = {"low": 150.0, "middle": 450.0, "high": 1350.0, "shrill": 4050.0}
"""Hz; a tone differs from it by at most a tenth."""
TONE_QUESTION = "pitch?"
RATE = 16000
"""Samples per second."""


def write_tones(folder: Path, num_train: int, num_heldout: int, seed: int) -> None:
    """Writes train.jsonl, heldout.jsonl and their media: half images, half sounds.

    There are equally many of every colour and pitch, and only the medium tells which.
    """
    draws = random.Random(seed)
    for file, count in (("train", num_train), ("heldout", num_heldout)):
        lines = shape_rows(folder, file, count // 2, draws)
        lines += tone_rows(folder, file, count - count // 2, draws)
        draws.shuffle(lines)
        (folder / f"{file}.jsonl").write_text("".join(lines), encoding="utf-8")


def tone_rows(folder: Path, file: str, count: int, draws: random.Random) -> list[str]:
    import soundfile

    (folder / "sounds").mkdir(parents=True, exist_ok=True)
    lines = []
    for number, name in enumerate(_draw_evenly(PITCHES, count, draws)):
        sound = f"sounds/{file}-{number:05}.wav"
        soundfile.write(folder / sound, draw_tone(name, draws), RATE)
        lines.append(_line(f"<audio>{TONE_QUESTION}", audios=[sound], answer=name))
    return lines


def draw_tone(pitch: str, draws: random.Random) -> "npt.NDArray[np.float32]":
    """Draws a tone of that pitch, [samples], with random length, loudness, form and noise."""
    import numpy as np

    noise = np.random.default_rng(draws.getrandbits(64))
    hertz, seconds = PITCHES[pitch] * draws.uniform(0.9, 1.1), draws.uniform(0.4, 1.3)
    phase = 2 * np.pi * hertz * np.arange(int(seconds * RATE)) / RATE
    wave = np.sin(phase) + draws.uniform(0, 0.5) * np.sin(2 * phase + draws.uniform(0, 6))
    wave = draws.uniform(0.1, 0.5) * wave + noise.normal(0, 0.01, len(wave))
    return np.asarray(wave, np.float32)


def write_additions(folder: Path, digits: int, num_train: int, num_heldout: int, seed: int) -> None:
    """Writes train.jsonl and heldout.jsonl of sums of two numbers of `digits` digits each.

    Every pair occurs once, so nothing held out is trained on; (a, b) and (b, a) are two pairs.

    Raises:
        ConfigError: there are too few pairs.
    """
    lowest, count = 10 ** (digits - 1), 9 * 10 ** (digits - 1)
    wanted = num_train + num_heldout
    if wanted > count**2:
        raise ConfigError(
            f"digits = {digits}: has {count**2} sums, {wanted} were asked for; use more digits"
        )
    picks = random.Random(seed).sample(range(count**2), wanted)
    pairs = [(lowest + pick // count, lowest + pick % count) for pick in picks]
    lines = [
        _line(f"{a}+{b}=", answer=str(a + b), completion=f"\\boxed{{{a + b}}}") for a, b in pairs
    ]
    _split(folder, lines, num_train)


def _split(folder: Path, lines: Sequence[str], num_train: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(lines[:num_train]), encoding="utf-8")
    (folder / "heldout.jsonl").write_text("".join(lines[num_train:]), encoding="utf-8")


FENCE, INPUT, END = "```python\nprint(", "int(input())", ")\n```"
WORDS = [FENCE, INPUT, END]
"""Frequent in programs, so one token each: a program has at most 11 tokens, including its end."""
_FACTORS, _TERMS = range(2, 100), range(10, 100)
_TESTS = 2


def write_programs(folder: Path, num_train: int, num_heldout: int, seed: int) -> None:
    """Writes train.jsonl and heldout.jsonl of prompts like "3n+17", as `prepare deepcoder` does.

    Every pair of numbers occurs once, so nothing held out is trained on. An answer is two tests
    with different inputs: a program that prints a constant fails one of them.
    """
    draws = random.Random(seed)
    picks = draws.sample(range(len(_FACTORS) * len(_TERMS)), num_train + num_heldout)
    pairs = [divmod(pick, len(_TERMS)) for pick in picks]
    lines = [
        _programs_line(_FACTORS[i], _TERMS[j], draws.sample(range(1, 1000), _TESTS))
        for i, j in pairs
    ]
    _split(folder, lines, num_train)


def _programs_line(factor: int, term: int, numbers: list[int]) -> str:
    tests = {
        "inputs": [f"{n}\n" for n in numbers],
        "outputs": [f"{factor * n + term}" for n in numbers],
    }
    program = f"{FENCE}{factor}*{INPUT}+{term}{END}"
    return _line(f"{factor}n+{term}", answer=json.dumps(tests), completion=program)
