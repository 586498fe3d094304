"""The trainer's weights as a Hugging Face folder."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from relax_hpc.models import hf_folder


def save_hf(
    folder: Path,
    tensors: Iterator[tuple[str, Tensor]],
    source: Path,
    *,
    write: bool,
    shard_bytes: int = hf_folder.SHARD_BYTES,
) -> None:
    """Writes the stream as a folder that loads like `source`. Every rank iterates to the end.

    Nothing waits for the rank that writes: the folder is there when that one returns.

    Args:
        folder: appears whole, by a rename; one of that name is replaced.
        tensors: of `hf_stream.named_weights`.
        source: lends config.json, the tokenizer and what else is small.
        write: on one rank.
        shard_bytes: of the tensors in a file; the writing rank holds one in host memory.
    """
    if write:
        hf_folder.write(folder, tensors, source, shard_bytes=shard_bytes)
        return
    for _ in tensors:
        pass
