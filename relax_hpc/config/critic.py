"""The critic: a model that tells what a state is worth, for advantages of tokens."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from relax_hpc.config.layout import Layout, MegatronConfig
from relax_hpc.config.model import ModelConfig
from relax_hpc.config.optimizer import OptimizerConfig
from relax_hpc.config.saving import SavingConfig
from relax_hpc.sections import NonNegative, Number, Resources, Section, UserPath


class CriticConfig(Section):
    """A component of its own; without this table there is none."""

    path: UserPath | None = None
    """Hugging Face folder of the model under the value head; unset is model.path. Of the same
    tokenizer."""
    weights: UserPath | None = None
    """A checkpoint whose weights it starts with: of a critic, with its head, or of a policy. Unset
    is model.weights where `path` is unset, else those in `path`."""
    lr: Annotated[Number, Field(gt=0)] = 1e-5
    """Adam's learning rate after the warm-up; everything else of its optimizer is as
    `actor.optimizer` says."""
    warmup_steps: NonNegative = 0
    """First steps of the run in which the critic alone learns, and the policy stands still; warm-up
    and decay of the policy's learning rate begin behind them."""
    value_clip: Annotated[Number, Field(ge=0)] = 0.2
    """Furthest that its value of a state may gain from going away from the one that the batch came
    with; 0 does not clip."""
    returns_lambda: Annotated[Number, Field(ge=0, le=1)] = 1.0
    """Lambda of what it learns; 1 is what was rewarded, whatever the values were."""
    layout: Layout | None = None
    """Layout of its ranks, as the actor's; unset is the actor's."""
    resources: Resources = Resources()

    def model(self, trained: ModelConfig) -> ModelConfig:
        """Returns the model that it begins as; `trained` is the policy's."""
        weights = self.weights or (None if self.path else trained.weights)
        return trained.model_copy(update={"path": self.path or trained.path, "weights": weights})

    def megatron(self, actor: MegatronConfig) -> MegatronConfig:
        """Returns how it computes: as the actor does, in its own layout if it has one."""
        of_actor: dict[str, Any] = {key: getattr(actor, key) for key in MegatronConfig.model_fields}
        return _CriticMegatron(**of_actor | {"layout": self.layout or actor.layout})

    def optimizer(self, actor: OptimizerConfig) -> OptimizerConfig:
        """Returns how it learns."""
        return actor.model_copy(update={"lr": self.lr})

    def saving(self, actor: SavingConfig) -> SavingConfig:
        """Returns when it is saved: as often as the actor."""
        return SavingConfig(save_every=actor.save_every, keep_checkpoints=actor.keep_checkpoints)


class _CriticMegatron(MegatronConfig):
    section: ClassVar[str] = "critic"
