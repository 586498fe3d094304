"""A thought that the prompt opens and no response ends holds no answer."""

import asyncio
import json
import time

import pytest
from episode_fakes import answer
from reward_runs import scores_by_name
from roles.role_fakes import config
from transformers import AddedToken

from relax_hpc.cli.demo import models
from relax_hpc.data.conversation import Conversation
from relax_hpc.data.source import Prompt
from relax_hpc.environments.record import EpisodeRecord
from relax_hpc.environments.rewards.answers import final_text
from relax_hpc.environments.rewards.contract import Sample, Score
from relax_hpc.environments.session import SingleTurn
from relax_hpc.roles.rollout.episodes import Episodes
from relax_hpc.roles.rollout.heldout import HeldoutRow
from relax_hpc.runs import evaluations
from relax_hpc.runtime.paths import RunPaths

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
CHOICES = {"choices": ["1", "2"]}
NO_COMMA = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
TESTS = '["assert add(1, 2) == 3"]'
PROGRAM = "```python\ndef add(a, b):\n    return a + b\n```"


def opens(template, prefix, asked="1+2=", **special):
    tokenizer = models.tokenizer()
    tokenizer.chat_template = template
    if special:
        tokenizer.add_tokens([AddedToken("</think>", **special)], special_tokens=special["special"])
    there = Conversation(tokenizer, chat_template=True, assistant_prefix=prefix)
    return there.opens_thought(there.encode("a test", [{"role": "user", "content": asked}]))


@pytest.mark.parametrize(
    ("ending", "prefix", "is_open"),
    [
        ("", "", False), ("", "<think>\n", True), ("", "<think>\n\n</think>\n\n", False),
        ("<think>\n", "", True), ("<think>\n\n</think>\n\n", "", False),
        ("<think>\n", "</think>", False),
    ],
)  # fmt: skip
def test_a_thought_is_open_where_the_template_or_the_prefix_leaves_it_so(ending, prefix, is_open):
    assert opens(PLAIN + ending, prefix) == is_open


@pytest.mark.parametrize("asked", ["Begin with <think>", "<think> and </think>, <think>. Now"])
def test_what_the_user_says_of_the_tags_opens_none(asked):
    assert not opens(PLAIN, "", asked)
    assert not opens("{{ messages[0].content }} A:", "Well: ", asked)
    assert opens(PLAIN, "<think>", asked)


@pytest.mark.parametrize(("special", "is_open"), [(False, True), (True, False)])
def test_where_the_end_of_a_thought_is_in_no_text_none_is_open(special, is_open):
    """Of such a tokenizer a response never shows `</think>`: it would count for nothing."""
    assert opens(PLAIN, "<think>\n", special=special) is is_open


def test_without_an_end_such_a_response_has_no_final_text():
    assert final_text("7", False) == "7" == final_text("so</think>7", True)
    assert final_text("7", True) == "" == final_text("<think>7", True)
    assert final_text("a</think>7<think>8", True) == "7"
    assert final_text("a</think>7\n <think>8", True) == "7\n "
    assert final_text("I try. <think> 7", False) == "", "before the first ends, each is one"


@pytest.mark.parametrize(
    ("response", "final"),
    [("<think>x</think> The tag <think> opens a thought. 5", " The tag <think> opens a thought. 5"),
     ("<think>x</think>5: <think> and </think> mark one.", "5: <think> and </think> mark one."),
     ("<think>say '</think>' first</think>5", "5"),
     ("<think>x</think>`</think>` ends it: 5", "`</think>` ends it: 5"),
     ("<think>x</think>5\n<think>y</think>6", "6"), ("<think>x</think>5<think>y</think>6", "6"),
     ("<think>x</think>\n```python\ns = (\n<think>\n)\n```\n5",
      "\n```python\ns = (\n<think>\n)\n```\n5"),
     ("```python\nprint(s + '</think> ')\n```", "```python\nprint(s + '</think> ')\n```"),
     ("<think>\n```\nx</think>5\n```python\ny\n```", "5\n```python\ny\n```"),
     ('<think>he says "a"</think>"5"', '"5"'), ("so</think>5</think>6", "5</think>6"),
     ("<think></think>5", "5"), ("5", "5"), ("</think>", "")],
)  # fmt: skip
def test_tags_that_are_quoted_or_spoken_of_neither_begin_nor_end_a_thought(response, final):
    assert final_text(response) == final
    assert final_text(response.removeprefix("<think>"), response.startswith("<think>")) == final


@pytest.mark.parametrize(
    ("name", "said", "answer", "metadata", "args"),
    [
        ("math", r"\boxed{3}", "3", {}, {}), ("dapo", "Answer: 3", "3", {}, {"wrong": 0.0}),
        ("gsm8k", "so 3", "3", {}, {"last_number": True}),
        ("multiple_choice", "Answer: B", "B", CHOICES, {}), ("exact", "three", "three", {}, {}),
        ("openr1mm", "<answer>3</answer>", "3", {}, {}),
        ("geometry3k", r"\boxed{3}", "3", {}, {"format_weight": 0.0}),
        ("ifeval", "none here", "", NO_COMMA, {}),
        ("code", PROGRAM, TESTS, {}, {"sandbox": "limits"}),
    ],
)  # fmt: skip
def test_answers_that_are_tried_in_it_count_for_no_reward(name, said, answer, metadata, args):
    texts = [(said, False), (said, True), (f"so</think>{said}", True), (f"<think>{said}", False)]
    samples = [Sample(t, "", answer, metadata, in_thought=is_open) for t, is_open in texts]
    found = scores_by_name(name, *samples, deadline_s=20.0, **args)
    assert [(each.value, each.error) for each in found] == [
        (1.0, None), (0.0, None), (1.0, None), (0.0, None),
    ]  # fmt: skip


def scored(name, response, **settings):
    return scores_by_name(name, Sample(response, "", "3", in_thought=True), **settings)[0].value


def test_a_form_begins_with_the_thought_whether_or_not_a_job_says_so():
    for settings in ({}, {"opened": True}):
        assert scored("format", "so</think><answer>3</answer>", **settings) == 1
        assert scored("geometry3k", r"so</think>\boxed{3}", **settings) == 1
        assert scored("geometry3k", r"\boxed{3}", **settings) == 0
    assert scored("deepscaler", r"so ###Response \boxed{3}") == 1
    assert scored("deepscaler", r"\boxed{3}") == 0


@pytest.mark.parametrize(
    "piece",
    ["<think>", "<think>\n</think>", "```\n</think>\n", "'<think>'"],
)
def test_babble_of_tags_is_read_once(piece):
    """R10: what looks on again for every tag would take minutes."""
    text = f"<think>{piece * (100_000 // len(piece))}"
    begun = time.process_time()
    final_text(text)
    final_text(text, True)
    assert time.process_time() - begun < 10


class Says:
    def __init__(self, tokenizer, text):
        self._ids = tokenizer.encode(text, add_special_tokens=False)

    async def sample(self, given, draft, how, *, seed, homes):
        return answer(draft, self._ids, [-1.0] * len(self._ids), [(0, 0)])


@pytest.mark.parametrize(("prefix", "value"), [("<think>\n", 0.0), ("", 1.0)])
def test_the_reward_and_a_vote_are_told_of_the_prompts_last_words(prefix, value, tmp_path):
    tokenizer = models.tokenizer()
    tokenizer.chat_template = PLAIN
    conversation = Conversation(tokenizer, chat_template=True, assistant_prefix=prefix)
    asked = [{"role": "user", "content": "1+2="}]
    prompt = Prompt(0, conversation.encode("a test", asked), "3", asked)
    said = Says(tokenizer, r"Maybe \boxed{3}? Again: 1+2")

    async def score(group):
        return [Score(float("3" in final_text(s.response, s.in_thought))) for s in group]

    made = Episodes(config(), SingleTurn(), said, conversation, score, max_tokens=1000)
    [episode] = asyncio.run(made.run(prompt, [EpisodeRecord()], made.how(1.0), 0, [1]))
    assert episode.score.value == value
    is_open = made.is_in_thought(episode)
    row = HeldoutRow.of(
        prompt, 0, episode, made.texts(episode), masks_errors=False, in_thought=is_open
    )
    path = RunPaths(tmp_path).root / "rows.jsonl"
    path.write_text(json.dumps(row._asdict()) + "\n")
    [read] = evaluations._read(path)
    assert read.sample.answer == ("3" if value else None)
