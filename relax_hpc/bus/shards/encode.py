"""Prompt groups to the columns of a shard, and back."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_hpc.bus.shards import media, routed
from relax_hpc.errors import BusError
from relax_hpc.schema import (
    COLUMNS,
    OFFSETS,
    Array,
    ColumnPieces,
    Columns,
    FinishReason,
    PromptGroup,
    Trajectory,
)

TURN_GIVEN, TURN_SAMPLED, TURN_TOOL = 0, 1, 2
_ROW_VALUES: dict[str, Callable[[Trajectory], int | float]] = {
    "row/guid": lambda t: t.guid,
    "row/sibling": lambda t: t.sibling,
    "row/prompt_index": lambda t: t.prompt_index,
    "row/seed": lambda t: t.seed,
    "row/environment": lambda t: t.environment,
    "row/prompt_len": lambda t: t.prompt_len,
    "row/response_len": lambda t: len(t.token_ids) - t.prompt_len,
    "row/finish": lambda t: t.finish,
    "row/rewards": lambda t: t.reward,
}
_SIDECAR = ("old_logprobs", "ref_logprobs", "advantages", "values")
SMALL_PIECE = 4096
"""Mean bytes below which joining pieces costs less than handing them to the kernel one by one."""


def gather(groups: Sequence[PromptGroup]) -> ColumnPieces:
    """The columns of whole prompt groups, one after the other; large arrays are not copied.

    Raises:
        BusError: no group, siblings that are not 0..G-1, arrays of unequal length, or routed
            experts of only some.
    """
    rows = [t for group in groups for t in group.trajectories]
    if not rows:
        raise BusError("a shard needs at least one trajectory")
    for group in groups:
        _check(group)
    columns: dict[str, Array | Sequence[Array]] = {
        name: np.array([value(t) for t in rows], COLUMNS[name].dtype)
        for name, value in _ROW_VALUES.items()
    }
    mask = np.concatenate([t.loss_mask for t in rows]).astype(np.uint8, copy=False)
    tokens = _offsets([len(t.token_ids) for t in rows])
    turns, turn_offsets = _turns(mask, tokens, np.array([t.prompt_len for t in rows]))
    runs = np.concatenate([t.version_runs for t in rows]).astype(np.int32, copy=False)
    run_offsets = _offsets([len(t.version_runs) for t in rows])
    oldest, newest = _version_range(runs[:, 1], run_offsets)
    columns |= {
        "row/policy_version_min": oldest,
        "row/policy_version_max": newest,
        OFFSETS["token"]: tokens,
        "ragged/token_ids": _pieces([t.token_ids for t in rows], np.int32),
        "ragged/loss_mask": mask,
        "ragged/rollout_logprobs": _pieces([t.rollout_logprobs for t in rows], np.float32),
        OFFSETS["run"]: run_offsets,
        "ragged/version_runs": runs,
        OFFSETS["turn"]: turn_offsets,
        "ragged/turns": turns,
    }
    return {**columns, **routed.gather(rows), **media.gather(rows)}


def to_columns(groups: Sequence[PromptGroup]) -> Columns:
    """As `gather`, each column one array.

    Raises:
        BusError: as `gather`.
    """
    return {
        name: values if isinstance(values, np.ndarray) else np.concatenate(values)
        for name, values in gather(groups).items()
    }


def from_columns(packed: Columns) -> list[Trajectory]:
    """The trajectories of a shard, or of a span of one; arrays are views of `packed`.

    What was not read, or is not there, is `None` or empty.
    """
    columns: dict[str, Any] = dict(packed)
    tokens, runs = columns[OFFSETS["token"]].tolist(), columns[OFFSETS["run"]].tolist()
    values = {
        name: columns[f"row/{name}"].tolist()
        for name in ("guid", "sibling", "prompt_index", "seed", "prompt_len", "environment")
    }
    finish = [FinishReason(value) for value in columns["row/finish"].tolist()]
    rewards = columns["row/rewards"].tolist()
    flat = {name: columns[f"ragged/{name}"] for name in ("token_ids", "loss_mask")}
    flat["rollout_logprobs"] = columns["ragged/rollout_logprobs"]
    flat |= {n: columns[f"ragged/{n}"] for n in _SIDECAR if f"ragged/{n}" in columns}
    shown, experts = media.of_rows(packed), routed.of_rows(packed)
    return [
        Trajectory(
            **{name: column[i] for name, column in values.items()},
            **{name: column[tokens[i] : tokens[i + 1]] for name, column in flat.items()},
            version_runs=columns["ragged/version_runs"][runs[i] : runs[i + 1]],
            finish=finish[i],
            reward=rewards[i],
            media=shown[i],
            routed_experts=experts[i],
        )
        for i in range(len(tokens) - 1)
    ]


def _pieces(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> Array | Sequence[Array]:
    parts = [part.astype(dtype, copy=False) for part in parts]
    small = sum(part.nbytes for part in parts) < SMALL_PIECE * len(parts)
    return np.concatenate(parts) if small else parts


def _offsets(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _check(group: PromptGroup) -> None:
    siblings = [t.sibling for t in group.trajectories]
    if siblings != list(range(len(siblings))):
        raise BusError(f"prompt group {group.guid}: siblings {siblings}, 0..G-1 in order expected")
    for t in group.trajectories:
        size = len(t.token_ids)
        fits = size == len(t.loss_mask) == len(t.rollout_logprobs) and 0 <= t.prompt_len <= size
        if not fits or t.guid != group.guid:
            lengths = sorted({size, len(t.loss_mask), len(t.rollout_logprobs)})
            raise BusError(
                f"prompt group {group.guid}, trajectory {t.guid}/{t.sibling}: one token, one mask "
                f"and one log-probability per position expected, got lengths {lengths} "
                f"with {t.prompt_len} prompt tokens"
            )


def _version_range(
    versions: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]
) -> tuple[Array, Array]:
    """[n], [n] oldest and newest policy of each row; -1 where nothing was sampled."""
    oldest = np.full(len(offsets) - 1, -1, np.int32)
    newest = oldest.copy()
    sampled = np.diff(offsets) > 0
    if sampled.any():
        starts = offsets[:-1][sampled]
        oldest[sampled] = np.minimum.reduceat(versions, starts)
        newest[sampled] = np.maximum.reduceat(versions, starts)
    return oldest, newest


def _turns(
    mask: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], prompt_lens: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Who wrote what, from prompt lengths and masks of all rows at once.

    Returns:
        [turns, 2] (first token of the row, kind), and the [n+1] boundaries of the rows in it.
    """
    starts, prompt_ends = offsets[:-1], offsets[:-1] + prompt_lens
    filled = starts < offsets[1:]
    changes = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    edges = np.unique(
        np.concatenate([changes, starts[filled], prompt_ends[prompt_ends < offsets[1:]]])
    )
    row = np.searchsorted(offsets, edges, side="right") - 1
    unsampled = np.where(edges < prompt_ends[row], TURN_GIVEN, TURN_TOOL)
    kind = np.where(mask[edges] == 1, TURN_SAMPLED, unsampled)
    first = edges == starts[row]
    kept = first | (np.diff(kind, prepend=-1) != 0)
    turns = np.stack([(edges - starts[row])[kept], kind[kept]], axis=1).astype(np.int32)
    counts = np.bincount(row[kept], minlength=len(starts))
    return turns, _offsets(counts.tolist())
