"""Serves the embedded engine behind the SGLang HTTP endpoints that RL needs.

    python -m relax_hpc.inference.embedded.server --model-path DIR --host HOST --options FILE

Three kinds of threads: the event loop parses and answers, the scheduler's thread owns the model,
and a worker thread waits in the broadcasts, so requests keep decoding while weights arrive.
Requests have SGLang's fields and meaning; for lanes see `inference.sglang.receive`.
"""

import argparse
import asyncio
import hmac
import io
import json
import pickle
import socket
import threading
import time
import uuid
from base64 import b64decode
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from relax_hpc.errors import EngineError
from relax_hpc.inference.embedded.model import Decoder, ModelShape
from relax_hpc.inference.embedded.scheduler import (
    MEMORY,
    Chunk,
    Completion,
    Scheduler,
    SequenceRequest,
)
from relax_hpc.runtime import hardware
from relax_hpc.runtime.comm import address
from relax_hpc.runtime.comm.bucket import (
    NamedTensors,
    Spec,
    digest,
    dtype_of,
    fingerprint,
    unflatten,
    views,
)
from relax_hpc.runtime.comm.door import Door, reply
from relax_hpc.runtime.comm.lanes import Taker
from relax_hpc.runtime.comm.orders import LOADER, Order, Patience, Receipt, key_of
from relax_hpc.runtime.comm.torch_group import BroadcastGroup, GroupBackend
from relax_hpc.runtime.process import tell_stacks
from relax_hpc.schema import FinishReason

LoadFormat = Literal["flattened_bucket"] | None


class WeightGroups:
    """The broadcast groups that this engine has joined, by name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[str, BroadcastGroup] = {}
        self._over: set[str] = set()

    def give_up(self, name: str | None = None) -> None:
        """Ends all waits for tensors of group `name`, or of any; callable from any thread.

        A trainer that leaves or replaces a group has given up an update, but its end of the
        connection may stay open.
        """
        self._over.update(self._groups if name is None else self._groups.keys() & {name})

    def join(
        self, host: str, port: int, rank: int, world_size: int, name: str, backend: GroupBackend
    ) -> None:
        """Blocks until all ranks of the group are there.

        Replaces a group of the same name, whose trainer died.
        """
        if name in self._groups:
            self.leave(name)
        self._groups[name] = BroadcastGroup(host, port, rank, world_size, name, backend)

    def leave(self, name: str) -> None:
        self._get(name)
        self._groups.pop(name).close()
        self._over.discard(name)

    def receive(
        self,
        name: str,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        load_format: LoadFormat,
    ) -> NamedTensors:
        """Receives tensors from rank 0: one broadcast of their bytes, or one for each.

        Raises:
            EngineError: not a member, or the trainer gave up this update.
        """
        group = self._get(name)

        def check() -> None:
            if name in self._over:
                raise EngineError("the trainer gave this update up")

        specs = [
            Spec(weight, dtype_of(dtype.removeprefix("torch.")), tuple(shape))
            for weight, dtype, shape in zip(names, dtypes, shapes, strict=True)
        ]
        if load_format == "flattened_bucket":
            size = sum(spec.nbytes for spec in specs)
            flat = torch.empty(size, dtype=torch.uint8, device=self._device)
            group.broadcast(flat, check)
            return unflatten(flat, specs)
        received = []
        for spec in specs:
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
            group.broadcast(tensor, check)
            received.append((spec.name, tensor))
        return received

    def _get(self, name: str) -> BroadcastGroup:
        if name not in self._groups:
            raise EngineError(f"no weight group {name!r}; call /init_weights_update_group first")
        return self._groups[name]


Load = Callable[[NamedTensors], int]
"""Loads tensors between two steps; returns how many differ afterwards."""


class LaneWeights:
    """The lane to the trainer, of which there is only one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._taker: Taker | None = None
        self._store = ""

    def carry_out(self, payload: str, load: Load) -> None:
        """Carries out an order; reports the outcome to the trainer, not to the caller.

        Args:
            payload: as `EngineClient.receive_weights` makes it, for this rank.
            load: called for every bucket.
        """
        order = order_of(payload)
        taker = self._taker
        if taker is None or self._store != order.store or order.task == "prepare":
            taker = self._taker = Taker(order, self._device)
            self._store = order.store
        try:
            receipt = self._receive(taker, order, load)
        except (RuntimeError, OSError, ValueError, EngineError) as error:
            self._taker = None
            taker.give_up(order.serial)
            receipt = Receipt(error=f"{type(error).__name__}: {error}")
        taker.store.put(key_of(order.serial, order.lane), json.dumps(asdict(receipt)))

    def _receive(self, taker: Taker, order: Order, load: Load) -> Receipt:
        if order.task == "prepare":
            taker.bucket(0)
            return Receipt()
        patience = Patience(order, taker.store.raw)
        start, receipt = time.perf_counter(), Receipt()
        for index, bucket in enumerate(taker.plan.buckets):
            taker.wait_for(index, order, patience)
            receipt.wire_seconds = time.perf_counter() - start
            flat = taker.bucket(index)
            tensors = [
                (spec.name, tensor)
                for spec, tensor in zip(bucket, views(flat, bucket), strict=True)
            ]
            receipt.differing += load(tensors)
            if order.task == "check":
                receipt.fingerprints.append(fingerprint(flat))
            taker.give_back(index, order)
        receipt.load_seconds = time.perf_counter() - start - receipt.wire_seconds
        return receipt


def order_of(payload: str) -> Order:
    """Returns the order in the place of SGLang's named tensor.

    Raises:
        ValueError: there is none.
    """
    try:
        [(text, _)] = _OrderUnpickler(io.BytesIO(b64decode(payload))).load()
        return Order(**json.loads(text))
    except (pickle.UnpicklingError, TypeError) as error:
        raise ValueError(f"not an order: {error}") from error


class _OrderUnpickler(pickle.Unpickler):
    """Refuses every class but those of an order."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        if (module, name) == ("torch", "ByteTensor"):
            return torch.ByteTensor
        raise pickle.UnpicklingError(f"{module}.{name} has no place in an order")


Body = dict[str, Any]
_MOST_BODY_BYTES = 1 << 28


class GenerationEndpoint:
    """Answers /generate.

    Args:
        version_spans: whether replies name the policy of every token, or only the newest.
    """

    def __init__(self, scheduler: Scheduler, *, version_spans: bool) -> None:
        self._scheduler, self._version_spans = scheduler, version_spans

    async def answer(self, http: HttpRequest) -> Response:
        try:
            body = await body_of(http)
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
        """Yields server-sent events, each with the new tokens. A disconnect ends the request."""
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

    def _request(self, rid: str, prompt: list[int], sampling: Body) -> SequenceRequest:
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
        return SequenceRequest(
            rid=rid,
            prompt=prompt,
            seed=uuid.uuid4().int >> 65 if seed is None else seed,
            temperature=float(sampling.get("temperature", 1.0)),
            max_new_tokens=limit,
            stop_ids=frozenset() if sampling.get("ignore_eos") else frozenset(stop_ids),
            top_p=top_p,
            top_k=max(top_k, 0),
        )

    def _reply(self, request: SequenceRequest, completion: Completion) -> Body:
        finish: Body = {"type": completion.finish.name.lower()}
        if completion.finish is FinishReason.STOP:
            finish["matched"] = completion.token_ids[-1]
        token_ids, logprobs, spans, _, version = completion
        reply = _partial(request, Chunk(token_ids, logprobs, len(token_ids), version), finish)
        if self._version_spans:
            reply["meta_info"]["weight_versions"] = [span._asdict() for span in spans]
        return reply


async def body_of(http: HttpRequest) -> Body:
    """Reads the JSON of a request; an empty body is an empty object.

    Raises:
        EngineError: it is too long, or the client has left.
        ValueError: it is not JSON.
    """
    content = bytearray()
    try:
        async for piece in http.stream():
            content += piece
            if len(content) > _MOST_BODY_BYTES:
                raise EngineError(f"the body has more than {_MOST_BODY_BYTES:,} bytes")
    except ClientDisconnect:
        raise EngineError("the body breaks off") from None
    return json.loads(content) if content else {}


def _refuse_media(body: Body) -> None:
    for key in ("image_data", "video_data", "audio_data"):
        if body.get(key):
            raise EngineError(
                f"{key}: the embedded engine takes no images, videos or sounds; use "
                'engines.rollout.kind = "sglang"'
            )


def _partial(request: SequenceRequest, chunk: Chunk, finish: Body | None = None) -> Body:
    return {
        "output_ids": chunk.token_ids,
        "meta_info": {
            "id": request.rid,
            "finish_reason": finish,
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


_UNAUTHORIZED = {"error": "Unauthorized"}
_BACKLOG = 4096
_SHUTDOWN_S = 1
"""Seconds to finish work at shutdown."""


class Endpoints:
    """The endpoints; `routes` gives them their paths."""

    def __init__(
        self,
        model_path: str,
        scheduler: Scheduler,
        groups: WeightGroups,
        lane: LaneWeights,
        generation: GenerationEndpoint,
    ) -> None:
        self._model_path, self._scheduler, self._groups = model_path, scheduler, groups
        self._lane, self._generation = lane, generation
        self._weights_lock = asyncio.Lock()

    def routes(self) -> list[Route]:
        control: dict[str, Callable[[Body], Awaitable[Body]]] = {
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/abort_request": self.abort,
            "/init_weights_update_group": self.join_group,
            "/destroy_weights_update_group": self.leave_group,
            "/update_weights_from_distributed": self.update_from_group,
            "/update_weights_from_tensor": self.update_from_lane,
            "/update_weights_from_disk": self.update_from_disk,
            "/release_memory_occupation": self.release_memory,
            "/resume_memory_occupation": self.resume_memory,
            "/weights_checker": self.check_weights,
            "/flush_cache": self.flush_cache,
            "/model_info": self.model_info,
            "/server_info": self.server_info,
            "/v1/loads": self.loads,
            "/health": self.health,
        }
        routes = [
            Route(path, _answer(endpoint), methods=["GET", "POST"])
            for path, endpoint in control.items()
        ]
        return [Route("/generate", self._generation.answer, methods=["POST"]), *routes]

    async def pause(self, body: Body) -> Body:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "in_place", "retract"):
            raise EngineError(f"mode {mode!r}: this engine pauses in_place, retracts, or aborts")
        await self._call(lambda: self._scheduler.set_paused(True))
        if mode == "abort":
            await self._call(lambda: self._scheduler.abort(None))
        if mode == "retract":
            await self._call(self._scheduler.retract)
        return _report_done("paused")

    async def resume(self, body: Body) -> Body:
        await self._call(lambda: self._scheduler.set_paused(False))
        return _report_done("continued")

    async def abort(self, body: Body) -> Body:
        rid = None if body.get("abort_all") else body["rid"]
        return _report_done(f"aborted {await self._call(lambda: self._scheduler.abort(rid))}")

    async def join_group(self, body: Body) -> Body:
        self._groups.give_up()  # there is one trainer
        async with self._weights_lock:
            await asyncio.to_thread(
                self._groups.join,
                body["master_address"],
                body["master_port"],
                body["rank_offset"],
                body["world_size"],
                body.get("group_name", "weight_update_group"),
                body.get("backend", "nccl"),
            )
        return _report_done("joined")

    async def leave_group(self, body: Body) -> Body:
        name = body.get("group_name", "weight_update_group")
        self._groups.give_up(name)
        async with self._weights_lock:
            await asyncio.to_thread(self._groups.leave, name)
        return _report_done("left")

    async def update_from_group(self, body: Body) -> Body:
        async with self._weights_lock:
            tensors = await asyncio.to_thread(
                self._groups.receive,
                body.get("group_name", "weight_update_group"),
                body["names"],
                body["dtypes"],
                body["shapes"],
                body.get("load_format"),
            )
            await self._call(lambda: self._scheduler.update(tensors, body.get("weight_version")))
        return _report_done(f"updated {len(tensors)} weights")

    async def update_from_lane(self, body: Body) -> Body:
        if body.get("load_format") != LOADER:
            raise EngineError(
                f"load_format {body.get('load_format')!r}: this engine knows {LOADER}"
            )
        [payload], model = body["serialized_named_tensors"], self._scheduler.model

        def load(tensors: NamedTensors) -> int:
            self._scheduler.call(lambda: model.load(tensors)).result()
            return sum(not torch.equal(model.weights[name], value) for name, value in tensors)

        async with self._weights_lock:
            await asyncio.to_thread(self._lane.carry_out, payload, load)
            if (version := body.get("weight_version")) is not None:
                await self._call(lambda: self._scheduler.set_version(version))
        return _report_done("carried out; the receipt says how")

    async def release_memory(self, body: Body) -> Body:
        await self._call(lambda: self._scheduler.release_memory(_tags(body)))
        return _report_done("released")

    async def resume_memory(self, body: Body) -> Body:
        await self._call(lambda: self._scheduler.resume_memory(_tags(body)))
        return _report_done("resumed")

    async def update_from_disk(self, body: Body) -> Body:
        folder, version = Path(body["model_path"]), body.get("weight_version")

        def load() -> None:
            self._scheduler.model.load_folder(folder)
            if version is not None:
                self._scheduler.set_version(version)

        async with self._weights_lock:
            await self._call(load)
        return _report_done(f"loaded {folder}")

    async def check_weights(self, body: Body) -> Body:
        if body.get("action") != "checksum":
            raise EngineError(f"action {body.get('action')!r}: this engine knows 'checksum' only")
        weights = self._scheduler.model.weights
        checksum = await self._call(lambda: digest(weights.items()))
        return {**_report_done("Success."), "per_engine_checksum": checksum}

    async def flush_cache(self, body: Body) -> Body:
        running, _ = self._scheduler.load
        if running:
            raise EngineError(f"{running} requests are running")
        return _report_done("nothing is cached between requests")

    async def model_info(self, body: Body) -> Body:
        return {
            "model_path": self._model_path,
            "weight_version": self._scheduler.version,
            "is_generation": True,
        }

    async def server_info(self, body: Body) -> Body:
        running, waiting = self._scheduler.load
        return {
            "engine": "relax_hpc.embedded",
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "paused": self._scheduler.paused,
            "enable_memory_saver": True,
        }

    async def loads(self, body: Body) -> Body:
        running, waiting = self._scheduler.load
        full = 0.0  # never: the cache grows
        load = {"num_running_reqs": running, "num_waiting_reqs": waiting, "token_usage": full}
        return {"loads": [load]}

    async def health(self, body: Body) -> Body:
        return _report_done("healthy")

    async def _call(self, command: Callable[[], Any]) -> Any:  # noqa: ANN401
        return await asyncio.wrap_future(self._scheduler.call(command))


def _tags(body: Body) -> set[str]:
    return set(body.get("tags") or MEMORY)


def _report_done(message: str) -> Body:
    return {"success": True, "message": message}


def _answer(
    endpoint: Callable[[Body], Awaitable[Any]],
) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def answer(request: HttpRequest) -> Response:
        try:
            return JSONResponse(await endpoint(await body_of(request)))
        except (EngineError, RuntimeError, ValueError, TypeError, KeyError, OSError) as error:
            message = f"{type(error).__name__}: {error}"
            return JSONResponse({"success": False, "message": message}, status_code=400)

    return answer


class _BearerToken:
    """Checks the token on every request, also on open connections."""

    def __init__(self, app: ASGIApp, admits: Callable[[bytes], bool]) -> None:
        self._app, self._admits = app, admits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", [])).get(b"authorization", b"")
        if scope["type"] != "http" or self._admits(given):
            await self._app(scope, receive, send)
            return
        await JSONResponse(_UNAUTHORIZED, status_code=401)(scope, receive, send)


def serve(model_path: Path, host: str, options: Body) -> None:
    """Loads the model, binds a free port, writes it to `options["port_file"]`, and serves."""
    torch.set_num_threads(options["num_threads"])
    hardware.check_gpus(options["gpus"], torch.cuda.device_count(), f"torch {torch.__version__}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Decoder(ModelShape.read(model_path), getattr(torch, options["dtype"]), device)
    model.load_folder(model_path)
    scheduler = Scheduler(model, max_running=options["max_running_requests"], version="0")
    generation = GenerationEndpoint(scheduler, version_spans=options["version_spans"])
    endpoints = Endpoints(
        str(model_path), scheduler, WeightGroups(device), LaneWeights(device), generation
    )
    expected = f"Bearer {options['token']}".encode()

    def admits(given: bytes) -> bool:
        return hmac.compare_digest(given, expected)

    healthy = {b"GET /health": reply(HTTPStatus.OK, json.dumps(_report_done("healthy")))}
    refusal = reply(HTTPStatus.UNAUTHORIZED, json.dumps(_UNAUTHORIZED))

    @asynccontextmanager
    async def open_door(_: Starlette) -> AsyncGenerator[None]:
        """Lets anybody call /health, as SGLang does."""
        with address.listener(host, _BACKLOG) as listener:
            # Or else a reply's second packet waits 40 ms for the first one's acknowledgement.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            door = Door("engine", listener, admits, refusal, healthy)
            door.open(lambda: AutoHTTPProtocol(config, server.server_state, {}))  # type: ignore[call-arg]
            port_file = Path(options["port_file"])
            draft = port_file.with_suffix(".draft")
            draft.write_text(str(listener.getsockname()[1]), encoding="utf-8")
            draft.replace(port_file)
            yield
            door.close()

    app = Starlette(
        routes=endpoints.routes(),
        middleware=[Middleware(_BearerToken, admits=admits)],
        lifespan=open_door,
    )
    # What it is in the midst of, or paused in, may wait for a trainer that waits for its end.
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=_SHUTDOWN_S
    )
    server = uvicorn.Server(config)

    def run_scheduler() -> None:
        try:
            scheduler.run()
        finally:  # an engine whose scheduler died must not look alive
            server.force_exit = server.should_exit = True

    threading.Thread(target=run_scheduler, name="scheduler", daemon=True).start()
    server.run(sockets=[])  # the door accepts
    scheduler.stop()


def main() -> None:
    tell_stacks()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--options", type=Path, required=True)
    args = parser.parse_args()
    # A file, since everybody on the node can read a command line, and the token is in it.
    serve(args.model_path, args.host, json.loads(args.options.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
