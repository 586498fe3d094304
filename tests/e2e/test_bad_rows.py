"""A run of two rollout tasks whose mixed sources have bad rows: it trains on the good ones."""

import json

import pytest
from e2e_runs import assert_every_prompt_once, sized, submit, wait_until_over

from relax_hpc.bus.reader import Reader
from relax_hpc.bus.tools import inventory
from relax_hpc.runtime.paths import RunPaths

pytestmark = pytest.mark.long

STEPS, PROMPTS = 5, 8
ROWS = 12
BAD = {
    "sums": {2: b"{", 9: b'{"prompt": "1+1="}'},
    "others": {0: b'{"prompt": "\xe9", "answer": "1"}', 5: b'{"prompt": "1+1=", "answer": null}'},
}
"""Source -> row -> a line that is no prompt."""


def test_a_run_trains_on_every_good_row_of_its_sources_and_on_no_bad_one(tiny, tmp_path):
    lines = (tiny / "train.jsonl").read_bytes().splitlines()
    for number, (name, bad) in enumerate(BAD.items()):
        own = [bad.get(row, lines[number * ROWS + row]) for row in range(ROWS)]
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n".join(own) + b"\n")
    run_dir = submit(
        "demo", tiny, local=True,
        **sized(tmp_path, STEPS, PROMPTS, 2, 8) | {
            "prompts.train": "[]", "prompts.bad_rows": "skip",
            "prompts.sources.sums.path": tmp_path / "sums.jsonl", "prompts.sources.sums.weight": 3,
            "prompts.sources.others.path": tmp_path / "others.jsonl",
            "prompts.sources.others.weight": 2, "engines.rollout.count": 2,
            "engines.rollout.resources.nodes": 2, "bus.keep_steps": STEPS,
        },
    ).run_dir  # fmt: skip
    after = wait_until_over(run_dir, 200)
    assert after["state"] == "COMPLETED"
    assert_every_prompt_once(run_dir, STEPS, PROMPTS)
    paths = RunPaths(run_dir)
    listed = [json.loads(line)["row"] for line in paths.left_out.read_text().splitlines()]
    assert listed == [2, 9, ROWS + 0, ROWS + 5]
    trained, reader = {}, Reader(paths.bus)
    for step in range(1, STEPS + 1):
        for record in inventory.of_steps(paths.bus, step, step):
            rows = reader.rows(record, range(len(reader.index(record).guid)))
            trained |= {row.guid: row.prompt_index for row in rows}
    assert len(trained) == STEPS * PROMPTS
    assert set(trained.values()) == set(range(2 * ROWS)) - set(listed)
