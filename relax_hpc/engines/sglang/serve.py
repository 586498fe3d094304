"""SGLang's server, but for the token in its log: `python -m relax_hpc.engines.sglang.serve ...`.

It logs the arguments that it was started with, and the token is one of them.
"""

import logging
import runpy
import sys
from pathlib import Path

from relax_hpc.engines.sglang.launch import read_token


def main() -> None:
    conceal(read_token(Path(sys.argv[sys.argv.index("--config") + 1])))
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def conceal(token: str) -> None:
    """Keeps `token` out of every message that this process logs from here on, by any logger."""

    class Concealing(logging.LogRecord):
        def getMessage(self) -> str:  # noqa: N802
            return super().getMessage().replace(token, "***")

    logging.setLogRecordFactory(Concealing)


if __name__ == "__main__":
    main()
