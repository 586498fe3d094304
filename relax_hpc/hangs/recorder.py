"""The flight recorder of NCCL: the last collectives of a rank, and which of them have not ended.

torch keeps them in memory. A thread of it that needs neither the interpreter's lock nor the GPU
writes them to a file when a collective fails, or as soon as something stands in a pipe.
"""

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

_ENTRIES = 2000
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"


@contextmanager
def settled(environment: MutableMapping[str, str], folder: Path, dump: Path) -> Iterator[str]:
    """Has torch keep a record for the length of the block, unless the environment says otherwise;
    before the first group.

    Args:
        environment: of this process.
        folder: of this node, for pipes.
        dump: file for what is recorded; torch adds the rank.

    Yields:
        The pipe's name, to which torch adds the rank, too.
    """
    wanted = {
        "TORCH_FR_BUFFER_SIZE": str(_ENTRIES),
        "TORCH_FR_DUMP_TEMP_FILE": str(dump),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        _PIPE: str(folder / "rank-"),
    }
    ours = {name: value for name, value in wanted.items() if name not in environment}
    environment.update(ours)
    try:
        yield environment[_PIPE]
    finally:
        for name in ours:
            environment.pop(name, None)


def ask(pipe: str, rank: int) -> None:
    """Has a rank write its record within a second or two; nothing where it keeps none."""
    with suppress(OSError):
        fd = os.open(f"{pipe}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(fd, b"1")
        finally:
            os.close(fd)
