"""Runs inside SGLang: a line of its log for every image and video that a tower encodes."""

from relax_hpc.inference.sglang.models import vl


class Qwen3VLMoeForConditionalGeneration(vl.Qwen3VLMoeForConditionalGeneration):
    def get_image_feature(self, items):
        return super().get_image_feature(_told(items))

    def get_video_feature(self, items):
        return super().get_video_feature(_told(items))


def _told(items):
    for item in items:
        print(f"a tower encodes {item.hash}", flush=True)
    return items


EntryClass = Qwen3VLMoeForConditionalGeneration
