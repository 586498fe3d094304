"""Commands that talk to a policy: in the terminal, and over OpenAI's API."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from relax_hpc.cli.completion import names_of_runs
from relax_hpc.cli.lines import echo, echo_styled
from relax_hpc.errors import ConfigError, EngineError, RelaxError, first_line, show
from relax_hpc.runtime.text import argument

if TYPE_CHECKING:
    import httpx

    from relax_hpc.data.template import Message

talking = typer.Typer()

Policy = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|RUN[@STEP]",
        help="A Hugging Face folder, a name on the hub, or a run: its newest model, or a step's.",
        show_default=False,
        autocompletion=names_of_runs,
    ),
]
Engine = Annotated[
    Literal["embedded", "sglang"] | None,
    typer.Option(
        "--engine",
        help="In place of the job's; for a model SGLang where it is, with a GPU.",
        show_default=False,
    ),
]
_CONNECT_S = 30.0
_COMMANDS = "/reset, /system TEXT, /undo, /save FILE, /quit"


def _say(line: str) -> None:
    echo(line, err=True)


@talking.command(
    epilog="Examples:  relax-hpc chat arithmetic@40  |  echo '1+2=' | relax-hpc chat "
    "models/tiny/model --temperature 0"
)
def chat(
    policy: Policy = "",
    url: Annotated[str | None, typer.Option(help="Of a running relax-hpc serve.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="With --url: has its token.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="The job's if not given; for a model 0.7.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of an answer; the job's if not given.")
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System message; the job's if not given.")
    ] = None,
    think: Annotated[
        bool | None,
        typer.Option(
            "--think/--no-think",
            help="The template's enable_thinking; the job's if not given.",
            show_default=False,
        ),
    ] = None,
    engine: Engine = None,
) -> None:
    """Talk to a policy in the terminal, with its job's template, system message and sampling.

    Commands inside: /reset, /system TEXT, /undo, /save FILE (adds the conversation, as a line of
    JSON), /quit. A line that ends in \\ goes on in the next. Ctrl-C breaks an answer off, twice
    it ends.

    Without a terminal it reads one prompt from standard input, prints the answer and ends. If
    episodes of the job have tools, the policy is shown those of the first prompt: its calls are
    printed, and nothing is called.
    """
    args = None if think is None else {"enable_thinking": think}
    fields = {
        "temperature": temperature, "max_tokens": max_tokens, "chat_template_kwargs": args,
    }  # fmt: skip
    with ExitStack() as stack:
        if url is None:
            url, token, tools = stack.enter_context(_serve_here(policy, token_file, engine))
        else:
            (url, token), tools = _address(url, policy, token_file), None
        talk = stack.enter_context(_open_talk(url, token, fields, system, tools))
        if sys.stdin.isatty() and sys.stdout.isatty():
            with suppress(KeyboardInterrupt):  # a second one at once
                _converse(talk)
        else:
            talk.ask(sys.stdin.read().removesuffix("\n"))
            echo("")


@talking.command(
    epilog="Examples:  relax-hpc serve arithmetic --port 8000  |  srun --gpus 1 relax-hpc serve "
    "Qwen/Qwen3-4B --host $(hostname) --token-file token"
)
def serve(
    policy: Policy,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any free one.")] = 0,
    token_file: Annotated[
        Path | None, typer.Option(help="Gets the token, for you alone; goes at the end.")
    ] = None,
    engine: Engine = None,
) -> None:
    """Serve a policy over OpenAI's API on this machine until Ctrl-C.

    chat/completions, completions (whole ones) and models; the job says what a request leaves
    open. Every request needs the token, which is printed for the shell.
    """
    import secrets
    import signal

    from relax_hpc.launch import serve as serving

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    token = secrets.token_urlsafe(32)
    with ExitStack() as stack:
        if token_file is not None:
            stack.enter_context(_keep(token_file, token))
        try:
            found = stack.enter_context(serving.find_policy(policy, _say, engine))
            address = stack.enter_context(
                serving.serve(found, _say, host=host, port=port, token=token)
            )
            key = token if token_file is None else f"$(cat {argument(token_file.absolute())})"
            echo(f"export OPENAI_BASE_URL={address.url} OPENAI_API_KEY={key}")
            sys.stdout.flush()
            _say(f"serving {found.name} until Ctrl-C")
            while not (end := address.engine.end()):
                time.sleep(0.5)
            raise EngineError(f"the engine {end}\n{address.engine.last_lines()}")
        except KeyboardInterrupt:
            _say("\nends")


@contextmanager
def _keep(file: Path, token: str) -> Iterator[None]:
    """Keeps a token in a new file during the block."""
    try:
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"--token-file {file}: is there already; remove it, or name another"
        ) from None
    except OSError as error:
        raise ConfigError(f"--token-file {file}: {error.strerror}; name another") from None
    with os.fdopen(opened, "w", encoding="utf-8") as out:
        out.write(f"{token}\n")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


@contextmanager
def _serve_here(
    what: str, token_file: Path | None, engine: Literal["embedded", "sglang"] | None
) -> Iterator[tuple[str, str, "list[Message] | None"]]:
    """Yields address and token of a policy that is served for this process, and its tools."""
    if not what or token_file is not None:
        raise ConfigError(
            "relax-hpc chat: name a model or a run; or give --url and --token-file of what "
            "relax-hpc serve serves"
        )
    from relax_hpc.launch import serve as serving

    with serving.find_policy(what, _say, engine) as found, serving.serve(found, _say) as address:
        yield address.url, address.token, found.tools(_say)


def _address(url: str, what: str, token_file: Path | None) -> tuple[str, str]:
    if what or token_file is None:
        raise ConfigError(f"--url {url}: give --token-file with it, and neither model nor run")
    base = url.rstrip("/").removesuffix("/v1")
    try:
        return f"{base}/v1", token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--token-file {token_file}: cannot be read: {first_line(error)}; name that of serve"
        ) from None


@contextmanager
def _open_talk(
    url: str,
    token: str,
    fields: Mapping[str, Any],
    system: str | None,
    tools: "list[Message] | None",
) -> Iterator["_Talk"]:
    import httpx

    from relax_hpc.inference.http import authorization

    timeout = httpx.Timeout(None, connect=_CONNECT_S)
    with httpx.Client(
        base_url=url, headers=authorization(token), timeout=timeout, trust_env=False
    ) as http:
        yield _Talk(http, {k: v for k, v in fields.items() if v is not None}, system, tools)


class _Talk:
    """A conversation with a served policy, printed as it goes."""

    def __init__(
        self,
        http: "httpx.Client",
        fields: Mapping[str, Any],
        system: str | None,
        tools: "list[Message] | None",
    ) -> None:
        """Args:
        fields: of every request.
        system: message; None leaves it to the server.
        tools: that the policy is shown.
        """
        self._http, self._system, self._tools = http, system, tools
        self._fields = {"stream": True, "stream_options": {"include_usage": True}, **fields}
        if tools:  # calls come as the policy writes them
            self._fields |= {"tools": tools, "tool_choice": "none"}
        self._said: list[Message] = []

    @property
    def messages(self) -> "list[Message]":
        system = self._system
        first = [] if system is None else [{"role": "system", "content": system}]
        return [*first, *self._said]

    def ask(self, text: str) -> str:
        """Prints the answer to a message, as far as it comes.

        Returns:
            How long and how fast it was.
        """
        self._said.append({"role": "user", "content": text})
        answer, begin, finish = "", time.monotonic(), ""
        usage: dict[str, int] = {}
        try:
            for chunk in self._chunks():
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    finish = choice["finish_reason"] or finish
                    piece = choice["delta"].get("content") or ""
                    answer += piece
                    echo(piece, nl=False)
        finally:  # also if it was broken off
            if answer or finish:
                self._said.append({"role": "assistant", "content": answer})
            else:
                self._said.pop()
        count = usage.get("completion_tokens", 0)
        self._print_calls(answer)
        rate = f"{count} tokens, {count / (time.monotonic() - begin):.1f} tokens/s"
        if finish != "length":
            return rate
        return f"{rate}, cut off by the limit" if count else "no room is left; /undo or /reset"

    def _chunks(self) -> Iterator[dict[str, Any]]:
        import httpx

        body = {"messages": self.messages, **self._fields}
        try:
            with self._http.stream("POST", "/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise _refusal(response.read())
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        chunk = json.loads(line.removeprefix("data: "))
                        if "error" in chunk:
                            raise _refusal(line.removeprefix("data: ").encode())
                        yield chunk
        except httpx.HTTPError as error:
            raise EngineError(f"{self._http.base_url}: {error!r}") from error

    def _print_calls(self, answer: str) -> None:
        if not self._tools:
            return
        from relax_hpc.environments.chat_api.messages import parse

        for call in parse(answer, self._tools).calls:
            _say(f"\ntool call, not run: {call.name}({json.dumps(call.arguments)})")

    def obey(self, line: str) -> bool:
        """Obeys a command; returns whether the conversation goes on."""
        word, _, rest = line.partition(" ")
        match word:
            case "/reset":
                self._said.clear()
            case "/undo":
                del self._said[-2:]
            case "/system":
                self._system = rest.strip() or None
            case "/save" if rest.strip():
                with Path(rest.strip()).open("a", encoding="utf-8") as out:
                    out.write(json.dumps({"messages": self.messages}) + "\n")
            case "/quit":
                return False
            case _:
                raise ConfigError(f"{line}: no such command; there are {_COMMANDS}")
        return True


def _refusal(content: bytes) -> EngineError:
    try:
        return EngineError(str(json.loads(content)["error"]["message"]))
    except (ValueError, TypeError, KeyError):
        return EngineError(f"an answer that cannot be read: {show(content)}")


def _converse(talk: _Talk) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401 - lets lines be edited
    echo_styled(
        f"{_COMMANDS}; \\ at the end of a line goes on; Ctrl-C breaks off, twice it ends", "dim"
    )
    was_broken_off = False
    while True:
        try:
            line = _read_line()
            was_broken_off = False
            if line.startswith("/"):
                if not talk.obey(line):
                    return
            elif line.strip():
                said = talk.ask(line)
                echo_styled(f"\n{said}", "dim")
        except EOFError:
            return
        except KeyboardInterrupt:
            if was_broken_off:
                return
            was_broken_off = True
            echo_styled("\nbroken off; again, Ctrl-C ends", "dim")
        except (RelaxError, OSError) as error:
            echo_styled(error, "red")


def _read_line() -> str:
    line = input("> ")
    while line.endswith("\\"):
        line = f"{line[:-1]}\n{input('. ')}"
    return line
