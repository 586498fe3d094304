"""Writes a Hugging Face folder with new weights: it appears complete, or not at all.

Its tensors have the hub's form: experts of a layer fused, and untrained parts copied.
"""

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

from relax_hpc.runtime.comm.bucket import NamedTensors, buckets
from relax_hpc.runtime.files.records import read_bytes, read_json, sync, write_json
from relax_hpc.runtime.files.storage import delete_folder, exists, move, names, patiently
from relax_hpc.trainer.models.architecture import Family
from relax_hpc.trainer.models.hf_files import INDEX, SINGLE, HfFiles
from relax_hpc.trainer.models.names import Parameter
from relax_hpc.trainer.models.registry import FAMILIES, parameters, read_architecture


def as_in_hub(tensors: Iterable[tuple[str, Tensor]], source: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a model, with experts fused if folders of its family fuse them.

    Args:
        tensors: in the order of the model, expert by expert.
    """
    family = _family_of(source)
    if family is None or not family.fuses_experts:
        yield from tensors
        return
    first = {
        next(parameter.names()): parameter
        for parameter in parameters(read_architecture(source))
        if parameter.fused
    }
    stream = iter(tensors)
    for name, tensor in stream:
        if name in first:
            yield first[name].fused, _fuse(first[name], tensor, stream)
        else:
            yield name, tensor


def stream_kept(source: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors outside the trained parts of a folder."""
    family = _family_of(source)
    if family is None or not family.kept:
        return
    with HfFiles(source) as files:
        for name in files.list_named(family.kept):
            yield name, files.read(name)


def _family_of(folder: Path) -> Family | None:
    return FAMILIES.get((read_json(folder / "config.json") or {}).get("model_type", ""))


def _fuse(parameter: Parameter, tensor: Tensor, stream: Iterator[tuple[str, Tensor]]) -> Tensor:
    """Returns the fused tensor of a parameter from its first tensor and the stream's next ones."""
    num_experts, *each = parameter.fused_shape
    fused = torch.empty(num_experts, *each, dtype=tensor.dtype)
    _, *others = parameter.names()
    for expert in fused:
        rows = expert.T if parameter.transposed else expert
        start = 0
        for length, *_ in parameter.hf.values():
            rows[start : start + length] = tensor
            start += length
            if others:
                name, tensor = next(stream)
                assert name == others.pop(0), f"{name} is not the next of {parameter.fused}"
    return fused


SHARD_BYTES = 5 << 30
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth",
            ".gguf", ".h5", ".msgpack", ".onnx")  # fmt: skip
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def write(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    source: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    durable: bool = True,
) -> None:
    """Writes `tensors` as a folder that loads like `source`, the source of all but the weights.

    Tensors of `source` outside the trained parts are copied. An existing folder is replaced. The
    tensors of one file are in memory at a time. If the file system is full, it waits for room.

    Args:
        folder: appears by a rename, when it is complete.
        tensors: read to the end.
        source: a Hugging Face folder, for config.json, tokenizer and other small files.
        shard_bytes: of the tensors in a file; a larger one is alone.
        durable: whether everything is on disk before the rename; else a crash of the machine may
            tear it.
    """
    draft, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("tmp", "old"))
    for left_over in (draft, old):
        delete_folder(left_over)
    patiently(draft, partial(draft.mkdir, parents=True, exist_ok=True))
    patiently(draft, lambda: copy_all_but_weights(source, draft))
    dtypes = set[torch.dtype]()
    learned = _noting(as_in_hub(tensors, source), dtypes)
    _write_weights(draft, buckets(chain(learned, stream_kept(source)), shard_bytes))
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
    weight_map = {name: file for file, names in files.items() for name in names}
    write_json(folder / INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})


def set_dtype(folder: Path, dtypes: Collection[torch.dtype]) -> None:
    """Sets the dtype in config.json, since loaders use it."""
    config = folder / "config.json"
    record = read_json(config) if len(dtypes) == 1 else None
    if record is None:
        return
    (dtype,) = dtypes
    said = {key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype")}
    write_json(config, record | {key: said[key] for key in said if key in record})


def set_quantization(folder: Path, quantization: Mapping[str, object]) -> None:
    config = folder / "config.json"
    record = json.loads(read_bytes(config))
    write_json(config, record | {"quantization_config": quantization})


def _noting(
    tensors: Iterable[tuple[str, Tensor]], dtypes: set[torch.dtype]
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        dtypes.add(tensor.dtype)
        yield name, tensor


def _write_weights(folder: Path, shards: Iterable[NamedTensors]) -> None:
    contents: list[list[str]] = []
    total = 0
    for number, shard in enumerate(shards, start=1):
        on_host = {name: tensor.detach().to("cpu", copy=True) for name, tensor in shard}
        on_host = {name: tensor.contiguous() for name, tensor in on_host.items()}
        _save(on_host, folder / f"{number}.safetensors")
        contents.append(list(on_host))
        total += sum(tensor.nbytes for tensor in on_host.values())
    if len(contents) == 1:
        move(folder / "1.safetensors", folder / SINGLE)
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
        OSError: the system's error, which safetensors reports as text only.
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
