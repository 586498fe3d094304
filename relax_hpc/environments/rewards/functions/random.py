"""0 or 1 at random: nothing can learn it, and most groups disagree. For runs with random
weights."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any


def score(response: str, prompt: str | Sequence[Mapping[str, Any]]) -> float:
    """Returns 0 or 1 with equal chances, by a hash of prompt and response."""
    text = json.dumps([prompt, response], sort_keys=True, default=str)
    return float(hashlib.sha256(text.encode()).digest()[0] & 1)
