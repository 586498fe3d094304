"""A prompt group with all that a page or a terminal says of it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from relax_hpc.algorithms.algorithm import Algorithm
from relax_hpc.bus.plan import PlanRecord
from relax_hpc.bus.reader import BatchIndex, Reader
from relax_hpc.bus.shards import media
from relax_hpc.bus.tools.survey import Surveyed
from relax_hpc.errors import DamagedError
from relax_hpc.paths import BusPaths
from relax_hpc.roles.dealing.portions import values_of
from relax_hpc.schema import Trajectory
from relax_hpc.viewer.colours import Token
from relax_hpc.viewer.stretches import Stretch, cut, of_row, within
from relax_hpc.viewer.words import Words

Floats = npt.NDArray[np.floating]
_COLUMNS = ("ragged/advantages", "row/score_parts", *media.FACTS)
_GROUP_TOKENS = 100_000
"""Tokens of a prompt group that are shown at most."""


class _Advantage(NamedTuple):
    mean: float
    """The one of the episode, or the mean over its sampled tokens."""
    tokens: Floats
    """[tokens]"""


class Row(NamedTuple):
    """A trajectory as it is shown."""

    sibling: int
    segment: int
    reward: float
    parts: Mapping[str, float]
    """Parts of the reward by name, if it has several."""
    failed: bool
    """Whether the reward failed; it is 0 then."""
    advantage: float | None
    """The one of the episode, or the mean over its sampled tokens; None where it is not known."""
    finish: str
    versions: str
    prompt_len: int
    response_len: int
    prompt: str
    """Empty where it is that of the row before."""
    head: list[Token]
    left_out: int
    """Tokens between `head` and `tail` that are not shown."""
    tail: list[Token]


class Group(NamedTuple):
    guid: int
    step: int | None
    mean_reward: float | None
    """None where all have failed and are masked."""
    rows: list[Row]
    """By sibling and segment."""
    note: str = ""
    """Sets it apart from others."""

    @property
    def mean(self) -> str:
        """Says the mean reward in words."""
        if self.mean_reward is None:
            return "all rewards failed"
        return f"mean reward {self.mean_reward:.4g}"


class Groups:
    """Reads chosen prompt groups.

    Args:
        paths: of the bus.
        algorithm: of the run: it knows advantages by the rewards of a group.
        words: of the run's model.
        masks_errors: an episode whose reward failed is compared with nobody.
        longest: tokens that a response may have.
    """

    def __init__(
        self,
        paths: BusPaths,
        algorithm: Algorithm,
        words: Words,
        *,
        masks_errors: bool,
        longest: int,
    ) -> None:
        self._paths, self._algorithm, self._words = paths, algorithm, words
        self._masks_errors, self._longest = masks_errors, longest
        self._reader = Reader(paths)

    def read(self, chosen: Surveyed, tokens: int, note: str = "") -> Group | None:
        """Reads a prompt group; None if it is deleted by now.

        Args:
            chosen: by `choose`.
            tokens: of a prompt and of a response that are shown at most; a stretch that stands for
                a medium counts as one.
            note: of it.
        """
        record = self._with_sidecars_there(chosen.record)
        try:
            rows = self._reader.rows(record, range(record.num_trajectories), _COLUMNS)
            advantages = self._advantages(self._reader.index(record), rows)
        except DamagedError:
            if all(self._paths.shard(*part[:3]).exists() for part in record.parts):
                raise
            return None
        cap = max(2, min(tokens, _GROUP_TOKENS // len(rows)))
        shown: list[Row] = []
        before: list[int] = []
        for row, advantage in zip(rows, advantages, strict=True):
            prompt, stretches = row.token_ids[: row.prompt_len].tolist(), of_row(row)
            text = "" if prompt == before else self._prompt(prompt, stretches, cap)
            before = prompt
            shown.append(self._row(row, advantage, text, stretches, cap))
        return Group(chosen.guid, record.step or None, chosen.mean_reward, shown, note)

    def _with_sidecars_there(self, record: PlanRecord) -> PlanRecord:
        sidecars = {
            uuid: {r: s for r, s in roles.items() if self._paths.shard(*s[:3]).exists()}
            for uuid, roles in record.sidecars.items()
        }
        return record._replace(sidecars=sidecars)

    def _advantages(
        self, index: BatchIndex, rows: Sequence[Trajectory]
    ) -> list[_Advantage] | list[None]:
        """By the column, or else by the algorithm, as the trainer asks it."""
        columns = [row.columns.get("advantages") for row in rows]
        if all(column is not None for column in columns):
            return [
                _Advantage(_mean(np.asarray(column)[row.loss_mask == 1]), np.asarray(column))
                for column, row in zip(columns, rows, strict=True)
            ]
        by_token = self._algorithm.advantage.is_of_tokens
        if by_token or self._algorithm.needs.scope == "batch":  # a group alone does not tell
            return [None] * len(rows)
        siblings = int((index.segment == 0).sum())
        values, _ = values_of(
            index,
            self._algorithm,
            siblings,
            longest=self._longest,
            masks_errors=self._masks_errors,
        )
        return [
            _Advantage(float(value), np.full(len(row.token_ids), value))
            for value, row in zip(values["advantages"], rows, strict=True)
        ]

    def _prompt(self, tokens: list[int], stretches: Sequence[Stretch], cap: int) -> str:
        size = len(tokens)
        stretches = within(stretches, 0, size)
        head, tail = cut(size, stretches, cap)
        said = self._words.text(tokens[:head], within(stretches, 0, head))
        if head == tail:
            return said
        last = self._words.text(tokens[tail:], within(stretches, tail, size))
        return f"{said} [... {tail - head} tokens ...] {last}"

    def _row(
        self,
        row: Trajectory,
        advantage: _Advantage | None,
        prompt: str,
        stretches: Sequence[Stretch],
        cap: int,
    ) -> Row:
        num_tokens, first = len(row.token_ids), row.prompt_len
        response_len = num_tokens - first
        head, tail = cut(response_len, within(stretches, first, num_tokens), cap)
        each = advantage and advantage.tokens
        oldest, newest = row.policy_version_min, row.policy_version_max
        versions = (
            "none" if oldest < 0 else str(oldest) if oldest == newest else f"{oldest} to {newest}"
        )
        return Row(
            row.sibling,
            row.segment,
            row.reward,
            row.parts,
            row.reward_error,
            advantage and advantage.mean,
            row.finish.name.lower(),
            versions,
            row.prompt_len,
            response_len,
            prompt,
            list(self._tokens(row, each, stretches, first, first + head)),
            tail - head,
            list(self._tokens(row, each, stretches, first + tail, num_tokens)),
        )

    def _tokens(
        self,
        row: Trajectory,
        advantages: Floats | None,
        stretches: Sequence[Stretch],
        lo: int,
        hi: int,
    ) -> Iterator[Token]:
        logprobs = row.columns["rollout_logprobs"][lo:hi].tolist()
        mask = row.loss_mask[lo:hi].tolist()
        starts = row.version_runs[:, 0]
        runs = np.searchsorted(starts, np.arange(lo, hi), side="right") - 1
        tokens = row.token_ids[lo:hi].tolist()
        for piece in self._words.pieces(tokens, within(stretches, lo, hi)):
            sampled = mask[piece.lo] == 1
            run = int(runs[piece.lo])
            yield Token(
                piece.text,
                sampled,
                min(logprobs[piece.lo : piece.hi]) if sampled else 0.0,
                int(row.version_runs[run, 1]) if sampled and run >= 0 else -1,
                float(advantages[piece.lo + lo]) if sampled and advantages is not None else None,
            )


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0
