"""Truncated importance weights, by sequence."""

from typing import Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import ANCHORS, Correction, Needs, Tokens, TokenWeights
from relax_hpc.algorithms.ratios import LARGEST, sequence_sums, weight_logs
from relax_hpc.sections import Number


class SequenceTis(Correction):
    """w = min(product over the sequence of pi_old / mu, cap), for all tokens of the sequence.

    Unbiased but for the cap, whereas a token's own ratio ignores its prefix; the variance grows
    with the length. Sources: as `tis`; verl (`rollout_is = "sequence"`) and TRL
    (`sequence_truncate`) agree. OpenRLHF's `seq-mask-tis` does not truncate. abs(log w) <= 20.
    """

    name: Literal["sequence_tis"] = "sequence_tis"
    cap: Annotated[Number, Field(gt=0)] = 2.0
    """Largest weight."""

    def needs(self) -> Needs:
        return Needs(anchors=ANCHORS)

    def of_tokens(self, tokens: Tokens) -> TokenWeights:
        logs = sequence_sums(weight_logs(tokens), tokens)
        weights = logs.clamp(-LARGEST, LARGEST).exp()
        capped = {"loss/importance_capped": weights >= self.cap}
        weights = weights.clamp(max=self.cap)
        return TokenWeights(weights, {"loss/importance_mean": weights, **capped})
