"""Reads the pickled files of a checkpoint, and runs nothing that somebody may have put there.

torch's format pickles `.metadata` and torch.save pickles what is around a tensor, and a checkpoint
may be somebody else's folder. So only the classes that such files consist of are made; nothing else
is imported or called.
"""

import io
import pickle
import re
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as kinds
from torch.distributed.checkpoint.metadata import Metadata

from relax_hpc.errors import CheckpointError
from relax_hpc.records import read_bytes

NAME = ".metadata"

_MEMORY_FORMATS = "_MEM_FORMAT_ENCODING"
_CLASSES = {
    **dict.fromkeys(
        (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
            "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", _MEMORY_FORMATS,
        ),
        "torch.distributed.checkpoint.metadata",
    ),
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "_get_layout": "torch.serialization",
    "Size": "torch",
}  # fmt: skip
"""Classes in `.metadata`: name -> module. Types of elements (`torch.float32`) come on top."""


def metadata(folder: Path) -> Metadata:
    """Reads which tensors and objects a checkpoint has, and where.

    Raises:
        CheckpointError: it is damaged, or holds what such a file does not consist of.
    """
    path = folder / NAME
    try:
        found = _Unpickler(io.BytesIO(read_bytes(path))).load()
    except _RefusedError as error:
        raise _refused(path, str(error)) from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except Exception as error:  # damaged pickles raise whatever they like
        raise CheckpointError(f"{path}: is damaged: {error}") from error
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path}: is damaged: holds a {type(found).__name__}")
    return found


def saved(content: bytes, path: Path) -> Any:  # noqa: ANN401
    """Tensors and plain values, as torch.save wrote them.

    Args:
        content: what was written.
        path: the file that it is from, for messages.

    Raises:
        CheckpointError: it is damaged, or holds something else.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if (other := re.search(r"GLOBAL (\S+)", str(error))) is None:
            raise CheckpointError(f"{path}: is damaged: {str(error).splitlines()[0]}") from error
        raise _refused(path, other[1]) from None


def _refused(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: holds {name}, which no checkpoint consists of; it was not run, but trust nothing "
        "else of this folder"
    )


class _RefusedError(Exception):
    """A pickle names something that is not known."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        if _CLASSES.get(name) == module:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if (module, name) == ("builtins", "getattr"):
            return _memory_format  # how some releases of Python pickle the member of an enum
        raise _RefusedError(f"{module}.{name}")


def _memory_format(enum: object, name: str) -> Enum:
    known: type[Enum] = getattr(kinds, _MEMORY_FORMATS)
    if enum is not known:
        raise _RefusedError("builtins.getattr")
    return known[name]
