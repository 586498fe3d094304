"""Routing replay: the trainer sends tokens to the experts where the engine sent them.

Engine and trainer round differently, so their routers do not always agree, and a token that went to
other experts has quite another logprob. What is replayed is the choice alone. The weights of the
chosen experts come from the trainer's own logits, so that the router gets a gradient:

    g_i = exp(s_i) / sum over chosen j of exp(s_j)      s = the trainer's logits

t = tokens, L = layers of this rank that have experts, k = experts per token.

Source: R3 (arXiv:2510.11370). Peers keep a queue of choices per layer, which forward, backward and
recomputation have to take from in the same order; here a micro-batch brings its own along.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax_hpc.errors import TrainingError
from relax_hpc.models.architecture import Architecture
from relax_hpc.schema import NO_EXPERT, Row

LAST = NO_EXPERT - 1
"""Last token of a row: no engine has computed it, and nothing that is trained depends on it."""

TopK = Callable[[Tensor, int, int | None, int | None], tuple[Tensor, Tensor]]


class Layers(NamedTuple):
    """The layers that records are cut to."""

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
    """[t, L, k] int16 experts of the rows' tokens end to end, and of `padding` tokens after them.

    Raises:
        TrainingError: a record is not of this model.
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
            "engines computed another model, or set rollout.routed_experts = false"
        )
    else:
        found = experts.reshape(size, layers.total, layers.per_token)[:, list(layers.own)]
    found[-1:] = LAST
    return found


class Replay:
    """The choice of one layer; Megatron-core's routing asks it as it asks its own RouterReplay."""

    def __init__(self, recorded: Tensor) -> None:
        """`recorded` is [t, k]."""
        self._recorded = recorded.long()
        self.is_missing: Tensor = recorded[:, 0] != LAST
        """[t] bool, tokens that ought to have a record, and have none that could be one."""
        self.is_known: Tensor
        """[t] bool, tokens that go where the record says."""
        self.differs: Tensor
        """[t] bool, those of them that the router would have sent elsewhere."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: TopK,
    ) -> tuple[Tensor, Tensor]:
        """[t, k] scores of the experts, with gradient, and [t, k] their numbers."""
        _, own = default_compute_topk(scores, topk, num_groups, group_topk)
        ordered = self._recorded.sort(-1).values
        different = (ordered[:, 1:] != ordered[:, :-1]).all(-1)
        self.is_known = (ordered[:, 0] >= 0) & (ordered[:, -1] < scores.shape[1]) & different
        self.is_missing = self.is_missing & ~self.is_known
        self.differs = self.is_known & (own.sort(-1).values != ordered).any(-1)
        chosen = torch.where(self.is_known[:, None], self._recorded, own)
        return scores.gather(1, chosen), chosen
