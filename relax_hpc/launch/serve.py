"""Serves a model, or the policy of a run, on this machine over OpenAI's API.

One engine samples. A request is a conversation of its own: it is rendered as a whole, as the run
renders prompts, and what it leaves open is as in the run's job.
"""

import asyncio
import itertools
import json
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from hmac import compare_digest
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from relax_hpc.config import hub, job_file
from relax_hpc.config.engines import ROLLOUT, EnginePool
from relax_hpc.config.hf_config import ConfigJson
from relax_hpc.config.prompts import TAKEN
from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.data import tokenizer
from relax_hpc.data.conversation import Conversation
from relax_hpc.data.source import Prompt
from relax_hpc.data.template import Message
from relax_hpc.environments.chat_api.messages import (
    BadRequestError,
    ChatRequest,
    Completion,
    History,
    completion,
    event,
    events,
    message_of,
    parse_request,
)
from relax_hpc.environments.record import EpisodeRecord
from relax_hpc.environments.session import Reply, Session
from relax_hpc.errors import ConfigError, EngineLostError, RelaxError, first_line, show
from relax_hpc.inference.generation import (
    TOKENS_PER_CHUNK,
    Draft,
    End,
    Generation,
    GenerationClient,
    Sampling,
)
from relax_hpc.inference.process import EngineProcess, start_engine
from relax_hpc.inference.spec import EngineSpec
from relax_hpc.launch import known_runs
from relax_hpc.roles.engine.check import check_engine
from relax_hpc.roles.facts import Facts
from relax_hpc.roles.rollout import prompt_check
from relax_hpc.runtime import hardware
from relax_hpc.runtime.comm.address import with_port
from relax_hpc.runtime.comm.door import Door, reply
from relax_hpc.runtime.files.scratch import scratch_folder
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.text import wrong
from relax_hpc.sections import NonNegative, Number, Section
from relax_hpc.trainer.checkpoints.best import by_step

if TYPE_CHECKING:
    from aiohttp import web

Say = Callable[[str], None]
Kind = Literal["embedded", "sglang"]
LOOPBACK = "127.0.0.1"
_TEMPERATURE, _MAX_NEW_TOKENS = 0.7, 2048
"""Sampling from a model without a job."""
_MOST_BODY_BYTES = 1 << 26
_BACKLOG, _CLOSE_S = 1024, 1.0
_WRONG_TOKEN = "the token is not the one that relax-hpc serve printed"


class Policy(NamedTuple):
    """A model to serve."""

    name: str
    folder: Path
    """Hugging Face folder."""
    config: RunConfig
    """Job whose engine and sampling it has."""

    def tools(self, say: Say) -> list[Message] | None:
        """Returns the tools of the job's first prompt, if its episodes have several turns."""
        if self.config.rollout.environment == "single_turn":
            return None
        try:
            return prompt_check.open_files(self.config).train[0].tools
        except (RelaxError, OSError) as error:
            say(f"the policy is shown no tools: {first_line(error)}")
            return None


@contextmanager
def find_policy(what: str, say: Say, kind: Kind | None = None) -> Iterator[Policy]:
    """Finds a model's folder for the length of the block; converts a checkpoint if needed.

    Args:
        what: a run, RUN@STEP, the folder of a model, or its name on the hub.
        kind: of engine; default is the job's, for a model alone what fits this machine.

    Raises:
        ConfigError: there is no such thing.
        CheckpointError: the checkpoint is incomplete.
    """
    name, _, after = what.rpartition("@")
    run_dir, wanted = known_runs.find_run(what), None
    if run_dir is None and name and after.isdecimal():
        run_dir, wanted = known_runs.find_run(name), int(after)
    if run_dir is None:
        folder = _model(what)
        about = ConfigJson(folder)
        alone = _job_of(folder, about.get("dtype", about.get("torch_dtype")))
        yield Policy(what, folder, _with_engine(alone, kind))
        return
    run = RunPaths(run_dir)
    config = job_file.read_resolved(run.config)
    with scratch_folder("model") as scratch:
        step, folder = _weights(run, config, wanted, scratch / "model", say)
        if not isinstance(config, RunConfig):
            config = _job_of(folder, config.model.dtype)
        if config.prompts.user != "{prompt}":
            say(f"not added to what you write: prompts.user = {show(config.prompts.user)}")
        yield Policy(f"{run.root.name}@{step}", folder, _with_engine(config, kind))


def _with_engine(config: RunConfig, kind: Kind | None) -> RunConfig:
    engines = {ROLLOUT: EnginePool(kind=kind)} if kind else config.engines
    return config.model_copy(update={"engines": engines})


def _model(what: str) -> Path:
    folder = Path(what)
    if (folder / "config.json").is_file():
        return folder.absolute()
    if hub.name_of(folder) is None:
        raise ConfigError(
            f"{what}: is no run (run.json, there or under runs/) and no model (config.json)"
        )
    return hub.find("MODEL", folder)


def _job_of(folder: Path, dtype: object) -> RunConfig:
    """Returns the job of a model without one."""
    known = dtype if dtype in ("float32", "float16") else "bfloat16"
    kind = "sglang" if find_spec("sglang") and hardware.count_gpus() else "embedded"
    tree = {
        "name": "chat",
        "model": {"path": str(folder), "dtype": known},
        "prompts": {"train": "-"},
        "schedule": {"num_steps": 1},
        "rollout": {"temperature": _TEMPERATURE, "max_new_tokens": _MAX_NEW_TOKENS},
        "engines": {ROLLOUT: {"kind": kind}},
    }
    config = job_file.validate(tree, source=str(folder))
    assert isinstance(config, RunConfig)
    return config


def _weights(
    run: RunPaths, config: JobConfig, wanted: int | None, out: Path, say: Say
) -> tuple[int, Path]:
    """Returns step and folder of a run's newest model, or of the wanted one.

    Args:
        out: where to convert a checkpoint to.
    """
    exported, saved = _exported(run.root / "hf"), by_step(run.checkpoints)
    initial = {} if config.model.weights else {0: config.model.path}
    known = sorted({*exported, *saved, *initial})
    if not known:
        raise ConfigError(f"{run.root}: has saved no model yet; ask again later")
    step = known[-1] if wanted is None else wanted
    if step not in known:
        raise ConfigError(
            f"{run.root.name}@{step}: the run has no model of that step; use one of "
            f"{', '.join(map(str, known))}"
        )
    if step in exported or step not in saved:
        found = exported.get(step, config.model.path)
        say(f"step {step}: {found}" if step else f"the initial model: {found}")
        return step, found
    say(f"step {step}: converting {saved[step]}")
    begin = time.monotonic()
    _convert(saved[step], config.model.path, out)
    say(f"converted in {time.monotonic() - begin:.0f} s; `relax-hpc convert` would keep it")
    return step, out


def _exported(folder: Path) -> dict[int, Path]:
    found = {each.name.removeprefix("step_"): each for each in folder.glob("step_*")}
    return {int(step): each for step, each in found.items() if step.isdecimal()}


def _convert(checkpoint: Path, model: Path, out: Path) -> None:
    from relax_hpc.runtime import devices
    from relax_hpc.trainer.megatron import cpu

    devices.hush()
    cpu.install()
    from relax_hpc.trainer.checkpoints import convert

    convert.to_hf(checkpoint, model, out)


class Address(NamedTuple):
    url: str
    """As clients of OpenAI take it."""
    token: str
    engine: EngineProcess


@contextmanager
def serve(
    policy: Policy, say: Say, *, host: str = LOOPBACK, port: int = 0, token: str = ""
) -> Iterator[Address]:
    """Starts an engine, and answers requests in a thread, during the block.

    Args:
        say: told what the engine is doing.
        port: 0 is any.
        token: of every request; default is a random one.

    Raises:
        ConfigError: the engine does not compute the model, or nothing can listen there.
        EngineError: the engine does not start.
    """
    token = token or secrets.token_urlsafe(32)
    config, pool = policy.config, policy.config.rollout_pool
    if pool.nodes_per_engine > 1:
        raise ConfigError(
            f"engines.rollout.nodes_per_engine = {pool.nodes_per_engine}: only engines of one node "
            "are started here; use --engine, or relax-hpc convert and a server of your own"
        )
    facts = Facts(policy.folder)
    facts.check_weights(policy.folder)
    check_engine(pool, facts.shape)
    spec = EngineSpec(
        pool.kind, policy.folder, config.model.dtype, pool.args, config.seed,
        pool.max_running_requests, pool.advanced.start_timeout_s,
    )  # fmt: skip
    told, key = set[str](), secrets.token_urlsafe(32)

    def progress(phase: str) -> None:
        if phase not in told:
            told.add(phase)
            say(f"{pool.kind} engine: {phase}")

    server = _Server(policy, facts.shape.max_positions, token)
    with _listen(host, port) as listener, scratch_folder("serve") as logs:
        log = logs / "engine.log"
        with start_engine(
            spec, host=LOOPBACK, token=key, log_path=log, progress=progress
        ) as engine:
            server.engine = engine
            say(f"{pool.kind} engine: ready after {engine.age_s:.0f} s")
            with _in_thread(server.answer(listener)):
                url = f"http://{with_port(host, listener.getsockname()[1])}/v1"
                yield Address(url, token, engine)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there: {error.strerror}; use others, or "
            "--port 0"
        ) from None


@contextmanager
def _in_thread(serving: AbstractAsyncContextManager[None]) -> Iterator[None]:
    """Enters a context in an event loop of its own for the length of the block."""
    started, over = Future[None](), Future[None]()

    async def run() -> None:
        try:
            async with serving:
                started.set_result(None)
                await asyncio.wrap_future(over)
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=asyncio.run, args=[run()], name="chat API", daemon=True)
    thread.start()
    try:
        yield started.result()
    finally:
        over.set_result(None)
        thread.join()


class _Choices(Section):
    """Settings that a request may choose; the run's job gives the others."""

    temperature: Annotated[Number, Field(ge=0)]
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(strict=True, ge=-1)] = 0
    seed: NonNegative | None = None
    chat_template_kwargs: Mapping[str, Any] = {}


class _Server:
    def __init__(self, policy: Policy, max_tokens: int, token: str) -> None:
        prompts, tokens = policy.config.prompts, tokenizer.load(policy.folder)
        has_template = prompts.chat_template and tokens.chat_template is not None
        self._prefix = prompts.assistant_prefix
        self._chat = Conversation(tokens, chat_template=has_template, assistant_prefix=self._prefix)
        self._text = Conversation(tokens, chat_template=False)
        self._policy, self._max_tokens = policy, max_tokens
        self._key, self._number = f"Bearer {token}".encode(), itertools.count()
        self.engine: EngineProcess

    @asynccontextmanager
    async def answer(self, listener: socket.socket) -> AsyncIterator[None]:
        from aiohttp import web

        app = web.Application(client_max_size=_MOST_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=_CLOSE_S
        )
        await runner.setup()
        assert runner.server is not None, "it was set up"
        refusal = reply(HTTPStatus.UNAUTHORIZED, json.dumps(_error_of(401, _WRONG_TOKEN)))
        door = Door("chat API", listener, self._admits, refusal)
        door.open(runner.server)
        try:
            yield
        finally:
            door.close()
            await runner.cleanup()

    def _admits(self, given: bytes) -> bool:
        return compare_digest(given, self._key)

    def _refusal(self, request: "web.Request") -> "web.Response | None":
        """Returns the answer to a later request of a connection whose first one had the token."""
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        return None if self._admits(given) else _error(401, _WRONG_TOKEN)

    async def _models(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        model = {"id": self._policy.name, "object": "model", "created": 0, "owned_by": "relax-hpc"}
        listed = {"object": "list", "data": [model]}
        return self._refusal(request) or web.json_response(listed)

    async def _answer(self, request: "web.Request") -> "web.StreamResponse":
        if refusal := self._refusal(request):
            return refusal
        stream = _Stream(request)
        try:
            return await self._give(stream, _parse(await request.read()))
        except (BadRequestError, RelaxError) as error:
            status = 503 if isinstance(error, EngineLostError) else 400
            if not stream.is_open:
                return _error(status, first_line(error))
            return await stream.write(event(_error_of(status, first_line(error))))

    async def _give(self, stream: "_Stream", body: dict[str, Any]) -> "web.StreamResponse":
        from aiohttp import web

        is_chat = stream.request.path.endswith("/chat/completions")
        session, asked = self._read(body, is_chat=is_chat)
        messages = History(session.conversation).of(asked.messages)
        system = self._policy.config.prompts.system
        if system and is_chat and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        number, sent = next(self._number), ""
        async with _ask(session, asked, messages) as (texts, asking):
            async for text in texts:
                role = {} if sent else {"role": "assistant"}
                delta = {**role, "content": text if sent else self._prefix + text}
                sent += delta["content"]
                await stream.write(event(self._chunk(number, delta)))
            found = await asking
        made = completion(number, found, tools=asked.callable_tools, stop=asked.stop)
        made["model"], message = self._policy.name, message_of(made)
        if not is_chat:
            return web.json_response(_as_text(made))
        if self._prefix or sent:
            message["content"] = (self._prefix + (message["content"] or "")).removeprefix(sent)
        if not asked.is_stream:
            return web.json_response(made)
        if sent:
            del message["role"]  # clients put the pieces together
        return await stream.write(b"".join(events(made, with_usage=asked.with_usage)))

    def _chunk(self, number: int, delta: dict[str, str]) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": self._policy.name,
            "choices": [choice],
        }

    def _read(self, body: dict[str, Any], *, is_chat: bool) -> tuple[Session, ChatRequest]:
        """Returns a session with the request's sampling, and the rest of the request."""
        config = self._policy.config
        chosen = {name: body.pop(name) for name in _Choices.model_fields if name in body}
        given = {name: value for name, value in chosen.items() if value is not None}
        try:
            own = _Choices(**{"temperature": config.rollout.temperature, **given})
        except ValidationError as error:
            [first, *_] = error.errors()
            name = str(first["loc"][0])
            raise BadRequestError(f"{name} = {show(given[name])}: {wrong(first)}") from None
        if taken := sorted(TAKEN & own.chat_template_kwargs.keys()):
            raise BadRequestError(f"chat_template_kwargs.{taken[0]}: is set here; leave it out")
        if not is_chat:
            body["messages"] = [{"role": "user", "content": _pop_prompt(body)}]
        conversation = self._chat if is_chat else self._text
        how = Sampling(
            own.temperature,
            config.rollout.max_new_tokens,
            top_p=own.top_p,
            top_k=max(0, own.top_k),
            end=conversation.stop(config.rollout.stop),
            max_tokens=self._max_tokens,
        )
        args = {**config.prompts.template_args, **own.chat_template_kwargs} if is_chat else {}
        prompt = Prompt(0, [], "", template_args=args, where="a request")
        seed = secrets.randbits(31) if own.seed is None else own.seed
        sampler = _Sampler(self.engine, tokens_per_chunk=1 if body.get("stream") else None)
        session = Session(
            prompt, EpisodeRecord(), sampler, conversation, how, group=0, episode=0, seed=seed
        )
        return session, parse_request(body, session)


class _Sampler:
    def __init__(self, engine: EngineProcess, *, tokens_per_chunk: int | None) -> None:
        self._engine, self._tokens = engine, tokens_per_chunk or TOKENS_PER_CHUNK

    async def sample(
        self,
        given: Sequence[int],
        draft: Draft,
        how: Sampling,
        *,
        seed: int,
        homes: Sequence[Hashable],
    ) -> Generation:
        """Implements `environments.session.Sampler`."""
        url, token = self._engine.url, self._engine.token
        async with GenerationClient(url, token, tokens_per_chunk=self._tokens) as client:
            return await client.sample(given, seed, how, version=0, draft=draft)


class _Stream:
    """An answer in events, begun with the first of them."""

    def __init__(self, request: "web.Request") -> None:
        self.request = request
        self._response: web.StreamResponse | None = None

    @property
    def is_open(self) -> bool:
        return self._response is not None

    async def write(self, piece: bytes) -> "web.StreamResponse":
        from aiohttp import web

        if self._response is None:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            self._response = web.StreamResponse(headers=headers)
            await self._response.prepare(self.request)
        await self._response.write(piece)
        return self._response


@asynccontextmanager
async def _ask(
    session: Session, asked: ChatRequest, messages: list[Message]
) -> AsyncIterator[tuple[AsyncIterator[str], "asyncio.Task[Reply]"]]:
    """Asks for a reply; who leaves the block earlier breaks it off.

    Yields:
        The texts of the reply as they come, and the reply. Where calls or a stop of the request's
            have to be cut out, there are no texts.
    """
    heard = asyncio.Queue[str | None]()
    if asked.is_stream and not (asked.callable_tools or asked.stop):
        live = _Live(session.conversation, session.how.end, heard.put_nowait)
        session.how = session.how._replace(end=live)
    limit = asked.max_new_tokens
    asking = asyncio.create_task(
        session.chat(messages, max_new_tokens=limit, stop=asked.stop, tools=asked.tools)
    )
    asking.add_done_callback(lambda _: heard.put_nowait(None))

    async def texts() -> AsyncIterator[str]:
        while (text := await heard.get()) is not None:
            yield text

    try:
        yield texts(), asking
    finally:
        asking.cancel()


class _Live:
    """Passes on the text of a response while it grows, as its `Sampling.end`."""

    def __init__(
        self, conversation: Conversation, end: End | None, take: Callable[[str], None]
    ) -> None:
        self._decode, self._end, self._take = conversation.decode, end, take
        self._first = self._known = 0
        """Tokens from where the text is decoded, since one may depend on those before; and up to
        where it was passed on."""

    def __call__(self, token_ids: Sequence[int], seen: int) -> int | None:
        over = self._end(token_ids, seen) if self._end else None
        known = self._decode(token_ids[self._first : self._known])
        text = self._decode(token_ids[self._first : over])
        if len(text) > len(known) and not text.endswith("\ufffd"):  # half a character
            self._take(text[len(known) :])
            self._first, self._known = self._known, len(token_ids[:over])
        return over


def _parse(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is no JSON: {first_line(error)}") from None
    if not isinstance(found, dict):
        raise BadRequestError("the body is no JSON object; send one")
    return found


def _pop_prompt(body: dict[str, Any]) -> str:
    prompt = body.pop("prompt", None)
    if not isinstance(prompt, str):
        raise BadRequestError(f"prompt = {show(prompt)}: send a text")
    if body.get("stream"):
        raise BadRequestError("stream = True: completions come whole; use chat/completions")
    return prompt


def _as_text(made: Completion) -> Completion:
    """Returns a reply in the form of completions."""
    [choice] = made["choices"]
    text = {"text": choice.pop("message")["content"]}
    return {**made, "object": "text_completion", "choices": [{**choice, **text}]}


def _error(status: int, message: str) -> "web.Response":
    from aiohttp import web

    return web.json_response(_error_of(status, message), status=status)


def _error_of(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
