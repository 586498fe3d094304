"""What one engine can do, asked of itself once at its start: endpoints move between versions."""

import re
from http import HTTPStatus
from importlib import metadata
from typing import Any, NamedTuple

import httpx

from relax_hpc.engines.replies import checked, cut
from relax_hpc.errors import EngineError

_NEEDED = (
    "/generate",
    "/model_info",
    "/pause_generation",
    "/continue_generation",
    "/abort_request",
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/update_weights_from_disk",
    "/weights_checker",
)
"""Without one of them an engine is of no use here; SGLang has all of them from 0.5.17 at the
latest."""


_FLUSHES_PAUSED = (0, 5, 23)
"""The release of SGLang that was seen to; 0.5.17 does not."""


class Capabilities(NamedTuple):
    """What differs between the engines, and the versions of SGLang, that serve here."""

    engine: str
    """embedded or sglang."""
    version: str
    """Of the engine's own package."""
    version_spans: bool
    """Replies name the policy of every token; else only the policy at the request's end."""
    weight_sessions: bool
    """Updates stand between /begin_weight_update and /end_weight_update."""
    loads: bool
    """/v1/loads says how many requests run and how full the key-value cache is."""
    flushes_paused: bool
    """The cache of prefixes can be thrown away while requests wait, as they do in a pause."""
    memory_saver: bool
    """Engine memory can be released and resumed."""
    custom_weight_loaders: tuple[str, ...]
    """Dotted names that /update_weights_from_* accepts as load_format."""
    max_total_tokens: int | None
    """Tokens that its key-value cache holds; None if it does not say."""


def probe(url: str, token: str, *, timeout_s: float) -> Capabilities:
    """Asks a healthy engine that is not paused. It samples one token: that is the last test before
    others rely on it.

    Args:
        url: "http://host:port".
        token: bearer token.
        timeout_s: of each of a dozen small calls; the token waits for warm-up.

    Raises:
        EngineError: it cannot sample, or lacks what is needed; says which version would do.
    """
    with httpx.Client(
        base_url=url,
        headers={"Authorization": f"Bearer {token}"},
        timeout=timeout_s,
        trust_env=False,
    ) as http:
        try:
            return _probe(url, http)
        except httpx.HTTPError as error:
            raise EngineError(f"{url}: no answer when asked what it can do: {error!r}") from error


def _probe(url: str, http: httpx.Client) -> Capabilities:
    info = _server_info(url, http)
    embedded = info.get("engine") == "relax_hpc.embedded"
    version = metadata.version("relax-hpc") if embedded else str(info.get("version"))
    if missing := [endpoint for endpoint in _NEEDED if not _has(http, endpoint)]:
        raise EngineError(
            f"{url}: SGLang {version} has no {', '.join(missing)}; install 0.5.17 or newer"
        )
    return Capabilities(
        engine="embedded" if embedded else "sglang",
        version=version,
        version_spans=_names_policies(url, http),
        weight_sessions=_has(http, "/begin_weight_update"),
        loads=_has(http, "/v1/loads"),
        flushes_paused=embedded or _release(version) >= _FLUSHES_PAUSED,
        memory_saver=bool(info.get("enable_memory_saver")),
        custom_weight_loaders=tuple(info.get("custom_weight_loader") or ()),
        max_total_tokens=info.get("max_total_num_tokens"),
    )


def _server_info(url: str, http: httpx.Client) -> dict[str, Any]:
    """By its newest name; a 404 is an endpoint that moved as often as one that is not there."""
    for endpoint in ("/server_info", "/get_server_info"):
        response = http.get(endpoint)
        if response.status_code != HTTPStatus.NOT_FOUND:
            reply = checked(f"{url}{endpoint}", response)
            return reply if isinstance(reply, dict) else {}
    raise EngineError(f"{url}: has neither /server_info nor /get_server_info; is it SGLang?")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _has(http: httpx.Client, endpoint: str) -> bool:
    """Whether there is such an endpoint. It is not called: a route refuses a method it has not,
    and only a path without a route is not found."""
    return http.options(endpoint).status_code != HTTPStatus.NOT_FOUND


def _names_policies(url: str, http: httpx.Client) -> bool:
    """No version number tells; a reply does."""
    body = {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
    }
    reply = checked(f"{url}/generate", http.post("/generate", json=body))
    meta = reply["meta_info"]
    if len(meta.get("output_token_logprobs") or ()) != 1:
        raise EngineError(f"{url}/generate: asked for one token, got {cut(reply)}")
    return "weight_versions" in meta
