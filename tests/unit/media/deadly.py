"""A medium on which a decoder crashes; a worker imports this file, and it costs nothing."""

import os
import signal

from relax_hpc.media.source import Source


class Deadly(Source):
    def opened(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Endless(Source):
    def opened(self):
        while True:
            signal.pause()
