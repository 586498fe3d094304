"""The task of a process that measures towers."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from relax_hpc.engines.megatron.flops import training_flops
from relax_hpc.models.architecture import Architecture

SIBLINGS = 8
"""Rows of a prompt group, which are shown one image."""
Size = tuple[int, int]
"""Height and width of an image in pixels."""


class Work(NamedTuple):
    """The images that go through the tower."""

    large: Sequence[tuple[int, Size]] = ((8, (1024, 1024)), (1, (4096, 2048)))
    """(images, their size) whose forward is timed."""
    small: tuple[int, Size] = (256, (256, 256))
    """Images whose forward and backward is compared with Hugging Face's."""
    memory: Sequence[int] = (8, 16, 32, 64)
    """Numbers of images whose peak memory is measured."""
    memory_size: Size = (1024, 1024)
    tower_patches: int = 8192
    """Patches that go through the tower at once; see `actor.tower_patches`."""
    repeats: int = 5
    shared: bool = False
    """Two ranks are measured without a second GPU, too."""
    sampled_tokens: int = 1000
    """Tokens of a response, for the share of a step."""
    mfu: float = 0.45
    """Share of the GPU's peak that the language model trains at, for the share of a step."""


class Task(NamedTuple):
    """The work of a process that has the device."""

    work: Work
    model: Path
    folder: Path

    @property
    def secret(self) -> Path:
        return self.folder / "secret"

    @property
    def results(self) -> Path:
        return self.folder / "rows.json"


def language_seconds(shape: Architecture, tokens: int, flops_per_s: float) -> float:
    """Seconds of the language model for the forward and backward of a group of rows of so many
    tokens, at so many operations per second."""
    return training_flops(shape, [tokens] * SIBLINGS) / flops_per_s


def share(tower_s: float, language_s: float) -> float:
    """Returns the part of both that the tower takes."""
    return tower_s / (tower_s + language_s)
