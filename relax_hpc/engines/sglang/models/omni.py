"""Runs inside SGLang: its Qwen3-Omni, which hears each sound by itself and makes patches of pixels.

SGLang joins the sounds of all requests that begin together, which have to be of one length for
that; and it fills a part of a chunk up to the longest, which its tower hears. So what a sound is
heard as would depend on the others.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.models import qwen3_omni_moe as theirs
from torch import Tensor

from relax_hpc.engines.sglang.pixels import seen_by


class Qwen3OmniMoeForConditionalGeneration(
    theirs.Qwen3OmniMoeForConditionalGeneration  # type: ignore[misc]  # SGLang has no types
):
    """SGLang's, under its name, which config.json has."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:  # noqa: ANN401
        super().__init__(config, quant_config and _of_language(quant_config), prefix)
        alone = self.thinker.get_audio_feature

        def get_audio_feature(items: Sequence[Any]) -> Tensor:
            return torch.cat([alone([item]).flatten(0, -2) for item in items])

        self.thinker.get_audio_feature = get_audio_feature
        seen = seen_by(self.thinker.get_image_feature, self.thinker.visual)
        self.thinker.get_image_feature = seen


def _of_language(quantization: Any) -> Any:  # noqa: ANN401
    """Returns a quantisation that leaves towers as they are; SGLang names no layer of theirs."""
    made = copy.copy(quantization)

    def get_quant_method(layer: Any, prefix: str) -> Any:  # noqa: ANN401
        if "model" in prefix.split("."):
            return quantization.get_quant_method(layer, prefix)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    made.get_quant_method = get_quant_method
    return made


EntryClass = Qwen3OmniMoeForConditionalGeneration
