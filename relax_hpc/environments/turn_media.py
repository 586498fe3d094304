"""Media that an environment adds to a conversation, in any turn of it."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple, Self

from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.media.expand import Span
from relax_hpc.media.spool import View
from relax_hpc.media.workers import MediaWorkers
from relax_hpc.prompts.media_tokens import MediaTokens, check_taken
from relax_hpc.prompts.parts import added_by
from relax_hpc.prompts.template import Message
from relax_hpc.schema import Medium


class Given(NamedTuple):
    """Tokens that the policy is to go on with, and the media among them."""

    token_ids: Sequence[int]
    media: tuple[Medium, ...] = ()
    """Media as the bus stores them."""
    view: View | None = None
    """The same as engines are shown them; None without."""

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.view.spans if self.view and self.media else ()

    def going_on(self, more: Sequence[int]) -> "Given":
        """The same with text behind it."""
        return self._replace(token_ids=[*self.token_ids, *more])


class TurnMedia:
    """Decodes what environments show. An asynchronous context manager: what was decoded lies in the
    spool until its end, for the turns that follow."""

    def __init__(self, tokens: MediaTokens, workers: MediaWorkers, settings: PromptsConfig) -> None:
        """Decodes nothing.

        Args:
            tokens: how the model's media become tokens.
            workers: that decode.
            settings: which files may be read.
        """
        self._tokens, self._workers, self._settings = tokens, workers, settings
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def added(
        self, before: Given, where: str, messages: Sequence[Message], text: str
    ) -> Given:
        """Puts what an environment says behind what was there before.

        Args:
            before: with the newest reply.
            where: file and line of the prompt, for messages.
            messages: that are new.
            text: what the template makes of them, with a token for each medium.

        Raises:
            ConfigError: a medium cannot be used, or text would be taken for one.
            RelaxError: there is no room for it.
        """
        self._tokens.check_text(f"{where}, a message of the environment", messages)
        sources = added_by(where, messages, self._settings)
        check_taken(sources, self._tokens.recipe)
        media = await self._tokens.headers(sources)
        found = self._tokens.expand(where, text, media)
        if not media:
            return before.going_on(found.token_ids)
        decoded = await self._open.enter_async_context(self._workers.prepared(media, found.spans))
        number, first = len(before.media), len(before.token_ids)
        spans = [Span(number + s.medium, first + s.first, s.tokens) for s in found.spans]
        shown = before.view.media if before.view else ()
        return Given(
            [*before.token_ids, *found.token_ids],
            (*before.media, *decoded.media),
            View((*shown, *decoded.view.media), (*before.spans, *spans)),
        )
