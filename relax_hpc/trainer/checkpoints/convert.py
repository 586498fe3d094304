"""Converts weights between checkpoints of runs and Hugging Face folders, in one process, without
GPU.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from relax_hpc.config.job_file import read_resolved
from relax_hpc.errors import CheckpointError, ConfigError
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.files.records import sync
from relax_hpc.runtime.files.scratch import scratch_folder
from relax_hpc.runtime.files.storage import FULL
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.trainer.checkpoints import store
from relax_hpc.trainer.checkpoints.best import find_best
from relax_hpc.trainer.megatron import checkpoint_files, hf_stream, hf_weights
from relax_hpc.trainer.megatron.checkpoint_files import MANIFEST, Box, StoredCheckpoint
from relax_hpc.trainer.megatron.layers import lora as layers
from relax_hpc.trainer.models import hf_folder
from relax_hpc.trainer.models.architecture import Architecture
from relax_hpc.trainer.models.hf_files import OUTPUT, HfFiles, check_names, check_shapes
from relax_hpc.trainer.models.names import Adapter, Parameter
from relax_hpc.trainer.models.registry import FAMILIES, parameters, read_architecture

_FORMATS = ("hf", "megatron", "peft")


def convert(
    what: Path,
    to: str,
    *,
    out: Path | None,
    step: int | None,
    model: Path | None,
    best: bool = False,
    card: Callable[[RunPaths, int, Path], None] | None = None,
) -> Path:
    """Converts weights, and returns the folder of the result.

    Args:
        what: a run directory, a checkpoint, or a Hugging Face folder.
        to: the format of the result: hf, megatron or peft, which is adapters alone.
        out: must not exist; where a run is converted to hf, its hf/step_<step> by default.
        step: of the checkpoint of a run; the newest by default.
        model: Hugging Face folder with config.json and tokenizer; by default that of the run.
        best: take the run's best policy (`actor.advanced.keep_best`).
        card: adds files about a run and a step of it to a folder, before it appears.

    Raises:
        ConfigError: an input is missing, or the output exists.
        CheckpointError: the checkpoint is incomplete.
    """
    _refuse_unless(to in _FORMATS, f"--to {to}: unknown; it is one of {', '.join(_FORMATS)}")
    if to == "megatron":
        _refuse_unless(
            (what / "config.json").is_file(), f"{what}: has no config.json; --to megatron "
            "converts a Hugging Face folder",
        )  # fmt: skip
        out = find_free(out, f"{what}: say with --out where the checkpoint is to be")
        to_megatron(what, out)
        return out
    folder, run = _checkpoint(what, _best_step(what, step) if best else step)
    if model is None:
        _refuse_unless(
            run is not None, f"{folder}: is not within a run; say with --model which Hugging Face "
            "folder lends config.json and tokenizer",
        )  # fmt: skip
        assert run is not None
        model = read_resolved(run.config).model.path
    saved_step = store.step_of(folder)
    default = run.hf(saved_step) if to == "hf" and run and saved_step is not None else None
    if out is None and default is not None and run is not None:
        permissions.check_change(run, "say with --out where to write")
    out = find_free(out or default, f"{folder}: say with --out where to write")
    write = to_hf if to == "hf" else to_peft
    write(folder, model, out, *([partial(card, run, saved_step or 0)] if card and run else []))
    return out


def _nothing(_: Path) -> None: ...


def _best_step(what: Path, step: int | None) -> int:
    paths = RunPaths(what)
    _refuse_unless(step is None, f"--best and --step {step}: give one of them")
    _refuse_unless(paths.config.is_file(), f"{what}: is no run; --best chooses among those of one")
    found = find_best(paths, read_resolved(paths.config))
    if found is None:
        raise ConfigError(
            f"{what}: has no best policy: actor.advanced.keep_best was not set, or no checkpoint "
            "has a score yet; choose one with --step"
        )
    return found.step


def _checkpoint(what: Path, step: int | None) -> tuple[Path, RunPaths | None]:
    paths = RunPaths(what)
    if paths.config.is_file():
        try:
            return store.find(paths.checkpoints, step), paths
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
    _refuse_unless(what.is_dir(), f"{what}: is no folder; name a run or a checkpoint")
    _refuse_unless(
        (what / MANIFEST).is_file(),
        f"{what}: is neither a run (no {paths.config.name}) nor a checkpoint (no {MANIFEST})",
    )
    _refuse_unless(step is None, f"{what}: is one checkpoint; --step chooses among those of a run")
    above = [RunPaths(parent) for parent in what.resolve().parents]
    return what, next((run for run in above if run.config.is_file()), None)


def find_free(out: Path | None, otherwise: str) -> Path:
    if out is None:
        raise ConfigError(otherwise)
    taken = out.exists() or out.is_symlink()
    _refuse_unless(not taken, f"{out}: is there already; give another --out, or remove it")
    return out


def _refuse_unless(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


_OTHER_NAMES = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)
"""Our parameter names -> those in Megatron's checkpoints, which all its layer types read."""


def to_hf(
    checkpoint: Path, model: Path, out: Path, also: Callable[[Path], None] = _nothing
) -> None:
    """Writes the weights of a checkpoint as a folder that loads like `model`, adapters merged.

    Args:
        model: a Hugging Face folder of the same architecture, the source of all but the weights.
        out: appears when it is complete.
        also: adds files to the folder before.

    Raises:
        CheckpointError: the checkpoint is incomplete, or was removed meanwhile.
        ConfigError: it is of another model, or `out` cannot be made.
    """
    stored = StoredCheckpoint(checkpoint)
    keys = _keys(stored, parameters(read_architecture(model)))
    tensors = (
        tensor
        for parameter, key in keys
        for tensor in hf_stream.unpack(parameter, _merge(stored, parameter, key))
    )
    with appear(out) as draft:
        hf_folder.write(draft, tensors, model)
        also(draft)


def to_peft(
    checkpoint: Path, model: Path, out: Path, also: Callable[[Path], None] = _nothing
) -> None:
    """Writes the adapters of a checkpoint as a folder that peft loads onto the model.

    Args:
        model: the Hugging Face folder that they were trained on.
        out: appears when it is complete.
        also: adds files to the folder before.

    Raises:
        CheckpointError: the checkpoint is incomplete, or was removed meanwhile.
        ConfigError: it has no adapters, is of another model, or `out` cannot be made.
    """
    stored, shape = StoredCheckpoint(checkpoint), read_architecture(model)
    lora = stored.lora
    if lora is None:
        raise ConfigError(f"{checkpoint}: has no adapters; --to hf writes the model")
    _keys(stored, parameters(shape))
    tensors = {
        f"base_model.model.{name}": tensor.contiguous()
        for parameter in parameters(shape)
        if (adapter := Adapter.of(parameter, lora["rank"], lora["targets"]))
        for part in (adapter.a, adapter.b)
        for name, tensor in hf_stream.unpack(part, stored.tensor(part.core[0]))
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
    with appear(out) as draft:
        draft.mkdir()
        save_file(tensors, draft / "adapter_model.safetensors", {"format": "pt"})
        (draft / "adapter_config.json").write_text(
            json.dumps(record, indent=2) + "\n", encoding="utf-8"
        )
        also(draft)


def check_fits(checkpoint: Path, shape: Architecture, *, has_vocabulary: bool = True) -> None:
    """Checks that a checkpoint has all weights of a model. Reads metadata only.

    Args:
        has_vocabulary: whether the model has an output layer.

    Raises:
        CheckpointError: it is incomplete.
        ConfigError: it is of another model, or has adapters.
    """
    wanted = (each for each in parameters(shape) if has_vocabulary or OUTPUT not in each.hf)
    stored = StoredCheckpoint(checkpoint)
    stored.refuse_adapters()
    _keys(stored, wanted)


def to_megatron(model: Path, out: Path) -> None:
    """Writes the weights of a Hugging Face folder as a checkpoint for any grid.

    Raises:
        ConfigError: the folder does not match its config.json.
    """
    shape = read_architecture(model)
    with HfFiles(model) as files:
        check_names(files, shape, parameters(shape))
        check_shapes(files, parameters(shape))
        with appear(out) as draft:
            draft.mkdir()
            dtype = files.dtype(FAMILIES[shape.model_type].kept)
            checkpoint_files.write_part(draft, 0, _boxes(files, parameters(shape), dtype), {})
            common = {"step": 0, "weights_only": True}
            checkpoint_files.write_names(draft, 1, common, timeout_s=0)


@contextmanager
def appear(out: Path) -> Iterator[Path]:
    """Yields a temporary name for a folder, which the end of the block renames to `out`.

    The name is unique, also among concurrent conversions into `out`. Remains of a killed one are
    deleted by the next on the same node.

    Raises:
        ConfigError: it cannot be made; nothing remains then.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        parent = permissions.open_folder(out.parent)
        try:
            above = Path(f"/proc/self/fd/{parent}")  # the same one whatever others make of its path
            with scratch_folder("convert", above) as made, permissions.hold_folder(made) as folder:
                yield folder / out.name
                (folder / out.name).rename(above / out.name)  # fails where there is anything by now
                sync(above)
        finally:
            os.close(parent)
    except PermissionError:
        raise  # the command line says whose it is
    except OSError as error:
        remedy = "make room, or name another" if error.errno in FULL else "name another"
        raise ConfigError(f"{out}: cannot be made: {error.strerror}; {remedy}") from error


def _merge(stored: StoredCheckpoint, parameter: Parameter, key: str) -> Tensor:
    whole, lora = stored.tensor(key), stored.lora
    adapter = Adapter.of(parameter, lora["rank"], lora["targets"]) if lora else None
    if lora is None or adapter is None:
        return whole
    first, second = stored.tensor(adapter.a.core[0]), stored.tensor(adapter.b.core[0])
    places = layers.places_of(parameter, adapter.sources, lora["alpha"] / lora["rank"])
    return layers.merge(whole, layers.spread(second, places), first)


def _keys(stored: StoredCheckpoint, every: Iterator[Parameter]) -> list[tuple[Parameter, str]]:
    shapes = stored.shapes()
    return [(parameter, _key(stored, shapes, parameter)) for parameter in every]


def _key(stored: StoredCheckpoint, shapes: dict[str, tuple[int, ...]], parameter: Parameter) -> str:
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
    """Yields the boxes of a parameter: gate and up of experts are a dimension of ours."""
    if parameter.num_experts and parameter.layout == "gate_up":
        whole = whole.view(len(whole), 2, -1, whole.shape[-1])
    yield Box(key, (0,) * whole.ndim, tuple(whole.shape), whole)
