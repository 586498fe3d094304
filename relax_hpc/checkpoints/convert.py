"""Converts between checkpoints of runs and Hugging Face folders, as a user asks for it."""

from pathlib import Path

from relax_hpc.checkpoints import store
from relax_hpc.engines.megatron.checkpoint import conversion
from relax_hpc.engines.megatron.checkpoint.part_files import MANIFEST
from relax_hpc.errors import CheckpointError, ConfigError
from relax_hpc.job_file import read_resolved
from relax_hpc.paths import RunPaths

_FORMATS = ("hf", "megatron", "peft")


def convert(what: Path, to: str, *, out: Path | None, step: int | None, model: Path | None) -> Path:
    """Converts weights, and returns the folder where they are.

    Args:
        what: a run directory, a checkpoint, or a Hugging Face folder.
        to: the format of the result: hf, megatron or peft, which is adapters alone.
        out: must not exist; where a run is converted to hf, its hf/step_<step> by default.
        step: of the checkpoint of a run; the newest by default.
        model: Hugging Face folder that lends config.json and tokenizer; by default the one that
            the run was started with.

    Raises:
        ConfigError: something is not there, or is there already.
        CheckpointError: the checkpoint is not whole.
    """
    _refuse_unless(to in _FORMATS, f"--to {to}: unknown; it is one of {', '.join(_FORMATS)}")
    if to == "megatron":
        _refuse_unless(
            (what / "config.json").is_file(), f"{what}: has no config.json; --to megatron "
            "converts a Hugging Face folder",
        )  # fmt: skip
        out = _free(out, f"{what}: say with --out where the checkpoint is to be")
        conversion.to_megatron(what, out)
        return out
    folder, run = _checkpoint(what, step)
    if model is None:
        _refuse_unless(
            run is not None, f"{folder}: is not within a run; say with --model which Hugging Face "
            "folder lends config.json and tokenizer",
        )  # fmt: skip
        assert run is not None
        model = read_resolved(run.config).model.path
    saved_step = store.step_of(folder)
    default = run.hf(saved_step) if to == "hf" and run and saved_step is not None else None
    out = _free(out or default, f"{folder}: say with --out where to write")
    write = conversion.to_hf if to == "hf" else conversion.to_peft
    write(folder, model, out)
    return out


def _checkpoint(what: Path, step: int | None) -> tuple[Path, RunPaths | None]:
    """Returns the folder, and the run that it belongs to."""
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


def _free(out: Path | None, otherwise: str) -> Path:
    if out is None:
        raise ConfigError(otherwise)
    taken = out.exists() or out.is_symlink()
    _refuse_unless(not taken, f"{out}: is there already; give another --out, or remove it")
    return out


def _refuse_unless(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
