"""Environments by the name a job gives them, or by the place of their class."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from relax_hpc.environments.base import Environment
from relax_hpc.environments.single_turn import SingleTurn
from relax_hpc.errors import ConfigError, first_line

ENVIRONMENTS: dict[str, Callable[[], Environment]] = {
    "single_turn": SingleTurn,
}


def make(name: str) -> Environment:
    """The environment that `rollout.environment` names.

    Args:
        name: in the table above, or "folder/file.py:Class", or "package.module:Class".

    Raises:
        ConfigError: there is none, or it cannot be made.
    """
    key = f"rollout.environment = {name!r}"
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]()
    place, colon, kind = name.rpartition(":")
    if not colon:
        raise ConfigError(
            f"{key}: no such environment; use {', '.join(ENVIRONMENTS)}, or name a class: "
            '"file.py:Class" or "package.module:Class"'
        )
    try:
        module = (
            _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
        made: Environment = getattr(module, kind)()
    except Exception as error:  # a program of somebody else's
        raise ConfigError(
            f"{key}: cannot be made: {type(error).__name__}: {first_line(error)}; correct it"
        ) from error
    if not callable(getattr(made, "rollout", None)):
        raise ConfigError(f"{key}: has no method rollout(prompt, session); write one")
    return made


def absolute(name: str) -> str:
    """The same environment wherever the job's tasks are started."""
    place, colon, kind = name.rpartition(":")
    return f"{Path(place).absolute()}:{kind}" if colon and place.endswith(".py") else name


def _from_file(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(f"environment_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
