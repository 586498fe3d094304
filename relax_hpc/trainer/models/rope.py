"""Computes rotary positions as transformers does: plain, linear scaling, YaRN and Llama 3's.

config.json has them in `rope_parameters` (since transformers 5), or in `rope_theta` and
`rope_scaling`. If several are present, the precedence is that of transformers.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from relax_hpc.config.hf_config import Table

if TYPE_CHECKING:
    import torch

_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate",
    },
    "llama3": {
        "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    },
}  # fmt: skip
_OF_ALL = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_OF_SPACE = {"mrope_section", "mrope_interleaved", "interleaved"}
DEFAULT_BASE = 10000.0


@dataclass(frozen=True, slots=True)
class Rope:
    """The settings that determine the angles of a position."""

    kind: str
    """default, linear, yarn or llama3."""
    base: float
    factor: float = 1.0
    """Ratio of the longest text to the original longest."""
    original_positions: int = 0
    """Original longest text; for yarn and llama3."""
    beta_fast: float = 32.0
    """Channels that turn more often than this within `original_positions` stay unchanged; for yarn
    and llama3, like the next."""
    beta_slow: float = 1.0
    """Channels that turn less often turn `factor` times slower; between the two it is gradual."""
    truncate: bool = True
    """Whether these bounds are rounded to whole channels; for yarn only, like the next."""
    attention_factor: float = 1.0
    """Factor on queries and keys."""
    unfit_for_sglang: str = field(default="", compare=False)
    """Settings that SGLang reads differently from transformers, and a remedy; empty if none."""
    sections: tuple[int, int, int] | None = None
    """Numbers of channels of a vision model that turn by the position in time, y and x. They
    alternate; channels left at the end turn by time."""

    @classmethod
    def read(
        cls, config: Table, *, head_dim: int | None = None, base: float = DEFAULT_BASE
    ) -> "Rope":
        """Reads config.json, or its part about language.

        Args:
            base: default.
            head_dim: of a model whose positions are in time, y and x.

        Raises:
            ConfigError: rotary positions of another kind, or with an unknown key.
        """
        table = _table(config)
        kind = table.get("rope_type", table.get("type", "default"))
        if not isinstance(kind, str) or kind not in _KEYS:
            key = "rope_type" if "rope_type" in table.record else "type"
            raise table.make_error(key, f"only {', '.join(_KEYS)} is supported")
        for key in table.record:
            if key not in _KEYS[kind] | _OF_ALL | (_OF_SPACE if head_dim else set()):
                raise table.make_error(key, f"rope type {kind!r} has no such key; remove it")
        if table.get("partial_rotary_factor") not in (None, 1):
            raise table.make_error("partial_rotary_factor", "only 1.0 is supported")
        source = table if "rope_theta" in table.record else config
        base = source.number("rope_theta", base)
        if head_dim:
            if kind != "default":
                raise table.make_error(
                    "rope_type", "only default is supported in a model that sees"
                )
            return cls(kind, base, sections=_sections(table, head_dim // 2))
        if kind == "default":
            return cls(kind, base)
        return _scale(config, table, kind, base)

    def __str__(self) -> str:
        scaled = "" if self.kind == "default" else f" and factor {self.factor:g}"
        return f"{self.kind} with base {self.base:g}{scaled}"

    def axes(self, head_dim: int) -> list[int]:
        """Returns the axis of each channel pair: 0 time, 1 y, 2 x."""
        axes = [0] * (head_dim // 2)
        for axis, count in enumerate(self.sections or (0, 0, 0)):
            if axis:
                axes[axis : 3 * count : 3] = [axis] * count
        return axes

    def inverse_frequencies(self, head_dim: int, device: "torch.device") -> "torch.Tensor":
        """Returns [head_dim / 2] float32, radians per position; rounded as transformers rounds
        them."""
        import torch

        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        periods = self.base**exponents
        if self.kind == "default":
            return 1.0 / periods
        if self.kind == "linear":
            return 1.0 / periods / self.factor
        if self.kind == "llama3":
            return self._slow_by_turns(1.0 / periods)
        slowed, kept = 1.0 / (self.factor * periods), 1.0 / periods
        part = 1 - self._ramp(head_dim).to(device)
        return slowed * (1 - part) + kept * part

    def _slow_by_turns(self, frequencies: "torch.Tensor") -> "torch.Tensor":
        """Returns `frequencies` with those slowed that turn little within `original_positions`."""
        import torch

        lengths = 2 * math.pi / frequencies
        is_fast = lengths < self.original_positions / self.beta_fast
        is_slow = lengths > self.original_positions / self.beta_slow
        part = self.original_positions / lengths - self.beta_slow
        part /= self.beta_fast - self.beta_slow
        between = (1 - part) * frequencies / self.factor + part * frequencies
        slowed = torch.where(is_slow, frequencies / self.factor, between)
        return torch.where(is_fast, frequencies, slowed)

    def _ramp(self, head_dim: int) -> "torch.Tensor":
        """Returns [head_dim / 2] the share of slowing of each channel, 0 to 1."""
        import torch

        low, high = (self._channel(head_dim, turns) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001
        channels = torch.arange(head_dim // 2, dtype=torch.float32)
        return ((channels - low) / (high - low)).clamp(0, 1)

    def _channel(self, head_dim: int, turns: float) -> float:
        """Returns the channel that turns that often within `original_positions`."""
        per_turn = self.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(per_turn) / (2 * math.log(self.base))


def _sections(table: Table, channels: int) -> tuple[int, int, int]:
    if table.flag("mrope_interleaved", default=True) is not True:
        raise table.make_error("mrope_interleaved", "only true is supported")
    found = table.get("mrope_section", [24, 20, 20])
    if (
        not isinstance(found, list)
        or [type(each) for each in found] != [int] * 3
        or min(found) < 1
        or sum(found) != channels
        or 3 * max(found[1:]) > channels
    ):
        raise table.make_error(
            "mrope_section",
            f"three positive numbers with a sum of head_dim / 2 = {channels} are expected, the "
            "last two at most a third of it",
        )
    time, y, x = found
    return time, y, x


def find_lost_base(config: Table) -> float | None:
    """Returns the base in `rope_parameters`, if `rope_scaling` overrides it with another."""
    if not config.get("rope_scaling") or not config.get("rope_parameters"):
        return None
    lost: Any = config.table("rope_parameters").get("rope_theta")
    table = _table(config)
    kept = (table if "rope_theta" in table.record else config).number("rope_theta", DEFAULT_BASE)
    return None if lost in (None, kept) else lost


def _table(config: Table) -> Table:
    """Returns `rope_scaling`, if it is set, else `rope_parameters`, like transformers."""
    return config.table("rope_scaling" if config.get("rope_scaling") else "rope_parameters")


def _linear(table: Table, base: float, factor: float) -> Rope:
    whole = type(table.get("factor")) is int
    return Rope(
        "linear", base, factor,
        unfit_for_sglang=f"factor = {factor:g}: SGLang takes numbers with a point only; "
        f"write {factor}" if whole else "",
    )  # fmt: skip


def _scale(config: Table, table: Table, kind: str, base: float) -> Rope:
    factor = table.number("factor")
    if kind == "linear":
        return _linear(table, base, factor)
    if kind == "llama3":
        return _llama3(table, base, factor)
    return _yarn(table, base, factor, config.size("max_position_embeddings"))


def _llama3(table: Table, base: float, factor: float) -> Rope:
    slow, fast = table.number("low_freq_factor"), table.number("high_freq_factor")
    if fast <= slow:
        raise table.make_error(
            "high_freq_factor", f"a number larger than low_freq_factor = {slow:g} is expected"
        )
    original = table.size("original_max_position_embeddings")
    return Rope("llama3", base, factor, original, beta_fast=fast, beta_slow=slow)


def _yarn(table: Table, base: float, factor: float, max_positions: int) -> Rope:
    if base <= 1:
        raise table.make_error("rope_theta", "rope type 'yarn' takes a number larger than 1")
    beta_fast, beta_slow = table.number("beta_fast", 32), table.number("beta_slow", 1)
    scales = [table.number(key) for key in ("mscale", "mscale_all_dim") if key in table.record]
    if len(scales) == 2:
        attention_factor = _length(factor, scales[0]) / _length(factor, scales[1])
    else:
        attention_factor = _length(factor, 1.0)
    return Rope(
        "yarn", base, factor, table.size("original_max_position_embeddings", max_positions),
        beta_fast, beta_slow, table.flag("truncate", default=True),
        table.number("attention_factor", attention_factor),
        f"attention_factor = {table.get('attention_factor')}: SGLang passes over it; leave it out, "
        "or say it by mscale and mscale_all_dim" if "attention_factor" in table.record else "",
    )  # fmt: skip


def _length(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
