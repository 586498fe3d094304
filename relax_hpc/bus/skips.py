"""Keeps prompt groups that teach nothing out of batches."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from relax_hpc.bus.plan import GuidSet, PlanSnapshot, SkippedGroup
from relax_hpc.bus.reader import BatchIndex
from relax_hpc.errors import SpreadError

_SHOWN = 8


class GroupVerdict(NamedTuple):
    """The use of a prompt group for training, computed from its row columns alone."""

    teaches: bool
    solved: bool
    reward: float | None
    truncated: bool = False
    """Whether it is useless because its responses were cut off."""
    retired: bool = False
    """Whether it was never sampled, since its prompt has been solved often enough."""


Judge = Callable[[BatchIndex], Sequence[GroupVerdict]]
"""Row columns of whole prompt groups -> a verdict on each; deterministic."""


class SkippedGuids:
    """Guids left out of batches: counted below a bound, listed above it."""

    def __init__(self, count: int = 0, above: Iterable[int] = ()) -> None:
        self.count, self.above = count, sorted(above)

    def add(self, guid: int) -> None:
        insort(self.above, guid)

    def settle(self, below: int) -> None:
        """Only counts guids under `below` from now on: all there are planned or skipped."""
        settled = bisect_left(self.above, below)
        self.count += settled
        del self.above[:settled]

    def batch_ends(self, first: int, number: int, prompts_per_step: int) -> list[int]:
        """Returns the guid after the end of each batch, if nothing more is skipped.

        Batch b has the guids of rank (b - 1) P to b P - 1 among those that are not skipped.

        Args:
            first: the first of the batches; none before it is open.

        Returns:
            `number` guids; empty if nothing was skipped: they are multiples of P.
        """
        if not self.count and not self.above:
            return []
        ends = []
        passed = 0
        for batch in range(first, first + number):
            end = batch * prompts_per_step + self.count + passed
            while passed < len(self.above) and self.above[passed] < end:
                passed += 1
                end += 1
            ends.append(end)
        return ends


class PlanSkips:
    """The skips of a plan, after a snapshot of its front."""

    def __init__(self, base: PlanSnapshot) -> None:
        self._all, self.retired = (
            SkippedGuids(base.skipped_below, base.skipped_above) for _ in range(2)
        )
        """`retired`: skips that no resume goes back to."""
        self._of_step: dict[int, list[SkippedGroup]] = {}

    def add(self, group: SkippedGroup, step: int) -> None:
        """Notes a skip between the plans of the previous step and of `step`."""
        self._of_step.setdefault(step, []).append(group)
        self._all.add(group.guid)

    def of_step(self, step: int) -> list[SkippedGroup]:
        return list(self._of_step.get(step, ()))

    def retire(self, step: int, retired: GuidSet) -> None:
        """Adds the skips of `step` to the guids that no resume goes back to."""
        for group in self.of_step(step):
            retired.update([group.guid])
            self.retired.add(group.guid)
        self.retired.settle(retired.below)

    def forget(self, step: int) -> None:
        self._of_step.pop(step, None)

    def batch_ends(self, first: int, number: int, prompts_per_step: int, decided: int) -> list[int]:
        """See `SkippedGuids.batch_ends`; all guids below `decided` are planned or skipped."""
        self._all.settle(decided)
        return self._all.batch_ends(first, number, prompts_per_step)


def check_limit(step: int, skipped: Sequence[SkippedGroup], most: int) -> None:
    """Ends a run that finds nothing to learn from.

    Args:
        most: limit; 0 is any number.

    Raises:
        SpreadError: over the limit. It names prompts and remedies.
    """
    if not most or len(skipped) <= most:
        return
    cut = [group.prompt for group in skipped if group.truncated]
    solved = [group.prompt for group in skipped if group.solved and not group.truncated]
    failed = [group.prompt for group in skipped if not group.solved and not group.truncated]
    found = ", ".join(
        f"{len(prompts)} {what} (row {_list_prompts(prompts)} of the data)"
        for prompts, what in (
            (solved, "are solved"),
            (failed, "are never solved"),
            (cut, "have no response that was not cut off"),
        )
        if prompts
    )
    raise SpreadError(
        f"step {step} finds too few prompts to learn from: {len(skipped)} prompt groups were "
        f"skipped for it, since the responses of each have one reward or were cut off; {found}; "
        f"{_remedy(bool(solved), bool(failed), bool(cut))}, or let them into the batch: "
        'algorithm.groups.name = "as_sampled"'
    )


def _remedy(solved: bool, failed: bool, cut: bool) -> str:
    remedies = []
    if cut:
        remedies.append(
            "raise rollout.max_new_tokens, or learn from responses that are cut off, too: "
            'algorithm.groups.truncated = "keep"'
        )
    if solved and failed:
        remedies.append("take prompts that are solved now and then")
    elif solved or failed:
        remedies.append("take harder prompts" if solved else "take easier prompts")
    if failed:
        remedies.append("see with relax-hpc peek whether reward.name knows what is right")
    return ", ".join(remedies)


def _list_prompts(prompts: Sequence[int]) -> str:
    rows = sorted(set(prompts))
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return ", ".join(map(str, rows[:_SHOWN])) + more
