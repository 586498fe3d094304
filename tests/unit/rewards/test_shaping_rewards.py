"""Overlap of boxes, form, length, loops and chance; numbers are worked out by hand."""

import json

import pytest
from reward_runs import refusal

from relax_hpc.config.rollout import RewardConfig
from relax_hpc.environments.rewards.contract import Sample
from relax_hpc.environments.rewards.functions import format as form
from relax_hpc.environments.rewards.functions import iou, length, random, repetition
from relax_hpc.errors import ConfigError


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        ("[0, 0, 10, 10]", "[0,0,10,10]", 1),
        ("[0, 0, 10, 10]", "[5,0,15,10]", 50 / 150),
        ("[0, 0, 10, 10]", "[10,0,20,10]", 0),
        ("[10, 10, 0, 0]", "[0,0,10,10]", 0),
        ("[0, 0, 0, 10]", "[0,0,10,10]", 0),
        ("[-5, -5, 5, 5]", "[0,0,5,5]", 25 / 100),
        ("[0.0, 0.0, 0.5, 0.5]", "[0,0,0.5,1.0]", 1 / 2),
        ("Answer: 0,0,10,10", "[0,0,10,10]", 1),
        (r"\boxed{[0,0,10,10]}", "[0,0,10,10]", 1),
        ('<answer>{"bbox_2d": [0, 0, 10, 10]}</answer>', "[0,0,10,10]", 1),
        ("[0,0,10,10] no, [11,11,12,12]", "[0,0,10,10]", 0),
        ("<answer>[0,0,10,10] [20,20,30,30]</answer>", "[0,0,10,10]", 1 / 2),
        ("<answer>[0,0,10,10]</answer>", "[[0,0,10,10], [20,20,30,30]]", 1 / 2),
        # 100/100 of the second; the first is left with no overlap, not with its 50/150
        ("<answer>[0,0,10,10] [5,0,15,10]</answer>", "[5,0,15,10], [90,90,99,99]", 1 / 2),
        ("<answer>" + "[0,0,10,10]" * 51 + "</answer>", "[0,0,10,10]", 0),
        ("<think>[0,0,10,10]</think>", "[0,0,10,10]", 0),
    ],
)
def test_boxes_are_worth_their_overlap(response, answer, value):
    assert iou.score(response, answer) == pytest.approx(value)


def test_above_a_threshold_an_overlap_is_all():
    boxes = "[0, 0, 10, 10]", "[0, 0, 10, 20]"  # 1/2
    assert [iou.score(*boxes, threshold=t) for t in (0.0, 0.5, 0.6)] == [0.5, 1.0, 0.0]
    iou.check(threshold=0.5)
    with pytest.raises(ConfigError, match=r"threshold = 1.2: use 0 to 1"):
        iou.check(threshold=1.2)


@pytest.mark.parametrize(
    ("answer", "can"), [("[1,2,3,4]", 1), ("[1,2,3]", 0), ("[3,4,1,2]", 0), ("none", 0)]
)
def test_an_answer_without_a_box_that_has_an_area_cannot_be_met(answer, can):
    assert iou.can_match(answer) == can


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        (" <think>\na\n</think>\n\n<answer>\nb\n</answer>\n", 1),
        ("<think>a</think><answer></answer>", 0),
        ("<think> </think><answer>b</answer>", 0),
        ("<answer>b</answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("<think>a</think>so<answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer>so", 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b", 0),
        ("", 0),
    ],
)
def test_the_form_is_a_thought_and_an_answer_and_nothing_else(response, right):
    assert form.score(response) == right
    if right:
        rest = response.strip().removeprefix("<think>")
        assert (form.score(rest), form.score(rest, opened=True)) == (0, 1)
        assert form.score(response, opened=True) == 0


@pytest.mark.parametrize(
    ("num_tokens", "value"),
    [
        (80, 0),  # the limit is 100, the cache 20
        (81, -1 / 20),
        (90, -1 / 2),
        (100, -1),
        (500, -1),
    ],
)
def test_a_long_response_costs_more_and_more_until_the_limit(num_tokens, value):
    assert length.score(num_tokens, limit=100, cache=20) == pytest.approx(value)


def test_lengths_are_those_of_dapo_unless_a_job_says_others():
    assert [length.score(n) for n in (16_384, 18_432, 20_480)] == [0.0, -0.5, -1.0]
    assert [length.score(n, limit=100, cache=0) for n in (100, 101)] == [0.0, -1.0]
    length.check(limit=100, cache=100)
    for cache in (101, -1):
        with pytest.raises(ConfigError, match=rf"args.cache = {cache}: use 0 to args.limit = 100"):
            length.check(limit=100, cache=cache)


@pytest.mark.parametrize(
    ("response", "words", "value"),
    [
        ("a b c d", 2, 0),
        ("a b a b", 2, -1 / 3),  # ab ba ab
        ("a a a a", 2, -2 / 3),  # aa three times
        ("a b c a b c", 3, -1 / 4),  # abc bca cab abc
        ("a a a", 1, -2 / 3),
        ("我们我们", 2, -1 / 3),
        ("so " * 1019, 20, -999 / 1000),
    ],
)
def test_what_was_said_before_costs(response, words, value):
    assert repetition.score(response, words=words) == pytest.approx(value)


@pytest.mark.parametrize("words", [0, 101])
def test_sequences_have_some_words_but_not_too_many(words):
    with pytest.raises(ConfigError, match=rf"args.words = {words}: use 1 to 100"):
        repetition.check(words=words)


def test_chance_falls_on_both_sides_and_the_same_way_twice():
    scores = [random.score(f"response {i}", "prompt") for i in range(200)]
    assert scores == [random.score(f"response {i}", "prompt") for i in range(200)]
    assert set(scores) == {0.0, 1.0} and 60 < sum(scores) < 140
    others = [random.score(f"response {i}", "another") for i in range(200)]
    assert 60 < sum(a != b for a, b in zip(scores, others, strict=True)) < 140


def test_chance_knows_the_prompt_also_as_messages():
    ask = [{"role": "user", "content": "1 + 1"}]
    copy = json.loads(json.dumps(ask))
    assert all(random.score(f"{i}", ask) == random.score(f"{i}", copy) for i in range(20))
    other = [{"role": "user", "content": "1 + 2"}]
    assert any(random.score(f"{i}", ask) != random.score(f"{i}", other) for i in range(20))


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("length", {"cache": 30_000}, "'length': args.cache = 30000: use 0 to args.limit = 20480"),
        ("iou", {"threshold": 2}, "'iou': args.threshold = 2: use 0 to 1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(name, args, words):
    assert words in refusal(RewardConfig(name=name, args=args), Sample("so"))
