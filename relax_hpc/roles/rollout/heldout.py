"""Runs held-out evaluations beside the loop, which never waits for them, and stores the scores.

Each task scores a share of every set. It stores its share of a result, and every sample.
"""

import asyncio
import errno
import itertools
import json
import logging
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from relax_hpc.config.run import RunConfig
from relax_hpc.data.rows import TaskShare
from relax_hpc.data.source import Prompt, PromptSource
from relax_hpc.environments.record import EpisodeRecord
from relax_hpc.roles.rollout.episodes import Episode, Episodes, seed_of, side_by_side
from relax_hpc.runtime.files.records import (
    compact,
    read_bytes,
    read_json,
    write_json,
    write_text,
)
from relax_hpc.runtime.files.storage import delete, names, patiently
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.runtime.telemetry.logs import OF_ALL
from relax_hpc.runtime.text import shorten

log = logging.getLogger(__name__)


class Due(NamedTuple):
    name: str
    when: str
    number: int
    """Number among those of `when`: tasks may reach it at different policies. For the last policy,
    the number of steps: an extended run has another last policy."""

    @property
    def key(self) -> str:
        return f"{self.name}/{self.when}/{self.number}"


def last_of(config: RunConfig) -> list[Due]:
    return [Due(name, "after", config.schedule.num_steps) for name in config.eval]


def awaited_at(config: RunConfig, version: int) -> list[Due]:
    """Returns the evaluations of a policy for which training waits; the last policy's are not
    among them."""
    names = [name for name in config.eval if config.waits_for_eval(name)]
    if version == 0:
        return [Due(name, "before", 0) for name in names]
    if version == config.schedule.num_steps:
        return []
    every = {name: config.eval[name].every for name in names}
    return [Due(n, "during", version // e) for n, e in every.items() if e and version % e == 0]


_LETTERS = 2000
"""Most letters kept of an answer, and of a field of metadata, in every sample."""


class HeldoutRow(NamedTuple):
    prompt: int
    """Line of the file, 0-based, blank lines not counted."""
    sample: int
    """0..n-1 among the prompt's samples."""
    score: float | None
    """None if the reward failed and the job masks failures."""
    parts: Mapping[str, float]
    version: int
    version_max: int
    """Newest one."""
    finish: str
    num_tokens: int
    texts: list[str]
    """The policy's texts, call by call."""
    source: str = ""
    """Subset of the set with the prompt."""
    failed: bool = False
    in_thought: bool = False
    """Whether the last text began inside an earlier thought."""
    answer: str = ""
    """The right one; of a long text beginning and end, as in `metadata`."""
    metadata: Mapping[str, Any] = {}
    """Further fields of the prompt's row; a long one is shortened JSON."""

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
            answer=shorten(prompt.answer, _LETTERS),
            metadata={str(key): _brief(value) for key, value in prompt.metadata.items()},
        )


def _brief(value: object) -> Any:  # noqa: ANN401
    said = compact(value)
    return json.loads(said) if len(said) <= _LETTERS else shorten(said, _LETTERS)


class TaskScore(NamedTuple):
    version: int
    """Oldest policy that sampled a token; -1 if there is none."""
    version_max: int
    """Newest one."""
    correct: float
    num_samples: int
    num_masked: int = 0
    """Samples without a score, because their reward failed."""
    num_tokens: int = 0
    """Sampled ones."""
    num_truncated: int = 0
    """Samples that a limit cut off, masked ones included."""

    @classmethod
    def of(cls, rows: Sequence[HeldoutRow]) -> Self:
        scores = [row.score for row in rows if row.score is not None]
        return cls(
            min((row.version for row in rows if row.version >= 0), default=-1),
            max((row.version_max for row in rows), default=-1),
            sum(scores),
            len(scores),
            len(rows) - len(scores),
            sum(row.num_tokens for row in rows),
            sum(row.finish == "length" for row in rows),
        )


class Begun(NamedTuple):
    """The evaluations of a set that a task began, in any start."""

    done: list[Due]
    left: list[Due]
    """Interrupted after at least one prompt's samples."""


class _Told(NamedTuple):
    """Evaluations of a set by an earlier number of tasks."""

    done: set[Due]
    """Completed by all of them."""
    begun: set[Due]
    """Begun by any of them."""


class ScoreBoard:
    """Collects the tasks' scores. The task that completes an evaluation publishes its result.

    It outlives the task: samples are stored prompt by prompt, each once. After a change of the
    number of tasks, completed evaluations stay, and the others begin anew, since their shares
    differ.
    """

    def __init__(self, paths: RunPaths, rank: int, size: int) -> None:
        self._paths, self._rank = paths, rank
        self.size = size
        self._of_all = threading.Lock()
        """Held while the shares are written: sets are completed in threads."""
        self._told_of: dict[str, _Told] = {}

    def list_begun(self, name: str) -> Begun:
        """Returns the evaluations of a set with stored samples."""
        told, own = self._read_told(name), map(_due_of, self._read(self._rank))
        done = list(dict.fromkeys([*(due for due in own if due.name == name), *sorted(told.done)]))
        left = [Due(name, *_when_of(part.name)) for part in self._parts(name) if _lines(part)]
        begun = dict.fromkeys([*left, *sorted(told.begun)])
        return Begun(done, [due for due in begun if due not in done])

    def count_kept_bytes(self, dues: Collection[Due]) -> int | None:
        """Returns the bytes of stored samples of unfinished evaluations, of the sets of `dues`;
        None if all of these are complete. A waiting task sees progress by it: earlier evaluations
        come first."""
        shares = self._read(self._rank)
        if all(due.key in shares or due in self._read_told(due.name).done for due in dues):
            return None
        num_bytes = 0
        for part in [part for due in dues for part in self._parts(due.name)]:
            with suppress(FileNotFoundError):
                num_bytes += patiently(part, part.stat).st_size
        return num_bytes

    def begin(self, due: Due) -> list[HeldoutRow]:
        lines = _lines(self._part(due))
        write_text(self._part(due), "".join(f"{line}\n" for line in lines))
        return [HeldoutRow(**row) for line in lines for row in json.loads(line)]

    def keep(self, due: Due, rows: Sequence[HeldoutRow]) -> None:
        part, line = self._part(due), json.dumps([row._asdict() for row in rows]) + "\n"
        size = patiently(part, part.stat).st_size

        def write() -> None:
            with part.open("r+b", buffering=0) as file:
                file.truncate(size)  # of an attempt that failed
                file.seek(size)
                if file.write(line.encode()) < len(line.encode()):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(part))

        patiently(part, write, small=True)

    def add(self, due: Due, share: TaskScore, rows: Sequence[HeldoutRow]) -> None:
        """Publishes all samples and the share of this task, and the result if it is complete."""
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
        """Reads the shares of a task, of the current number of tasks or of `size`."""
        return read_json(self._paths.heldout_shares(rank, size or self.size)) or {}

    def _read_told(self, name: str) -> _Told:
        """Reads the evaluations of a set by earlier numbers of tasks."""
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
        folder = self._part(Due(name, "", 0)).parent
        own = f".{self._rank}-of-{self.size}.part"
        return [folder / part for part in names(folder) if part.endswith(own)]

    def _part(self, due: Due) -> Path:
        return self._paths.eval_part(due.name, due.when, due.number, self._rank, self.size)

    def _others(self, key: str) -> list[TaskScore]:
        """Reads the shares of all tasks, up to the first missing one."""
        found: list[TaskScore] = []
        for rank in range(self.size):
            if rank != self._rank:
                share = self._read(rank).get(key)
                if share is None:
                    break
                found.append(TaskScore(*share))
        return found


def _when_of(part: str) -> tuple[str, int]:
    when, _, number = part.split(".")[0].partition("-")
    return when, int(number)


def _due_of(key: str) -> Due:
    name, when, number = key.split("/")
    return Due(name, when, int(number))


def _tasks_of(file: str) -> int:
    """Returns the number of tasks when a file was written; 0 for other files."""
    found = re.search(r"-of-(\d+)\.", file)
    return int(found[1]) if found else 0


def _lines(part: Path) -> list[str]:
    """Returns a line per prompt of an unfinished evaluation; the last may be torn."""
    try:
        return read_bytes(part).decode().split("\n")[:-1]
    except FileNotFoundError:
        return []


def _line(due: Due, shares: list[TaskScore]) -> str:
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
    truncated = sum(share.num_truncated for share in shares) / max(num_samples + masked, 1)
    cut = f", {truncated:.1%} cut off" if truncated else ""
    return f"held-out {due.when}, {policy}: {said} ({due.name}{cut}{left_out})"


_READ_AT_ONCE = 16
"""Held-out prompts whose media are read concurrently."""
PLACES = 4
"""Beside training, evaluations have at least 1/PLACES of the engines' capacity, or of training's
requests in flight if these are fewer. Before and after, they have all of it."""
_LOOK_S = 0.05
"""Pause between looks at the places that training leaves free."""


Also = Callable[[str, Prompt, Sequence[int], Sequence[Episode]], None]
"""Called with the episodes of a prompt of a set, and their seeds."""


Records = Mapping[Any, Sequence[EpisodeRecord]]
"""Records of episodes under way, by prompt."""


class Room:
    """Places in the engines, given to prompts of all sets in order of request."""

    def __init__(self, places: int, trained: Records, own: Records) -> None:
        """Args:
        trained: episodes of training, which go first.
        own: episodes of evaluations.
        """
        self._places, self._trained, self._own = places, trained, own
        self._taken = 0
        self._line, self._freed = asyncio.Lock(), asyncio.Event()

    @asynccontextmanager
    async def take(self, count: int, least: int) -> AsyncIterator[None]:
        """Waits for `count` places, among the `least` of evaluations or those that training leaves
        free; a request for more than all gets all."""
        async with self._line:
            while self._taken and not self._has_room(count, least):
                self._freed.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), _LOOK_S)
            self._taken += count
        try:
            yield
        finally:
            self._taken -= count
            self._freed.set()

    def _has_room(self, count: int, least: int) -> bool:
        if self._taken + count <= least:
            return True
        # Full caches may leave fewer places than there seem to be. Training would then stand in
        # line behind all that waits for one, so little does.
        waiting = count + sum(not _has_tokens(record) for record in _each(self._own))
        asking = sum(_is_asking(record) for record in _each(self._trained))
        most = max(self._places // PLACES, count)
        return waiting <= most and self._taken + count + asking <= self._places


def _each(records: Records) -> Iterable[EpisodeRecord]:
    return itertools.chain.from_iterable(records.values())


def _has_tokens(record: EpisodeRecord) -> bool:
    return any(call.draft.token_ids for call in record.calls)


def _is_asking(record: EpisodeRecord) -> bool:
    """Whether an episode has, or will soon have, a request to an engine."""
    return not record.calls or record.calls[-1].finish is None


class Evaluator:
    """Scores this task's share of every held-out set: before, during and after training."""

    def __init__(
        self,
        config: RunConfig,
        shares: Mapping[str, Sequence[Prompt]],
        episodes: Episodes,
        events: EventWriter,
        board: ScoreBoard,
        also: Also = lambda *_: None,
        trained: Records = MappingProxyType({}),
    ) -> None:
        """Samples nothing before it knows a policy.

        Args:
            shares: this task's prompts of each set in `config.eval`.
            board: keeps the scores, also those of an earlier start of this task.
            also: called with all episodes of a prompt.
            trained: episodes of training now.
        """
        self._config, self._shares, self._episodes = config, shares, episodes
        self._events, self._board, self._also = events, board, also
        self._last = last_of(config)
        self._numbers: dict[str, int] = {}
        """Number of each set's last evaluation during training, or 0."""
        self._left: dict[str, list[Due]] = {}
        """Evaluations that an earlier start left incomplete, without those of the last policy."""
        self._done = set[Due]()
        self._running: dict[str, asyncio.Task[None]] = {}
        pool, schedule = config.rollout_pool, config.schedule
        places = pool.max_running_requests * pool.engines_per_task
        batch = schedule.prompts_per_step * config.rollout.samples_per_prompt
        in_flight = (schedule.max_staleness + 1) * batch // pool.num_hosts
        self._records: dict[tuple[Due, int], list[EpisodeRecord]] = {}
        self._room = Room(places, trained, self._records)
        self._places, self._least = places, min(places, in_flight) // PLACES
        for name in config.eval:
            begun = board.list_begun(name)
            self._left[name] = [due for due in begun.left if due not in self._last]
            self._done |= {*begun.done}
            if both := [*begun.done, *begun.left]:
                self._numbers[name] = max(self._number(due) for due in both)

    @classmethod
    async def of(
        cls,
        config: RunConfig,
        paths: RunPaths,
        share: TaskShare,
        sources: Mapping[str, PromptSource],
        episodes: Episodes,
        events: EventWriter,
        also: Also = lambda *_: None,
        trained: Records = MappingProxyType({}),
    ) -> Self:
        """Reads the task's share of the prompts of each set."""
        prompts = await heldout_shares(config, share, sources)
        return cls(config, prompts, episodes, events, ScoreBoard(paths, *share), also, trained)

    def consider(self, version: int | None, *, trained: int) -> None:
        """Starts due evaluations: of the first policy seen, then one every `every` versions, which
        the current policy may have passed unless training waits for it.

        An engine that starts when steps have been `trained` holds the first policy only until it is
        updated. A set still being evaluated is considered again later. Evaluations interrupted in
        an earlier start come first, and continue with the current policy. Raises the error of an
        evaluation.
        """
        for name in [name for name, task in self._running.items() if task.done()]:
            self._running.pop(name).result()
        if version is None:
            return
        for name in self._config.eval:
            if name not in self._running and (due := self._due(name, version, trained)):
                if due in awaited_at(self._config, version):
                    least, oldest = 0, version  # training leaves it all places in the end
                else:
                    beside = trained > 0 or due.when == "during"
                    least, oldest = self._least if beside else self._places, 0
                self._running[name] = asyncio.create_task(self._evaluate(due, least, oldest))

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    @property
    def owes_last(self) -> bool:
        return any(due not in self._done for due in self._last)

    async def finish(self, version: int | None) -> None:
        """Waits for running evaluations, and evaluates the last policy if it is there."""
        await asyncio.gather(*self._running.values())
        if version is not None:
            left = [due for each in self._left.values() for due in each]
            dues = [due for due in (*left, *self._last) if due not in self._done]
            await asyncio.gather(*(self._evaluate(due, self._places) for due in dues))

    def _number(self, due: Due) -> int:
        return self._during(due.name, due.number) if due.when == "after" else due.number

    def _during(self, name: str, version: int) -> int:
        every = self._config.eval[name].every
        return version // every if every else 0

    def _due(self, name: str, version: int, trained: int) -> Due | None:
        if self._config.waits_for_eval(name):
            return self._due_alone(name, version, trained)
        if self._left[name]:
            return self._left[name].pop(0)
        number = self._during(name, version)
        if name not in self._numbers:
            self._numbers[name] = number
            return Due(name, "before", 0) if trained == 0 else None
        if number > self._numbers[name]:
            self._numbers[name] = number
            is_last = number * self._config.eval[name].every == self._config.schedule.num_steps
            return None if is_last else Due(name, "during", number)  # that one is made after
        return None

    def _due_alone(self, name: str, version: int, trained: int) -> Due | None:
        """Does as `_due` for a set of which one policy samples an evaluation. One that was left may
        be of a policy that is to come again."""
        left = self._left[name]
        awaited = [due for due in awaited_at(self._config, version) if due.name == name]
        passed = [due for due in left if due.number * self._config.eval[name].every < version]
        for due in [*awaited * (version > 0 or trained == 0), *passed]:
            if due not in self._done:
                self._left[name] = [each for each in left if each != due]
                return due
        return None

    async def _evaluate(self, due: Due, least: int, min_version: int = 0) -> None:
        """Samples and scores a share of a set, and publishes the result.

        Args:
            due: the evaluation; samples kept before are not repeated.
            least: places that it need not leave to training.
            min_version: oldest policy that may sample.
        """
        samples, line = self._config.eval[due.name].samples_per_prompt, asyncio.Lock()
        begun = time.monotonic()
        rows = await asyncio.to_thread(self._board.begin, due)
        kept = {row.prompt for row in rows}

        async def score_one(prompt: Prompt) -> list[HeldoutRow]:
            async with self._room.take(samples, least):
                found = await self._score(due, prompt, min_version)
            async with line:
                await asyncio.to_thread(self._board.keep, due, found)
            return found

        async with side_by_side() as group:
            tasks = [
                group.create_task(score_one(prompt))
                for prompt in self._shares[due.name]
                if prompt.index not in kept
            ]
        rows = sorted([*rows, *(row for task in tasks for row in task.result())])
        share = TaskScore.of(rows)
        headline = due.name == next(iter(self._config.eval))
        seconds = round(time.monotonic() - begun, 3)
        told = {"headline": headline, "tasks": self._board.size, "seconds": seconds}
        self._events.emit("eval", **told, **due._asdict(), **share._asdict())
        await asyncio.to_thread(self._board.add, due, share, rows)
        self._done.add(due)

    async def _score(self, due: Due, prompt: Prompt, min_version: int) -> list[HeldoutRow]:
        settings = self._config.eval[due.name]
        samples = range(settings.samples_per_prompt)
        key = f"{due.name}/{prompt.index}"
        seeds = [seed_of(self._config.seed, key, sample) for sample in samples]
        records = self._records[due, prompt.index] = [EpisodeRecord() for _ in samples]
        how = self._episodes.how_heldout(settings)._replace(min_version=min_version)
        group = (*due, prompt.index)
        episodes = await self._episodes.run(prompt, records, how, group, seeds)
        del self._records[due, prompt.index]
        self._also(due.name, prompt, seeds, episodes)
        masks = self._config.reward.masks_errors
        return [
            HeldoutRow.of(
                prompt,
                sample,
                episode,
                self._episodes.texts(episode),
                masks_errors=masks,
                in_thought=self._episodes.is_in_thought(episode),
            )
            for sample, episode in zip(samples, episodes, strict=True)
        ]


async def heldout_shares(
    config: RunConfig, share: TaskShare, sources: Mapping[str, PromptSource]
) -> dict[str, list[Prompt]]:
    shares = {}
    for name, settings in config.eval.items():
        source = sources[name]
        own = range(share.number, min(settings.num_prompts, len(source)), share.size)
        shares[name] = list[Prompt]()
        for first in range(0, len(own), _READ_AT_ONCE):
            some = own[first : first + _READ_AT_ONCE]
            shares[name] += await asyncio.gather(*map(source.fetch, some))
    return shares
