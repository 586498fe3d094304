"""A policy as an environment sees it: messages in, replies out; every call is recorded."""

import asyncio
import hashlib
from collections.abc import Hashable, Sequence
from typing import Protocol

from relax_hpc.engines.response import Draft, End, Generation
from relax_hpc.environments.record import Call, Record
from relax_hpc.environments.turn_media import Given, TurnMedia
from relax_hpc.errors import RelaxError
from relax_hpc.prompts.conversation import Conversation
from relax_hpc.prompts.parts import plain
from relax_hpc.prompts.source import Prompt
from relax_hpc.prompts.template import Message
from relax_hpc.sampling.how import How
from relax_hpc.schema import FinishReason

Tools = Sequence[Message] | None
"""Tools as a chat template takes them."""


class Sampler(Protocol):
    """The part of inference engines that an episode needs."""

    async def sample(
        self,
        given: Sequence[int],
        draft: Draft,
        how: How,
        *,
        seed: int,
        homes: Sequence[Hashable],
    ) -> Generation:
        """Samples one response, or what is missing of it.

        Args:
            given: token ids.
            draft: what there is already; it grows while the response arrives.
            how: of the episode.
            seed: >= 0.
            homes: whose cached prefixes it shares, the one with most of it first.
        """
        ...


class Reply:
    """An answer of the policy."""

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
        """`asked` is what it answers, in tokens `given` with `tools`, `before` the reply before."""
        self.call, self._conversation, self._given = call, conversation, given
        self.asked, self.before, self.tools = asked, before, tools
        self._text: str | None = None

    @property
    def text(self) -> str:
        """Text of the reply, without special tokens."""
        if self._text is None:
            self._text = self._conversation.decode(self.call.draft.token_ids)
        return self._text

    @property
    def message(self) -> Message:
        return {"role": "assistant", "content": self.text}

    @property
    def messages(self) -> list[Message]:
        """The conversation that it is the end of."""
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
    """One episode's way to the policy.

    A session that is given a record goes on where that ends: calls that are asked for again are
    answered from it, one that was broken off is continued.
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
        record: Record,
        sampler: Sampler,
        conversation: Conversation,
        how: How,
        *,
        group: Hashable,
        episode: Hashable,
        seed: int,
        turn_media: TurnMedia | None = None,
    ) -> None:
        """Asks nobody before `chat`.

        Args:
            prompt: what the episode begins with.
            record: gets the calls; the caller's.
            conversation: how messages become tokens.
            group: episodes of one group begin with the same tokens.
            episode: of this session; differs between all that run at a time.
            seed: of the first call; those of the others follow from it.
            turn_media: takes media that the environment adds; None of a model of text.
        """
        self.prompt, self._record, self._sampler = prompt, record, sampler
        self.conversation, self.how, self._seed = conversation, how, seed
        self._homes = episode, group
        self._turn_media = turn_media
        self._reply: Reply | None = None
        """The newest."""
        self._num_calls = 0
        self.failure: Exception | None = None
        """Why engines gave no answer the last time: no fault of the environment."""

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, the newest reply included."""
        return self._reply.messages if self._reply else list(self.prompt.messages)

    @property
    def seed(self) -> int:
        """Number of the episode: the same for the same seed of the run, guid and sibling."""
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

        Where `messages` go on from a conversation of this session, what was sampled stays as it
        is, token by token, and only what is new is rendered and appended. Any other history is
        rendered as a whole, and begins a sequence of its own.

        Messages that are new may show media, as prompts in parts do: `{"type": "image", "image":
        ...}`, with `{"bytes": ...}`, a path or a data: URL.

        Args:
            messages: the whole conversation so far; None is the prompt.
            max_new_tokens: of the reply; None is the run's limit.
            ignore_eos: nothing but this limit ends the reply, and `stop` if it is given.
            stop: texts that end the reply, which keeps them, e.g. ["</search>"]; None are the
                run's. With routing replay, experts of what they end are not on record.
            tools: that the template tells the policy of; None are the prompt's. Others than a
                reply was given with begin a sequence of their own.

        Returns:
            The reply; without a token, and finished by LENGTH, where the conversation is as long
            as it may become.
        """
        asked = self.prompt.messages if messages is None else list(messages)
        tools = self.prompt.tools if tools is None else tools or None
        found, how = await self._given(asked, tools), self.how
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

    async def _sample(self, call: Call, how: How) -> Generation:
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

    async def _given(self, asked: list[Message], tools: Tools) -> Given:
        """The tokens of a conversation that the policy is to go on with."""
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
            return before.going_on(self.conversation.plain(text) if text else [])
        return await self._turn_media.added(before, self.prompt.where, new, text)

    def _refuse_media(self, messages: Sequence[Message], where: str) -> None:
        if any(not isinstance(message["content"], str) for message in messages):
            raise RelaxError(f"{self.prompt.where}: an environment shows media {where}")

    def _begin(self, given: Given) -> Call:
        """The call of these tokens: the record's next one, if it is of them, or a new one."""
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
    """The seed of a session's call: the session's own for the first, below 2**31."""
    if number == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4], "big") >> 1
