"""Which prompt groups of a bus are shown."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from relax_hpc.bus.plan import read_chain
from relax_hpc.bus.tools import survey
from relax_hpc.bus.tools.survey import Survey, Surveyed
from relax_hpc.errors import ConfigError
from relax_hpc.paths import BusPaths
from relax_hpc.viewer import flips
from relax_hpc.viewer.asked import Asked, Sort

_SEED = 0
"""Seeds the random choice: it is the same for the same bus."""


class Found(NamedTuple):
    """The choice, and what is to be said of it."""

    chosen: list[Surveyed]
    remarks: list[str]
    notes: Mapping[int, str] = {}
    """guid -> what sets this prompt group apart."""


def choose(
    paths: BusPaths, asked: Asked, solved_at: float = 1.0, *, masks_errors: bool = False
) -> Found:
    """Chooses prompt groups; what is gone or not there yet is a remark.

    Args:
        paths: of the bus.
        asked: for.
        solved_at: reward from which on a response is right.
        masks_errors: a response whose reward failed has none.

    Raises:
        BusError: not a bus of this format, damage, or a step that is not planned.
        ConfigError: no such prompt group; it says which there are.
    """
    alone = asked.sort == "newest" and asked.step is None and asked.guid is None
    found = survey.take(
        paths,
        step=asked.step,
        guid=asked.guid,
        newest=asked.groups if alone else None,
        masks_errors=masks_errors,
    )
    remarks = []
    if asked.guid is not None and not found.groups and not _is_planned(paths, asked.guid):
        raise ConfigError(f"--guid {asked.guid}: {_there(survey.take(paths))}")
    if found.is_empty and asked.guid is None:
        remarks.append("no trajectory is committed yet; look again later")
    if found.deleted_shards:
        shards, are = ("shard", "is") if found.deleted_shards == 1 else ("shards", "are")
        remarks.append(
            f"{found.deleted_shards} {shards} with {found.deleted_trajectories} trajectories "
            f"{are} deleted, since a checkpoint covers what they hold; bus.keep_steps keeps more"
        )
    if asked.sort == "flipped":
        return _flipped(found.groups, asked, solved_at, remarks)
    chosen = _ORDERS[asked.sort](found.groups)[: asked.groups]
    if len(chosen) < len(found.groups):
        remarks.append(f"{len(chosen)} of {len(found.groups)} prompt groups: {asked.sort}")
    return Found(chosen, remarks)


def _flipped(
    groups: Sequence[Surveyed], asked: Asked, solved_at: float, remarks: list[str]
) -> Found:
    chosen, notes = flips.find(groups, solved_at, asked.groups)
    if groups and not chosen:
        prompts = len({group.prompt_index for group in groups})
        remarks.append(
            f"no prompt went from wrong to right or back: {len(groups)} prompt groups of "
            f"{prompts} prompts are on disk; bus.keep_steps keeps more"
        )
    return Found(chosen, remarks, notes)


_ORDERS: dict[Sort, Callable[[Sequence[Surveyed]], list[Surveyed]]] = {
    "newest": lambda groups: list(reversed(groups)),
    "best": lambda groups: sorted(groups, key=lambda group: _worth(group, -1.0)),
    "worst": lambda groups: sorted(groups, key=lambda group: _worth(group, 1.0)),
    "random": lambda groups: random.Random(_SEED).sample(groups, len(groups)),
}


def _worth(group: Surveyed, sign: float) -> float:
    """Returns a key to sort by; a group without any reward is the last."""
    return math.inf if group.mean_reward is None else sign * group.mean_reward


def _is_planned(paths: BusPaths, guid: int) -> bool:
    return any(guid in record.guids for record in read_chain(paths).steps)


def _there(found: Survey) -> str:
    """The prompt groups on disk, neighbours as a range."""
    guids = np.array([group.guid for group in found.groups], np.int64)
    if not len(guids):
        return "there is no prompt group on disk"
    runs = np.split(guids, np.flatnonzero(np.diff(guids) > 1) + 1)
    said = [f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    more = ["..."] if len(said) > 20 else []
    return f"no such prompt group on disk; there are {', '.join(said[:20] + more)}"
