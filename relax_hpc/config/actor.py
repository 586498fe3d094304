"""Who trains, and whose policy it is compared with."""

import math
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from relax_hpc.config.layout import GridConfig, MegatronLayout
from relax_hpc.config.model import ModelConfig
from relax_hpc.config.optimizer import OptimizerConfig
from relax_hpc.config.saving import SavingConfig
from relax_hpc.sections import (
    NonNegative,
    Positive,
    Resources,
    Section,
    UserPath,
)


class ActorConfig(Section, SavingConfig, MegatronLayout):
    section: ClassVar[str] = "actor"

    portion_micro_batches: NonNegative = 4
    """Training starts on a part of a batch once every data-parallel rank can fill this many
    micro-batches; 0 waits for the whole batch. The update is the same."""
    max_skipped_updates: Positive = 3
    """An update whose loss or gradient is not finite is skipped; as many in a row stop the run."""
    optimizer: OptimizerConfig = OptimizerConfig()
    resources: Resources = Resources()

    @property
    def tokens_per_portion(self) -> float:
        """Tokens of a batch that are worth starting on before the rest is there."""
        if not self.portion_micro_batches:
            return math.inf
        room = self.data_parallel * self.tokens_per_micro_batch * self.portion_micro_batches
        return 0.95 * room  # rows seldom fill it to the last token; more would open another one


class ReferenceConfig(Section, GridConfig):
    """The policy that the KL term compares with; its grid counts with placement "own" only."""

    section: ClassVar[str] = "reference"

    placement: Literal["none", "actor", "own"] = "none"
    """Who computes ref_logprobs. actor: the trainer, which swaps its weights with a copy in host
    memory. own: a component of its own, `resources` says where. none: there is no reference."""
    path: UserPath | None = None
    """Hugging Face folder of the reference; unset is model.path, the policy before the first step.
    Of the same tokenizer, and with placement "actor" of the same shape."""
    refresh_every: NonNegative = 0
    """Steps after which the current policy becomes the reference; 0 never. Placement "actor"."""
    tokens_per_micro_batch: Positive | None = None
    """As the actor's, which it is if unset. Placement "own"."""
    resources: Resources = Resources()

    @model_validator(mode="after")
    def _placement_uses_it(self) -> Self:
        of = {"path": ("actor", "own"), "refresh_every": ("actor",)}
        for name in type(self).model_fields:
            value, places = getattr(self, name), of.get(name, ("own",))
            unset = value == type(self).model_fields[name].default
            if name != "placement" and not unset and self.placement not in places:
                raise ValueError(
                    f"reference.{name} = {value}: means nothing with reference.placement = "
                    f"{self.placement!r}; remove it, or use {' or '.join(map(repr, places))}"
                )
        return self

    def layout(self, actor: ActorConfig) -> MegatronLayout:
        """That of a component of its own: its grid, and what it does not say as the actor's."""
        fields: dict[str, Any] = {
            name: getattr(self if name in GridConfig.model_fields else actor, name)
            for name in MegatronLayout.model_fields
        }
        if self.tokens_per_micro_batch is not None:
            fields["tokens_per_micro_batch"] = self.tokens_per_micro_batch
        return _ReferenceLayout(**fields)

    def model(self, trained: ModelConfig) -> ModelConfig:
        """Whose weights they are; those that training starts with if it does not say."""
        if self.path is None:
            return trained
        return trained.model_copy(update={"path": self.path, "weights": None})


class _ReferenceLayout(MegatronLayout):
    section: ClassVar[str] = "reference"
