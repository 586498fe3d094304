"""What all rollout tasks together scored on the held-out prompts: each has a share of them."""

import logging
from typing import NamedTuple

from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json
from relax_hpc.telemetry.logs import OF_ALL

log = logging.getLogger(__name__)


class Share(NamedTuple):
    """What one task scored."""

    version: int
    """Of the policy."""
    correct: float
    num_prompts: int


class Board:
    """Where tasks leave their shares. Whoever completes an evaluation says its result.

    Args:
        paths: of the run.
        rank: of this task.
        size: tasks.
    """

    def __init__(self, paths: RunPaths, rank: int, size: int) -> None:
        self._paths, self._rank, self._size = paths, rank, size

    def add(self, when: str, number: int, share: Share) -> None:
        """Leaves the share of this task, and says the whole if it is there now.

        Args:
            when: before, during or after.
            number: of the evaluation among those of `when`; tasks may get to it at other policies.
        """
        key = f"{when}/{number}"
        found = [share]
        if self._size > 1:
            own = self._paths.heldout_shares(self._rank)
            write_json(own, (read_json(own) or {}) | {key: share})
            found += self._others(key)
        if len(found) == self._size:
            log.info("%s", _line(when, found), extra=OF_ALL)

    def _others(self, key: str) -> list[Share]:
        """As many as there are until one is missing."""
        found: list[Share] = []
        for rank in range(self._size):
            if rank != self._rank:
                share = (read_json(self._paths.heldout_shares(rank)) or {}).get(key)
                if share is None:
                    break
                found.append(Share(*share))
        return found


def _line(when: str, shares: list[Share]) -> str:
    versions = sorted({share.version for share in shares})
    policy = f"policy {versions[0]}"
    if len(versions) > 1:
        policy = f"policies {versions[0]} to {versions[-1]}"
    num_prompts = sum(share.num_prompts for share in shares)
    mean = sum(share.correct for share in shares) / max(num_prompts, 1)
    return f"held-out {when}, {policy}: {mean:.3f}"
