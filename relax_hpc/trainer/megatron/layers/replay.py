"""Replays routing: the trainer sends tokens to the experts that the engine chose.

Engine and trainer round differently, so their routers do not always agree, and a token sent to
other experts has quite another logprob. Only the choice is replayed. The weights of the chosen
experts come from the trainer's own logits, so that the router gets a gradient:

    g_i = exp(s_i) / sum over chosen j of exp(s_j)      s = the trainer's logits

t = tokens, L = layers of this rank that have experts, k = experts per token.

Source: R3 (arXiv:2510.11370). Other implementations keep a queue of choices per layer, which
forward, backward and recomputation have to read in the same order; here a micro-batch carries its
own.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax_hpc.errors import TrainingError
from relax_hpc.schema import NO_EXPERT, Row
from relax_hpc.trainer.models.architecture import Architecture

LAST = NO_EXPERT - 1
"""Last token of a row: no engine has computed it, and no trained value depends on it."""

TopK = Callable[[Tensor, int, int | None, int | None], tuple[Tensor, Tensor]]


class Layers(NamedTuple):
    """The layers whose records a rank needs."""

    own: tuple[int, ...]
    """Numbers of this rank's layers with experts, from 0, in the order of its chunks."""
    total: int
    """All layers of the model: a record has k numbers for each, also for dense ones."""
    per_token: int


def layers_of(shape: Architecture, own: Iterable[int]) -> Layers | None:
    """Returns the layers of a rank; None for a model without experts."""
    if shape.experts is None:
        return None
    return Layers(tuple(own), shape.num_layers, shape.experts.experts_per_token)


def pack(rows: Sequence[Row], padding: int, layers: Layers) -> Tensor:
    """Returns [t, L, k] int16 experts of the rows' tokens end to end, then of `padding` tokens.

    Raises:
        TrainingError: a record is of another model.
    """
    parts = [_cut(row, layers) for row in rows]
    parts.append(np.full((padding, len(layers.own), layers.per_token), NO_EXPERT, np.int16))
    return torch.from_numpy(np.concatenate(parts))


def _cut(row: Row, layers: Layers) -> npt.NDArray[np.int16]:
    size, experts = len(row.token_ids), row.routed_experts
    if experts is None:
        found = np.full((size, len(layers.own), layers.per_token), NO_EXPERT, np.int16)
    elif experts.shape != (size, layers.total * layers.per_token):
        raise TrainingError(
            f"routed experts of trajectory {row.guid}/{row.sibling}: {experts.shape} for {size} "
            f"tokens in {layers.total} layers with {layers.per_token} experts per token; "
            "engines computed another model, or set rollout.advanced.routed_experts = false"
        )
    else:
        found = experts.reshape(size, layers.total, layers.per_token)[:, list(layers.own)]
    found[-1:] = LAST
    return found


class RoutingReplay:
    """The choices of one layer, behind the interface of Megatron-core's RouterReplay."""

    def __init__(self, recorded: Tensor) -> None:
        """`recorded` is [t, k]."""
        self._recorded = recorded.long()
        self.is_missing: Tensor = recorded[:, 0] != LAST
        """[t] bool, tokens that lack a valid record."""
        self.is_known: Tensor
        """[t] bool, tokens routed by their record."""
        self.differs: Tensor
        """[t] bool, those that the router would have sent elsewhere."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: TopK,
    ) -> tuple[Tensor, Tensor]:
        """Returns [t, k] scores of the experts, with gradient, and [t, k] their numbers."""
        _, own = default_compute_topk(scores, topk, num_groups, group_topk)
        ordered = self._recorded.sort(-1).values
        different = (ordered[:, 1:] != ordered[:, :-1]).all(-1)
        self.is_known = (ordered[:, 0] >= 0) & (ordered[:, -1] < scores.shape[1]) & different
        self.is_missing = self.is_missing & ~self.is_known
        self.differs = self.is_known & (own.sort(-1).values != ordered).any(-1)
        chosen = torch.where(self.is_known[:, None], self._recorded, own)
        return scores.gather(1, chosen), chosen
