"""The tokenizer's chat template: conversations to text, or file and line of what is wrong."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.errors import ConfigError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

_FILE = "chat_template.jinja"
_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_ALWAYS_THERE = frozenset({
    "add_generation_prompt", "documents", "messages", "raise_exception", "strftime_now", "tools"
})  # fmt: skip


class Template:
    """Renders conversations."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Takes the template that the tokenizer came with.

        Raises:
            ConfigError: it has several, and none is the default.
        """
        self._tokenizer = tokenizer
        folder = Path(tokenizer.name_or_path)
        is_own = (folder / _FILE).is_file()
        self._file = folder / (_FILE if is_own else "tokenizer_config.json")
        try:
            self.text = str(tokenizer.get_chat_template())
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self._file}: the chat template cannot be used: {first_line(error)}; have one, "
                "as text"
            ) from None

    @cached_property
    def names(self) -> frozenset[str]:
        """Names that the template asks for; it ignores everything else that it is given.

        Raises:
            ConfigError: it is no valid template.
        """
        from jinja2 import Environment, TemplateSyntaxError, meta

        environment = Environment(extensions=["jinja2.ext.loopcontrols"])
        try:
            tree = environment.parse(_MARKS.sub("", self.text))
            return frozenset(meta.find_undeclared_variables(tree))
        except TemplateSyntaxError as error:
            raise self._failed("", error) from None

    def check_args(self, where: str, args: Mapping[str, Any]) -> None:
        """Refuses arguments that the template would ignore.

        Args:
            where: what to call them in messages.
            args: by name.

        Raises:
            ConfigError: naming the first of them.
        """
        ignored = sorted(args.keys() - self.names) if args else []
        if ignored:
            own = sorted(n for n in self.names - _ALWAYS_THERE if not n.endswith("_token"))
            takes = f"it takes {', '.join(own)}" if own else "it takes none"
            raise ConfigError(
                f"{where}.{ignored[0]}: the chat template in {self._file} ignores it; {takes}; "
                "remove it, or use another template"
            )

    def render(
        self,
        where: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        *,
        add_generation_prompt: bool = False,
        args: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            where: what to call it in messages.
            messages: with a role each.
            tools: as the template takes them.
            add_generation_prompt: end with the beginning of the assistant's turn.
            args: further ones of the template.

        Raises:
            ConfigError: the template refuses the conversation, or fails.
        """
        options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        return str(self.apply(where, messages, tools, **(args or {}), **options))

    def apply(
        self,
        where: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        **options: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Applies the tokenizer's template with these options; raises as `render`."""
        from jinja2 import TemplateError

        # A template is a program of somebody else's, and can fail as one.
        failures = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError,
                    TypeError, ValueError)  # fmt: skip
        try:
            return self._tokenizer.apply_chat_template(list(messages), tools=tools, **options)
        except failures as error:
            raise self._failed(where, error) from None

    def _failed(self, where: str, error: Exception) -> ConfigError:
        from jinja2 import TemplateError, TemplateSyntaxError

        said = first_line(error)
        if isinstance(error, TemplateSyntaxError):
            return ConfigError(
                f"{self._file}, line {error.lineno}: the chat template is no valid one: {said}; "
                "correct it"
            )
        line = _line_of(error)
        at = f"{self._file}, line {line}" if line else str(self._file)
        if type(error) is TemplateError:  # its raise_exception()
            return ConfigError(
                f"{where}: the chat template refuses it: {said} ({at}); correct the roles or "
                "their order"
            )
        return ConfigError(
            f"{at}: the chat template fails: {type(error).__name__}: {said}; correct it (it was to "
            f"render {where})"
        )


def _line_of(error: Exception) -> int | None:
    """The innermost line of the template that an error came through."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
