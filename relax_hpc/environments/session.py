"""Connects an environment to the policy: messages in, replies out, every call recorded.

Environments may add media to a conversation in any turn.
"""

import asyncio
import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple, Protocol, Self

from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.data.conversation import Conversation
from relax_hpc.data.media.expand import MediaSpan
from relax_hpc.data.media.spool import MediaView
from relax_hpc.data.media.workers import MediaWorkers
from relax_hpc.data.media_tokens import MediaTokens, check_taken
from relax_hpc.data.records import find_added_media, plain
from relax_hpc.data.source import Prompt
from relax_hpc.data.template import Message
from relax_hpc.environments.record import Call, EpisodeRecord
from relax_hpc.errors import RelaxError
from relax_hpc.inference.generation import Draft, End, Generation, Sampling
from relax_hpc.schema import FinishReason, Medium


class Given(NamedTuple):
    """Tokens for the policy to continue, and their media."""

    token_ids: Sequence[int]
    media: tuple[Medium, ...] = ()
    """As the bus stores them."""
    view: MediaView | None = None
    """The same as engines are shown them; None without media."""

    @property
    def spans(self) -> tuple[MediaSpan, ...]:
        return self.view.spans if self.view and self.media else ()

    def going_on(self, more: Sequence[int]) -> "Given":
        """Returns the same with text appended."""
        return self._replace(token_ids=[*self.token_ids, *more])


class TurnMedia:
    """Decodes an environment's media. An asynchronous context manager: they stay in the spool until
    its end, for later turns."""

    def __init__(self, tokens: MediaTokens, workers: MediaWorkers, settings: PromptsConfig) -> None:
        """Args:
        settings: which files may be read.
        """
        self._tokens, self._workers, self._settings = tokens, workers, settings
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def add(
        self,
        before: Given,
        where: str,
        messages: Sequence[Message],
        text: str,
        encode: Callable[[str], list[int]],
    ) -> Given:
        """Appends an environment's messages.

        Args:
            before: with the newest reply.
            where: file and line of the prompt, for messages.
            messages: the new ones.
            text: as rendered by the template, with a token for each medium.
            encode: tokenizes it.

        Raises:
            ConfigError: a medium cannot be used, or text would be taken for one.
            RelaxError: there is no space for it.
        """
        self._tokens.check_text(f"{where}, a message of the environment", messages)
        sources = find_added_media(where, messages, self._settings)
        check_taken(sources, self._tokens.recipe)
        media = await self._tokens.headers(sources)
        found = self._tokens.expand(where, text, media, encode)
        if not media:
            return before.going_on(found.token_ids)
        decoded = await self._open.enter_async_context(self._workers.prepare(media, found.spans))
        number, first = len(before.media), len(before.token_ids)
        spans = [MediaSpan(number + s.medium, first + s.first, s.tokens) for s in found.spans]
        shown = before.view.media if before.view else ()
        return Given(
            [*before.token_ids, *found.token_ids],
            (*before.media, *decoded.media),
            MediaView((*shown, *decoded.view.media), (*before.spans, *spans)),
        )


Tools = Sequence[Message] | None
"""Tools as a chat template takes them."""


class Sampler(Protocol):
    """The part of inference engines that an episode needs."""

    async def sample(
        self,
        given: Sequence[int],
        draft: Draft,
        how: Sampling,
        *,
        seed: int,
        homes: Sequence[Hashable],
    ) -> Generation:
        """Samples one response, or its missing part.

        Args:
            given: token ids.
            draft: the response so far; grows while it arrives.
            how: of the episode.
            seed: >= 0.
            homes: sharers of cached prefixes, the longest first.
        """
        ...


class Reply:
    __slots__ = ("_conversation", "_given", "_text", "asked", "before", "call", "tools")

    def __init__(
        self,
        call: Call,
        conversation: Conversation,
        asked: Sequence[Message],
        given: Given,
        before: "Reply | None",
        tools: Tools = None,
    ) -> None:
        """`asked` is the conversation it answers, in tokens `given` with `tools`; `before` the
        reply before."""
        self.call, self._conversation, self._given = call, conversation, given
        self.asked, self.before, self.tools = asked, before, tools
        self._text: str | None = None

    @property
    def text(self) -> str:
        """Without special tokens."""
        if self._text is None:
            self._text = self._conversation.decode(self.call.draft.token_ids)
        return self._text

    @property
    def message(self) -> Message:
        return {"role": "assistant", "content": self.text}

    @property
    def messages(self) -> list[Message]:
        """The conversation that it ends."""
        return [*self.asked, self.message]

    @property
    def known(self) -> Given:
        """All tokens up to its end, and their media."""
        return self._given._replace(token_ids=self.call.token_ids)

    @property
    def finish(self) -> FinishReason:
        assert self.call.finish is not None
        return self.call.finish


class Session:
    """One episode's connection to the policy.

    With a record it continues where that ends: repeated calls are answered from it, an interrupted
    one is continued.
    """

    __slots__ = (
        "_homes",
        "_num_calls",
        "_record",
        "_reply",
        "_sampler",
        "_seed",
        "_turn_media",
        "conversation",
        "failure",
        "how",
        "prompt",
    )

    def __init__(
        self,
        prompt: Prompt,
        record: EpisodeRecord,
        sampler: Sampler,
        conversation: Conversation,
        how: Sampling,
        *,
        group: Hashable,
        episode: Hashable,
        seed: int,
        turn_media: TurnMedia | None = None,
    ) -> None:
        """Samples nothing before `chat`.

        Args:
            prompt: the episode begins with it.
            record: the caller's; gets the calls.
            conversation: turns messages into tokens.
            group: episodes of one group begin with the same tokens.
            episode: unique among all concurrent sessions.
            seed: of the first call; those of the others follow from it.
            turn_media: handles media that the environment adds; None for a text-only model.
        """
        self.prompt, self._record, self._sampler = prompt, record, sampler
        self.conversation, self.how, self._seed = conversation, how, seed
        self._homes = episode, group
        self._turn_media = turn_media
        self._reply: Reply | None = None
        self._num_calls = 0
        self.failure: Exception | None = None
        """Why engines last failed to answer: not the environment's fault."""

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, the newest reply included."""
        return self._reply.messages if self._reply else list(self.prompt.messages)

    @property
    def seed(self) -> int:
        """Identifies the episode: equal for the same seed of the run, guid and sibling."""
        return self._seed

    async def chat(
        self,
        messages: Sequence[Message] | None = None,
        *,
        max_new_tokens: int | None = None,
        ignore_eos: bool = False,
        stop: Sequence[str] | None = None,
        tools: Tools = None,
    ) -> Reply:
        """Samples the policy's next message.

        If `messages` continue a conversation of this session, sampled tokens stay as they are, and
        only new messages are rendered and appended. Any other history is rendered as a whole, and
        begins a new sequence.

        New messages may show media, as prompts in parts do: `{"type": "image", "image": ...}`, with
        `{"bytes": ...}`, a path or a data: URL.

        Args:
            messages: the whole conversation so far; None is the prompt.
            max_new_tokens: of the reply; None is the run's limit.
            ignore_eos: only this limit, and `stop` if given, ends the reply.
            stop: texts that end the reply, which keeps them, e.g. ["</search>"]; None means the
                run's. With routing replay, the experts of their last tokens are not recorded.
            tools: for the template; None means the prompt's. Changed tools begin a new sequence.

        Returns:
            The reply; without a token, and finished by LENGTH, if the conversation has reached its
                limit.
        """
        asked = self.prompt.messages if messages is None else list(messages)
        tools = self.prompt.tools if tools is None else tools or None
        found, how = await self._tokenize(asked, tools), self.how
        given = found.token_ids
        wanted = max_new_tokens or how.max_new_tokens
        left = min(wanted, how.max_tokens - len(given))
        is_own = wanted == left and (ignore_eos or wanted < how.max_new_tokens)
        if left > 0:
            call = self._begin(found)
        else:
            call = _call(found, FinishReason.LENGTH)
            if self._reply:
                self._reply.call.is_cut = True  # this one is in no row
            await asyncio.sleep(0)  # who asks again and again would let nobody else run
        if call.is_over:
            tokens, told = call.draft.token_ids, call.finish is FinishReason.STOP and not is_own
            stopped = told or (not ignore_eos and self.conversation.ends_turn(tokens))
            is_full = len(tokens) >= left and not stopped
            call.finish = FinishReason.LENGTH if is_full else FinishReason.STOP
            call.is_over = False
        if call.finish is None:
            how = how._replace(
                max_new_tokens=left,
                view=found.view,
                ignore_eos=ignore_eos,
                end=self._end(stop, ignore_eos=ignore_eos),
            )
            done = await self._sample(call, how)
            call.finish, call.routed_experts = done.finish, done.routed_experts
        call.is_cut = call.finish is FinishReason.LENGTH and not is_own
        self._reply = Reply(call, self.conversation, asked, found, self._reply, tools)
        return self._reply

    def _end(self, stop: Sequence[str] | None, *, ignore_eos: bool) -> End | None:
        if stop is None:
            return None if ignore_eos else self.how.end
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            where = f"{self.prompt.where}: an environment"
            raise RelaxError(f"{where} says stop = {stop!r}; give a list of texts, none empty")
        return self.conversation.stop(stop)

    async def _sample(self, call: Call, how: Sampling) -> Generation:
        seed = seed_of_call(self._seed, self._num_calls - 1)
        try:
            done = await self._sampler.sample(
                call.given, call.draft, how, seed=seed, homes=self._homes
            )
        except Exception as error:
            self.failure = error
            raise
        self.failure = None
        return done

    async def _tokenize(self, asked: list[Message], tools: Tools) -> Given:
        """Returns the tokens of a conversation for the policy to continue."""
        prompt, reply = self.prompt, self._reply
        while reply:
            known, is_same = len(reply.asked) + 1, reply.tools == tools
            if is_same and len(asked) >= known and asked[:known] == reply.messages:
                shown = prompt.where, plain(asked), known, reply.call.token_ids
                rest = self.conversation.following(*shown, tools, prompt.template_args)
                if rest is not None:
                    return await self._going_on(reply.known, asked[known:], rest)
            reply = reply.before
        if asked == prompt.messages and tools == prompt.tools:
            return Given(prompt.token_ids, prompt.media, prompt.view)
        self._refuse_media(asked, "in a history that it wrote anew; go on from a reply")
        return Given(self.conversation.encode(prompt.where, asked, tools, prompt.template_args))

    async def _going_on(self, before: Given, new: list[Message], text: str) -> Given:
        if self._turn_media is None:
            self._refuse_media(new, "to a model that reads text only; use one that takes them")
            return before.going_on(self.conversation.tokens(text) if text else [])
        encode = self.conversation.tokens
        return await self._turn_media.add(before, self.prompt.where, new, text, encode)

    def _refuse_media(self, messages: Sequence[Message], where: str) -> None:
        if any(not isinstance(message["content"], str) for message in messages):
            raise RelaxError(f"{self.prompt.where}: an environment shows media {where}")

    def _begin(self, given: Given) -> Call:
        """Returns the record's next call if it has these tokens, or a new one."""
        calls, number = self._record.calls, self._num_calls
        self._num_calls += 1
        if number < len(calls):
            if list(calls[number].given) == list(given.token_ids):
                calls[number].media, calls[number].spans = given.media, given.spans
                return calls[number]
            del calls[number:]  # from the first difference on it is another episode
        calls.append(_call(given))
        return calls[number]


def _call(given: Given, finish: FinishReason | None = None) -> Call:
    return Call(given.token_ids, given.media, given.spans, finish=finish)


def seed_of_call(seed: int, number: int) -> int:
    """Returns the seed of a session's call, below 2**31: the session's own for the first."""
    if number == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4], "big") >> 1


class Outcome(NamedTuple):
    rewards: Mapping[str, float] = {}
    """Rewards by name; they add up to the reward, except names with a slash. If empty, the job's
    reward scores the episode."""
    metrics: Mapping[str, float] = {}
    """Other numbers of the episode; shard events and TensorBoard show their means as
    `rollout/<name>`."""


class Environment(Protocol):
    """A task for the policy."""

    async def rollout(self, prompt: Prompt, session: Session) -> Outcome:
        """Runs one episode: everything one sibling does with a prompt.

        It may be cancelled at any await, and restarted with the session's record. An exception
        leaves this sample without a score, as a failed reward does.
        """
        ...


class SingleTurn:
    """Asks the prompt once; the job's reward scores the response."""

    async def rollout(self, prompt: Prompt, session: Session) -> Outcome:
        await session.chat()
        return Outcome()
