"""Trajectories -> packed micro-batches: who goes where, and the tensors.

T = tokens of a micro-batch, B = its trajectories, end to end without padding between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax_hpc.errors import ConfigError
from relax_hpc.schema import Trajectory


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Bins trajectories, longest first, each into the first micro-batch with room for it.

    Args:
        lengths: tokens per trajectory.
        budget: tokens of a micro-batch, at most.

    Returns:
        Indices into `lengths` per micro-batch; every index once.

    Raises:
        ConfigError: a trajectory is longer than the budget.
    """
    micro_batches: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(lengths):
        length = lengths[index]
        if length > budget:
            raise ConfigError(
                f"actor.tokens_per_micro_batch = {budget}: a trajectory has {length} tokens; raise "
                "it, or lower rollout.max_new_tokens or prompts.max_prompt_tokens"
            )
        target = next((i for i, free in enumerate(room) if length <= free), len(room))
        if target == len(room):
            micro_batches.append([])
            room.append(budget)
        micro_batches[target].append(index)
        room[target] -= length
    return micro_batches


def split_over_ranks(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Partitions trajectories over data-parallel ranks, balancing their tokens.

    The longest goes first, to the rank with the fewest tokens so far (ties: the lowest rank), so
    every process that calls it finds the same partition.

    Returns:
        Indices into `lengths` per rank, ascending; none is empty if there are enough of them.
    """
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for index in _longest_first(lengths):
        rank = load.index(min(load))
        ranks[rank].append(index)
        load[rank] += lengths[index]
    return [sorted(indices) for indices in ranks]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward. Tensors are on the trainer's device."""

    rows: tuple[int, ...]
    """Which of the rank's trajectories, in packed order."""
    lengths: tuple[int, ...]
    """Tokens per document; with padding, one more document than rows."""
    token_ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64, from 0 in each document."""
    cu_seqlens: Tensor
    """[B + 1] int32, where documents begin and end."""
    is_first: Tensor
    """[T] bool, first token of a document: nothing predicts it."""
    loss_mask: Tensor
    """[T] bool, True on trained tokens; never on a document's first."""
    rollout_logprobs: Tensor
    """[T] float32 nats, at sampling time."""
    advantages: Tensor
    """[T] float32, constant over a trajectory."""
    old_logprobs: Tensor | None = None
    """[T] float32 nats, policy before this step's updates; no gradient."""


def build(
    trajectories: Sequence[Trajectory],
    advantages: npt.NDArray[np.floating],
    rows: Sequence[int],
    *,
    device: torch.device,
    multiple_of: int = 1,
) -> MicroBatch:
    """Packs the trajectories `rows` end to end.

    Args:
        advantages: [len(trajectories)], one per trajectory.
        multiple_of: T is rounded up to a multiple of it by one more, untrained document.
    """
    chosen = [trajectories[row] for row in rows]
    lengths = [len(trajectory.token_ids) for trajectory in chosen]
    padding = -sum(lengths) % multiple_of
    documents = np.array([*lengths, padding] if padding else lengths)
    ends = documents.cumsum()
    starts = ends - documents
    total = int(ends[-1])
    is_first = np.zeros(total, bool)
    is_first[starts] = True

    def packed(parts: Sequence[npt.NDArray[np.generic]], dtype: npt.DTypeLike) -> Tensor:
        flat = np.zeros(total, dtype)
        flat[: total - padding] = np.concatenate(parts)
        return torch.from_numpy(flat).to(device)

    first = torch.from_numpy(is_first).to(device)
    return MicroBatch(
        rows=tuple(rows),
        lengths=tuple(documents.tolist()),
        token_ids=packed([t.token_ids for t in chosen], np.int64),
        position_ids=torch.from_numpy(np.arange(total) - starts.repeat(documents)).to(device),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)).to(device),
        is_first=first,
        loss_mask=packed([t.loss_mask != 0 for t in chosen], np.bool_) & ~first,
        rollout_logprobs=packed([t.rollout_logprobs for t in chosen], np.float32),
        advantages=packed([advantages[list(rows)].repeat(lengths)], np.float32),
    )


def next_tokens(token_ids: Tensor) -> Tensor:
    """[T] -> [T], what each position predicts; across a document's end it means nothing."""
    return token_ids.roll(-1)


def at_predicted_token(values: Tensor, is_first: Tensor) -> Tensor:
    """Moves [T] values from the predicting position to the predicted token; 0 on first tokens."""
    return torch.where(is_first, 0.0, values.roll(1))
