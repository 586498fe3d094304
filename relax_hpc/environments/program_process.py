"""A program of an episode: in a session of its own, ended as a whole, and never left behind.

A keeper runs it, see `program_keeper`; should that be killed, a reaper ends the session.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from relax_hpc.engines import reaper as reaping
from relax_hpc.environments import program_keeper

GRACE_S = 3.0
"""Time to end by itself, once it is asked to."""
_SAID_BYTES = 4096
_LAST_WORDS_S = 0.5
_KILL_S = 5.0
_OURS = (sys.executable, "-S", "-E")


class ProgramProcess:
    """A program that was started."""

    def __init__(self, process: Process, stderr: asyncio.StreamReader) -> None:
        self._process, self._stderr, self._said = process, stderr, b""
        self._ending = asyncio.create_task(process.wait())
        self._listening = asyncio.create_task(self._listen())

    @property
    def end(self) -> str:
        """Says how it ended, if it did not end well; "" while it runs."""
        code = self._process.returncode or 0
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with {code}" * bool(code)

    async def has_ended(self, within_s: float) -> bool:
        """Waits for its end, as long as this at most."""
        done, _ = await asyncio.wait([self._ending], timeout=within_s)
        return bool(done)

    async def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        await asyncio.wait([self._listening], timeout=_LAST_WORDS_S)
        return self._said.decode(errors="replace")

    async def stop(self) -> None:
        """Asks it to end, and waits for a while."""
        if not self._ending.done():
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            await self.has_ended(GRACE_S)

    async def kill(self) -> None:
        """Ends it, and whatever it has started."""
        if not self._ending.done():
            with suppress(ProcessLookupError):
                self._process.send_signal(program_keeper.END)
            await self.has_ended(_KILL_S)

    def close(self) -> None:
        self._listening.cancel()
        self._ending.cancel()

    async def _listen(self) -> None:
        while piece := await self._stderr.read(1 << 16):
            self._said = (self._said + piece)[-_SAID_BYTES:]


@asynccontextmanager
async def running(
    argv: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> AsyncIterator[ProgramProcess]:
    """Runs a program for the length of the block at most.

    At its end whatever the program has started is killed, be it in a session of its own, and
    likewise if this process dies.
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
        async with _kept(ProgramProcess(process, stderr), process) as program:
            yield program


@asynccontextmanager
async def _pipe() -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """A pipe, and the end of it that is to be written to.

    One of asyncio's would do, but for programs that leave somebody behind who holds it: to asyncio
    these have not ended.
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
async def _kept(program: ProgramProcess, process: Process) -> AsyncIterator[ProgramProcess]:
    reaper = None
    try:
        reaper = await asyncio.create_subprocess_exec(
            *(*_OURS, reaping.__file__, str(process.pid), str(_KILL_S)),
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
