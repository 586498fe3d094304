"""On-policy, one step apart or two: the bound holds, and is used."""

import pytest
from e2e_runs import cli, events_of, is_over, submit, wait_until

pytestmark = pytest.mark.long

STEPS = 6


@pytest.mark.parametrize(  # of 1: test_slurm_job
    ("job", "max_staleness"), [("arithmetic_on_policy", 0), ("arithmetic_async", 2)]
)
def test_the_lag_reaches_the_bound_but_never_passes_it(tiny, tmp_path, job, max_staleness):
    run_dir = submit(
        f"tiny/{job}",
        tiny,
        local=True,
        run_root=tmp_path,
        schedule__num_steps=STEPS,
        schedule__prompts_per_step=8,
        rollout__samples_per_prompt=4,
        actor__save_every=100,
        eval__heldout__every=0,
        eval__heldout__num_prompts=8,
    ).run_dir
    try:
        progress = wait_until(run_dir, is_over, 400)["progress"]
    finally:
        cli("cancel", run_dir)
    lags = [step["staleness/max"] for step in events_of(run_dir, "actor", "step")]
    assert len(lags) == STEPS and max(lags) == max_staleness
    # The plan keeps the oldest token of each batch: a witness that does not ask the trainer.
    assert progress["max_staleness_seen"] == max_staleness
