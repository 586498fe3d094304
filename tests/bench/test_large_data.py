"""Data larger than memory may be: three producers read it, each in its bounds."""

import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

READER = Path(__file__).with_name("prompt_reader.py")
MOST_MB, PRODUCERS = 500, 3
GROUP_BYTES, FILES = 10_240_000, 4


def generate(folder, num_bytes, row_bytes):
    """Makes Parquet of texts that do not get smaller, 10 MB a row group; returns the rows."""
    letters = base64.b64encode(os.urandom(GROUP_BYTES)).decode()
    group_rows = GROUP_BYTES // row_bytes
    schema = pa.schema({"prompt": pa.string(), "answer": pa.string()})
    groups = -(-num_bytes // (GROUP_BYTES * FILES))
    for file in range(FILES):
        path = folder / f"{file}.parquet"
        with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
            for number in range(file * groups, (file + 1) * groups):
                places = range(number % 64, number % 64 + GROUP_BYTES, row_bytes)
                answers = range(number * group_rows, (number + 1) * group_rows)
                texts = [letters[place : place + row_bytes] for place in places]
                group = pa.table({"prompt": texts, "answer": [str(n) for n in answers]})
                writer.write_table(group, row_group_size=group_rows)
    assert sum(path.stat().st_size for path in folder.iterdir()) >= num_bytes
    return groups * FILES * group_rows


@pytest.mark.parametrize(
    ("gigabytes", "row_bytes"),
    [(1, 51_200), pytest.param(10, 20_480, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
)
def test_three_producers_read_every_row_once_and_none_of_them_grows(tmp_path, gigabytes, row_bytes):
    folder = tmp_path / "data"
    folder.mkdir()
    start = time.perf_counter()
    count = generate(folder, gigabytes * 10**9, row_bytes)
    made = time.perf_counter()
    producers = [
        subprocess.Popen(
            [sys.executable, READER, folder, str(rank), str(PRODUCERS), str(count),
             tmp_path / f"{rank}.npy"],
            stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        for rank in range(PRODUCERS)
    ]  # fmt: skip
    told = [json.loads(producer.communicate()[0]) for producer in producers]
    seconds = time.perf_counter() - made
    print(f"\n{gigabytes} GB made in {made - start:.1f} s, {count:,} rows read in {seconds:.1f} s")
    for each in told:
        print(json.dumps({name: round(value, 2) for name, value in each.items()}))
    assert [producer.returncode for producer in producers] == [0] * PRODUCERS
    assert max(each["peak_mb"] for each in told) <= MOST_MB
    parts = [np.load(tmp_path / f"{rank}.npy") for rank in range(PRODUCERS)]
    rows = np.concatenate(parts)
    assert len(rows) == count and (np.bincount(rows, minlength=count) == 1).all()
    assert (np.abs(np.diff(parts[0])) > 1).mean() > 0.99  # shuffled
    for path in folder.iterdir():
        path.unlink()
