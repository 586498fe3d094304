"""Defines algorithms by name: their parts and values. `PLAIN` has the defaults.

The default preset is `async`, whose loss is `ipo`. Ratios are to the sampler (`Loss.anchor` is
"rollout") in all but `decoupled`, also in `grpo`, `dapo` and `ppo`: with lag, the papers' policy
before the step would bound nothing.
"""

from collections.abc import Mapping
from typing import Any

PLAIN: Mapping[str, Any] = {
    "advantage": {"name": "group_mean"},
    "loss": {"name": "ipo"},
    "correction": {"name": "none"},
    "kl": {"name": "none"},
    "distill": {"name": "none"},
    "entropy": {"name": "none"},
    "groups": {"name": "as_sampled"},
}
_GRPO = {"name": "grpo"}
_REFILL = {"name": "refill", "truncated": "mask"}
_CLIP = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "async": {"groups": _REFILL},
    "dapo": {
        "aggregation": "prompt",
        "advantage": _GRPO,
        "loss": {"name": "ppo_clip"},
        "groups": {"name": "refill", "truncated": "penalty"},
    },
    "grpo": {"aggregation": "sequence", "advantage": _GRPO, "loss": _CLIP},
    "dr_grpo": {"aggregation": "constant", "loss": _CLIP},
    "gspo": {"aggregation": "sequence", "advantage": _GRPO, "loss": {"name": "gspo"}},
    "cispo": {"aggregation": "prompt", "advantage": _GRPO, "loss": {"name": "cispo"}},
    "sapo": {"aggregation": "sequence", "advantage": _GRPO, "loss": {"name": "sapo"}},
    "icepop": {"advantage": _GRPO, "loss": {"name": "icepop"}},
    "kpop": {"loss": {"name": "kpop"}, "groups": _REFILL},
    "dppo": {"loss": {"name": "dppo_tv"}, "groups": _REFILL},
    "gmpo": {"aggregation": "sequence", "advantage": _GRPO, "loss": {"name": "gmpo"}},
    "m2po": {"advantage": _GRPO, "loss": {"name": "m2po"}},
    "max_rl": {"advantage": {"name": "max_rl"}, "groups": _REFILL},
    "pass_k": {"advantage": {"name": "pass_k"}, "groups": _REFILL},
    "rloo": {"advantage": {"name": "rloo"}, "groups": _REFILL},
    "opo": {"advantage": {"name": "opo"}, "groups": _REFILL},
    "gpg": {
        "advantage": {"name": "gpg"},
        "loss": {"name": "policy_gradient"},
        "correction": {"name": "tis"},
    },
    "reinforce_pp": {"advantage": {"name": "reinforce_pp"}, "loss": _CLIP},
    "reinforce_pp_baseline": {"advantage": {"name": "reinforce_pp_baseline"}, "loss": _CLIP},
    "ppo": {"advantage": {"name": "gae"}, "loss": _CLIP},
    "distill": {"advantage": {"name": "none"}, "distill": {"name": "advantage"}},
    "decoupled": {
        "epochs_per_step": 2,
        "loss": {"name": "ppo_clip", "anchor": "old"},
        "correction": {"name": "tis"},
    },
}
DEFAULT = "async"
WHERE_NONE: Mapping[str, str] = {
    "correction": "tis",
    "kl": "rk3",
    "distill": "advantage",
    "entropy": "fixed",
}
"""Tables that are empty in a preset -> the part meant by settings without a name."""
KL_IN_THE_REWARD = "k1"
"""The same for "kl" with place = "reward"."""


def tables_of(preset: str) -> dict[str, Any]:
    return {**PLAIN, **PRESETS[preset]}


def merge(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merges a job's keys into a preset.

    A table with a name replaces the preset's; one without changes its settings.
    """
    found = dict(preset)
    for key, value in given.items():
        before = found.get(key)
        if isinstance(before, Mapping) and isinstance(value, dict) and "name" not in value:
            is_none = before["name"] == "none" and key in WHERE_NONE
            found[key] = {**({"name": _where_none(key, value)} if is_none else before), **value}
        else:
            found[key] = value
    return found


def _where_none(key: str, value: Mapping[str, Any]) -> str:
    in_reward = key == "kl" and value.get("place") == "reward"
    return KL_IN_THE_REWARD if in_reward else WHERE_NONE[key]
