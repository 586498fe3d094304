"""Held-out evaluation, beside the loop: neither starting nor publishing groups waits for it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from relax_hpc.config.run import RunConfig
from relax_hpc.environments.record import Record
from relax_hpc.prompts.source import Prompt
from relax_hpc.roles.rollout.episodes import Episode, Episodes, seed_of
from relax_hpc.roles.rollout.heldout import Board, Due, Row, Share, last_of
from relax_hpc.roles.rollout.side_by_side import side_by_side
from relax_hpc.telemetry.events import EventWriter

PLACES = 4
"""While training goes on, all evaluations together have one of so many places in the engines, or of
the requests that training has in flight if these are fewer. Before and after it they have all
places: nobody learns from other samples then."""


Also = Callable[[str, Prompt, Sequence[int], Sequence[Episode]], None]
"""Takes the episodes of a prompt of a set, with their seeds."""


class Room:
    """Places in the engines, given to prompts of all sets in the order in which they ask."""

    def __init__(self, places: int) -> None:
        self._places, self._taken = places, 0
        self._line, self._freed = asyncio.Lock(), asyncio.Event()

    @asynccontextmanager
    async def take(self, count: int) -> AsyncIterator[None]:
        """Waits for so many places. Who wants more than there are has all of them alone."""
        async with self._line:
            while self._taken and self._taken + count > self._places:
                self._freed.clear()
                await self._freed.wait()
            self._taken += count
        try:
            yield
        finally:
            self._taken -= count
            self._freed.set()


class Evaluator:
    """Scores this task's share of every held-out set: before, now and then, and after."""

    def __init__(
        self,
        config: RunConfig,
        shares: Mapping[str, Sequence[Prompt]],
        episodes: Episodes,
        events: EventWriter,
        board: Board,
        also: Also = lambda *_: None,
    ) -> None:
        """Asks nobody before it is told of a policy.

        Args:
            shares: of each set in `config.eval`, what this task scores.
            episodes: runs them.
            board: keeps the scores, also those of an earlier start of this task.
            also: is given all that comes of a prompt.
        """
        self._config, self._shares, self._episodes = config, shares, episodes
        self._events, self._board, self._also = events, board, also
        self._last = last_of(config)
        self._numbers: dict[str, int] = {}
        """Number of the last evaluation during training, or 0, of each set that was looked at."""
        self._left: dict[str, list[Due]] = {}
        """Evaluations that an earlier start did not complete, but for those of the last policy."""
        self._done = set[Due]()
        """Evaluations that it did."""
        self._running: dict[str, asyncio.Task[None]] = {}
        pool, schedule = config.rollout_pool, config.schedule
        places = pool.max_running_requests * pool.engines_per_task
        batch = schedule.prompts_per_step * config.rollout.samples_per_prompt
        in_flight = (schedule.max_staleness + 1) * batch // pool.num_hosts
        self._room = Room(places)
        self._room_beside = Room(min(places, in_flight) // PLACES)
        for name in config.eval:
            begun = board.begun(name)
            self._left[name] = [due for due in begun.left if due not in self._last]
            self._done |= {*begun.done}
            if both := [*begun.done, *begun.left]:
                self._numbers[name] = max(self._number(due) for due in both)

    def consider(self, version: int | None, *, trained: int) -> None:
        """Starts what is due: the first policy seen, and then one every `every` versions.

        An engine that starts when steps have been `trained` holds the first policy only until it
        is brought up to date. A set whose evaluation is still under way is looked at again later.
        What was broken off by the end of an earlier start comes first, and is completed by the
        policy of now. Raises what an evaluation raised.
        """
        for name in [name for name, task in self._running.items() if task.done()]:
            self._running.pop(name).result()
        if version is None:
            return
        for name in self._config.eval:
            if name not in self._running and (due := self._due(name, version, trained)):
                is_beside = trained > 0 or due.when == "during"
                self._running[name] = asyncio.create_task(self._evaluate(due, beside=is_beside))

    @property
    def is_busy(self) -> bool:
        """Whether an evaluation is under way."""
        return bool(self._running)

    @property
    def owes_last(self) -> bool:
        """Whether the last policy is still to be evaluated."""
        return any(due not in self._done for due in self._last)

    async def finish(self, version: int | None) -> None:
        """Waits for what is under way, and evaluates the last policy if it is there."""
        await asyncio.gather(*self._running.values())
        if version is not None:
            left = [due for each in self._left.values() for due in each]
            dues = [due for due in (*left, *self._last) if due not in self._done]
            await asyncio.gather(*(self._evaluate(due, beside=False) for due in dues))

    def _number(self, due: Due) -> int:
        """Number among those during training that an evaluation stands for, or 0."""
        return self._during(due.name, due.number) if due.when == "after" else due.number

    def _during(self, name: str, version: int) -> int:
        """Number of the evaluation that a policy is due for during training."""
        every = self._config.eval[name].every
        return version // every if every else 0

    def _due(self, name: str, version: int, trained: int) -> Due | None:
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

    async def _evaluate(self, due: Due, *, beside: bool) -> None:
        """Samples and scores a share of a set, and says what came of it.

        Args:
            due: which; what is kept of it is not sampled again.
            beside: training goes on, and has the other places.
        """
        samples, line = self._config.eval[due.name].samples_per_prompt, asyncio.Lock()
        room = self._room_beside if beside else self._room
        rows = await asyncio.to_thread(self._board.begin, due)
        kept = {row.prompt for row in rows}

        async def scored(prompt: Prompt) -> list[Row]:
            async with room.take(samples):
                found = await self._scored(due, prompt)
            async with line:
                await asyncio.to_thread(self._board.keep, due, found)
            return found

        async with side_by_side() as group:
            tasks = [
                group.create_task(scored(prompt))
                for prompt in self._shares[due.name]
                if prompt.index not in kept
            ]
        rows = sorted([*rows, *(row for task in tasks for row in task.result())])
        share = Share.of(rows)
        headline = due.name == next(iter(self._config.eval))
        told = {"headline": headline, "tasks": self._board.size}
        self._events.emit("eval", **told, **due._asdict(), **share._asdict())
        await asyncio.to_thread(self._board.add, due, share, rows)

    async def _scored(self, due: Due, prompt: Prompt) -> list[Row]:
        settings = self._config.eval[due.name]
        samples = range(settings.samples_per_prompt)
        key = f"{due.name}/{prompt.index}"
        seeds = [seed_of(self._config.seed, key, sample) for sample in samples]
        records = [Record() for _ in samples]
        how, group = self._episodes.how_heldout(settings), (*due, prompt.index)
        episodes = await self._episodes.run(prompt, records, how, group, seeds)
        self._also(due.name, prompt, seeds, episodes)
        masks = self._config.reward.masks_errors
        return [
            Row.of(
                prompt,
                sample,
                episode,
                self._episodes.texts(episode),
                masks_errors=masks,
                in_thought=self._episodes.is_in_thought(episode),
            )
            for sample, episode in zip(samples, episodes, strict=True)
        ]
