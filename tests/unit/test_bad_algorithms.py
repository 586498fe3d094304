"""What an algorithm cannot be: `check` names the key, its value and the remedy in one line."""

import json
import shutil
from pathlib import Path

import pytest
from hf_checkpoint import QWEN3, write

PLUGIN = """
from relax_hpc.algorithms.part import Loss, TokenLoss

class Narrow(Loss):
    def of_tokens(self, logprobs):
        return TokenLoss(logprobs)
"""
K1 = ["algorithm.kl.name=k1", "reference.placement=own"]
TEACHER = ["algorithm.preset=distill", "teachers.t.path=other"]
LAG = "schedule.max_staleness=2"
MISTAKES = {
    "a bound by the policy before the step, one epoch, and lag": (
        ["algorithm.loss.anchor=old", LAG],
        "algorithm.loss.anchor", "'old'",
        "it is a plain policy gradient on samples up to 2 policies old; use anchor = 'rollout', or",
    ),
    "a bound by the sampler, and weights to it": (
        ["algorithm.correction.name=tis"],
        "algorithm.correction.name", "'tis'",
        "would count twice; set correction.name = 'none', or loss.anchor = 'old'",
    ),
    "gae without a critic": (
        ["algorithm.advantage.name=gae"],
        "algorithm.advantage.name", "'gae'",
        "needs a critic, which gives states their values; add a table [critic]",
    ),
    "a critic without gae": (
        ["critic.lr=0.1", "algorithm.advantage.name=rloo"],
        "critic: algorithm.advantage.name", "'rloo'",
        "use 'gae', or algorithm.preset = 'ppo', or remove [critic]",
    ),
    "k1 in the loss": (
        K1, "algorithm.kl.name", "'k1'", "use 'rk3', or algorithm.kl.place = 'reward'",
    ),
    "rk3 in the reward": (
        ["algorithm.kl.name=rk3", "algorithm.kl.place=reward", "reference.placement=own"],
        "algorithm.kl.name", "'rk3'", "use 'k1', or algorithm.kl.place = 'loss'",
    ),
    "a ratio of a sequence, and a sum by a number": (
        ["algorithm.preset=gspo", "algorithm.aggregation=constant"],
        "algorithm.aggregation", "'constant'", "use 'sequence'",
    ),
    "a ratio of a sequence, and a mean over tokens": (
        ["algorithm.preset=gspo", "algorithm.aggregation=token"],
        "algorithm.aggregation", "'token'", "the ratio of gspo is of a sequence",
    ),
    "the whole batch, and portions": (
        ["algorithm.advantage.name=batch_std", "actor.portion_micro_batches=4"],
        "actor.portion_micro_batches", "4",
        "algorithm.advantage.name = 'batch_std' needs the whole batch before any of it is trained "
        "on; remove it",
    ),
    "one sibling": (
        ["rollout.samples_per_prompt=1"],
        "rollout.samples_per_prompt", "1", "compares siblings of a prompt; use 2 or more",
    ),
    "teams larger than a group": (
        ["algorithm.preset=pass_k", "algorithm.advantage.k=9"],
        "algorithm.advantage.k", "9",
        "there are rollout.samples_per_prompt = 8 siblings to choose from; use at most as many",
    ),
    "max_rl and a reward below 0": (
        ["algorithm.preset=max_rl", "reward.name=length"],
        "reward.name", "'length'", "use another reward, or another advantage",
    ),
    "max_rl and a penalty for length": (
        ["algorithm.preset=max_rl", "algorithm.groups.truncated=penalty"],
        "algorithm.groups.truncated", "'penalty'", "use 'mask', or another advantage",
    ),
    "a teacher of fewer tokens": (
        TEACHER, "teachers.t.path", "/other'",
        "8 in its config.json, 320 in model.path's; use a teacher of the same tokenizer",
    ),
    "a teacher of other tokens": (
        [*TEACHER, "teachers.t.path=shuffled"], "teachers.t.path", "/shuffled'",
        "its tokenizer.json has another token",
    ),
    "no such preset": (
        ["algorithm.preset=daapo"], "algorithm.preset", "'daapo'", "did you mean dapo?",
    ),
    "no such loss": (
        ["algorithm.loss.name=dppo_vt"], "algorithm.loss.name", "'dppo_vt'", "did you mean dppo_tv?"
    ),
    "no such advantage": (
        ["algorithm.advantage.name=gropo"],
        "algorithm.advantage.name", "'gropo'", "did you mean grpo?",
    ),
    "no such correction": (
        ["algorithm.correction.name=tiss"],
        "algorithm.correction.name", "'tiss'", "did you mean tis?",
    ),
    "no such estimate": (
        ["algorithm.kl.name=rk33"], "algorithm.kl.name", "'rk33'", "did you mean rk3?",
    ),
    "no such way to teach": (
        ["algorithm.distill.name=advantages"],
        "algorithm.distill.name", "'advantages'", "did you mean advantage?",
    ),
    "no such entropy": (
        ["algorithm.entropy.name=fix"], "algorithm.entropy.name", "'fix'", "did you mean fixed?",
    ),
    "no such rule for groups": (
        ["algorithm.groups.name=fill"], "algorithm.groups.name", "'fill'", "did you mean refill?",
    ),
    "a part of one's own of another signature": (
        ["algorithm.loss.name=mine.py:Narrow"],
        "algorithm.loss.name", "'mine.py:Narrow'",
        "has of_tokens(self, logprobs); it is called as of_tokens(self, logprobs, tokens)",
    ),
    "an old key": (
        ["algorithm.importance_cap=2.0"],
        "algorithm.importance_cap", "2.0", "is algorithm.correction.cap now; use that",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_is_refused_with_key_value_and_remedy(refused, tiny_model, mistake):
    settings, key, value, remedy = MISTAKES[mistake]
    Path("mine.py").write_text(PLUGIN)
    Path("other").mkdir()
    write(Path("other"), QWEN3)
    shutil.copytree(tiny_model, "shuffled")
    _exchange_two_tokens(Path("shuffled/tokenizer.json"))
    said = refused("check", "job.toml", *(part for each in settings for part in ("--set", each)))
    assert f"{key} = " in said and value in said.partition(f"{key} = ")[2]
    assert remedy in said and "\n" not in said


def _exchange_two_tokens(path):
    tokenizer = json.loads(path.read_text())
    known = tokenizer["model"]["vocab"]
    one, two = sorted(known)[:2]
    known[one], known[two] = known[two], known[one]
    path.write_text(json.dumps(tokenizer))
