"""The tokenizer of a Hugging Face folder, without asking any network."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

_MODELS = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_CLASSES = {
    "Qwen2Tokenizer": "Qwen2Tokenizer",
    "Qwen2TokenizerFast": "Qwen2Tokenizer",
    "PreTrainedTokenizerFast": "PreTrainedTokenizerFast",
    "TokenizersBackend": "PreTrainedTokenizerFast",
}
"""For models above: what tokenizer_config.json names -> the class that AutoTokenizer chooses."""


def load(model_path: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer that `model.path` names.

    Raises:
        ConfigError: no such folder, or it holds no tokenizer that transformers can read.
    """
    if not model_path.is_dir():
        raise ConfigError(f"model.path = {model_path}: no such folder; give a Hugging Face folder")
    if not any((model_path / name).is_file() for name in FILES):
        raise ConfigError(
            f"model.path = {model_path}: holds no tokenizer ({' or '.join(FILES)}); "
            "copy the tokenizer's files next to config.json"
        )
    try:
        return _tokenizer_class(model_path).from_pretrained(model_path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path = {model_path}: unreadable tokenizer: {error}") from error


def _tokenizer_class(model_path: Path) -> Any:  # noqa: ANN401
    """AutoTokenizer, or what it would choose: it imports torch, for which a task would wait."""
    import transformers  # a second of import, which reading a job does not need

    found = _read(model_path / "tokenizer_config.json")
    model_type = _read(model_path / "config.json").get("model_type")
    name = _CLASSES.get(str(found.get("tokenizer_class")))
    if name is None or model_type not in _MODELS or "auto_map" in found:
        return transformers.AutoTokenizer
    return getattr(transformers, name)


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none that could be read, of which others complain."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
