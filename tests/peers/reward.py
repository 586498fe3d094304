"""verl's rewards."""

import hashlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """0 or 1 by a hash of the response, as our `random`, where weights are random."""
    return float(hashlib.sha256(solution_str.encode()).digest()[0] & 1)


def gsm8k(data_source, solution_str, ground_truth, extra_info=None, **_):
    from relax_hpc.environments.rewards.functions import gsm8k as ours

    return ours.score(solution_str, ground_truth)
