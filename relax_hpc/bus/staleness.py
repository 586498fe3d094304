"""The one rule that couples rollout to training. Pure arithmetic."""


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
