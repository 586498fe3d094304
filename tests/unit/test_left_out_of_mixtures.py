"""Bad rows of several sources that are mixed: every process leaves out the same, shares stay."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import relax_hpc
from relax_hpc.paths import RunPaths

TASKS = 3
TASK = """
import json, sys
from pathlib import Path
from relax_hpc.job_file import load
from relax_hpc.paths import RunPaths
from relax_hpc.prompts import tokenizer
from relax_hpc.roles.rollout import prompt_check, row_check
config = load(Path("job.toml"))
sources = prompt_check.sources_of(config, prompt_check.read(config), tokenizer.load(Path("model")))
row_check.settle(config, RunPaths(Path(sys.argv[1])), sources, row_check.Share(int(sys.argv[2]), 3))
train = sources.train
asked = [train[n] for n in range(3000)]
print(json.dumps([len(train), [each.index for each in asked], [each.source for each in asked]]))
"""


def good(source, n):
    return json.dumps({"prompt": f"{source}{n}+1=", "answer": str(n + 1)}).encode()


MIXTURE = """
bad_rows = "skip"
max_prompt_tokens = 30
[prompts.sources.marked]
path = "marked.jsonl"
weight = 5
[prompts.sources.latin]
path = ["latin.jsonl", "other.jsonl"]
weight = 2
[prompts.sources.table]
path = "table.parquet"
weight = 1
"""


@pytest.fixture
def mixed(job):
    """Writes three sources; returns which of their rows are bad, counted through."""
    marked = [good("m", n) for n in range(40)]
    marked[7] = b"\xef\xbb\xbf" + good("m", 7)  # a mark within, as of files put together
    marked[11] = json.dumps({"question": "1+1=", "answer": "2"}).encode()
    marked[39] = json.dumps({"prompt": "1+1=", "answer": 2.5}).encode()
    # The mark and the line ends of Windows are no fault of row 0.
    Path("marked.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(marked) + b"\r\n")
    latin = [good("l", n) for n in range(25)]
    latin[0] = '{"prompt": "caf\xe9", "answer": "1"}'.encode("latin-1")
    latin[13] = b"{"
    Path("latin.jsonl").write_bytes(b"\n".join(latin) + b"\n")
    other = [good("o", n) for n in range(5)]
    other[4] = json.dumps({"prompt": "1" * 40, "answer": "1"}).encode()
    Path("other.jsonl").write_bytes(b"\n".join(other) + b"\n")
    rows = [json.loads(good("t", n)) for n in range(20)]
    rows[3]["prompt"], rows[17]["answer"] = None, "two"
    pq.write_table(pa.Table.from_pylist(rows), "table.parquet", row_group_size=6)
    text = Path("job.toml").read_text()
    Path("job.toml").write_text(text.replace('train = "train.jsonl"\n', MIXTURE))
    return [7, 11, 39, 40 + 0, 40 + 13, 40 + 25 + 4, 70 + 3, 70 + 17]


def test_every_process_leaves_out_the_same_rows_and_the_counts_of_blocks_stay(job, mixed):
    paths = RunPaths(job / "run")
    package = str(Path(relax_hpc.__path__[0]).parent)
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", TASK, paths.root, str(number)],
            env=os.environ | {"PYTHONPATH": package, "PYTHONHASHSEED": str(number)},
            stdout=subprocess.PIPE, text=True,
        )
        for number in range(TASKS)
    ]  # fmt: skip
    told = [json.loads(task.communicate(timeout=120)[0]) for task in tasks]
    assert told[0] == told[1] == told[2]
    count, asked, names = told[0]
    assert count == 90 - len(mixed)
    listed = [json.loads(line) for line in paths.left_out.read_text().splitlines()]
    assert [each["row"] for each in listed] == mixed
    lines = [each["reason"].split(":")[0] for each in listed]
    assert lines == [
        "marked.jsonl, line 8", "marked.jsonl, line 12", "marked.jsonl, line 40",
        "latin.jsonl, line 1", "latin.jsonl, line 14", "other.jsonl, line 5",
        "table.parquet, row 3", "table.parquet, row 17",
    ]  # fmt: skip
    assert "UTF-8" in listed[3]["reason"] and "it has question" in listed[1]["reason"]
    for block in range(3):
        part = Counter(names[block * 1000 : (block + 1) * 1000])
        assert part == {"marked": 625, "latin": 250, "table": 125}
    assert set(asked) == set(range(90)) - set(mixed)
    # Each source goes through epochs of its own: every good row comes before one comes again.
    for first, end in ((0, 40), (40, 70), (70, 90)):
        kept = [row for row in range(first, end) if row not in mixed]
        own = [row for row in asked if first <= row < end]
        assert sorted(own[: len(kept)]) == sorted(own[len(kept) : 2 * len(kept)]) == kept
