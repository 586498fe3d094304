"""Tables of a job that are fields of a Megatron-core dataclass, checked by that class itself."""

import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from relax_hpc.errors import ConfigError

Made = TypeVar("Made")

_PLAIN = (bool, int, float, str)


def refusals(reason: str, *names: str) -> dict[str, str]:
    """The same reason for all of them, as `build` takes it."""
    return dict.fromkeys(names, reason)


def build(
    target: type[Made],
    key: str,
    table: Mapping[str, Any],
    *,
    ours: Mapping[str, Any],
    refused: Mapping[str, str],
) -> Made:
    """An instance of `target` with our values for its fields, and over them the job's.

    Args:
        target: a dataclass of Megatron-core.
        key: where the job has the table, for messages.
        table: the job's.
        ours: field -> value.
        refused: field -> why a job cannot set it, and what to do instead.

    Raises:
        ConfigError: a field that `target` has not, that is refused, or a value that is of another
            type than the field or that `target` refuses.
    """
    hints = get_type_hints(target)
    known = {field.name for field in fields(target)}  # type: ignore[arg-type]
    for name, value in table.items():
        if name in refused:
            raise ConfigError(f"{key}.{name} = {value!r}: {refused[name]}")
        if name not in known:
            nearest = _nearest(name, known - set(refused))
            raise ConfigError(
                f"{key}.{name} = {value!r}: Megatron-core's {target.__name__} has no such field; "
                f"did you mean {nearest}?"
            )
        if not _fits(value, hints[name]):
            raise ConfigError(f"{key}.{name} = {value!r}: {_expected(hints[name])}")
    try:
        return target(**{**ours, **table})
    except (ValueError, AssertionError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{key} = {dict(table)}: Megatron-core refuses it: {reason}") from error


def _nearest(name: str, known: Iterable[str]) -> str:
    return difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]


def _alternatives(hint: Any) -> list[Any]:  # noqa: ANN401
    """The types that a hint allows, None left out."""
    if get_origin(hint) in (Union, types.UnionType):
        return [part for one in get_args(hint) for part in _alternatives(one)]
    return [] if hint is type(None) else [hint]


def _fits(value: Any, hint: Any) -> bool:  # noqa: ANN401
    return any(_is(value, kind) for kind in _alternatives(hint))


def _is(value: Any, kind: Any) -> bool:  # noqa: ANN401
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is list or kind is list:
        (inner,) = get_args(kind) or (Any,)
        return isinstance(value, list) and all(_fits(one, inner) for one in value)
    if kind is Any:
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return kind in _PLAIN and isinstance(value, kind)


def _expected(hint: Any) -> str:  # noqa: ANN401
    """Says what to write instead."""
    spelled = [text for kind in _alternatives(hint) if (text := _spelling(kind))]
    if not spelled:
        return "no value that a job can write fits this field; remove it"
    return f"is not {' or '.join(spelled)}"


def _spelling(kind: Any) -> str:  # noqa: ANN401
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    if get_origin(kind) is list or kind is list:
        return "a list"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    return names.get(kind, "")
