"""Generation by one engine: token ids in, a stream of sampled tokens out.

Replies are streamed so that what is there outlives the engine: a response that was cut off goes on
elsewhere, with its tokens so far as part of the prompt.
"""

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Self

from relax_hpc.engines.async_http import AsyncHttp
from relax_hpc.engines.http import parse_version, reading
from relax_hpc.engines.reply import Reply, events
from relax_hpc.engines.response import Counts, Draft, Generation, Load, Sampling
from relax_hpc.errors import EngineError, EngineLostError, MediaMissingError
from relax_hpc.fleet.switches import Switches
from relax_hpc.media import wire
from relax_hpc.media.spool import View
from relax_hpc.schema import FinishReason

TOKENS_PER_CHUNK = 64
"""Limit of tokens that are sent at once. A chunk costs the engine's server as much as eight tokens;
those that are not sent yet are lost with an engine."""
HAND_OVER_S = 2.0
"""Time for an engine to send what it has sampled of a request that is cancelled."""


class GenerationClient:
    """Asks one engine. Every failure is an EngineError that names URL and endpoint."""

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
            token: bearer token.
            silence_s: longest time that a running request may say nothing, pauses included.
            tokens_per_chunk: tokens of a response that are sent at once, at most; see `sample`.
            switches: of this engine.
        """
        self.url = url
        self.counts = Counts()
        self.heard_version, self.heard_at = -1, 0.0
        """The engine's policy version, by the last tokens that came; their `time.monotonic`."""
        self._http = AsyncHttp(url, token, silence_s=silence_s)
        self._tokens_per_chunk, self._switches = tokens_per_chunk, switches
        self._reads_files = True

    async def aclose(self) -> None:
        """Cuts all connections; requests under way raise EngineLostError."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def version(self) -> int:
        """Policy version of the weights; 0 until the first update."""
        reply = await self._http.ask("GET", "/model_info")
        with reading(f"{self.url}/model_info"):
            return parse_version(reply)

    async def load(self) -> Load:
        """Asks the engine how busy it is."""
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
        """Samples one response, or what is missing of it.

        Args:
            prompt: token ids.
            seed: >= 0. SGLang heeds it in deterministic mode only.
            sampling: how; `max_new_tokens` counts what the draft has.
            version: policy version that the engine holds now; None asks it. The prefix cache does
                not know policies: without a key of its own, a prompt seen before an update would
                be continued from the old policy's cache.
            draft: what there is already; it grows while the response arrives, so what was sampled
                is there after an error, too. Of a request that is cancelled the engine is asked for
                what it has not sent yet.
            rid: to abort it by; unique.
            computed: called once the engine has been through the prompt, and maybe again.

        Returns:
            Each token has the policy that sampled it, as `switches` tells. Where they do not, it is
            what the engine says; and where that says nothing either, the first chunk after an
            update counts as the policy before it, which sampled some of its tokens.

        Raises:
            EngineLostError: it broke off; the draft can go on elsewhere.
            EngineError: refused.
        """
        draft = Draft() if draft is None else draft
        known = await self.version() if version is None else version
        body = self._body(prompt, seed, sampling, draft, known, rid or uuid.uuid4().hex)
        if sampling.view is not None:
            body |= await self._shown(sampling.view, known)
        try:
            return await self._ask(body, draft, self._read(body, sampling, draft, known, computed))
        except MediaMissingError:
            # It runs on another node, and has now said so once.
            self._reads_files, view = False, sampling.view
            assert view is not None
        body |= await self._shown(view, known)
        return await self._ask(body, draft, self._read(body, sampling, draft, known, computed))

    async def _shown(self, view: View, version: int) -> dict[str, Any]:
        """The fields of a request that show media: the paths of files, or their contents."""
        with_contents = not self._reads_files
        text = await asyncio.to_thread(wire.text_of, view, version, with_contents=with_contents)
        # Engines tell media apart by 30 bits in the keys of their prefixes (SGLang 0.5.17).
        return {"image_data": [text], "extra_key": f"v{version}-{view.digest.hex()}"}

    async def _ask(
        self, body: dict[str, Any], draft: Draft, answering: Coroutine[Any, Any, Generation]
    ) -> Generation:
        """Awaits an answer; of a request that is cancelled the draft gets what the engine has."""
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
        """Has the engine end a request and send the rest of what it has of it, if it can soon."""
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
        reply = Reply(f"{self.url}/generate", draft, len(body["input_ids"]), known)
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
                        self.counts = self.counts.plus(reply.given(sampling.view))
                        if computed:
                            computed()
                    if reply.version != before:
                        reply.settle(body["rid"], await self._between(before, reply.version))
                    if sampling.end and (over := sampling.end(draft.token_ids, seen)) is not None:
                        draft.cut(over)
                        return draft.finished(FinishReason.STOP)  # and the request is cut off
                    seen = len(draft.token_ids)
        except EngineLostError:
            if not reply.is_complete:  # else there is nothing that could go on elsewhere
                raise
        return draft.finished(reply.finish())

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
        """Differs from response to response: those that begin together, as a batch does, would
        all be sent at the same step again and again, and others wait meanwhile."""
        most = self._tokens_per_chunk
        return most - seed % (most // 3 + 1)
