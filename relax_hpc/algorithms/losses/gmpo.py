"""The geometric mean of the clipped ratios of a sequence."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import Loss, TokenLoss, Tokens
from relax_hpc.algorithms.ratios import advantages_of, log_ratio, sequence_ratio
from relax_hpc.sections import Number

if TYPE_CHECKING:
    from torch import Tensor


class Gmpo(Loss):
    """loss_t = -A exp(mean over the sequence of c), c = min(log r, clip) if A > 0, else max(log r,
    -clip).

    r = pi / anchor. Clipped by token, averaged by sequence: outliers count less than in PPO, and
    the clip may be wider. Source: GMPO (arXiv:2507.20673), exp(+-0.4), as in the authors' code.
    verl averages over sequences of a micro-batch, so that its loss depends on how rows are packed.
    Tokens that are worth different amounts keep them, as in `gspo`; verl gives all of a sequence
    their mean.
    """

    name: Literal["gmpo"] = "gmpo"
    clip: Annotated[Number, Field(gt=0)] = 0.4
    """Largest abs(log ratio) of a token in its advantage's direction."""

    @property
    def ratio_of(self) -> Literal["token", "sequence"]:
        return "sequence"

    def of_tokens(self, logprobs: "Tensor", tokens: Tokens) -> TokenLoss:
        logs, advantages = log_ratio(logprobs, tokens), advantages_of(tokens)
        held = logs.clamp(max=self.clip).where(advantages > 0, logs.clamp(min=-self.clip))
        ratio = sequence_ratio(held, tokens)
        is_clipped = (held != logs) & (advantages != 0)
        return TokenLoss(-ratio * advantages, {"loss/clip_fraction": is_clipped})
