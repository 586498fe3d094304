"""Generation by one engine: token ids in and out, hundreds of requests in flight."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from relax_hpc.engines.replies import checked, cut, parse_version
from relax_hpc.errors import EngineError
from relax_hpc.schema import FinishReason

_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
_ATTEMPTS = 4
_KEEPALIVE_S = 2
"""Idle connections are dropped before the server does so (uvicorn: 5 s), which is a race."""


class Generation(NamedTuple):
    """One sampled response."""

    token_ids: list[int]
    """As the engine sampled them, the stop token included; never re-tokenised from text."""
    logprobs: list[float]
    """Nats, at sampling time, of the temperature-scaled distribution."""
    version_runs: list[tuple[int, int]]
    """(first response token, policy version) per run, ascending; empty without tokens."""
    finish: FinishReason


class GenerationClient:
    """Asks one engine. Every failure is an EngineError that names URL and endpoint."""

    def __init__(self, url: str, token: str, *, timeout_s: float = 3600) -> None:
        """Connects lazily.

        Args:
            url: "http://host:port".
            token: bearer token.
            timeout_s: of a request, pauses included.
        """
        self.url = url
        # trust_env off: a site's HTTP proxy must not see traffic between our own nodes.
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=timeout_s,
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=None,
                keepalive_expiry=_KEEPALIVE_S,
            ),
            trust_env=False,
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        seed: int,
        temperature: float,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
    ) -> Generation:
        """Samples one response; see `generate_group`."""
        [generation] = await self.generate_group(
            prompt,
            [seed],
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
        )
        return generation

    async def generate_group(
        self,
        prompt: Sequence[int],
        seeds: Sequence[int],
        *,
        temperature: float,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
    ) -> list[Generation]:
        """Samples the siblings of a prompt, one per seed, in one request; see `generate_batch`."""
        return await self.generate_batch(
            [prompt] * len(seeds),
            seeds,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
        )

    async def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        temperature: float,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
    ) -> list[Generation]:
        """Samples one response per prompt in one request; returns when all have ended.

        Args:
            prompts: token ids.
            seeds: one per prompt, >= 0. SGLang heeds them in deterministic mode only.
            temperature: 0 is greedy.
            max_new_tokens: response tokens at most.
            stop_token_ids: end a response, as the model's own end-of-sequence tokens do.
            ignore_eos: nothing but `max_new_tokens` ends a response.

        Returns:
            In the order of `prompts`. Servers that report version spans (SGLang from 0.5.2x, ours)
            attribute each token to its policy. For others, all tokens of a request that saw an
            update count as the version at its start: staleness is then an upper bound.
        """
        started = parse_version(await self._request("GET", "/model_info", None))
        sampling = {
            "temperature": temperature,
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": list(stop_token_ids),
            "ignore_eos": ignore_eos,
        }
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": [{**sampling, "sampling_seed": seed} for seed in seeds],
            "return_logprob": True,
            # The prefix cache does not know policies: without a key of its own, a prompt seen
            # before an update would be continued from the old policy's cache.
            "extra_key": [f"v{started}"] * len(prompts),
        }
        replies = await self._request("POST", "/generate", body)
        if not isinstance(replies, list) or len(replies) != len(prompts):
            raise EngineError(
                f"{self.url}/generate: expected {len(prompts)} replies: {cut(replies)}"
            )
        return [self._parse_reply(reply, started) for reply in replies]

    def _parse_reply(self, reply: dict[str, Any], started: int) -> Generation:
        meta = reply["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        reason = meta["finish_reason"]
        if reason["type"] == "abort" and reason.get("status_code"):
            raise EngineError(f"{self.url}/generate: refused: {reason.get('message')}")
        return Generation(
            token_ids=[int(pair[1]) for pair in pairs],
            logprobs=[float(pair[0]) for pair in pairs],
            version_runs=_version_runs(meta, started, len(pairs)),
            finish=_FINISH[reason["type"]],
        )

    async def _request(self, method: str, endpoint: str, body: Any) -> Any:  # noqa: ANN401
        # Asking again is safe: a response is a function of prompt, seed and policy.
        attempts = AsyncRetrying(
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_exponential(multiplier=0.1),
            retry=retry_if_exception_type((httpx.NetworkError, httpx.RemoteProtocolError)),
            reraise=True,
        )
        try:
            response: httpx.Response = await attempts(
                self._http.request, method, endpoint, json=body
            )
        except httpx.HTTPError as error:
            raise EngineError(f"{self.url}{endpoint}: {error!r}") from error
        return checked(f"{self.url}{endpoint}", response)


def _version_runs(meta: dict[str, Any], started: int, num_tokens: int) -> list[tuple[int, int]]:
    if not num_tokens:
        return []
    if (spans := meta.get("weight_versions")) is None:
        return [(0, started)]  # the version at the end may be newer: an upper bound of staleness
    runs: list[tuple[int, int]] = []
    for span in spans:
        version = parse_version({"weight_version": span["version"]})
        if not runs or runs[-1][1] != version:
            runs.append((int(span["start"]), version))
    return runs
