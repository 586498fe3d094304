"""Documents of supervised fine-tuning, and the map from an ordinal in the run to a document."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from relax_hpc.config.sft import SftConfig
from relax_hpc.errors import ConfigError, shown
from relax_hpc.prompts.chat import ChatTemplate, Masked
from relax_hpc.prompts.files import open_rows
from relax_hpc.prompts.order import Epochs
from relax_hpc.prompts.rows import Row, Rows, is_list_of_objects
from relax_hpc.prompts.template import Message
from relax_hpc.prompts.tokenizer import refuse_unknown
from relax_hpc.schema import NO_SPANS, Array, Medium

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROLES = ("system", "user", "assistant", "tool")
_SHAPES = '{"messages": [...]} or {"prompt": ..., "completion": ...}'


class Document(NamedTuple):
    """One line of a file as the trainer takes it."""

    line: int
    """0-based, blank lines not counted."""
    token_ids: npt.NDArray[np.int32]
    """[tokens]"""
    loss_mask: npt.NDArray[np.uint8]
    """[tokens], 1 on those that are trained on."""
    is_truncated: bool

    @property
    def guid(self) -> int:
        """Number by which messages and columns name the document."""
        return self.line

    @property
    def sibling(self) -> int:
        return 0

    @property
    def version_runs(self) -> npt.NDArray[np.int32]:
        """[0, 2]: nobody sampled it."""
        return np.zeros((0, 2), np.int32)

    @property
    def columns(self) -> Mapping[str, Array]:
        return {}

    @property
    def routed_experts(self) -> None:
        """No engine sampled it."""

    @property
    def media(self) -> tuple[Medium, ...]:
        return ()

    @property
    def media_spans(self) -> npt.NDArray[np.int32]:
        return NO_SPANS

    @property
    def num_trained(self) -> int:
        """Tokens that are trained on; nothing predicts the first."""
        return int(self.loss_mask[1:].sum())


class Batch(NamedTuple):
    """The documents that a step trains on."""

    documents: list[Document]
    end: int
    """Ordinal of the document that the next batch begins with."""


class Documents:
    """`documents[ordinal]`: every document once per epoch, in an order that the seed decides.

    Whoever knows an ordinal gets the same document for it, after whichever restart.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: "PreTrainedTokenizerBase",
        sft: SftConfig,
        rows: Rows | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Opens the file; documents are checked and tokenized when they are asked for.

        Args:
            rows: of the file, if it was opened before.
            vocab_size: of the model, where that is known: it has no token beyond.

        Raises:
            ConfigError: the file cannot be used.
        """
        self._path, self._tokenizer, self._sft = path, tokenizer, sft
        self._rows = rows or open_rows(path)
        self._vocab_size = vocab_size
        self._chat = ChatTemplate(tokenizer) if tokenizer.chat_template else None
        self._order = Epochs(self._rows.blocks, sft.shuffle_seed)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, ordinal: int) -> Document:
        """The document of `ordinal` >= 0, which may be any number of epochs on."""
        return self.document(self.index_of(ordinal))

    def index_of(self, ordinal: int) -> int:
        return self._order[ordinal]

    def document(self, index: int) -> Document:
        """The document on line `index` of the file.

        Raises:
            ConfigError: it cannot be used, or is longer than sft.max_tokens and may not be cut.
        """
        row = self._rows[index]
        token_ids, mask = self._encode(row)
        if self._vocab_size is not None:
            refuse_unknown(row.where, token_ids, self._vocab_size, self._tokenizer)
        limit, is_long = self._sft.max_tokens, len(token_ids) > self._sft.max_tokens
        if is_long and self._sft.too_long == "error":
            raise ConfigError(
                f"{row.where}: has {len(token_ids)} tokens, sft.max_tokens = {limit}; raise it, "
                'set sft.too_long = "truncate", or remove the line'
            )
        document = Document(
            index,
            np.array(token_ids[:limit], np.int32),
            np.array(mask[:limit], np.uint8),
            is_long,
        )
        if not document.num_trained and not is_long:
            raise ConfigError(
                f"{row.where}: has no token to train on; write a completion, or remove the line"
            )
        return document

    def batch(self, start: int) -> Batch:
        """The documents of a step, from ordinal `start` on."""
        taken: dict[int, Document] = {}

        def length(ordinal: int) -> int:
            taken[ordinal] = self[ordinal]
            return len(taken[ordinal].token_ids)

        end = batch_end(self._sft, len(self), start, length)
        documents = [taken.get(n) or self[n] for n in range(start, end)]
        return Batch(documents, end)

    def _encode(self, row: Row) -> Masked:
        where, text = row.where, read_text(row, chat_template=self._sft.chat_template)
        if isinstance(text, Conversation):
            template = self._template(where)
            return template.encode(where, text.messages, text.tools, last_only=text.last_only)
        given = self._tokenizer.encode(text.prompt)
        wanted = [*self._tokenizer.encode(text.completion, add_special_tokens=False), self._end]
        return Masked(given + wanted, [0] * len(given) + [1] * len(wanted))

    @property
    def _end(self) -> int:
        end = self._tokenizer.eos_token_id
        if end is None:
            raise ConfigError(
                f"{self._path}: the tokenizer has no end-of-sequence token to put after a "
                "completion; add eos_token to its tokenizer_config.json"
            )
        return int(end)

    def _template(self, where: str) -> ChatTemplate:
        if self._chat is None:
            raise ConfigError(
                f"{where}: is rendered with a chat template and the tokenizer has none; set "
                "sft.chat_template = false and write prompt and completion, or add a "
                "chat_template.jinja to the model"
            )
        return self._chat


class Conversation(NamedTuple):
    """Messages for the chat template."""

    messages: list[Message]
    tools: list[Message] | None = None
    last_only: bool = False
    """Only the last turn is trained on."""

    @property
    def size(self) -> int:
        """Characters."""
        return sum(len(message["content"]) for message in self.messages)


class Pair(NamedTuple):
    """Plain text."""

    prompt: str
    completion: str

    @property
    def size(self) -> int:
        """Characters."""
        return len(self.prompt) + len(self.completion)


def read_text(row: Row, *, chat_template: bool) -> Conversation | Pair:
    """Reads a row, before it is tokenized.

    Args:
        row: of a file of documents.
        chat_template: as in the job.

    Raises:
        ConfigError: it is no document; names what is missing or wrong.
    """
    where, fields = row.where, row.fields
    tools = fields.get("tools")
    if not (tools is None or is_list_of_objects(tools)):
        raise ConfigError(f"{where}: tools = {shown(tools)}: must be a list of objects")
    if "messages" in fields:
        return Conversation(check_messages(where, fields["messages"]), tools)
    prompt, completion = _pair(where, fields)
    if chat_template:
        turn = {"role": "assistant", "content": completion}
        asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        return Conversation(check_messages(where, [*asked, turn]), tools, last_only=True)
    if not isinstance(prompt, str):
        raise ConfigError(f"{where}: prompt is messages; set sft.chat_template = true")
    return Pair(prompt, completion)


def check_messages(where: str, messages: object) -> list[Message]:
    """A conversation that can be trained on, as templates take it.

    Raises:
        ConfigError: it is none; names the message.
    """
    if not isinstance(messages, list) or not messages:
        raise ConfigError(
            f"{where}: messages = {shown(messages)}: must be a list of role and content"
        )
    checked = [_checked(f"{where}: message {n}", m) for n, m in enumerate(messages, start=1)]
    if checked[0]["role"] == "assistant":
        raise ConfigError(f"{where}: message 1 is the assistant's; begin with system or user")
    if all(message["role"] != "assistant" for message in checked):
        raise ConfigError(f"{where}: has no assistant turn to train on; add one, or remove it")
    return checked


def _checked(where: str, message: object) -> Message:
    if not isinstance(message, dict):
        raise ConfigError(f"{where} is not an object; write role and content")
    if message.get("role") not in _ROLES:
        raise ConfigError(
            f"{where} has role = {shown(message.get('role'))}; roles are {', '.join(_ROLES)}"
        )
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise ConfigError(f"{where} has content = {shown(content)}; it must be text")
    return message | {"content": content}


def _pair(where: str, fields: dict[str, Any]) -> tuple[str | list[Message], str]:
    if "prompt" not in fields:
        raise ConfigError(f"{where}: has neither messages nor prompt; write {_SHAPES}")
    prompt = fields["prompt"]
    key = "completion" if "completion" in fields or "answer" not in fields else "answer"
    if key not in fields:
        raise ConfigError(f"{where}: has no completion; write {_SHAPES}")
    completion = fields[key]
    if not isinstance(prompt, str | list):
        raise ConfigError(f"{where}: prompt = {shown(prompt)}: must be text, or messages")
    if not isinstance(completion, str):
        raise ConfigError(f"{where}: {key} = {shown(completion)}: must be text")
    return prompt, completion


def batch_end(sft: SftConfig, num_documents: int, start: int, length: Callable[[int], int]) -> int:
    """Ordinal after the last document of the batch that begins at `start`; `start` at the end.

    Args:
        length: ordinal -> tokens of the document; asked in order.
    """
    last = sft.epochs * num_documents if sft.epochs else math.inf
    tokens, ordinal = 0, start
    while ordinal < last and (sft.batch_size is None or ordinal - start < sft.batch_size):
        if sft.tokens_per_step is not None:
            tokens += length(ordinal)
            if tokens > sft.tokens_per_step and ordinal > start:
                break
        ordinal += 1
    return ordinal


def count_steps(sft: SftConfig, documents: Documents, lengths: Sequence[int]) -> int:
    """Steps of the run: `sft.num_steps`, or fewer if the epochs end before.

    Args:
        lengths: tokens per document, in the order of the file; only `sft.tokens_per_step` asks.
    """
    most = sft.num_steps or sys.maxsize
    if sft.epochs is None:
        return most
    steps = start = 0
    while steps < most:
        end = batch_end(sft, len(documents), start, lambda n: lengths[documents.index_of(n)])
        if end == start:
            break
        steps, start = steps + 1, end
    return steps
