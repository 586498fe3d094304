"""A reference policy of its own component: what it adds is true, and it may be killed."""

import e2e_runs as e2e
import numpy as np
import pytest
import torch
from hf_logprobs import hf_logprobs

from relax_hpc.bus.plan import read_chain
from relax_hpc.bus.reader import Reader
from relax_hpc.runtime.paths import RunPaths

pytestmark = pytest.mark.long

STEPS, PROMPTS, SIBLINGS = 8, 4, 4


def trained_rows(run_dir):
    """All trajectories, as the actor read them."""
    paths = RunPaths(run_dir).bus
    reader = Reader(paths)
    return [
        row
        for record in read_chain(paths).steps
        for row in reader.rows(record, range(record.num_trajectories))
    ]


def test_a_reference_component_that_is_killed_scores_every_row_as_hugging_face_does(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    settings = e2e.sized(tmp_path, STEPS, PROMPTS, SIBLINGS, 4) | {
        "algorithm.kl.name": "k3", "algorithm.kl.coefficient": 0.01, "algorithm.epochs_per_step": 1,
        "algorithm.loss.name": "policy_gradient", "rollout.advanced.groups_per_shard": 4,
        "actor.save_every": 3, "bus.keep_steps": STEPS, "reference.placement": "own",
        "reward.name": e2e.unhurried(tmp_path),
    }  # fmt: skip
    run_dir = e2e.submit("demo", tiny, local=True, **settings).run_dir
    e2e.wait_for(lambda: e2e.events_of(run_dir, "actor", "step"), 150)
    actor = e2e.events_of(run_dir, "actor", "start")[-1]["pid"]
    e2e.kill(run_dir, "reference")
    e2e.hurry(tmp_path)
    after = e2e.wait_until_over(run_dir, 200)
    e2e.assert_whole(run_dir, after, STEPS, PROMPTS, SIBLINGS)
    assert len(e2e.events_of(run_dir, "reference", "start")) == 2
    assert [start["pid"] for start in e2e.events_of(run_dir, "actor", "start")] == [actor]
    assert {c["name"] for c in after["components"]} == {"rollout", "actor", "reference"}

    rows = trained_rows(run_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    with torch.no_grad():
        for row in rows[::3]:
            expected = hf_logprobs(model, row.token_ids).numpy()
            np.testing.assert_allclose(row.columns["ref_logprobs"], expected, atol=2e-5)
    kl = [step["kl/mean"] for step in e2e.events_of(run_dir, "actor", "step")]
    assert abs(kl[0]) < 1e-6 < kl[-1]  # step 1 trains on the reference itself
