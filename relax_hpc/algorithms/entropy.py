"""Adds `-weight * H` to the loss of each trained token, H its entropy in nats.

A step's weight is known before its rows arrive, so portions need not wait.
"""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from relax_hpc.algorithms.part import AlgorithmPart, Needs
from relax_hpc.sections import Number


class EntropyState(NamedTuple):
    """The coefficient after a step, saved in checkpoints."""

    coefficient: float = 0.0
    weight: float = 0.0
    """Weight in the next step."""


class Entropy(AlgorithmPart):
    """The weight of the entropy in the loss, step by step."""

    def first(self) -> EntropyState:
        """Returns the state before the first step."""
        return EntropyState()

    def after(self, state: EntropyState, entropy: float) -> EntropyState:
        """Returns the state after a step.

        Args:
            state: during that step.
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
    """Weight of the entropy in the loss; 0 only measures it."""

    def needs(self) -> Needs:
        return Needs(every_row=self.coefficient > 0)

    def first(self) -> EntropyState:
        return EntropyState(self.coefficient, self.coefficient)


class AdaptiveEntropy(Entropy):
    """A coefficient that follows the entropy, applied only while that is at or below a target.

        c_(k+1) = c_k + step where H_k < target, else c_k - step, within 0 .. largest; c_1 = 0
        weight  = c where H <= target, else 0

    Source: Skywork-OR1 (arXiv:2505.22312), whose report steps by 0.005; defaults are those of its
    published scripts. It measures H on the batch itself; here H is from the previous step, since
    training begins before the batch is complete. A skipped step changes nothing.
    """

    name: Literal["adaptive"] = "adaptive"
    target: Annotated[Number, Field(gt=0)] = 0.2
    """Entropy to keep, nats per token."""
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
