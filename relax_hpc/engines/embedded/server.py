"""The embedded engine behind SGLang's HTTP endpoints, as far as RL needs them.

    python -m relax_hpc.engines.embedded.server --model-path DIR --host HOST --options FILE

Three kinds of threads: the event loop parses and answers, the scheduler's thread owns the model,
and a worker thread waits in the broadcasts, so requests keep decoding while weights arrive.
"""

import argparse
import asyncio
import hmac
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from relax_hpc.comm import gpus
from relax_hpc.comm.bucket import NamedTensors, digest
from relax_hpc.comm.orders import LOADER
from relax_hpc.engines.embedded.generation import GenerationEndpoint
from relax_hpc.engines.embedded.lane_weights import LaneWeights
from relax_hpc.engines.embedded.model import Decoder, Shape
from relax_hpc.engines.embedded.scheduler import MEMORY, Scheduler
from relax_hpc.engines.embedded.weight_groups import WeightGroups
from relax_hpc.errors import EngineError
from relax_hpc.hangs.process import tell_stacks

Body = dict[str, Any]

_SHUTDOWN_S = 1
"""Seconds for what it still does when it is told to end."""


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
        return _done("paused")

    async def resume(self, body: Body) -> Body:
        await self._call(lambda: self._scheduler.set_paused(False))
        return _done("continued")

    async def abort(self, body: Body) -> Body:
        rid = None if body.get("abort_all") else body["rid"]
        return _done(f"aborted {await self._call(lambda: self._scheduler.abort(rid))}")

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
        return _done("joined")

    async def leave_group(self, body: Body) -> Body:
        name = body.get("group_name", "weight_update_group")
        self._groups.give_up(name)
        async with self._weights_lock:
            await asyncio.to_thread(self._groups.leave, name)
        return _done("left")

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
        return _done(f"updated {len(tensors)} weights")

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
        return _done("carried out; the receipt says how")

    async def release_memory(self, body: Body) -> Body:
        await self._call(lambda: self._scheduler.release_memory(_tags(body)))
        return _done("released")

    async def resume_memory(self, body: Body) -> Body:
        await self._call(lambda: self._scheduler.resume_memory(_tags(body)))
        return _done("resumed")

    async def update_from_disk(self, body: Body) -> Body:
        folder, version = Path(body["model_path"]), body.get("weight_version")

        def load() -> None:
            self._scheduler.model.load_folder(folder)
            if version is not None:
                self._scheduler.set_version(version)

        async with self._weights_lock:
            await self._call(load)
        return _done(f"loaded {folder}")

    async def check_weights(self, body: Body) -> Body:
        if body.get("action") != "checksum":
            raise EngineError(f"action {body.get('action')!r}: this engine knows 'checksum' only")
        weights = self._scheduler.model.weights
        checksum = await self._call(lambda: digest(weights.items()))
        return {**_done("Success."), "per_engine_checksum": checksum}

    async def flush_cache(self, body: Body) -> Body:
        running, _ = self._scheduler.load
        if running:
            raise EngineError(f"{running} requests are running")
        return _done("nothing is cached between requests")

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
        return _done("healthy")

    async def _call(self, command: Callable[[], Any]) -> Any:  # noqa: ANN401
        return await asyncio.wrap_future(self._scheduler.call(command))


def _tags(body: Body) -> set[str]:
    return set(body.get("tags") or MEMORY)


def _done(message: str) -> Body:
    return {"success": True, "message": message}


def _answer(
    endpoint: Callable[[Body], Awaitable[Any]],
) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def answer(request: HttpRequest) -> Response:
        content = await request.body()
        try:
            return JSONResponse(await endpoint(json.loads(content) if content else {}))
        except (EngineError, RuntimeError, ValueError, TypeError, KeyError, OSError) as error:
            message = f"{type(error).__name__}: {error}"
            return JSONResponse({"success": False, "message": message}, status_code=400)

    return answer


class _BearerToken:
    """Lets nobody in without the token, except for /health, as SGLang does."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", [])).get(b"authorization", b"")
        allowed = scope["type"] != "http" or scope["path"] == "/health"
        if allowed or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
            return
        await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)


def serve(model_path: Path, host: str, options: Body) -> None:
    """Loads the model, binds a free port, writes it to `options["port_file"]`, and serves."""
    torch.set_num_threads(options["num_threads"])
    gpus.check(options["gpus"], torch.cuda.device_count(), f"torch {torch.__version__}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Decoder(Shape.read(model_path), getattr(torch, options["dtype"]), device)
    model.load_folder(model_path)
    scheduler = Scheduler(model, max_running=options["max_running_requests"], version="0")
    generation = GenerationEndpoint(scheduler, version_spans=options["version_spans"])
    endpoints = Endpoints(
        str(model_path), scheduler, WeightGroups(device), LaneWeights(device), generation
    )
    app = Starlette(
        routes=endpoints.routes(),
        middleware=[Middleware(_BearerToken, token=options["token"])],
    )
    # What it is in the midst of, or paused in, may wait for a trainer that waits for its end.
    server = uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=_SHUTDOWN_S
        )
    )

    def run_scheduler() -> None:
        try:
            scheduler.run()
        finally:  # an engine whose scheduler died must not look alive
            server.force_exit = server.should_exit = True

    threading.Thread(target=run_scheduler, name="scheduler", daemon=True).start()
    with socket.create_server((host, 0)) as listener:
        # Or else a reply's second packet waits 40 ms for the first one's acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port_file = Path(options["port_file"])
        draft = port_file.with_suffix(".draft")
        draft.write_text(str(listener.getsockname()[1]))
        draft.replace(port_file)
        server.run(sockets=[listener])
    scheduler.stop()


def main() -> None:
    tell_stacks()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--options", type=Path, required=True)
    args = parser.parse_args()
    # A file, since everybody on the node can read a command line, and the token is in it.
    serve(args.model_path, args.host, json.loads(args.options.read_text()))


if __name__ == "__main__":
    main()
