"""The section [algorithm]: presets, tables, parts of one's own, and what does not go together."""

import re
from pathlib import Path

import pytest

from relax_hpc.algorithms.presets import PRESETS
from relax_hpc.config import job_file
from relax_hpc.errors import ConfigError

TREE = {
    "name": "run", "model": {"path": "m"}, "prompts": {"train": "t"}, "schedule": {"num_steps": 1},
}  # fmt: skip
PORTIONS = {"actor": {"advanced": {"portion_micro_batches": 4}}}
OTHERS = {"ppo": {"critic": {}}, "distill": {"teachers": {"t": {"path": "m"}}}}
"""Tables that a job of a preset has beside it."""


def job(algorithm, **tables):
    return job_file.validate(TREE | {"algorithm": algorithm} | tables, source="job")


def refused(algorithm, **tables):
    with pytest.raises(ConfigError) as error:
        job(algorithm, **tables)
    return str(error.value)


def test_the_table_of_presets_says_what_each_has_and_what_its_ratio_is_to():
    """G5: a reader of the papers expects another ratio, and another default."""
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "algorithms.md").read_text(
        encoding="utf-8"
    )
    table = page.partition("## Presets")[2].partition("## Symbols")[0]
    said = {}
    for line in re.findall(r"^\| (`.*) \|$", table, re.MULTILINE):
        names, advantage, loss, ratio, mean, _ = (cell.strip() for cell in line.split("|"))
        for name in re.findall(r"`(\w+)`", names):
            own = name if advantage == "of that name" else advantage
            said[name] = (own, loss.partition(",")[0], ratio, mean)
    found = {}
    for name in PRESETS:
        made = job({"preset": name}, **OTHERS.get(name, {})).algorithm
        ratio = {"rollout": "mu", "old": "pi_old"}[made.loss.anchor]
        ratio = "" if made.loss.name == "policy_gradient" else ratio
        found[name] = (made.advantage.name, made.loss.name, ratio, made.aggregation)
    assert said == found
    assert f"| `{job({}).algorithm.preset}` (default) |" in table


def test_a_table_with_a_name_replaces_the_presets_and_one_without_changes_it():
    grpo = job({"preset": "grpo", "loss": {"clip_low": 0.1}}).algorithm.loss
    assert (grpo.clip_low, grpo.clip_high) == (0.1, 0.2)
    named = job({"preset": "grpo", "loss": {"name": "ppo_clip", "clip_low": 0.1}}).algorithm.loss
    assert (named.clip_low, named.clip_high) == (0.1, 0.28)
    kl = job({"kl": {"coefficient": 0.1}}, reference={"placement": "own"}).algorithm.kl
    assert (kl.name, kl.coefficient) == ("rk3", 0.1)


LAG = {"schedule": {"num_steps": 1, "max_staleness": 2}}
OLD = {"loss": {"name": "ipo", "anchor": "old"}}
MAX_RL = {"preset": "max_rl"}
MISTAKES = [
    ({"loss": {"clip_high": 1}}, {}, "clip_high is of ppo_clip and gspo, and here algorithm.loss."),
    ({"entropy": {"targt": 1}}, {}, "target is of adaptive, and here algorithm.entropy.name = 'fi"),
    (OLD, LAG, "every ratio is 1, ipo bounds nothing, and it is a plain policy gradient on"),
    ({"correction": {"name": "tis"}}, {}, "importance would count twice; set correction.name"),
    ({"advantage": {"name": "batch_std"}}, PORTIONS, " needs the"),
    ({"preset": "gspo", "aggregation": "constant"}, {}, "'constant': the ratio of gspo is of"),
    ({}, {"rollout": {"samples_per_prompt": 1}}, "samples_per_prompt = 1: algorithm.advantage"),
    ({"advantage": {"name": "pass_k", "k": 9}}, {}, "algorithm.advantage.k = 9: there are rollout"),
    ({"kl": {"name": "k3", "place": "reward"}}, {"reference": {"placement": "own"}},
     "algorithm.kl.name = 'k3': in the reward it has not the divergence's gradient; use 'k1', or"),
    (MAX_RL | {"groups": {"truncated": "penalty"}}, {}, "lowers a reward of 0, and algorithm.adv"),
    ({"preset": "pass_k", "groups": {"truncated": "penalty"}}, {}, "'penalty': a right response t"),
    ({"advantage": {"name": "none"}}, {}, "'none': is of teachers, and there is none, so that not"),
    (
        {"preset": "reinforce_pp", "groups": {"name": "refill"}},
        {"rollout": {"samples_per_prompt": 1}},
        "samples_per_prompt = 1: algorithm.groups.name = 'refill' wants prompts whose responses",
    ),
    (
        {"preset": "ppo", "advantage": {"lam": 0.95, "length_alpha": 0.05}},
        {"critic": {}},
        "lam = 0.95: with length_alpha = 0.05 the length of a response decides",
    ),
    (MAX_RL, {"reward": {"terms": {"a": {"name": "exact", "weight": -1.0}}}}, "s.a.weight = -1"),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "tables", "message"), MISTAKES)
def test_what_cannot_be_is_refused_with_key_value_and_remedy(algorithm, tables, message):
    said = refused(algorithm, **tables)
    assert message in said and "\n" not in said


def test_what_comes_close_to_a_mistake_is_none():
    job(OLD | {"epochs_per_step": 2}, **LAG)
    job(OLD, schedule={"num_steps": 1, "max_staleness": 0})
    job({"loss": {"name": "policy_gradient", "anchor": "old"}}, **LAG)
    job({"preset": "m2po"})
    job(MAX_RL, reward={"name": "dapo", "args": {"wrong": 0.0}})
    job({"advantage": {"name": "pass_k", "k": 2}}, rollout={"samples_per_prompt": 2})
    job({"kl": {"name": "k1", "place": "reward"}}, reference={"placement": "own"})


MINE = """
from relax_hpc.algorithms.part import Advantage, Loss, TokenLoss

class Narrow(Loss):
    def of_tokens(self, logprobs):
        return TokenLoss(logprobs)

class Worth(Advantage):
    def of_groups(self, rows):
        return rows.rewards
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("import nowhere_at_all")
    return lambda place: {"loss": {"name": f"{tmp_path}/{place}"}}


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("mine.py:Narrow", "has of_tokens(self, logprobs); it is called as of_tokens(self, logp"),
        ("mine.py:Worth", "is no subclass of relax_hpc.algorithms.part.Loss; make it one"),
        ("broken.py:Mine", "cannot be run: ModuleNotFoundError: No module named 'nowhere_at_all'"),
    ],
)
def test_a_part_of_ones_own_that_does_not_fit_is_refused(mine, place, message):
    said = refused(mine(place))
    assert said.startswith("job: algorithm.loss.name = ") and message in said


def test_without_an_advantage_an_entropy_or_a_divergence_may_teach_alone():
    nothing = {"advantage": {"name": "none"}, "groups": {"name": "as_sampled"}}
    job(nothing | {"entropy": {"name": "adaptive"}}, rollout={"samples_per_prompt": 1})
    job(nothing | {"kl": {"name": "k3"}}, reference={"placement": "own"})
    said = refused(nothing | {"entropy": {"coefficient": 0.0}})
    assert "nothing would be learned" in said


def test_a_critic_and_who_reads_its_values_come_together():
    both = job({"preset": "ppo"}, critic={"warmup_steps": 9}, schedule={"num_steps": 10})
    assert both.columns == {"ragged/values"} and both.steps_of_critic_alone == 9
    said = refused({"preset": "ppo"})
    assert "algorithm.advantage.name = 'gae': needs a critic" in said and "add a table" in said
    said = refused({}, critic={})
    assert "critic: algorithm.advantage.name = 'group_mean' reads no values" in said
    assert "'gae'" in said
    said = refused({"preset": "ppo"}, critic={"warmup_steps": 1})
    assert "critic.warmup_steps = 1: the policy would stand still" in said
    in_reward = {"preset": "ppo", "kl": {"name": "k1", "coefficient": 0.1, "place": "reward"}}
    reference = {"placement": "own"}
    assert "without it; use 'loss'" in refused(in_reward, critic={}, reference=reference)
