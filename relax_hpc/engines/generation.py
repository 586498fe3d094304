"""Generation by one engine: token ids in, a stream of sampled tokens out.

Replies are streamed so that what is there outlives the engine: a response that was cut off goes on
elsewhere, with its tokens so far as part of the prompt.
"""

import asyncio
import base64
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from relax_hpc.engines.async_http import AsyncHttp
from relax_hpc.engines.http import cut, parse_version
from relax_hpc.errors import EngineError, EngineLostError, MediaMissingError
from relax_hpc.fleet.switches import Switches
from relax_hpc.media import wire
from relax_hpc.media.spool import View
from relax_hpc.schema import FinishReason

_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
Experts = npt.NDArray[np.int16]
End = Callable[[Sequence[int], int], int | None]
"""Tells of tokens, the first so many of which it has seen, how many of them a response is; None
while it is not over. Engines are given token ids and no text, so none of them can."""
TOKENS_PER_CHUNK = 64
"""Limit of tokens that are sent at once. A chunk costs the engine's server as much as eight tokens;
those that are not sent yet are lost with an engine."""


class Sampling(NamedTuple):
    """The settings of a sample."""

    temperature: float
    """0 is greedy."""
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    """End a response, as the model's own end-of-sequence tokens do."""
    ignore_eos: bool = False
    """Nothing but `max_new_tokens` ends a response."""
    routed_experts: bool = False
    """Ask which experts every token went to; the engine must have been told to record them."""
    top_p: float = 1.0
    """Sample from the fewest tokens that have this much of the probability together."""
    top_k: int = 0
    """Sample from so many tokens, the most likely ones; 0 is all. With `top_p`, those of both."""
    end: End | None = None
    """Ends a response, too."""
    view: View | None = None
    """Media among the tokens of the prompt."""


class Generation(NamedTuple):
    """One sampled response."""

    token_ids: list[int]
    """Tokens as the engine sampled them, with the stop token; never re-tokenised from text."""
    logprobs: list[float]
    """Nats, at sampling time, of the temperature-scaled distribution of all tokens."""
    version_runs: list[tuple[int, int]]
    """(first response token, policy version) per run, ascending; empty without tokens."""
    finish: FinishReason
    routed_experts: Experts | None = None
    """[prompt and response tokens, layers x experts per token], if asked for. The last token has
    not been through the model: its row repeats the one before."""


class Load(NamedTuple):
    """The load of an engine, over all its data-parallel ranks."""

    running: int
    waiting: int
    kv_used: float
    """Fraction of the key-value cache, of the fullest rank."""


@dataclass(slots=True)
class Draft:
    """A response that is not complete; it outlives the engine that sampled it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_runs: list[tuple[int, int]] = field(default_factory=list)
    experts: list[Experts] = field(default_factory=list)
    """Rows from the first prompt token on, in pieces."""

    def take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.token_ids += tokens
        self.logprobs += logprobs

    def mark(self, first: int, version: int) -> None:
        """Tokens from `first` on were sampled by `version`."""
        if not self.version_runs or self.version_runs[-1][1] != version:
            self.version_runs.append((first, version))

    def remark(self, first: int, version: int) -> None:
        """Does as `mark`, whatever was said of those tokens before."""
        self.version_runs = [run for run in self.version_runs if run[0] < first]
        self.mark(first, version)

    def cut(self, num_tokens: int) -> None:
        """Forgets what comes after the first so many tokens."""
        assert not self.experts
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:]

    def finished(self, reason: FinishReason) -> Generation:
        experts = np.concatenate(self.experts) if self.experts else None
        if experts is not None:
            experts = np.concatenate([experts, experts[-1:]])
        runs = [run for run in self.version_runs if run[0] < len(self.token_ids)]
        return Generation(self.token_ids, self.logprobs, runs, reason, experts)


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
        self.num_tokens = 0
        """Sampled tokens that came, so far."""
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
        return parse_version(await self._http.ask("GET", "/model_info"))

    async def load(self) -> Load:
        """Asks the engine how busy it is."""
        reply = await self._http.ask("GET", "/v1/loads?include=core")
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
                is there after an error, too.
            rid: to abort it by; unique.

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
            return await self._ask(body, sampling, draft, known)
        except MediaMissingError:
            # It runs on another node, and has now said so once.
            self._reads_files, view = False, sampling.view
            assert view is not None
        return await self._ask(body | await self._shown(view, known), sampling, draft, known)

    async def _shown(self, view: View, version: int) -> dict[str, Any]:
        """The fields of a request that show media: the paths of files, or their contents."""
        with_contents = not self._reads_files
        text = await asyncio.to_thread(wire.text_of, view, version, with_contents=with_contents)
        # Engines tell media apart by 30 bits in the keys of their prefixes (SGLang 0.5.17).
        return {"image_data": [text], "extra_key": f"v{version}-{view.digest.hex()}"}

    async def _ask(
        self, body: dict[str, Any], sampling: Sampling, draft: Draft, known: int
    ) -> Generation:
        reply = _Reply(f"{self.url}/generate", draft, len(body["input_ids"]), known)
        seen = 0
        try:
            async with aclosing(self._http.stream("POST", "/generate", body)) as pieces:
                async for chunk in _events(pieces):
                    before, held = reply.version, len(draft.token_ids)
                    reply.add(chunk)
                    if len(draft.token_ids) > held:
                        self.num_tokens += len(draft.token_ids) - held
                        self.heard_version, self.heard_at = reply.version, time.monotonic()
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


class _Reply:
    """Puts the chunks of one streamed reply into a draft."""

    def __init__(self, asked: str, draft: Draft, num_given: int, version: int = 0) -> None:
        """`version` is that of the engine when it was asked."""
        self._asked, self._draft, self._num_given = asked, draft, num_given
        self._first = len(draft.token_ids)
        draft.version_runs = [run for run in draft.version_runs if run[0] < self._first]
        self.version, self._settled = version, True
        """Version of the newest token; whether it is known exactly which token is whose."""
        self._last: dict[str, Any] | None = None

    def add(self, chunk: dict[str, Any]) -> None:
        if error := chunk.get("error"):
            said = str(error.get("message", error))
            kind = MediaMissingError if wire.MISSING in said else EngineError
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
        """Puts the changes of policy that the last chunk spans where they were."""
        if switches is None:
            self._settled = False
        for version, num_sampled in (switches or {}).items():
            self._draft.remark(self._first + num_sampled.get(rid, 0), version)

    @property
    def is_complete(self) -> bool:
        """Whether its last chunk has come."""
        return self._last is not None and bool(self._last.get("finish_reason"))

    def finish(self) -> FinishReason:
        """Call it at the end of the stream."""
        if self._last is None or not self.is_complete:
            raise EngineLostError(f"{self._asked}: the reply broke off")
        if not self._settled and (spans := self._last.get("weight_versions")) is not None:
            self._mark_again(spans)
        if encoded := self._last.get("routed_experts"):
            self._take_experts(encoded)
        return _FINISH[self._last["finish_reason"]["type"]]

    def _check_accepted(self, finish: dict[str, Any] | None) -> None:
        if finish and finish["type"] == "abort" and (status := finish.get("status_code")):
            kind = EngineError if status == HTTPStatus.BAD_REQUEST else EngineLostError
            raise kind(f"{self._asked}: refused: {finish.get('message')}")

    def _mark_again(self, spans: Sequence[dict[str, Any]]) -> None:
        """The engine says precisely which token has which version."""
        draft = self._draft
        draft.version_runs = [run for run in draft.version_runs if run[0] < self._first]
        for span in spans:
            if span["end"] > span["start"]:
                version = parse_version({"weight_version": span["version"]})
                draft.mark(self._first + int(span["start"]), version)

    def _take_experts(self, encoded: str) -> None:
        """Rows of the tokens that went through the model since the last row of the draft."""
        draft = self._draft
        num_sampled = len(draft.token_ids) - self._first
        rows = self._num_given + num_sampled - 1 - sum(map(len, draft.experts))
        flat = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
        if rows <= 0 or flat.size % rows:
            raise EngineError(f"{self._asked}: {flat.size} routed experts for {rows} tokens")
        draft.experts.append(flat.reshape(rows, -1).astype(np.int16))


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The JSON of server-sent events, up to the mark that ends them."""
    begun = list[bytes]()  # of a line, which may be megabytes of routed experts
    async for piece in pieces:
        first, *more = piece.split(b"\n")
        begun.append(first)
        if not more:
            continue
        lines, begun = [b"".join(begun), *more[:-1]], [more[-1]]
        for line in lines:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line[6:])
