"""Reads a model from a GGUF file, the form in which llama.cpp keeps quantised weights.

transformers reads config and tokenizer of it; the weights are dequantised here, a tensor at a time,
since transformers holds all of them in float32.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_hpc.errors import ConfigError
from relax_hpc.runtime.files.scratch import scratch_folder
from relax_hpc.trainer.checkpoints.convert import appear, find_free
from relax_hpc.trainer.models import hf_folder
from relax_hpc.trainer.models.registry import parameters, read_architecture

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Architectures whose tensors differ from the hub's by name, type and, for llama, order alone."""
_HEAD, _EMBEDDING = "output.weight", "token_embd.weight"
_ROWS = 1 << 13
"""Rows that are dequantised at a time."""
_LARGEST = 1e4
"""No weight of a model comes near; scales read from a wrong place do."""
_ALIKE = 0.98
"""Least correlation of two quantised copies of one matrix."""


def convert(file: Path, to: str, out: Path | None) -> Path:
    """Writes a Hugging Face folder with the weights of a file, in bfloat16, and returns it.

    Raises:
        ConfigError: the file is not whole, or not of a model that is read; `out` exists.
    """
    if to != "hf":
        raise ConfigError(f"--to {to}: a GGUF file is converted to hf")
    out = find_free(out, f"{file}: say with --out where the folder is to be")
    model = GgufFile(file)
    with scratch_folder("gguf") as head, appear(out) as draft:
        model.write_head(head)
        hf_folder.write(draft, model.stream(head), head)
    return out


class GgufFile:
    """A model in a file."""

    def __init__(self, path: Path) -> None:
        """Reads the head of the file.

        Raises:
            ConfigError: it is no whole GGUF file, or of a model that is not read here.
        """
        try:
            import gguf
        except ImportError as error:
            raise ConfigError(
                f"{path}: gguf is not installed (pip install 'relax-hpc[gguf]')"
            ) from error
        self._gguf, self.path = gguf, path
        try:
            self._reader = gguf.GGUFReader(path)
            self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise ConfigError(
                f"{path}: is no GGUF file, or not all of one: {error}; compare its size and "
                "checksum with its source's; parts are joined in their order"
            ) from error
        architecture = self.field("general.architecture")
        if architecture not in ARCHITECTURES:
            raise ConfigError(
                f"{path}: general.architecture = {architecture!r}: only {', '.join(ARCHITECTURES)} "
                "are converted; take the folder on the hub"
            )
        if self.field("tokenizer.ggml.tokens") is None:
            raise ConfigError(
                f"{path}: has no tokenizer.ggml.tokens: without a tokenizer it is no model to train"
            )
        self.architecture = str(architecture)

    def field(self, name: str) -> Any:  # noqa: ANN401
        """Returns a value of the file's head; None if it says nothing."""
        field = self._reader.get_field(name)
        return field.contents() if field else None

    @property
    def is_tied(self) -> bool:
        """Whether the output layer is the embedding: missing, or another rounding of it."""
        if _HEAD not in self._tensors:
            return True
        one, other = (self._rows(name, 0, 64) for name in (_HEAD, _EMBEDDING))
        return bool(np.corrcoef(one.ravel(), other.ravel())[0, 1] > _ALIKE)

    def write_head(self, folder: Path) -> None:
        """Writes config.json, generation_config.json and the tokenizer into a folder."""
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        folder_of_file, name = self.path.parent, self.path.name
        config = AutoConfig.from_pretrained(
            folder_of_file, gguf_file=name, local_files_only=True, trust_remote_code=False
        )
        config.tie_word_embeddings = self.is_tied
        config.architectures = [ARCHITECTURES[self.architecture]]
        config.dtype = torch.bfloat16
        config.save_pretrained(folder)
        tokens = {
            f"{name}_token_id": self.field(f"tokenizer.ggml.{here}_token_id")
            for name, here in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        }
        GenerationConfig(**tokens).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(
            folder_of_file, gguf_file=name, local_files_only=True, trust_remote_code=False
        )
        tokenizer.save_pretrained(folder)

    def stream(self, folder: Path) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights that config.json in `folder` asks for, in bfloat16.

        Raises:
            ConfigError: one is missing, of another shape, or has values that no model has.
        """
        shape = read_architecture(folder)
        names = self._gguf.get_tensor_name_map(
            self._gguf.MODEL_ARCH[self.architecture.upper()], shape.num_layers
        )
        for parameter in parameters(shape):
            for name in parameter.names():
                stem, _, kind = name.rpartition(".")
                found = f"{names.get_name(stem)}.{kind}"
                if found == _EMBEDDING and shape.tied_embeddings:
                    found = self._finer_of_two()
                if found not in self._tensors:
                    raise ConfigError(f"{self.path}: has no {found}, which is {name}")
                yield name, self._read(found)

    def _finer_of_two(self) -> str:
        if _HEAD not in self._tensors:
            return _EMBEDDING
        return max(_EMBEDDING, _HEAD, key=lambda name: int(self._tensors[name].n_bytes))

    def _read(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        num_rows = tensor.data.shape[0]
        parts = [
            torch.from_numpy(self._rows(name, first, _ROWS)).to(torch.bfloat16)
            for first in range(0, num_rows, _ROWS)
        ]
        whole = torch.cat(parts)
        largest = whole.abs().max()
        if not largest < _LARGEST:
            raise ConfigError(
                f"{self.path}: {name} has values up to {float(largest):g}: the file is damaged, or "
                "its parts were joined in a wrong order"
            )
        if self.architecture == "llama" and name.split(".")[-2] in ("attn_q", "attn_k"):
            whole = self._reorder(whole, name)
        return whole

    def _rows(self, name: str, first: int, count: int) -> np.ndarray:
        tensor = self._tensors[name]
        part = np.array(tensor.data[first : first + count])
        if tensor.tensor_type == self._gguf.GGMLQuantizationType.F32:
            return part
        return self._gguf.dequantize(part, tensor.tensor_type)

    def _reorder(self, whole: Tensor, name: str) -> Tensor:
        """Undoes llama.cpp's order of rows, in which the two halves of a head take turns."""
        key = "head_count" if ".attn_q." in name else "head_count_kv"
        heads = int(self.field(f"llama.attention.{key}"))
        pairs = whole.view(heads, len(whole) // heads // 2, 2, *whole.shape[1:])
        return pairs.transpose(1, 2).reshape(whole.shape)
