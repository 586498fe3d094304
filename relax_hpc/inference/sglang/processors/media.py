"""Runs inside SGLang: passes on expanded token ids and canonical pixels unchanged.

One text of the request names the arrays of its media, and the tokens that stand for their features.
Nothing is resized, decoded or tokenized here, so the engine sees exactly the trainer's input, and a
placeholder that the policy sampled is an ordinary token. Arrays are built once for all requests
that need them, and cached up to a number of bytes.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalProcessorOutput,
)
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor
from torch import Tensor

from relax_hpc.data.media import spool
from relax_hpc.data.media.canonical import digest_of
from relax_hpc.data.media.expand import next_position, positions
from relax_hpc.data.media.extent import Extent
from relax_hpc.data.media.patches import patches
from relax_hpc.data.media.recipe import read_view
from relax_hpc.data.media.spool import Spooled
from relax_hpc.inference.sglang.pixels import collect_facts
from relax_hpc.inference.sglang.recent_tensors import RecentTensors

_MODALITIES = {"image": Modality.IMAGE, "video": Modality.VIDEO, "audio": Modality.AUDIO}
_KEPT_BYTES = 1 << 29
"""Size of the cache of features, for siblings of a request."""


class CanonicalMedia(QwenVLImageProcessor):  # type: ignore[misc]  # SGLang has no types
    """SGLang's processor for Qwen models, extended to canonical media."""

    models = QwenVLImageProcessor.models

    def __init__(self, hf_config: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(hf_config, server_args, *args, **kwargs)
        recipe = read_view(Path(server_args.model_path))
        assert recipe is not None, "SGLang takes this processor for models with media only"
        self._recipe, self._dtype = recipe, getattr(torch, server_args.dtype)
        self._kept = RecentTensors(_KEPT_BYTES)

    async def process_mm_data_async(
        self,
        image_data: Sequence[Any],
        input_text: Any,  # noqa: ANN401
        request_obj: Any,  # noqa: ANN401
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Makes SGLang's input of a request; passes other requests to SGLang's own method.

        Raises:
            ValueError: a file is missing, or holds the wrong array.
        """
        text = image_data[0] if image_data else None
        if not isinstance(text, str) or not text.startswith(spool.BEGIN):
            return await super().process_mm_data_async(
                image_data, input_text, request_obj, *args, **kwargs
            )
        sent, token_ids = spool.view_of(text), list(request_obj.input_ids)
        contents = sent.contents or (b"",) * len(sent.view.media)
        features = [
            await self._features(each, content)
            for each, content in zip(sent.view.media, contents, strict=True)
        ]
        items = []
        for number, (medium, feature) in enumerate(zip(sent.view.media, features, strict=True)):
            item = MultimodalDataItem(
                modality=_MODALITIES[medium.extent.modality],
                feature=feature,
                model_specific_data=self._facts(medium.extent, feature),
            )
            own = [span for span in sent.view.spans if span.medium == number]
            item.offsets = [(span.first, span.first + span.tokens - 1) for span in own]
            item.set_hash(medium.features_key(sent.policy_version))
            items.append(item)
        if hasattr(self, "_prepare_mm_items_for_transport"):
            items = self._prepare_mm_items_for_transport(items)
        extents = [each.extent for each in sent.view.media]
        found = positions(len(token_ids), sent.view.spans, extents, self._recipe)
        return MultimodalProcessorOutput(
            input_ids=token_ids,
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(token_ids, items),
            mm_items=items,
            im_start_id=self.vision_start_token_id,
            im_end_id=self.vision_end_token_id,
            im_token_id=self.mm_tokens.image_token_id,
            video_token_id=self.mm_tokens.video_token_id,
            audio_token_id=self.mm_tokens.audio_token_id,
            mrope_positions=torch.from_numpy(found),
            mrope_position_delta=torch.tensor([[next_position(found) - len(token_ids)]]),
        )

    async def _features(self, medium: Spooled, content: bytes) -> Tensor:
        """Returns the input of an encoder, or the pixels of an image, once for requests that come
        close together."""
        return await self._kept.of(medium.digest, partial(self._make, medium, content))

    def _make(self, medium: Spooled, content: bytes) -> Tensor:
        try:
            array = spool.array_in(content or medium.path.read_bytes())
        except FileNotFoundError:
            raise ValueError(f"{spool.MISSING}: {medium.path} is not on this node") from None
        if digest_of(array) != medium.digest:
            raise ValueError(
                f"{medium.path}: holds an array of digest {digest_of(array).hex()}, not "
                f"{medium.digest.hex()}; see whether the node's memory is sound"
            )
        if medium.extent.modality == "audio":
            return torch.from_numpy(array)[None]
        pixels = torch.from_numpy(array)
        if medium.extent.modality == "image":
            return pixels
        # SGLang cuts the rows of a video itself, which is written in several stretches.
        return patches(pixels, self._recipe.video.vision, self._dtype)

    def _facts(self, extent: Extent, feature: Tensor) -> dict[str, Any]:
        if extent.modality == "audio":
            mask = torch.ones(1, feature.shape[-1], dtype=torch.long)
            return {"feature_attention_mask": mask}
        facts = {f"{extent.modality}_grid_thw": torch.tensor([extent.grid])}
        return facts | (collect_facts(self._recipe.image) if extent.modality == "image" else {})
