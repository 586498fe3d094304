"""Distillation: what a teacher would have said, where the policy said something."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.kl import Kl
from relax_hpc.algorithms.part import Needs, Part, TokenLoss, Tokens, Total
from relax_hpc.algorithms.ratios import log_ratio
from relax_hpc.sections import Number

if TYPE_CHECKING:
    from torch import Tensor

COLUMN = "ragged/teacher_logprobs"
"""Column that a row has from its teacher."""


class Distill(Part):
    """The reverse divergence KL(pi || teacher), of the tokens that were sampled.

        advantage: A_t += coefficient (log pi_T - log mu)
        loss:      loss_t += coefficient r k3, r = pi / mu, k3 = pi_T / pi - 1 - log(pi_T / pi)

    mu is the sampler. As an advantage it goes through the loss of the algorithm, its bounds and
    its anchor; a token is worth what it says itself, none of what follows. In expectation its
    gradient is that of the divergence where mu is pi, and lags behind as mu does. The loss's is
    exact, whoever sampled, and knows no bounds (`kl.Kl`, rk3). Advantages of rewards are
    whitened, where they are, without it.

    Sources: on-policy distillation, GKD (arXiv:2306.13649) and, with the policy gradient, MiniLLM
    (arXiv:2306.08543); per token without what follows, Thinking Machines, "On-Policy Distillation"
    (2025). slime and Trinity-RFT have the advantage, too; tinker-cookbook's can be less the mean of
    the batch, and can add up what follows, discounted.
    """

    name: Literal["advantage", "loss"] = "advantage"
    """advantage: tokens that the teacher finds likelier than the sampler did are worth more. loss:
    a term of its own."""
    coefficient: Annotated[Number, Field(gt=0)] = 1.0
    """Weight of the divergence, beside rewards and other terms."""

    def needs(self) -> Needs:
        return Needs({COLUMN: f"algorithm.distill.name = {self.name!r}"}, every_row=True)

    def with_advantages(self, tokens: Tokens) -> Tokens:
        """The tokens with advantages to which the teacher's part is added, if it is one."""
        if self.name == "loss":
            return tokens
        gap = log_ratio(tokens.columns["teacher_logprobs"], tokens, "rollout_logprobs")
        return tokens.with_columns(advantages=tokens.columns["advantages"] + self.coefficient * gap)

    def prepare(self, batches: Sequence[Tokens], total: Total) -> list[Tokens]:
        return [self.with_advantages(batch) for batch in batches]

    def of_tokens(self, logprobs: "Tensor", tokens: Tokens) -> TokenLoss:
        """The estimate of each token, nats, without the coefficient; `distill/kl` is log(pi /
        pi_T)."""
        gap = log_ratio(logprobs.detach(), tokens, "teacher_logprobs")
        of_teacher = tokens.with_columns(ref_logprobs=tokens.columns["teacher_logprobs"])
        found = Kl(name="rk3").of_tokens(logprobs, of_teacher)
        return TokenLoss(found.loss, {"distill/kl": gap})


class NoDistill(Part):
    """There is no teacher."""

    name: Literal["none"] = "none"
