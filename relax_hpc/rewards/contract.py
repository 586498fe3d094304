"""The contract of rewards: what one is given, what it returns, and which functions are one."""

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from relax_hpc.errors import ConfigError, shown
from relax_hpc.user_programs import raised_in_call

_SHOWN_CHARACTERS = 300
MOST_PARTS, MOST_CHARACTERS = 64, 100
"""Parts that a score may have, and characters of the name of one."""
_FLOAT32 = 3.4e38


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
    """Further fields of the line of the data, as JSON knows them."""
    finish: str = "stop"
    """End of the response: `stop`, `length` (it was cut), or `abort`."""
    num_tokens: int = 0
    """Length of the response."""
    source: str = ""
    """Name of the data set that the prompt is from, of several; of a held-out set its name, where
    the row says no other."""
    in_thought: bool = False
    """Whether the text before the response opened a thought, so that it begins inside of it."""


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of a sample."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named numbers that add up to the value, if it is made of several. A name with a slash is of a
    part of a part, "format/tags", and is not added."""
    error: str | None = None
    """Reason why there is none; the value stands for it then: 0, or the least of the reward."""


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


def settings_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns what a job may set of a reward: keyword-only parameters with a default.

    A field of a sample is none, whatever the default.
    """
    parameters = inspect.signature(function).parameters
    given = {"group", "sample", ENGINES, *FIELDS}
    return {
        name: each
        for name, each in parameters.items()
        if each.kind is each.KEYWORD_ONLY and each.default is not each.empty and name not in given
    }


def check_settings(key: str, function: Callable[..., Any], args: Mapping[str, object]) -> None:
    """Checks what a job sets of a reward, by name and by type.

    Args:
        key: of the table in the job, e.g. "reward.args".
        function: that takes it.
        args: the table.

    Raises:
        ConfigError: the function has no such setting, or its annotation allows no such value.
    """
    known = settings_of(function)
    types = _annotations(function) if args else {}
    for name, value in args.items():
        if name not in known:
            there = f"there are {', '.join(known)}" if known else "this reward has none; remove it"
            raise ConfigError(f"{key}.{name} = {shown(value)}: no such setting; {there}")
        if name in types:
            _check_type(f"{key}.{name} = {shown(value)}", types[name], value)


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
        said = error.errors()[0]["msg"]
        raise ConfigError(f"{what}: {said[0].lower()}{said[1:]}") from None


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


def is_for(sources: Sequence[str], source: str) -> bool:
    """Whether a term that is for some sources, of none for all, scores prompts of this one."""
    return not sources or source in sources


def as_score(given: object) -> Score:
    """Makes a score of what a reward returned for one sample.

    Raises:
        TypeError: it is neither a number nor a score.
        ValueError: it is not finite, or has parts that do not add up to it.
    """
    if not isinstance(given, Score):
        return Score(_number("the reward", given))
    if given.error is not None:
        return failed(str(given.error))
    value = _number("the reward", given.value)
    if len(given.parts) > MOST_PARTS:
        raise ValueError(f"the reward has {len(given.parts)} parts, more than {MOST_PARTS}")
    parts = {_name(name): _number(str(name), part) for name, part in given.parts.items()}
    _check_sum(value, [part for name, part in parts.items() if "/" not in name])
    return Score(value, parts)


def combined(terms: Mapping[str, tuple[float, Score]]) -> Score:
    """Adds the terms of a reward up.

    Args:
        terms: name -> what it counts, and its score.

    Returns:
        The sum, whose parts are the terms as they count; those of a term are under its name. With
        an error, if a term has one.
    """
    parts = dict[str, float]()
    for name, (weight, score) in terms.items():
        if score.error is not None:
            return failed(f"{name}: {score.error}")
        parts[name] = weight * score.value
        parts |= {f"{name}/{part}": weight * value for part, value in score.parts.items()}
    return as_score(Score(sum(parts[name] for name in terms), parts))


def failed(reason: str) -> Score:
    """Returns the score of a sample that there is none for."""
    return Score(0.0, error=reason[:_SHOWN_CHARACTERS])


def words_of(error: Exception, deadline_s: float) -> str:
    """Says why a reward failed: what it raised, and the line of the user's program."""
    if isinstance(error, TimeoutError) and not str(error):
        return f"took longer than {deadline_s:g} s"
    return raised_in_call(error)


def _number(name: str, given: object) -> float:
    if isinstance(given, str) or not hasattr(type(given), "__float__"):
        found = repr(given)[:_SHOWN_CHARACTERS]
        raise TypeError(f"gave no number, and no {__name__}.{Score.__name__}, but {found}")
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
