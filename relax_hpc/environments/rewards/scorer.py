"""Scores groups in worker processes, so that sampling never waits for a reward's CPU time.

Ends a run whose reward fails too often.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from relax_hpc.config.rollout import RewardConfig
from relax_hpc.environments.rewards import registry
from relax_hpc.environments.rewards.contract import Sample, Score, fail
from relax_hpc.environments.rewards.process import START_S, Worker, WorkerLimits, WorkerLostError
from relax_hpc.errors import ConfigError, RewardError
from relax_hpc.runtime.telemetry.events import EventWriter

log = logging.getLogger(__name__)
T = TypeVar("T")

GROUPS_PER_WORKER = 64
"""Concurrent groups per process for an async reward."""
SAY_EVERY_S = 30.0
"""Seconds between log lines, and events, about failed rewards."""
STARTS, START_AGAIN_S = 5, 2.0
"""Attempts to replace a worker, and seconds between them."""


class Scorer:
    """A reward's worker processes, and a spare one.

    A sample that raises, hangs, or kills its process gets an error, and its terms' values for
    failure. As a context manager it ends every process at the end.
    """

    def __init__(
        self,
        config: RewardConfig,
        events: EventWriter | None = None,
        run_dir: Path | None = None,
        *,
        start_s: float = START_S,
    ) -> None:
        """Counts errors in `events`; a reward may use the engines of the run in `run_dir`, and has
        `start_s` seconds to be imported."""
        self._run_dir = run_dir
        self._config, self._num_workers = config, config.advanced.workers
        self._limits = limits_of(config)._replace(start_s=start_s)
        self._terms = list[registry.Term]()
        self._places_per_worker, self._sees_group = 1, False
        self._free = asyncio.Queue[Worker | Exception]()
        """Holds a worker once per group that it can take; an error, if a lost worker could not
        be replaced."""
        self._workers, self._retired = set[Worker](), set[Worker]()
        self._spare: asyncio.Task[Worker] | None = None
        self._background = set[asyncio.Task[Any]]()
        self._one_alone = asyncio.Lock()
        self._anew = dict[Worker, _Anew]()
        """Keyed by the lost process."""
        self._reports = [_ErrorReport(events, heldout=heldout) for heldout in (False, True)]

    async def __aenter__(self) -> Self:
        self._terms = registry.terms_of(self._config)
        try:
            first = await self._start()
            self._places_per_worker = GROUPS_PER_WORKER if first.kind.is_async else 1
            self._sees_group = first.kind.sees_group
            rest = [await self._start() for _ in range(self._num_workers - 1)]
        except ConfigError as error:
            await self.__aexit__()
            raise ConfigError(f"{error}; correct it") from None
        for _ in range(self._places_per_worker):
            for worker in (first, *rest):
                self._free.put_nowait(worker)
        self._spare = asyncio.create_task(self._start_again())
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._background, *([self._spare] if self._spare else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.end() for worker in self._workers))
        for report in self._reports:
            report.send(last=True)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    async def score(self, group: Sequence[Sample], *, heldout: bool = False) -> list[Score]:
        """Scores the siblings of a prompt; counts errors of held-out ones separately.

        After a cancellation the worker finishes, and the result is dropped.
        """
        if not group:
            return []
        scores = await asyncio.shield(self._in_background(self._score(group)))
        return self.note(scores, group[0].source, heldout=heldout)

    def note(self, scores: Sequence[Score], source: str, *, heldout: bool = False) -> list[Score]:
        """Counts scores of a prompt of `source`, also an environment's; sets the value of failed
        ones."""
        self._reports[heldout].add(scores)
        # Here, since who ended a process does not say which of its terms did so.
        terms = [term for term in self._terms if term.is_for(source)]
        value = sum(term.if_failed for term in terms)
        return [each if each.error is None else replace(each, value=value) for each in scores]

    async def _score(self, group: Sequence[Sample]) -> list[Score]:
        done = dict[int, Score]()
        while open_ := [number for number in range(len(group)) if number not in done]:
            found = await self._ask([group[number] for number in open_])
            done |= {open_[place]: score for place, score in found.items()}
        return [done[number] for number in range(len(group))]

    async def _ask(self, group: Sequence[Sample]) -> dict[int, Score]:
        """Scores at least one of them; the others must be requested again."""
        lost, scores = None, list[Score]()
        async with self._place_at_worker() as worker:
            try:
                scores = await worker.ask(group)
            except WorkerLostError as error:
                lost = error
            has_grown = not worker.usable
        if lost is None:
            return await self._whole(group, scores, has_grown=has_grown)
        if self._places_per_worker > 1:  # any of those under way may have ended it, or somebody
            return await self._together(group, worker)
        if lost.guilty is None:
            return dict(enumerate(await self._alone(group)))
        guilty = range(len(group)) if self._sees_group else [lost.guilty]
        return dict.fromkeys(guilty, fail(str(lost)))

    async def _together(self, group: Sequence[Sample], lost: Worker) -> dict[int, Score]:
        """Scores groups of a lost process together in a new one; if that is lost, too, each goes
        alone."""
        if lost not in self._anew:
            self._anew[lost] = _Anew(self._in_background(self._start_again()))
        anew = self._anew[lost]
        anew.groups += 1
        try:
            worker = await asyncio.shield(anew.start)
            scores = await worker.ask(group)
            has_grown = not worker.usable
        except WorkerLostError:
            return dict(enumerate(await self._alone(group)))
        finally:
            anew.groups -= 1
            if not anew.groups:
                self._anew.pop(lost, None)
                self._in_background(self._end_anew(anew))
        return await self._whole(group, scores, has_grown=has_grown)

    async def _whole(
        self, group: Sequence[Sample], scores: Sequence[Score], *, has_grown: bool
    ) -> dict[int, Score]:
        """Returns the scores of a group; repeats them if the process has grown over them."""
        found = dict(enumerate(scores))
        return found | await self._again(group, found) if has_grown else found

    async def _end_anew(self, anew: "_Anew") -> None:
        with suppress(ConfigError, OSError):  # who asked for it has been told
            await self._end(await anew.start)

    async def _again(
        self, group: Sequence[Sample], scores: Mapping[int, Score]
    ) -> dict[int, Score]:
        """Rescores failures that an earlier sample's memory use may have caused."""
        places = [place for place, score in scores.items() if score.error is not None]
        if places and self._sees_group:
            places = [*scores]
        found = await self._alone([group[place] for place in places]) if places else []
        return dict(zip(places, found, strict=True))

    async def _alone(self, group: Sequence[Sample]) -> list[Score]:
        """Scores samples one by one in a process without others."""
        parts = [group] if self._sees_group else [[sample] for sample in group]
        scores, worker = list[Score](), None
        async with self._one_alone:
            for part in parts:
                worker = worker or await self._start_again()
                try:
                    scores += await worker.ask(part)
                except WorkerLostError as error:
                    scores += [fail(str(error))] * len(part)
                if not worker.usable:
                    await self._end(worker)
                    worker = None
            if worker:
                await self._end(worker)
        return scores

    @asynccontextmanager
    async def _place_at_worker(self) -> AsyncIterator[Worker]:
        worker = await self._free_worker()
        try:
            yield worker
        finally:
            if worker.usable:
                self._free.put_nowait(worker)
            else:
                self._retire(worker)

    async def _free_worker(self) -> Worker:
        while True:
            found = await self._free.get()
            if isinstance(found, Exception):
                self._free.put_nowait(found)  # for all that wait
                raise found
            if found.usable:
                return found
            self._retire(found)

    def _retire(self, worker: Worker) -> None:
        """Replaces a lost or grown worker; only once, however often it is called."""
        if worker not in self._retired:
            self._retired.add(worker)
            spare = self._spare or asyncio.create_task(self._start_again())
            self._spare = asyncio.create_task(self._start_again())
            self._in_background(self._replace(worker, spare))

    async def _replace(self, worker: Worker, spare: "asyncio.Task[Worker]") -> None:
        try:
            successor = await spare
        except (ConfigError, OSError) as error:
            self._free.put_nowait(error)
            return
        for _ in range(self._places_per_worker):
            self._free.put_nowait(successor)
        await worker.drain()
        await self._end(worker)

    async def _start(self) -> Worker:
        worker = await Worker.start(self._terms, self._limits, self._run_dir)
        self._workers.add(worker)
        return worker

    async def _start_again(self) -> Worker:
        for _ in range(STARTS - 1):
            try:
                return await self._start()
            except (ConfigError, OSError) as error:
                log.warning("a process for rewards does not start: %s", error)
                await asyncio.sleep(START_AGAIN_S)
        return await self._start()

    async def _end(self, worker: Worker) -> None:
        await asyncio.shield(worker.end())
        self._workers.discard(worker)
        self._retired.discard(worker)

    def _in_background(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


@dataclass
class _Anew:
    """A process for the groups that were pending when another was lost."""

    start: "asyncio.Task[Worker]"
    groups: int = 0
    """Pending groups."""


class _ErrorReport:
    """Counts errors, and reports them now and then."""

    def __init__(self, events: EventWriter | None, *, heldout: bool) -> None:
        self._events, self._heldout, self._said_at = events, heldout, -SAY_EVERY_S
        self._samples = self._errors = 0
        self._first, self._has_said = "", False

    def add(self, scores: Sequence[Score]) -> None:
        errors = [score.error for score in scores if score.error is not None]
        self._samples += len(scores)
        self._errors += len(errors)
        self._first = self._first or next(iter(errors), "")
        if time.monotonic() - self._said_at >= SAY_EVERY_S:
            self.send()

    def send(self, *, last: bool = False) -> None:
        """Reports failures since the last time, if any.

        The last report also has the number scored since, so that events add up.
        """
        if not self._errors and not (last and self._has_said and self._samples):
            return
        self._has_said = True
        if self._errors:
            log.warning(
                "%d of %d %s failed; the first: %s",
                self._errors,
                self._samples,
                "held-out rewards" if self._heldout else "rewards",
                self._first,
            )
        if self._events:
            self._events.emit(
                "reward_errors",
                heldout=self._heldout,
                num_samples=self._samples,
                num_errors=self._errors,
                first=self._first,
            )
        self._samples, self._errors, self._first = 0, 0, ""
        self._said_at = time.monotonic()


def limits_of(config: RewardConfig) -> WorkerLimits:
    return WorkerLimits(config.deadline_s, int(config.advanced.memory_gib * (1 << 30)))


WINDOW, LEAST = 500, 200
"""Newest samples considered, and the least number before a decision."""
_SHOWN = 5
"""Most frequent reasons shown."""


class ErrorLimit:
    """Tracks how the newest samples were scored.

    Args:
        most: fraction of `WINDOW` that may fail.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._newest = deque[tuple[str, str | None]](maxlen=WINDOW)

    def add(self, scores: Mapping[str, Score]) -> None:
        """Adds scores by sample name.

        Raises:
            RewardError: too many have failed; none of these may be trained on.
        """
        self._newest.extend((name, score.error) for name, score in scores.items())
        failed = [(name, error) for name, error in self._newest if error is not None]
        if len(self._newest) < LEAST or len(failed) <= self._most * WINDOW:
            return
        first = {error: name for name, error in reversed(failed)}
        reasons = Counter(error for _, error in failed).most_common(_SHOWN)
        named = "; ".join(f"{count} x {error}, first in {first[error]}" for error, count in reasons)
        raise RewardError(
            f"reward.advanced.most_errors = {self._most:g}: the reward failed for {len(failed)} of "
            f"the last {len(self._newest)} samples, among them, by guid/sibling, {named}; correct "
            "the reward, or allow more, and submit a run of another name: resume keeps both"
        )
