"""Runs inside SGLang: its Qwen3-Omni, which hears each sound by itself and makes patches of pixels.

SGLang joins the sounds of all requests that begin together, which have to be of one length for
that; and it fills a part of a chunk up to the longest, which its tower hears. So what a sound is
heard as would depend on the others.
"""

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.models import qwen3_omni_moe as theirs
from torch import Tensor

from relax_hpc.engines.sglang.pixels import seen_by


class Qwen3OmniMoeForConditionalGeneration(
    theirs.Qwen3OmniMoeForConditionalGeneration  # type: ignore[misc]  # SGLang has no types
):
    """SGLang's, under its name, which config.json has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **kwargs)
        alone = self.thinker.get_audio_feature

        def get_audio_feature(items: Sequence[Any]) -> Tensor:
            return torch.cat([alone([item]).flatten(0, -2) for item in items])

        self.thinker.get_audio_feature = get_audio_feature
        seen = seen_by(self.thinker.get_image_feature, self.thinker.visual)
        self.thinker.get_image_feature = seen


EntryClass = Qwen3OmniMoeForConditionalGeneration
