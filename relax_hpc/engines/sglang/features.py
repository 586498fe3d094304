"""Runs inside SGLang: the features of media that it keeps, which other weights would make anew."""

import sys

_MODULES = ("sglang.srt.managers.mm_schedule", "sglang.srt.managers.mm_utils")
"""Modules that hold the cache: from 0.5.23, and 0.5.17."""


def forget() -> None:
    """Throws away what a tower made of media before its weights changed.

    Their keys name a policy version, so this is for requests that were sent before an update and
    begin after it.
    """
    for name in _MODULES:
        cache = getattr(sys.modules.get(name), "embedding_cache", None)
        if cache is not None:
            cache.clear()
