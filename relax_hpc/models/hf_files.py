"""The safetensors of a Hugging Face folder: one file, or several with an index."""

import json
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from safetensors import SafetensorError, safe_open

from relax_hpc import user_files
from relax_hpc.errors import ConfigError

if TYPE_CHECKING:
    import torch

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "thinker.model.embed_tokens.weight",
)
"""Names of the embedding: in a model of text, in one that sees, and in one that hears, too."""
OUTPUT = "lm_head.weight"
Shape = tuple[int, ...]
_CHUNK_BYTES = 1 << 24


class HfFiles:
    """Reads tensors, or parts of them. Every file is opened once, when something of it is read."""

    def __init__(self, folder: Path, *, framework: Literal["pt", "np"] = "pt") -> None:
        """Reads the index.

        Args:
            folder: of the model.
            framework: "np" does not import torch, for who does not read tensors.

        Raises:
            ConfigError: no safetensors; an index that is none, or names a file that is not there.
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

    def named(self, prefixes: tuple[str, ...]) -> list[str]:
        """Returns the names that begin so, in their order."""
        return sorted(name for name in self.names if name.startswith(prefixes))

    def dtype(self, but: tuple[str, ...] = ()) -> "torch.dtype":
        """Returns the type of the first tensor.

        Args:
            but: beginnings of names that do not count.
        """
        name = min(set(self.names) - set(self.named(but)))
        return self.read(name, slice(0, 1)).dtype

    def refused(self, message: str) -> ConfigError:
        """Makes the error for a folder with something wrong."""
        return ConfigError(f"model.path = {self._folder}: {message}")

    def check_shape(self, name: str, expected: Shape) -> None:
        """Refuses a tensor of another shape than config.json says.

        Raises:
            ConfigError: naming both.
        """
        found = self.shape(name)
        if found == expected:
            return
        if (name in EMBEDDINGS or name.endswith(OUTPUT)) and found[1:] == expected[1:]:
            raise self.refused(
                f"{name} has {found[0]} rows, but vocab_size in config.json is {expected[0]}; "
                "they must be of the same model"
            )
        raise self.refused(
            f"{name} is {list(found)}, but config.json asks for {list(expected)}; "
            "they must be of the same model"
        )

    def check_tied(self, part: int = 0, num_parts: int = 1) -> None:
        """Refuses an output matrix beside the embedding that it is said to be, and is not.

        transformers would take it, and tie nothing; SGLang would not.

        Args:
            part: which of `num_parts` of the matrices is compared.
            num_parts: of about the same size.

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
        raise self.refused(
            f"tie_word_embeddings = true in config.json, but there is an {OUTPUT} other than "
            f"{embedding}; set it to false to train both, or remove the tensor"
        )

    def _place(self, name: str) -> tuple[tuple[str, Shape, int], int, Path]:
        """(type, shape, bytes) of a tensor, where it begins, and the file."""
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
            raise self.refused(
                f"has no tensor {name}, which config.json asks for; download it again"
            ) from None
        except SafetensorError as error:
            raise self.refused(
                f"{self._files[name]} has no tensor {name}, though {INDEX} says so: {error}; "
                "download it again"
            ) from None

    def _open(self, file: str) -> Any:  # noqa: ANN401
        if file not in self._opened:
            # safetensors takes a file that may not be read for one that is not there.
            if (self._folder / file).exists():
                user_files.opened(self._folder / file, "download it again").close()
            try:
                opened = safe_open(self._folder / file, framework=self._framework)
            except FileNotFoundError:
                raise self.refused(
                    f"{INDEX} names {file}, which is not there; download it again"
                ) from None
            except (SafetensorError, OSError) as error:
                raise self.refused(
                    f"{file} is damaged or not complete: {error}; download it again"
                ) from None
            self._opened[file] = self._stack.enter_context(opened)
        return self._opened[file]

    def _read_index(self) -> dict[str, str]:
        """Tensor -> its file."""
        index = self._folder / INDEX
        if not index.exists():
            if not (self._folder / SINGLE).exists():
                raise self.refused(
                    f"has neither {SINGLE} nor {INDEX}; "
                    "download the weights in the safetensors format"
                )
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        record = user_files.read_object(index, "download it again")
        try:
            files: dict[str, str] = record["weight_map"]
            missing = sorted({f for f in files.values() if not (self._folder / f).exists()})
        except (KeyError, TypeError, AttributeError):
            raise self.refused(f"{INDEX} has no weight_map; download it again") from None
        if (self._folder / SINGLE).exists() and set(files.values()) != {SINGLE}:
            raise self.refused(
                f"has {SINGLE} beside {INDEX}, which names other files: transformers would read "
                "the one, SGLang the others; remove what is not the model"
            )
        if missing:
            raise self.refused(
                f"{INDEX} names {', '.join(missing)}, which {'are' if missing[1:] else 'is'} "
                "not there; download it again"
            )
        return files


def same_bytes(one: Path, one_at: int, other: Path, other_at: int, num_bytes: int) -> bool:
    """Whether so many bytes of two files are the same ones."""
    with one.open("rb", buffering=0) as first, other.open("rb", buffering=0) as second:
        first.seek(one_at)
        second.seek(other_at)
        while num_bytes > 0:
            size = min(num_bytes, _CHUNK_BYTES)
            if first.read(size) != second.read(size):
                return False
            num_bytes -= size
    return True
