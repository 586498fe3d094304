"""Terms that an algorithm may add: a pull towards a reference, and entropy."""

from typing import Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import Needs, Part
from relax_hpc.sections import Number

Coefficient = Annotated[Number, Field(ge=0)]


class Kl(Part):
    """The divergence of the policy from a reference; beside the policy's loss, not within it."""

    name: Literal["rk3", "k1", "k2", "k3"] = "rk3"
    """Estimator, see `kl.estimate`."""
    coefficient: Coefficient = 0.001
    """Weight of it; 0 only measures. Above 0 needs a reference."""
    place: Literal["loss", "reward"] = "loss"
    """loss: its gradient is added. reward: a token's advantage is lowered by what it and those after
    it cost."""

    def needs(self) -> Needs:
        if not self.coefficient:
            return Needs()
        return Needs({"ragged/ref_logprobs": f"algorithm.kl.coefficient = {self.coefficient}"})


class NoKl(Part):
    """Nothing pulls; with a reference k3 is measured."""

    name: Literal["none"] = "none"


class Entropy(Part):
    """Adds -coefficient * entropy to the loss of each token."""

    name: Literal["bonus"] = "bonus"
    coefficient: Coefficient = 0.001
    """Weight of the entropy."""

    def needs(self) -> Needs:
        return Needs(entropy=self.coefficient > 0)


class NoEntropy(Part):
    """Entropy is only measured."""

    name: Literal["none"] = "none"
