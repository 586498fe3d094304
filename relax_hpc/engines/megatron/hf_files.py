"""The safetensors of a Hugging Face folder: one file, or several with an index."""

import json
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from safetensors import SafetensorError, safe_open

from relax_hpc.engines.megatron.architecture import Architecture
from relax_hpc.engines.megatron.architectures.names import Parameter, Shape
from relax_hpc.errors import ConfigError

if TYPE_CHECKING:
    import torch

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


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
        """Those ranges of the first dimensions; no other bytes are read."""
        part: torch.Tensor = self._slice(name)[ranges]
        return part

    def dtype(self) -> "torch.dtype":
        """Of the first tensor."""
        name = min(self.names)
        return self.read(name, slice(0, 1)).dtype

    def refused(self, message: str) -> ConfigError:
        """What is wrong with the folder."""
        return ConfigError(f"model.path = {self._folder}: {message}")

    def check_shape(self, name: str, expected: Shape) -> None:
        """Refuses a tensor of another shape than config.json says.

        Raises:
            ConfigError: naming both.
        """
        found = self.shape(name)
        if found == expected:
            return
        if name in ("model.embed_tokens.weight", "lm_head.weight") and found[1:] == expected[1:]:
            raise self.refused(
                f"{name} has {found[0]} rows, but vocab_size in config.json is {expected[0]}; "
                "they must be of the same model"
            )
        raise self.refused(
            f"{name} is {list(found)}, but config.json asks for {list(expected)}; "
            "they must be of the same model"
        )

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
        try:
            files: dict[str, str] = json.loads(index.read_text())["weight_map"]
            missing = sorted({f for f in files.values() if not (self._folder / f).exists()})
        except (ValueError, KeyError, TypeError, AttributeError):
            raise self.refused(f"{INDEX} has no weight_map; download it again") from None
        if missing:
            raise self.refused(
                f"{INDEX} names {', '.join(missing)}, which {'are' if missing[1:] else 'is'} "
                "not there; download it again"
            )
        return files


def check_names(files: HfFiles, shape: Architecture, parameters: Iterable[Parameter]) -> None:
    """The folder has the tensors of the architecture, and no others.

    Raises:
        ConfigError: naming the first that is missing, or too many.
    """
    left = set(files.names)
    for parameter in parameters:
        names = [parameter.fused] if parameter.fused in left else list(parameter.names())
        missing = [name for name in names if name not in left]
        if missing:
            raise files.refused(
                f"has no tensor {missing[0]}, which model_type {shape.model_type!r} in config.json "
                "asks for; they must be of the same model"
            )
        left.difference_update(names)
    if shape.tied_embeddings:
        left.discard("lm_head.weight")  # some folders repeat it
    if left:
        raise files.refused(
            f"has {len(left)} tensors that model_type {shape.model_type!r} in config.json does not "
            f"have, the first is {min(left)}; they must be of the same model"
        )


def check_shapes(files: HfFiles, parameters: Iterable[Parameter]) -> None:
    """All tensors are there, in files that are whole, and have the shapes that config.json says.

    Reads the head of every file, and no weights.

    Raises:
        ConfigError: naming the first that is not so.
    """
    for parameter in parameters:
        if parameter.fused in files.names:
            files.check_shape(parameter.fused, parameter.fused_shape)
            continue
        shapes = list(parameter.hf.values()) * (parameter.num_experts or 1)
        for name, expected in zip(parameter.names(), shapes, strict=True):
            files.check_shape(name, expected)
