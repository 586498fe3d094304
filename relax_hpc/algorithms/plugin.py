"""Parts of a user's own: a class in a file, of the settings that it declares."""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeGuard, get_args

from pydantic import ValidationError, create_model

from relax_hpc.algorithms.part import Part
from relax_hpc.errors import ConfigError
from relax_hpc.user_programs import bounded, imported, raised


class PluginError(ConfigError):
    """A place has no part that could be used."""


def names(part: type[Part]) -> tuple[str, ...]:
    """The names that a part may be asked for by."""
    return get_args(part.model_fields["name"].annotation)


def is_own(name: object) -> TypeGuard[str]:
    """Whether a part of that name would be the user's own."""
    return isinstance(name, str) and ":" in name


@cache
def load(place: str, base: type[Part]) -> type[Part]:
    """Runs the file and returns the class, which takes its place for a name.

    Args:
        place: "file.py:Class".
        base: a subclass of which it is to be.

    Raises:
        PluginError: it cannot be run, has no such class, or its methods do not fit.
    """
    try:
        found = imported(place)
    except Exception as error:
        raise PluginError(
            f"cannot be run: {raised(error)}; name a class as file.py:Class"
        ) from error
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise PluginError(f"is no subclass of {base.__module__}.{base.__name__}; make it one")
    for name, declared in inspect.getmembers(base, inspect.isfunction):
        if not name.startswith("_") and declared.__module__ == base.__module__:
            _check_signature(name, declared, getattr(found, name))
    if all(getattr(found, name) is getattr(base, name) for name in _methods(base)):
        raise PluginError(f"has none of {', '.join(_methods(base))}; write one")
    return create_model(found.__name__, __base__=found, name=(str, ...))


def made(part: type[Part], settings: Mapping[str, Any]) -> Part:
    """Makes a part of the user's own, and asks what it needs for the first time.

    Raises:
        ValidationError: it does not take these settings.
        PluginError: what else it raises, or that it takes too long.
    """
    try:
        with bounded(settings["name"]):
            own = part.model_validate(settings)
            own.needs()
    except ValidationError:
        raise
    except Exception as error:
        raise PluginError(f"cannot be made: {raised(error)}; correct it") from error
    return own


def _methods(base: type[Part]) -> list[str]:
    return [name for name in vars(base) if name.startswith("of_")]


def _check_signature(name: str, declared: Any, own: Any) -> None:  # noqa: ANN401
    wanted = list(inspect.signature(declared).parameters)
    try:
        inspect.signature(own).bind(*wanted)
    except TypeError:
        given = ", ".join(inspect.signature(own).parameters)
        raise PluginError(
            f"has {name}({given}); it is called as {name}({', '.join(wanted)})"
        ) from None
