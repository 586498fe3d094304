"""Prompt files, and the map from a prompt's ordinal in the run to the prompt."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.errors import ConfigError, shown
from relax_hpc.prompts import rows
from relax_hpc.prompts.conversation import Conversation, as_messages
from relax_hpc.prompts.kept import Kept
from relax_hpc.prompts.record import Record, read_record
from relax_hpc.prompts.template import Message
from relax_hpc.schema import Medium

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Records:
    """A prompt file: JSON lines, read as the job's `prompts` say.

    Raises:
        ConfigError: missing, empty, not text, or a line that does not fit and may not be skipped;
            names line and key.
    """

    def __init__(self, path: Path, settings: PromptsConfig) -> None:
        self.files = [path]
        self._skips = settings.bad_rows == "skip"
        self._rows = rows.JsonLines(path, "name a file of JSON lines")
        if not len(self._rows):
            raise ConfigError(f"{path}: holds no prompts; JSON lines are expected")
        self._bad: dict[int, ConfigError] = {}
        self._records = [self._read(n, settings) for n in range(len(self._rows))]

    def _read(self, index: int, settings: PromptsConfig) -> Record:
        try:
            return read_record(self._rows[index], settings)
        except ConfigError as error:
            if not self._skips:
                raise
            self._bad[index] = error
            return Record("", "")

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        """Raises:
        ConfigError: the row cannot be used.
        """
        if index in self._bad:
            raise self._bad[index]
        return self._records[index]

    @property
    def bad(self) -> Mapping[int, ConfigError]:
        """Rows of which it is known already that they are skipped, and why."""
        return self._bad

    def where(self, index: int) -> str:
        """File and line, for messages."""
        return self._rows.where(index)

    def check_answers(self, can_match: Callable[[str], bool], remedy: str) -> None:
        """Refuses answers that no response could ever have, or lets their rows be skipped.

        Args:
            can_match: of an answer.
            remedy: what an answer has to be.

        Raises:
            ConfigError: naming the first of them, and how many there are.
        """
        every = [n for n in range(len(self)) if n not in self._bad]
        wrong = [n for n in every if not can_match(self._records[n].answer)]
        said = {
            n: f"{self.where(n)}: answer = {shown(self._records[n].answer)}: can never be matched; "
            f"{remedy}, or remove the line"
            for n in (wrong if self._skips else wrong[:1])
        }
        if said and not self._skips:
            count = f"{len(wrong):,} of {len(self):,} answers are so"
            raise ConfigError(f"{said[wrong[0]]} ({count if wrong[1:] else 'the only one'})")
        self._bad |= {n: ConfigError(reason) for n, reason in said.items()}

    def sample(self, count: int) -> list[int]:
        """Chooses as `rows.sample`."""
        return rows.sample([record.size for record in self._records], count)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as an engine and an environment take it."""

    index: int
    """Line of the file, 0-based, blank lines not counted."""
    token_ids: list[int]
    answer: str
    messages: list[Message] = field(default_factory=list)
    """Messages that `token_ids` were made of; text is a message of the user's."""
    tools: list[Message] | None = None
    media: tuple[Medium, ...] = ()
    """Images and sounds of the messages, in order."""
    source: str = ""
    """Name of the data set that it is from, of several."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments with which the chat template renders it."""
    where: str = "a prompt"
    """File and line, for messages."""


class Examined(NamedTuple):
    """Findings about some rows."""

    longest: int
    """Tokens of the longest prompt; 0 without one."""
    bad: Sequence[tuple[int, str]]
    """Rows that cannot be used, each with the reason."""


class PromptSource:
    """`source[ordinal]`: every prompt once per epoch, in an order that only the seed decides.

    There is no cursor to save: whoever knows an ordinal, in whichever process and after whichever
    restart, gets the same prompt for it.
    """

    def __init__(
        self,
        records: Path | Records,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        shuffle_seed: int | None,
        settings: PromptsConfig,
    ) -> None:
        """Reads and checks the file, if that was not done; prompts are tokenized when asked for.

        Raises:
            ConfigError: the file, or one of its lines, cannot be used.
        """
        self.tokenizer = tokenizer
        self.records = Records(records, settings) if isinstance(records, Path) else records
        self._settings = settings
        self.conversation = Conversation(
            tokenizer,
            chat_template=settings.chat_template,
            assistant_prefix=settings.assistant_prefix,
        )
        self._shuffle_seed = shuffle_seed
        self._kept = Kept(len(self.records))
        self._order = lru_cache(maxsize=2)(self._draw_order)
        self._tokenized: dict[int, list[int]] = {}

    def __len__(self) -> int:
        """Prompts of an epoch."""
        return len(self._kept)

    @property
    def num_rows(self) -> int:
        """Rows of the file, those that are left out included."""
        return len(self.records)

    def leave_out(self, reasons: Mapping[int, str]) -> None:
        """Leaves rows out from now on.

        Args:
            reasons: by row.

        Raises:
            ConfigError: none is left.
        """
        self._kept = Kept(self.num_rows, reasons)
        self._order.cache_clear()
        if not len(self._kept):
            raise ConfigError(f"no row can be used; the first: {next(iter(reasons.values()))}")

    def __getitem__(self, ordinal: int) -> Prompt:
        """The prompt of `ordinal` >= 0, which may be any number of epochs on.

        Raises:
            ConfigError: the prompt is longer than `max_prompt_tokens`.
        """
        if ordinal < 0:
            raise IndexError(f"prompt ordinals start at 0, not {ordinal}")
        epoch, place = divmod(ordinal, len(self))
        return self.prompt(self._kept[self._order(epoch)[place]])

    def prompt(self, index: int) -> Prompt:
        """The prompt on line `index` of the file; raises as `records[index]`."""
        if index not in self._tokenized:
            self._tokenized[index] = self._tokenize(index)
        record = self.records[index]
        return Prompt(
            index,
            self._tokenized[index],
            record.answer,
            messages=as_messages(record.prompt),
            tools=record.tools,
            source=record.source,
            metadata=record.metadata,
            template_args=record.template_args,
            where=self.records.where(index),
        )

    def first(self) -> Prompt:
        """The prompt on the first line that can be used.

        Raises:
            ConfigError: there is none, or the first line cannot be used and may not be skipped.
        """
        failed: ConfigError | None = None
        for index in range(self.num_rows):
            try:
                return self.prompt(index)
            except ConfigError as error:
                if self._settings.bad_rows == "error":
                    raise
                failed = failed or error
        raise ConfigError(f"no row can be used; the first: {failed}")

    def examine(self, indices: Iterable[int]) -> Examined:
        """Tokenizes the prompts on these lines, and remembers none.

        Raises:
            ConfigError: one is too long, or the chat template fails on it, and it may not be
                skipped.
        """
        longest, bad = 0, []
        for index in indices:
            try:
                longest = max(longest, len(self._tokenize(index)))
            except ConfigError as error:
                if self._settings.bad_rows == "error":
                    raise
                bad.append((index, str(error)))
        return Examined(longest, bad)

    def _draw_order(self, epoch: int) -> list[int]:
        return epoch_order(self._shuffle_seed, epoch, len(self))

    def _tokenize(self, index: int) -> list[int]:
        record, where = self.records[index], self.records.where(index)
        if not self._settings.chat_template and not isinstance(record.prompt, str):
            raise ConfigError(f"{where}: is chat messages; set prompts.chat_template = true")
        messages = as_messages(record.prompt)
        ids = self.conversation.encode(where, messages, record.tools, record.template_args)
        if not ids:
            raise ConfigError(f"{where}: the prompt makes no tokens; write another, or remove it")
        if len(ids) > self._settings.max_prompt_tokens:
            raise ConfigError(
                f"{where}: the prompt has {len(ids)} tokens, prompts.max_prompt_tokens = "
                f"{self._settings.max_prompt_tokens}; raise it, or remove the line"
            )
        return ids


def epoch_order(seed: int | None, epoch: int, count: int) -> list[int]:
    """The numbers below `count` in the order of an epoch; without a seed they rise."""
    order = list(range(count))
    if seed is not None:
        # A string seeds through SHA-512: stable across processes, unlike hash().
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
