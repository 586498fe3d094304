"""Loads the tokenizer of a Hugging Face folder, offline."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from relax_hpc.errors import ConfigError, first_line, show
from relax_hpc.runtime.files import records, user_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OBJECTS = (
    "tokenizer_config.json",
    "tokenizer.json",
    "vocab.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TEMPLATE = "chat_template.json"
"""Template file that transformers reads only for a model's processor."""
READ = (*_OBJECTS, "tokenizer.model", "merges.txt", "chat_template.jinja", _TEMPLATE)
"""Files that determine tokenization."""

_MODELS = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Models whose classes are known; others go through AutoTokenizer."""
_CLASSES = {
    "Qwen2Tokenizer": "Qwen2Tokenizer",
    "Qwen2TokenizerFast": "Qwen2Tokenizer",
    "PreTrainedTokenizerFast": "PreTrainedTokenizerFast",
    "TokenizersBackend": "PreTrainedTokenizerFast",
}
"""Class in tokenizer_config.json -> AutoTokenizer's choice for the models above."""


def load(model_path: Path, model_type: str | None = None) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer that `model.path` names.

    Args:
        model_type: of its config.json, if that was read.

    Raises:
        ConfigError: no such folder, or it holds no tokenizer that transformers can read.
    """
    user_files.check_folder(f"model.path = {model_path}", model_path, "name a Hugging Face folder")
    if not any((model_path / name).is_file() for name in FILES):
        raise ConfigError(
            f"model.path = {model_path}: holds no tokenizer ({' or '.join(FILES)}); "
            "copy the tokenizer's files next to config.json"
        )
    known = {  # of another shape, they make transformers fail anywhere
        name: user_files.read_object(model_path / name, "download it again")
        for name in _OBJECTS
        if (model_path / name).exists()
    }
    model_type = model_type or (records.read_json(model_path / "config.json") or {}).get(
        "model_type"
    )
    try:
        found = _tokenizer_class(known.get(_OBJECTS[0], {}), model_type).from_pretrained(
            model_path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # parsers of others, in Rust too: they raise anything
        raise ConfigError(
            f"model.path = {model_path}: unreadable tokenizer: {type(error).__name__}: "
            f"{first_line(error)}; download its files again"
        ) from error
    if found.chat_template is None and (model_path / _TEMPLATE).exists():
        record = user_files.read_object(model_path / _TEMPLATE, "download it again")
        found.chat_template = record.get("chat_template")
        if not isinstance(found.chat_template, str):
            raise ConfigError(
                f"{model_path / _TEMPLATE}: has no text chat_template; download it again"
            )
    return cast("PreTrainedTokenizerBase", found)


def refuse_unknown(
    where: str, token_ids: Iterable[int], vocab_size: int, tokenizer: "PreTrainedTokenizerBase"
) -> None:
    """Refuses a row with a token beyond the model's vocabulary, e.g. added to the tokenizer alone:
    it would crash an engine or a trainer.

    Raises:
        ConfigError: names the row and the token.
    """
    highest = int(max(token_ids, default=-1))
    if highest >= vocab_size:
        text = tokenizer.decode([highest])
        raise ConfigError(
            f"{where}: has token {highest} ({show(text)}), and the model has {vocab_size} "
            "(vocab_size in its config.json); use the model's own tokenizer, or a model with rows "
            "for the tokens that were added"
        )


def _tokenizer_class(found: Mapping[str, Any], model_type: str | None) -> Any:  # noqa: ANN401
    """Returns AutoTokenizer, or its known choice, which saves the slow import of torch."""
    import transformers  # a second of import, which reading a job does not need

    name = _CLASSES.get(str(found.get("tokenizer_class")))
    if name is None or model_type not in _MODELS or "auto_map" in found:
        return transformers.AutoTokenizer
    return getattr(transformers, name)
