"""Maps the ordinal of a prompt in the run to the tokenized prompt."""

from collections import deque
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.data.conversation import Conversation
from relax_hpc.data.media.canonical import Measured
from relax_hpc.data.media.expand import MediaSpan
from relax_hpc.data.media.spool import MediaView
from relax_hpc.data.media.workers import Headers
from relax_hpc.data.media_tokens import MediaTokens, Tokenized, refuse
from relax_hpc.data.order import Blocks, RowOrder
from relax_hpc.data.records import PromptRecord, Records, as_messages
from relax_hpc.data.template import Message
from relax_hpc.data.tokenizer import refuse_unknown
from relax_hpc.errors import ConfigError, MediumError
from relax_hpc.schema import Medium

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class KeptRows:
    """`kept[index]`: the rows that are not left out, renumbered from 0."""

    def __init__(self, num_rows: int, left_out: Collection[int] = ()) -> None:
        """Args:
        num_rows: in all.
        left_out: rows not used.
        """
        rows = np.unique(np.fromiter(left_out, np.int64, len(left_out)))
        self.left_out = frozenset(rows.tolist())
        self._len = num_rows - len(rows)
        self._rows = rows
        self._used_before = rows - np.arange(len(rows))
        """[left-out rows] used rows before each of them."""

    def __len__(self) -> int:
        return self._len

    def sizes(self, blocks: Sequence[int], first: int) -> list[int]:
        """Counts the used rows of each block; the first begins at row `first`."""
        ends = first + np.append(0, np.cumsum(np.asarray(blocks, np.int64)))
        left_out = np.diff(np.searchsorted(self._rows, ends))
        return [int(size) for size in np.asarray(blocks, np.int64) - left_out]

    def __getitem__(self, index: int) -> int:
        """Returns the row of the used row `index`."""
        if not 0 <= index < self._len:
            raise IndexError(f"{index} of {self._len} rows")
        if not self.left_out:
            return index
        return index + int(np.searchsorted(self._used_before, index, side="right"))


_AHEAD = 64
"""Rows whose media are read concurrently when all are checked."""
_BROKEN_SINCE = "it could be used when the run was submitted"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for an engine and an environment."""

    index: int
    """Row of the data, 0-based, counted through all sources and files, without blank lines."""
    token_ids: list[int]
    answer: str
    messages: list[Message] = field(default_factory=list)
    """Messages behind `token_ids`; plain text is a user message."""
    tools: list[Message] | None = None
    source: str = ""
    """Name of the data set, if there are several."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template."""
    where: str = "a prompt"
    measured: tuple[Measured, ...] = ()
    """Media of the messages by their places, with their extents."""
    spans: tuple[MediaSpan, ...] = ()
    """Tokens that stand for their features."""
    media: tuple[Medium, ...] = ()
    """The same media as the bus stores them, once decoded."""
    view: MediaView | None = None
    """The same as engines are shown them, while they lie in the spool."""


class Examined(NamedTuple):
    """Findings about some rows."""

    longest: int
    """Tokens of the longest prompt; 0 without one."""
    bad: Sequence[tuple[int, str]]
    """Unusable rows, each with the reason."""


class PromptSource:
    """`source[ordinal]`: every prompt once per epoch, in an order fixed by the seed; each of
    several sources has its share and its own epochs.

    No cursor is saved: an ordinal names the same prompt in every process and after every restart.
    """

    def __init__(
        self,
        records: Records,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        shuffle_seed: int | None,
        settings: PromptsConfig,
        media: MediaTokens | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Reads nothing: prompts are read and tokenized on access.

        Args:
            records: of the data.
            tokenizer: of the model.
            shuffle_seed: of the order; None keeps that of the files.
            settings: how to read a row.
            media: tokenizes media; None for a text-only model.
            vocab_size: of the model, if known, to refuse tokens beyond it.

        Raises:
            ConfigError: the sources cannot be mixed.
        """
        self.tokenizer, self.records = tokenizer, records
        self._settings = settings
        self._media = media
        self._vocab_size = vocab_size
        self.conversation = Conversation(
            tokenizer,
            chat_template=settings.chat_template,
            assistant_prefix=settings.assistant_prefix,
        )
        self._shuffle_seed = shuffle_seed
        self._kept = KeptRows(len(records))
        self._order = self._drawn(graded=False)
        self._is_graded = not self.records.graded_by

    @property
    def media_tokens(self) -> MediaTokens | None:
        """None for a text-only model."""
        return self._media

    def __len__(self) -> int:
        """Prompts per epoch."""
        return len(self._kept)

    @property
    def num_rows(self) -> int:
        """Rows in all, left-out ones included."""
        return len(self.records)

    def leave_out(self, reasons: Mapping[int, str]) -> None:
        """Leaves rows out from now on.

        Args:
            reasons: by row.

        Raises:
            ConfigError: none is left.
        """
        self._kept = KeptRows(self.num_rows, reasons)
        if not len(self._kept):
            raise ConfigError(f"no row can be used; the first: {next(iter(reasons.values()))}")
        self._order = self._drawn(graded=False)
        self._is_graded = not self.records.graded_by

    def __getitem__(self, ordinal: int) -> Prompt:
        """Returns the prompt of `ordinal` >= 0, which may lie in any epoch.

        Raises:
            ConfigError: the prompt is longer than `max_prompt_tokens`.
        """
        return self.prompt(self._row(ordinal))

    async def fetch(self, ordinal: int) -> Prompt:
        """Returns `source[ordinal]` without blocking the event loop."""
        index = self._row(ordinal)
        record = await self.records.fetch(index)
        return self._prompt(index, record, await self._headers(index, record))

    def _row(self, ordinal: int) -> int:
        if not self._is_graded:  # takes a look at every row, which a check does without
            self._order, self._is_graded = self._drawn(graded=True), True
        return self._kept[self._order[ordinal]]

    def prompt(self, index: int) -> Prompt:
        """Returns the prompt of a row; raises as `records[index]`."""
        record = self.records[index]
        return self._prompt(index, record, self._headers(index, record).result())

    def _prompt(self, index: int, record: PromptRecord, media: Sequence[Measured]) -> Prompt:
        tokenized = self._tokenize(index, record, media)
        return Prompt(
            index,
            tokenized.token_ids,
            record.answer,
            messages=as_messages(record.prompt),
            tools=record.tools,
            source=record.source,
            metadata=record.metadata,
            template_args=record.template_args,
            where=self.records.where(index),
            measured=tokenized.media,
            spans=tokenized.spans,
        )

    def first(self) -> Prompt:
        """Returns the first usable prompt.

        Raises:
            ConfigError: there is none, or the first line cannot be used and may not be skipped.
        """
        failed: ConfigError | None = None
        for index in range(self.num_rows):
            try:
                return self.prompt(index)
            except ConfigError as error:
                if not self._settings.leaves_out(error):
                    raise
                failed = failed or error
        raise ConfigError(f"no row can be used; the first: {failed}")

    def examine(self, indices: Iterable[int], *, is_decoded: bool = False) -> Examined:
        """Tokenizes the prompts on these lines, and remembers none.

        Args:
            indices: of the lines.
            is_decoded: all their media could be decoded before: one that cannot be used now is not
                skipped.

        Raises:
            ConfigError: one is too long, or the chat template fails on it, and it may not be
                skipped.
        """
        longest, bad = 0, []
        with closing(self._begin(indices)) as rows:
            for index, begun in rows:
                try:
                    if isinstance(begun, ConfigError):
                        raise begun
                    record, headers = begun
                    tokenized = self._tokenize(index, record, headers.result())
                    longest = max(longest, len(tokenized.token_ids))
                except ConfigError as error:
                    if is_decoded and isinstance(error, MediumError):
                        raise MediumError(f"{error} ({_BROKEN_SINCE})") from None
                    if not self._settings.leaves_out(error):
                        raise
                    bad.append((index, str(error)))
        return Examined(longest, bad)

    def _begin(
        self, indices: Iterable[int]
    ) -> Generator[tuple[int, ConfigError | tuple[PromptRecord, Headers]], None, None]:
        """Yields rows, and begins to read the media of some that come after."""
        ahead = deque[tuple[int, ConfigError | tuple[PromptRecord, Headers]]]()
        try:
            for index in indices:
                try:
                    record = self.records[index]
                    ahead.append((index, (record, self._headers(index, record))))
                except ConfigError as error:
                    ahead.append((index, error))
                if len(ahead) > _AHEAD:
                    yield ahead.popleft()
            while ahead:
                yield ahead.popleft()
        finally:
            for _, begun in ahead:
                if not isinstance(begun, ConfigError):
                    begun[1].cancel()

    def _drawn(self, *, graded: bool) -> RowOrder:
        sources, first, kept = [], 0, 0
        for source in self.records.sources:
            sizes = self._kept.sizes(source.blocks.sizes, first)
            first, count = first + sum(source.blocks.sizes), sum(sizes)
            if not count:
                raise ConfigError(
                    f"source {source.name}: no row can be used; correct them, or remove it"
                )
            rows = (self._kept[number] for number in range(kept, kept + count))
            grades = self.records.grades(rows) if graded else b""
            blocks = Blocks(sizes, source.blocks.window)
            sources.append(source._replace(blocks=blocks, grades=grades))
            kept += count
        return RowOrder(sources, self._shuffle_seed)

    def _headers(self, index: int, record: PromptRecord) -> Headers:
        """Begins to read the headers of a row's media.

        Raises:
            ConfigError: the row cannot be used, whatever they say.
        """
        where = self.records.where(index)
        if not self._settings.chat_template and not isinstance(record.prompt, str):
            what = "has media" if record.media else "is chat messages"
            raise ConfigError(f"{where}: {what}; set prompts.chat_template = true")
        if self._media is None:
            refuse(where, record.media)
            return Headers()
        self._media.check(where, record)
        return self._media.headers(record.media)

    def _tokenize(self, index: int, record: PromptRecord, media: Sequence[Measured]) -> Tokenized:
        where = self.records.where(index)
        found = self._tokens(where, record, media)
        count = len(found.token_ids)
        if not count:
            raise ConfigError(f"{where}: the prompt makes no tokens; write another, or remove it")
        if self._vocab_size is not None:
            refuse_unknown(where, found.token_ids, self._vocab_size, self.tokenizer)
        if count > self._settings.max_prompt_tokens:
            skip = '; prompts.bad_rows = "skip" leaves such lines out'
            raise ConfigError(
                f"{where}: the prompt has {count} tokens{found.describe()}, "
                f"prompts.max_prompt_tokens = {self._settings.max_prompt_tokens}; raise it, or "
                f"remove the line{skip * (self._settings.bad_rows == 'error')}"
            )
        return found

    def _tokens(self, where: str, record: PromptRecord, media: Sequence[Measured]) -> Tokenized:
        messages = as_messages(record.prompt)
        if self._media is None or not media:
            ids = self.conversation.encode(where, messages, record.tools, record.template_args)
            return Tokenized(ids)
        text = self.conversation.render(where, messages, record.tools, record.template_args)
        found = self._media.expand(where, text, media, self.conversation.tokens)
        return Tokenized(found.token_ids, tuple(media), found.spans)
