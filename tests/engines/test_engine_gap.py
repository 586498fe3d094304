"""Engines that compute another model than the trainer: seen at the first batch, by name."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron_reference import dense, hf_logprobs
from trainers import job, num_tokens, opened, trajectories

from relax_hpc.config.run import RunConfig
from relax_hpc.errors import MismatchError
from relax_hpc.roles.actor.rank0 import LogprobCheck

BIASES = np.array([0.5, -1.0, 0.25, 0.0], np.float32)
K3 = np.expm1(BIASES) - BIASES


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return SimpleNamespace(folder=folder, here=dense(folder))


def sampled_by(model, rows, version=0):
    """The rows as an engine that holds `model` would have made them."""
    with torch.no_grad():
        return [
            row.with_columns(
                rollout_logprobs=hf_logprobs(model, row.token_ids).numpy() * (row.loss_mask != 0)
            )._replace(version_runs=np.array([[row.prompt_len, version]], np.int32))
            for row in rows
        ]


@pytest.mark.parametrize("grid", ["one", "tp2", "pp2", "cp2", "dp2"])
def test_the_gap_is_that_of_the_tokens_of_this_policy_on_every_layout(ranks, model, grid):
    rows, advantages = trajectories(12)
    rows = sampled_by(model.here, rows)
    # Row 3: four tokens are off. Row 5 and the end of row 3: from another policy, off by far more.
    # Row 4: this policy went on with what another one had begun.
    trained, begun = np.flatnonzero(rows[3].loss_mask), np.flatnonzero(rows[4].loss_mask)
    mine, later = trained[:4], trained[4:]
    rows[4].columns["rollout_logprobs"][begun] -= 30
    rows[4] = rows[4]._replace(
        version_runs=np.array([[rows[4].prompt_len, 3], [begun[0] + 1, 0]], np.int32)
    )
    rows[3].columns["rollout_logprobs"][mine] -= BIASES
    rows[3].columns["rollout_logprobs"][later] -= 40
    rows[3] = rows[3]._replace(
        version_runs=np.array([[rows[3].prompt_len, 0], [mine[-1] + 1, 1]], np.int32)
    )
    rows[5] = sampled_by(model.here, [rows[5]], version=7)[0]
    rows[5].columns["rollout_logprobs"][:] -= 40
    count = num_tokens(rows) - num_tokens([rows[4], rows[5]]) - len(later)
    pool = opened(ranks, model.folder, grid, budget=40)
    found = pool.engine_gap(rows=rows, advantages=advantages, num_portions=2)
    assert all(each == found[0] for each in found)
    gap, metrics = found[0]
    assert gap.num_tokens == metrics["engine_gap/tokens"] == count
    for mean, largest, k3 in (
        (gap.mean, gap.max, gap.k3), [metrics[f"engine_gap/{key}"] for key in ("mean", "max", "k3")]
    ):  # fmt: skip
        assert mean == pytest.approx(np.abs(BIASES).sum() / count, abs=1e-5)
        assert largest == pytest.approx(1.0, abs=1e-5)
        assert k3 == pytest.approx(K3.sum() / count, abs=1e-5)
    assert gap.worst[:3] == (3, 0, mine[1])
    assert gap.worst.trainer - gap.worst.engine == pytest.approx(-1.0, abs=1e-5)
    assert metrics["logprob_gap/max"] == pytest.approx(40, abs=1e-3)


def gap_of(mean):
    worst = SimpleNamespace(guid=12, sibling=3, token=17, engine=-0.25, trainer=-7.5)
    return SimpleNamespace(num_tokens=640, mean=mean, max=7.25, k3=2.0, worst=worst)


class Trainer:
    def __init__(self, *gaps, step):
        self.gaps, self.step = list(gaps), step

    def engine_gap(self):
        return self.gaps.pop(0)


def check_of(*gaps, step=0, **settings):
    tree = job("unused").model_dump()
    tree["weights"]["advanced"] |= settings
    noted, trainer = [], Trainer(*gaps, step=step)
    rank0 = SimpleNamespace(
        note_gap=lambda *given: noted.append(given),
        place_of=lambda guid: (f"bus/{guid}.h5", "sglang 1.2"),
    )
    check = LogprobCheck(RunConfig.model_validate(tree), trainer, rank0)
    return check, trainer, noted


def test_the_first_batch_that_can_tell_is_judged_and_no_other():
    good = gap_of(5e-4)
    check, trainer, noted = check_of(None, gap_of(float("nan")), good, gap_of(1.0))
    for _ in range(4):
        check()
    assert len(trainer.gaps) == 1 and noted == [(0, good, 1e-3)]


def test_the_error_names_both_sides_the_figures_and_the_worst_token():
    check, _, _ = check_of(gap_of(1.05))
    with pytest.raises(MismatchError) as raised:
        check()
    assert raised.value.is_final
    assert str(raised.value) == (
        "engines (sglang 1.2, float32) and trainer (Megatron-core, float32) compute different "
        "models: the logprobs of 640 tokens that policy 0 sampled differ by 1.05 nats on average "
        "(largest 7.25, k3 2), and rounding explains 0.001 (weights.advanced.max_logprob_gap); "
        "most for token 17 of guid/sibling 12/3 in bus/12.h5: -0.2500 by the engine, -7.5000 by "
        "the trainer. A restart does not help: compare model.path, model.weights and "
        "engines.rollout.args, or raise the limit"
    )


def test_after_a_resume_it_warns_and_its_limit_is_the_jobs(caplog):
    check, _, noted = check_of(gap_of(1.05), step=4)  # engines may hold what older ones computed
    check()
    assert len(noted) == 1 and "compute different models" in caplog.text
    assert "tokens that policy 4 sampled differ by 1.05 nats" in caplog.text
    check, _, noted = check_of(gap_of(1.05), max_logprob_gap=1.1)
    check()
    assert noted[0][2] == 1.1
