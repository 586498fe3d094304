"""Engines of a test, each on a port of its own, that speak as SGLang does."""

import json
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web


async def version_0(_=None):
    return web.json_response({"weight_version": "0"})


async def reply(request, finish="length"):
    """Streams two tokens, or none of a request that was aborted."""
    tokens = [] if finish == "abort" else [[-0.5, 7], [-0.5, 8]]
    made = web.StreamResponse()
    await made.prepare(request)
    meta = {
        "finish_reason": {"type": finish, "message": "Aborted"}, "completion_tokens": len(tokens),
        "weight_version": "0", "output_token_logprobs": tokens,
    }  # fmt: skip
    await made.write(b"data: " + json.dumps({"meta_info": meta}).encode() + b"\n\n")
    return made


@asynccontextmanager
async def listening(*routes):
    """The URL of a server with these routes."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    await runner.cleanup()


@asynccontextmanager
async def served(*engines):
    """Serves each with its `generate`, at version 0 unless its `version` says otherwise; gives
    their URLs."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                listening(
                    web.get("/model_info", getattr(engine, "version", version_0)),
                    web.post("/generate", engine.generate),
                )
            )
            for engine in engines
        ]
