"""`bench modes` as a whole: the same responses in every mode, and figures of each."""

import json

import pytest
from e2e_runs import REPOSITORY, cli, events_of

from relax_hpc.bench.modes import jobs, long_tail
from relax_hpc.roles.rollout.episodes import seed_of

pytestmark = pytest.mark.long

PROMPTS, SIBLINGS, WARM_UP, STEPS, MEAN = 4, 4, 2, 2, 12.0


def test_in_every_mode_the_same_responses_are_sampled_and_trained_on(tiny, tmp_path):
    settings = {
        "model.path": tiny / "model",
        "prompts.train": f"{tiny}/train.jsonl[0:64]",
        "schedule.prompts_per_step": PROMPTS,
        "rollout.samples_per_prompt": SIBLINGS,
    }
    cli(
        "bench", "modes", "--job", REPOSITORY / "jobs" / "demo.toml", "--mean", MEAN,
        "--warm-up", WARM_UP, "--steps", STEPS, "--folder", tmp_path / "modes", "--limit", 3,
        "--json", tmp_path / "modes.json", "--plot", tmp_path / "modes.png",
        *(f"--set={key}={value}" for key, value in settings.items()),
    )  # fmt: skip
    found = json.loads((tmp_path / "modes.json").read_text())["modes"]
    assert [each["mode"] for each in found] == list(jobs.MODES)
    assert [each["failure"] for each in found] == [""] * len(found)
    assert len({each["num_tokens"] for each in found}) == 1
    limit = long_tail.limit_of(MEAN)
    drawn = [
        [long_tail.draw(seed_of(0, guid, sibling), limit) for sibling in range(SIBLINGS)]
        for guid in range(PROMPTS * (WARM_UP + STEPS))
    ]
    for mode in jobs.MODES:
        steps = events_of(tmp_path / "modes" / mode, "actor", "step")[: WARM_UP + STEPS]
        for number, step in enumerate(steps):
            lengths = [n for group in drawn[number * PROMPTS :][:PROMPTS] for n in group]
            assert step["response/mean"] == pytest.approx(sum(lengths) / len(lengths)), mode
        shares = [each["wait_lease_s"] > 0 for each in found]
    assert shares == [True, False, False, False]
    assert (tmp_path / "modes.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in (tmp_path / "modes" / "colocate").iterdir()) == ["events"]
