"""A Hugging Face folder with new weights: it appears whole, or not at all."""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from relax_hpc.comm.bucket import NamedTensors, buckets
from relax_hpc.models.hub_layout import as_in_hub, kept
from relax_hpc.records import read_bytes, read_json, sync, write_json
from relax_hpc.storage import delete_folder, exists, move, names, patiently

SHARD_BYTES = 5 << 30
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth",
            ".gguf", ".h5", ".msgpack", ".onnx")  # fmt: skip
_INDEX = "model.safetensors.index.json"
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def write(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    source: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    durable: bool = True,
) -> None:
    """Writes `tensors` as a folder that loads like `source`, which lends all but its weights.

    Tensors of `source` that are of no part that learns are copied.

    One of that name is replaced. The tensors of one file are in memory at a time. Where there is no
    room, a run waits for some, as with all that it writes.

    Args:
        folder: appears by a rename, when it is complete.
        tensors: read to the end.
        source: a Hugging Face folder: of it come config.json, tokenizer and what else is small.
        shard_bytes: of the tensors in a file; a larger one is alone.
        durable: everything is on disk before the rename; else a crash of the machine may tear it.
    """
    draft, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("tmp", "old"))
    for left_over in (draft, old):
        delete_folder(left_over)
    patiently(draft, partial(draft.mkdir, parents=True, exist_ok=True))
    patiently(draft, lambda: copy_all_but_weights(source, draft))
    dtypes = set[torch.dtype]()
    learned = _noting(as_in_hub(tensors, source), dtypes)
    _write_weights(draft, buckets(chain(learned, kept(source)), shard_bytes))
    set_dtype(draft, dtypes)
    if durable:
        for name in (*names(draft), "."):
            patiently(draft, partial(sync, draft / name))
    if exists(folder):
        move(folder, old)
    move(draft, folder)
    if durable:
        patiently(folder, partial(sync, folder.parent))
    delete_folder(old)


def copy_all_but_weights(source: Path, folder: Path) -> None:
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copy(path, folder / path.name)  # it would take a folder that fails for a file


def write_index(folder: Path, files: Mapping[str, Iterable[str]], num_bytes: int) -> None:
    """Says which file each tensor is in.

    Args:
        files: names of the tensors in each.
        num_bytes: of all tensors.
    """
    weight_map = {name: file for file, names in files.items() for name in names}
    write_json(folder / _INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})


def set_dtype(folder: Path, dtypes: Collection[torch.dtype]) -> None:
    """Makes config.json name the type of the tensors, since loaders go by it."""
    config = folder / "config.json"
    record = read_json(config) if len(dtypes) == 1 else None
    if record is None:
        return
    (dtype,) = dtypes
    said = {key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype")}
    write_json(config, record | {key: said[key] for key in said if key in record})


def set_quantization(folder: Path, quantization: Mapping[str, object]) -> None:
    """Says in config.json how the weights are quantised."""
    config = folder / "config.json"
    record = json.loads(read_bytes(config))
    write_json(config, record | {"quantization_config": quantization})


def _noting(
    tensors: Iterable[tuple[str, Tensor]], dtypes: set[torch.dtype]
) -> Iterator[tuple[str, Tensor]]:
    """Yields them, and notes their types."""
    for name, tensor in tensors:
        dtypes.add(tensor.dtype)
        yield name, tensor


def _write_weights(folder: Path, shards: Iterable[NamedTensors]) -> None:
    """Writes the files and, if they are several, their index."""
    contents: list[list[str]] = []
    total = 0
    for number, shard in enumerate(shards, start=1):
        on_host = {name: tensor.detach().to("cpu", copy=True) for name, tensor in shard}
        on_host = {name: tensor.contiguous() for name, tensor in on_host.items()}
        _save(on_host, folder / f"{number}.safetensors")
        contents.append(list(on_host))
        total += sum(tensor.nbytes for tensor in on_host.values())
    if len(contents) == 1:
        move(folder / "1.safetensors", folder / "model.safetensors")
        return
    files: dict[str, list[str]] = {}
    for number, inside in enumerate(contents, start=1):
        file = f"model-{number:05}-of-{len(contents):05}.safetensors"
        move(folder / f"{number}.safetensors", folder / file)
        files[file] = inside
    write_index(folder, files, total)


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a file of tensors.

    Raises:
        OSError: as the operating system said it to safetensors, which tells it in words only.
    """

    def write_file() -> None:
        try:
            save_file(dict(tensors), path, metadata={"format": "pt"})
        except SafetensorError as error:
            found = _OS_ERROR.search(str(error))
            if not found:
                raise
            number = int(found[1])
            raise OSError(number, os.strerror(number), str(path)) from error

    patiently(path, write_file)
