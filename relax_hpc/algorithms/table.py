"""The parts by name: a file each, and a line here."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails

from relax_hpc.algorithms import plugin
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
from relax_hpc.algorithms.part import Advantage, Correction, Loss, Part

PARTS: Mapping[str, Sequence[type[Part]]] = {
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
"""Tables below [algorithm] -> the parts that may stand there."""
OWN: Mapping[str, type[Part]] = {"advantage": Advantage, "loss": Loss, "correction": Correction}
"""Tables in which a part may be the user's own -> what it is a subclass of."""


def names_of(table: str) -> Iterator[tuple[str, type[Part]]]:
    """Names of the parts of a table; a part may have several."""
    for part in PARTS[table]:
        for name in plugin.names(part):
            yield name, part


def part_of(table: str, value: Any) -> Any:  # noqa: ANN401
    """A table below [algorithm] as the part that it names.

    Raises:
        ValidationError: there is no such part, or it does not take these settings.
    """
    if not isinstance(value, dict) or "name" not in value:
        return value
    name = value["name"]
    try:
        part = class_of(table, name)
    except plugin.PluginError as error:
        raise _of_name(table, name, str(error)) from error
    if part:
        return _made(part, table, value)
    known = dict(names_of(table))
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"use {', '.join(known)}"
    raise _of_name(table, name, f"there is no {table} of that name; {hint}")


def _made(part: type[Part], table: str, value: Mapping[str, Any]) -> Part:
    if not plugin.is_own(value["name"]):
        return part.model_validate(value)
    try:
        return plugin.made(part, value)
    except plugin.PluginError as error:
        raise _of_name(table, value["name"], str(error)) from error


def class_of(table: str, name: object) -> type[Part] | None:
    """The part of a table that has this name, which may be the user's own; None if there is none.

    Raises:
        PluginError: of the user's own one, what is wrong with it.
    """
    if plugin.is_own(name) and table in OWN:
        return plugin.load(name, OWN[table])
    return next((part for known, part in names_of(table) if known == name), None)


def _of_name(table: str, name: object, said: str) -> ValidationError:
    error = InitErrorDetails(
        type="value_error", loc=("name",), input=name, ctx={"error": ValueError(said)}
    )
    return ValidationError.from_exception_data(table, [error])
