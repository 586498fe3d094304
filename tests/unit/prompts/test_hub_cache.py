"""Sets of a hub that is out of reach, read from the cache that the library `datasets` wrote."""

import json
import os
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("datasets")

OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
FILL = "import sys, datasets; datasets.load_dataset(sys.argv[1])"
READ = """
import json, sys
from pathlib import Path
from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.errors import ConfigError
from relax_hpc.data.records import Records
try:
    settings = PromptsConfig(train=[Path(name) for name in sys.argv[1:]])
    records = Records(settings.mixture, settings)
    rows = [records[n] for n in range(len(records))]
    told = [[r.prompt, r.answer, r.metadata, records.where(n)] for n, r in enumerate(rows)]
    print(json.dumps(told))
except ConfigError as error:
    print(error)
"""


@pytest.fixture
def cached(tmp_path):
    """Runs a program with a cache that has a set `sums`; the set's own files are gone."""
    from pathlib import Path

    import relax_hpc

    package = Path(relax_hpc.__path__[0]).parent
    path = f"{package}:{os.environ.get('PYTHONPATH', '')}"
    own = os.environ | OFFLINE | {"HF_HOME": str(tmp_path / "cache"), "PYTHONPATH": path}

    def run(program, *arguments):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env=own, cwd=tmp_path, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    folder = tmp_path / "sums"
    folder.mkdir()
    for split, numbers in (("train", range(5)), ("test", [9])):
        rows = ({"prompt": f"{n}+1=", "answer": str(n + 1), "level": n or None} for n in numbers)
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run(FILL, str(folder))
    shutil.rmtree(folder)
    return lambda *names: run(READ, *names)


def test_a_set_is_read_by_its_name_from_the_cache_and_another_is_named(cached):
    rows = json.loads(cached("hf:sums/train[1:3]", "hf:sums:default/test"))
    assert rows == [
        ["1+1=", "2", {"level": 1}, "hf:sums/train, row 1"],
        ["2+1=", "3", {"level": 2}, "hf:sums/train, row 2"],
        ["9+1=", "10", {"level": 9}, "hf:sums:default/test, row 0"],
    ]
    [first, *_] = json.loads(cached("hf:sums/train"))
    assert first == ["0+1=", "1", {}, "hf:sums/train, row 0"], "what is null is not there"
    said = cached("hf:owner/sums/train")
    assert said.startswith("hf:owner/sums/train: cannot be loaded: ") and "Couldn't reach" in said
    assert "load it once where the hub can be reached (its cache will do)" in said
    assert "hf:sums/valid: cannot be loaded" in cached("hf:sums/valid")
