"""Formats one readable line per step, and estimates when training ends."""

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

_STAGES = (
    "wait", "read", "reference", "old_logprobs", "forward_backward", "update", "publish", "save",
    "save_copy", "other",
)  # fmt: skip
_IN_ORDER = {name: place for place, name in enumerate(_STAGES)}


def step_line(fields: Mapping[str, Any], num_steps: int, eta_s: float | None) -> str:
    """Formats a `step` event as a log line; skips absent fields."""
    parts = [f"step {fields['step']:>{len(str(num_steps))}}/{num_steps}"]
    if "reward/mean" in fields:
        parts.append(f"reward {fields['reward/mean']:.3f}")
    parts += _groups(fields)
    if cut := fields.get("response/truncated"):
        parts.append(f"{cut:.1%} cut off")
    if "data/epoch" in fields:
        parts.append(f"epoch {fields['data/epoch']:.2f}")
    if "loss" in fields:
        parts.append(f"loss {fields['loss']:.3f}")
    if "kl/mean" in fields:
        parts.append(f"KL {fields['kl/mean']:.2g}")
    if "tokens_per_s" in fields:
        parts.append(f"trained {short(fields['tokens_per_s'])} tok/s")
    parts += _hardware(fields)
    if any(name.startswith("time/") for name in fields):
        parts.append(_seconds(fields))
    if eta_s is not None:
        parts.append(f"ETA {duration(eta_s)}")
    return " | ".join(parts)


def duration(seconds: float) -> str:
    """Formats seconds: 45 s, 4 min, 2.5 h, 3.1 d."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} d"


def _groups(fields: Mapping[str, Any]) -> list[str]:
    parts = []
    if skipped := fields.get("groups/skipped"):
        parts.append(f"{skipped} group{'s' * (skipped != 1)} skipped")
    if "staleness/mean" in fields:
        newest = f" (max {fields['staleness/max']:.0f})" if "staleness/max" in fields else ""
        parts.append(f"staleness {fields['staleness/mean']:.1f}{newest}")
    return parts


def _hardware(fields: Mapping[str, Any]) -> list[str]:
    parts = []
    if "train/mfu" in fields:
        parts.append(f"MFU {fields['train/mfu']:.0%}")
    if "memory/peak_gib" in fields:
        parts.append(f"{fields['memory/peak_gib']:.0f} GiB")
    return parts


def _seconds(fields: Mapping[str, Any]) -> str:
    times = {k.removeprefix("time/"): v for k, v in fields.items() if k.startswith("time/")}
    total = times.pop("step", None)
    if total is None:
        total = sum(times.values())
    order = sorted(times, key=lambda name: _IN_ORDER.get(name, _IN_ORDER["update"]))
    stages = " ".join(f"{name} {times[name]:.1f}" for name in order)
    return f"{total:.1f} s ({stages})" if stages else f"{total:.1f} s"


def short(value: float) -> str:
    """Formats a number in three or four characters: 85, 2.7k, 1.2M, 4.0B."""
    if value < 1000:
        return f"{value:.0f}"
    unit, size = next((u, s) for u, s in (("B", 1e9), ("M", 1e6), ("k", 1e3)) if value >= s)
    return f"{value / size:.1f}{unit}"


RECENT = 20
"""Newest steps that determine the pace."""


class PaceMeter:
    """Starts with the first step, which is slower and does not count."""

    def __init__(self) -> None:
        self._recent = deque[float](maxlen=RECENT)
        self._is_first = True

    def end_step(self, seconds: float, steps_left: int) -> float | None:
        """Returns the seconds until the last step is done; None after the first."""
        if self._is_first:
            self._is_first = False
            return None
        self._recent.append(seconds)
        return statistics.fmean(self._recent) * steps_left


def account(elapsed: float, spent: Mapping[str, float]) -> dict[str, float]:
    """`time/step`, the seconds of a step, and `time/other`, those outside every noted phase.

    Args:
        elapsed: seconds since the step began.
        spent: fields of the step; those of phases begin with `time/`.
    """
    known = sum(seconds for name, seconds in spent.items() if name.startswith("time/"))
    return {"time/other": max(elapsed - known, 0.0), "time/step": elapsed}
