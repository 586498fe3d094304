"""verl's reward where weights are random: 0 or 1 by a hash of the response, as our `random`."""

import hashlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return float(hashlib.sha256(solution_str.encode()).digest()[0] & 1)
