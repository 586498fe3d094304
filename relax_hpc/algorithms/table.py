"""Lists all parts by name, and loads a user's own parts: a class in a file, with its settings."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeGuard, get_args

from pydantic import ValidationError, create_model
from pydantic_core import InitErrorDetails

from relax_hpc.algorithms.advantages.batch_std import BatchStd
from relax_hpc.algorithms.advantages.gae import Gae
from relax_hpc.algorithms.advantages.gpg import Gpg
from relax_hpc.algorithms.advantages.group_mean import GroupMean
from relax_hpc.algorithms.advantages.grpo import Grpo
from relax_hpc.algorithms.advantages.max_rl import MaxRl
from relax_hpc.algorithms.advantages.none import NoAdvantage
from relax_hpc.algorithms.advantages.opo import Opo
from relax_hpc.algorithms.advantages.pass_k import PassK
from relax_hpc.algorithms.advantages.reinforce_pp import ReinforcePp
from relax_hpc.algorithms.advantages.reinforce_pp_baseline import ReinforcePpBaseline
from relax_hpc.algorithms.advantages.rloo import Rloo
from relax_hpc.algorithms.corrections.icepop import IcepopCorrection
from relax_hpc.algorithms.corrections.none import NoCorrection
from relax_hpc.algorithms.corrections.opsm import Opsm
from relax_hpc.algorithms.corrections.reject_geometric import RejectGeometric
from relax_hpc.algorithms.corrections.reject_k1 import RejectK1
from relax_hpc.algorithms.corrections.reject_k3 import RejectK3
from relax_hpc.algorithms.corrections.sequence_tis import SequenceTis
from relax_hpc.algorithms.corrections.tis import Tis
from relax_hpc.algorithms.distill import Distill, NoDistill
from relax_hpc.algorithms.entropy import AdaptiveEntropy, FixedEntropy, NoEntropy
from relax_hpc.algorithms.groups import AsSampled, Refill
from relax_hpc.algorithms.kl import Kl, NoKl
from relax_hpc.algorithms.losses.cispo import Cispo
from relax_hpc.algorithms.losses.dppo_kl import DppoKl
from relax_hpc.algorithms.losses.dppo_tv import DppoTv
from relax_hpc.algorithms.losses.gmpo import Gmpo
from relax_hpc.algorithms.losses.gspo import Gspo
from relax_hpc.algorithms.losses.icepop import Icepop
from relax_hpc.algorithms.losses.ipo import Ipo
from relax_hpc.algorithms.losses.kpop import Kpop
from relax_hpc.algorithms.losses.m2po import M2po
from relax_hpc.algorithms.losses.policy_gradient import PolicyGradient
from relax_hpc.algorithms.losses.ppo_clip import PpoClip
from relax_hpc.algorithms.losses.sapo import Sapo
from relax_hpc.algorithms.part import Advantage, AlgorithmPart, Correction, Loss
from relax_hpc.errors import ConfigError, nearest
from relax_hpc.runtime.files.user_programs import describe_error, import_place, limit_time


class PluginError(ConfigError):
    """A place has no usable part."""


def names(part: type[AlgorithmPart]) -> tuple[str, ...]:
    return get_args(part.model_fields["name"].annotation)


def is_own(name: object) -> TypeGuard[str]:
    """Whether the name is a place of a user's own part."""
    return isinstance(name, str) and ":" in name


@cache
def load(place: str, base: type[AlgorithmPart]) -> type[AlgorithmPart]:
    """Imports the file and returns the class, with its place as its name.

    Args:
        place: "file.py:Class".
        base: the required base class.

    Raises:
        PluginError: it cannot be run, has no such class, or its methods do not fit.
    """
    try:
        found = import_place(place)
    except Exception as error:
        raise PluginError(
            f"cannot be run: {describe_error(error)}; name a class as file.py:Class"
        ) from error
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise PluginError(f"is no subclass of {base.__module__}.{base.__name__}; make it one")
    for name, declared in inspect.getmembers(base, inspect.isfunction):
        if not name.startswith("_") and declared.__module__ == base.__module__:
            _check_signature(name, declared, getattr(found, name))
    if all(getattr(found, name) is getattr(base, name) for name in _methods(base)):
        raise PluginError(f"has none of {', '.join(_methods(base))}; write one")
    return create_model(found.__name__, __base__=found, name=(str, ...))


def make_part(part: type[AlgorithmPart], settings: Mapping[str, Any]) -> AlgorithmPart:
    """Makes a user's own part, and calls its `needs` for the first time.

    Raises:
        ValidationError: it does not take these settings.
        PluginError: another error, or it takes too long.
    """
    try:
        with limit_time(settings["name"]):
            own = part.model_validate(settings)
            own.needs()
    except ValidationError:
        raise
    except Exception as error:
        raise PluginError(f"cannot be made: {describe_error(error)}; correct it") from error
    return own


def _methods(base: type[AlgorithmPart]) -> list[str]:
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


PARTS: Mapping[str, Sequence[type[AlgorithmPart]]] = {
    "advantage": (
        GroupMean,
        Grpo,
        BatchStd,
        Rloo,
        MaxRl,
        PassK,
        Opo,
        Gpg,
        ReinforcePp,
        ReinforcePpBaseline,
        Gae,
        NoAdvantage,
    ),
    "loss": (
        PolicyGradient,
        PpoClip,
        Gspo,
        Gmpo,
        Sapo,
        Cispo,
        M2po,
        DppoTv,
        DppoKl,
        Ipo,
        Icepop,
        Kpop,
    ),
    "correction": (
        NoCorrection,
        Tis,
        SequenceTis,
        IcepopCorrection,
        Opsm,
        RejectGeometric,
        RejectK3,
        RejectK1,
    ),
    "kl": (NoKl, Kl),
    "distill": (NoDistill, Distill),
    "entropy": (NoEntropy, FixedEntropy, AdaptiveEntropy),
    "groups": (AsSampled, Refill),
}
"""Tables below [algorithm] -> their parts."""
OWN: Mapping[str, type[AlgorithmPart]] = {
    "advantage": Advantage,
    "loss": Loss,
    "correction": Correction,
}
"""Tables in which a part may be the user's own -> its base class."""


def names_of(table: str) -> Iterator[tuple[str, type[AlgorithmPart]]]:
    """Yields the names of a table's parts; a part may have several."""
    for part in PARTS[table]:
        for name in names(part):
            yield name, part


def part_of(table: str, value: Any) -> Any:  # noqa: ANN401
    """Makes the part that a table below [algorithm] names.

    Raises:
        ValidationError: there is no such part, or it does not take these settings.
    """
    if not isinstance(value, dict) or "name" not in value:
        return value
    name = value["name"]
    try:
        part = class_of(table, name)
    except PluginError as error:
        raise _of_name(table, name, str(error)) from error
    if part:
        return _make_part(part, table, value)
    known = dict(names_of(table))
    hint = nearest(str(name), known) or f"use {', '.join(known)}"
    raise _of_name(table, name, f"there is no {table} of that name; {hint}")


def _make_part(part: type[AlgorithmPart], table: str, value: Mapping[str, Any]) -> AlgorithmPart:
    if not is_own(value["name"]):
        return part.model_validate(value)
    try:
        return make_part(part, value)
    except PluginError as error:
        raise _of_name(table, value["name"], str(error)) from error


def class_of(table: str, name: object) -> type[AlgorithmPart] | None:
    """Returns a table's part by name, maybe the user's own; None if there is none.

    Raises:
        PluginError: a user's own part is unusable.
    """
    if is_own(name) and table in OWN:
        return load(name, OWN[table])
    return next((part for known, part in names_of(table) if known == name), None)


def _of_name(table: str, name: object, said: str) -> ValidationError:
    error = InitErrorDetails(
        type="value_error", loc=("name",), input=name, ctx={"error": ValueError(said)}
    )
    return ValidationError.from_exception_data(table, [error])
