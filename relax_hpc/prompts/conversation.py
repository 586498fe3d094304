"""Messages -> token ids: of a whole conversation, or of what comes after tokens that stay."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.models.config_json import ends_of
from relax_hpc.prompts.stop_texts import StopTexts
from relax_hpc.prompts.template import Message, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLY = "b1d5f0c49ae34c53"
"""Stands for a reply whose tokens are known, while a template renders what is around it."""
_OPENS, _ENDS = "<think>", "</think>"
_LONGEST_OPENING = 16
"""Tokens, at most, of `<think>` and the white space behind it, where every character is one."""


class Conversation:
    """The way in which a run turns messages into tokens."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        chat_template: bool,
        assistant_prefix: str = "",
    ) -> None:
        """Takes the tokenizer's template; without one, contents are put one after the other.

        `assistant_prefix` is the beginning of every answer, which the policy goes on with.

        Raises:
            ConfigError: the tokenizer's template cannot be used.
        """
        self._tokenizer = tokenizer
        self._template = Template(tokenizer) if chat_template else None
        self._prefix = assistant_prefix
        self._ends = ends_of(Path(tokenizer.name_or_path)) if chat_template else frozenset[int]()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def opens_thought(self, token_ids: Sequence[int]) -> bool:
        """Whether a response to these tokens begins inside a thought.

        The last tag of the assistant's prefix decides; where it has none, whether the template ends
        with `<think>`. What messages say of the tags, further up, opens no thought; nor does
        anything where the text of a response does not show that one ends.
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
        """Whether a tag is a special token, of which text of a response shows nothing."""
        token_ids = self.plain(tag)
        return len(token_ids) == 1 and not self.decode(token_ids)

    def stop(self, texts: Sequence[str]) -> StopTexts | None:
        """Returns what tells the end of a response that holds one of the texts; None of none."""

        def decode(token_ids: Sequence[int]) -> str:
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

        return StopTexts(decode, texts) if texts else None

    def reads(self, name: str) -> bool:
        """Whether the template has a use for a field of messages, or an argument, of this name."""
        return self._template is not None and name in self._template.text

    def plain(self, text: str) -> list[int]:
        """Token ids of a text as it is; special tokens in it are what they say."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def check_args(self, where: str, args: Mapping[str, Any]) -> None:
        """Refuses arguments that the template would ignore; see `Template.check_args`."""
        if self._template:
            self._template.check_args(where, args)

    def text(
        self,
        where: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation up to where an answer begins; raises as `encode`."""
        if self._template is None:
            return "".join(message["content"] for message in messages)
        args = template_args or {}
        self._template.check_args(f"{where}: template_args", args)
        return self._template.render(where, messages, tools, add_generation_prompt=True, args=args)

    def asked(
        self,
        where: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that `encode` makes tokens of; raises as it."""
        return self.text(where, messages, tools, template_args) + self._prefix

    def encode(
        self,
        where: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation that the policy is to go on with.

        Args:
            where: what to call it in messages.
            messages: with a role each.
            tools: as the template takes them.
            template_args: further arguments of the template.

        Raises:
            ConfigError: the template refuses it, fails, or ignores an argument.
        """
        text = self.asked(where, messages, tools, template_args)
        # The template writes the special tokens itself.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=not self._template)
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
        """The text of what comes after a reply, up to where the policy is to go on.

        The tokens of the reply and before it stay what they are: only what the template writes
        after a reply is tokenized. A reply that was cut off gets its end of turn; one that ended on
        another end of the model's that the template knows (Llama's <|eom_id|>) gets no second.

        Args:
            where: as in `encode`.
            messages: the whole conversation.
            num_known: messages whose tokens are known; the last of them is the reply.
            token_ids: of those, the reply as it was sampled.
            tools: as in `encode`.
            template_args: as in `encode`.

        Returns:
            None where the template does not render the reply, so there is no such place.
        """
        new = messages[num_known:]
        if self._template is None:
            rest = "".join(message["content"] for message in new)
        else:
            reply = {"role": "assistant", "content": _REPLY}
            around = [*messages[: num_known - 1], reply, *new]
            text = self.text(where, around, tools, template_args)
            _, found, rest = text.rpartition(_REPLY)
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
        """Whether a reply ends on a special token, as one that was not cut off does."""
        return bool(self._end_of_turn(token_ids))

    def _end_of_turn(self, token_ids: Sequence[int]) -> str:
        """Text of the special token that a reply ends on, which need not be the EOS; "" of none."""
        last = token_ids[-1:]
        if not last or self.decode(last):
            return ""
        return str(self._tokenizer.decode(last, skip_special_tokens=False))
