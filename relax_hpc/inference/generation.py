"""Generates with one engine: token ids in, a stream of sampled tokens out.

Replies are streamed so that partial responses outlive the engine: an interrupted response continues
elsewhere, with its tokens so far as part of the prompt.
"""

import asyncio
import base64
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from relax_hpc.data.media import spool
from relax_hpc.data.media.spool import MediaView
from relax_hpc.errors import EngineError, EngineFaultError, EngineLostError, MediaMissingError
from relax_hpc.inference.http import AsyncHttp, cut, parse_version, reading
from relax_hpc.inference.switches import Switches
from relax_hpc.schema import FinishReason

Experts = npt.NDArray[np.int16]
End = Callable[[Sequence[int], int], int | None]
"""Called with response tokens, of which it has seen the first so many; returns the length at which
the response ends, or None. Engines get token ids without text, so they cannot stop on strings."""


class Sampling(NamedTuple):
    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    """End a response, like the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Only `max_new_tokens` ends a response."""
    routed_experts: bool = False
    """Return each token's routed experts; the engine must be configured to record them."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this much probability; logprobs are those of the
    whole distribution."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 means all. Both limits apply with `top_p`."""
    end: End | None = None
    """Ends a response, too."""
    view: MediaView | None = None
    """Media among the tokens of the prompt."""
    max_tokens: int = 1 << 62
    """Limit of an episode's sequence, which its session heeds."""
    min_version: int = 0
    """Oldest policy version that may sample any of the tokens."""


class Generation(NamedTuple):
    token_ids: list[int]
    """Tokens as sampled, with the stop token; never re-tokenised from text."""
    logprobs: list[float]
    """Nats, at sampling time, of the temperature-scaled distribution over all tokens."""
    version_runs: list[tuple[int, int]]
    """(first response token, policy version) per run, ascending; empty without tokens."""
    finish: FinishReason
    routed_experts: Experts | None = None
    """[prompt and response tokens, layers x experts per token], if requested. The last token was
    not processed by the model: its row repeats the one before."""


class Counts(NamedTuple):
    """Tokens and media requested from an engine and returned so far; they add up."""

    num_tokens: int = 0
    """Sampled."""
    num_given: int = 0
    """Prompt tokens of complete replies; a continued response is part of its prompt."""
    num_cached: int = 0
    """Prompt tokens found in the cache."""
    num_media: int = 0
    num_media_cached: int = 0
    """Media found in the cache whole, so that they needed no encoding."""

    def plus(self, other: "Counts") -> "Counts":
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: "Counts") -> "Counts":
        return Counts(*(a - b for a, b in zip(self, other, strict=True)))


class Load(NamedTuple):
    """The load of an engine, over all its data-parallel ranks."""

    running: int
    waiting: int
    kv_used: float
    """Fraction of the key-value cache, of the fullest rank."""


@dataclass(slots=True)
class Draft:
    """An incomplete response; it outlives the engine that sampled it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_runs: list[tuple[int, int]] = field(default_factory=list)
    experts: list[Experts] = field(default_factory=list)
    """Rows from the first prompt token on, in pieces."""
    num_unsent: int = 0
    """Most tokens that an engine sampled but did not send before the request was cut off."""

    def take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.token_ids += tokens
        self.logprobs += logprobs

    def mark(self, first: int, version: int) -> None:
        """Marks tokens from `first` on as sampled by `version`."""
        if not self.version_runs or self.version_runs[-1][1] != version:
            self.version_runs.append((first, version))

    def remark(self, first: int, version: int) -> None:
        """Does as `mark`, and overrides earlier marks of those tokens."""
        self.version_runs = [run for run in self.version_runs if run[0] < first]
        self.mark(first, version)

    def cut(self, num_tokens: int) -> None:
        """Keeps the first so many tokens, and drops all experts, which come with a whole reply."""
        self.experts = []
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:]

    def finish(self, reason: FinishReason) -> Generation:
        experts = np.concatenate(self.experts) if self.experts else None
        if experts is not None:
            experts = np.concatenate([experts, experts[-1:]])
        runs = [run for run in self.version_runs if run[0] < len(self.token_ids)]
        return Generation(self.token_ids, self.logprobs, runs, reason, experts)


class ReplyAssembler:
    """Puts the chunks of one streamed reply into a draft."""

    def __init__(self, asked: str, draft: Draft, num_given: int, version: int = 0) -> None:
        """`version`: of the engine when the request was sent."""
        self._asked, self._draft, self._num_given = asked, draft, num_given
        self._first = len(draft.token_ids)
        draft.version_runs = [run for run in draft.version_runs if run[0] < self._first]
        self.version, self._settled = version, True
        """Version of the newest token; whether the version of each token is known exactly."""
        self._last: dict[str, Any] | None = None

    def add(self, chunk: dict[str, Any]) -> None:
        if error := chunk.get("error"):
            said = str(error.get("message", error))
            kind = MediaMissingError if spool.MISSING in said else EngineError
            raise kind(f"{self._asked}: {cut(said)}")
        meta = chunk["meta_info"]
        self._check_accepted(meta.get("finish_reason"))
        draft = self._draft
        held = len(draft.token_ids) - self._first
        new = int(meta["completion_tokens"]) - held
        if new > 0:  # a chunk has what is new, or (as a server's option) everything so far
            pairs = meta["output_token_logprobs"][-new:]
            if len(pairs) != new:
                raise EngineError(f"{self._asked}: {new} new tokens, {len(pairs)} logprobs")
            draft.mark(self._first + held, self.version)
            draft.take([int(pair[1]) for pair in pairs], [float(pair[0]) for pair in pairs])
            self.version = parse_version(meta)
        self._last = meta

    def settle(self, rid: str, switches: Mapping[int, Mapping[str, int]] | None) -> None:
        """Places the policy changes within the last chunk exactly."""
        if switches is None:
            self._settled = False
        for version, num_sampled in (switches or {}).items():
            self._draft.remark(self._first + num_sampled.get(rid, 0), version)

    def count_given(self, view: MediaView | None) -> Counts:
        """Counts the prompt, with the engine's count of cached tokens."""
        assert self._last is not None
        cached = int(self._last.get("cached_tokens", 0))
        ends = {span.medium: span.first + span.tokens for span in (view.spans if view else ())}
        found = sum(end <= cached for end in ends.values())
        return Counts(0, self._num_given, cached, len(ends), found)

    @property
    def is_complete(self) -> bool:
        return self._last is not None and bool(self._last.get("finish_reason"))

    def finish(self) -> FinishReason:
        if self._last is None or not self.is_complete:
            raise EngineLostError(f"{self._asked}: the reply broke off")
        if not self._settled and (spans := self._last.get("weight_versions")) is not None:
            self._mark_again(spans)
        if encoded := self._last.get("routed_experts"):
            self._take_experts(encoded)
        return FinishReason[self._last["finish_reason"]["type"].upper()]

    def _check_accepted(self, finish: dict[str, Any] | None) -> None:
        if finish and finish["type"] == "abort" and (status := finish.get("status_code")):
            kind = EngineError if status == HTTPStatus.BAD_REQUEST else EngineFaultError
            raise kind(f"{self._asked}: refused: {status}: {cut(finish.get('message'))}")

    def _mark_again(self, spans: Sequence[dict[str, Any]]) -> None:
        """Marks tokens with the exact versions that the engine reports."""
        draft = self._draft
        draft.version_runs = [run for run in draft.version_runs if run[0] < self._first]
        for span in spans:
            if span["end"] > span["start"]:
                version = parse_version({"weight_version": span["version"]})
                draft.mark(self._first + int(span["start"]), version)

    def _take_experts(self, encoded: str) -> None:
        """Takes rows of the tokens processed since the last row of the draft."""
        draft = self._draft
        num_sampled = len(draft.token_ids) - self._first
        rows = self._num_given + num_sampled - 1 - sum(map(len, draft.experts))
        flat = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
        if rows <= 0 or flat.size % rows:
            raise EngineError(f"{self._asked}: {flat.size} routed experts for {rows} tokens")
        draft.experts.append(flat.reshape(rows, -1).astype(np.int16))


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields the JSON texts of server-sent events, up to the end mark."""
    begun = list[bytes]()  # of a line, which may be megabytes of routed experts
    async for piece in pieces:
        first, *more = piece.split(b"\n")
        begun.append(first)
        if not more:
            continue
        lines, begun = [b"".join(begun), *more[:-1]], [more[-1]]
        for line in lines:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield line[6:]


TOKENS_PER_CHUNK = 64
"""Limit of tokens per chunk. A chunk costs the engine's server as much as eight tokens; tokens not
sent yet are lost with an engine."""
HAND_OVER_S = 2.0
"""Time for an engine to send the remaining tokens of a cancelled request."""


class GenerationClient:
    """Calls one engine. Every failure is an EngineError that names URL and endpoint."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        silence_s: float = 3600,
        tokens_per_chunk: int = TOKENS_PER_CHUNK,
        switches: Switches | None = None,
    ) -> None:
        """Connects lazily.

        Args:
            url: "http://host:port".
            silence_s: longest silence of a running request, pauses included.
            tokens_per_chunk: most tokens of a response sent at once; see `sample`.
        """
        self.url = url
        self.counts = Counts()
        self.heard_version, self.heard_at = -1, 0.0
        """The engine's policy version, by the last tokens; `time.monotonic` of their arrival."""
        self._http = AsyncHttp(url, token, silence_s=silence_s)
        self._tokens_per_chunk, self._switches = tokens_per_chunk, switches
        self._reads_files = True

    async def aclose(self) -> None:
        """Cuts all connections; open requests raise EngineLostError."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def version(self) -> int:
        """Returns the policy version of the weights; 0 until the first update."""
        reply = await self._http.ask("GET", "/model_info")
        with reading(f"{self.url}/model_info"):
            return parse_version(reply)

    async def load(self) -> Load:
        path = "/v1/loads?include=core"
        reply = await self._http.ask("GET", path)
        with reading(f"{self.url}{path}"):
            ranks = reply["loads"]
            return Load(
                running=sum(int(rank["num_running_reqs"]) for rank in ranks),
                waiting=sum(int(rank["num_waiting_reqs"]) for rank in ranks),
                kv_used=max((float(rank["token_usage"]) for rank in ranks), default=0.0),
            )

    async def sample(
        self,
        prompt: Sequence[int],
        seed: int,
        sampling: Sampling,
        *,
        version: int | None = None,
        draft: Draft | None = None,
        rid: str | None = None,
        computed: Callable[[], None] | None = None,
    ) -> Generation:
        """Samples one response, or the rest of it.

        Args:
            prompt: token ids.
            seed: >= 0. SGLang heeds it in deterministic mode only.
            sampling: settings; `max_new_tokens` includes the tokens of the draft.
            version: current policy version of the engine; None requests it. The prefix cache does
                not know policies: without a key of its own, a prompt seen before an update would be
                continued from the old policy's cache.
            draft: the tokens so far; it grows while the response arrives, so an error loses none.
                After a cancellation it gets the tokens that the engine has not sent yet.
            rid: to abort it by; unique.
            computed: called once the engine has processed the prompt, and maybe again.

        Returns:
            Each token has the policy that sampled it, according to `switches`, else to the engine.
            If neither knows, the first chunk after an update counts as the previous policy's,
            which sampled some of its tokens.

        Raises:
            EngineLostError: interrupted; the draft can continue elsewhere.
            EngineError: refused.
        """
        draft = Draft() if draft is None else draft
        known = await self.version() if version is None else version
        body = self._body(prompt, seed, sampling, draft, known, rid or uuid.uuid4().hex)
        if sampling.view is not None:
            body |= await self._show_media(sampling.view, known)
        try:
            return await self._ask(body, draft, self._read(body, sampling, draft, known, computed))
        except MediaMissingError:
            # It runs on another node, and has now said so once.
            self._reads_files, view = False, sampling.view
            assert view is not None
        body |= await self._show_media(view, known)
        return await self._ask(body, draft, self._read(body, sampling, draft, known, computed))

    async def _show_media(self, view: MediaView, version: int) -> dict[str, Any]:
        """Returns the fields of a request that show media: paths of files, or their contents."""
        with_contents = not self._reads_files
        text = await asyncio.to_thread(spool.text_of, view, version, with_contents=with_contents)
        # Engines tell media apart by 30 bits in the keys of their prefixes (SGLang 0.5.17).
        return {"image_data": [text], "extra_key": f"v{version}-{view.digest.hex()}"}

    async def _ask(
        self, body: dict[str, Any], draft: Draft, answering: Coroutine[Any, Any, Generation]
    ) -> Generation:
        """Awaits an answer; after a cancellation the draft gets the engine's remaining tokens."""
        draft.num_unsent = 0
        answer = asyncio.ensure_future(answering)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            draft.num_unsent = body["sampling_params"]["stream_interval"] - 1
            try:
                await self._hand_over(answer, body["rid"])
            finally:
                answer.cancel()
            if not (answer.cancelled() or answer.exception()):
                draft.num_unsent = 0
            raise

    async def _hand_over(self, answer: "asyncio.Future[Generation]", rid: str) -> None:
        """Has the engine end a request and send its remaining tokens, if it can soon."""
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(HAND_OVER_S):
                if not answer.done():
                    await self._http.ask("POST", "/abort_request", {"rid": rid})
                await asyncio.wait({answer})
        answer.cancel()
        await asyncio.wait({answer})

    async def _read(
        self,
        body: dict[str, Any],
        sampling: Sampling,
        draft: Draft,
        known: int,
        computed: Callable[[], None] | None,
    ) -> Generation:
        reply = ReplyAssembler(f"{self.url}/generate", draft, len(body["input_ids"]), known)
        seen, begun = 0, False
        try:
            async with aclosing(self._http.stream("POST", "/generate", body)) as pieces:
                async for event in events(pieces):
                    before, held = reply.version, len(draft.token_ids)
                    with reading(f"{self.url}/generate"):
                        reply.add(json.loads(event))
                    if new := len(draft.token_ids) - held:
                        self.counts = self.counts.plus(Counts(num_tokens=new))
                        self.heard_version, self.heard_at = reply.version, time.monotonic()
                    if new and not begun:
                        begun = True
                        self.counts = self.counts.plus(reply.count_given(sampling.view))
                        if computed:
                            computed()
                    if reply.version != before:
                        reply.settle(body["rid"], await self._between(before, reply.version))
                    if sampling.end and (over := sampling.end(draft.token_ids, seen)) is not None:
                        draft.cut(over)
                        return draft.finish(FinishReason.STOP)  # and the request is cut off
                    seen = len(draft.token_ids)
        except EngineLostError:
            if not reply.is_complete:  # else there is nothing that could go on elsewhere
                raise
        return draft.finish(reply.finish())

    async def _between(self, before: int, now: int) -> Mapping[int, Mapping[str, int]] | None:
        return await self._switches.between(before, now) if self._switches else None

    def _body(
        self,
        prompt: Sequence[int],
        seed: int,
        sampling: Sampling,
        draft: Draft,
        version: int,
        rid: str,
    ) -> dict[str, Any]:
        body = {
            "rid": rid,
            "input_ids": [*prompt, *draft.token_ids],
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_new_tokens": sampling.max_new_tokens - len(draft.token_ids),
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": sampling.ignore_eos,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "sampling_seed": seed,
                "stream_interval": self._interval(seed),
            },
            "stream": True,
            "return_logprob": True,
            "extra_key": f"v{version}",
        }
        if sampling.routed_experts:
            body["return_routed_experts"] = True
            body["routed_experts_start_len"] = sum(map(len, draft.experts))
        return body

    def _interval(self, seed: int) -> int:
        """Returns a different interval per response: a batch that starts together would otherwise
        send all chunks at the same steps and delay other work."""
        most = self._tokens_per_chunk
        return most - seed % (most // 3 + 1)
