"""Runs inside SGLang: its Qwen3-VL, dense and MoE, but pixels become patches."""

from collections.abc import Sequence
from typing import Any

from sglang.srt.models import qwen3_vl, qwen3_vl_moe
from torch import Tensor

from relax_hpc.inference.sglang.pixels import make_method


class _Seeing:
    visual: Any

    def get_image_feature(self, items: Sequence[Any]) -> Tensor:
        return make_method(super().get_image_feature, self.visual)(items)  # type: ignore[misc]


# Under SGLang's names, which config.json has.
class Qwen3VLForConditionalGeneration(
    _Seeing,
    qwen3_vl.Qwen3VLForConditionalGeneration,  # type: ignore[misc]  # SGLang has no types
):
    pass


class Qwen3VLMoeForConditionalGeneration(
    _Seeing,
    qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration,  # type: ignore[misc]
):
    pass


EntryClass = [Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration]
