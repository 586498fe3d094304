"""Tells which policy is the best: of those with a checkpoint, the one with the highest held-out
score.

A score comes after its policy has trained on. Until then the checkpoint waits in `best/`.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.runtime.files.records import read_json
from relax_hpc.runtime.files.storage import names
from relax_hpc.runtime.paths import RunPaths

BEST, KEPT = "best", "kept"
"""Folders, among the checkpoints, of those that stay though they are not among the newest."""
_STEP = re.compile(r"step_(\d{8,})")
_TASKS = re.compile(r"\d+-of-(\d+)\.json")


class Best(NamedTuple):
    name: str
    """Name of the held-out set."""
    step: int
    score: float
    folder: Path
    """The checkpoint."""


def find_best(paths: RunPaths, config: JobConfig) -> Best | None:
    """Returns the best policy of a run; None if there is none yet, or nobody asked for it."""
    name = config.actor.advanced.keep_best
    if name is None or not isinstance(config, RunConfig):
        return None
    folders = by_step(paths.checkpoints)
    scores = scores_of(paths, name, config.eval[name].every)
    step = choose(scores, folders)
    return None if step is None else Best(name, step, scores[step], folders[step])


def by_step(root: Path) -> dict[int, Path]:
    """Returns step -> folder of the checkpoints below `root`, with those in `kept/` and `best/`."""
    return {
        int(match[1]): folder / match[0]
        for folder in (root / KEPT, root / BEST, root)
        for match in map(_STEP.fullmatch, names(folder))
        if match
    }


def scores_of(paths: RunPaths, name: str, every: int) -> dict[int, float]:
    """Returns step -> mean score of its policy, for evaluations that all tasks completed.

    An evaluation counts for the step at which it was due. Where training does not wait for it
    (`eval.NAME.advanced.one_policy`), policies soon after may have sampled it.
    """
    files = names(paths.heldout_shares(0, 1).parent)
    found = dict[int, float]()
    for size in sorted({int(match[1]) for match in map(_TASKS.fullmatch, files) if match}):
        shares = [read_json(paths.heldout_shares(rank, size)) or {} for rank in range(size)]
        for key in sorted(set.intersection(*map(set, shares))):
            of, when, number = key.split("/")
            _, _, correct, counts, *_ = zip(*(share[key] for share in shares), strict=False)
            if of == name and when != "before" and sum(counts):
                step = int(number) * (every if when == "during" else 1)
                found[step] = sum(correct) / sum(counts)
    return found


def choose(scores: Mapping[int, float], steps: Collection[int]) -> int | None:
    """Returns the step with the highest score, the earliest of equal ones; None without any."""
    scored = (step for step in steps if step in scores)
    return min(scored, key=lambda step: (-scores[step], step), default=None)


def to_keep(paths: RunPaths, name: str, every: int, steps: Collection[int]) -> set[int]:
    """Returns the best of `steps`, and those that may still get a score: a set is evaluated in the
    order of policies."""
    scores = scores_of(paths, name, every)
    best, scored = choose(scores, steps), max(scores, default=0)
    waiting = {step for step in steps if step > scored and step % every == 0}
    return waiting if best is None else waiting | {best}
