"""Scores of tasks on the held-out sets: their shares of a result, and every sample in files."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from relax_hpc.paths import RunPaths
from relax_hpc.prompts.source import Prompt
from relax_hpc.records import read_json, write_json, write_text
from relax_hpc.roles.rollout.episodes import Episode
from relax_hpc.telemetry.logs import OF_ALL

log = logging.getLogger(__name__)


class Due(NamedTuple):
    """An evaluation that is to be made."""

    name: str
    """Name of the set."""
    when: str
    """before, during or after training."""
    number: int
    """Number among those of `when`: tasks may get to it at other policies."""


class Row(NamedTuple):
    """One held-out sample, as it is kept."""

    prompt: int
    """Line of the file, 0-based, blank lines not counted."""
    sample: int
    """0..n-1 among those of the prompt."""
    score: float
    parts: Mapping[str, float]
    """Parts of the score, by name."""
    version: int
    """Oldest policy that sampled a token of it; -1 if there is none."""
    version_max: int
    """Newest policy that did."""
    finish: str
    num_tokens: int
    """Sampled."""
    texts: list[str]
    """Texts that the policy said, call by call."""
    source: str = ""
    """Subset of the set that the prompt is from."""

    @classmethod
    def of(cls, prompt: Prompt, sample: int, episode: Episode, texts: list[str]) -> Self:
        calls = episode.record.calls
        versions = [version for call in calls for _, version in call.draft.version_runs]
        last = calls[-1].finish if calls else None
        return cls(
            prompt=prompt.index,
            sample=sample,
            score=episode.score.value,
            parts=dict(episode.score.parts),
            version=min(versions, default=-1),
            version_max=max(versions, default=-1),
            finish="" if last is None else last.name.lower(),
            num_tokens=sum(len(call.draft.token_ids) for call in calls),
            texts=texts,
            source=prompt.source,
        )


class Share(NamedTuple):
    """One task's part of a score."""

    version: int
    """Oldest policy that sampled a token; -1 if there is none."""
    version_max: int
    """Newest policy that did."""
    correct: float
    """Sum of the scores."""
    num_samples: int

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        return cls(
            min((row.version for row in rows if row.version >= 0), default=-1),
            max((row.version_max for row in rows), default=-1),
            sum(row.score for row in rows),
            len(rows),
        )


class Board:
    """The place where tasks leave their scores. Whoever completes an evaluation says its result.

    Args:
        paths: of the run.
        rank: of this task.
        size: tasks.
    """

    def __init__(self, paths: RunPaths, rank: int, size: int) -> None:
        self._paths, self._rank, self._size = paths, rank, size

    def add(self, due: Due, share: Share, rows: Sequence[Row]) -> None:
        """Keeps the samples, leaves the share of this task, and says the whole if it is there."""
        if rows:
            path = self._paths.eval_rows(due.name, share.version, due.when, self._rank)
            write_text(path, "".join(f"{json.dumps(row._asdict())}\n" for row in rows))
        key = f"{due.name}/{due.when}/{due.number}"
        found = [share]
        if self._size > 1:
            own = self._paths.heldout_shares(self._rank)
            write_json(own, (read_json(own) or {}) | {key: share})
            found += self._others(key)
        if len(found) == self._size:
            log.info("%s", _line(due, found), extra=OF_ALL)

    def _others(self, key: str) -> list[Share]:
        """Reads as many as there are until one is missing."""
        found: list[Share] = []
        for rank in range(self._size):
            if rank != self._rank:
                share = (read_json(self._paths.heldout_shares(rank)) or {}).get(key)
                if share is None:
                    break
                found.append(Share(*share))
        return found


def _line(due: Due, shares: list[Share]) -> str:
    ends = [v for share in shares for v in (share.version, share.version_max) if v >= 0]
    oldest, newest = min(ends, default=-1), max(ends, default=-1)
    policy = f"policy {oldest}" if oldest == newest else f"policies {oldest} to {newest}"
    num_samples = sum(share.num_samples for share in shares)
    mean = sum(share.correct for share in shares) / max(num_samples, 1)
    return f"held-out {due.when}, {policy}: {mean:.3f} ({due.name})"
