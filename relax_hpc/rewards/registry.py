"""Rewards by the name that a job gives them, or by the place of their function."""

import difflib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from relax_hpc import user_files
from relax_hpc.errors import ConfigError
from relax_hpc.rewards import boxed_number, coin

GROUP = "relax_hpc.rewards"
"""Group of entry points by which an installed package offers rewards under its own names."""
PLACES = '"file.py:function" or "package.module:function"'


class BuiltIn(NamedTuple):
    """A reward of this package: the function `score` of a module."""

    module: str
    can_match: Callable[[str], bool]
    """Whether any response would be right for an answer; what never is, teaches nothing."""
    remedy: str
    """Remedy for answers that cannot be matched."""


REWARDS: dict[str, BuiltIn] = {
    "boxed_number": BuiltIn(boxed_number.__name__, boxed_number.can_match, boxed_number.REMEDY),
    "coin": BuiltIn(coin.__name__, coin.can_match, ""),
}


def is_plugin(name: str) -> bool:
    """Whether a reward is somebody else's program."""
    return name not in REWARDS


def place_of(name: str) -> str:
    """Returns a reward's function as "file.py:function" or "package.module:function".

    Args:
        name: in the table above, of an entry point, or such a place.

    Raises:
        ConfigError: there is none of that name.
    """
    if name in REWARDS:
        return f"{REWARDS[name].module}:score"
    if ":" in name:
        return name
    offered = {each.name: each.value for each in entry_points(group=GROUP)}
    if name in offered:
        return offered[name]
    near = difflib.get_close_matches(name, known := [*REWARDS, *offered], 1)
    hint = f"did you mean {near[0]!r}?" if near else f"use {', '.join(known)},"
    raise ConfigError(
        f"reward.name = {name!r}: no such reward; {hint} or name a function: {PLACES}"
    )


def function_of(place: str) -> Callable[..., Any]:
    """Imports a reward. Only worker processes do this with a plugin.

    Raises:
        Exception: whatever the import raises.
    """
    function: Callable[..., Any] = user_files.imported(place)
    if not callable(function):
        raise TypeError(f"{place.rpartition(':')[2]} is no function")
    return function
