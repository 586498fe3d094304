"""The divergence of the policy from a reference, estimated from the tokens that were sampled."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import Needs, Part, TokenLoss, Tokens, Total
from relax_hpc.algorithms.ratios import LARGEST, log_ratio
from relax_hpc.sections import Number

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "rk3"]


class Kl(Part):
    """A pull towards the reference: in the loss by its gradient, in the reward by the advantage.

    With d = log pi - log pi_ref of the sampled token, and r = pi / mu, mu its sampler:

        k1 = d    k2 = d^2 / 2    k3 = exp(-d) - 1 + d    rk3 = r * k3

    Expected gradients in the loss: rk3's is that of KL(pi || pi_ref), whoever sampled; k2's is if
    pi sampled; k3's is that of KL(pi_ref || pi); k1's is 0, or off-policy a pull to mu, and a job
    with it is refused. In the reward k1 alone has the gradient of KL(pi || pi_ref), if pi sampled,
    or the loss has the ratio to who did; the others are off by about its own size, and refused.
    Sources: k1 to k3, Schulman, "Approximating KL divergence" (2020); k3 in the loss, GRPO
    (arXiv:2402.03300); rk3, DeepSeek-V3.2 (arXiv:2512.02556), where, as in slime and TRL, r is to
    the policy before the step. verl offers k1 in the loss, and cuts k3 off at 10.

    abs(d) is cut off at 20; beyond, there is no gradient but that of rk3 above 20, which is 19 r.
    """

    name: Estimator = "rk3"
    """Estimator."""
    coefficient: Annotated[Number, Field(ge=0)] = 0.001
    """Weight of the divergence; 0 only measures it. Above 0 needs a reference."""
    place: Literal["loss", "reward"] = "loss"
    """loss: its gradient is added. reward: the advantage of a token is lowered by the divergence of
    that token and those after it, before the step."""

    def needs(self) -> Needs:
        if not self.coefficient:
            return Needs()
        key = f"algorithm.kl.coefficient = {self.coefficient}"
        return Needs({"ragged/ref_logprobs": key}, prepass=self.place == "reward", every_row=True)

    def of_tokens(self, logprobs: "Tensor", tokens: Tokens) -> TokenLoss:
        """The estimate of each token, nats, without the coefficient."""
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


class NoKl(Part):
    """Nothing pulls; with a reference, k3 is measured."""

    name: Literal["none"] = "none"
