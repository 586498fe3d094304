"""Turns prompts with media into token ids, with one token per feature."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from relax_hpc.data.media.canonical import Measured
from relax_hpc.data.media.expand import Expanded, MediaSpan, expand, with_times
from relax_hpc.data.media.kinds import MODALITIES, Modality
from relax_hpc.data.media.recipe import FAMILIES, Recipe
from relax_hpc.data.media.source import MediaSource
from relax_hpc.data.media.workers import Decoders, Headers
from relax_hpc.data.records import PromptRecord, as_messages, text_of
from relax_hpc.data.template import Message
from relax_hpc.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokenized(NamedTuple):
    token_ids: list[int]
    media: tuple[Measured, ...] = ()
    """In the order of their places."""
    spans: tuple[MediaSpan, ...] = ()

    def describe(self) -> str:
        """Counts tokens by kind, in words; "" for text only."""
        counts = {
            modality: sum(
                span.tokens
                for span in self.spans
                if self.media[span.medium].extent.modality == modality
            )
            for modality in MODALITIES
        }
        said = [f"{count:,} of {modality}" for modality, count in counts.items() if count]
        rest = len(self.token_ids) - sum(counts.values())
        return f" ({', '.join(said)}, {rest:,} of text)" if said else ""


def refuse(where: str, media: Sequence[MediaSource]) -> None:
    """Refuses media of a prompt for a text-only model.

    Raises:
        ConfigError: there are some.
    """
    if media:
        raise ConfigError(
            f"{where}: has {len(media)} of image, video or audio, and the model reads text only; "
            f"use one of model_type {', '.join(FAMILIES)}, or remove them"
        )


def check_taken(media: Sequence[MediaSource], recipe: Recipe) -> None:
    """Refuses media that a model cannot take; raises ConfigError."""
    family = recipe.family
    for source in media:
        if source.modality not in family.placeholders:
            raise source.make_error(
                f"is {source.modality}, which {family.name} does not take; it takes "
                f"{', '.join(family.placeholders)}: use another model, or remove the line"
            )


class MediaTokens:
    """Tokenizes prompts with media for one model."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: "PreTrainedTokenizerBase",
        decoders: Decoders | None = None,
    ) -> None:
        """Args:
            decoders: to read media with; its own by default.

        Raises:
            ConfigError: the tokenizer lacks a media token.
        """
        self.recipe = recipe
        self.decoders = decoders or Decoders()
        self._modalities: dict[int, Modality] = {}
        for modality, token in recipe.family.placeholders.items():
            found = tokenizer.convert_tokens_to_ids(token)
            if not isinstance(found, int) or found == tokenizer.unk_token_id:
                raise ConfigError(
                    f"{tokenizer.name_or_path}: the tokenizer has no {token}, which stands for "
                    f"{modality}; copy the files of the model's own tokenizer"
                )
            self._modalities[found] = modality

    def check(self, where: str, record: PromptRecord) -> None:
        """Refuses text that would be taken for media, and media that the model cannot take.

        Raises:
            ConfigError: there is such.
        """
        self.check_text(where, as_messages(record.prompt))
        if record.num_unfilled:
            raise ConfigError(
                f"{where}: the text has {record.num_unfilled} places for media, and the row has "
                "none; give them, "
                'or write the content in parts, {"type": "text", ...}, where it is text'
            )
        check_taken(record.media, self.recipe)

    def check_text(self, where: str, messages: Sequence[Message]) -> None:
        text = "".join(text_of(message["content"]) for message in messages)
        for token in self.recipe.family.placeholders.values():
            if token in text:
                raise ConfigError(
                    f"{where}: the text holds {token}, which stands for a medium; write <image>, "
                    "<video> or <audio> and give the medium, or remove it"
                )

    def headers(self, media: Sequence[MediaSource]) -> Headers:
        """Begins to read the headers."""
        return self.decoders.headers(media, self.recipe)

    def expand(
        self,
        where: str,
        text: str,
        media: Sequence[Measured],
        encode: Callable[[str], list[int]],
    ) -> Expanded:
        """Tokenizes a rendered prompt.

        Args:
            where: file and line, for messages.
            text: with the token of each medium once.
            media: in order.
            encode: tokenizes rendered text.

        Raises:
            ConfigError: the chat template left a medium out.
        """
        for modality, token in self.recipe.family.placeholders.items():
            own = (e for _, _, e in media if not e.is_of_video)
            count = sum(1 for extent in own if extent.modality == modality)
            if (places := text.count(token)) != count:
                raise ConfigError(
                    f"{where}: the chat template writes {token} {places} times for {count} of "
                    f"{modality}; use the model's own template"
                )
        extents = [medium.extent for medium in media]
        timed = with_times(text, extents, self.recipe.family)
        return expand(encode(timed), extents, self._modalities)
