"""The tower that sees, with random weights, on this machine's GPU or CPU: speed and memory.

It is the tower of the trainer, encoded by the trainer's own `Encoder`, without a language model.
Hugging Face's tower has the same weights and is given the same patches.
"""

import json
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from media_shapes import model_folder, recipe_of

from relax_hpc.cli.bench.report import ReportRow
from relax_hpc.cli.bench.shapes import run_to_end
from relax_hpc.errors import ConfigError
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.files.scratch import scratch_folder
from relax_hpc.trainer.megatron.costs import training_flops
from relax_hpc.trainer.models.architecture import Architecture

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
    """Patches that go through the tower at once; see `actor.advanced.tower_patches`."""
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


def measure(shape: str, work: Work) -> list[ReportRow]:
    """Measures in processes of their own, whose memory is free afterwards: of one rank and, where
    there is a second GPU, of two that share the images out.
    """
    with scratch_folder("bench") as folder:
        task = Task(work, model_folder(shape, folder), folder)
        recipe_of(task.model)
        RunSecret.create(task.secret)
        spawn = multiprocessing.get_context("spawn")
        for ranks in (1, 2) if work.shared or torch.cuda.device_count() > 1 else (1,):
            run_to_end(
                [spawn.Process(target=_run, args=(task, rank, ranks)) for rank in range(ranks)]
            )
            if not task.results.exists():
                raise ConfigError("the process of the towers failed; its error is above")
        return [ReportRow(*row) for row in json.loads(task.results.read_text(encoding="utf-8"))]


def _run(task: Task, rank: int, ranks: int) -> None:
    """Imports Megatron-core as a task of a run does, and only here."""
    from relax_hpc.trainer.megatron import cpu

    cpu.install()
    import media_tower_rank

    media_tower_rank.run(task, rank, ranks)
