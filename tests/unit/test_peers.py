"""The scripts that compare this project with another do the same work on both sides."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from relax_hpc.config import job_file
from relax_hpc.data import tokenizer
from relax_hpc.roles.rollout import prompt_check
from relax_hpc.roles.rollout.episodes import seed_of

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "tests" / "peers"


def script(name, *arguments):
    command = [sys.executable, PEERS / name, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


@pytest.fixture(scope="module")
def settings(tiny_model):
    prompts = tiny_model / "peers.jsonl"
    lines = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [f"model.path={tiny_model}", f"prompts.train={prompts}",
            f"eval.heldout.path={prompts}", "rollout.samples_per_prompt=3"]  # fmt: skip


def test_verl_gets_the_prompts_in_our_order_and_the_lengths_that_our_episodes_draw(
    settings, tmp_path
):
    script("prepare.py", "jobs/qwen3-0.6b.toml", tmp_path, 64, 256, *settings)
    config = job_file.load(ROOT / "jobs/qwen3-0.6b.toml", settings)
    source = prompt_check.sources_of(
        config, prompt_check.open_files(config), tokenizer.load(config.model.path)
    ).train
    rows = [json.loads(line) for line in (tmp_path / "train.json").read_text().splitlines()]
    lengths = json.loads((tmp_path / "lengths.json").read_text())
    assert len(rows) == len(lengths) == 40
    assert [row["prompt"] for row in rows] == [source[guid].messages for guid in range(40)]
    assert [row["prompt"][0]["content"] for row in rows] != [f"{n}+1=" for n in range(40)]
    drawn = runpy.run_path(str(tmp_path / "lengths.py"))["Drawn"].lengths
    for guid in range(40):
        found = lengths[",".join(map(str, source[guid].token_ids))]
        assert found == [drawn.draw(seed_of(config.seed, guid, n)) for n in range(3)]
    assert len({length for some in lengths.values() for length in some}) > 50
