"""Routed experts: siblings share those of their prompt, as long as they really are the same."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_hpc.errors import BusError
from relax_hpc.schema import (
    NO_EXPERT,
    OFFSETS,
    ROUTED_EXPERTS,
    Array,
    ColumnPieces,
    Columns,
    Trajectory,
)

COLUMN = ROUTED_EXPERTS
Experts = npt.NDArray[np.int16]


def gather(rows: Sequence[Trajectory]) -> ColumnPieces:
    """A group's first row whole, of others what follows a prompt like its; nothing if none has any.

    A row that has none while others of its shard do, e.g. of an answer that was broken off, is
    filled with `NO_EXPERT`.

    Raises:
        BusError: a row has not one per token.
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
    """[tokens, layers x experts per token] of every row; `None` where they were not read."""
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
    """[rows] whether a row is the first of its prompt group."""
    found: list[bool] = ((siblings == 0) & (segments == 0)).tolist()
    return found


def complete(
    values: Array,
    ends: npt.NDArray[np.int64],
    prompt: Array,
    prompt_lens: Sequence[int],
    lengths: npt.NDArray[np.int64],
) -> tuple[Array, npt.NDArray[np.int64]]:
    """Puts the prompt of their group's first row in front of the leading rows that left it out.

    Args:
        values, ends: the column and its [n+1] boundaries.
        prompt: experts of the first row's prompt, which is as long as that of who left it out.
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
