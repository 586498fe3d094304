"""Scores of tasks on the held-out sets: their shares of a result, and every sample in files."""

import errno
import itertools
import json
import logging
import os
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from relax_hpc.config.run import RunConfig
from relax_hpc.paths import RunPaths
from relax_hpc.prompts.source import Prompt
from relax_hpc.records import read_bytes, read_json, write_json, write_text
from relax_hpc.roles.rollout.episodes import Episode
from relax_hpc.storage import delete, names, patiently
from relax_hpc.telemetry.logs import OF_ALL

log = logging.getLogger(__name__)


class Due(NamedTuple):
    """An evaluation that is to be made."""

    name: str
    """Name of the set."""
    when: str
    """before, during or after training."""
    number: int
    """Number among those of `when`: tasks may get to it at other policies. Of the last policy it is
    the number of steps: a run that is given more has another last policy."""

    @property
    def key(self) -> str:
        return f"{self.name}/{self.when}/{self.number}"


def last_of(config: RunConfig) -> list[Due]:
    """The evaluations of the last policy, one of each set."""
    return [Due(name, "after", config.schedule.num_steps) for name in config.eval]


class Row(NamedTuple):
    """One held-out sample, as it is kept."""

    prompt: int
    """Line of the file, 0-based, blank lines not counted."""
    sample: int
    """0..n-1 among those of the prompt."""
    score: float | None
    """None where the reward failed, and the job masks that."""
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
    failed: bool = False
    """Whether the reward failed."""
    in_thought: bool = False
    """Whether the last text began inside a thought that was opened before it."""

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        sample: int,
        episode: Episode,
        texts: list[str],
        *,
        masks_errors: bool,
        in_thought: bool = False,
    ) -> Self:
        failed = episode.score.error is not None
        calls = episode.record.calls
        versions = [version for call in calls for _, version in call.draft.version_runs]
        last = calls[-1].finish if calls else None
        return cls(
            prompt=prompt.index,
            sample=sample,
            score=None if failed and masks_errors else episode.score.value,
            parts=dict(episode.score.parts),
            version=min(versions, default=-1),
            version_max=max(versions, default=-1),
            finish="" if last is None else last.name.lower(),
            num_tokens=sum(len(call.draft.token_ids) for call in calls),
            texts=texts,
            source=prompt.source,
            failed=failed,
            in_thought=in_thought,
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
    """Samples with a score."""
    num_masked: int = 0
    """Samples without: their reward failed."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        scores = [row.score for row in rows if row.score is not None]
        return cls(
            min((row.version for row in rows if row.version >= 0), default=-1),
            max((row.version_max for row in rows), default=-1),
            sum(scores),
            len(scores),
            len(rows) - len(scores),
        )


class Begun(NamedTuple):
    """The evaluations of a set that a task began, in this start or an earlier one."""

    done: list[Due]
    left: list[Due]
    """Were broken off after samples of a prompt, or more."""


class _Told(NamedTuple):
    """Evaluations of a set by as many tasks as there were, when they were more or fewer."""

    done: set[Due]
    """The evaluations that all of them had scored."""
    begun: set[Due]
    """All that there was something of."""


class Board:
    """The place where tasks leave their scores. Whoever completes an evaluation says its result.

    It outlives the task: samples are kept prompt by prompt, and each once. Where there were more or
    fewer tasks before, their shares were other ones: what they completed stays so, and the rest is
    begun anew.

    Args:
        paths: of the run.
        rank: of this task.
        size: tasks.
    """

    def __init__(self, paths: RunPaths, rank: int, size: int) -> None:
        self._paths, self._rank = paths, rank
        self.size = size
        """Tasks that have a share."""
        self._of_all = threading.Lock()
        """Held while the shares are written: sets are completed in threads."""
        self._told_of: dict[str, _Told] = {}

    def begun(self, name: str) -> Begun:
        """Returns the evaluations of a set that there is something of."""
        told, own = self._told(name), map(_due_of, self._read(self._rank))
        done = list(dict.fromkeys([*(due for due in own if due.name == name), *sorted(told.done)]))
        left = [Due(name, *_when_of(part.name)) for part in self._parts(name) if _lines(part)]
        begun = dict.fromkeys([*left, *sorted(told.begun)])
        return Begun(done, [due for due in begun if due not in done])

    def kept_last(self, dues: Collection[Due]) -> int | None:
        """Returns the bytes of samples that are kept of evaluations under way, of the sets of
        `dues`; None if all of these are complete. For whoever waits for them: those that were under
        way before come first."""
        shares = self._read(self._rank)
        if all(due.key in shares or due in self._told(due.name).done for due in dues):
            return None
        num_bytes = 0
        for part in [part for due in dues for part in self._parts(due.name)]:
            with suppress(FileNotFoundError):
                num_bytes += patiently(part, part.stat).st_size
        return num_bytes

    def begin(self, due: Due) -> list[Row]:
        """Opens an evaluation. Returns the samples that were kept of it before."""
        lines = _lines(self._part(due))
        write_text(self._part(due), "".join(f"{line}\n" for line in lines))
        return [Row(**row) for line in lines for row in json.loads(line)]

    def keep(self, due: Due, rows: Sequence[Row]) -> None:
        """Keeps the samples of a prompt."""
        part, line = self._part(due), json.dumps([row._asdict() for row in rows]) + "\n"
        size = patiently(part, part.stat).st_size

        def write() -> None:
            with part.open("r+b", buffering=0) as file:
                file.truncate(size)  # of an attempt that failed
                file.seek(size)
                if file.write(line.encode()) < len(line.encode()):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(part))

        patiently(part, write, small=True)

    def add(self, due: Due, share: Share, rows: Sequence[Row]) -> None:
        """Publishes all samples and the share of this task, and says the whole if it is there."""
        if rows:
            path = self._paths.eval_rows(due.name, share.version, due.when, due.number, self._rank)
            write_text(path, "".join(f"{json.dumps(row._asdict())}\n" for row in rows))
        own = self._paths.heldout_shares(self._rank, self.size)
        with self._of_all:
            write_json(own, (read_json(own) or {}) | {due.key: share})
        delete(self._part(due))
        found = [share, *self._others(due.key)]
        if len(found) == self.size:
            log.info("%s", _line(due, found), extra=OF_ALL)

    def _read(self, rank: int, size: int = 0) -> dict[str, Any]:
        """Reads what a task, of as many as there are now or of `size`, said of its shares."""
        return read_json(self._paths.heldout_shares(rank, size or self.size)) or {}

    def _told(self, name: str) -> _Told:
        """Reads what was said of a set when there were more or fewer tasks; they are no more."""
        if name not in self._told_of:
            files = names(self._paths.heldout_shares(0, 0).parent)
            shares = [
                [set(self._read(rank, size)) for rank in range(size)]
                for size in set(map(_tasks_of, files)) - {0, self.size}
            ]
            done = set[str]().union(*(set.intersection(*each) for each in shares))
            begun = set(map(_due_of, set[str]().union(*itertools.chain(*shares))))
            folder = self._part(Due(name, "", 0)).parent
            for part in (each for each in names(folder) if each.endswith(".part")):
                if _tasks_of(part) != self.size and _lines(folder / part):
                    begun.add(Due(name, *_when_of(part)))
            self._told_of[name] = _Told(
                {due for due in map(_due_of, done) if due.name == name},
                {due for due in begun if due.name == name},
            )
        return self._told_of[name]

    def _parts(self, name: str) -> list[Path]:
        """Returns the files of evaluations of a set that are under way."""
        folder = self._part(Due(name, "", 0)).parent
        own = f".{self._rank}-of-{self.size}.part"
        return [folder / part for part in names(folder) if part.endswith(own)]

    def _part(self, due: Due) -> Path:
        return self._paths.eval_part(due.name, due.when, due.number, self._rank, self.size)

    def _others(self, key: str) -> list[Share]:
        """Reads as many as there are until one is missing."""
        found: list[Share] = []
        for rank in range(self.size):
            if rank != self._rank:
                share = self._read(rank).get(key)
                if share is None:
                    break
                found.append(Share(*share))
        return found


def _when_of(part: str) -> tuple[str, int]:
    when, _, number = part.split(".")[0].partition("-")
    return when, int(number)


def _due_of(key: str) -> Due:
    name, when, number = key.split("/")
    return Due(name, when, int(number))


def _tasks_of(file: str) -> int:
    """The number of tasks that there were when one of them wrote a file; 0 of other files."""
    found = re.search(r"-of-(\d+)\.", file)
    return int(found[1]) if found else 0


def _lines(part: Path) -> list[str]:
    """Returns a line for each prompt of an evaluation under way; the last may be cut short."""
    try:
        return read_bytes(part).decode().split("\n")[:-1]
    except FileNotFoundError:
        return []


def _line(due: Due, shares: list[Share]) -> str:
    ends = {v for share in shares for v in (share.version, share.version_max) if v >= 0}
    policy = "no policy"  # all of its requests were refused, or there was none
    if ends:
        oldest, newest = min(ends), max(ends)
        policy = f"policy {oldest}" if oldest == newest else f"policies {oldest} to {newest}"
    num_samples = sum(share.num_samples for share in shares)
    masked = sum(share.num_masked for share in shares)
    mean = sum(share.correct for share in shares) / max(num_samples, 1)
    said = f"{mean:.3f}" if num_samples else "no score"
    left_out = f", {masked} left out whose reward failed" if masked else ""
    return f"held-out {due.when}, {policy}: {said} ({due.name}{left_out})"
