"""Distils a teacher into the policy, on the policy's own samples."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.kl import Kl
from relax_hpc.algorithms.part import AlgorithmPart, Needs, TokenLoss, Tokens, Total
from relax_hpc.algorithms.ratios import log_ratio
from relax_hpc.sections import Number

if TYPE_CHECKING:
    from torch import Tensor

COLUMN = "ragged/teacher_logprobs"
"""Column with the teacher's logprobs."""


class Distill(AlgorithmPart):
    """The reverse divergence KL(pi || teacher) on the sampled tokens.

        advantage: A_t += coefficient (log pi_T - log mu)
        loss:      loss_t += coefficient r k3, r = pi / mu, k3 = pi_T / pi - 1 - log(pi_T / pi)

    mu is the sampler. As an advantage it passes through the algorithm's loss with its bounds and
    anchor; a token is credited only for itself, not for later ones. Its expected gradient is the
    divergence's if mu = pi, and lags as mu does. The loss's gradient is exact for any sampler,
    without bounds (`kl.Kl`, rk3). Reward advantages are whitened before it is added.

    Sources: on-policy distillation, GKD (arXiv:2306.13649) and, with the policy gradient, MiniLLM
    (arXiv:2306.08543); per token without later ones, Thinking Machines, "On-Policy Distillation"
    (2025). slime and Trinity-RFT have the advantage, too; tinker-cookbook can subtract the batch's
    mean, and can add discounted later terms.
    """

    name: Literal["advantage", "loss"] = "advantage"
    """advantage: tokens that the teacher finds likelier than the sampler did get more advantage.
    loss: a separate term."""
    coefficient: Annotated[Number, Field(gt=0)] = 1.0
    """Weight of the divergence, beside rewards and other terms."""

    def needs(self) -> Needs:
        return Needs({COLUMN: f"algorithm.distill.name = {self.name!r}"}, every_row=True)

    def with_advantages(self, tokens: Tokens) -> Tokens:
        """Returns the tokens with the teacher's part added to their advantages, if configured."""
        if self.name == "loss":
            return tokens
        gap = log_ratio(tokens.columns["teacher_logprobs"], tokens, "rollout_logprobs")
        return tokens.with_columns(advantages=tokens.columns["advantages"] + self.coefficient * gap)

    def prepare(self, batches: Sequence[Tokens], total: Total) -> list[Tokens]:
        return [self.with_advantages(batch) for batch in batches]

    def of_tokens(self, logprobs: "Tensor", tokens: Tokens) -> TokenLoss:
        """Returns each token's estimate in nats, without the coefficient; `distill/kl` is log(pi
        / pi_T)."""
        gap = log_ratio(logprobs.detach(), tokens, "teacher_logprobs")
        of_teacher = tokens.with_columns(ref_logprobs=tokens.columns["teacher_logprobs"])
        found = Kl(name="rk3").of_tokens(logprobs, of_teacher)
        return TokenLoss(found.loss, {"distill/kl": gap})


class NoDistill(AlgorithmPart):
    """There is no teacher."""

    name: Literal["none"] = "none"
