"""Media on which a decoder crashes, hangs or takes its time; workers import this file."""

import asyncio
import os
import signal
import time

from relax_hpc.data.media.source import MediaSource


class Deadly(MediaSource):
    def open_bytes(self):
        os.kill(os.getpid(), signal.SIGSEGV)


class Endless(MediaSource):
    def open_bytes(self):
        while True:
            signal.pause()


class Slow(MediaSource):
    def open_bytes(self):
        time.sleep(1.0)
        return super().open_bytes()


class Once(MediaSource):
    """Somebody else ends its process when it is opened for the first time."""

    ends = 1

    def open_bytes(self):
        times = self.path.with_suffix(".times")
        times.write_text(f"{times.read_text()}." if times.exists() else ".")
        if len(times.read_text()) == self.ends:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().open_bytes()


class Later(Once):
    """The same when its bytes are read for the bus: its array is in the spool by then."""

    ends = 2


async def turns_of(coroutine):
    """How often the event loop turned until a coroutine was done, and what came of it."""
    turns, running = 0, asyncio.ensure_future(coroutine)
    while not running.done():
        await asyncio.sleep(0.001)
        turns += 1
    return turns, running.result()
