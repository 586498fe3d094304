"""Entropy in the loss: of each trained token `- weight * H` is added, H in nats, at its place.

The weight of a step is known before any of its rows is there, so that portions need not wait.
"""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from relax_hpc.algorithms.part import Needs, Part
from relax_hpc.sections import Number


class EntropyState(NamedTuple):
    """The coefficient after a step, which checkpoints hold."""

    coefficient: float = 0.0
    weight: float = 0.0
    """Weight in the step that comes."""


class Entropy(Part):
    """The weight of the entropy in the loss, step by step."""

    def first(self) -> EntropyState:
        """The state before the first step."""
        return EntropyState()

    def after(self, state: EntropyState, entropy: float) -> EntropyState:
        """The state after a step.

        Args:
            state: in that step.
            entropy: mean of its trained tokens, nats.
        """
        return state


class NoEntropy(Entropy):
    """Entropy is only measured."""

    name: Literal["none"] = "none"


class FixedEntropy(Entropy):
    """A bonus of the same weight in every step."""

    name: Literal["fixed"] = "fixed"
    coefficient: Annotated[Number, Field(ge=0)] = 0.001
    """Weight of the entropy in the loss; with 0 it is only measured."""

    def needs(self) -> Needs:
        return Needs(every_row=self.coefficient > 0)

    def first(self) -> EntropyState:
        return EntropyState(self.coefficient, self.coefficient)


class AdaptiveEntropy(Entropy):
    """A coefficient that follows the entropy, and is applied while that is at or below a target.

        c_(k+1) = c_k + step where H_k < target, else c_k - step, within 0 .. largest; c_1 = 0
        weight  = c where H <= target, else 0

    Source: Skywork-OR1 (arXiv:2505.22312), whose report steps by 0.005; defaults are those of its
    published scripts. It measures H on the batch that it weights; here H is that of the step
    before, since training begins before the batch is whole. A step that was skipped changes
    nothing.
    """

    name: Literal["adaptive"] = "adaptive"
    target: Annotated[Number, Field(gt=0)] = 0.2
    """Entropy that is to be kept, nats per token."""
    step: Annotated[Number, Field(gt=0)] = 1e-4
    """Change of the coefficient per step."""
    largest: Annotated[Number, Field(gt=0)] = 5e-3
    """Bound of the coefficient."""

    def needs(self) -> Needs:
        return Needs(every_row=True)

    def after(self, state: EntropyState, entropy: float) -> EntropyState:
        change = self.step if entropy < self.target else -self.step
        coefficient = min(max(state.coefficient + change, 0.0), self.largest)
        return EntropyState(coefficient, coefficient if entropy <= self.target else 0.0)
