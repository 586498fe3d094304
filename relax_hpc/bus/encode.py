"""Prompt groups to the columns of a shard, and back."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_hpc.errors import BusError
from relax_hpc.schema import COLUMNS, OFFSETS, Columns, FinishReason, PromptGroup, Trajectory

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
    "row/policy_version_min": lambda t: t.policy_version_min,
    "row/policy_version_max": lambda t: t.policy_version_max,
    "row/rewards": lambda t: t.reward,
}


def to_columns(groups: Sequence[PromptGroup]) -> Columns:
    """Packs whole prompt groups, one after the other, siblings in order.

    Raises:
        BusError: no group, siblings that are not 0..G-1, or arrays of unequal length.
    """
    rows = [t for group in groups for t in group.trajectories]
    if not rows:
        raise BusError("a shard needs at least one trajectory")
    for group in groups:
        _check(group)
    columns: Columns = {
        name: np.array([value(t) for t in rows], COLUMNS[name].dtype)
        for name, value in _ROW_VALUES.items()
    }
    ragged: dict[str, list[npt.NDArray[Any]]] = {
        "ragged/token_ids": [t.token_ids for t in rows],
        "ragged/loss_mask": [t.loss_mask for t in rows],
        "ragged/rollout_logprobs": [t.rollout_logprobs for t in rows],
        "ragged/version_runs": [t.version_runs for t in rows],
        "ragged/turns": [_turns(t) for t in rows],
    }
    for name, parts in ragged.items():
        column = COLUMNS[name]
        columns[name] = np.concatenate(parts).astype(column.dtype, copy=False)
        lengths = [len(part) for part in parts]
        columns[OFFSETS[column.axis]] = np.concatenate([[0], np.cumsum(lengths)]).astype("int64")
    return columns


def from_columns(packed: Columns) -> list[Trajectory]:
    """The trajectories of a shard, or of a span of one; arrays are views of `packed`."""
    columns: dict[str, Any] = dict(packed)
    tokens, runs = columns[OFFSETS["token"]], columns[OFFSETS["run"]]
    return [
        Trajectory(
            guid=int(columns["row/guid"][i]),
            sibling=int(columns["row/sibling"][i]),
            prompt_index=int(columns["row/prompt_index"][i]),
            seed=int(columns["row/seed"][i]),
            token_ids=columns["ragged/token_ids"][tokens[i] : tokens[i + 1]],
            prompt_len=int(columns["row/prompt_len"][i]),
            loss_mask=columns["ragged/loss_mask"][tokens[i] : tokens[i + 1]],
            rollout_logprobs=columns["ragged/rollout_logprobs"][tokens[i] : tokens[i + 1]],
            version_runs=columns["ragged/version_runs"][runs[i] : runs[i + 1]],
            finish=FinishReason(int(columns["row/finish"][i])),
            reward=float(columns["row/rewards"][i]),
            environment=int(columns["row/environment"][i]),
        )
        for i in range(len(tokens) - 1)
    ]


def _check(group: PromptGroup) -> None:
    siblings = [t.sibling for t in group.trajectories]
    if siblings != list(range(len(siblings))):
        raise BusError(f"prompt group {group.guid}: siblings {siblings}, 0..G-1 in order expected")
    for t in group.trajectories:
        lengths = {len(t.token_ids), len(t.loss_mask), len(t.rollout_logprobs)}
        if len(lengths) > 1 or not 0 <= t.prompt_len <= len(t.token_ids) or t.guid != group.guid:
            raise BusError(
                f"prompt group {group.guid}, trajectory {t.guid}/{t.sibling}: one token, one mask "
                f"and one log-probability per position expected, got lengths {sorted(lengths)} "
                f"with {t.prompt_len} prompt tokens"
            )


def _turns(trajectory: Trajectory) -> npt.NDArray[np.int32]:
    """[turns, 2] (first token of the row, who wrote it), from the prompt length and the mask."""
    position = np.arange(len(trajectory.token_ids))
    unsampled = np.where(position < trajectory.prompt_len, TURN_GIVEN, TURN_TOOL)
    kind = np.where(trajectory.loss_mask == 1, TURN_SAMPLED, unsampled)
    starts = np.flatnonzero(np.diff(kind, prepend=-1))
    return np.stack([starts, kind[starts]], axis=1).astype(np.int32)
