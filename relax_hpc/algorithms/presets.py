"""Algorithms by name: which parts, with which values. What is not said is `PLAIN`'s."""

from collections.abc import Mapping
from typing import Any

PLAIN: Mapping[str, Any] = {
    "advantage": {"name": "group_mean"},
    "loss": {"name": "ppo_clip"},
    "correction": {"name": "none"},
    "kl": {"name": "none"},
    "entropy": {"name": "none"},
    "groups": {"name": "as_sampled"},
}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "decoupled": {
        "loss": {"name": "ppo_clip", "anchor": "old"},
        "correction": {"name": "tis"},
    },
    "grpo": {
        "aggregation": "sequence",
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo_clip", "clip_high": 0.2},
    },
    "dr_grpo": {
        "aggregation": "constant",
        "loss": {"name": "ppo_clip", "clip_high": 0.2},
    },
}
DEFAULT = "decoupled"
WHERE_NONE: Mapping[str, str] = {"correction": "tis", "kl": "k3"}
"""Tables that are empty in a preset -> the part whose settings a job gives without a name."""


def tables_of(preset: str) -> dict[str, Any]:
    """The keys of a preset."""
    return {**PLAIN, **PRESETS[preset]}


def merged(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a preset and those that a job gives.

    A table with a name replaces the preset's; one without changes what it says.
    """
    found = dict(preset)
    for key, value in given.items():
        before = found.get(key)
        if isinstance(before, Mapping) and isinstance(value, dict) and "name" not in value:
            is_none = before["name"] == "none" and key in WHERE_NONE
            found[key] = {**({"name": WHERE_NONE[key]} if is_none else before), **value}
        else:
            found[key] = value
    return found
