"""A conversation -> token ids, and which of them the assistant would have to sample."""

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from relax_hpc.errors import ConfigError
from relax_hpc.prompts.literals import Literals
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
    before there is an answer. Tokens of the template that stand in a message are text.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._template = Template(tokenizer)
        self._literals = Literals(tokenizer, self._template.text)
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
            where: what to call it in messages.
            messages: with a role each; an assistant's turn is not the first.
            tools: as the template takes them.
            last_only: only the last of the assistant's turns is trained on.

        Raises:
            ConfigError: the template refuses the conversation, leaves a message out, or renders
                it so that the assistant's part cannot be told.
        """
        messages, tools = self._literals.hide([*messages]), self._literals.hide(tools)
        text = self._template.render(where, messages, tools)
        for number, message in enumerate(messages, start=1):
            if message["role"] in ("system", "user") and message["content"].strip() not in text:
                raise ConfigError(
                    f"{where}: the chat template leaves out message {number} "
                    f"(role {message['role']}); remove it, or use another template"
                )
        if self._has_marks:
            masked = self._marked(where, text, messages, tools)
        else:
            masked = self._tokens(self._pieces(where, text, messages, tools))
        return _last_run(masked) if last_only else masked

    def _tokens(self, pieces: Sequence[tuple[str, bool]]) -> Masked:
        token_ids: list[int] = []
        mask: list[int] = []
        for piece, is_trained in pieces:
            ids = self._literals.encode(piece)
            token_ids += ids
            mask += [int(is_trained)] * len(ids)
        return Masked(token_ids, mask)

    def _marked(
        self, where: str, text: str, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> Masked:
        encoded = self._template.apply(
            where,
            messages,
            tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )
        mask = [int(flag) for flag in encoded["assistant_masks"]]
        if not any(mask):
            raise ConfigError(
                f"{where}: the chat template marks nothing of it by generation; correct the "
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

    def _pieces(
        self,
        where: str,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
    ) -> list[tuple[str, bool]]:
        """`text` cut where the assistant's turns begin and end."""
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        pieces, done = [], 0
        starts = self._starts(where, text, messages, tools, turns)
        for place, turn in enumerate(turns):
            if starts:
                start = starts[place]
            else:
                before = self._template.render(
                    where, messages[:turn], tools, add_generation_prompt=True
                )
                start = len(before) if text.startswith(before) else -1
            if start < done:
                raise self._cannot_tell(where, turn)
            end = self._end(where, text, start, messages[: turn + 1], tools)
            pieces += [(text[done:start], False), (text[start:end], True)]
            done = end
        return [*pieces, (text[done:], False)]

    def _starts(
        self,
        where: str,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        turns: Sequence[int],
    ) -> list[int]:
        """Returns where in `text` each turn begins; nothing if that cannot be told by its header.

        The header is the generation prompt, or as many of its lines as stand before every turn:
        some templates begin a thought in it, which others than the last turn may not have. It is
        the template's own if it has one of its tokens, since in messages there is none.
        """
        bare = self._template.render(where, messages[: turns[0]], tools)
        asked = self._template.render(
            where, messages[: turns[0]], tools, add_generation_prompt=True
        )
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
            f"{turn + 1} the assistant wrote; mark them in the template by {{% generation %}}, or "
            "write a document of prompt and completion for each turn"
        )


def _last_run(masked: Masked) -> Masked:
    """Returns the same of which only the last stretch of trained tokens is trained on."""
    mask = masked.loss_mask
    last = len(mask) - 1 - mask[::-1].index(1) if any(mask) else -1
    first = next((n + 1 for n in range(last, -1, -1) if not mask[n]), 0)
    return Masked(masked.token_ids, [int(first <= n <= last) for n in range(len(mask))])
