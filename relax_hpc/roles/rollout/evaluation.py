"""Held-out evaluation, beside the loop: neither starting nor publishing groups waits for it."""

import asyncio
from collections.abc import Mapping, Sequence

from relax_hpc.config.run import RunConfig
from relax_hpc.environments.record import Record
from relax_hpc.prompts.source import Prompt
from relax_hpc.roles.rollout.episodes import Episodes, seed_of
from relax_hpc.roles.rollout.heldout import Board, Due, Row, Share
from relax_hpc.telemetry.events import EventWriter

PLACES = 4
"""While training goes on, evaluation has one of so many places in the engines. Before and after it
it has all of them: nobody learns from other samples then."""


class Evaluator:
    """Scores this task's share of every held-out set: before, now and then, and after."""

    def __init__(
        self,
        config: RunConfig,
        shares: Mapping[str, Sequence[Prompt]],
        episodes: Episodes,
        events: EventWriter,
        board: Board,
    ) -> None:
        """Asks nobody before it is told of a policy.

        Args:
            shares: of each set in `config.eval`, what this task scores.
            episodes: runs them.
            board: keeps the scores.
        """
        self._config, self._shares, self._episodes = config, shares, episodes
        self._events, self._board = events, board
        self._last: dict[str, int] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    def consider(self, version: int | None, *, trained: int) -> None:
        """Starts what is due: the first policy seen, and then one every `every` versions.

        An engine that starts when steps have been `trained` holds the first policy only until it
        is brought up to date. A set whose evaluation is still under way is looked at again later.
        Raises what an evaluation raised.
        """
        for name in [name for name, task in self._running.items() if task.done()]:
            self._running.pop(name).result()
        if version is None:
            return
        for name, settings in self._config.eval.items():
            if name not in self._last:
                self._last[name] = version
                if trained == 0:
                    self._start(Due(name, "before", 0))
            elif name not in self._running and settings.every:
                number = version // settings.every
                if number > self._last[name] // settings.every:
                    self._last[name] = version
                    self._start(Due(name, "during", number))

    async def finish(self, version: int | None) -> None:
        """Waits for what is under way, and evaluates the last policy if it is there."""
        await asyncio.gather(*self._running.values())
        if version is not None:
            last = [Due(name, "after", 0) for name in self._config.eval]
            await asyncio.gather(*map(self._evaluate, last))

    def _start(self, due: Due) -> None:
        self._running[due.name] = asyncio.create_task(self._evaluate(due))

    async def _evaluate(self, due: Due) -> None:
        """Samples and scores a share of a set, and says what came of it."""
        pool, samples = self._config.rollout_pool, self._config.eval[due.name].samples_per_prompt
        places = pool.max_running_requests * pool.engines_per_task
        if due.when == "during":
            places //= PLACES
        room = asyncio.Semaphore(max(1, places // samples))
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._scored(due, prompt, room))
                for prompt in self._shares[due.name]
            ]
        rows = [row for task in tasks for row in task.result()]
        share = Share.of(rows)
        headline = due.name == next(iter(self._config.eval))
        self._events.emit("eval", headline=headline, **due._asdict(), **share._asdict())
        await asyncio.to_thread(self._board.add, due, share, rows)

    async def _scored(self, due: Due, prompt: Prompt, room: asyncio.Semaphore) -> list[Row]:
        settings = self._config.eval[due.name]
        samples = range(settings.samples_per_prompt)
        key = f"{due.name}/{prompt.index}"
        seeds = [seed_of(self._config.seed, key, sample) for sample in samples]
        records = [Record() for _ in samples]
        how, group = self._episodes.how(settings.temperature), (due, prompt.index)
        async with room:
            episodes = await self._episodes.run(prompt, records, how, group, seeds)
        return [
            Row.of(prompt, sample, episode, self._episodes.texts(episode))
            for sample, episode in zip(samples, episodes, strict=True)
        ]
