"""Runs inside SGLang: its Qwen3-VL of experts, which makes patches of pixels."""

from collections.abc import Sequence
from typing import Any

from sglang.srt.models import qwen3_vl_moe as theirs
from torch import Tensor

from relax_hpc.engines.sglang.pixels import seen_by


class Qwen3VLMoeForConditionalGeneration(
    theirs.Qwen3VLMoeForConditionalGeneration  # type: ignore[misc]  # SGLang has no types
):
    """SGLang's, under its name, which config.json has."""

    def get_image_feature(self, items: Sequence[Any]) -> Tensor:
        return seen_by(super().get_image_feature, self.visual)(items)


EntryClass = Qwen3VLMoeForConditionalGeneration
