"""Prompt groups to the columns of a shard, and back."""

from collections.abc import Callable, Iterable, Sequence
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
    TurnKind,
    columns_of,
    extra_columns,
)

_ROW_VALUES: dict[str, Callable[[Trajectory], int | float]] = {
    "row/guid": lambda t: t.guid,
    "row/sibling": lambda t: t.sibling,
    "row/segment": lambda t: t.segment,
    "row/prompt_index": lambda t: t.prompt_index,
    "row/seed": lambda t: t.seed,
    "row/environment": lambda t: t.environment,
    "row/prompt_len": lambda t: t.prompt_len,
    "row/response_len": lambda t: len(t.token_ids) - t.prompt_len,
    "row/finish": lambda t: t.finish,
    "row/rewards": lambda t: t.reward,
    "row/reward_error": lambda t: t.reward_error,
}
_PLAIN = ("guid", "sibling", "segment", "prompt_index", "seed", "prompt_len", "environment")
"""Row columns that are fields of the same name and value."""
PARTS = "row/score_parts"
SMALL_PIECE = 4096
"""Mean bytes below which joining pieces costs less than handing them to the kernel one by one."""


def gather(groups: Sequence[PromptGroup]) -> ColumnPieces:
    """The columns of whole prompt groups, one after the other; large arrays are not copied.

    Raises:
        BusError: no group, rows that are not siblings 0..G-1 with segments 0.. each, rewards that
            differ within an episode, arrays of unequal length, routed experts of only some, or
            spans of media that a row does not have.
    """
    rows = [t for group in groups for t in group.trajectories]
    if not rows:
        raise BusError("a shard needs at least one trajectory")
    for group in groups:
        _check(group)
    columns: dict[str, Array | Sequence[Array]] = {**facts(rows)}
    mask = np.concatenate([t.loss_mask for t in rows]).astype(np.uint8, copy=False)
    tokens = _offsets([len(t.token_ids) for t in rows])
    turns = [_turns(t) for t in rows]
    runs, run_offsets = _runs(rows)
    columns |= {
        OFFSETS["token"]: tokens,
        "ragged/token_ids": _pieces([t.token_ids for t in rows], np.int32),
        "ragged/loss_mask": mask,
        **_token_columns(rows),
        OFFSETS["run"]: run_offsets,
        "ragged/version_runs": runs,
        OFFSETS["turn"]: _offsets([len(each) for each in turns]),
        "ragged/turns": np.concatenate(turns),
    }
    return {**columns, **_part_columns(rows), **routed.gather(rows), **media.gather(rows)}


def facts(rows: Sequence[Trajectory]) -> Columns:
    """The columns of one number per row, without parts of rewards, as a shard has them."""
    runs, offsets = _runs(rows)
    oldest, newest = _version_range(runs[:, 1], offsets)
    return {
        **{
            name: np.array([value(t) for t in rows], COLUMNS[name].dtype)
            for name, value in _ROW_VALUES.items()
        },
        "row/policy_version_min": oldest,
        "row/policy_version_max": newest,
    }


def _runs(
    rows: Sequence[Trajectory],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """The version runs of all rows, one after the other, and where those of each begin and end."""
    runs = np.concatenate([t.version_runs for t in rows]).astype(np.int32, copy=False)
    return runs, _offsets([len(t.version_runs) for t in rows])


def part_names(rows: Iterable[Trajectory]) -> list[str]:
    """Names of the columns of `row/score_parts`, as `gather` makes it of these rows."""
    return sorted({name for t in rows for name in t.parts})


def to_columns(groups: Sequence[PromptGroup]) -> Columns:
    """Gathers as `gather` does, each column one array.

    Raises:
        BusError: as `gather`.
    """
    return {
        name: values if isinstance(values, np.ndarray) else np.concatenate(values)
        for name, values in gather(groups).items()
    }


def from_columns(packed: Columns, part_names: Sequence[str] = ()) -> list[Trajectory]:
    """The trajectories of a shard, or of a span of one; arrays are views of `packed`.

    What was not read, or is not there, is `None`, empty, or not among `columns`.

    Args:
        packed: the columns.
        part_names: names of the columns of `row/score_parts`.
    """
    columns: dict[str, Any] = dict(packed)
    tokens, runs = columns[OFFSETS["token"]].tolist(), columns[OFFSETS["run"]].tolist()
    values = {name: columns[f"row/{name}"].tolist() for name in _PLAIN}
    finish = [FinishReason(value) for value in columns["row/finish"].tolist()]
    rewards = columns["row/rewards"].tolist()
    failed = columns["row/reward_error"].tolist()
    parts = columns.get(PARTS, np.empty((len(rewards), 0))).tolist()
    flat = {name: columns[f"ragged/{name}"] for name in ("token_ids", "loss_mask")}
    by_token = {k: columns[n] for k, n in extra_columns("token").items() if n in columns}
    by_row = {k: columns[n] for k, n in extra_columns("row").items() if n in columns}
    shown, spans, experts = media.of_rows(packed), media.spans_of(packed), routed.of_rows(packed)
    turns = columns.get("ragged/turns")
    ends = columns[OFFSETS["turn"]].tolist() if turns is not None else []
    return [
        Trajectory(
            **{name: column[i] for name, column in values.items()},
            **{name: column[tokens[i] : tokens[i + 1]] for name, column in flat.items()},
            version_runs=columns["ragged/version_runs"][runs[i] : runs[i + 1]],
            finish=finish[i],
            reward=rewards[i],
            reward_error=bool(failed[i]),
            parts={k: v for k, v in zip(part_names, parts[i], strict=False) if v == v},
            turns=None if turns is None else turns[ends[i] : ends[i + 1]],
            columns={name: column[tokens[i] : tokens[i + 1]] for name, column in by_token.items()}
            | {name: column[i] for name, column in by_row.items()},
            media=shown[i],
            media_spans=spans[i],
            routed_experts=experts[i],
        )
        for i in range(len(tokens) - 1)
    ]


def _part_columns(rows: Sequence[Trajectory]) -> Columns:
    """The parts of rewards, [rows, names], NaN where a row has none of a name."""
    names = part_names(rows)
    if not names:
        return {}
    values = [[t.parts.get(name, np.nan) for name in names] for t in rows]
    return {PARTS: np.array(values, np.float32)}


def _token_columns(rows: Sequence[Trajectory]) -> dict[str, Array | Sequence[Array]]:
    """Returns the columns that rollout writes of every token, besides the token and its mask."""
    mine = columns_of("rollout", optional=True)
    names = {k: n for k, n in extra_columns("token").items() if n in mine and k in rows[0].columns}
    return {n: _pieces([t.columns[k] for t in rows], mine[n].dtype) for k, n in names.items()}


def _pieces(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> Array | Sequence[Array]:
    parts = [part.astype(dtype, copy=False) for part in parts]
    small = sum(part.nbytes for part in parts) < SMALL_PIECE * len(parts)
    return np.concatenate(parts) if small else parts


def _offsets(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _check(group: PromptGroup) -> None:
    before: Trajectory | None = None
    for t in group.trajectories:
        _check_place(group, before, t)
        before = t
        size = len(t.token_ids)
        logprobs = t.columns.get("rollout_logprobs", ())
        fits = size == len(t.loss_mask) == len(logprobs) and 0 <= t.prompt_len <= size
        if not fits or t.guid != group.guid:
            lengths = sorted({size, len(t.loss_mask), len(logprobs)})
            raise BusError(
                f"prompt group {group.guid}, trajectory {t.guid}/{t.sibling}: one token, one mask "
                f"and one log-probability per position expected, got lengths {lengths} "
                f"with {t.prompt_len} prompt tokens"
            )


def _check_place(group: PromptGroup, before: Trajectory | None, t: Trajectory) -> None:
    """A row begins the next episode, or goes on with that of the row before."""
    sibling, segment = (before.sibling, before.segment) if before else (-1, 0)
    if t.segment and (t.sibling, t.segment) == (sibling, segment + 1) and before:
        if t.reward != before.reward:
            raise BusError(
                f"prompt group {group.guid}, sibling {sibling}: an episode has one reward, its "
                f"segments {segment} and {t.segment} have {before.reward:g} and {t.reward:g}"
            )
    elif (t.sibling, t.segment) != (sibling + 1, 0):
        places = [(t.sibling, t.segment) for t in group.trajectories]
        raise BusError(
            f"prompt group {group.guid}: (sibling, segment) of its rows are {places}; siblings "
            "0..G-1 in order expected, and in each segments from 0"
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


def _turns(row: Trajectory) -> npt.NDArray[np.int32]:
    """[turns, 2] as they were written; without a word of them it is a prompt and a response."""
    if row.turns is not None:
        return row.turns.astype(np.int32, copy=False)
    plain = [(0, TurnKind.GIVEN), (row.prompt_len, TurnKind.SAMPLED)]
    ends = (row.prompt_len, len(row.token_ids))
    kept = [turn for turn, end in zip(plain, ends, strict=True) if turn[0] < end]
    return np.array(kept, np.int32).reshape(-1, 2)
