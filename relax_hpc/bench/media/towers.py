"""The tower that sees, with random weights, on this machine's GPU or CPU: speed and memory.

It is the tower of the trainer, encoded by the trainer's own `Encoder`, without a language model.
Hugging Face's tower has the same weights and is given the same patches.
"""

import json
import multiprocessing

import torch

from relax_hpc.bench.media.folder import model_folder, recipe_of
from relax_hpc.bench.media.tower_task import Task, Work
from relax_hpc.bench.report import Row
from relax_hpc.bench.train import run_to_end
from relax_hpc.errors import ConfigError
from relax_hpc.run_secret import RunSecret
from relax_hpc.scratch import scratch_folder


def measure(shape: str, work: Work) -> list[Row]:
    """Measures in processes of their own, whose memory is free afterwards: of one rank and, where
    there is a second GPU, of two that share the images out.

    Args:
        shape: a name of `folder.SHAPES`, or a model's folder, of which config.json and the
            preprocessor are used.
        work: what to measure.

    Raises:
        ConfigError: no such shape, a model of text only, or the process failed.
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
        return [Row(*row) for row in json.loads(task.results.read_text())]


def _run(task: Task, rank: int, ranks: int) -> None:
    """Imports Megatron-core as a task of a run does, and only here."""
    from relax_hpc.engines.megatron import cpu

    cpu.install()
    from relax_hpc.bench.media import tower_rank

    tower_rank.run(task, rank, ranks)
