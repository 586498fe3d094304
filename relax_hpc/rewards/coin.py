"""A reward that nothing can learn and every group disagrees on: for runs with random weights."""

import hashlib


def score(response: str, answer: str) -> float:
    """0 or 1, evenly, by a hash of the response."""
    return float(hashlib.sha256(response.encode()).digest()[0] & 1)


def can_match(answer: str) -> bool:
    """Every answer will do: none is looked at."""
    return True
