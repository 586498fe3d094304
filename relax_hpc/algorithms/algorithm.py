"""Defines the section [algorithm] of a job: a preset, and changes to it."""

import difflib
from collections.abc import Iterator, Mapping
from functools import partial, reduce
from operator import or_
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, SerializeAsAny, model_validator

from relax_hpc.algorithms import presets, table
from relax_hpc.algorithms.aggregation import Aggregation
from relax_hpc.algorithms.entropy import Entropy
from relax_hpc.algorithms.groups import Groups
from relax_hpc.algorithms.part import Advantage, AlgorithmPart, Correction, Loss, Needs
from relax_hpc.errors import nearest
from relax_hpc.sections import Positive, Section


def check_preset(preset: str) -> str:
    if preset not in presets.PRESETS:
        hint = nearest(preset, presets.PRESETS) or f"use {', '.join(presets.PRESETS)}"
        raise ValueError(f"there is no such preset; {hint}")
    return preset


class Algorithm(Section):
    """How rewards become an update; see docs/explanation/algorithms.md."""

    preset: Annotated[str, AfterValidator(check_preset)] = presets.DEFAULT
    """Algorithm with which the tables below begin. A table with a name replaces the preset's; one
    without changes its settings."""
    aggregation: Aggregation = "token"
    """Mean that the loss is. token: over trained tokens. sequence: of the means of rows.
    sequence_sum: of the sums of rows. prompt: of the means over the tokens of a prompt. constant:
    of the sums of rows, by rollout.max_new_tokens."""
    epochs_per_step: Positive = 1
    """Passes over a batch, each an optimizer update."""
    mini_batches: Positive = 1
    """Updates that a batch is split into, by prompt groups, each with a mean of its own."""
    advantage: Annotated[
        SerializeAsAny[Advantage], BeforeValidator(partial(table.part_of, "advantage"))
    ]
    """How much better an episode, or a token, was than expected; or a class of your own."""
    loss: Annotated[SerializeAsAny[Loss], BeforeValidator(partial(table.part_of, "loss"))]
    """Cost of a token that has an advantage; or a class of your own."""
    correction: Annotated[
        SerializeAsAny[Correction], BeforeValidator(partial(table.part_of, "correction"))
    ]
    """Weights of tokens that another policy, or program, sampled; or a class of your own."""
    kl: Annotated[SerializeAsAny[AlgorithmPart], BeforeValidator(partial(table.part_of, "kl"))]
    """Estimator of the divergence from the reference."""
    distill: Annotated[
        SerializeAsAny[AlgorithmPart], BeforeValidator(partial(table.part_of, "distill"))
    ]
    """Way in which the teachers' logprobs teach."""
    entropy: Annotated[SerializeAsAny[Entropy], BeforeValidator(partial(table.part_of, "entropy"))]
    """Entropy in the loss."""
    groups: Annotated[SerializeAsAny[Groups], BeforeValidator(partial(table.part_of, "groups"))]
    """Prompt groups, and responses of them, that are trained on."""

    @model_validator(mode="before")
    @classmethod
    def _begin_with_the_preset(cls, given: Any) -> Any:  # noqa: ANN401
        return with_preset(given) if isinstance(given, dict) else given

    @property
    def parts(self) -> Iterator[tuple[str, AlgorithmPart]]:
        """Yields each part with the name of its table."""
        return ((name, getattr(self, name)) for name in table.PARTS)

    @property
    def waits_for_the_batch(self) -> bool:
        """Whether training must wait for the whole batch."""
        return self.needs.scope == "batch" or self.needs.prepass or self.mini_batches > 1

    @property
    def teaches_without_advantage(self) -> bool:
        """Whether rows are trained on whose advantage is 0, or unknown until they are read."""
        return self.needs.every_row or self.advantage.is_of_tokens

    @property
    def needs(self) -> Needs:
        return reduce(or_, (part.needs() for _, part in self.parts))


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """Merges a job's keys into its preset."""
    preset = given.get("preset", presets.DEFAULT)
    known = preset if isinstance(preset, str) and preset in presets.PRESETS else presets.DEFAULT
    return presets.merge(presets.tables_of(known), given)


def unknown_setting(given: Mapping[str, Any], part: str, setting: str) -> str:
    """Suggests the nearest setting, or the parts that have it.

    Args:
        given: keys of the section [algorithm], as in the job.
        part: table of the setting.
        setting: unknown key in that table.
    """
    name = with_preset(given)[part]["name"]
    here = table.class_of(part, name)
    assert here, f"{name} was found before its settings were read"
    dotted = f"algorithm.{part}"
    if close := difflib.get_close_matches(setting, here.model_fields, n=1):
        return f"did you mean {dotted}.{close[0]}?"
    others = dict(table.names_of(part))
    elsewhere = {key for each in others.values() for key in each.model_fields}
    if near := difflib.get_close_matches(setting, elsewhere, n=1):
        owners = [other for other, each in others.items() if near[0] in each.model_fields]
        return (
            f"{near[0]} is of {' and '.join(owners)}, and here {dotted}.name = {name!r}; set that, "
            "or another algorithm.preset"
        )
    return f"{dotted} takes {', '.join(here.model_fields)}"


def algorithm_of(**tables: Any) -> Algorithm:  # noqa: ANN401
    return Algorithm.model_validate(tables)
