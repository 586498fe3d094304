"""An algorithm whose advantages are of tokens: the discounted return of a reward on each.

    A_t = sum_(i >= t) gamma^(i - t) reward_i,  loss = -sum_t A_t r_t

over the trained tokens i of the same sequence; the mean is over trained tokens.
"""

from typing import Literal

from relax_hpc.algorithms.algorithm import Algorithm, LossOutput, Settings

GAMMA = 0.5


class DiscountedSettings(Settings):
    name: Literal["discounted"] = "discounted"


def _returns(_, tokens):
    import torch

    ids, place = tokens.sequence_ids, torch.arange(len(tokens.sequence_ids))
    later = (ids[:, None] == ids) & (place >= place[:, None])
    reward = torch.where(tokens.loss_mask, tokens.columns["rollout_logprobs"], 0.0)
    return torch.where(later, GAMMA ** (place - place[:, None]).clamp(min=0) * reward, 0.0).sum(1)


def _loss(_, __):
    import torch

    def loss(logprobs, tokens):
        columns, mask = tokens.columns, tokens.loss_mask
        ratio = torch.where(mask, logprobs - columns["old_logprobs"], 0.0).exp()
        return LossOutput(-(ratio * columns["advantages"] * mask).sum(), {})

    return loss


DISCOUNTED = Algorithm("discounted", DiscountedSettings, _loss, token_advantages=_returns)
