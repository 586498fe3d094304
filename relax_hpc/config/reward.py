"""The score of a response."""

from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from relax_hpc.sections import Number, PassThrough, Positive, Section

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"
_DEFAULT = "boxed_number"


class RewardTerm(Section):
    """One of several rewards that are added."""

    name: str
    """Function that scores a response, as `reward.name`."""
    weight: Number = 1.0
    """The reward is the sum of weight times score."""
    args: PassThrough = {}
    """Settings of the function, as `reward.args`."""
    sources: list[str] = []
    """Names of `prompts.sources`, of held-out sets, or in the field `source` of rows, whose prompts
    it scores; [] is all. Every prompt has a term, at least."""


class RewardConfig(Section):
    name: str | None = None
    """Function that scores a response: one that is built in, boxed_number by default, or your own
    "file.py:function" or "package.module:function"; see docs/rewards.md."""
    args: PassThrough = {}
    """Settings of the function: parameters behind the `*` of its declaration."""
    terms: dict[Annotated[str, Field(pattern=_NAME, max_length=40)], RewardTerm] = {}
    """Several rewards, instead of `name`, by names of your own."""
    deadline_s: Annotated[Number, Field(gt=0)] = 10.0
    """Seconds for one sample, or one group if the reward sees it whole; later is an error."""
    memory_gib: Annotated[Number, Field(ge=0.25)] = 2.0
    """Memory of a process that scores; it is replaced when it keeps half of that."""
    on_error: Literal["zero", "mask"] = "zero"
    """Meaning of a reward that failed. zero: 0, or the least that a built-in reward gives. mask:
    there is none, so the response is neither compared with its siblings nor trained on, and in no
    held-out figure."""
    most_errors: Annotated[Number, Field(ge=0, le=1)] = 0.05
    """Part of the newest 500 rewards that may fail; when more do, the run ends and names them."""
    solved_at: Number = 1.0
    """A prompt whose responses all reach it counts as solved, in `groups/solved` of a step."""
    workers: Positive = 2
    """Processes of each rollout task that score, beside a spare one."""

    @property
    def masks_errors(self) -> bool:
        """Whether a response whose reward failed has none."""
        return self.on_error == "mask"

    @property
    def every_term(self) -> dict[str, RewardTerm]:
        """The functions by the names of their terms; one alone is called ""."""
        return dict(self.terms) or {"": RewardTerm(name=self.only_name, args=self.args)}

    @property
    def only_name(self) -> str:
        """The function where there are no terms."""
        return self.name or _DEFAULT

    def with_names(self, renamed: Callable[[str], str]) -> Self:
        """Returns the same with other names of functions."""
        terms = {
            title: each.model_copy(update={"name": renamed(each.name)})
            for title, each in self.terms.items()
        }
        name = self.name and renamed(self.name)
        return self.model_copy(update={"name": name, "terms": terms})

    @model_validator(mode="after")
    def _is_one_or_several(self) -> Self:
        if self.terms and (self.name is not None or self.args):
            key = "args" if self.name is None else f"name = {self.name!r}"
            raise ValueError(
                f"reward.{key}: the reward is the sum of reward.terms ({', '.join(self.terms)}); "
                "make it one of them, or remove it"
            )
        return self
