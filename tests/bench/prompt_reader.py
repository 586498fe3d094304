"""One of several producers that read the prompts of a run: what it took, in time and memory.

Usage: prompt_reader.py DATA RANK SIZE COUNT OUT: asks for the ordinals RANK, RANK + SIZE, ... below
COUNT and leaves the rows in OUT, an array.
"""

import json
import re
import sys
import time
from pathlib import Path

import numpy as np

from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.data.records import Records
from relax_hpc.data.source import PromptSource


class Bytes:
    """A tokenizer that takes no time: what is measured is reading."""

    chat_template = None

    def encode(self, text, *, add_special_tokens):
        return [len(text)]


def memory(field):
    """A figure of this process in MB, as the kernel says."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(rf"^{field}:\s+(\d+)", status, re.MULTILINE)[1]) / 1024


def main(data, rank, size, count, out):
    before = memory("VmRSS")
    start = time.perf_counter()
    settings = PromptsConfig(train=[Path(data)], chat_template=False)
    records = Records(settings.mixture, settings)
    prompts = PromptSource(records, Bytes(), shuffle_seed=1, settings=settings)
    ordinals = range(rank, min(count, len(prompts)), size)
    indices = np.zeros(len(ordinals), np.int64)
    first = 0.0
    for place, ordinal in enumerate(ordinals):
        prompt = prompts[ordinal]
        assert int(prompt.answer) == prompt.index
        indices[place] = prompt.index
        first = first or time.perf_counter() - start
    seconds = time.perf_counter() - start
    np.save(out, indices)
    told = {
        "imports_mb": before,
        "peak_mb": memory("VmHWM"),
        "first_s": first,
        "rows_per_s": len(ordinals) / seconds,
        "rows_per_cpu_s": len(ordinals) / time.process_time(),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    data, rank, size, count, out = sys.argv[1:]
    main(data, int(rank), int(size), int(count), out)
