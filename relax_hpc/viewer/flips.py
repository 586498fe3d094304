"""Prompts that were sampled again, and went from wrong to right or back."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from relax_hpc.bus.tools.survey import Surveyed


class Flips(NamedTuple):
    groups: list[Surveyed]
    """Prompt by prompt, the one that flipped last first; of a prompt the newest first."""
    notes: dict[int, str]
    """guid -> what happened since the prompt was sampled before."""


def find(groups: Sequence[Surveyed], solved_at: float, most: int) -> Flips:
    """Finds prompts that flipped; a prompt group is right if most of its episodes are.

    Args:
        groups: by guid, rising.
        solved_at: reward from which on an episode is right.
        most: prompt groups at most; those of one prompt stay together, so the first may exceed it.
    """
    prompts: dict[int, list[Surveyed]] = {}
    for group in groups:
        prompts.setdefault(group.prompt_index, []).append(group)
    found: list[Surveyed] = []
    notes: dict[int, str] = {}
    flipped = [pairs for of_prompt in prompts.values() if (pairs := _flips(of_prompt, solved_at))]
    for pairs in sorted(flipped, key=lambda pairs: -pairs[0][1].guid):
        seen = {each.guid: each for before, after in pairs for each in (after, before)}
        if found and len(found) + len(seen) > most:
            break
        found += seen.values()
        notes |= {after.guid: _note(before, after, solved_at) for before, after in pairs}
    return Flips(found, notes)


def _flips(groups: Iterable[Surveyed], solved_at: float) -> list[tuple[Surveyed, Surveyed]]:
    """Neighbours in time that differ, the newest first."""
    found = [
        (before, after)
        for before, after in pairwise(groups)
        if _is_right(before, solved_at) != _is_right(after, solved_at)
    ]
    return found[::-1]


def _right(group: Surveyed, solved_at: float) -> int:
    return sum(reward >= solved_at for reward in group.rewards)


def _is_right(group: Surveyed, solved_at: float) -> bool:
    return 2 * _right(group, solved_at) > len(group.rewards)


def _note(before: Surveyed, after: Surveyed, solved_at: float) -> str:
    went = "wrong to right" if _is_right(after, solved_at) else "right to wrong"
    return (
        f"{went}: {_right(after, solved_at)} of {len(after.rewards)} here, "
        f"{_right(before, solved_at)} of {len(before.rewards)} in prompt group {before.guid}"
    )
