"""The task of colours: name that of a shape, which only the image tells."""

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 70, 220),
    "yellow": (230, 210, 40),
}
SHAPES = ("circle", "square", "triangle")
QUESTION = "colour?"
SIDES = (64, 96, 128)
"""Pixels of a side of an image, in whole tokens of 32."""


def write(folder: Path, num_train: int, num_heldout: int, seed: int) -> None:
    """Writes train.jsonl, heldout.jsonl and their images, of every colour as many.

    Nothing but the pixels tells the colour, and no image of one file is in the other: even the
    grain of two backgrounds differs.
    """
    draws = random.Random(seed)
    for file, count in (("train", num_train), ("heldout", num_heldout)):
        (folder / f"{file}.jsonl").write_text("".join(rows(folder, file, count, draws)))


def rows(folder: Path, file: str, count: int, draws: random.Random) -> list[str]:
    """Writes the images of so many rows of a file, and returns its lines."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    names = [list(COLOURS)[number % len(COLOURS)] for number in range(count)]
    draws.shuffle(names)
    lines = []
    for number, name in enumerate(names):
        image = f"images/{file}-{number:05}.png"
        drawn(name, draws).save(folder / image, compress_level=1)
        lines.append(_line(image, name))
    return lines


def drawn(colour: str, draws: random.Random) -> "Image":
    """Draws a shape of that colour; its kind, size and place and the background are drawn, too."""
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


def _line(image: str, colour: str) -> str:
    message = {"role": "user", "content": f"<image>{QUESTION}"}
    return json.dumps({"prompt": [message], "images": [image], "answer": colour}) + "\n"
