"""Runs a user's agent program for each episode, which talks to the policy over the chat API.

A keeper starts the program in its own session and kills everything it leaves behind, see
`program_keeper`. If the keeper is killed, a reaper ends the session.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from logging import handlers, makeLogRecord
from pathlib import Path
from typing import Any

from relax_hpc.config.rollout import ProgramConfig
from relax_hpc.data.source import Prompt
from relax_hpc.environments import program_keeper
from relax_hpc.environments.chat_api.server import Served, serving
from relax_hpc.environments.session import Outcome, Session
from relax_hpc.errors import ConfigError, ends_of, show, without_number
from relax_hpc.inference import leash
from relax_hpc.runtime.files.scratch import scratch_folder
from relax_hpc.runtime.process import without_mpi

GRACE_S = 3.0
"""Seconds to exit after a request to stop."""
_KEPT_BYTES = 64 << 10
"""Bytes of stderr kept from the beginning, and from the end."""
_LAST_WORDS_S = 0.5
_KILL_S = 5.0
_OURS = (sys.executable, "-S", "-E")


class ProgramProcess:
    """A running program."""

    def __init__(self, process: Process, stderr: asyncio.StreamReader) -> None:
        self._process, self._stderr = process, stderr
        self._first = self._last = b""
        self._num_bytes = 0
        self._ending = asyncio.create_task(process.wait())
        self._listening = asyncio.create_task(self._listen())

    @property
    def end(self) -> str:
        """Says how it failed; "" while it runs or after success."""
        code = self._process.returncode or 0
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with {code}" * bool(code)

    async def has_ended(self, within_s: float) -> bool:
        """Waits for its end, at most this long."""
        done, _ = await asyncio.wait([self._ending], timeout=within_s)
        return bool(done)

    async def words(self) -> str:
        """Returns its stderr; only the beginning and the end if very long."""
        await asyncio.wait([self._listening], timeout=_LAST_WORDS_S)
        left_out = self._num_bytes - len(self._first) - len(self._last)
        between = f"\n[{left_out} bytes are left out]\n".encode() * bool(left_out)
        return (self._first + between + self._last).decode(errors="replace")

    async def stop(self) -> None:
        """Asks it to end, and waits for a while."""
        if not self._ending.done():
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            await self.has_ended(GRACE_S)

    async def kill(self) -> None:
        """Kills it and its descendants."""
        if not self._ending.done():
            with suppress(ProcessLookupError):
                self._process.send_signal(program_keeper.END)
            await self.has_ended(_KILL_S)

    def close(self) -> None:
        self._listening.cancel()
        self._ending.cancel()

    async def _listen(self) -> None:
        while piece := await self._stderr.read(1 << 16):
            self._num_bytes += len(piece)
            room = _KEPT_BYTES - len(self._first)
            self._first += piece[:room]
            self._last = (self._last + piece[room:])[-_KEPT_BYTES:]


@asynccontextmanager
async def running(
    argv: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> AsyncIterator[ProgramProcess]:
    """Runs a program for at most the length of the block.

    Afterwards all its descendants are killed, in whatever session, also if this process dies.
    """
    async with _pipe() as (stderr, theirs):
        try:
            process = await asyncio.create_subprocess_exec(
                *(*_OURS, program_keeper.__file__, str(os.getpid()), *argv),
                cwd=folder,
                env=dict(environment),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=theirs,
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        async with _hold(ProgramProcess(process, stderr), process) as program:
            yield program


@asynccontextmanager
async def _pipe() -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """Yields a pipe's reader and its write end.

    asyncio's own pipes keep a program "running" while a descendant holds them.
    """
    ours, theirs = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours, "rb", 0)
    )
    try:
        yield reader, theirs
    finally:
        transport.close()


@asynccontextmanager
async def _hold(program: ProgramProcess, process: Process) -> AsyncIterator[ProgramProcess]:
    reaper = None
    try:
        reaper = await asyncio.create_subprocess_exec(
            *(*_OURS, leash.__file__, "reap", str(process.pid), str(_KILL_S)),
            stdin=PIPE,
            start_new_session=True,
        )
        yield program
    finally:
        try:
            await program.stop()
            await program.kill()
        finally:
            if reaper is None:
                with suppress(ProcessLookupError):
                    process.kill()
            else:
                assert reaper.stdin is not None, "it is a pipe"
                reaper.stdin.close()  # without a word: it ends the session
                await reaper.wait()
            await process.wait()
            program.close()


TICK_S = 0.25
"""Seconds between checks of a running program."""
_SAID_CHARACTERS = 400
"""Characters of stderr in an error message."""
_FILE_BYTES = 8 << 20
"""Size at which the stderr file is rotated; one older file is kept."""
_HERE = "127.0.0.1"


class ProgramError(Exception):
    """A program failed, so its episode has no score."""


class ProgramEnvironment:
    """Starts the job's program for each episode."""

    def __init__(self, config: ProgramConfig | None, words: Path | None = None) -> None:
        """Args:
            config: names the program.
            words: file for long stderr of failed programs; default is a temporary file each.

        Raises:
            ConfigError: there is no such program, or it cannot be started.
        """
        assert config is not None, "the job was looked through"
        _check(config)
        self._config = config
        self._words_file: handlers.RotatingFileHandler | None = None
        if words is not None:
            self._words_file = handlers.RotatingFileHandler(
                words, maxBytes=_FILE_BYTES, backupCount=1, encoding="utf-8", delay=True
            )

    async def rollout(self, prompt: Prompt, session: Session) -> Outcome:
        with scratch_folder("episode") as folder:
            places = {"task": folder / "task.json", "outcome": folder / "outcome.json"}
            places["task"].write_text(
                json.dumps(task_of(prompt, session), default=str), encoding="utf-8"
            )
            command = [_fill(word, places) for word in self._config.command]
            async with (
                serving(session) as served,
                running(command, self._config.folder, _environment(served)) as program,
            ):
                try:
                    late = await self._wait(program, served)
                    words = await program.words() if late else ""
                finally:  # before it is asked to end: it might ask for some last words
                    await served.end()
                end, words = program.end, words or await program.words()
            try:
                if late:
                    raise ProgramError(late)
                return _outcome(places["outcome"], served, end)
            except ProgramError as error:
                raise ProgramError(f"{error}{self._describe_output(prompt, words)}") from None

    async def _wait(self, program: ProgramProcess, served: Served) -> str:
        """Waits for its end; time in which engines do not answer does not count.

        Returns:
            "", or that it took too long.
        """
        session, spent_s = served.session, 0.0
        while not await program.has_ended(TICK_S):
            spent_s += TICK_S * (not served.is_asked)
            if session.failure is not None:
                break
            if spent_s >= self._config.timeout_s:
                return f"took longer than {self._config.timeout_s} s"
        if session.failure is not None:
            raise session.failure
        return ""

    def _describe_output(self, prompt: Prompt, words: str) -> str:
        """Formats the end of a program's stderr, and where all of it is kept."""
        lines = [" ".join(line.split()) for line in words.splitlines()]
        lines = [line for line in lines if line.strip("~^")]
        if not lines:
            return ""
        end = lines.pop()
        while lines and len(lines[-1]) + 1 + len(end) <= _SAID_CHARACTERS:
            end = f"{lines.pop()} {end}"
        if not lines and len(end) <= _SAID_CHARACTERS:
            return f"; it said: {end}"
        where = self._keep_output(f"{prompt.where}:\n{words.rstrip()}\n")
        return f"; it said: {ends_of(end, _SAID_CHARACTERS)} (all of it: {where})"

    def _keep_output(self, text: str) -> Path:
        """Writes a program's stderr to a file."""
        if self._words_file is None:
            with tempfile.NamedTemporaryFile(
                "w", prefix="relax-stderr-", suffix=".log", delete=False, encoding="utf-8"
            ) as file:
                file.write(text)
            return Path(file.name)
        path = Path(self._words_file.baseFilename)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._words_file.emit(makeLogRecord({"msg": text}))
        return path


def task_of(prompt: Prompt, session: Session) -> dict[str, Any]:
    """Describes its episode to a program."""
    return {
        "messages": prompt.messages,
        "answer": prompt.answer,
        "metadata": dict(prompt.metadata),
        "tools": prompt.tools,
        "source": prompt.source,
        "seed": session.seed,
    }


def _check(config: ProgramConfig) -> None:
    folder, name = config.folder, config.command[0]
    if not folder.is_dir():
        raise ConfigError(f"rollout.program.folder = {str(folder)!r}: no such folder; name one")
    path = folder / name if "/" in name else None
    if path is None and shutil.which(name) is None:
        raise ConfigError(
            f"rollout.program.command = {show(config.command)}: no program {name} is on the PATH; "
            "name its file"
        )
    if path is not None and not (path.is_file() and os.access(path, os.X_OK)):
        what = "may not be executed; chmod +x it" if path.is_file() else "no such file; correct it"
        raise ConfigError(f"rollout.program.command = {show(config.command)}: {path}: {what}")


def _fill(word: str, places: Mapping[str, Path]) -> str:
    for name, path in places.items():
        word = word.replace(f"{{{name}}}", str(path))
    return word


def _environment(served: Served) -> dict[str, str]:
    """The variables of a program; bypasses the site's proxy, which cannot reach this address."""
    made = without_mpi(os.environ)
    for name in ("no_proxy", "NO_PROXY"):
        made[name] = ",".join(filter(None, [made.get(name), _HERE]))
    return made | {"OPENAI_BASE_URL": served.base_url, "OPENAI_API_KEY": served.api_key}


def _outcome(path: Path, served: Served, end: str) -> Outcome:
    if not served.num_replies:
        raise ProgramError(f"{end or 'ended'} and has had no reply of the policy")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if end:
            raise ProgramError(end) from None
        return Outcome()
    except (OSError, UnicodeDecodeError) as error:
        raise ProgramError(f"its outcome cannot be read: {without_number(error)}") from None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProgramError(f"its outcome is no JSON: {error}") from None
    if not isinstance(found, dict) or found.keys() - set(Outcome._fields):
        raise ProgramError(f"its outcome is {show(found)}; write rewards and metrics by name")
    return Outcome(**found)
