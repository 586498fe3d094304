"""A job's reward as its process calls it: one function, or several that are weighted and added."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from relax_hpc.rewards.contract import (
    ENGINES,
    FIELDS,
    Kind,
    Sample,
    Score,
    as_score,
    combined,
    failed,
    is_for,
    kind_of,
    words_of,
)

Function = Callable[..., Any]
Engines = Callable[[], object]


class Reward:
    """Functions that score, of whatever kind, called for a whole group."""

    def __init__(self, functions: "Sequence[Weighted]") -> None:
        self._functions = functions
        kinds = [each.kind for each in functions]
        asked = [kind.pools for kind in kinds if kind.pools is not None]
        self.kind = Kind(
            any(kind.sees_group for kind in kinds),
            any(kind.is_async for kind in kinds),
            tuple(pool for pools in asked for pool in pools) if asked else None,
        )

    async def __call__(
        self, group: Sequence[Sample], deadline_s: float, begin: Callable[[int], None]
    ) -> list[Score]:
        """Scores of all; what raises, or takes too long in an await, is a score with an error.

        Args:
            group: siblings of one prompt.
            deadline_s: for all functions of one sample; for the group, if one of them is given it.
            begin: is told which sample comes next, where one comes after the other.
        """
        if self.kind.sees_group:
            begin(0)
            return await self._scores(group, deadline_s)
        if self.kind.is_async:
            every = await asyncio.gather(*(self._scores([each], deadline_s) for each in group))
            return [score for scores in every for score in scores]
        scores = []
        for number, sample in enumerate(group):
            begin(number)
            scores += await self._scores([sample], deadline_s)
        return scores

    async def _scores(self, group: Sequence[Sample], deadline_s: float) -> list[Score]:
        deadline = Deadline(deadline_s)
        source = group[0].source  # siblings are of one prompt
        functions = [each for each in self._functions if is_for(each.sources, source)]
        if not functions:
            return [failed(f"no term of the reward is for source {source!r}")] * len(group)
        every = [await each.scores(group, deadline) for each in functions]
        if not functions[0].title:
            return every[0]
        return [
            _added(dict(zip(functions, scores, strict=True))) for scores in zip(*every, strict=True)
        ]


class Deadline:
    """The time that functions have together to await others."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until = asyncio.get_running_loop().time() + seconds

    def timeout(self) -> asyncio.Timeout:
        return asyncio.timeout_at(self._until)


class Weighted:
    """A function that scores, as the reward of a job or a term of it."""

    def __init__(
        self,
        function: Function,
        engines: Engines | None = None,
        *,
        title: str = "",
        weight: float = 1.0,
        sources: Sequence[str] = (),
    ) -> None:
        """Makes it callable with a sample.

        Args:
            function: with its settings bound.
            engines: makes what one that asks for them is given; it is called at most once.
            title: name of the term; "" where the reward is this alone.
            weight: what it counts there.
            sources: whose prompts it scores; empty is all.
        """
        self.kind, self.title, self.weight = kind_of(function), title, weight
        self.sources = sources
        self._function = function
        parameters = inspect.signature(function).parameters
        if self.kind.pools is not None and engines is not None:
            self._function = functools.partial(function, **{ENGINES: engines()})
        self._names = [name for name in parameters if name in FIELDS]
        self._takes_sample = "sample" in parameters

    async def scores(self, group: Sequence[Sample], deadline: Deadline) -> list[Score]:
        """Scores of some siblings; of all of them where the function is given the group."""
        if not self.kind.sees_group:
            if not self.kind.is_async:
                return [await self._of_sample(each, deadline) for each in group]
            return await asyncio.gather(*(self._of_sample(each, deadline) for each in group))
        try:
            given = list(await self._call({"group": group}, deadline))
            if len(given) != len(group):
                raise ValueError(f"gave {len(given)} scores for {len(group)} samples")
            return [as_score(each) for each in given]
        except Exception as error:  # noqa: BLE001 - a program of somebody else's
            return [failed(words_of(error, deadline.seconds))] * len(group)

    async def _of_sample(self, sample: Sample, deadline: Deadline) -> Score:
        arguments: dict[str, Any] = {name: getattr(sample, name) for name in self._names}
        if self._takes_sample:
            arguments["sample"] = sample
        try:
            return as_score(await self._call(arguments, deadline))
        except Exception as error:  # noqa: BLE001 - a program of somebody else's
            return failed(words_of(error, deadline.seconds))

    async def _call(self, arguments: dict[str, Any], deadline: Deadline) -> Any:  # noqa: ANN401
        given = self._function(**arguments)
        if isinstance(given, Awaitable):
            async with deadline.timeout():
                return await given
        return given


def _added(scores: dict[Weighted, Score]) -> Score:
    try:
        return combined({each.title: (each.weight, score) for each, score in scores.items()})
    except ValueError as error:  # more parts, or a greater sum, than a score can have
        return failed(str(error))
