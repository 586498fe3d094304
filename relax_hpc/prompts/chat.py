"""A conversation -> token ids, and which of them the assistant would have to sample."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from relax_hpc.errors import ConfigError
from relax_hpc.prompts.template import Message, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Masked(NamedTuple):
    """Tokens of a document."""

    token_ids: list[int]
    loss_mask: list[int]
    """1 on those that are trained on."""


class ChatTemplate:
    """The tokenizer's template, and its way of telling whose tokens are whose.

    Where a template marks the assistant's part ({% generation %}), the marks are the mask. For
    others it is found turn by turn: what follows the generation prompt, up to and including the
    end-of-turn token. The pieces are tokenized apart, as in sampling, where a prompt is tokens
    before there is an answer.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._template = Template(tokenizer)
        self._has_marks = bool(_GENERATION.search(self._template.text))

    def encode(
        self, where: str, messages: Sequence[Message], tools: Sequence[Message] | None = None
    ) -> Masked:
        """Encodes a conversation.

        Args:
            where: what to call it in messages.
            messages: with a role each; an assistant's turn is not the first.
            tools: as the template takes them.

        Raises:
            ConfigError: the template refuses the conversation, leaves a message out, or renders
                it so that the assistant's part cannot be told.
        """
        text = self._template.render(where, messages, tools)
        for number, message in enumerate(messages, start=1):
            if message["role"] in ("system", "user") and message["content"].strip() not in text:
                raise ConfigError(
                    f"{where}: the chat template leaves out message {number} "
                    f"(role {message['role']}); remove it, or use another template"
                )
        if self._has_marks:
            return self._marked(where, messages, tools)
        token_ids: list[int] = []
        mask: list[int] = []
        for piece, is_trained in self._pieces(where, text, messages, tools):
            ids = self._tokenizer.encode(piece, add_special_tokens=False) if piece else []
            token_ids += ids
            mask += [int(is_trained)] * len(ids)
        return Masked(token_ids, mask)

    def _marked(
        self, where: str, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> Masked:
        encoded = self._template.apply(
            where,
            messages,
            tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        mask = [int(flag) for flag in encoded["assistant_masks"]]
        if not any(mask):
            raise ConfigError(
                f"{where}: the chat template marks nothing of it by generation; correct the "
                "template, or remove its marks"
            )
        return Masked(list(encoded["input_ids"]), mask)

    def _pieces(
        self,
        where: str,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
    ) -> list[tuple[str, bool]]:
        """`text` cut where the assistant's turns begin and end."""
        pieces, done = [], 0
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._template.render(
                where, messages[:turn], tools, add_generation_prompt=True
            )
            start = len(before)
            if start < done or not text.startswith(before):
                raise self._cannot_tell(where, turn)
            end = self._end(where, text, start, messages[: turn + 1], tools)
            pieces += [(text[done:start], False), (text[start:end], True)]
            done = end
        return [*pieces, (text[done:], False)]

    def _end(
        self,
        where: str,
        text: str,
        start: int,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
    ) -> int:
        """Returns where in `text` the last of `messages` ends, which begins at `start`.

        What a template writes after the end-of-turn token, say a line break, nobody samples. Some
        (Qwen3's) render a turn differently once others follow it: then only that token can tell.
        """
        upto = self._template.render(where, messages, tools)
        marker = self._tokenizer.eos_token
        found = text.find(marker, start) if marker else -1
        stop = found + len(marker or "") if found >= 0 else None
        if text.startswith(upto):
            within = stop is not None and stop <= len(upto)
            return stop if stop is not None and within else start + len(upto[start:].rstrip())
        if stop is None:
            raise self._cannot_tell(where, len(messages) - 1)
        return stop

    def _cannot_tell(self, where: str, turn: int) -> ConfigError:
        return ConfigError(
            f"{where}: with this chat template it cannot be told which tokens of message "
            f"{turn + 1} the assistant wrote; mark them in the template by {{% generation %}}"
        )
