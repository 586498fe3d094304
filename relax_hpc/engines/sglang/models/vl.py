"""Runs inside SGLang: its Qwen3-VL, which makes patches of pixels."""

from collections.abc import Sequence
from typing import Any

from sglang.srt.models import qwen3_vl as theirs
from torch import Tensor

from relax_hpc.engines.sglang.pixels import seen_by


class Qwen3VLForConditionalGeneration(
    theirs.Qwen3VLForConditionalGeneration  # type: ignore[misc]  # SGLang has no types
):
    """SGLang's, under its name, which config.json has."""

    def get_image_feature(self, items: Sequence[Any]) -> Tensor:
        return seen_by(super().get_image_feature, self.visual)(items)


EntryClass = Qwen3VLForConditionalGeneration
