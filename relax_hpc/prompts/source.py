"""Prompt files, and the map from a prompt's ordinal in the run to the prompt."""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from relax_hpc.errors import ConfigError, shown
from relax_hpc.prompts import rows
from relax_hpc.prompts.conversation import Conversation, as_messages
from relax_hpc.prompts.template import Message
from relax_hpc.schema import Medium

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Record(NamedTuple):
    """One line of a prompt file."""

    prompt: str | list[Message]
    answer: str
    tools: list[Message] | None = None
    """Tools in the form that chat templates take."""
    source: str = ""
    """Name of the data set that it is from, of several."""
    metadata: Mapping[str, Any] = {}
    """The further keys."""

    @property
    def size(self) -> int:
        """Characters of the prompt."""
        if isinstance(self.prompt, str):
            return len(self.prompt)
        return sum(len(message["content"]) for message in self.prompt)


class Records:
    """A prompt file: JSON lines with `prompt` and `answer`, and maybe `tools` and `source`.

    Further keys are the prompt's metadata.

    Raises:
        ConfigError: missing, empty, not text, or a line that does not fit; names line and key.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows = rows.JsonLines(path, "name a file of JSON lines")
        if not len(self._rows):
            raise ConfigError(f"{path}: holds no prompts; JSON lines are expected")
        self._records = [_record(self._rows[index]) for index in range(len(self._rows))]

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        return self._records[index]

    def where(self, index: int) -> str:
        """File and line, for messages."""
        return self._rows.where(index)

    def check_answers(self, can_match: Callable[[str], bool], remedy: str) -> None:
        """Refuses answers that no response could ever have.

        Args:
            can_match: of an answer.
            remedy: what an answer has to be.

        Raises:
            ConfigError: naming the first of them, and how many there are.
        """
        wrong = [n for n, record in enumerate(self._records) if not can_match(record.answer)]
        if wrong:
            count = f"{len(wrong):,} of {len(self):,} answers are so"
            raise ConfigError(
                f"{self.where(wrong[0])}: answer = {shown(self[wrong[0]].answer)}: can never be "
                f"matched; {remedy}, or remove the line ({count if wrong[1:] else 'the only one'})"
            )

    def sample(self, count: int) -> list[int]:
        """Chooses as `rows.sample`."""
        return rows.sample([record.size for record in self._records], count)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as an engine and an environment take it."""

    index: int
    """Line of the file, 0-based, blank lines not counted."""
    token_ids: list[int]
    answer: str
    messages: list[Message] = field(default_factory=list)
    """Messages that `token_ids` were made of; text is a message of the user's."""
    tools: list[Message] | None = None
    media: tuple[Medium, ...] = ()
    """Images and sounds of the messages, in order."""
    source: str = ""
    """Name of the data set that it is from, of several."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    where: str = "a prompt"
    """File and line, for messages."""


class PromptSource:
    """`source[ordinal]`: every prompt once per epoch, in an order that only the seed decides.

    There is no cursor to save: whoever knows an ordinal, in whichever process and after whichever
    restart, gets the same prompt for it.
    """

    def __init__(
        self,
        records: Path | Records,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        shuffle_seed: int | None,
        chat_template: bool,
        max_prompt_tokens: int,
    ) -> None:
        """Reads and checks the file, if that was not done; prompts are tokenized when asked for.

        Raises:
            ConfigError: the file, or one of its lines, cannot be used.
        """
        self.tokenizer = tokenizer
        self.records = Records(records) if isinstance(records, Path) else records
        self._chat_template = chat_template
        self._conversation = Conversation(tokenizer, chat_template=chat_template)
        self._shuffle_seed = shuffle_seed
        self._max_prompt_tokens = max_prompt_tokens
        self._order = lru_cache(maxsize=2)(self._draw_order)
        self._tokenized: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self.records)

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
        record = self.records[index]
        return Prompt(
            index,
            self._tokenized[index],
            record.answer,
            messages=as_messages(record.prompt),
            tools=record.tools,
            source=record.source,
            metadata=record.metadata,
            where=self.records.where(index),
        )

    def longest(self, indices: Iterable[int]) -> int:
        """Tokenizes the prompts on these lines, and remembers none.

        Returns:
            Tokens of the longest; 0 without lines.

        Raises:
            ConfigError: one is too long, or the chat template fails on it.
        """
        return max((len(self._tokenize(index)) for index in indices), default=0)

    def _draw_order(self, epoch: int) -> list[int]:
        return epoch_order(self._shuffle_seed, epoch, len(self))

    def _tokenize(self, index: int) -> list[int]:
        record, where = self.records[index], self.records.where(index)
        if not self._chat_template and not isinstance(record.prompt, str):
            raise ConfigError(f"{where}: is chat messages; set prompts.chat_template = true")
        ids = self._conversation.encode(where, as_messages(record.prompt), record.tools)
        if not ids:
            raise ConfigError(f"{where}: the prompt makes no tokens; write another, or remove it")
        if len(ids) > self._max_prompt_tokens:
            raise ConfigError(
                f"{where}: the prompt has {len(ids)} tokens, prompts.max_prompt_tokens = "
                f"{self._max_prompt_tokens}; raise it, or remove the line"
            )
        return ids


def epoch_order(seed: int | None, epoch: int, count: int) -> list[int]:
    """The numbers below `count` in the order of an epoch; without a seed they rise."""
    order = list(range(count))
    if seed is not None:
        # A string seeds through SHA-512: stable across processes, unlike hash().
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def _record(row: rows.Row) -> Record:
    where, fields = row
    for key in ("prompt", "answer"):
        if key not in fields:
            raise ConfigError(f"{where}: has no {key}; every line needs prompt and answer")
    prompt, answer = fields["prompt"], fields["answer"]
    if not (isinstance(prompt, str) or _is_chat(prompt)):
        raise ConfigError(
            f"{where}: prompt = {shown(prompt)}: must be text, or messages of role and content"
        )
    if not isinstance(answer, str):
        quoted = f'write "{answer}"' if isinstance(answer, int | float) else "write it as text"
        raise ConfigError(f"{where}: answer = {shown(answer)}: must be text; {quoted}")
    tools, source = fields.get("tools"), fields.get("source", "")
    if not (tools is None or rows.is_list_of_objects(tools)):
        raise ConfigError(f"{where}: tools = {shown(tools)}: must be a list of objects")
    if not isinstance(source, str):
        raise ConfigError(f"{where}: source = {shown(source)}: must be text")
    metadata = {key: value for key, value in fields.items() if key not in Record._fields}
    record = Record(prompt, answer, tools, source, metadata)
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    if not any(text.strip() for text in texts):
        raise ConfigError(f"{where}: the prompt is empty; write one, or remove the line")
    return record


def _is_chat(prompt: object) -> bool:
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(isinstance(m, dict) and isinstance(m.get("role"), str)
                and isinstance(m.get("content"), str) for m in prompt)
    )  # fmt: skip
