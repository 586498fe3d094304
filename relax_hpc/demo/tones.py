"""The tasks of a model that sees and hears: name the colour of a shape, or the pitch of a tone."""

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.demo import shapes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PITCHES = {"low": 150.0, "middle": 450.0, "high": 1350.0, "shrill": 4050.0}
"""Hz; a tone differs from them by a tenth at most."""
QUESTION = "pitch?"
RATE = 16000
"""Samples per second."""


def write(folder: Path, num_train: int, num_heldout: int, seed: int) -> None:
    """Writes train.jsonl, heldout.jsonl and their media: half are images, half are sounds.

    Of every colour and of every pitch there are as many, and nothing but the medium tells which.
    """
    draws = random.Random(seed)
    for file, count in (("train", num_train), ("heldout", num_heldout)):
        lines = shapes.rows(folder, file, count // 2, draws)
        lines += rows(folder, file, count - count // 2, draws)
        draws.shuffle(lines)
        (folder / f"{file}.jsonl").write_text("".join(lines))


def rows(folder: Path, file: str, count: int, draws: random.Random) -> list[str]:
    """Writes the sounds of so many rows of a file, and returns its lines."""
    import soundfile

    (folder / "sounds").mkdir(parents=True, exist_ok=True)
    names = [list(PITCHES)[number % len(PITCHES)] for number in range(count)]
    draws.shuffle(names)
    lines = []
    for number, name in enumerate(names):
        sound = f"sounds/{file}-{number:05}.wav"
        soundfile.write(folder / sound, drawn(name, draws), RATE)
        lines.append(_line(sound, name))
    return lines


def drawn(pitch: str, draws: random.Random) -> "npt.NDArray[np.float32]":
    """Draws a tone of that pitch, [samples]; length, loudness, form and noise are drawn, too."""
    import numpy as np

    noise = np.random.default_rng(draws.getrandbits(64))
    hertz, seconds = PITCHES[pitch] * draws.uniform(0.9, 1.1), draws.uniform(0.4, 1.3)
    phase = 2 * np.pi * hertz * np.arange(int(seconds * RATE)) / RATE
    wave = np.sin(phase) + draws.uniform(0, 0.5) * np.sin(2 * phase + draws.uniform(0, 6))
    wave = draws.uniform(0.1, 0.5) * wave + noise.normal(0, 0.01, len(wave))
    return np.asarray(wave, np.float32)


def _line(sound: str, pitch: str) -> str:
    message = {"role": "user", "content": f"<audio>{QUESTION}"}
    return json.dumps({"prompt": [message], "audios": [sound], "answer": pitch}) + "\n"
