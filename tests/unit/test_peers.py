"""The scripts that compare this project with another do the same work on both sides."""

import hashlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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


def test_without_a_distribution_all_responses_are_as_long(settings, tmp_path):
    script("prepare.py", "jobs/qwen3-0.6b.toml", tmp_path, 0, 7, *settings)
    lengths = json.loads((tmp_path / "lengths.json").read_text())
    assert all(some == [7, 7, 7] for some in lengths.values())
    assert not (tmp_path / "lengths.py").exists()


def test_the_table_counts_from_end_to_end_and_leaves_out_the_first_two_steps(tmp_path):
    ends = [100.0, 150.0, 152.0, 156.0]
    ours = [{"event": "start", "time": 1.0}] + [
        {"event": "step", "time": end, "num_tokens": 600, "time/wait": 0.5, "time/save": 0.0}
        for end in ends
    ]
    theirs = [
        {"time": end + 1, "data": {"timing_s/step": 1, "perf/total_num_tokens": 300,
                                   "timing_s/gen": 2.0}}
        for end in ends
    ]  # fmt: skip
    for name, rows in (("1.7b.relax", ours), ("1.7b.verl", theirs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = script("table.py", tmp_path).splitlines()
    assert table[2] == "| 1.7b | relax | 2 | 3.00 (2.00 to 4.00) | 200 | wait 0.50 |"
    assert table[3] == "| 1.7b | verl | 2 | 3.00 (2.00 to 4.00) | 100 | gen 2.00 |"


def test_the_change_to_verl_gives_each_sibling_its_length(tmp_path):
    """Runs the lines that the patch adds, in two engines that siblings are asked of by turns."""
    added = [line[1:] for line in (PEERS / "verl/verl-0.9.1.diff").read_text().splitlines()
             if line.startswith("+")]  # fmt: skip
    first = added.index("def drawn_length(prompt_ids, most):")
    body = [line for line in added[first - 3 :] if not line.startswith("        sampling_params")]
    (tmp_path / "lengths.json").write_text(json.dumps({"1,2": [5, 6], "3": [7]}))
    (tmp_path / "asked").mkdir()
    environ = {}
    calls = SimpleNamespace(
        environ=environ, path=os.path, open=os.open, close=os.close, O_CREAT=os.O_CREAT,
        O_EXCL=os.O_EXCL,
    )  # fmt: skip
    engines = [{"os": calls, "json": json, "hashlib": hashlib} for _ in range(2)]
    for engine in engines:
        exec("\n".join(body), engine)
    one, other = (engine["drawn_length"] for engine in engines)
    assert one([1, 2], 99) == 99, "without a file as verl does"
    environ |= {"VERL_LENGTHS": tmp_path / "lengths.json", "VERL_ASKED": str(tmp_path / "asked")}
    asked = [one([1, 2], 99), one([3], 99), other([1, 2], 99), one([1, 2], 99)]
    assert asked == [5, 7, 6, 5]
    with pytest.raises(KeyError):
        one([4], 99)
