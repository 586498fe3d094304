"""Trajectories -> the tensors of a packed micro-batch.

T = tokens of a micro-batch, B = its trajectories, end to end without padding between them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax_hpc.engines.megatron.moe import replay
from relax_hpc.engines.megatron.vision.stretches import Stretch, position_ids, stretches
from relax_hpc.media.recipe import Recipe
from relax_hpc.schema import Row, extra_columns


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward. Tensors are on the trainer's device."""

    rows: tuple[int, ...]
    """Indices into the rank's trajectories, in packed order."""
    lengths: tuple[int, ...]
    """Tokens per document; with padding, one more document than rows."""
    token_ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64, from 0 in each document; [T, 3] in time, y and x, where a document has media."""
    cu_seqlens: Tensor
    """[B + 1] int32, where documents begin and end."""
    is_first: Tensor
    """[T] bool, first token of a document: nothing predicts it."""
    loss_mask: Tensor
    """[T] bool, True on trained tokens; never on a document's first."""
    sequence_ids: Tensor
    """[T] int64, number of the document that a token is in, from 0."""
    groups: Tensor
    """[documents] int64, prompt group of each; -1 for padding, which is in none."""
    policy_versions: Tensor
    """[T] int32, policy that sampled the token and the whole response before it; else -1."""
    columns: Mapping[str, Tensor]
    """[T] float32 each, by short name: those that every row has, and from the first pass on
    `old_logprobs`, nats, the policy before this step's updates, without gradient. What a row has
    one of is the same on all its tokens."""
    routes: Tensor | None = None
    """[T, layers with experts of this rank, experts per token] int16, see `moe.replay`; None where
    nothing is replayed."""
    stretches: tuple[Stretch, ...] = ()
    """Tokens that stand for features of media."""

    def with_columns(self, **columns: Tensor) -> "MicroBatch":
        """The same with further columns, or others in place of those it has."""
        return replace(self, columns={**self.columns, **columns})


def build(
    trajectories: Sequence[Row],
    rows: Sequence[int],
    *,
    device: torch.device,
    multiple_of: int = 1,
    layers: replay.Layers | None = None,
    recipe: Recipe | None = None,
) -> MicroBatch:
    """Packs the trajectories `rows` end to end.

    Args:
        rows: may be empty: the micro-batch of a rank that has none while others have one.
        multiple_of: T is rounded up to a multiple of it by one more, untrained document.
        layers: whose experts are replayed, where rows say which they were.
        recipe: of a model that sees.
    """
    chosen = [trajectories[row] for row in rows]
    lengths = np.array([len(trajectory.token_ids) for trajectory in chosen], np.int64)
    padding = int(-lengths.sum() % multiple_of) if len(lengths) else multiple_of
    documents = np.append(lengths, padding) if padding else lengths
    ends = documents.cumsum()
    starts = ends - documents
    total = int(ends[-1])
    is_first = np.zeros(total, bool)
    is_first[starts] = True

    def packed(
        parts: Sequence[npt.NDArray[np.generic]], dtype: npt.DTypeLike, filling: int = 0
    ) -> Tensor:
        filled = np.full(padding, filling, dtype)
        flat = np.concatenate([*parts, filled], dtype=dtype, casting="unsafe")
        return torch.from_numpy(flat).to(device)

    first = torch.from_numpy(is_first).to(device)
    routes = None
    if layers and any(t.routed_experts is not None for t in trajectories):
        routes = replay.pack(chosen, padding, layers).to(device)
    found = stretches(chosen, recipe) if recipe else ()
    if recipe and found:
        positions = position_ids(chosen, padding, recipe)
    else:
        positions = torch.from_numpy(np.arange(total) - starts.repeat(documents))
    return MicroBatch(
        rows=tuple(rows),
        lengths=tuple(documents.tolist()),
        token_ids=packed([t.token_ids for t in chosen], np.int64),
        position_ids=positions.to(device),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)).to(device),
        is_first=first,
        loss_mask=packed([t.loss_mask != 0 for t in chosen], np.bool_) & ~first,
        sequence_ids=torch.from_numpy(np.arange(len(documents)).repeat(documents)).to(device),
        groups=torch.tensor([*(t.guid for t in chosen), *[-1] * (padding > 0)]).to(device),
        policy_versions=packed([_versions(t) for t in chosen], np.int32, filling=-1),
        columns={
            name: packed([_by_token(t, name) for t in chosen], np.float32)
            for name in (chosen[0].columns if chosen else _any_column())
            if all(name in t.columns for t in chosen)
        },
        routes=routes,
        stretches=found,
    )


def _any_column() -> list[str]:
    """Returns the columns that a loss may ask an empty micro-batch for."""
    return [*extra_columns("row"), *extra_columns("token"), "weights", "counts"]


def _by_token(row: Row, name: str) -> npt.NDArray[np.generic]:
    return np.broadcast_to(row.columns[name], len(row.token_ids))


def _versions(trajectory: Row) -> npt.NDArray[np.int32]:
    """[tokens] the first policy of the response, where it sampled; -1 for the prompt and the rest.

    What follows an update was sampled over keys and values that the policy before it computed.
    """
    found = np.full(len(trajectory.token_ids), -1, np.int32)
    if len(runs := trajectory.version_runs):
        later = runs[runs[:, 1] != runs[0, 1], 0]
        found[runs[0, 0] : later[0] if len(later) else None] = runs[0, 1]
    return found


def next_tokens(token_ids: Tensor) -> Tensor:
    """[T] -> [T], what each position predicts; across a document's end it means nothing."""
    return token_ids.roll(-1)


def at_predicted_token(values: Tensor, is_first: Tensor) -> Tensor:
    """Moves [T] values from the predicting position to the predicted token; 0 on first tokens."""
    return torch.where(is_first, 0.0, values.roll(1))
