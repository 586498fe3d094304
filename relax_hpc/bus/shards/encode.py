"""Converts prompt groups to the columns of a shard, and back.

Siblings share the routed experts of their prompt, as long as these really are the same.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_hpc.bus.shards import media
from relax_hpc.errors import BusError
from relax_hpc.schema import (
    COLUMNS,
    NO_EXPERT,
    OFFSETS,
    ROUTED_EXPERTS,
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

COLUMN = ROUTED_EXPERTS
Experts = npt.NDArray[np.int16]


def gather_routed(rows: Sequence[Trajectory]) -> ColumnPieces:
    """Gathers routed experts: a group's first row whole, of later rows only the part after an equal
    prompt; empty if no row has any.

    A row without experts in a shard that has some, e.g. an aborted one, is filled with `NO_EXPERT`.

    Raises:
        BusError: a row does not have one per token.
    """
    width = next((t.routed_experts.shape[1] for t in rows if t.routed_experts is not None), None)
    if width is None:
        return {}
    pieces: list[Array] = []
    first: Trajectory | None = None
    for t in rows:
        experts = t.routed_experts
        if experts is None:
            experts = np.full((len(t.token_ids), width), NO_EXPERT, np.int16)
            t = t._replace(routed_experts=experts)
        if len(experts) != len(t.token_ids):
            raise BusError(
                f"trajectory {t.guid}/{t.sibling}: routed experts of every token expected; "
                f"got {len(experts)} for {len(t.token_ids)} tokens"
            )
        first = t if t.sibling == t.segment == 0 else first
        shared = first is not None and first is not t and _same_prompt(first, t)
        pieces.append(experts[t.prompt_len :] if shared else experts)
    offsets = np.cumsum([0, *map(len, pieces)]).astype(np.int64)
    return {OFFSETS["routed"]: offsets, COLUMN: pieces}


def of_rows(columns: Columns) -> list[Experts | None]:
    """Returns [tokens, layers x experts per token] of every row; `None` if they were not read."""
    rows = len(columns[OFFSETS["token"]]) - 1
    if COLUMN not in columns:
        return [None] * rows
    found: Any = columns[COLUMN]
    ends, tokens = columns[OFFSETS["routed"]].tolist(), columns[OFFSETS["token"]].tolist()
    whole: list[Experts | None] = []
    first = found[:0]
    for i, leads in enumerate(begins_group(columns["row/sibling"], columns["row/segment"])):
        experts = found[ends[i] : ends[i + 1]]
        first = experts if leads else first
        if len(experts) < tokens[i + 1] - tokens[i]:
            experts = np.concatenate([first[: columns["row/prompt_len"][i]], experts])
        whole.append(experts)
    return whole


def begins_group(siblings: Array, segments: Array) -> list[bool]:
    """Returns [rows], whether a row is the first of its prompt group."""
    found: list[bool] = ((siblings == 0) & (segments == 0)).tolist()
    return found


def complete(
    values: Array,
    ends: npt.NDArray[np.int64],
    prompt: Array,
    prompt_lens: Sequence[int],
    lengths: npt.NDArray[np.int64],
) -> tuple[Array, npt.NDArray[np.int64]]:
    """Prepends the prompt of the group's first row to the leading rows that share it.

    Args:
        values, ends: the column and its [n+1] boundaries.
        prompt: experts of the first row's prompt, equal in length to those left out.
        prompt_lens, lengths: prompt tokens, and all tokens, of the rows without their first.
    """
    parts, sizes = [], np.diff(ends)
    for i, (prompt_len, length) in enumerate(zip(prompt_lens, lengths.tolist(), strict=True)):
        if sizes[i] < length:
            parts.append(prompt[:prompt_len])
        parts.append(values[ends[i] : ends[i + 1]])
        sizes[i] = length
    parts.append(values[ends[len(prompt_lens)] :])
    return np.concatenate(parts), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _same_prompt(first: Trajectory, other: Trajectory) -> bool:
    size = other.prompt_len
    if first.routed_experts is None or other.routed_experts is None or first.guid != other.guid:
        return False
    return first.prompt_len == size and np.array_equal(
        first.routed_experts[:size], other.routed_experts[:size]
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
"""Mean bytes below which joining pieces is cheaper than passing them to the kernel one by one."""


def gather(groups: Sequence[PromptGroup]) -> ColumnPieces:
    """Returns the columns of whole prompt groups, one after the other; copies no large array.

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
    return {**columns, **_part_columns(rows), **gather_routed(rows), **media.gather(rows)}


def facts(rows: Sequence[Trajectory]) -> Columns:
    """Returns the columns of one number per row, without parts of rewards, as in a shard."""
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
    """Returns the version runs of all rows end to end, and the boundaries of each row's."""
    runs = np.concatenate([t.version_runs for t in rows]).astype(np.int32, copy=False)
    return runs, _offsets([len(t.version_runs) for t in rows])


def part_names(rows: Iterable[Trajectory]) -> list[str]:
    """Returns the names of the columns of `row/score_parts` that `gather` makes of these rows."""
    return sorted({name for t in rows for name in t.parts})


def to_columns(groups: Sequence[PromptGroup]) -> Columns:
    """Does as `gather`, with one array per column.

    Raises:
        BusError: as `gather`.
    """
    return {
        name: values if isinstance(values, np.ndarray) else np.concatenate(values)
        for name, values in gather(groups).items()
    }


def from_columns(packed: Columns, part_names: Sequence[str] = ()) -> list[Trajectory]:
    """Returns the trajectories of a shard, or of a span of one; arrays are views of `packed`.

    Columns that are missing or were not read are `None`, empty, or not among `columns`.
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
    shown, spans, experts = media.of_rows(packed), media.spans_of(packed), of_rows(packed)
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
    """Returns the parts of rewards, [rows, names]; NaN if a row has no part of that name."""
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
    """Checks that a row begins the next episode, or continues that of the row before."""
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
    """Returns [n], [n] oldest and newest policy of each row; -1 if nothing was sampled."""
    oldest = np.full(len(offsets) - 1, -1, np.int32)
    newest = oldest.copy()
    sampled = np.diff(offsets) > 0
    if sampled.any():
        starts = offsets[:-1][sampled]
        oldest[sampled] = np.minimum.reduceat(versions, starts)
        newest[sampled] = np.maximum.reduceat(versions, starts)
    return oldest, newest


def _turns(row: Trajectory) -> npt.NDArray[np.int32]:
    """Returns [turns, 2] as written; by default one prompt and one response."""
    if row.turns is not None:
        return row.turns.astype(np.int32, copy=False)
    plain = [(0, TurnKind.GIVEN), (row.prompt_len, TurnKind.SAMPLED)]
    ends = (row.prompt_len, len(row.token_ids))
    kept = [turn for turn, end in zip(plain, ends, strict=True) if turn[0] < end]
    return np.array(kept, np.int32).reshape(-1, 2)
