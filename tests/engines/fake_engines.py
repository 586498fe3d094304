"""Engines of a test, each on a port of its own."""

from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def served(*engines):
    """Serves each with its `generate`, at version 0 unless its `version` says otherwise; gives
    their URLs."""

    async def version_0(_):
        return web.json_response({"weight_version": "0"})

    runners, urls = [], []
    for engine in engines:
        app = web.Application()
        version = getattr(engine, "version", version_0)
        app.add_routes([web.get("/model_info", version), web.post("/generate", engine.generate)])
        runners.append(web.AppRunner(app, shutdown_timeout=0.1))
        await runners[-1].setup()
        site = web.TCPSite(runners[-1], "127.0.0.1", 0)
        await site.start()
        urls.append(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
    yield urls
    for runner in runners:
        await runner.cleanup()
