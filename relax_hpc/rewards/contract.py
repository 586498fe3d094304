"""The contract of rewards: what one is given, what it returns, and which functions are one."""

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from relax_hpc.errors import ConfigError, first_line

_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to a prompt."""

    response: str
    """Text, without special tokens."""
    prompt: str | Sequence[Mapping[str, Any]] = ""
    """Text or chat messages, as in the data."""
    answer: str = ""
    """Answer in the data."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the line of the data."""
    finish: str = "stop"
    """End of the response: `stop`, `length` (it was cut), or `abort`."""
    num_tokens: int = 0
    """Length of the response."""


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of a sample."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named numbers that the value was made of."""
    error: str | None = None
    """Reason why there is none; the value is 0 then."""


class Kind(NamedTuple):
    """The way in which a reward wants to be called."""

    sees_group: bool
    """It is called for all siblings at once; else for each."""
    is_async: bool
    """It waits for others, so that a worker process calls it for many at a time."""
    pools: tuple[str, ...] | None = None
    """The engine pools that it says it asks; None if it asks none, empty if it does not say which.
    """


FIELDS = tuple(Sample.__dataclass_fields__)
TAKES = f"`group`, `sample`, or fields of a sample ({', '.join(FIELDS)}), and `engines`"
ENGINES = "engines"
"""The parameter of a reward that asks engines of the run; `pools` of the function names them."""


def kind_of(function: Callable[..., Any]) -> Kind:
    """Tells how to call a reward: each parameter gets what the name says.

    Raises:
        ConfigError: a parameter has another name, or nothing of a sample is asked for.
    """
    parameters = inspect.signature(function).parameters.values()
    asked = {each.name for each in parameters if each.default is each.empty and _is_plain(each)}
    asked |= {each.name for each in parameters if each.name in FIELDS}
    asks = ENGINES in asked
    asked -= {ENGINES}
    odd = [str(each) for each in parameters if not _is_plain(each)]
    odd += sorted(asked - {"group", "sample", *FIELDS})
    if odd:
        raise ConfigError(f"takes `{odd[0]}`, which nothing is known for; it may take {TAKES}")
    if not asked or ("group" in asked and len(asked) > 1):
        raise ConfigError(
            f"takes ({', '.join(sorted(asked))}); let it take `group` alone, or {TAKES}"
        )
    is_async = inspect.iscoroutinefunction(function)
    if asks and not is_async:
        raise ConfigError("takes `engines`, which are waited for; write `async def`")
    pools = tuple(map(str, getattr(function, "pools", ()))) if asks else None
    return Kind("group" in asked, is_async, pools)


def _is_plain(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


class Reward:
    """A function that scores, of whatever kind, called for a whole group."""

    def __init__(
        self, function: Callable[..., Any], engines: Callable[[], object] | None = None
    ) -> None:
        """`engines` makes what a reward that asks for them is given; it is called at most once."""
        self.kind = kind_of(function)
        self._function = function
        if self.kind.pools is not None and engines is not None:
            self._function = functools.partial(function, engines=engines())
        self._names = [n for n in inspect.signature(function).parameters if n in FIELDS]
        self._takes_sample = "sample" in inspect.signature(function).parameters

    async def __call__(
        self, group: Sequence[Sample], deadline_s: float, begin: Callable[[int], None]
    ) -> list[Score]:
        """Scores of all; what raises, or takes too long in an await, is a score with an error.

        Args:
            group: siblings of one prompt.
            deadline_s: of each call.
            begin: is told which sample comes next, where one comes after the other.
        """
        if self.kind.sees_group:
            begin(0)
            return await self._of_group(group, deadline_s)
        if self.kind.is_async:
            return await asyncio.gather(*(self._of_sample(each, deadline_s) for each in group))
        scores = []
        for number, sample in enumerate(group):
            begin(number)
            scores.append(await self._of_sample(sample, deadline_s))
        return scores

    async def _of_group(self, group: Sequence[Sample], deadline_s: float) -> list[Score]:
        try:
            given = list(await self._call({"group": group}, deadline_s))
            if len(given) != len(group):
                raise ValueError(f"gave {len(given)} scores for {len(group)} samples")
            return [as_score(each) for each in given]
        except Exception as error:  # noqa: BLE001 - a program of somebody else's
            return [Score(0.0, error=_words(error, deadline_s))] * len(group)

    async def _of_sample(self, sample: Sample, deadline_s: float) -> Score:
        arguments: dict[str, Any] = {name: getattr(sample, name) for name in self._names}
        if self._takes_sample:
            arguments["sample"] = sample
        try:
            return as_score(await self._call(arguments, deadline_s))
        except Exception as error:  # noqa: BLE001 - a program of somebody else's
            return Score(0.0, error=_words(error, deadline_s))

    async def _call(self, arguments: dict[str, Any], deadline_s: float) -> Any:  # noqa: ANN401
        given = self._function(**arguments)
        if isinstance(given, Awaitable):
            async with asyncio.timeout(deadline_s):
                return await given
        return given


def as_score(given: object) -> Score:
    """Makes a score of what a reward returned for one sample.

    Raises:
        TypeError: it is neither a number nor a score.
        ValueError: it is not finite.
    """
    score = given if isinstance(given, Score) else Score(_number(given))
    value = _number(score.value)
    parts = {str(name): _number(part) for name, part in score.parts.items()}
    for name, number in {"the reward": value, **parts}.items():
        if not math.isfinite(number):
            raise ValueError(f"{name} is {number}")
    return Score(value, parts, None if score.error is None else _cut(str(score.error)))


def _number(given: object) -> float:
    if isinstance(given, str) or not hasattr(type(given), "__float__"):
        raise TypeError(f"gave {_cut(repr(given))}, which is no number")
    return float(given)  # type: ignore[arg-type]


def _words(error: Exception, deadline_s: float) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return f"took longer than {deadline_s:g} s"
    return _cut(f"{type(error).__name__}: {first_line(error)}")


def _cut(text: str) -> str:
    return text[:_SHOWN_CHARACTERS]
