"""The keys of a job as they are declared: name, type, default and text, for pages and `--help`."""

import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from relax_hpc.algorithms import table
from relax_hpc.algorithms.algorithm import Settings
from relax_hpc.config.layout import Layout
from relax_hpc.sections import Resources

TOLD_ONCE: dict[str, type[BaseModel]] = {"layout": Layout, "resources": Resources}
"""Sections that several components have: name -> what each of them holds."""


class Key(NamedTuple):
    """One setting of a job."""

    name: str
    """Dotted; a name in <> is the user's own."""
    type: str
    default: str
    """The default as TOML writes it; "required", or "" where leaving it out means something of its
    own."""
    text: str


def keys_of(job: type[BaseModel]) -> list[Key]:
    """The settings of a kind of job, in the order in which they are declared.

    A section of `TOLD_ONCE` is one key: what it holds is the same everywhere, see `keys_of` of its
    class.
    """
    return list(_keys(job, ""))


def _keys(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{name}"
        inner, of_table = _sections(field.annotation)
        if not inner or any(each in TOLD_ONCE.values() for each in inner):
            text = " ".join((field.description or "").split())
            yield Key(dotted, _type(field), _default(field), text)
            continue
        below = f"{dotted}.<name>." if of_table else f"{dotted}."
        seen = set[str]()
        for each in inner:  # several: of a choice by name
            for key in _keys(each, below):
                if key.name not in seen:
                    seen.add(key.name)
                    yield key


def _sections(annotation: Any) -> tuple[list[type[BaseModel]], bool]:  # noqa: ANN401
    """The sections that may stand there, and whether they stand in a table of named ones."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Settings:
        return [*table.sections()], False
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], False
    if origin is dict:
        return _sections(args[1])[0], True
    if origin in (Union, types.UnionType):
        return [each for arg in args for each in _sections(arg)[0]], False
    return _sections(args[0]) if origin is Annotated else ([], False)


def _type(field: FieldInfo) -> str:
    return _type_name(field.annotation)


def _type_name(annotation: Any) -> str:  # noqa: ANN401
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(json.dumps(arg) for arg in args)
    if origin is Annotated:
        return _type_name(args[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(arg) for arg in args if arg is not type(None))
    if origin is list:
        return f"list of {_type_name(args[0])}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "table"
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return names.get(annotation, "path")


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    if default is None or isinstance(default, BaseModel):
        return ""
    return json.dumps(default, default=str)
