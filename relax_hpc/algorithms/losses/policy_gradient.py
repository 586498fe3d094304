"""The plain policy gradient."""

from typing import TYPE_CHECKING, Literal

from relax_hpc.algorithms.part import Loss, Needs, TokenLoss, Tokens
from relax_hpc.algorithms.ratios import advantages_of

if TYPE_CHECKING:
    from torch import Tensor


class PolicyGradient(Loss):
    """loss_t = -A_t log pi_t.

    No ratio, no bound: right for on-policy samples. With an older policy, or different arithmetic,
    add a correction. Source: REINFORCE, Williams (1992).
    """

    name: Literal["policy_gradient"] = "policy_gradient"

    @property
    def has_trust_region(self) -> bool:
        return False

    def needs(self) -> Needs:
        return Needs()

    def of_tokens(self, logprobs: "Tensor", tokens: Tokens) -> TokenLoss:
        return TokenLoss(-advantages_of(tokens) * logprobs.where(tokens.loss_mask, 0.0))
