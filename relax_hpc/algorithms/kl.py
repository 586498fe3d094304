"""Estimates the divergence of the policy from a reference, on the sampled tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import AlgorithmPart, Needs, TokenLoss, Tokens, Total
from relax_hpc.algorithms.ratios import LARGEST, log_ratio
from relax_hpc.sections import Number

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "rk3"]


class Kl(AlgorithmPart):
    """Pulls towards the reference: in the loss by its gradient, in the reward by the advantage.

    With d = log pi - log pi_ref of the sampled token, and r = pi / mu, mu its sampler:

        k1 = d    k2 = d^2 / 2    k3 = exp(-d) - 1 + d    rk3 = r * k3

    Expected gradients in the loss: rk3's is that of KL(pi || pi_ref) for any sampler; k2's is if pi
    sampled; k3's is that of KL(pi_ref || pi); k1's is 0, or off-policy a pull to mu, and is
    refused. In the reward only k1 has the gradient of KL(pi || pi_ref), if pi sampled or the loss
    has the ratio to the sampler; the others are off by about their own size, and refused. Sources:
    k1 to k3, Schulman, "Approximating KL divergence" (2020); k3 in the loss, GRPO
    (arXiv:2402.03300); rk3, DeepSeek-V3.2 (arXiv:2512.02556), where, as in slime and TRL, r is to
    the policy before the step. verl offers k1 in the loss, and clips k3 at 10.

    abs(d) is clipped at 20; beyond, there is no gradient except rk3's above 20, which is 19 r.
    """

    name: Estimator = "rk3"
    """Estimator."""
    coefficient: Annotated[Number, Field(ge=0)] = 0.001
    """Weight of the divergence; 0 only measures it. Above 0 needs a reference."""
    place: Literal["loss", "reward"] = "loss"
    """loss: its gradient is added. reward: a token's advantage is reduced by the divergence of that
    token and later ones, before the step."""

    def needs(self) -> Needs:
        if not self.coefficient:
            return Needs()
        key = f"algorithm.kl.coefficient = {self.coefficient}"
        return Needs({"ragged/ref_logprobs": key}, prepass=self.place == "reward", every_row=True)

    def of_tokens(self, logprobs: "Tensor", tokens: Tokens) -> TokenLoss:
        """Returns each token's estimate in nats, without the coefficient."""
        gap = log_ratio(logprobs, tokens, "ref_logprobs")
        if self.name == "k1":
            kl = gap
        elif self.name == "k2":
            kl = gap.square() / 2
        else:
            kl = (-gap).exp() - 1 + gap
        if self.name == "rk3":
            ratio = log_ratio(logprobs, tokens, "rollout_logprobs").exp()
            # There k3 is cut off and has no gradient; r's alone would push from the reference.
            kl = kl * ratio.detach().where(gap <= -LARGEST, ratio)
        return TokenLoss(kl, {"kl/mean": kl.detach()})

    def prepare(self, batches: Sequence[Tokens], total: Total) -> list[Tokens]:
        from relax_hpc.algorithms.segments import rest_over

        def of(batch: Tokens) -> Tokens:
            kl = self.of_tokens(batch.columns["old_logprobs"], batch).loss
            rest = rest_over(kl, batch.sequence_ids, batch.loss_mask, len(batch.groups))
            return batch.with_columns(
                advantages=batch.columns["advantages"] - self.coefficient * rest
            )

        return [of(batch) for batch in batches] if self.place == "reward" else list(batches)


class NoKl(AlgorithmPart):
    """No pull; with a reference, k3 is measured."""

    name: Literal["none"] = "none"
