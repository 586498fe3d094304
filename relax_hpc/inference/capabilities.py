"""Probes an engine at its start for the endpoints it has: they move between versions of SGLang."""

import re
from collections.abc import Sequence
from http import HTTPStatus
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relax_hpc.data.media.canonical import digest_of
from relax_hpc.data.media.expand import MediaSpan
from relax_hpc.data.media.extent import Extent
from relax_hpc.data.media.recipe import is_shown_media, read_view
from relax_hpc.data.media.spool import MediaView, Spooled, open_spool, text_of, write
from relax_hpc.errors import EngineError
from relax_hpc.inference.http import Http, cut
from relax_hpc.runtime.files.records import read_json

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
"""Routes that an engine must have; SGLang has all of them since 0.5.17."""


_FLUSHES_PAUSED = (0, 5, 23)
"""Release of SGLang known to flush while paused; 0.5.17 does not."""


class Capabilities(NamedTuple):
    """The differences between engines, and versions of SGLang, that matter here."""

    engine: str
    version: str
    flushes_paused: bool
    """Whether the prefix cache can be flushed while requests are paused."""
    memory_saver: bool
    """Whether engine memory can be released and resumed."""


def probe(
    url: str, token: str, *, timeout_s: float, model_path: Path | None = None
) -> Capabilities:
    """Probes a healthy engine that is not paused. It samples one token, as a last test.

    Args:
        url: "http://host:port".
        timeout_s: of each of a dozen small calls; sampling the token waits for warm-up.
        model_path: folder of its model; a vision model is shown an image, too.

    Raises:
        EngineError: it cannot sample, or lacks an endpoint; names a version that would do.
    """
    with Http(url, token, timeout_s=timeout_s) as http:
        info = _server_info(http)
        embedded = info.get("engine") == "relax_hpc.embedded"
        version = metadata.version("relax-hpc") if embedded else str(info.get("version"))
        if missing := [endpoint for endpoint in _NEEDED if not _has(http, endpoint)]:
            raise EngineError(
                f"{http.url}: SGLang {version} has no {', '.join(missing)}; install 0.5.17 or newer"
            )
        _sample(http)
        if model_path is not None and not embedded and is_shown_media(model_path):
            _show(http, model_path, version)
        return Capabilities(
            engine="embedded" if embedded else "sglang",
            version=version,
            flushes_paused=embedded or _release(version) >= _FLUSHES_PAUSED,
            memory_saver=bool(info.get("enable_memory_saver")),
        )


def _server_info(http: Http) -> dict[str, Any]:
    """Returns the server info by its newest name; a 404 may mean that an endpoint moved."""
    for endpoint in ("/server_info", "/get_server_info"):
        reply = http.ask("GET", endpoint, optional=True)
        if isinstance(reply, dict):
            return reply
    raise EngineError(f"{http.url}: has neither /server_info nor /get_server_info; is it SGLang?")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _has(http: Http, endpoint: str) -> bool:
    """Whether the endpoint exists. Sends a wrong method, so that the endpoint is not called: only a
    path without a route answers 404."""
    return http.status("OPTIONS", endpoint) != HTTPStatus.NOT_FOUND


def _show(http: Http, model_path: Path, version: str) -> None:
    """Shows a black image of four tokens: the hook of our processor is no public API of SGLang's.

    Raises:
        EngineError: the engine rejects it.
    """
    recipe, config = read_view(model_path), read_json(model_path / "config.json")
    assert recipe is not None and config is not None
    token = config.get("thinker_config", config)["image_token_id"]
    side, patches = 2 * recipe.image.side, 2 * recipe.image.merge
    array = np.zeros((1, side, side, 3), np.uint8)
    digest = digest_of(array)
    with open_spool() as spool:
        draft = spool.draft()
        write(draft, array)
        extent = Extent("image", (4,), (side, side), (1, patches, patches))
        image = Spooled(extent, digest, spool.keep(draft, digest))
        shown = text_of(MediaView((image,), (MediaSpan(0, 1, 4),)), 0)
        try:
            _sample(http, [0, *[token] * 4, 0], image_data=[shown], extra_key="probe")
        except EngineError as error:
            raise EngineError(
                f"{http.url}: SGLang {version} does not take images as relax-hpc shows them; "
                f"install 0.5.17 or 0.5.23: {error}"
            ) from None


def _sample(http: Http, token_ids: Sequence[int] = (0,), **more: Any) -> None:  # noqa: ANN401
    body = {
        "input_ids": list(token_ids),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
        **more,
    }
    reply = http.ask("POST", "/generate", body)
    if len(reply["meta_info"].get("output_token_logprobs") or ()) != 1:
        raise EngineError(f"{http.url}/generate: asked for one token, got {cut(reply)}")
