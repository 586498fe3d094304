"""SGLang's server, but for the token in its log: `python -m relax_hpc.engines.sglang.serve ...`.

It logs the arguments that it was started with, and the token is one of them. And with
`--gate FILE` it takes no GPU before there is such a file.
"""

import logging
import runpy
import sys
from pathlib import Path

from relax_hpc.engines.sglang import gate
from relax_hpc.engines.sglang.launch import GATE, read_token
from relax_hpc.hangs.process import tell_stacks


def main() -> None:
    tell_stacks()
    conceal(read_token(Path(sys.argv[sys.argv.index("--config") + 1])))
    if GATE in sys.argv:
        place = sys.argv.index(GATE)
        _, file = sys.argv[place : place + 2]
        del sys.argv[place : place + 2]
        gate.install(Path(file))
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def conceal(token: str) -> None:
    """Keeps `token` out of every message that this process logs from here on, by any logger."""

    class Concealing(logging.LogRecord):
        def getMessage(self) -> str:  # noqa: N802
            return super().getMessage().replace(token, "***")

    logging.setLogRecordFactory(Concealing)


if __name__ == "__main__":
    main()
