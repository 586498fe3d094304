"""GSM8K: 8.5 thousand word problems whose answer is a number (arXiv:2110.14168)."""

import re
from collections.abc import Mapping
from typing import Any

from relax_hpc.preparation.data_set import DataSet, Task, text

_WISH = "Think step by step, and put the final number into \\boxed{}."
_FINAL = re.compile(r"####\s*\$?(-?[\d,]+(?:\.\d+)?)\s*$")


def _task(fields: Mapping[str, Any]) -> Task:
    found = _FINAL.search(text(fields, "answer"))
    if found is None:
        raise ValueError("answer does not end with #### and a number")
    return Task(f"{text(fields, 'question')}\n\n{_WISH}", found[1].replace(",", ""))


GSM8K = DataSet("gsm8k", "openai/gsm8k", (":main/train", ":main/test"), _task)
