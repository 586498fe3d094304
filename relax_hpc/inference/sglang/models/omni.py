"""Runs inside SGLang: its Qwen3-Omni, but each sound is encoded alone and pixels become patches.

SGLang batches the sounds of all requests that begin together, which therefore need one length. It
pads parts of a chunk to the longest, and its encoder attends to the padding. So a sound's features
would depend on the other sounds.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.models import qwen3_omni_moe as theirs
from torch import Tensor

from relax_hpc.inference.sglang.pixels import make_method


class Qwen3OmniMoeForConditionalGeneration(
    theirs.Qwen3OmniMoeForConditionalGeneration  # type: ignore[misc]  # SGLang has no types
):
    """Named like SGLang's class, which config.json names."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:  # noqa: ANN401
        super().__init__(config, quant_config and _of_language(quant_config), prefix)
        alone = self.thinker.get_audio_feature

        def get_audio_feature(items: Sequence[Any]) -> Tensor:
            return torch.cat([alone([item]).flatten(0, -2) for item in items])

        self.thinker.get_audio_feature = get_audio_feature
        seen = make_method(self.thinker.get_image_feature, self.thinker.visual)
        self.thinker.get_image_feature = seen


def _of_language(quantization: Any) -> Any:  # noqa: ANN401
    """Returns a quantisation that skips encoders; SGLang's has no list of their layers."""
    made = copy.copy(quantization)

    def get_quant_method(layer: Any, prefix: str) -> Any:  # noqa: ANN401
        if "model" in prefix.split("."):
            return quantization.get_quant_method(layer, prefix)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    made.get_quant_method = get_quant_method
    return made


EntryClass = Qwen3OmniMoeForConditionalGeneration
