"""Starts SGLang's server with three changes: `python -m relax_hpc.inference.sglang.serve ...`.

SGLang logs its arguments, including the token; here the log hides it. On GPUs `sampler` draws the
tokens. With `--gate FILE` the server loads its modules at once but takes no GPU before the file
exists: its imports take longer than its weights, and need not wait until the trainer lends its
GPUs.
"""

import logging
import runpy
import sys
from pathlib import Path

from relax_hpc.inference.sglang.launch import GATE, adapt_workers, read_token
from relax_hpc.runtime.process import tell_stacks


def main() -> None:
    tell_stacks()
    conceal(read_token(Path(sys.argv[sys.argv.index("--config") + 1])))
    gate = None
    if GATE in sys.argv:
        place = sys.argv.index(GATE)
        gate = Path(sys.argv[place + 1])
        del sys.argv[place : place + 2]
    adapt_workers(gate)
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def conceal(token: str) -> None:
    """Removes `token` from every log message of this process from now on."""

    class Concealing(logging.LogRecord):
        def getMessage(self) -> str:  # noqa: N802
            return super().getMessage().replace(token, "***")

    logging.setLogRecordFactory(Concealing)


if __name__ == "__main__":
    main()
