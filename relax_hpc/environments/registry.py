"""Finds environments by name, or by the place of their class."""

import inspect
from collections.abc import Callable
from pathlib import Path

from relax_hpc.config.rollout import RolloutConfig
from relax_hpc.environments.program import ProgramEnvironment
from relax_hpc.environments.session import Environment, SingleTurn
from relax_hpc.errors import ConfigError, nearest
from relax_hpc.runtime.files import user_programs

ENVIRONMENTS: dict[str, Callable[[RolloutConfig, Path | None], Environment]] = {
    "single_turn": lambda *_: SingleTurn(),
    "program": lambda config, words: ProgramEnvironment(config.program, words),
}


def make(config: RolloutConfig, words: Path | None = None) -> Environment:
    """Makes the environment that `rollout.environment` names: a built-in name,
    "folder/file.py:Class", or "package.module:Class".

    Args:
        words: file for stderr of failed agents; default is a temporary file each.

    Raises:
        ConfigError: there is none, or it cannot be made.
    """
    name = config.environment
    key = f"rollout.environment = {name!r}"
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name](config, words)
    if ":" not in name:
        raise ConfigError(
            f"{key}: no such environment; {nearest(name, ENVIRONMENTS)}".rstrip("; ")
            + f"; use {', '.join(ENVIRONMENTS)}, or name a class: "
            '"file.py:Class" or "package.module:Class"'
        )
    place = user_programs.place_of(name)
    if place and not place[0].is_file():
        raise ConfigError(f"{key}: {place[0]}: no such file; name one")
    try:
        cls = user_programs.import_place(name)
        with user_programs.limit_time(name):
            made: Environment = cls()
    except Exception as error:  # a program of somebody else's
        raise ConfigError(
            f"{key}: cannot be made: {user_programs.describe_error(error)}; correct it"
        ) from error
    rollout = getattr(made, "rollout", None)
    if not callable(rollout):
        raise ConfigError(f"{key}: has no method rollout(prompt, session); write one")
    if not inspect.iscoroutinefunction(inspect.unwrap(rollout)):
        raise ConfigError(f"{key}: rollout is awaited; write `async def rollout`")
    try:
        inspect.signature(rollout).bind(None, None)
    except TypeError as error:
        said = f"rollout is called with a prompt and a session: {error}"
        raise ConfigError(
            f"{key}: {said}; write `async def rollout(self, prompt, session)`"
        ) from None
    return made
