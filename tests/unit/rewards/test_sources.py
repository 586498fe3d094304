"""Terms of a reward that are for the prompts of some sources alone."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import hostile
import pytest
from episode_fakes import Numbers, answer
from reward_runs import in_processes, refusal
from roles.role_fakes import config

from relax_hpc.config.rollout import RewardConfig
from relax_hpc.data.source import Prompt
from relax_hpc.environments.record import EpisodeRecord
from relax_hpc.environments.rewards import trial
from relax_hpc.environments.rewards.contract import Sample, Score
from relax_hpc.environments.session import SingleTurn
from relax_hpc.errors import ConfigError
from relax_hpc.roles.rollout import check, prompt_check
from relax_hpc.roles.rollout.episodes import Episodes

PLUGIN = Path(hostile.__file__)
TERMS = {
    "math": {"name": "boxed_number", "sources": ["sums", "aime"]},
    "said": {"name": "exact", "sources": ["words"]},
    "short": {"name": "dapo", "weight": 0.5, "args": {"wrong": -1.0}, "sources": ["both", "sums"]},
}


def scores_of(terms, *samples):
    settings = RewardConfig.model_validate({"terms": terms, "advanced": {"workers": 1}})
    return [score for [score] in in_processes(settings, *([each] for each in samples))]


def sample(source, response="\\boxed{3}"):
    return Sample(response, "", "3", source=source)


def test_a_prompt_is_scored_by_the_terms_of_its_source():
    sums, words, both, nobody = scores_of(
        TERMS, sample("sums"), sample("words", "3"), sample("both"), sample("poems")
    )
    assert sums == Score(1.5, {"math": 1.0, "short": 0.5})
    assert words == Score(1.0, {"said": 1.0})
    assert both == Score(0.5, {"short": 0.5})
    assert nobody.error == "no term of the reward is for source 'poems'" and nobody.value == 0


def test_a_failed_reward_counts_what_the_terms_of_its_source_give_at_least():
    terms = {
        "fails": {"name": f"{PLUGIN}:text"},
        "short": TERMS["short"] | {"sources": ["sums"]},
    }
    ours, others = scores_of(terms, sample("sums"), sample("words"))
    assert ours.error and others.error
    assert (ours.value, others.value) == (-0.5, 0.0)


def test_a_reward_is_told_the_source():
    [score] = scores_of({"a": {"name": f"{PLUGIN}:by_source"}}, sample("sums"))
    assert score.value == 4


HELDOUT = ({"prompt": "1+2=", "answer": "3"},)


def files(tmp_path, terms, *rows, heldout=HELDOUT, **more):
    for name, lines in (("train", rows), ("heldout", heldout)):
        text = "\n".join(map(json.dumps, lines))
        (tmp_path / f"{name}.jsonl").write_text(text)
    made = config(
        prompts={"train": str(tmp_path / "train.jsonl"), **more},
        eval={"aime": {"path": str(tmp_path / "heldout.jsonl")}},
        reward={"terms": terms},
    )
    return made, prompt_check.read(made)


ROWS = ({"prompt": "1+2=", "answer": "3", "source": "sums"},
        {"prompt": "say a", "answer": "a", "source": "words"})  # fmt: skip


def test_a_held_out_row_without_a_source_is_of_its_set_and_answers_go_by_the_terms(tmp_path):
    """The answer a is none that a box with a number could match."""
    _, read = files(tmp_path, TERMS, *ROWS)
    assert [record.source for record in map(read.train.__getitem__, range(2))] == ["sums", "words"]
    assert read.heldout["aime"][0].source == "aime"
    with pytest.raises(ConfigError, match=r"line 1: answer = 'a': can never be matched; with rewa"):
        files(tmp_path, TERMS, {**ROWS[1], "source": "sums"})


def test_a_prompt_that_no_term_is_for_is_refused_and_a_source_of_nobody_is_told(tmp_path):
    poem = {**ROWS[0], "source": "poems"}
    with pytest.raises(ConfigError, match=r"line 1: source = 'poems': no term of the reward sco"):
        files(tmp_path, TERMS, poem)
    assert list(check.find_unscored(*files(tmp_path, {"all": {"name": "exact"}}, *ROWS))) == []
    said = list(check.find_unscored(*files(tmp_path, TERMS, *ROWS)))
    assert said == [
        "reward.terms.short.sources: no prompt that was looked at is of both; there are aime, "
        "sums, words"
    ]


def test_a_plugin_is_tried_with_a_prompt_of_each_source():
    terms = {
        "fine": {"name": "exact", "sources": ["sums"]},
        "fails": {"name": f"{PLUGIN}:text", "sources": ["words"]},
    }
    settings = RewardConfig.model_validate({"terms": terms})
    trial.check(settings, sample("sums"))
    said = refusal(settings, sample("sums"), (), [sample("words")])
    assert "reward.terms.fails" in said and "scoring the response" in said


def test_the_reward_is_given_the_source_of_the_prompt_and_check_asks_for_one_of_each(
    tmp_path, monkeypatch
):
    made, read = files(tmp_path, TERMS, *ROWS)
    asked = []

    async def noted(group):
        asked.extend(sample.source for sample in group)
        return [Score(0.0)] * len(group)

    prompt = Prompt(0, [1], "3", source="sums")
    run = Episodes(made, SingleTurn(), Once(), Numbers(), noted, max_tokens=99)
    asyncio.run(run.run(prompt, [EpisodeRecord()], run.how(1.0), 0, [1]))
    assert asked == ["sums"]

    tried = []
    monkeypatch.setattr(
        check.trial, "check", lambda config, sample, pools, others: tried.extend([sample, *others])
    )
    prompts = [Prompt(n, [n], row["answer"], source=row["source"]) for n, row in enumerate(ROWS)]
    source = SimpleNamespace(
        first=lambda: prompts[0], records=read.train, prompt=prompts.__getitem__
    )
    check.try_reward(made, source)
    assert [(each.source, each.answer) for each in tried] == [("sums", "3"), ("words", "a")]


class Once:
    async def sample(self, given, draft, how, **_):
        return answer(draft, [2], [-1.0], [(0, 0)])
