"""/generate of the embedded engine: requests in, replies out, whole or streamed."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from relax_hpc.engines.embedded.scheduler import Chunk, Completion, Request, Scheduler
from relax_hpc.errors import EngineError
from relax_hpc.schema import FinishReason

Body = dict[str, Any]
_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


class GenerationEndpoint:
    """Answers /generate.

    Args:
        scheduler: samples.
        version_spans: replies name the policy of every token, not only the newest.
    """

    def __init__(self, scheduler: Scheduler, *, version_spans: bool) -> None:
        self._scheduler, self._version_spans = scheduler, version_spans

    async def answer(self, http: HttpRequest) -> Response:
        try:
            body = json.loads(await http.body())
            _refuse_media(body)
            if body.get("stream"):
                return StreamingResponse(self._stream(body), media_type="text/event-stream")
            return JSONResponse(await self._whole(body))
        except (EngineError, ValueError, TypeError, KeyError) as error:
            message = f"{type(error).__name__}: {error}"
            return JSONResponse({"success": False, "message": message}, status_code=400)

    async def _whole(self, body: Body) -> Body | list[Body]:
        prompts = body["input_ids"]
        batched = bool(prompts) and isinstance(prompts[0], list)
        prompts = prompts if batched else [prompts]
        sampling = body.get("sampling_params") or {}
        sampling = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        rids = body.get("rid") or [uuid.uuid4().hex for _ in prompts]
        rids = rids if isinstance(rids, list) else [rids]
        requests = [self._request(*item) for item in zip(rids, prompts, sampling, strict=True)]
        self._scheduler.submit(requests)
        completions = await asyncio.gather(*(asyncio.wrap_future(r.done) for r in requests))
        replies = [self._reply(r, c) for r, c in zip(requests, completions, strict=True)]
        return replies if batched else replies[0]

    async def _stream(self, body: Body) -> AsyncIterator[bytes]:
        """Server-sent events, each with what is new. Who hangs up ends the request."""
        sampling = body.get("sampling_params") or {}
        try:
            rid = body.get("rid") or uuid.uuid4().hex
            request = self._request(rid, body["input_ids"], sampling)
        except EngineError as error:  # the head of the reply is out; SGLang answers so, too
            yield _event({"error": {"message": str(error), "code": 400}})
            return
        loop, chunks = asyncio.get_running_loop(), asyncio.Queue[Chunk | None]()

        def put(chunk: Chunk | None) -> None:
            with suppress(RuntimeError):  # the loop is closed: the server ends
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        request.stream, request.stream_interval = put, int(sampling.get("stream_interval") or 1)
        request.done.add_done_callback(lambda _: put(None))
        self._scheduler.submit([request])
        try:
            while (chunk := await chunks.get()) is not None:
                yield _event(_partial(request, chunk))
            completion = request.done.result()
            rest = slice(request.num_streamed, None)
            last = self._reply(request, completion)
            last["output_ids"] = last["output_ids"][rest]
            meta = last["meta_info"]
            meta["output_token_logprobs"] = meta["output_token_logprobs"][rest]
            yield _event(last) + b"data: [DONE]\n\n"
        finally:
            if not request.done.done():
                self._scheduler.call(lambda: self._scheduler.abort(request.rid))

    def _request(self, rid: str, prompt: list[int], sampling: Body) -> Request:
        shape, limit = self._scheduler.model.shape, sampling.get("max_new_tokens", 128)
        if not prompt or not all(0 <= token < shape.vocab_size for token in prompt):
            raise EngineError(f"input_ids: 1 or more token ids below {shape.vocab_size}")
        if limit < 1 or len(prompt) + limit > shape.max_positions:
            raise EngineError(
                f"{len(prompt)} prompt tokens and {limit} new ones: "
                f"this model has {shape.max_positions} positions"
            )
        stop_ids = shape.eos_ids | set(sampling.get("stop_token_ids") or [])
        seed, top_p, top_k = (sampling.get(k) for k in ("sampling_seed", "top_p", "top_k"))
        if not 0 < (top_p := 1.0 if top_p is None else float(top_p)) <= 1:
            raise EngineError(f"top_p {top_p}: above 0, and 1 at most")
        if (top_k := -1 if top_k is None else int(top_k)) < 1 and top_k != -1:
            raise EngineError(f"top_k {top_k}: 1 or more, or -1 for all")
        return Request(
            rid=rid,
            prompt=prompt,
            seed=uuid.uuid4().int >> 65 if seed is None else seed,
            temperature=float(sampling.get("temperature", 1.0)),
            max_new_tokens=limit,
            stop_ids=frozenset() if sampling.get("ignore_eos") else frozenset(stop_ids),
            top_p=top_p,
            top_k=max(top_k, 0),
        )

    def _reply(self, request: Request, completion: Completion) -> Body:
        finish: Body = {"type": _FINISH[completion.finish]}
        if completion.finish is FinishReason.STOP:
            finish["matched"] = completion.token_ids[-1]
        meta = {
            "id": request.rid,
            "finish_reason": finish,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(completion.token_ids),
            "weight_version": completion.version,
            "output_token_logprobs": _pairs(completion.token_ids, completion.logprobs),
        }
        if self._version_spans:
            meta["weight_versions"] = [span._asdict() for span in completion.spans]
        return {"output_ids": completion.token_ids, "meta_info": meta}


def _refuse_media(body: Body) -> None:
    for key in ("image_data", "video_data", "audio_data"):
        if body.get(key):
            raise EngineError(
                f"{key}: the embedded engine takes no images, videos or sounds; use "
                'engines.rollout.kind = "sglang"'
            )


def _partial(request: Request, chunk: Chunk) -> Body:
    return {
        "output_ids": chunk.token_ids,
        "meta_info": {
            "id": request.rid,
            "finish_reason": None,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": chunk.num_sampled,
            "weight_version": chunk.version,
            "output_token_logprobs": _pairs(chunk.token_ids, chunk.logprobs),
        },
    }


def _pairs(token_ids: list[int], logprobs: list[float]) -> list[list[Any]]:
    return [[logprob, token, None] for logprob, token in zip(logprobs, token_ids, strict=True)]


def _event(content: Body) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
