"""How far a rollout task may run ahead of training."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from relax_hpc.bus.credits import Credit
from relax_hpc.bus.staleness import may_start_batch
from relax_hpc.config.run import RunConfig


class Pace:
    """The distance that sampling may run ahead of training."""

    def __init__(self, config: RunConfig) -> None:
        self._max_staleness = config.schedule.max_staleness
        self._num_steps = config.schedule.num_steps
        self._prompts_per_step = config.schedule.prompts_per_step
        self._credit, self._ends = Credit(), list[int]()
        self._spare = int(config.rollout.over_sampling * self._prompts_per_step)

    def follow(self, credit: Credit, skipped: Sequence[int] = ()) -> None:
        """Goes by the ends of batches that the trainer says.

        Args:
            credit: the trainer's.
            skipped: rising guids of groups that it will skip, and does not know yet. Of those of
                other tasks, and of where it has skipped some, nothing is known here: so ends may
                turn out to be further away, never nearer.
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
        """The latest batch that may get the group, as far as is known: skips make it an earlier
        one."""
        ends, size = self._ends, self._prompts_per_step
        if not ends:
            return guid // size + 1
        behind = max(guid - ends[-1], 0) // size
        return self._credit.step + 1 + bisect_right(ends, guid) + behind

    def may_start(self, guid: int, version: int | None) -> bool:
        """Whether a prompt group may be started with engines that hold `version`.

        Groups beyond the staleness bound are over-sampled: if one is ready before a straggler of
        the batch before, it takes its place there. None is started that no batch will want.
        """
        if version is None or self.batch_of(guid) > self._num_steps:
            return False
        return may_start_batch(
            self.batch_of(max(guid - self._spare, 0)),
            policy_version=version,
            max_staleness=self._max_staleness,
        )

    def min_version(self, guid: int, version: int | None) -> int:
        """The oldest policy that may sample a token of a group which starts with `version`."""
        bound = self.batch_of(guid) - 1 - self._max_staleness
        return max(min(bound, version or 0), 0)

    def is_done(self, ready: Iterable[int], running: Iterable[int]) -> bool:
        """Whether none of the running groups belongs to a batch of those that are ready."""
        last = max((self.batch_of(guid) for guid in ready), default=0)
        return all(self.batch_of(guid) > last for guid in running)
