"""A reward that nothing can learn and every group disagrees on: for runs with random weights."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any


def score(response: str, prompt: str | Sequence[Mapping[str, Any]]) -> float:
    """0 or 1, evenly, by a hash of prompt and response."""
    text = json.dumps([prompt, response], sort_keys=True, default=str)
    return float(hashlib.sha256(text.encode()).digest()[0] & 1)
