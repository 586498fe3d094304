"""Brings what a job names on the Hugging Face hub into the caches of this machine."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from relax_hpc.config import hub, programs
from relax_hpc.config.hub import HubName
from relax_hpc.config.run import JobConfig
from relax_hpc.data.rows import open_rows
from relax_hpc.errors import ConfigError, without_number
from relax_hpc.runtime.files.user_files import HUB

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

_KINDS = ("safetensors", "json", "txt", "model", "jinja", "tiktoken")
_AGAIN = ("consolidated*", "original/*", "onnx/*")
"""The same model in other forms, beside that of transformers."""


def fetch(config: JobConfig, say: Callable[[str], None]) -> None:
    """Brings the models and the data of a job that have names on the hub.

    Args:
        say: gets what is brought, and where it is.

    Raises:
        ConfigError: the hub does not have it, or cannot be reached.
    """
    models = dict.fromkeys(map(hub.name_of, programs.names_in(config, programs.MODELS)))
    data = dict.fromkeys(programs.names_in(config, programs.DATA))
    asked = [each for each in models if each]
    sets = [each for each in data if str(each).startswith(HUB)]
    if not asked and not sets:
        say("all models and data of the job are folders and files: there is nothing to bring")
    for model in asked:
        _bring(model, say)
    for each in sets:
        say(f"{each}: {len(open_rows(each)):,} rows are there")  # now at the latest


def _bring(asked: HubName, say: Callable[[str], None]) -> None:
    from huggingface_hub import snapshot_download

    patterns: dict[str, Any] = {
        "allow_patterns": [f"*.{kind}" for kind in _KINDS],
        "ignore_patterns": list(_AGAIN),
    }
    with _asking(asked), _without_bars():
        files = snapshot_download(asked.model, revision=asked.revision, dry_run=True, **patterns)
    if not any(each.filename.endswith(".safetensors") for each in files):
        raise ConfigError(f"{asked}: has no safetensors on the hub; name another model")
    if missing := [each for each in files if each.will_download]:
        say(f"{asked}: {_format(missing)} to bring")
    with _asking(asked):
        folder = snapshot_download(asked.model, revision=asked.revision, **patterns)
    say(f"{asked}: {_format(files)}, there in {folder}")


@contextmanager
def _asking(asked: HubName) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of the hub, a network or a disk
        raise ConfigError(f"{asked}: {_reason(asked, error.__cause__ or error)}") from error


@contextmanager
def _without_bars() -> Iterator[None]:
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    are_shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if are_shown:
            enable_progress_bars()


def _format(files: Sequence["DryRunFileInfo"]) -> str:
    size = sum(each.file_size or 0 for each in files)
    return f"{size / 1e9:.2f} GB in {len(files)} file{'s' * (len(files) != 1)}"


def _reason(asked: HubName, error: BaseException) -> str:
    from huggingface_hub import errors

    said, page = without_number(error).partition("\n")[0], f"https://huggingface.co/{asked.model}"
    match error:
        case errors.GatedRepoError():
            return f"is for accounts that have asked for it; ask on {page}, then hf auth login"
        case errors.RepositoryNotFoundError():
            return "the hub has no such model, or does not show it; correct it, or hf auth login"
        case errors.RevisionNotFoundError():
            return f"the hub has no such revision; {page} lists them"
        case errors.OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE forbids to ask the hub; unset it"
    return f"cannot be brought: {said}; try again where the hub can be reached"
