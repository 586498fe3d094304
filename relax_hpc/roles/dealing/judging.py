"""The verdict of rank 0 on prompt groups as they come in: which of them teach."""

from collections.abc import Mapping, Sequence

import numpy as np

from relax_hpc.algorithms.groups import MOST_BATCHES, Refill
from relax_hpc.bus.plan import SkippedGroup
from relax_hpc.bus.reader import BatchIndex
from relax_hpc.bus.skips import Judge, Verdict
from relax_hpc.config.run import RunConfig
from relax_hpc.roles.dealing.portions import rewards_of, standing_of
from relax_hpc.schema import FinishReason


def judge_of(config: RunConfig) -> Judge | None:
    """The rule by which groups are skipped; None where all that is sampled is a batch's."""
    groups = config.algorithm.groups
    if not isinstance(groups, Refill):
        return None
    siblings = config.rollout.samples_per_prompt
    longest, masks_errors = config.rollout.max_new_tokens, config.reward.masks_errors

    def judge(index: BatchIndex) -> Sequence[Verdict]:
        standing = standing_of(
            index, config.algorithm, siblings, longest=longest, masks_errors=masks_errors
        )
        rewards = rewards_of(index, siblings, masks_errors=masks_errors)
        retired = (index.finish[index.segment == 0] == FinishReason.RETIRED).reshape(-1, siblings)
        never_asked = retired.all(axis=1)
        rewards[never_asked] = np.nan
        teaching = ~never_asked & standing.spread & standing.teaches.any(axis=1)
        solved = np.fmin.reduce(rewards, axis=1) >= np.float32(config.reward.solved_at)
        solved |= never_asked
        means = [_mean(row[~np.isnan(row)].tolist()) for row in rewards]
        columns = [each.tolist() for each in (teaching, solved, standing.truncated, never_asked)]
        return [
            Verdict(teaches, is_solved, mean, truncated, is_retired)
            for mean, (teaches, is_solved, truncated, is_retired) in zip(
                means, zip(*columns, strict=True), strict=True
            )
        ]

    return judge


def most_skipped(config: RunConfig) -> int:
    """Prompt groups that may be skipped for one step."""
    schedule = config.schedule
    return MOST_BATCHES * schedule.prompts_per_step * (schedule.max_staleness + 1)


def with_skipped(
    described: Mapping[str, float], skipped: Sequence[SkippedGroup], config: RunConfig
) -> dict[str, float]:
    """Figures of a batch with the groups that were skipped for it.

    Args:
        described: the batch, which has none of `skipped`.
        skipped: groups that were, for this batch.
        config: of the run.
    """
    rewards = [group.reward for group in skipped if group.reward is not None]
    if "reward/mean" in described:  # else all rewards of the batch have failed
        rewards += [described["reward/mean"]] * config.schedule.prompts_per_step
    sampled = _mean(rewards)
    return {
        **({} if sampled is None else {"reward/sampled": sampled}),
        "groups/skipped": len(skipped),
        "groups/skipped_solved": sum(group.solved for group in skipped),
        "groups/skipped_retired": sum(group.retired for group in skipped),
    }


def _mean(rewards: Sequence[float]) -> float | None:
    return sum(rewards) / len(rewards) if rewards else None
