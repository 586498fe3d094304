"""Prompt files, and the map from a prompt's ordinal in the run to the prompt."""

import json
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from relax_hpc.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]


class Record(NamedTuple):
    """One line of a prompt file."""

    prompt: str | Messages
    answer: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as an engine takes it."""

    index: int
    """Line of the file, 0-based, blank lines not counted."""
    token_ids: list[int]
    answer: str


class PromptSource:
    """`source[ordinal]`: every prompt once per epoch, in an order that only the seed decides.

    There is no cursor to save: whoever knows an ordinal, in whichever process and after whichever
    restart, gets the same prompt for it.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        shuffle_seed: int | None,
        chat_template: bool,
        max_prompt_tokens: int,
    ) -> None:
        """Reads and checks the file; prompts are tokenized when they are asked for.

        Raises:
            ConfigError: the file, or one of its lines, cannot be used.
        """
        self._path, self._tokenizer = path, tokenizer
        self._records = read_records(path)
        self._shuffle_seed = shuffle_seed
        self._chat_template = chat_template
        self._max_prompt_tokens = max_prompt_tokens
        self._order = lru_cache(maxsize=2)(self._draw_order)
        self._tokenized: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, ordinal: int) -> Prompt:
        """The prompt of `ordinal` >= 0, which may be any number of epochs on.

        Raises:
            ConfigError: the prompt is longer than `max_prompt_tokens`.
        """
        if ordinal < 0:
            raise IndexError(f"prompt ordinals start at 0, not {ordinal}")
        epoch, place = divmod(ordinal, len(self))
        return self.prompt(self._order(epoch)[place])

    def prompt(self, index: int) -> Prompt:
        """The prompt on line `index` of the file."""
        if index not in self._tokenized:
            self._tokenized[index] = self._tokenize(index)
        return Prompt(index, self._tokenized[index], self._records[index].answer)

    def check(self) -> int:
        """Tokenizes every prompt, so that one too long is found before anything is queued.

        Returns:
            Tokens of the longest.
        """
        return max(len(self.prompt(index).token_ids) for index in range(len(self)))

    def _draw_order(self, epoch: int) -> list[int]:
        return epoch_order(self._shuffle_seed, epoch, len(self))

    def _tokenize(self, index: int) -> list[int]:
        prompt = self._records[index].prompt
        if self._chat_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        elif isinstance(prompt, str):
            text = prompt
        else:
            raise ConfigError(
                f"{self._path}: prompt {index} is chat messages; set prompts.chat_template = true"
            )
        # The template writes the special tokens itself.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=not self._chat_template)
        if not 0 < len(ids) <= self._max_prompt_tokens:
            raise ConfigError(
                f"{self._path}: prompt {index} has {len(ids)} tokens; prompts.max_prompt_tokens = "
                f"{self._max_prompt_tokens} allows 1 to {self._max_prompt_tokens}: raise it, or "
                "remove the prompt"
            )
        return ids


def epoch_order(seed: int | None, epoch: int, count: int) -> list[int]:
    """The numbers below `count` in the order of an epoch; without a seed they rise."""
    order = list(range(count))
    if seed is not None:
        # A string seeds through SHA-512: stable across processes, unlike hash().
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def read_records(path: Path) -> list[Record]:
    """Reads a prompt file: JSON lines with `prompt` and `answer`; further keys are ignored.

    Raises:
        ConfigError: missing, empty, not text, or a line that does not fit; names line and key.
    """
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; name a file of JSON lines") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; name a file of JSON lines"
        ) from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; JSON lines are expected") from None
    lines = enumerate(text.split("\n"), start=1)
    records = [_record(f"{path}, line {n}", line) for n, line in lines if line.strip()]
    if not records:
        raise ConfigError(f"{path}: holds no prompts; JSON lines are expected")
    return records


def _record(where: str, line: str) -> Record:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON: {error}; one object per line") from None
    if not isinstance(fields, dict):
        raise ConfigError(f'{where}: is not an object; write {{"prompt": ..., "answer": ...}}')
    for key in Record._fields:
        if key not in fields:
            raise ConfigError(f"{where}: has no {key}; every line needs prompt and answer")
    prompt, answer = fields["prompt"], fields["answer"]
    if not (isinstance(prompt, str) or _is_chat(prompt)):
        raise ConfigError(f"{where}: prompt = {prompt!r}: must be text, or messages of "
                          "role and content")  # fmt: skip
    if not isinstance(answer, str):
        raise ConfigError(f'{where}: answer = {answer!r}: must be text; write "{answer}"')
    return Record(prompt, answer)


def _is_chat(prompt: object) -> bool:
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(isinstance(m, dict) and isinstance(m.get("role"), str)
                and isinstance(m.get("content"), str) for m in prompt)
    )  # fmt: skip
