"""Decides how far sampling runs ahead of training: which group is begun, and when.

A group that teaches nothing is skipped, and the next one takes its place. If that began only then,
a batch would take rounds, each as long as its longest response. So `Early` begins as many more as
will probably be needed.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from relax_hpc.bus.credits import Credit
from relax_hpc.bus.staleness import may_start_batch
from relax_hpc.config.run import RunConfig
from relax_hpc.roles.rollout.skips import TaskSkips
from relax_hpc.schema import PromptGroup

WaitReason = Literal[
    "ending", "disk_full", "last_step", "no_engine", "max_staleness", "last_evaluation"
]
"""Why a task starts no further prompt group. `status`, `watch` and `waits` events name it;
docs/how-to/what-now.md says what to turn.

* ending: the end of the job is announced; unfinished groups are kept for the next start
* disk_full: finished groups find no room in the run directory
* last_step: all groups of the run's steps are started
* no_engine: none serves: they start, take new weights, are fenced, or lent their GPUs
* max_staleness: it is so many policies ahead of the trainer, and waits for the next one
* last_evaluation: training is over
"""


class Pace:
    """Decides how far sampling may run ahead of training."""

    def __init__(self, config: RunConfig) -> None:
        self._max_staleness = config.schedule.max_staleness
        self._num_steps = config.schedule.num_steps
        self._prompts_per_step = config.schedule.prompts_per_step
        self._credit, self._ends = Credit(), list[int]()
        self._spare = int(config.rollout.advanced.over_sampling * self._prompts_per_step)

    def follow(self, credit: Credit, skipped: Sequence[int] = ()) -> None:
        """Updates the ends of batches from the trainer's grant.

        Args:
            skipped: rising guids of groups that it will skip, and does not know yet. Skips of other
                tasks are unknown here, so ends may turn out to be further away, never nearer.
        """
        self._credit, ends = credit, list(credit.batch_ends)
        if skipped and not ends:
            size = self._prompts_per_step
            ends = [(credit.step + n) * size for n in range(1, self._max_staleness + 3)]
        self._ends, passed = [], 0
        for end in ends:
            end += passed
            while passed < len(skipped) and skipped[passed] < end:
                passed += 1
                end += 1
            self._ends.append(end)

    def batch_of(self, guid: int) -> int:
        """Returns the latest batch that may get the group; skips may make it an earlier one."""
        ends, size = self._ends, self._prompts_per_step
        if not ends:
            return guid // size + 1
        behind = max(guid - ends[-1], 0) // size
        return self._credit.step + 1 + bisect_right(ends, guid) + behind

    def wait_reason(
        self, guid: int, version: int | None, *, is_ending: bool = False, disk_full: bool = False
    ) -> WaitReason | None:
        """Returns why a prompt group may not be started now; None if it may.

        Groups beyond the staleness bound are over-sampled: one that is ready before a straggler of
        the previous batch takes its place there. No group is started that no batch would take.
        """
        if is_ending:
            return "ending"
        if disk_full:
            return "disk_full"
        if self.batch_of(guid) > self._num_steps:
            return "last_step"
        if version is None:
            return "no_engine"
        batch = self.batch_of(max(guid - self._spare, 0))
        if may_start_batch(batch, policy_version=version, max_staleness=self._max_staleness):
            return None
        return "max_staleness"

    def end_of(self, batch: int) -> int:
        """Returns the guid after the end of a batch, by the skips known so far."""
        at = batch - self._credit.step - 1
        if at < len(self._ends):
            return self._ends[at]
        end = self._ends[-1] if self._ends else self._credit.step * self._prompts_per_step
        return end + (at + 1 - len(self._ends)) * self._prompts_per_step

    def min_version(self, guid: int, version: int | None) -> int:
        """Returns the oldest policy that may sample a token of a group which starts with
        `version`."""
        bound = self.batch_of(guid) - 1 - self._max_staleness
        return max(min(bound, version or 0), 0)

    def is_done(self, ready: Iterable[int], running: Iterable[int]) -> bool:
        """Whether no running group belongs to a batch of the ready ones."""
        last = max((self.batch_of(guid) for guid in ready), default=0)
        return all(self.batch_of(guid) > last for guid in running)


_AT_THE_BOUND: tuple[WaitReason, ...] = ("max_staleness", "last_step")
"""All groups that may be begun are."""
MARGIN = 1.0
"""Standard deviations of the number of skips, begun early beyond its expected value, while a whole
batch is under way; fewer later on, when a further group takes as long as a round. One group too few
costs a round; one too many costs its tokens."""


class Early:
    """The groups begun beyond the staleness bound, for the places of groups likely to be skipped.

    A finished one is held back until skips bring its batch within the bound of the policy that
    began it. If they cannot any more, it is surplus, and sampled again by a newer policy. So each
    batch has the groups, and each token the lag, that it has without: only the waits are shorter.
    With `max_staleness` >= 1 groups of later batches are under way anyway; there are early ones
    only if these do not suffice.
    """

    def __init__(self, config: RunConfig, pace: Pace, skips: TaskSkips) -> None:
        self._max_staleness = config.schedule.max_staleness
        self._tasks = config.rollout_pool.num_hosts
        self._in_batch = config.schedule.prompts_per_step / self._tasks
        self._pace, self._skips = pace, skips
        self._policies: dict[int, int] = {}
        """guid -> the policy that began it."""
        self._held: dict[int, PromptGroup] = {}
        self.counts = Counter[str]()
        """Begun early, and surplus, since somebody cleared it."""

    @property
    def held(self) -> list[PromptGroup]:
        return list(self._held.values())

    def take(
        self,
        guid: int,
        running: Collection[int],
        *,
        why: WaitReason,
        version: int | None,
        step: int,
    ) -> bool:
        """Takes a group, to be begun early, if the next batch will probably lack one.

        Args:
            running: guids under way; all that the bound admits are begun.
            why: what speaks against beginning it.
            version: newest policy of the engines.
            step: the last one trained.
        """
        if why not in _AT_THE_BOUND or version is None:
            return False
        admitted = [guid for guid in running if guid not in self._policies]
        end = self._pace.end_of(max(version, step) + 1)
        due, share = sum(guid < end for guid in admitted), self._skips.share
        if not due or not share:
            return False
        early, later = len(running) - len(admitted), len(admitted) - due
        beyond = (self._pace.end_of(version + 1 + self._max_staleness) - end) / self._tasks
        held = sum(not self._skips.has(guid) for guid in self._held)
        ready = held + beyond + early - share * (early + later)
        deviation = math.sqrt(share * (1 - share) * len(running))
        if ready >= share * due + MARGIN * deviation * min(due / self._in_batch, 1.0):
            return False
        self._policies[guid] = version
        self.counts["groups/early"] += 1
        return True

    def pass_on(self, finished: Sequence[PromptGroup], credit: Credit | None) -> list[PromptGroup]:
        """Judges finished groups; returns all that are within the bound, and holds the others
        back."""
        self._skips.judge(finished)
        self._pace.follow(credit or Credit(), self._skips.unknown_to(credit))
        within = {guid for guid, policy in self._policies.items() if self._is_within(guid, policy)}
        for guid in within:
            del self._policies[guid]
        groups = [*(self._held.pop(guid) for guid in within & self._held.keys()), *finished]
        self._held.update((each.guid, each) for each in groups if each.guid in self._policies)
        return [each for each in groups if each.guid not in self._policies]

    def find_surplus(
        self, running: Collection[int], *, why: WaitReason, version: int | None, step: int
    ) -> list[int]:
        """Returns the guids that no batch can have as they are; see `take` for the arguments."""
        is_whole = self._tasks == 1 and why in _AT_THE_BOUND
        is_full = is_whole and all(guid in self._policies for guid in running)
        return [
            guid
            for guid, policy in self._policies.items()
            if is_full or max(version or 0, step) > policy + self._max_staleness
        ]

    def drop(self, guids: Iterable[int]) -> None:
        """Forgets groups that are to be sampled again."""
        for guid in guids:
            if self._policies.pop(guid, None) is not None:
                self.counts["groups/surplus"] += 1
            self._held.pop(guid, None)

    def _is_within(self, guid: int, policy: int) -> bool:
        batch = self._pace.batch_of(guid)
        return may_start_batch(batch, policy_version=policy, max_staleness=self._max_staleness)
