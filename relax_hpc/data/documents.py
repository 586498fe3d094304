"""Encodes documents of supervised fine-tuning with loss masks, in an order fixed by the seed."""

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from relax_hpc.config.run import SftConfig
from relax_hpc.data.order import Epochs
from relax_hpc.data.rows import DataRow, DataRows, is_list_of_objects, open_rows
from relax_hpc.data.template import Literals, Message, Template
from relax_hpc.data.tokenizer import refuse_unknown
from relax_hpc.errors import ConfigError, show
from relax_hpc.schema import NO_SPANS, Array, Medium

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Masked(NamedTuple):
    token_ids: list[int]
    loss_mask: list[int]
    """1 on trained tokens."""


class ChatTemplate:
    """Encodes conversations with the tokenizer's template, and finds the assistant's tokens.

    Where a template marks the assistant's part ({% generation %}), the marks are the mask.
    Otherwise it is found turn by turn: from the generation prompt up to and including the
    end-of-turn token. The pieces are tokenized separately, as in sampling, where the prompt is
    tokenized before there is an answer. Template tokens inside a message are text.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._end_of_turn = tokenizer.eos_token
        self._template = Template(tokenizer)
        self._literals = Literals(tokenizer, self._template)
        self._has_marks = bool(_GENERATION.search(self._template.text))

    def encode(
        self,
        where: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        *,
        last_only: bool = False,
    ) -> Masked:
        """Encodes a conversation.

        Args:
            where: its name in messages.
            messages: each with a role; an assistant's turn is not the first.
            tools: as the template takes them.
            last_only: train only on the assistant's last turn.

        Raises:
            ConfigError: the template refuses the conversation, leaves a message out, or renders it
                so that the assistant's part cannot be found.
        """
        hide = self._literals.hide
        chat = _Chat(self._template, where, hide([*messages]), hide(tools))
        text = chat.render()
        for number, message in enumerate(chat.messages, start=1):
            if message["role"] in ("system", "user") and message["content"].strip() not in text:
                raise ConfigError(
                    f"{where}: the chat template leaves out message {number} "
                    f"(role {message['role']}); remove it, or use another template"
                )
        if self._has_marks:
            masked = self._mark(chat, text)
        else:
            masked = self._tokens(self._pieces(chat, text))
        return _last_run(masked) if last_only else masked

    def _tokens(self, pieces: Sequence[tuple[str, bool]]) -> Masked:
        token_ids: list[int] = []
        mask: list[int] = []
        for piece, is_trained in pieces:
            ids = self._literals.encode(piece)
            token_ids += ids
            mask += [int(is_trained)] * len(ids)
        return Masked(token_ids, mask)

    def _mark(self, chat: "_Chat", text: str) -> Masked:
        encoded = self._template.apply(
            chat.where,
            chat.messages,
            chat.tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )
        mask = [int(flag) for flag in encoded["assistant_masks"]]
        if not any(mask):
            raise ConfigError(
                f"{chat.where}: the chat template marks nothing of it by generation; correct the "
                "template, or remove its marks"
            )
        if not self._literals.are_in(text):
            return Masked(list(encoded["input_ids"]), mask)
        changes = [n for n in range(1, len(mask)) if mask[n] != mask[n - 1]]
        begins = [0, *(int(encoded["offset_mapping"][n][0]) for n in changes)]
        pieces = [
            (text[begin:end], bool(mask[first]))
            for first, begin, end in zip([0, *changes], begins, [*begins[1:], None], strict=True)
        ]
        return self._tokens(pieces)

    def _pieces(self, chat: "_Chat", text: str) -> list[tuple[str, bool]]:
        """Cuts `text` where the assistant's turns begin and end."""
        turns = [n for n, message in enumerate(chat.messages) if message["role"] == "assistant"]
        pieces, done = [], 0
        starts = self._starts(chat, text, turns)
        for place, turn in enumerate(turns):
            if starts:
                start = starts[place]
            else:
                before = chat.render(turn, add_generation_prompt=True)
                start = len(before) if text.startswith(before) else -1
            if start < done:
                raise chat.cannot_tell(turn)
            end = self._end(chat, text, start, turn)
            pieces += [(text[done:start], False), (text[start:end], True)]
            done = end
        return [*pieces, (text[done:], False)]

    def _starts(self, chat: "_Chat", text: str, turns: Sequence[int]) -> list[int]:
        """Returns where in `text` each turn begins; empty if the header cannot tell.

        The header is the generation prompt, or as many of its lines as precede every turn: some
        templates begin a thought in it, which may be missing in earlier turns. A special token in
        it proves that it is the template's own, since messages have none.
        """
        bare = chat.render(turns[0])
        asked = chat.render(turns[0], add_generation_prompt=True)
        if not asked.startswith(bare):
            return []
        prompt = asked[len(bare) :]
        own = self._literals.last_token_end(prompt)
        lines = accumulate(map(len, prompt.splitlines(keepends=True)))
        for length in sorted({own, *lines}, reverse=True):
            found = [m.start() for m in re.finditer(re.escape(prompt[:length]), text)]
            if length >= own > 0 and len(found) == len(turns):
                return [
                    place + (len(prompt) if text.startswith(prompt, place) else length)
                    for place in found
                ]
        return []

    def _end(self, chat: "_Chat", text: str, start: int, turn: int) -> int:
        """Returns where in `text` a turn ends that begins at `start`.

        Text of the template after the end-of-turn token, such as a line break, is never sampled.
        Some templates (Qwen3's) render a turn differently once others follow: then only that token
        can tell.
        """
        upto, marker = chat.render(turn + 1), self._end_of_turn
        found = text.find(marker, start) if marker else -1
        stop = found + len(marker or "") if found >= 0 else None
        if text.startswith(upto):
            within = stop is not None and stop <= len(upto)
            return stop if stop is not None and within else start + len(upto[start:].rstrip())
        if stop is None:
            raise chat.cannot_tell(turn)
        return stop


class _Chat(NamedTuple):
    """A conversation, in which the texts of special tokens are hidden."""

    template: Template
    where: str
    messages: list[Message]
    tools: list[Message] | None

    def render(self, count: int | None = None, *, add_generation_prompt: bool = False) -> str:
        """Renders the first `count` messages, or all."""
        return self.template.render(
            self.where,
            self.messages[:count],
            self.tools,
            add_generation_prompt=add_generation_prompt,
        )

    def cannot_tell(self, turn: int) -> ConfigError:
        return ConfigError(
            f"{self.where}: with this chat template it cannot be told which tokens of message "
            f"{turn + 1} the assistant wrote; mark them in the template by {{% generation %}}, or "
            "write a document of prompt and completion for each turn"
        )


def _last_run(masked: Masked) -> Masked:
    """Keeps only the last run of trained tokens."""
    mask = masked.loss_mask
    last = len(mask) - 1 - mask[::-1].index(1) if any(mask) else -1
    first = next((n + 1 for n in range(last, -1, -1) if not mask[n]), 0)
    return Masked(masked.token_ids, [int(first <= n <= last) for n in range(len(mask))])


_ROLES = ("system", "user", "assistant", "tool")
_SHAPES = '{"messages": [...]} or {"prompt": ..., "completion": ...}'


class Document(NamedTuple):
    """One line of a file, tokenized."""

    line: int
    """0-based, blank lines not counted."""
    token_ids: npt.NDArray[np.int32]
    """[tokens]"""
    loss_mask: npt.NDArray[np.uint8]
    """[tokens], 1 on trained ones."""
    is_truncated: bool
    # As a row that nobody sampled.
    sibling: int = 0
    version_runs: npt.NDArray[np.int32] = np.zeros((0, 2), np.int32)
    columns: Mapping[str, Array] = {}
    routed_experts: None = None
    media: tuple[Medium, ...] = ()
    media_spans: npt.NDArray[np.int32] = NO_SPANS

    @property
    def guid(self) -> int:
        """Number that names the document in messages and columns."""
        return self.line

    @property
    def num_trained(self) -> int:
        """Number of trained tokens; nothing predicts the first."""
        return int(self.loss_mask[1:].sum())


class DocumentBatch(NamedTuple):
    documents: list[Document]
    end: int
    """Ordinal of the first document of the next batch."""


class Documents:
    """`documents[ordinal]`: every document once per epoch, in an order fixed by the seed.

    An ordinal always names the same document, also after a restart.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: "PreTrainedTokenizerBase",
        sft: SftConfig,
        rows: DataRows | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Opens the file; documents are checked and tokenized on access.

        Args:
            rows: of the file, if already open.
            vocab_size: of the model, if known, to refuse tokens beyond it.

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
        """Returns the document of `ordinal` >= 0, which may lie in any epoch."""
        return self.document(self.index_of(ordinal))

    def index_of(self, ordinal: int) -> int:
        return self._order[ordinal]

    def document(self, index: int) -> Document:
        """Returns the document on line `index` of the file.

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

    def batch(self, start: int) -> DocumentBatch:
        """Returns the documents of a step, from ordinal `start` on."""
        taken: dict[int, Document] = {}

        def length(ordinal: int) -> int:
            taken[ordinal] = self[ordinal]
            return len(taken[ordinal].token_ids)

        end = batch_end(self._sft, len(self), start, length)
        documents = [taken.get(n) or self[n] for n in range(start, end)]
        return DocumentBatch(documents, end)

    def _encode(self, row: DataRow) -> Masked:
        where, text = row.where, read_text(row, chat_template=self._sft.chat_template)
        if isinstance(text, ChatDocument):
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


class ChatDocument(NamedTuple):
    messages: list[Message]
    tools: list[Message] | None = None
    last_only: bool = False
    """Train only on the last turn."""

    @property
    def size(self) -> int:
        return sum(len(message["content"]) for message in self.messages)


class Pair(NamedTuple):
    """Plain text."""

    prompt: str
    completion: str

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.completion)


def read_text(row: DataRow, *, chat_template: bool) -> ChatDocument | Pair:
    """Reads a row, before it is tokenized.

    Args:
        chat_template: as in the job.

    Raises:
        ConfigError: it is no document; names what is missing or wrong.
    """
    where, fields = row.where, row.fields
    tools = fields.get("tools")
    if not (tools is None or is_list_of_objects(tools)):
        raise ConfigError(f"{where}: tools = {show(tools)}: must be a list of objects")
    if "messages" in fields:
        return ChatDocument(check_messages(where, fields["messages"]), tools)
    prompt, completion = _pair(where, fields)
    if chat_template:
        turn = {"role": "assistant", "content": completion}
        asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        return ChatDocument(check_messages(where, [*asked, turn]), tools, last_only=True)
    if not isinstance(prompt, str):
        raise ConfigError(f"{where}: prompt is messages; set sft.chat_template = true")
    return Pair(prompt, completion)


def check_messages(where: str, messages: object) -> list[Message]:
    """Checks a conversation for training, in the form that templates take.

    Raises:
        ConfigError: it is none; names the message.
    """
    if not isinstance(messages, list) or not messages:
        raise ConfigError(
            f"{where}: messages = {show(messages)}: must be a list of role and content"
        )
    checked = [_check_message(f"{where}: message {n}", m) for n, m in enumerate(messages, start=1)]
    if checked[0]["role"] == "assistant":
        raise ConfigError(f"{where}: message 1 is the assistant's; begin with system or user")
    if all(message["role"] != "assistant" for message in checked):
        raise ConfigError(f"{where}: has no assistant turn to train on; add one, or remove it")
    return checked


def _check_message(where: str, message: object) -> Message:
    if not isinstance(message, dict):
        raise ConfigError(f"{where} is not an object; write role and content")
    if message.get("role") not in _ROLES:
        raise ConfigError(
            f"{where} has role = {show(message.get('role'))}; roles are {', '.join(_ROLES)}"
        )
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise ConfigError(f"{where} has content = {show(content)}; it must be text")
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
        raise ConfigError(f"{where}: prompt = {show(prompt)}: must be text, or messages")
    if not isinstance(completion, str):
        raise ConfigError(f"{where}: {key} = {show(completion)}: must be text")
    return prompt, completion


def batch_end(sft: SftConfig, num_documents: int, start: int, length: Callable[[int], int]) -> int:
    """Returns the ordinal after the batch that begins at `start`; `start` if no documents are left.

    Args:
        length: ordinal -> tokens of the document; called in order.
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
    """Counts the steps of the run: `sft.num_steps`, or fewer if the epochs end before.

    Args:
        lengths: tokens per document, in the order of the file; only for `sft.tokens_per_step`.
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
