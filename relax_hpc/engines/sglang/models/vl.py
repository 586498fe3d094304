"""Runs inside SGLang: its Qwen3-VL, dense and of experts, which makes patches of pixels."""

from collections.abc import Sequence
from typing import Any

from sglang.srt.models import qwen3_vl, qwen3_vl_moe
from torch import Tensor

from relax_hpc.engines.sglang.pixels import seen_by


class _Seeing:
    visual: Any

    def get_image_feature(self, items: Sequence[Any]) -> Tensor:
        return seen_by(super().get_image_feature, self.visual)(items)  # type: ignore[misc]


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
