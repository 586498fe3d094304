"""Environments by the name a job gives them, or by the place of their class."""

import inspect
from collections.abc import Callable

from relax_hpc import user_programs
from relax_hpc.config.rollout import RolloutConfig
from relax_hpc.environments.base import Environment
from relax_hpc.environments.program import Program
from relax_hpc.environments.single_turn import SingleTurn
from relax_hpc.errors import ConfigError

ENVIRONMENTS: dict[str, Callable[[RolloutConfig], Environment]] = {
    "single_turn": lambda _: SingleTurn(),
    "program": lambda config: Program(config.program),
}


def make(config: RolloutConfig) -> Environment:
    """The environment that `rollout.environment` names: in the table above, or
    "folder/file.py:Class", or "package.module:Class".

    Raises:
        ConfigError: there is none, or it cannot be made.
    """
    name = config.environment
    key = f"rollout.environment = {name!r}"
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name](config)
    if ":" not in name:
        raise ConfigError(
            f"{key}: no such environment; use {', '.join(ENVIRONMENTS)}, or name a class: "
            '"file.py:Class" or "package.module:Class"'
        )
    try:
        cls = user_programs.imported(name)
        with user_programs.bounded(name):
            made: Environment = cls()
    except Exception as error:  # a program of somebody else's
        raise ConfigError(
            f"{key}: cannot be made: {user_programs.raised(error)}; correct it"
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
