"""The trainer, and the reference that its policy is compared with."""

import math
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from relax_hpc.config.layout import FrozenPart, Layout, MegatronConfig
from relax_hpc.config.model import LoraConfig, ModelConfig
from relax_hpc.config.optimizer import OptimizerConfig
from relax_hpc.config.saving import SavingConfig
from relax_hpc.sections import (
    NonNegative,
    Resources,
    Section,
    UserPath,
)

_PORTION = 4
"""Micro-batches of a data-parallel rank that are worth starting on."""


class ActorConfig(Section, SavingConfig, MegatronConfig):
    section: ClassVar[str] = "actor"

    portion_micro_batches: NonNegative | None = None
    """Training starts on a part of a batch once every data-parallel rank can fill this many
    micro-batches; 0 waits for the whole batch. The update is the same. Unset is 4, or the whole
    batch where the algorithm needs it."""
    frozen: list[FrozenPart] = []
    """Parts that do not learn, of a model that sees or hears: a tower, the matrices from its
    outputs to features, the rest. They have no gradient and no moments."""
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    resources: Resources = Resources()

    @property
    def tokens_per_portion(self) -> float:
        """Tokens of a batch that are worth starting on before the rest is there."""
        count = _PORTION if self.portion_micro_batches is None else self.portion_micro_batches
        if not count:
            return math.inf
        room = self.layout.data_parallel * self.tokens_per_micro_batch * count
        return 0.95 * room  # rows seldom fill it to the last token; more would open another one


class ReferenceConfig(Section):
    """The policy that the KL term compares with."""

    placement: Literal["none", "actor", "own"] = "none"
    """Component that computes ref_logprobs. actor: the trainer, which swaps its weights with a copy
    in host memory. own: a component of its own, `resources` says where. none: there is no
    reference."""
    path: UserPath | None = None
    """Hugging Face folder of the reference; unset is model.path, the policy before the first step.
    Of the same tokenizer, and with placement "actor" of the same shape."""
    refresh_every: NonNegative = 0
    """Steps after which the current policy becomes the reference; 0 never. Placement "actor"."""
    layout: Layout | None = None
    """Layout of its own ranks, as the actor's; unset is the actor's. Placement "own"."""
    resources: Resources = Resources()

    @model_validator(mode="after")
    def _placement_uses_it(self) -> Self:
        of = {"path": ("actor", "own"), "refresh_every": ("actor",)}
        for name in type(self).model_fields:
            value, places = getattr(self, name), of.get(name, ("own",))
            unset = value == type(self).model_fields[name].default
            if name != "placement" and not unset and self.placement not in places:
                said = value.model_dump(exclude_unset=True) if isinstance(value, Section) else value
                raise ValueError(
                    f"reference.{name} = {said}: means nothing with reference.placement = "
                    f"{self.placement!r}; remove it, or use {' or '.join(map(repr, places))}"
                )
        return self

    def megatron(self, actor: ActorConfig) -> MegatronConfig:
        """Returns how a component of its own computes: as the actor does, in its layout if it has
        one."""
        of_actor: dict[str, Any] = {key: getattr(actor, key) for key in MegatronConfig.model_fields}
        return _ReferenceMegatron(**of_actor | {"layout": self.layout or actor.layout})

    def model(self, trained: ModelConfig) -> ModelConfig:
        """Returns the model whose weights they are; the one that training starts with if unset."""
        if self.path is None:
            return trained
        return trained.model_copy(update={"path": self.path, "weights": None})


class _ReferenceMegatron(MegatronConfig):
    section: ClassVar[str] = "reference"
