"""Mistral: Llama, where layers may have a sliding window."""

from dataclasses import replace

from relax_hpc.models import llama, qwen3
from relax_hpc.models.architecture import Architecture
from relax_hpc.models.config_json import ConfigJson
from relax_hpc.models.family import Family

_WINDOW = 4096
"""Tokens that a token sees, where config.json says nothing; null is all of them."""


def read(config: ConfigJson) -> Architecture:
    """Reads the file; texts may be as long as the window, within which every token sees all."""
    shape = llama.read(config)
    if "sliding_window" in config.record and config.get("sliding_window") is None:
        return shape
    window = config.size("sliding_window", _WINDOW)
    if window >= shape.max_positions:
        return shape
    return replace(shape, max_positions=window, is_window=True)


FAMILY = Family("mistral", read, llama.transformer, qwen3.defaults, llama.parameters)
