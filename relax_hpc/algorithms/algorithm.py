"""The section [algorithm] of a job: a preset, and what of it is otherwise."""

import difflib
from collections.abc import Callable, Iterator, Mapping
from functools import partial, reduce
from operator import or_
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, SerializeAsAny, model_validator

from relax_hpc.algorithms import presets, table
from relax_hpc.algorithms.aggregation import Aggregation
from relax_hpc.algorithms.entropy import Entropy
from relax_hpc.algorithms.groups import Groups
from relax_hpc.algorithms.part import Advantage, Correction, Loss, Needs, Part
from relax_hpc.sections import Positive, Section


def _known(preset: str) -> str:
    if preset not in presets.PRESETS:
        close = difflib.get_close_matches(preset, presets.PRESETS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use {', '.join(presets.PRESETS)}"
        raise ValueError(f"there is no such preset; {hint}")
    return preset


class Algorithm(Section):
    """How rewards become an update; see docs/algorithms.md."""

    preset: Annotated[str, AfterValidator(_known)] = presets.DEFAULT
    """Algorithm that the tables below begin as. A table with a name replaces the preset's; one
    without changes what it says."""
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
    kl: Annotated[SerializeAsAny[Part], BeforeValidator(partial(table.part_of, "kl"))]
    """Estimator of the divergence from the reference."""
    distill: Annotated[SerializeAsAny[Part], BeforeValidator(partial(table.part_of, "distill"))]
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
    def parts(self) -> Iterator[tuple[str, Part]]:
        """Parts by the table that they stand in."""
        return ((name, getattr(self, name)) for name in table.PARTS)

    @property
    def waits_for_the_batch(self) -> bool:
        """Whether nothing can be trained on before all of the batch is there."""
        return self.needs.scope == "batch" or self.needs.prepass or self.mini_batches > 1

    @property
    def teaches_without_advantage(self) -> bool:
        """Whether rows are trained on whose advantage is 0, or not known before they are read."""
        return self.needs.every_row or self.advantage.is_of_tokens

    @property
    def needs(self) -> Needs:
        """Everything that must be there."""
        return reduce(or_, (part.needs() for _, part in self.parts))

    def with_names(self, named: Callable[[str], str]) -> "Algorithm":
        """The same with parts of the user's own under other names."""
        own = {
            table: part.model_copy(update={"name": named(part.name)})
            for table, part in self.parts
            if ":" in part.name
        }
        return self.model_copy(update=own)


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that a job gives, and what its preset says besides."""
    preset = given.get("preset", presets.DEFAULT)
    known = preset if isinstance(preset, str) and preset in presets.PRESETS else presets.DEFAULT
    return presets.merged(presets.tables_of(known), given)


def unknown_setting(given: Mapping[str, Any], part: str, setting: str) -> str:
    """Says of a setting that the part of a table does not have which one is near, or which parts
    have it.

    Args:
        given: keys of the section [algorithm], as a job has them.
        part: table that the setting stands in.
        setting: key in that table.
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
    """The algorithm of these keys; without any, the default."""
    return Algorithm.model_validate(tables)
