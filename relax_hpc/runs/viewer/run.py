"""Reads what a viewer shows of a run: chooses prompt groups, and reads them with their tokens."""

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from relax_hpc.algorithms.algorithm import Algorithm
from relax_hpc.bus.plan import PlanRecord, read_chain
from relax_hpc.bus.reader import BatchIndex, Reader
from relax_hpc.bus.shards import media
from relax_hpc.bus.tools import inventory
from relax_hpc.bus.tools.inventory import Survey, Surveyed
from relax_hpc.config import job_file
from relax_hpc.config.run import RunConfig
from relax_hpc.data import tokenizer
from relax_hpc.data.records import PromptRecord
from relax_hpc.environments.rewards.registry import REWARDS
from relax_hpc.errors import ConfigError, DamagedError
from relax_hpc.roles.dealing.portions import Comparison, values_of
from relax_hpc.runs.answers import Answers
from relax_hpc.runs.viewer import GroupQuery, Sort
from relax_hpc.runs.viewer.words import CollapsedSpan, Token, Words, cut, of_row, within
from relax_hpc.runtime.paths import BusPaths, RunPaths
from relax_hpc.schema import Trajectory, TurnKind


class Flips(NamedTuple):
    groups: list[Surveyed]
    """By prompt, the last flip first; within a prompt the newest first."""
    notes: dict[int, str]
    """guid -> the change since the prompt's previous sampling."""


def find(groups: Sequence[Surveyed], solved_at: float, most: int) -> Flips:
    """Finds flipped prompts; a prompt group is right if most of its episodes are.

    Args:
        groups: by guid, ascending.
        solved_at: reward from which on an episode is right.
        most: prompt groups; those of one prompt stay together, so the first may exceed it.
    """
    prompts: dict[int, list[Surveyed]] = {}
    for group in groups:
        prompts.setdefault(group.prompt_index, []).append(group)
    found: list[Surveyed] = []
    notes: dict[int, str] = {}
    flipped = [pairs for of_prompt in prompts.values() if (pairs := _flips(of_prompt, solved_at))]
    for pairs in sorted(flipped, key=lambda pairs: -pairs[0][1].guid):
        seen = {each.guid: each for before, after in pairs for each in (after, before)}
        if found and len(found) + len(seen) > most:
            break
        found += seen.values()
        notes |= {after.guid: _note(before, after, solved_at) for before, after in pairs}
    return Flips(found, notes)


def _flips(groups: Iterable[Surveyed], solved_at: float) -> list[tuple[Surveyed, Surveyed]]:
    """Returns consecutive groups that differ, the newest first."""
    found = [
        (before, after)
        for before, after in pairwise(groups)
        if _is_right(before, solved_at) != _is_right(after, solved_at)
    ]
    return found[::-1]


def _right(group: Surveyed, solved_at: float) -> int:
    return sum(reward >= solved_at for reward in group.rewards)


def _is_right(group: Surveyed, solved_at: float) -> bool:
    return 2 * _right(group, solved_at) > len(group.rewards)


def _note(before: Surveyed, after: Surveyed, solved_at: float) -> str:
    went = "wrong to right" if _is_right(after, solved_at) else "right to wrong"
    return (
        f"{went}: {_right(after, solved_at)} of {len(after.rewards)} here, "
        f"{_right(before, solved_at)} of {len(before.rewards)} in prompt group {before.guid}"
    )


_SEED = 0
"""Makes the random choice reproducible for a bus."""


class GroupChoice(NamedTuple):
    """The choice, with remarks."""

    chosen: list[Surveyed]
    remarks: list[str]
    notes: Mapping[int, str] = {}
    """guid -> remark on this prompt group."""


def choose(
    paths: BusPaths, asked: GroupQuery, solved_at: float = 1.0, *, masks_errors: bool = False
) -> GroupChoice:
    """Chooses prompt groups; remarks mention missing ones.

    Args:
        solved_at: reward from which on a response is right.
        masks_errors: failed rewards do not count.

    Raises:
        BusError: not a bus of this format, damage, or a step that is not planned.
        ConfigError: no such prompt group; names the existing ones.
    """
    alone = asked.sort == "newest" and asked.step is None and asked.guid is None
    found = inventory.survey(
        paths,
        step=asked.step,
        guid=asked.guid,
        newest=asked.groups if alone else None,
        masks_errors=masks_errors,
    )
    remarks = []
    if asked.guid is not None and not found.groups and not _is_planned(paths, asked.guid):
        raise ConfigError(f"--guid {asked.guid}: {_there(inventory.survey(paths))}")
    if found.is_empty and asked.guid is None:
        remarks.append("no trajectory is committed yet; look again later")
    if asked.sort == "flipped":
        chosen_so = _choose_flipped(found.groups, asked, solved_at, remarks)
    else:
        chosen = _ORDERS[asked.sort](found.groups)[: asked.groups]
        if len(chosen) < len(found.groups):
            remarks.append(f"{len(chosen)} of {len(found.groups)} prompt groups: {asked.sort}")
        chosen_so = GroupChoice(chosen, remarks)
    if found.deleted_shards:
        shards = f"{found.deleted_shards} shard{'s' * (found.deleted_shards > 1)}"
        remarks.append(
            f"trained on and cleared away: {found.deleted_trajectories} trajectories of {shards}, "
            "which a checkpoint covers; bus.keep_steps keeps more"
        )
    return chosen_so


def _choose_flipped(
    groups: Sequence[Surveyed], asked: GroupQuery, solved_at: float, remarks: list[str]
) -> GroupChoice:
    chosen, notes = find(groups, solved_at, asked.groups)
    if groups and not chosen:
        prompts = len({group.prompt_index for group in groups})
        remarks.append(
            f"no prompt went from wrong to right or back: {len(groups)} prompt groups of "
            f"{prompts} prompts are on disk; bus.keep_steps keeps more"
        )
    return GroupChoice(chosen, remarks, notes)


_ORDERS: dict[Sort, Callable[[Sequence[Surveyed]], list[Surveyed]]] = {
    "newest": lambda groups: list(reversed(groups)),
    "best": lambda groups: sorted(groups, key=lambda group: _worth(group, -1.0)),
    "worst": lambda groups: sorted(groups, key=lambda group: _worth(group, 1.0)),
    "random": lambda groups: random.Random(_SEED).sample(groups, len(groups)),
}


def _worth(group: Surveyed, sign: float) -> float:
    """Sort key; groups without any reward come last."""
    return math.inf if group.mean_reward is None else sign * group.mean_reward


def _is_planned(paths: BusPaths, guid: int) -> bool:
    return any(guid in record.guids for record in read_chain(paths).steps)


def _there(found: Survey) -> str:
    """Formats the prompt groups on disk as ranges."""
    guids = np.array([group.guid for group in found.groups], np.int64)
    if not len(guids):
        return "there is no prompt group on disk"
    runs = np.split(guids, np.flatnonzero(np.diff(guids) > 1) + 1)
    said = [f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    more = ["..."] if len(said) > 20 else []
    return f"no such prompt group on disk; there are {', '.join(said[:20] + more)}"


_COLUMNS = ("row/score_parts", *media.FACTS)
_GROUP_TOKENS = 100_000
"""Most tokens shown of a prompt group."""


class RowView(NamedTuple):
    """A trajectory as shown."""

    sibling: int
    segment: int
    reward: float
    parts: Mapping[str, float]
    """Parts of the reward by name, if it has several."""
    failed: bool
    """Whether the reward failed; it is then 0."""
    advantage: float | None
    """The episode's, or the mean over its sampled tokens; None if unknown."""
    finish: str
    versions: str
    prompt_len: int
    response_len: int
    prompt: str
    """Empty if it equals the previous row's."""
    head: list[Token]
    left_out: int
    """Tokens hidden between `head` and `tail`."""
    tail: list[Token]
    turns: int
    """Stretches that the policy sampled."""
    tool_turns: int
    """Stretches that the environment wrote after it."""

    @property
    def said_turns(self) -> str:
        tools = f" and {self.tool_turns} of a tool" if self.tool_turns else ""
        return f"{self.turns} turn{'s' * (self.turns != 1)}{tools}"

    @property
    def response(self) -> str:
        head, tail = ("".join(token.text for token in part) for part in (self.head, self.tail))
        return head + (f" [... {self.left_out} tokens ...] " if self.left_out else "") + tail


def facts(row: RowView) -> str:
    """Formats the line above a response."""
    segment = f", segment {row.segment}" if row.segment else ""
    advantage = "" if row.advantage is None else f", advantage {row.advantage:+.4g}"
    parts = ", ".join(f"{name} {value:.4g}" for name, value in row.parts.items())
    of = f" ({parts})" * bool(parts) + ", which failed" * row.failed
    return (
        f"sibling {row.sibling}{segment}: reward {row.reward:.4g}{of}{advantage}, {row.finish}, "
        f"versions {row.versions}, {row.prompt_len} + {row.response_len} tokens, {row.said_turns}"
    )


class GroupView(NamedTuple):
    guid: int
    step: int | None
    mean_reward: float | None
    """None if all have failed and are masked."""
    rows: list[RowView]
    """By sibling and segment."""
    note: str = ""
    data_row: PromptRecord | None = None
    """The row of the data, with the right answer; None if it cannot be read."""

    @property
    def parts(self) -> dict[str, float]:
        """Mean of each part of the reward over the episodes that have it."""
        rows = [row for row in self.rows if not row.segment]
        names = dict.fromkeys(name for row in rows for name in row.parts)
        return {name: fmean(r.parts[name] for r in rows if name in r.parts) for name in names}

    @property
    def mean(self) -> str:
        if self.mean_reward is None:
            return "all rewards failed"
        return f"mean reward {self.mean_reward:.4g}"


class GroupReader:
    """Reads chosen prompt groups.

    Args:
        algorithm: of the run; computes advantages from a group's rewards.
        words: of the run's model.
        masks_errors: episodes with failed rewards are not compared.
        longest: most tokens of a response.
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

    def read(self, chosen: Surveyed, tokens: int, note: str = "") -> GroupView | None:
        """Reads a prompt group; None if it was deleted.

        Args:
            chosen: by `choose`.
            tokens: most tokens shown of a prompt and of a response; a media span counts as one.
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
        shown: list[RowView] = []
        before: list[int] = []
        for row, advantage in zip(rows, advantages, strict=True):
            prompt, stretches = row.token_ids[: row.prompt_len].tolist(), of_row(row)
            text = "" if prompt == before else self._prompt(prompt, stretches, cap)
            before = prompt
            shown.append(self._row(row, advantage, text, stretches, cap))
        return GroupView(chosen.guid, record.step or None, chosen.mean_reward, shown, note)

    def _with_sidecars_there(self, record: PlanRecord) -> PlanRecord:
        sidecars = {
            uuid: {r: s for r, s in roles.items() if self._paths.shard(*s[:3]).exists()}
            for uuid, roles in record.sidecars.items()
        }
        return record._replace(sidecars=sidecars)

    def _advantages(
        self, index: BatchIndex, rows: Sequence[Trajectory]
    ) -> list[float] | list[None]:
        """Advantages by the algorithm, as in the trainer."""
        by_token = self._algorithm.advantage.is_of_tokens
        if by_token or self._algorithm.needs.scope == "batch":  # a group alone does not tell
            return [None] * len(rows)
        siblings = int((index.segment == 0).sum())
        comparison = Comparison(self._algorithm, siblings, self._longest, self._masks_errors)
        values, _ = values_of(index, comparison)
        return [float(value) for value in values["advantages"]]

    def _prompt(self, tokens: list[int], stretches: Sequence[CollapsedSpan], cap: int) -> str:
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
        advantage: float | None,
        prompt: str,
        stretches: Sequence[CollapsedSpan],
        cap: int,
    ) -> RowView:
        num_tokens, first = len(row.token_ids), row.prompt_len
        response_len = num_tokens - first
        head, tail = cut(response_len, within(stretches, first, num_tokens), cap)
        oldest, newest = row.policy_version_min, row.policy_version_max
        versions = (
            "none" if oldest < 0 else str(oldest) if oldest == newest else f"{oldest} to {newest}"
        )
        return RowView(
            row.sibling,
            row.segment,
            row.reward,
            row.parts,
            row.reward_error,
            advantage,
            row.finish.name.lower(),
            versions,
            row.prompt_len,
            response_len,
            prompt,
            list(self._tokens(row, advantage, stretches, first, first + head)),
            tail - head,
            list(self._tokens(row, advantage, stretches, first + tail, num_tokens)),
            *_count_turns(row),
        )

    def _tokens(
        self,
        row: Trajectory,
        advantage: float | None,
        stretches: Sequence[CollapsedSpan],
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
                advantage if sampled else None,
            )


def _count_turns(row: Trajectory) -> tuple[int, int]:
    """Counts the turns of the policy, and of tools."""
    kinds = [] if row.turns is None else row.turns[:, 1].tolist()
    return kinds.count(TurnKind.SAMPLED), kinds.count(TurnKind.TOOL)


_POLL_S = 1.0


class RunView(NamedTuple):
    groups: Iterator[GroupView]
    """Read lazily."""
    remarks: list[str]
    """Omissions, with reasons."""


class RunViewer:
    """A viewed run, running or over.

    Raises:
        ConfigError: not a run with a bus.
    """

    def __init__(self, run_dir: Path) -> None:
        self._paths = RunPaths(run_dir)
        config = job_file.read_resolved(self._paths.config)
        if not isinstance(config, RunConfig):
            raise ConfigError(
                f"{run_dir}: trains on documents; it samples nothing that can be shown"
            )
        self._config, self._answers = config, Answers(self._paths)

    @property
    def missing_answers(self) -> str:
        """Why the answers are not shown; empty if they are."""
        return self._answers.missing

    @property
    def solved_at(self) -> float:
        """Reward from which on a response is right."""
        return self._config.reward.advanced.solved_at

    def view(self, asked: GroupQuery, tokens: int) -> RunView:
        """Looks once.

        Args:
            tokens: most shown of a prompt and of a response: the first and the last.

        Raises:
            ConfigError: no such prompt group, or the model's tokenizer cannot be read.
            BusError: damage, or a step that is not planned.
        """
        found = self._choose(asked)
        remarks = [self.missing_answers] if found.chosen and self.missing_answers else []
        return RunView(self._read(found, tokens), found.remarks + remarks)

    def follow(self, groups: int, tokens: int, *, until: Callable[[], bool]) -> Iterator[RunView]:
        """Looks repeatedly at the newest prompt groups not shown yet.

        Args:
            groups: at most, each time.
            tokens: as in `view`.
            until: one more look follows once this holds.
        """
        seen: set[int] = set()
        while True:
            over = until()  # asked first: what was committed before it became true is shown
            found = self._choose(GroupQuery("newest", groups))
            fresh = [group for group in found.chosen if group.guid not in seen]
            seen.update(group.guid for group in fresh)
            yield RunView(self._read(found._replace(chosen=fresh[::-1]), tokens), found.remarks)
            if over:
                return
            time.sleep(_POLL_S)

    def describe_unmarked(self, groups: Iterable[GroupView]) -> str:
        """Returns how few of the shown responses mark an answer; "" if half of them do."""
        name = self._config.reward.name or ""
        reward = REWARDS.get(name)
        marked = [reward.marks(row.response) for group in groups for row in group.rows if reward]
        if 2 * sum(marked) >= len(marked):
            return ""
        return (
            f"{sum(marked)} of {len(marked)} responses mark an answer as the reward {name} reads "
            "it: say in the prompt how to, or use another reward"
        )

    def _choose(self, asked: GroupQuery) -> GroupChoice:
        masks_errors = self._config.reward.masks_errors
        return choose(self._paths.bus, asked, self.solved_at, masks_errors=masks_errors)

    def _read(self, found: GroupChoice, tokens: int) -> Iterator[GroupView]:
        for chosen in found.chosen:
            group = self._groups.read(chosen, tokens, found.notes.get(chosen.guid, ""))
            if group is not None:
                row = self._answers.of(chosen.guid, chosen.prompt_index)
                yield group._replace(data_row=row)

    @cached_property
    def _groups(self) -> GroupReader:
        decode = tokenizer.load(self._config.model.path).decode
        words = Words(lambda tokens: str(decode(tokens)))
        return GroupReader(
            self._paths.bus,
            self._config.algorithm,
            words,
            masks_errors=self._config.reward.masks_errors,
            longest=self._config.rollout.max_new_tokens,
        )
