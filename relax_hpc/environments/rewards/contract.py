"""Defines the contract of rewards: arguments, results, which functions qualify, and their calls.

A job's reward is one function, or a weighted sum of several.
"""

import asyncio
import functools
import inspect
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from relax_hpc.errors import ConfigError, ends_of, show
from relax_hpc.runtime.files.user_programs import describe_call_error
from relax_hpc.runtime.text import wrong

_SHOWN_CHARACTERS = 300
_REASON_CHARACTERS = 900
MOST_PARTS, MOST_CHARACTERS = 64, 100
"""Most parts of a score, and characters of a part's name."""
_FLOAT32 = 3.4e38


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to a prompt."""

    response: str
    """Without special tokens."""
    prompt: str | Sequence[Mapping[str, Any]] = ""
    """Text or chat messages, as in the data."""
    answer: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the row, as JSON values."""
    finish: str = "stop"
    """`stop`, `length` (cut off), or `abort`."""
    num_tokens: int = 0
    source: str = ""
    """The prompt's data set, if there are several; for a held-out set its name, unless the row says
    otherwise."""
    in_thought: bool = False
    """Whether the prompt opened a thought, so that the response begins inside it."""


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of a sample."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named numbers that add up to the value. A name with a slash, "format/tags", is part of a
    part, and is not added."""
    error: str | None = None
    """Reason for a missing score; the value is then 0, or the reward's lowest."""


class Kind(NamedTuple):
    """How to call a reward."""

    sees_group: bool
    """Called once for all siblings; else for each."""
    is_async: bool
    """Waits for others, so that a worker process runs many calls at once."""
    pools: tuple[str, ...] | None = None
    """The engine pools that it names; None if it uses none, empty if it does not say which."""


FIELDS = tuple(Sample.__dataclass_fields__)
TAKES = f"`group`, `sample`, or fields of a sample ({', '.join(FIELDS)}), and `engines`"
ENGINES = "engines"
"""Parameter of a reward that uses engines of the run; `pools` of the function names them."""


def settings_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns a reward's settings: keyword-only parameters with a default.

    Excludes fields of a sample.
    """
    parameters = inspect.signature(function).parameters
    given = {"group", "sample", ENGINES, *FIELDS}
    return {
        name: each
        for name, each in parameters.items()
        if each.kind is each.KEYWORD_ONLY and each.default is not each.empty and name not in given
    }


def check_settings(key: str, function: Callable[..., Any], args: Mapping[str, object]) -> None:
    """Checks a reward's settings by name and type.

    Args:
        key: of the table in the job, e.g. "reward.args".

    Raises:
        ConfigError: the function has no such setting, or its annotation allows no such value.
    """
    known = settings_of(function)
    types = _annotations(function) if args else {}
    for name, value in args.items():
        if name not in known:
            there = f"there are {', '.join(known)}" if known else "this reward has none; remove it"
            raise ConfigError(f"{key}.{name} = {show(value)}: no such setting; {there}")
        if name in types:
            _check_type(f"{key}.{name} = {show(value)}", types[name], value)


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception:  # noqa: BLE001 - names that only a type checker knows
        return {}


def _check_type(what: str, annotation: Any, value: object) -> None:  # noqa: ANN401
    from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

    try:
        TypeAdapter[Any](annotation).validate_python(value, strict=True)
    except PydanticSchemaGenerationError:
        return  # a type of its own: the function sees for itself
    except ValidationError as error:
        raise ConfigError(f"{what}: {wrong(error.errors()[0])}") from None


def kind_of(function: Callable[..., Any]) -> Kind:
    """Determines how to call a reward: its parameter names select the arguments.

    Raises:
        ConfigError: a parameter has another name, or it takes nothing of a sample.
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


def is_for(sources: Sequence[str], source: str) -> bool:
    """Whether a term scores prompts of a source; an empty list means all."""
    return not sources or source in sources


def as_score(given: object) -> Score:
    """Converts a reward's result for one sample.

    Raises:
        TypeError: it is neither a number nor a score.
        ValueError: it is not finite, or its parts do not add up to it.
    """
    if not isinstance(given, Score):
        return Score(_number("the reward", given))
    if given.error is not None:
        return fail(str(given.error))
    value = _number("the reward", given.value)
    if len(given.parts) > MOST_PARTS:
        raise ValueError(f"the reward has {len(given.parts)} parts, more than {MOST_PARTS}")
    parts = {_name(name): _number(str(name), part) for name, part in given.parts.items()}
    _check_sum(value, [part for name, part in parts.items() if "/" not in name])
    return Score(value, parts)


def combine(terms: Mapping[str, tuple[float, Score]]) -> Score:
    """Adds up the terms of a reward.

    Args:
        terms: name -> weight and score.

    Returns:
        The sum, with the weighted terms as parts, and the terms' own parts under their names. Has
            an
        error if a term has one.
    """
    parts = dict[str, float]()
    for name, (weight, score) in terms.items():
        if score.error is not None:
            return fail(f"{name}: {score.error}")
        parts[name] = weight * score.value
        parts |= {f"{name}/{part}": weight * value for part, value in score.parts.items()}
    return as_score(Score(sum(parts[name] for name in terms), parts))


def fail(reason: str) -> Score:
    return Score(0.0, error=ends_of(reason, _REASON_CHARACTERS))


def words_of(error: Exception, deadline_s: float) -> str:
    """Describes why a reward failed: the exception, and the line of the user's program."""
    if isinstance(error, TimeoutError) and not str(error):
        return f"took longer than {deadline_s:g} s"
    return describe_call_error(error)


def _number(name: str, given: object) -> float:
    if isinstance(given, str) or not hasattr(type(given), "__float__"):
        found = ends_of(repr(given), _SHOWN_CHARACTERS)
        raise TypeError(f"gave no number, and no relax_hpc.{Score.__name__}, but {found}")
    number = float(given)  # type: ignore[arg-type]
    if not abs(number) <= _FLOAT32:
        raise ValueError(f"{name} is {number}")
    return number


def _name(name: object) -> str:
    text = str(name)
    if not text or len(text) > MOST_CHARACTERS or not text.isprintable():
        raise ValueError(
            f"a part is called {text[:MOST_CHARACTERS]!r}; use 1 to {MOST_CHARACTERS} printable "
            "characters"
        )
    return text


def _check_sum(value: float, parts: Sequence[float]) -> None:
    size = max(abs(value), *map(abs, parts), 1.0) if parts else 0.0
    if parts and abs(sum(parts) - value) > 1e-6 * size:
        raise ValueError(f"the reward is {value:g}, and its parts add up to {sum(parts):g}")


class Reward:
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
        """Scores a group; an exception or a timeout in an await becomes a score with an error.

        Args:
            group: siblings of one prompt.
            deadline_s: for all functions of one sample; for the group, if one of them takes it.
            begin: called with the next sample's index, if they are scored one by one.
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
        deadline = RewardDeadline(deadline_s)
        source = group[0].source  # siblings are of one prompt
        functions = [each for each in self._functions if is_for(each.sources, source)]
        if not functions:
            return [fail(f"no term of the reward is for source {source!r}")] * len(group)
        every = [await each.scores(group, deadline) for each in functions]
        if not functions[0].title:
            return every[0]
        return [
            self._add_up(dict(zip(functions, scores, strict=True)))
            for scores in zip(*every, strict=True)
        ]

    def _add_up(self, scores: "dict[Weighted, Score]") -> Score:
        try:
            return combine({each.title: (each.weight, score) for each, score in scores.items()})
        except ValueError as error:  # more parts, or a greater sum, than a score can have
            return fail(str(error))


class RewardDeadline:
    """The time limit for all awaits of the functions together."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until = asyncio.get_running_loop().time() + seconds

    def timeout(self) -> asyncio.Timeout:
        return asyncio.timeout_at(self._until)


class Weighted:
    """A scoring function, as the reward of a job or a term of it."""

    def __init__(
        self,
        function: Callable[..., Any],
        engines: Callable[[], object] | None = None,
        *,
        title: str = "",
        weight: float = 1.0,
        sources: Sequence[str] = (),
    ) -> None:
        """Args:
        function: with its settings bound.
        engines: makes the argument of functions that use engines; called at most once.
        title: name of the term; "" for a single reward.
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

    async def scores(self, group: Sequence[Sample], deadline: RewardDeadline) -> list[Score]:
        """Scores some siblings; all of them if the function takes the group."""
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
            return [fail(words_of(error, deadline.seconds))] * len(group)

    async def _of_sample(self, sample: Sample, deadline: RewardDeadline) -> Score:
        arguments: dict[str, Any] = {name: getattr(sample, name) for name in self._names}
        if self._takes_sample:
            arguments["sample"] = sample
        try:
            return as_score(await self._call(arguments, deadline))
        except Exception as error:  # noqa: BLE001 - a program of somebody else's
            return fail(words_of(error, deadline.seconds))

    async def _call(self, arguments: dict[str, Any], deadline: RewardDeadline) -> Any:  # noqa: ANN401
        given = self._function(**arguments)
        if isinstance(given, Awaitable):
            async with deadline.timeout():
                return await given
        return given
