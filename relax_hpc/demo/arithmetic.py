"""The addition task: verifiable, endless, and as hard as it has digits."""

import json
import random
from pathlib import Path

from relax_hpc.errors import ConfigError


def write(folder: Path, digits: int, num_train: int, num_heldout: int, seed: int) -> None:
    """Writes train.jsonl and heldout.jsonl of sums of two numbers of `digits` digits each.

    Every pair occurs once, so nothing held out is trained on; (a, b) and (b, a) are two pairs.

    Raises:
        ConfigError: there are fewer pairs than asked for.
    """
    lowest, count = 10 ** (digits - 1), 9 * 10 ** (digits - 1)
    wanted = num_train + num_heldout
    if wanted > count**2:
        raise ConfigError(
            f"digits = {digits}: has {count**2} sums, {wanted} were asked for; use more digits"
        )
    picks = random.Random(seed).sample(range(count**2), wanted)
    lines = [_line(lowest + pick // count, lowest + pick % count) for pick in picks]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(lines[:num_train]))
    (folder / "heldout.jsonl").write_text("".join(lines[num_train:]))


def _line(a: int, b: int) -> str:
    message = {"role": "user", "content": f"{a}+{b}="}
    fields = {"prompt": [message], "answer": str(a + b), "completion": f"\\boxed{{{a + b}}}"}
    return json.dumps(fields) + "\n"
