"""A reference policy of its own component: what it adds is true, and it may be killed."""

import numpy as np
import pytest
import torch
from e2e_runs import (
    assert_every_prompt_once,
    cli,
    events_of,
    hurry,
    kill,
    sized,
    submit,
    unhurried,
    wait_for,
    wait_until_over,
)
from hf_logprobs import hf_logprobs

from relax_hpc.bus.plan import read_chain
from relax_hpc.bus.reader import Reader
from relax_hpc.runtime.paths import RunPaths

pytestmark = pytest.mark.long

STEPS, PROMPTS, SIBLINGS = 8, 4, 4


def submit_small(tiny, run_root, **settings):
    small = sized(run_root, STEPS, PROMPTS, SIBLINGS, 4) | {
        "algorithm.kl.name": "k3",
        "algorithm.kl.coefficient": 0.01,
        "algorithm.epochs_per_step": 1,
        "algorithm.loss.name": "policy_gradient",
        "rollout.advanced.groups_per_shard": 4,
        "actor.save_every": 3,
        "bus.keep_steps": STEPS,
    }
    return submit("demo", tiny, local=True, **small | settings).run_dir


def trained_rows(run_dir):
    """All trajectories, as the actor read them."""
    paths = RunPaths(run_dir).bus
    reader = Reader(paths)
    return [
        row
        for record in read_chain(paths).steps
        for row in reader.rows(record, range(record.num_trajectories))
    ]


def assert_complete(run_dir, after, steps=STEPS):
    assert after["state"] == "COMPLETED", cli("logs", run_dir)[-4000:]
    counts = after["progress"]["trajectories"]
    assert counts["committed"] == counts["trained"] == steps * PROMPTS * SIBLINGS
    assert counts["trained_twice"] == 0 and set(counts["dropped"].values()) == {0}
    assert_every_prompt_once(run_dir, steps, PROMPTS)


def test_a_reference_component_that_is_killed_scores_every_row_as_hugging_face_does(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    own = {"reference.placement": "own", "reward.name": unhurried(tmp_path)}
    run_dir = submit_small(tiny, tmp_path, **own)
    wait_for(lambda: events_of(run_dir, "actor", "step"), 150)
    actor = events_of(run_dir, "actor", "start")[-1]["pid"]
    kill(run_dir, "reference")
    hurry(tmp_path)
    after = wait_until_over(run_dir, 200)
    assert_complete(run_dir, after)
    assert len(events_of(run_dir, "reference", "start")) == 2
    assert [start["pid"] for start in events_of(run_dir, "actor", "start")] == [actor]
    assert {c["name"] for c in after["components"]} == {"rollout", "actor", "reference"}

    rows = trained_rows(run_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    with torch.no_grad():
        for row in rows[::3]:
            expected = hf_logprobs(model, row.token_ids).numpy()
            np.testing.assert_allclose(row.columns["ref_logprobs"], expected, atol=2e-5)
    kl = [step["kl/mean"] for step in events_of(run_dir, "actor", "step")]
    assert abs(kl[0]) < 1e-6 < kl[-1]  # step 1 trains on the reference itself


def test_a_resumed_actor_has_the_reference_that_it_had(tiny, tmp_path):
    """Steps that are trained again have the KL that they had, though the reference was renewed."""
    steps = 20
    run_dir = submit_small(
        tiny,
        tmp_path,
        **{
            "reference.placement": "actor",
            "reference.refresh_every": 3,
            "schedule.num_steps": steps,
            "actor.save_every": 5,
            "reward.name": unhurried(tmp_path),
        },
    )
    wait_for(lambda: events_of(run_dir, "actor", "checkpoint"), 150)
    wait_for(lambda: events_of(run_dir, "actor", "step")[-1]["step"] % 5 in (3, 4))
    before = {each["step"]: each for each in events_of(run_dir, "actor", "step")}
    kill(run_dir, "actor")
    hurry(tmp_path)
    after = wait_until_over(run_dir, 200)
    assert_complete(run_dir, after, steps)
    resumed = events_of(run_dir, "actor", "resume")[-1]["step"]
    assert resumed in (5, 10, 15)
    again = {each["step"]: each for each in events_of(run_dir, "actor", "step")}
    repeated = [step for step in before if step > resumed]
    assert repeated
    for step in repeated:
        assert again[step]["time"] > before[step]["time"]
        for name in ("kl/mean", "loss", "grad_norm"):
            assert again[step][name] == before[step][name], (step, name)
    # the policies 3, 6, ... were the reference: the steps after them begin at it
    kl = {step: each["kl/mean"] for step, each in again.items()}
    assert all((abs(kl[step]) < 1e-6) == (step % 3 == 1) for step in kl)
