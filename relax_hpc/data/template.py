"""Renders conversations with the tokenizer's chat template, and keeps user text apart from its
tokens.

    python -m relax_hpc.data.template < TEMPLATE_AND_VALUES_AS_JSON

A template is foreign code: transformers' sandbox denies it access, but limits neither time nor
memory, and cannot always interrupt it. So it is rendered once in a process with limits.
"""

import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.config.hf_config import ends_of
from relax_hpc.errors import ConfigError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

_FILE = "chat_template.jinja"
_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_ALWAYS_THERE = frozenset({
    "add_generation_prompt", "documents", "messages", "raise_exception", "strftime_now", "tools"
})  # fmt: skip

_TRIED = set[str]()
"""Templates already tried out in a limited process."""
MOST_CPU_S = 5
MOST_CHARACTERS = 1 << 26
MOST_BYTES = 1 << 31
_MOST_S = 300
_TOO_MUCH = 3
"""Exit code."""


class Template:
    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Takes the tokenizer's template.

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
        """Names that the template reads; it ignores all other arguments.

        Raises:
            ConfigError: it is no valid template.
        """
        from jinja2 import Environment, TemplateSyntaxError, meta

        environment = Environment(extensions=["jinja2.ext.loopcontrols"])
        try:
            tree = environment.parse(_MARKS.sub("", self.text))
            return frozenset(meta.find_undeclared_variables(tree))
        except (TemplateSyntaxError, RecursionError) as error:
            raise self._make_error("", error) from None

    def check_args(self, where: str, args: Mapping[str, Any]) -> None:
        """Refuses arguments that the template would ignore.

        Args:
            where: their name in messages.

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
        """Renders a conversation.

        Args:
            where: its name in messages.
            messages: each with a role.
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
        failures = (TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError,
                    RecursionError, TypeError, ValueError)  # fmt: skip
        if self.text not in _TRIED:
            self._try_out(where, {"messages": messages, "tools": tools, **options})
        try:
            made = self._tokenizer.apply_chat_template(list(messages), tools=tools, **options)
        except failures as error:
            raise self._make_error(where, error) from None
        if isinstance(made, str) and len(made) > MOST_CHARACTERS:
            raise self._excessive(where, f"makes {len(made):,} characters")
        return made

    def _try_out(self, where: str, values: Mapping[str, Any]) -> None:
        """Renders once in a process with limited time and memory, before rendering here."""
        tokens = {name: str(text) for name, text in self._tokenizer.special_tokens_map.items()}
        if said := fault(_MARKS.sub("", self.text), {**tokens, **values}):
            raise self._excessive(where, said)
        _TRIED.add(self.text)

    def _excessive(self, where: str, said: str) -> ConfigError:
        return ConfigError(
            f"{self._file}: the chat template {said}; correct it (it was to render {where})"
        )

    def _make_error(self, where: str, error: Exception) -> ConfigError:
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
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


_HIDDEN = "c94e07d2a6b8515f"
"""Stands, with a number, for a hidden token text while a template renders."""
REPLY = "b1d5f0c49ae34c53"
"""Stands for a reply whose tokens are known, while a template renders."""
_ROLES = (["user"], ["system", "user"], ["user", "assistant"], ["user", "assistant", "tool"])


class Literals:
    """Keeps user text apart from the template's own tokens.

    Special tokens that the template writes, and begin, end and padding tokens, are tokens only
    where the template writes them; in messages they are text. Other special tokens, such as added
    tags, are tokens in messages, too.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: Template) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        written = "".join([template.text, *_written(template)])
        own = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token} - {None, ""}
        self.ends = ends = ends_of(Path(tokenizer.name_or_path))
        own |= {str(t) for i, t in added.items() if t.special and (i in ends or str(t) in written)}
        own |= {_HIDDEN, REPLY}
        self._texts = sorted(map(str, own), key=lambda text: (-len(text), text))
        self._own = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")
        self._hidden = re.compile(rf"{_HIDDEN}(\d+)x")

    def hide(self, value: Any) -> Any:  # noqa: ANN401
        """Replaces such texts in messages, or any JSON value, by placeholders."""
        if isinstance(value, str):
            return self._own.sub(lambda m: f"{_HIDDEN}{self._texts.index(m[0])}x", value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(inside) for key, inside in value.items()}
        return [self.hide(inside) for inside in value] if isinstance(value, list | tuple) else value

    def show(self, text: str) -> str:
        """Puts hidden texts back into rendered text."""
        return self._hidden.sub(lambda found: self._texts[int(found[1])], text)

    def are_in(self, text: str) -> bool:
        """Whether rendered text has hidden parts."""
        return self._hidden.search(text) is not None

    def last_token_end(self, text: str) -> int:
        """Returns the end of the template's last token in rendered text; 0 without one."""
        return max((found.end() for found in self._own.finditer(text)), default=0)

    def encode(self, text: str) -> list[int]:
        """Encodes rendered text; hidden parts become text tokens."""
        ids = list[int]()
        for place, part in enumerate(self._hidden.split(text)):
            if place % 2:
                ids += self._tokenizer.encode(
                    self._texts[int(part)], add_special_tokens=False, split_special_tokens=True
                )
            elif part:
                ids += self._tokenizer.encode(part, add_special_tokens=False)
        return ids


def _written(template: Template) -> Iterator[str]:
    """Yields the template's text around each role: some concatenate token names."""
    for roles in _ROLES:
        messages: list[Message] = [{"role": role, "content": "x"} for role in roles]
        with suppress(ConfigError):  # it need not take each
            yield template.render("a message", messages, add_generation_prompt=True)


def fault(template: str, values: Mapping[str, Any]) -> str:
    """Says which resource a template exhausts; "" if none, though it may fail otherwise."""
    command = [sys.executable, "-P", "-m", "relax_hpc.data.template"]
    limits = {"cpu_s": MOST_CPU_S, "num_bytes": MOST_BYTES, "characters": MOST_CHARACTERS}
    asked = json.dumps({**limits, "template": template, "values": values}, default=str)
    try:
        tried = subprocess.run(
            command,
            input=asked.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_MOST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:  # it waits, or the machine does
        return f"takes more than {_MOST_S} s"
    if tried.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"computes for more than {MOST_CPU_S} s"
    if tried.returncode == _TOO_MUCH:
        return (
            f"takes more than {MOST_BYTES >> 30} GiB, or makes more than {MOST_CHARACTERS:,} "
            "characters"
        )
    return ""


def _render(template: str, values: Mapping[str, Any]) -> str:
    """Renders as transformers does, as far as time and memory go."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(said: str) -> None:
        raise ValueError(said)

    environment.filters["tojson"] = lambda value, **_: json.dumps(value, default=str)
    environment.globals |= {"raise_exception": refuse, "strftime_now": str}
    return environment.from_string(template).render(**values)


def main() -> None:
    asked = json.load(sys.stdin)
    import jinja2.sandbox  # noqa: F401 - before the limits

    cpu_s, num_bytes, characters = (asked.pop(k) for k in ("cpu_s", "num_bytes", "characters"))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    used_s = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime) + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (used_s, used_s + 1))
    try:
        too_much = len(_render(**asked)) > characters
    except MemoryError:
        too_much = True
    except Exception:  # noqa: BLE001 - whoever renders it in earnest says what
        too_much = False
    sys.exit(_TOO_MUCH if too_much else 0)


if __name__ == "__main__":
    main()
