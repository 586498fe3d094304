"""Computes how far rollout may run ahead of training. Pure arithmetic."""

import numpy as np

from relax_hpc.schema import Trajectory

SPAN_BATCHES = 16


def may_start_batch(batch: int, *, policy_version: int, max_staleness: int) -> bool:
    """Whether rollout may start generating the batch that optimizer step `batch` will train on.

    Step b turns policy b-1 into policy b, so a batch sampled now from `policy_version` is
    (b - 1) - policy_version steps stale when it is trained on.

    Args:
        batch: 1-based optimizer step that will consume the batch.
        policy_version: newest policy the rollout engines hold; 0 is the initial model.
        max_staleness: 0 is on-policy, 1 overlaps one step, larger is fully asynchronous.

    Source: AReaL (arXiv:2505.24298), staleness-aware training: floor((N_r - 1) / B) <= i + eta,
    with batch - 1 = floor((N_r - 1) / B), i = policy_version, eta = max_staleness.
    """
    return staleness(batch, policy_version) <= max_staleness


def staleness(step: int, policy_version: int) -> int:
    """Policy versions that a token sampled by `policy_version` lags behind when `step` trains."""
    return step - 1 - policy_version


def judging_span(prompts_per_step: int, max_staleness: int) -> int:
    """Returns the number of guids between two reports of the trainer on how far groups are judged.

    It is several times the number of groups in flight, so that nobody waits for a report.
    """
    return SPAN_BATCHES * prompts_per_step * (max_staleness + 1)


def mask_over_age(trajectory: Trajectory, *, step: int, max_staleness: int) -> Trajectory:
    """Takes the tokens that are more than `max_staleness` stale in `step` out of the loss.

    They stay in the sequence: later tokens were sampled after them.
    """
    starts, versions = trajectory.version_runs.reshape(-1, 2).T
    fresh = versions >= step - 1 - max_staleness
    if fresh.all():
        return trajectory
    ends = np.append(starts[1:], len(trajectory.token_ids))
    loss_mask = trajectory.loss_mask.copy()
    for first, end in zip(starts[~fresh], ends[~fresh], strict=True):
        loss_mask[first:end] = 0
    return trajectory._replace(loss_mask=loss_mask)
