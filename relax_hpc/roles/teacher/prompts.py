"""Makes a teacher's prompts, with text that the policy does not see."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_hpc.config.actor import fields_of
from relax_hpc.config.run import RunConfig
from relax_hpc.data.source import Prompt, PromptSource
from relax_hpc.data.template import Message
from relax_hpc.errors import ConfigError, show
from relax_hpc.roles.rollout import prompt_check

Ints = npt.NDArray[np.int32]


class PrivilegedPrompts:
    """Prompts with further text of their rows (`teachers.NAME.prompt`).

    If teacher and policy have the same weights, the policy learns to do without the text (on-policy
    self-distillation, if the text is a solution).
    """

    def __init__(self, source: PromptSource, key: str, text: str) -> None:
        self._source, self._key, self._text = source, key, text

    def __getitem__(self, index: int) -> Ints:
        """Returns the tokens of a row of the data.

        Raises:
            ConfigError: the row has no such field, or it is no text.
        """
        prompt = self._source.prompt(index)
        ids = self._source.conversation.encode(
            prompt.where, self._ask(prompt), prompt.tools, prompt.template_args
        )
        return np.array(ids, np.int32)

    def sample(self, count: int) -> list[int]:
        """Chooses rows that the policy may get, those with the longest prompts among them.

        Raises:
            ConfigError: a row is unusable, and may not be skipped.
        """
        records = self._source.records
        records.read()
        chosen = records.sample(count)
        bad = {row for row, _ in self._source.examine(chosen).bad}
        return [row for row in chosen if row not in bad]

    def _ask(self, prompt: Prompt) -> list[Message]:
        messages = list(prompt.messages)
        users = [place for place, each in enumerate(messages) if each["role"] == "user"]
        if not users:
            raise ConfigError(
                f"{prompt.where}: has no message of a user, which {self._key} changes"
            )
        asked = messages[users[-1]]
        fields = {**prompt.metadata, "answer": prompt.answer, "prompt": asked["content"]}
        known = {name: self._field(prompt, fields, name) for name in fields_of(self._text)}
        messages[users[-1]] = asked | {"content": self._text.format(**known)}
        return messages

    def _field(self, prompt: Prompt, fields: Mapping[str, Any], name: str) -> str:
        if name not in fields:
            raise ConfigError(
                f"{prompt.where}: has no {name}, which {self._key} names; it has "
                f"{', '.join(sorted(fields))}; add it, or name another"
            )
        value = fields[name]
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise ConfigError(
                f"{prompt.where}: {name} = {show(value)}: must be text, since {self._key} names it"
            )
        return str(value)


def make_privileged_prompts(config: RunConfig, name: str) -> PrivilegedPrompts | None:
    """Returns the teacher's prompts, if they differ from the policy's."""
    text = config.teachers[name].prompt
    if not text:
        return None
    source = prompt_check.open_sources(config).train
    return PrivilegedPrompts(source, f"teachers.{name}.prompt", text)
