"""The tokenizer of a Hugging Face folder, without asking any network."""

from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load(model_path: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer that `model.path` names.

    Raises:
        ConfigError: no such folder, or it holds no tokenizer that transformers can read.
    """
    from transformers import AutoTokenizer  # seconds of import, which reading a job does not need

    if not model_path.is_dir():
        raise ConfigError(f"model.path = {model_path}: no such folder; give a Hugging Face folder")
    if not any((model_path / name).is_file() for name in FILES):
        raise ConfigError(
            f"model.path = {model_path}: holds no tokenizer ({' or '.join(FILES)}); "
            "copy the tokenizer's files next to config.json"
        )
    try:
        return AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path = {model_path}: unreadable tokenizer: {error}") from error
