"""Turns messages into token ids, and finds stop texts among tokens."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from relax_hpc.data.template import REPLY, Literals, Message, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPARE = 8
"""Extra tokens decoded before the earliest possible match: some decode to nothing, and the first
decoded ones may look different."""


class StopTexts:
    """Finds the end of a response: the first token that completes one of the texts.

    Args:
        decode: returns the text of tokens, special ones included.
        texts: none empty.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], texts: Sequence[str]) -> None:
        self._decode, self._texts = decode, tuple(texts)
        self._reach = max(len(text.encode()) for text in texts) + _SPARE

    def __call__(self, token_ids: Sequence[int], seen: int) -> int | None:
        """Returns the number of tokens of the response; None while it is not over.

        Args:
            token_ids: of the response so far.
            seen: tokens checked before, without an end.
        """
        first = max(0, seen - self._reach)  # a token that shows is a byte or more
        if not self._is_in(token_ids[first:]):
            return None
        ends = range(seen, len(token_ids) + 1)
        return ends[bisect_left(ends, True, key=lambda end: self._is_in(token_ids[first:end]))]

    def _is_in(self, token_ids: Sequence[int]) -> bool:
        decoded = self._decode(token_ids)
        return any(text in decoded for text in self._texts)


_OPENS, _ENDS = "<think>", "</think>"
_LONGEST_OPENING = 16
"""Most tokens of `<think>` and the white space after it, if every character is one."""


class Conversation:
    """Turns messages into tokens for a run.

    Special tokens written by the template become tokens; in messages, tools and arguments the same
    text stays text, see `Literals`. Without a template it becomes tokens.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        chat_template: bool,
        assistant_prefix: str = "",
    ) -> None:
        """Takes the tokenizer's template; without one, contents are concatenated.

        `assistant_prefix` begins every answer; the policy continues it.

        Raises:
            ConfigError: the tokenizer's template cannot be used.
        """
        self._tokenizer = tokenizer
        self._template = Template(tokenizer) if chat_template else None
        self._literals = Literals(tokenizer, self._template) if self._template else None
        self._prefix = assistant_prefix
        self._ends = self._literals.ends if self._literals else frozenset[int]()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decodes without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def opens_thought(self, token_ids: Sequence[int]) -> bool:
        """Whether a response to these tokens begins inside a thought.

        The last tag of the assistant's prefix decides; without one, whether the template ends with
        `<think>`. Tags inside messages open no thought. Nothing does if `</think>` is invisible in
        decoded responses.
        """
        return self._leaves_open(token_ids) and not self._hides(_ENDS)

    def _leaves_open(self, token_ids: Sequence[int]) -> bool:
        opened, ended = self._prefix.rfind(_OPENS), self._prefix.rfind(_ENDS)
        if opened != ended:
            return opened > ended
        size = _LONGEST_OPENING + len(self._prefix.encode())
        end = str(self._tokenizer.decode(token_ids[-size:], skip_special_tokens=False))
        return end.removesuffix(self._prefix).rstrip().endswith(_OPENS)

    def _hides(self, tag: str) -> bool:
        """Whether a tag is a special token, which decoded responses hide."""
        token_ids = self.plain(tag)
        return len(token_ids) == 1 and not self.decode(token_ids)

    def stop(self, texts: Sequence[str]) -> StopTexts | None:
        def decode(token_ids: Sequence[int]) -> str:
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

        return StopTexts(decode, texts) if texts else None

    def reads(self, name: str) -> bool:
        """Whether the template reads a message field or an argument of this name."""
        return self._template is not None and name in self._template.text

    def plain(self, text: str) -> list[int]:
        """Encodes a text as it is; special tokens in it count as tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def tokens(self, rendered: str) -> list[int]:
        """Encodes the output of `render` or `following`."""
        return self._literals.encode(rendered) if self._literals else self.plain(rendered)

    def check_args(self, where: str, args: Mapping[str, Any]) -> None:
        if self._template:
            self._template.check_args(where, args)

    def text(
        self,
        where: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation up to where an answer begins; raises as `encode`."""
        rendered = self._render(where, self._hidden(messages), tools, template_args)
        return self._literals.show(rendered) if self._literals else rendered

    def _hidden(self, messages: Sequence[Message]) -> list[Message]:
        found: list[Message] = self._literals.hide([*messages]) if self._literals else [*messages]
        return found

    def _render(
        self,
        where: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        template_args: Mapping[str, Any] | None,
    ) -> str:
        """Renders messages in which the texts of special tokens are hidden."""
        if self._template is None or self._literals is None:
            return "".join(message["content"] for message in messages)
        args = template_args or {}
        self._template.check_args(f"{where}: template_args", args)
        tools, args = self._literals.hide(tools), self._literals.hide({**args})
        return self._template.render(where, messages, tools, add_generation_prompt=True, args=args)

    def render(
        self,
        where: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the text that `encode` tokenizes, for `tokens` alone; raises as it."""
        return self._render(where, self._hidden(messages), tools, template_args) + self._prefix

    def encode(
        self,
        where: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Encodes a conversation that the policy continues.

        Args:
            where: its name in messages.
            messages: each with a role.
            tools: as the template takes them.
            template_args: further arguments of the template.

        Raises:
            ConfigError: the template refuses it, fails, or ignores an argument.
        """
        text = self.render(where, messages, tools, template_args)
        if self._template:  # it writes the tokens that begin a text itself
            return self.tokens(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=True)
        return ids

    def following(
        self,
        where: str,
        messages: Sequence[Message],
        num_known: int,
        token_ids: Sequence[int],
        tools: Sequence[Message] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Returns the text after a reply, up to where the policy continues, for `tokens` alone.

        Known tokens stay as they are: only the template's text after the reply is tokenized. A
        reply that was cut off gets its end of turn; one that ended on another end token of the
        template (Llama's <|eom_id|>) gets no second.

        Args:
            messages: the whole conversation.
            num_known: messages whose tokens are known; the last of them is the reply.
            token_ids: of those, the reply as sampled.

        Returns:
            None if the template does not render the reply.
        """
        new = messages[num_known:]
        if self._template is None:
            rest = "".join(message["content"] for message in new)
        else:
            around = self._hidden(messages)
            around[num_known - 1] = {"role": "assistant", "content": REPLY}
            text = self._render(where, around, tools, template_args)
            _, found, rest = text.rpartition(REPLY)
            if not found:
                return None
            if end := self._end_of_turn(token_ids):
                before, found, after = rest.partition(end)
                if found and not before.strip():
                    rest = after
                elif token_ids[-1] in self._ends and end in self._template.text:
                    rest = rest.removeprefix(self._tokenizer.eos_token or "")
        return rest + self._prefix

    def ends_turn(self, token_ids: Sequence[int]) -> bool:
        """Whether a reply ends on a special token, so was not cut off."""
        return bool(self._end_of_turn(token_ids))

    def _end_of_turn(self, token_ids: Sequence[int]) -> str:
        """Text of the special token that ends a reply, maybe not the EOS; "" without one."""
        last = token_ids[-1:]
        if not last or self.decode(last):
            return ""
        return str(self._tokenizer.decode(last, skip_special_tokens=False))
