"""Finds rewards by name, or by the place of their function."""

import difflib
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from relax_hpc.environments.rewards.contract import check_settings, is_for, settings_of
from relax_hpc.errors import ConfigError
from relax_hpc.runtime.files import user_programs

if TYPE_CHECKING:  # a worker process has no need of pydantic
    from relax_hpc.config.rollout import RewardConfig

GROUP = "relax_hpc.rewards"
"""Entry-point group by which installed packages offer rewards under their own names."""
PLACES = '"file.py:function" or "package.module:function"'


class BuiltIn(NamedTuple):
    """A reward of this package: a module, imported on first use.

    Its `score` is the reward. Optional: `can_match(answer)`, whether any response can be right,
    with `REMEDY`, the advice if not. `marks(response)`, whether it finds an answer there.
    `check(**settings)` and `lowest(**settings)` get every setting of `score`: the former raises a
    ConfigError for unusable ones, the latter returns the least score, if that may be below 0.
    """

    module: str

    def import_module(self) -> ModuleType:
        return importlib.import_module(self.module)

    def can_match(self, answer: str) -> bool:
        """Whether any response can be right for an answer."""
        look = getattr(self.import_module(), "can_match", None)
        return look is None or bool(look(answer))

    def marks(self, response: str) -> bool:
        """Whether it finds an answer in a response, right or wrong."""
        look = getattr(self.import_module(), "marks", None)
        return look is None or bool(look(response))

    @property
    def remedy(self) -> str:
        """Advice for answers that cannot be matched."""
        return str(getattr(self.import_module(), "REMEDY", ""))

    def settings(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Returns every setting of `score`: the job's, else the default."""
        known = settings_of(self.import_module().score)
        return {name: args.get(name, each.default) for name, each in known.items()}

    def lowest(self, args: Mapping[str, Any]) -> float:
        """Returns its lowest score, at most 0."""
        look = getattr(self.import_module(), "lowest", None)
        return min(0.0, look(**self.settings(args))) if look else 0.0


_HERE = "relax_hpc.environments.rewards.functions"
REWARDS: dict[str, BuiltIn] = {
    "boxed_number": BuiltIn(f"{_HERE}.boxed_number"),
    "code": BuiltIn(f"{_HERE}.code"),
    "dapo": BuiltIn(f"{_HERE}.dapo"),
    "deepscaler": BuiltIn(f"{_HERE}.deepscaler"),
    "exact": BuiltIn(f"{_HERE}.exact"),
    "f1": BuiltIn(f"{_HERE}.f1"),
    "format": BuiltIn(f"{_HERE}.format"),
    "geometry3k": BuiltIn(f"{_HERE}.geometry3k"),
    "gpqa": BuiltIn(f"{_HERE}.multiple_choice"),
    "gsm8k": BuiltIn(f"{_HERE}.gsm8k"),
    "ifbench": BuiltIn(f"{_HERE}.ifbench"),
    "ifeval": BuiltIn(f"{_HERE}.ifeval"),
    "iou": BuiltIn(f"{_HERE}.iou"),
    "length": BuiltIn(f"{_HERE}.length"),
    "math": BuiltIn(f"{_HERE}.math"),
    "multiple_choice": BuiltIn(f"{_HERE}.multiple_choice"),
    "openr1mm": BuiltIn(f"{_HERE}.openr1mm"),
    "random": BuiltIn(f"{_HERE}.random"),
    "remote": BuiltIn(f"{_HERE}.remote"),
    "repetition": BuiltIn(f"{_HERE}.repetition"),
}
RENAMED = {"coin": "random"}
"""Names in older jobs -> current names."""


class Term(NamedTuple):
    """A function of a job's reward."""

    title: str
    """Name of the term; "" for a single reward."""
    name: str
    """Name of the function, as in the job."""
    place: str
    """Place of the function, see `place_of`."""
    weight: float
    args: Mapping[str, Any]
    sources: Sequence[str] = ()
    """Sources whose prompts it scores; empty is all."""

    def is_for(self, source: str) -> bool:
        return is_for(self.sources, source)

    @property
    def key(self) -> str:
        """Key of the table in the job."""
        return f"reward.terms.{self.title}" if self.title else "reward"

    @property
    def if_failed(self) -> float:
        """This term's contribution for a response that could not be scored.

        The lowest of a built-in reward, so that no wrong response gets less. 0 for a plugin, and
        for a negative weight.
        """
        if is_plugin(self.name):
            return 0.0
        return min(0.0, self.weight * REWARDS[self.name].lowest(self.args))

    def function(self) -> Callable[..., Any]:
        """Imports the function and binds its settings. For plugins only worker processes do so.

        Raises:
            ConfigError: it has no such settings.
            Exception: from the import.
        """
        function: Callable[..., Any] = user_programs.import_place(self.place)
        if not callable(function):
            raise TypeError(f"{self.place.rpartition(':')[2]} is no function")
        check_settings(f"{self.key}.args", function, self.args)
        if not self.args:
            return function
        return functools.update_wrapper(functools.partial(function, **self.args), function)


def terms_of(config: "RewardConfig") -> list[Term]:
    """Returns the functions of a job's reward.

    Raises:
        ConfigError: unknown name.
    """
    return [
        Term(title, each.name, place_of(each.name, title), each.weight, each.args, each.sources)
        for title, each in config.every_term.items()
    ]


def is_plugin(name: str) -> bool:
    return name not in REWARDS


def place_of(name: str, title: str = "") -> str:
    """Returns a reward's function as "file.py:function" or "package.module:function".

    Args:
        name: built-in, of an entry point, or such a place.
        title: name of the term.

    Raises:
        ConfigError: unknown name.
    """
    if name in REWARDS:
        return f"{REWARDS[name].module}:score"
    if ":" in name:
        return name
    offered = {each.name: each.value for each in entry_points(group=GROUP)}
    if name in offered:
        return offered[name]
    key = f"reward.terms.{title}.name" if title else "reward.name"
    if name in RENAMED:
        raise ConfigError(f"{key} = {name!r}: is {RENAMED[name]!r} now; use that")
    if name.endswith(".py"):
        raise ConfigError(f"{key} = {name!r}: is a file; name a function in it, {name}:score, say")
    near = difflib.get_close_matches(name, known := [*REWARDS, *offered], 1)
    hint = f"did you mean {near[0]!r}?" if near else f"use {', '.join(known)},"
    raise ConfigError(f"{key} = {name!r}: no such reward; {hint} or name a function: {PLACES}")
