"""The prompts that a teacher sees in place of the policy's: with what the policy is not told."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_hpc.config.run import RunConfig
from relax_hpc.config.teachers import fields_of
from relax_hpc.errors import ConfigError, shown
from relax_hpc.prompts import tokenizer as tokenizers
from relax_hpc.prompts.source import Prompt, PromptSource
from relax_hpc.prompts.template import Message
from relax_hpc.roles.rollout import prompt_check

Ints = npt.NDArray[np.int32]


class PrivilegedPrompts:
    """Prompts with further text of their rows (`teachers.NAME.prompt`).

    The teacher and the policy may have the same weights: then the policy learns to do without the
    text (on-policy self-distillation, where it is a solution).
    """

    def __init__(self, source: PromptSource, key: str, text: str) -> None:
        """Takes the prompts of a run.

        Args:
            source: of the training prompts.
            key: key that says the text, for messages.
            text: with names in braces.
        """
        self._source, self._key, self._text = source, key, text

    def __getitem__(self, index: int) -> Ints:
        """Tokens of a row of the data.

        Raises:
            ConfigError: the row has no such field, or it is no text.
        """
        prompt = self._source.prompt(index)
        ids = self._source.conversation.encode(
            prompt.where, self._asked(prompt), prompt.tools, prompt.template_args
        )
        return np.array(ids, np.int32)

    def sample(self, count: int) -> list[int]:
        """Chooses rows that the policy may be asked, those with the longest prompts among them.

        Raises:
            ConfigError: a row cannot be used, and may not be skipped.
        """
        records = self._source.records
        records.read()
        chosen = records.sample(count)
        bad = {row for row, _ in self._source.examine(chosen).bad}
        return [row for row in chosen if row not in bad]

    def _asked(self, prompt: Prompt) -> list[Message]:
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
                f"{prompt.where}: {name} = {shown(value)}: must be text, since {self._key} names it"
            )
        return str(value)


def privileged_prompts(config: RunConfig, name: str) -> PrivilegedPrompts | None:
    """The prompts that a teacher sees in place of the policy's, if it does."""
    text = config.teachers[name].prompt
    if not text:
        return None
    files, tokenizer = prompt_check.open_files(config), tokenizers.load(config.model.path)
    source = prompt_check.sources_of(config, files, tokenizer).train
    return PrivilegedPrompts(source, f"teachers.{name}.prompt", text)
