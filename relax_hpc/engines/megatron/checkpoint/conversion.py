"""Weights of a checkpoint <-> a Hugging Face folder: one process, no GPU, a tensor at a time."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from relax_hpc.engines.megatron.checkpoint import part_files
from relax_hpc.engines.megatron.checkpoint.boxes import Box
from relax_hpc.engines.megatron.checkpoint.read import Stored
from relax_hpc.engines.megatron.hf import hf_stream, hf_weights
from relax_hpc.engines.megatron.layers import lora as layers
from relax_hpc.errors import ConfigError
from relax_hpc.models import hf_folder
from relax_hpc.models.architecture import Architecture
from relax_hpc.models.hf_check import check_names, check_shapes
from relax_hpc.models.hf_files import OUTPUT, HfFiles
from relax_hpc.models.names import Adapter, Parameter
from relax_hpc.models.registry import FAMILIES, parameters, read_architecture
from relax_hpc.records import sync
from relax_hpc.scratch import scratch_folder
from relax_hpc.storage import FULL

_OTHER_NAMES = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)
"""Names of some parameters here -> in Megatron's checkpoints, which all its layer types read."""


def to_hf(checkpoint: Path, model: Path, out: Path) -> None:
    """Writes the weights of a checkpoint as a folder that loads like `model`, adapters merged.

    Args:
        model: a Hugging Face folder of the same architecture, which lends all but its weights.
        out: appears when it is complete.

    Raises:
        CheckpointError: the checkpoint is not whole, or was removed meanwhile.
        ConfigError: it is of another model, or `out` cannot be made.
    """
    stored = Stored(checkpoint)
    keys = _keys(stored, parameters(read_architecture(model)))
    tensors = (
        tensor
        for parameter, key in keys
        for tensor in hf_stream.unpacked(parameter, _merged(stored, parameter, key))
    )
    with _appearing(out) as draft:
        hf_folder.write(draft, tensors, model)


def to_peft(checkpoint: Path, model: Path, out: Path) -> None:
    """Writes the adapters of a checkpoint as a folder that peft loads onto the model.

    Args:
        model: the Hugging Face folder that they were trained on.
        out: appears when it is complete.

    Raises:
        CheckpointError: the checkpoint is not whole, or was removed meanwhile.
        ConfigError: it has no adapters, is of another model, or `out` cannot be made.
    """
    stored, shape = Stored(checkpoint), read_architecture(model)
    lora = stored.lora
    if lora is None:
        raise ConfigError(f"{checkpoint}: has no adapters; --to hf writes the model")
    _keys(stored, parameters(shape))
    tensors = {
        f"base_model.model.{name}": tensor.contiguous()
        for parameter in parameters(shape)
        if (adapter := Adapter.of(parameter, lora["rank"], lora["targets"]))
        for part in (adapter.a, adapter.b)
        for name, tensor in hf_stream.unpacked(part, stored.tensor(part.core[0]))
        if name.split(".")[-3] in lora["targets"]
    }
    modules = sorted({name.split(".", 2)[2].rsplit(".", 2)[0] for name in tensors})
    record = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        # Towers have modules of such names, too.
        "target_modules": modules if shape.vision or shape.audio else lora["targets"],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    with _appearing(out) as draft:
        draft.mkdir()
        save_file(tensors, draft / "adapter_model.safetensors", {"format": "pt"})
        (draft / "adapter_config.json").write_text(json.dumps(record, indent=2) + "\n")


def check_fits(checkpoint: Path, shape: Architecture, *, has_vocabulary: bool = True) -> None:
    """Whether a checkpoint has all weights of a model. Reads what describes it, and no weights.

    Args:
        checkpoint: its folder.
        shape: of the model.
        has_vocabulary: whether the model has an output layer.

    Raises:
        CheckpointError: it is not whole.
        ConfigError: it is of another model, or has adapters.
    """
    wanted = (each for each in parameters(shape) if has_vocabulary or OUTPUT not in each.hf)
    stored = Stored(checkpoint)
    stored.refuse_adapters()
    _keys(stored, wanted)


def to_megatron(model: Path, out: Path) -> None:
    """Writes the weights of a Hugging Face folder as a checkpoint that any grid can load.

    Raises:
        ConfigError: the folder is not what its config.json says.
    """
    shape = read_architecture(model)
    with HfFiles(model) as files:
        check_names(files, shape, parameters(shape))
        check_shapes(files, parameters(shape))
        with _appearing(out) as draft:
            draft.mkdir()
            dtype = files.dtype(FAMILIES[shape.model_type].kept)
            part_files.write_part(draft, 0, _boxes(files, parameters(shape), dtype), {})
            common = {"step": 0, "weights_only": True}
            part_files.write_names(draft, 1, common, timeout_s=0)


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """Gives the name under which a folder is to be made within the block, and makes it `out` then.

    Nobody else writes there: who converts into the same `out` at the same time has another name.
    What one that was killed left beside `out` is removed by the next on the same node.

    Raises:
        ConfigError: it cannot be made; there is nothing then.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder("convert", out.parent) as folder:
            yield folder / out.name
            (folder / out.name).rename(out)  # fails where there is anything meanwhile
            sync(out.parent)
    except PermissionError:
        raise  # the command line says whose it is
    except OSError as error:
        remedy = "make room, or name another" if error.errno in FULL else "name another"
        raise ConfigError(f"{out}: cannot be made: {error.strerror}; {remedy}") from error


def _merged(stored: Stored, parameter: Parameter, key: str) -> Tensor:
    """A whole parameter, with what its adapter adds."""
    whole, lora = stored.tensor(key), stored.lora
    adapter = Adapter.of(parameter, lora["rank"], lora["targets"]) if lora else None
    if lora is None or adapter is None:
        return whole
    first, second = stored.tensor(adapter.a.core[0]), stored.tensor(adapter.b.core[0])
    places = layers.places_of(parameter, adapter.sources, lora["alpha"] / lora["rank"])
    return layers.merge(whole, layers.spread(second, places), first)


def _keys(stored: Stored, every: Iterator[Parameter]) -> list[tuple[Parameter, str]]:
    """Returns the parameters, each with the key that it has in a checkpoint."""
    shapes = stored.shapes()
    return [(parameter, _key(stored, shapes, parameter)) for parameter in every]


def _key(stored: Stored, shapes: dict[str, tuple[int, ...]], parameter: Parameter) -> str:
    keys = [key for name in parameter.core for key in _names(name)]
    for key in keys:
        if key in shapes:
            size = torch.Size(parameter.shard_shape(1)).numel() * (parameter.num_experts or 1)
            if torch.Size(shapes[key]).numel() != size:
                break
            return key
    else:
        raise ConfigError(
            f"{stored.folder}: has no {keys[0]}; it is a checkpoint of another model than "
            "the config.json beside the tokenizer describes"
        )
    raise ConfigError(
        f"{stored.folder}: {key} is {list(shapes[key])}, config.json asks for {size} elements; it "
        "is a checkpoint of another model"
    )


def _names(core: str) -> Iterator[str]:
    yield core
    for name, other in _OTHER_NAMES:
        if name in core:
            yield core.replace(name, other)


def _boxes(files: HfFiles, every: Iterator[Parameter], dtype: torch.dtype) -> Iterator[Box]:
    for parameter in every:
        experts = (parameter.num_experts,) if parameter.num_experts else ()
        whole = torch.empty((*experts, *parameter.shard_shape(1)), dtype=dtype)
        hf_weights.fill(files, parameter, whole, hf_weights.Sharing(0, 1))
        *_, key = _names(parameter.core[0])
        yield from _as_stored(key, parameter, whole)


def _as_stored(key: str, parameter: Parameter, whole: Tensor) -> Iterator[Box]:
    """Gate and up of experts are a dimension of the trainer's own parameter."""
    if parameter.num_experts and parameter.layout == "gate_up":
        whole = whole.view(len(whole), 2, -1, whole.shape[-1])
    yield Box(key, (0,) * whole.ndim, tuple(whole.shape), whole)
