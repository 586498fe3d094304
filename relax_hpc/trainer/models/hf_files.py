"""Reads the safetensors of a Hugging Face folder, and checks them against config.json."""

import json
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from safetensors import SafetensorError, safe_open

from relax_hpc.errors import ConfigError
from relax_hpc.runtime.files import user_files
from relax_hpc.trainer.models.architecture import Architecture
from relax_hpc.trainer.models.names import Parameter
from relax_hpc.trainer.models.registry import FAMILIES

if TYPE_CHECKING:
    import torch

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "thinker.model.embed_tokens.weight",
)
"""Names of the embedding: in a text, a vision and an omni model."""
OUTPUT = "lm_head.weight"
Shape = tuple[int, ...]
_CHUNK_BYTES = 1 << 24


class HfFiles:
    """Reads tensors, or parts of them. Every file is opened once, on first use."""

    def __init__(self, folder: Path, *, framework: Literal["pt", "np"] = "pt") -> None:
        """Reads the index.

        Args:
            framework: "np" avoids importing torch, if no tensors are read.

        Raises:
            ConfigError: no safetensors; an invalid index, or one that names a missing file.
        """
        self._folder, self._framework = folder, framework
        self._opened: dict[str, Any] = {}
        self._stack = ExitStack()
        self._files = self._read_index()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def shape(self, name: str) -> Shape:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, *ranges: slice) -> "torch.Tensor":
        """Reads ranges of the first dimensions, and no other bytes."""
        part: torch.Tensor = self._slice(name)[ranges]
        return part

    def list_named(self, prefixes: tuple[str, ...]) -> list[str]:
        return sorted(name for name in self.names if name.startswith(prefixes))

    def dtype(self, but: tuple[str, ...] = ()) -> "torch.dtype":
        name = min(set(self.names) - set(self.list_named(but)))
        return self.read(name, slice(0, 1)).dtype

    def make_error(self, message: str) -> ConfigError:
        return ConfigError(f"model.path = {self._folder}: {message}")

    def check_shape(self, name: str, expected: Shape) -> None:
        """Checks a tensor's shape against config.json.

        Raises:
            ConfigError: naming both.
        """
        found = self.shape(name)
        if found == expected:
            return
        if (name in EMBEDDINGS or name.endswith(OUTPUT)) and found[1:] == expected[1:]:
            raise self.make_error(
                f"{name} has {found[0]} rows, but vocab_size in config.json is {expected[0]}; "
                "they must be of the same model"
            )
        raise self.make_error(
            f"{name} is {list(found)}, but config.json asks for {list(expected)}; "
            "they must be of the same model"
        )

    def check_tied(self, part: int = 0, num_parts: int = 1) -> None:
        """Checks that an output matrix declared as tied equals the embedding.

        transformers would accept a difference and not tie them; SGLang would tie them.

        Args:
            part: which of `num_parts` of the matrices is compared.

        Raises:
            ConfigError: they differ.
        """
        if OUTPUT not in self.names:
            return
        embedding = next(name for name in EMBEDDINGS if name in self.names)
        (kind, first, one), (other_kind, other_first, other) = map(self._place, (embedding, OUTPUT))
        size = kind[2]
        start, stop = size * part // num_parts, size * (part + 1) // num_parts
        if kind == other_kind and same_bytes(
            one, first + start, other, other_first + start, stop - start
        ):
            return
        raise self.make_error(
            f"tie_word_embeddings = true in config.json, but there is an {OUTPUT} other than "
            f"{embedding}; set it to false to train both, or remove the tensor"
        )

    def _place(self, name: str) -> tuple[tuple[str, Shape, int], int, Path]:
        """Returns (dtype, shape, bytes) of a tensor, its offset, and the file."""
        self._slice(name)  # refuses what is damaged
        path = self._folder / self._files[name]
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            head = json.loads(file.read(length))[name]
        start, stop = head["data_offsets"]
        return (head["dtype"], tuple(head["shape"]), stop - start), 8 + length + start, path

    def _slice(self, name: str) -> Any:  # noqa: ANN401
        try:
            return self._open(self._files[name]).get_slice(name)
        except KeyError:
            raise self.make_error(
                f"has no tensor {name}, which config.json asks for; download it again"
            ) from None
        except SafetensorError as error:
            raise self.make_error(
                f"{self._files[name]} has no tensor {name}, though {INDEX} says so: {error}; "
                "download it again"
            ) from None

    def _open(self, file: str) -> Any:  # noqa: ANN401
        if file not in self._opened:
            # safetensors takes a file that may not be read for one that is not there.
            if (self._folder / file).exists():
                user_files.open_file(self._folder / file, "download it again").close()
            try:
                opened = safe_open(self._folder / file, framework=self._framework)
            except FileNotFoundError:
                raise self.make_error(
                    f"{INDEX} names {file}, which is not there; download it again"
                ) from None
            except (SafetensorError, OSError) as error:
                raise self.make_error(
                    f"{file} is damaged or not complete: {error}; download it again"
                ) from None
            self._opened[file] = self._stack.enter_context(opened)
        return self._opened[file]

    def _read_index(self) -> dict[str, str]:
        index = self._folder / INDEX
        if not index.exists():
            if not (self._folder / SINGLE).exists():
                raise self.make_error(
                    f"has neither {SINGLE} nor {INDEX}; "
                    "download the weights in the safetensors format"
                )
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        record = user_files.read_object(index, "download it again")
        try:
            files: dict[str, str] = record["weight_map"]
            missing = sorted({f for f in files.values() if not (self._folder / f).exists()})
        except (KeyError, TypeError, AttributeError):
            raise self.make_error(f"{INDEX} has no weight_map; download it again") from None
        if (self._folder / SINGLE).exists() and set(files.values()) != {SINGLE}:
            raise self.make_error(
                f"has {SINGLE} beside {INDEX}, which names other files: transformers would read "
                "the one, SGLang the others; remove what is not the model"
            )
        if missing:
            raise self.make_error(
                f"{INDEX} names {', '.join(missing)}, which {'are' if missing[1:] else 'is'} "
                "not there; download it again"
            )
        return files


def same_bytes(one: Path, one_at: int, other: Path, other_at: int, num_bytes: int) -> bool:
    """Whether ranges of two files have the same bytes."""
    with one.open("rb", buffering=0) as first, other.open("rb", buffering=0) as second:
        first.seek(one_at)
        second.seek(other_at)
        while num_bytes > 0:
            size = min(num_bytes, _CHUNK_BYTES)
            if first.read(size) != second.read(size):
                return False
            num_bytes -= size
    return True


def check_names(
    files: HfFiles,
    shape: Architecture,
    parameters: Iterable[Parameter],
    *,
    part: int = 0,
    num_parts: int = 1,
) -> None:
    """Checks that the folder has exactly the tensors of the architecture.

    Args:
        part: which of `num_parts` of a repeated embedding is compared.

    Raises:
        ConfigError: naming the first that is missing, unexpected, or wrong.
    """
    left = set(files.names) - set(files.list_named(FAMILIES[shape.model_type].kept))
    for parameter in parameters:
        names = [parameter.fused] if parameter.fused in left else list(parameter.names())
        missing = [name for name in names if name not in left]
        if missing:
            raise files.make_error(
                f"has no tensor {missing[0]}, which model_type {shape.model_type!r} in config.json "
                "asks for; they must be of the same model"
            )
        left.difference_update(names)
    if shape.tied_embeddings:
        left.discard(OUTPUT)  # some folders repeat it
    if left:
        raise files.make_error(
            f"has {len(left)} tensors that model_type {shape.model_type!r} in config.json does not "
            f"have, the first is {min(left)}; they must be of the same model"
        )
    if shape.tied_embeddings:
        files.check_tied(part, num_parts)


def check_shapes(files: HfFiles, parameters: Iterable[Parameter]) -> None:
    """Checks that all tensors are there, in complete files, with the shapes of config.json.

    Reads the head of every file, and no weights.

    Raises:
        ConfigError: naming the first mismatch.
    """
    for parameter in parameters:
        if parameter.fused in files.names:
            files.check_shape(parameter.fused, parameter.fused_shape)
            continue
        shapes = list(parameter.hf.values()) * (parameter.num_experts or 1)
        for name, expected in zip(parameter.names(), shapes, strict=True):
            files.check_shape(name, expected)
