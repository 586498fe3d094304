"""Client of one engine, over the HTTP endpoints of SGLang that the embedded engine serves as well.

Control calls (pause, weights, checksum) are synchronous: the trainer issues them from threads.
Generation is asynchronous: a rollout task has hundreds of requests in flight.
"""

import hashlib
import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, NamedTuple, Self

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from relax_hpc.errors import EngineError
from relax_hpc.schema import FinishReason

_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
_SHOWN_CHARACTERS = 500
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


class EngineClient:
    """Speaks to one engine. Every failure is an EngineError that names URL and endpoint."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        control_timeout_s: float = 300,
        generate_timeout_s: float = 3600,
    ) -> None:
        """Connects lazily.

        Args:
            url: "http://host:port".
            token: bearer token, SGLang's --api-key.
            control_timeout_s: of every control call; joining a weight group waits for its peers.
            generate_timeout_s: of a generation, pauses included.
        """
        self.url = url
        self._headers = {"Authorization": f"Bearer {token}"}
        self._generate_timeout_s = generate_timeout_s
        # trust_env off: a site's HTTP proxy must not see traffic between our own nodes.
        self._http = httpx.Client(
            base_url=url, headers=self._headers, timeout=control_timeout_s, trust_env=False
        )
        self._async_http: httpx.AsyncClient | None = None
        self._session_open = False

    def close(self) -> None:
        """Closes the control connections; `aclose` closes those of generation as well."""
        self._http.close()

    async def aclose(self) -> None:
        self.close()
        if self._async_http is not None:
            await self._async_http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # State.

    def health(self, timeout_s: float) -> bool:
        """Whether the server answers within `timeout_s`. Never raises."""
        try:
            return self._http.get("/health", timeout=timeout_s).is_success
        except httpx.HTTPError:
            return False

    def version(self) -> int:
        """Policy version of the weights; 0 until the first update."""
        return _parse_version(self._get("/model_info"))

    def checksum(self) -> str:
        """Digest of the weights.

        The embedded engine digests by Hugging Face names, as `comm.bucket.digest` does. SGLang
        digests what it holds, fused and sharded, so its digests compare with each other only.
        """
        reply = self._post("/weights_checker", {"action": "checksum"})
        if digest := reply.get("per_engine_checksum"):
            return str(digest)
        ranks = json.dumps(reply.get("ranks"), sort_keys=True)  # older SGLang has no overall one
        return hashlib.sha256(ranks.encode()).hexdigest()

    # Control.

    def pause(self) -> None:
        """Freezes all requests where they are; their caches stay."""
        self._post("/pause_generation", {"mode": "in_place"})

    def resume(self) -> None:
        """Lets the frozen requests go on."""
        self._post("/continue_generation", {})

    def abort_all(self) -> None:
        """Ends all requests; their callers get what there is, finished by ABORT."""
        self._post("/abort_request", {"abort_all": True})

    def flush_cache(self) -> None:
        """Forgets cached prefixes; refused while requests are running."""
        self._post("/flush_cache", {})

    # Weights.

    def init_weights_group(
        self, host: str, port: int, rank_offset: int, world_size: int, name: str, backend: str
    ) -> None:
        """Makes the engine join a broadcast group. Blocks until all its ranks are there."""
        self._post(
            "/init_weights_update_group",
            {
                "master_address": host,
                "master_port": port,
                "rank_offset": rank_offset,
                "world_size": world_size,
                "group_name": name,
                "backend": backend,
            },
        )

    def destroy_weights_group(self, name: str) -> None:
        """Makes the engine leave a broadcast group."""
        self._post("/destroy_weights_update_group", {"group_name": name})

    def update_weights(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group: str,
        version: int,
        last: bool,
    ) -> None:
        """Makes a paused engine receive one flat bucket; the sender broadcasts meanwhile.

        After an error the engine holds undefined weights until a whole update has succeeded.

        Args:
            names: Hugging Face names, in the order of their bytes.
            dtypes: "bfloat16", ...
            shapes: unsharded.
            group: a joined group.
            version: policy version of the weights.
            last: whether this bucket completes the version.
        """
        if not self._session_open:
            self._begin_session()
            self._session_open = True
        body: dict[str, Any] = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group,
            "load_format": "flattened_bucket",
            # Requests keep their caches over an in-place pause; see `_generate` for the others.
            "flush_cache": False,
        }
        if last:
            body["weight_version"] = str(version)
        try:
            self._post("/update_weights_from_distributed", body)
        except EngineError:
            self._session_open = False
            raise
        if last:
            self._session_open = False
            self._post("/end_weight_update", {}, optional=True)

    def update_weights_from_disk(self, path: str, version: int) -> None:
        """Makes a paused engine load a Hugging Face folder that it can see."""
        self._post(
            "/update_weights_from_disk",
            {"model_path": path, "weight_version": str(version), "flush_cache": False},
        )

    def _begin_session(self) -> None:
        """Opens an update session where the server has them (404 is the protocol before them)."""
        try:
            self._post("/begin_weight_update", {}, optional=True)
        except EngineError:  # a sender that died has left its session open
            self._post("/end_weight_update", {})
            self._post("/begin_weight_update", {})

    # Generation.

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
        started = _parse_version(await self._generate_call("GET", "/model_info", None))
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
        replies = await self._generate_call("POST", "/generate", body)
        if not isinstance(replies, list) or len(replies) != len(prompts):
            raise EngineError(
                f"{self.url}/generate: expected {len(prompts)} replies: {_cut(replies)}"
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

    async def _generate_call(self, method: str, endpoint: str, body: Any) -> Any:  # noqa: ANN401
        if self._async_http is None:
            self._async_http = httpx.AsyncClient(
                base_url=self.url,
                headers=self._headers,
                timeout=self._generate_timeout_s,
                limits=httpx.Limits(
                    max_connections=None,
                    max_keepalive_connections=None,
                    keepalive_expiry=_KEEPALIVE_S,
                ),
                trust_env=False,
            )
        # Asking again is safe: a response is a function of prompt, seed and policy.
        attempts = AsyncRetrying(
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_exponential(multiplier=0.1),
            retry=retry_if_exception_type((httpx.NetworkError, httpx.RemoteProtocolError)),
            reraise=True,
        )
        try:
            response: httpx.Response = await attempts(
                self._async_http.request, method, endpoint, json=body
            )
        except httpx.HTTPError as error:
            raise EngineError(f"{self.url}{endpoint}: {error!r}") from error
        return self._checked(endpoint, response)

    def _get(self, endpoint: str) -> dict[str, Any]:
        return self._request("GET", endpoint, None, optional=False)

    def _post(
        self, endpoint: str, body: dict[str, Any], *, optional: bool = False
    ) -> dict[str, Any]:
        return self._request("POST", endpoint, body, optional=optional)

    def _request(
        self, method: str, endpoint: str, body: dict[str, Any] | None, *, optional: bool
    ) -> dict[str, Any]:
        try:
            response = self._http.request(method, endpoint, json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"{self.url}{endpoint}: {error!r}") from error
        absent = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)
        if optional and response.status_code in absent:
            return {}
        reply = self._checked(endpoint, response)
        return reply if isinstance(reply, dict) else {}

    def _checked(self, endpoint: str, response: httpx.Response) -> Any:  # noqa: ANN401
        """The reply's JSON (None if it is not JSON); status 200 alone is not success."""
        try:
            reply = response.json()
        except ValueError:
            reply = None
        refused = isinstance(reply, dict) and reply.get("success") is False
        if not response.is_success or refused:
            said = reply.get("message") if isinstance(reply, dict) else None
            raise EngineError(
                f"{self.url}{endpoint}: HTTP {response.status_code}: {_cut(said or response.text)}"
            )
        return reply


def _version_runs(meta: dict[str, Any], started: int, num_tokens: int) -> list[tuple[int, int]]:
    if not num_tokens:
        return []
    if (spans := meta.get("weight_versions")) is None:
        return [(0, started)]  # the version at the end may be newer: an upper bound of staleness
    runs: list[tuple[int, int]] = []
    for span in spans:
        version = _parse_version({"weight_version": span["version"]})
        if not runs or runs[-1][1] != version:
            runs.append((int(span["start"]), version))
    return runs


def _parse_version(reply: dict[str, Any]) -> int:
    version = reply["weight_version"]
    return 0 if version == "default" else int(version)


def _cut(text: object) -> str:
    return str(text)[:_SHOWN_CHARACTERS]
