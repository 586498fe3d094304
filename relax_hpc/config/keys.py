"""Lists the keys of a job with type, default and text, for pages and `--help`."""

import ast
import inspect
import json
import sys
import types
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from relax_hpc.algorithms import table
from relax_hpc.algorithms.algorithm import Algorithm
from relax_hpc.config.model import Layout
from relax_hpc.config.prompts import Columns, PromptsConfig
from relax_hpc.sections import Resources, SharedResources, SlurmRequest, WholeJob

TOLD_ONCE: dict[str, type[BaseModel]] = {"layout": Layout, "resources": Resources}
"""Sections shared by several components: name -> class."""

_MANY = 5
"""From this many parts of an algorithm on, their names are not listed."""


class Key(NamedTuple):
    """One setting of a job."""

    name: str
    """Dotted; a name in <> is user-defined."""
    type: str
    default: str
    """The default in TOML; "required", or "" if leaving it out has its own meaning."""
    text: str


def keys_of(job: type[BaseModel]) -> list[Key]:
    """Returns the settings of a kind of job, in order of declaration.

    A section of `TOLD_ONCE` is one key; use `keys_of` of its class for the contents.
    """
    return list(_keys(job, ""))


def _keys(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{name}"
        if section is Algorithm and name in table.PARTS:
            parts = dict(table.names_of(name))
            yield from _keys_of_parts(texts_of(section).get(name, ""), f"{dotted}.", parts)
            continue
        inner, of_table = _sections(field.annotation)
        is_told = any(issubclass(each, (Layout, SlurmRequest)) for each in inner)
        is_told |= Columns in inner and section is not PromptsConfig
        if not inner or is_told:
            yield Key(dotted, _type(field), _default(field), texts_of(section).get(name, ""))
            if SharedResources in inner:
                yield from _keys(WholeJob, f"{dotted}.")
            continue
        below = f"{dotted}.<name>." if of_table else f"{dotted}."
        seen = set[str]()
        for each in inner:
            for key in _keys(each, below):
                if key.name not in seen:
                    seen.add(key.name)
                    yield key


def _keys_of_parts(text: str, prefix: str, parts: Mapping[str, type[BaseModel]]) -> Iterator[Key]:
    """Yields the part's name, and each setting with its meaning in every part."""
    yield Key(f"{prefix}name", " | ".join(json.dumps(name) for name in parts), "", text)
    found: dict[str, list[tuple[str, Key]]] = {}
    for name, part in parts.items():
        for key in _keys(part, prefix):
            if key.name != f"{prefix}name":
                found.setdefault(key.name, []).append((name, key))
    for several in found.values():
        _, first = several[0]
        same_default = len({key.default for _, key in several}) == 1
        default = first.default if same_default else ""
        yield first._replace(text=_text_of_parts(several, same_default), default=default)


def _text_of_parts(several: list[tuple[str, Key]], same_default: bool) -> str:
    """Describes a setting and its parts, without their names if there are many."""
    texts: dict[str, list[str]] = {}
    for name, key in several:
        default = "" if same_default else f" Default {key.default}."
        texts.setdefault(key.text + default, []).append(name)
    said = (
        text if len(names) > _MANY else f"{', '.join(names)}: {text}"
        for text, names in sorted(texts.items(), key=lambda each: -len(each[1]))
    )
    return " ".join(said)


def _sections(annotation: Any) -> tuple[list[type[BaseModel]], bool]:  # noqa: ANN401
    """Returns the sections that an annotation allows, and whether it is a table of named ones."""
    origin, args = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], False
    if origin is dict:
        return _sections(args[1])[0], True
    if origin in (Union, types.UnionType):
        return [each for arg in args for each in _sections(arg)[0]], False
    return _sections(args[0]) if origin is Annotated else ([], False)


@cache
def texts_of(section: type[BaseModel]) -> dict[str, str]:
    """Returns the text below each field that has one, of a section and of those it extends.

    pydantic could read them, for 0.15 s of every command that reads a job.
    """
    found = dict[str, str]()
    for each in reversed(section.__mro__):
        if issubclass(each, BaseModel) and each is not BaseModel:
            for field, text in pairwise(_classes_of(each.__module__)[each.__name__].body):
                match field, text:
                    case (
                        ast.AnnAssign(target=ast.Name(name)),
                        ast.Expr(value=ast.Constant(value=str(said))),
                    ):
                        found[name] = " ".join(said.split())
    return found


@cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}


def add_texts(schema: dict[str, Any], job: type[BaseModel]) -> None:
    """Adds the texts of a job's fields to its JSON schema."""
    known = {each.__name__: texts_of(each) for each in _every_section(job, set())}
    for name, section in schema["$defs"].items():
        for field, said in section.get("properties", {}).items():
            if text := known.get(name, {}).get(field):
                said["description"] = text


def _every_section(section: type[BaseModel], seen: set[type[BaseModel]]) -> set[type[BaseModel]]:
    if section not in seen:
        seen.add(section)
        for field in section.model_fields.values():
            for each in _sections(field.annotation)[0]:
                _every_section(each, seen)
    return seen


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
    if origin is tuple:
        return f"[{', '.join(map(_type_name, args))}]"
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
