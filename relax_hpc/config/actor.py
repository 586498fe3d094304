"""Configures the trainer, and the models beside it: reference, teachers and critic."""

import math
import string
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from relax_hpc.config.model import (
    FrozenPart,
    Layout,
    LoraConfig,
    MegatronConfig,
    ModelConfig,
    OptimizerConfig,
    SavingConfig,
)
from relax_hpc.schema import TEACHERS, columns_of
from relax_hpc.sections import NAME, NonNegative, Number, Resources, Section, UserPath

_PORTION = 4
"""Micro-batches per data-parallel rank that justify an early start."""


class ActorConfig(Section, SavingConfig, MegatronConfig):
    frozen: list[FrozenPart] = []
    """Parts of a vision or audio model that do not learn: an encoder, the matrices from its outputs
    to features, or the rest. They have no gradient and no moments."""
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    resources: Resources = Resources()

    @property
    def tokens_per_portion(self) -> float:
        """Tokens of a batch that justify an early start."""
        asked = self.advanced.portion_micro_batches
        count = _PORTION if asked is None else asked
        if not count:
            return math.inf
        room = self.layout.data_parallel * self.tokens_per_micro_batch * count
        return 0.95 * room  # rows seldom fill it to the last token; more would open another one


class ReferenceConfig(Section):
    """The policy for the KL term."""

    placement: Literal["none", "actor", "own"] = "none"
    """Component that computes ref_logprobs. actor: the trainer, which swaps its weights with a copy
    in host memory. own: a separate component on its own `resources`. none: there is no
    reference."""
    path: UserPath | None = None
    """Model of the reference, named as in `model.path`; unset is that one, the policy before the
    first step. It needs the same tokenizer, and with placement "actor" the same shape."""
    refresh_every: NonNegative = 0
    """Steps between replacing the reference by the current policy; 0 is never. Needs placement
    "actor"."""
    layout: Layout | None = None
    """Layout of its ranks; unset is the actor's. Needs placement "own"."""
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
        """Returns the settings of a separate component: the actor's, with its own layout if set."""
        return actor.beside("reference", self.layout)

    def model(self, trained: ModelConfig) -> ModelConfig:
        """Returns the reference's model; the initial policy if unset."""
        return trained.beside(self.path)


def fields_of(prompt: str) -> list[str]:
    """Returns the names in braces, in order.

    Raises:
        ValueError: unbalanced braces, or more than a name in them.
    """
    found = [(name, spec, how) for _, name, spec, how in string.Formatter().parse(prompt)]
    if any(spec or how for _, spec, how in found):
        raise ValueError("has more than a name in braces; write {{ and }} for braces")
    return [name for name, _, _ in found if name is not None]


def _with_fields(prompt: str) -> str:
    if not prompt:
        return prompt
    try:
        names = fields_of(prompt)
    except ValueError as error:
        raise ValueError(f"{error}; write {{{{ and }}}} for braces") from None
    if "prompt" not in names or "" in names:
        raise ValueError("leaves the prompt out; write {prompt} where it is to stand")
    return prompt


class TeacherConfig(Section):
    """A teacher, as a separate component."""

    path: UserPath | None = None
    """Model of the teacher, named as in `model.path`, with the same tokenizer; unset is the initial
    policy, which needs `prompt`."""
    sources: list[Annotated[str, Field(min_length=1)]] = []
    """Names of `prompts.sources` whose prompts it teaches; a single teacher has all of them."""
    prompt: Annotated[str, AfterValidator(_with_fields)] = ""
    """Text that it sees in place of the prompt: {prompt} is the policy's prompt, {answer} the
    answer, other names in braces are fields of the row. Unset is the prompt."""
    layout: Layout | None = None
    """Layout of its ranks; unset is the actor's."""
    resources: Resources = Resources()

    def model(self, trained: ModelConfig) -> ModelConfig:
        """Returns its model; `trained` is the policy's."""
        return trained.beside(self.path)

    def megatron(self, actor: MegatronConfig, name: str) -> MegatronConfig:
        """Returns the settings of teacher `name`: the actor's, with its own layout if set."""
        return actor.beside(f"teachers.{name}", self.layout)


Teachers = dict[Annotated[str, Field(pattern=NAME, max_length=100)], TeacherConfig]


def component_of(name: str) -> str:
    return f"teacher-{name}"


def columns_by_teacher(teachers: Mapping[str, TeacherConfig]) -> dict[str, str]:
    """Maps each teacher to its column."""
    pairs = zip(teachers, TEACHERS, strict=False)
    return {name: next(iter(columns_of(role))) for name, role in pairs}


class CriticAdvanced(Section):
    weights: UserPath | None = None
    """A checkpoint with its initial weights: of a critic, with its head, or of a policy. Unset is
    model.weights if `path` is unset, else the weights in `path`."""
    value_clip: Annotated[Number, Field(ge=0)] = 0.2
    """Largest change of a value from the batch's that can reduce the loss; 0 does not clip."""
    returns_lambda: Annotated[Number, Field(ge=0, le=1)] = 1.0
    """Lambda of its targets; 1 uses the rewards alone, whatever the values were."""


class CriticConfig(Section):
    """The critic, as a separate component; without this table there is none."""

    path: UserPath | None = None
    """Model under the value head, named as in `model.path`, with the same tokenizer; unset is that
    one."""
    lr: Annotated[Number, Field(gt=0)] = 1e-5
    """Adam's learning rate after the warm-up; the rest of its optimizer is set by
    `actor.optimizer`."""
    warmup_steps: NonNegative = 0
    """First steps of the run that train only the critic; warm-up and decay of the policy's learning
    rate begin after them."""
    advanced: CriticAdvanced = CriticAdvanced()
    layout: Layout | None = None
    """Layout of its ranks; unset is the actor's."""
    resources: Resources = Resources()

    def model(self, trained: ModelConfig) -> ModelConfig:
        """Returns its initial model; `trained` is the policy's."""
        return trained.beside(self.path, self.advanced.weights)

    def megatron(self, actor: MegatronConfig) -> MegatronConfig:
        """Returns its settings: the actor's, with its own layout if set."""
        return actor.beside("critic", self.layout)

    def optimizer(self, actor: OptimizerConfig) -> OptimizerConfig:
        return actor.model_copy(update={"lr": self.lr})

    def saving(self, actor: SavingConfig) -> SavingConfig:
        """Returns the actor's checkpoint settings."""
        return SavingConfig(save_every=actor.save_every, keep_checkpoints=actor.keep_checkpoints)
