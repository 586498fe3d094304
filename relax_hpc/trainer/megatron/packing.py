"""Packs trajectories into the tensors of a micro-batch.

T = tokens of a micro-batch, B = its trajectories, end to end without padding between them. Only a
row's spans mark features of media: a placeholder that a policy samples is text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax_hpc.algorithms.composition import Objective
from relax_hpc.algorithms.part import LossOutput, Tokens
from relax_hpc.data.media.expand import MediaSpan, positions
from relax_hpc.data.media.extent import Extent
from relax_hpc.data.media.kinds import modality_of
from relax_hpc.data.media.recipe import Recipe
from relax_hpc.errors import TrainingError
from relax_hpc.schema import FinishReason, Row, Trajectory, extra_columns, key_of_medium
from relax_hpc.trainer.megatron.layers import replay

Key = bytes
"""Identity of a medium, see `schema.key_of_medium`."""


@dataclass(frozen=True, slots=True)
class FeatureSpan:
    """Consecutive tokens of a micro-batch, and the features that they stand for."""

    row: Row
    medium: int
    """Index of the medium in the row."""
    first: int
    """First token in the micro-batch."""
    tokens: int
    offset: int
    """Feature of the medium at the first token."""

    @property
    def key(self) -> Key:
        return key_of_medium(self.row, self.medium)

    @property
    def features(self) -> int:
        """Returns the medium's features over all its spans in the row."""
        spans = self.row.media_spans
        return int(spans[spans[:, 0] == self.medium, 2].sum())

    @property
    def is_heard(self) -> bool:
        return modality_of(self.row.media[self.medium]) == "audio"


def find_feature_spans(rows: Sequence[Row], recipe: Recipe) -> tuple[FeatureSpan, ...]:
    """Finds the spans of rows packed end to end.

    Raises:
        TrainingError: the spans of a medium do not fit its grid, or the row.
    """
    found, start = [], 0
    for row in rows:
        done = [0] * len(row.media)
        for medium, first, tokens in row.media_spans.tolist():
            if not 0 <= first <= first + tokens <= len(row.token_ids):
                raise TrainingError(_where(row, medium, f"ends beyond token {len(row.token_ids)}"))
            found.append(FeatureSpan(row, medium, start + first, tokens, done[medium]))
            done[medium] += tokens
        for medium, (of, tokens) in enumerate(zip(row.media, done, strict=True)):
            time, height, width = of.grid_thw
            features = time * height * width // recipe.image.merge**2
            if features and tokens not in (0, features):  # of sound the array will say it
                what = f"has {features} features, and its spans {tokens} tokens"
                raise TrainingError(_where(row, medium, what))
        start += len(row.token_ids)
    return tuple(found)


def _where(row: Row, medium: int, what: str) -> str:
    return f"guid {row.guid}, sibling {row.sibling}: medium {medium} {what}"


def position_ids(rows: Sequence[Row], padding: int, recipe: Recipe) -> Tensor:
    """Returns [T, 3] positions in time, y and x, from 0 in each document."""
    parts = [_of_row(row, recipe) for row in rows]
    parts.append(np.broadcast_to(np.arange(padding), (3, padding)))
    return torch.from_numpy(np.concatenate(parts, axis=1).T.copy())


def _of_row(row: Row, recipe: Recipe) -> npt.NDArray[np.generic]:
    spans = [MediaSpan(*each) for each in row.media_spans.tolist()]
    extents = [
        Extent(
            modality_of(medium),
            tuple(span.tokens for span in spans if span.medium == number),
            grid=medium.grid_thw,
            seconds_per_grid=medium.seconds_per_grid,
        )
        for number, medium in enumerate(row.media)
    ]
    return positions(len(row.token_ids), spans, extents, recipe)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Inputs of one forward and backward, on the trainer's device."""

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
    """[T] float32 each, by short name: the columns that every row has, and from the first pass on
    `old_logprobs`, nats, of the policy before this step's updates, without gradient. Row values are
    repeated on all tokens."""
    routes: Tensor | None = None
    """[T, layers with experts of this rank, experts per token] int16, see `replay`; None
    without replay."""
    feature_spans: tuple[FeatureSpan, ...] = ()
    """Tokens that stand for features of media."""

    def with_columns(self, **columns: Tensor) -> "MicroBatch":
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
        layers: whose experts are replayed, if rows have them.
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

    def join_rows(
        parts: Sequence[npt.NDArray[np.generic]], dtype: npt.DTypeLike, filling: int = 0
    ) -> Tensor:
        filled = np.full(padding, filling, dtype)
        flat = np.concatenate([*parts, filled], dtype=dtype, casting="unsafe")
        return torch.from_numpy(flat).to(device)

    first = torch.from_numpy(is_first).to(device)
    routes = None
    if layers and any(t.routed_experts is not None for t in trajectories):
        routes = replay.pack(chosen, padding, layers).to(device)
    found = find_feature_spans(chosen, recipe) if recipe else ()
    if recipe and found:
        positions = position_ids(chosen, padding, recipe)
    else:
        positions = torch.from_numpy(np.arange(total) - starts.repeat(documents))
    return MicroBatch(
        rows=tuple(rows),
        lengths=tuple(documents.tolist()),
        token_ids=join_rows([t.token_ids for t in chosen], np.int64),
        position_ids=positions.to(device),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)).to(device),
        is_first=first,
        loss_mask=join_rows([t.loss_mask != 0 for t in chosen], np.bool_) & ~first,
        sequence_ids=torch.from_numpy(np.arange(len(documents)).repeat(documents)).to(device),
        groups=torch.tensor([*(t.guid for t in chosen), *[-1] * (padding > 0)]).to(device),
        policy_versions=join_rows([_versions(t) for t in chosen], np.int32, filling=-1),
        columns={
            name: join_rows([_by_token(t, name) for t in chosen], np.float32)
            for name in (chosen[0].columns if chosen else _any_column())
            if all(name in t.columns for t in chosen)
        },
        routes=routes,
        feature_spans=found,
    )


def _any_column() -> list[str]:
    """Returns the columns that a loss may read in an empty micro-batch."""
    computed = ("advantages", "old_logprobs", "weights", "counts")
    return [*extra_columns("row"), *extra_columns("token"), *computed]


def _by_token(row: Row, name: str) -> npt.NDArray[np.generic]:
    return np.broadcast_to(row.columns[name], len(row.token_ids))


def _versions(trajectory: Row) -> npt.NDArray[np.int32]:
    """Returns [tokens] the first policy of the response, where it sampled; -1 for the prompt and
    the rest.

    Tokens after an update depend on keys and values that the previous policy computed.
    """
    found = np.full(len(trajectory.token_ids), -1, np.int32)
    if len(runs := trajectory.version_runs):
        later = runs[runs[:, 1] != runs[0, 1], 0]
        found[runs[0, 0] : later[0] if len(later) else None] = runs[0, 1]
    return found


def next_tokens(token_ids: Tensor) -> Tensor:
    """[T] -> [T], the token that each position predicts; meaningless at a document's end."""
    return token_ids.roll(-1)


def at_predicted_token(values: Tensor, is_first: Tensor) -> Tensor:
    """Moves [T] values from the predicting position to the predicted token; 0 on first tokens."""
    return torch.where(is_first, 0.0, values.roll(1))


@dataclass(frozen=True)
class TokenDocuments:
    index: Tensor
    """[t] int64; padding has the last index."""
    trained: Tensor
    """[documents + 1] float32, trained tokens of each, on all ranks that share them."""
    weights: Tensor
    """[documents + 1] float32, sum of their weights in the loss."""

    @classmethod
    def of(cls, micro_batch: MicroBatch, weights: Tensor | None = None) -> "TokenDocuments":
        """Makes the documents of all tokens of the micro-batch.

        Args:
            weights: [T] of trained tokens in the loss; None if they count the same.
        """
        index = micro_batch.is_first.cumsum(0) - 1

        def sum_rows(values: Tensor) -> Tensor:
            none = torch.zeros(len(micro_batch.rows) + 1, device=index.device)
            return none.index_add_(0, index, values)

        trained = sum_rows(micro_batch.loss_mask.float())
        if weights is None:
            return cls(index, trained, trained)
        return cls(index, trained, sum_rows(weights.where(micro_batch.loss_mask, 0.0)))

    @property
    def is_real(self) -> Tensor:
        """[t] bool, False on padding."""
        return self.index < len(self.trained) - 1


_MADE_UP_TOKENS = 512


@dataclass
class MicroBatchWork:
    """A micro-batch, its loss and its logprobs; kept until the end of the step."""

    micro_batch: MicroBatch
    objective: Objective
    samples: Sequence[Row]
    """Rows of the micro-batch, in packed order."""
    number: int
    """Index among the rank's micro-batches of the step, from 0."""
    logprobs: Tensor | None = None
    """[T] without gradient, of the last forward pass, on the last stage."""


def _sum_of_logprobs(logprobs: Tensor, tokens: Tokens) -> LossOutput:
    return LossOutput(logprobs.sum(), {})


LOGPROBS = Objective(_sum_of_logprobs, reads_old=False)
"""A dummy objective with a gradient."""


def make_up_rows(num_tokens: int, vocab_size: int) -> list[Trajectory]:
    """Returns dummy rows that fill a micro-batch of `num_tokens`."""
    length = min(num_tokens, _MADE_UP_TOKENS)
    count = num_tokens // length
    token_ids = np.random.default_rng(0).integers(vocab_size, size=(count, length), dtype=np.int32)
    return [
        Trajectory(
            guid=guid, sibling=0, prompt_index=0, seed=0, token_ids=ids, prompt_len=1,
            loss_mask=np.ones(length, np.uint8), version_runs=np.zeros((0, 2), np.int32),
            finish=FinishReason.STOP, reward=0.0,
        )
        for guid, ids in enumerate(token_ids)
    ]  # fmt: skip
