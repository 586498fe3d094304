"""Rewards that look for a mark, a box, a form, a length or loops; all decided by hand."""
# ruff: noqa: RUF001

import pytest
from reward_runs import refusal

from relax_hpc.config.rollout import RewardConfig
from relax_hpc.environments.rewards.contract import Sample
from relax_hpc.environments.rewards.functions import (
    boxed_number,
    dapo,
    deepscaler,
    exact,
    f1,
    geometry3k,
    gsm8k,
    iou,
    length,
    multiple_choice,
    openr1mm,
    random,
    repetition,
)
from relax_hpc.environments.rewards.functions import format as form
from relax_hpc.environments.rewards.registry import REWARDS


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("Answer: 34", "34", 1), ("Answer: $34$.", "34", 1),
        (r"Answer: so it is \boxed{34}", "34", 1), ("Answer: 34\nAnswer: 33", "34", 0),
        (r"\boxed{34}", "34", 1),
        (r"Answer: 34. Not \boxed{33}", "34", 0),  # the box on the line
        ("Answer: 34\n" + r"\boxed{33}", "34", 1),
        ("Answer:\n34", "34", 1),  # R11: as verl, `Answer\\s*:\\s*([^\\n]+)`
        ("Answer: 34\nAnswer:", "34", 1),
        ("Answer: 34\n" + "so " * 200, "34", 1),  # beyond DAPO's 300 characters
        ("<think>Answer: 33</think>Answer: 34", "34", 1), ("Answer: ３４", "34.0", 1),
    ],
)  # fmt: skip
def test_dapo_takes_the_last_answer_line_and_else_the_box(response, answer, right):
    assert dapo.score(response, answer) == (1 if right else -1)
    assert dapo.score(response, answer, wrong=0.0) == right


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (r"<think>so</think>\boxed{7}", "7", 1),
        (r"so ###Response \boxed{7}", "7", 1),
        (r"\boxed{7}", "7", 0),
        (r"</think>7", "7", 0),
    ],
)
def test_deepscaler_wants_a_thought_that_ended(response, answer, right):
    assert deepscaler.score(response, answer) == right


@pytest.mark.parametrize(
    ("response", "right", "right_with_last_number"),
    [
        ("6 * 12 = 72\n#### 72", 1, 1), ("#### 72.00", 1, 1), ("#### 72 #### 71", 0, 0),
        ("#### 72 or 71", 1, 1),  # R11: the public grader takes the number behind the hashes
        ("#### **72**", 1, 1), (r"#### $\boxed{72}$", 1, 1), ("#### 1/72", 0, 0), ("####", 0, 0),
        ("#### 71 " + r"\boxed{72}", 0, 0), (r"\boxed{72}", 1, 1), ("so 72", 0, 1),
        ("100 - 28 = 72", 0, 1), ("<think>#### 72</think>", 0, 0),
    ],
)  # fmt: skip
def test_gsm8k_takes_the_number_after_the_hashes_and_else_the_box(
    response, right, right_with_last_number
):
    for answer in ("72", "48 / 2 = 24, and 48 + 24 = 72\n#### 72"):
        assert gsm8k.score(response, answer) == right
        assert gsm8k.score(response, answer, last_number=True) == right_with_last_number


def test_gsm8k_reads_thousands_on_both_sides():
    assert gsm8k.score("#### 1,450,000", "1450000") == gsm8k.score("#### 1450", "1,450") == 1
    assert gsm8k.score("so it is 1,450.", "1450", last_number=True) == 1
    assert gsm8k.can_match("#### 1,450") and not gsm8k.can_match("none")


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("Answer: B", 1), ("Answer: B) Paris", 1), ("The correct answer: The answer is (B).", 1),
        (r"\boxed{B}", 1), ("<answer>B</answer>", 1), ("<answer>B</answer><answer>A</answer>", 0),
        ("Answer: paris", 1), ("Answer: A or B", 0), ("Answer: B) or C)", 0), ("B", 0),
        ("Answer: B, because C is wrong", 1),  # R11: as simple-evals
        ("Answer: [B]", 1), ("Answer: I think B", 0), ("<think>Answer: A</think>Answer: B", 1),
        ("<answer></answer>", 0),
    ],
)  # fmt: skip
def test_a_choice_is_one_letter_or_the_text_of_a_choice(response, right):
    choices = {"choices": ["Rome", "Paris", "Oslo", "Bern"]}
    assert multiple_choice.score(response, "B", choices) == right
    assert multiple_choice.score(response, "(b)", choices) == right


def test_without_texts_of_choices_and_without_a_letter_nothing_is_chosen():
    assert multiple_choice.score("Answer: Paris", "B", {}) == 0
    assert multiple_choice.score("", "", {}) == 0
    assert multiple_choice.can_match("C") and not multiple_choice.can_match("Paris")


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        ("Paris", "Paris", 1),
        ("It is Paris", "Paris", 1 / 2),  # precision 1/3, recall 1
        ("cat sat", "the cat sat on a mat", 2 / 3),  # precision 1, recall 2/4
        ("cat cat", "cat", 2 / 3),  # a word counts as often as it is there
        (r"in France \boxed{Paris}", "Paris", 1), ("<think>Paris</think> Rome", "Paris", 0),
        ("", "", 0), ("new-york", "newyork", 1),
    ],
)  # fmt: skip
def test_f1_is_the_overlap_of_words(response, answer, value):
    assert f1.score(response, answer) == pytest.approx(value)


@pytest.mark.parametrize(
    ("response", "answer", "right", "right_in_any_case"),
    [
        (" Paris\n", "Paris", 1, 1), ("paris", "Paris", 0, 1), ("New\n York", "New  York", 1, 1),
        ("<answer>Paris</answer> I think", "Paris", 1, 1), ("<think>Paris</think>", "Paris", 0, 0),
        ("7.0", "7", 0, 0), ("", "", 0, 0),
    ],
)  # fmt: skip
def test_exact_wants_the_very_text(response, answer, right, right_in_any_case):
    assert exact.score(response, answer) == right
    assert exact.score(response, answer, ignore_case=True) == right_in_any_case


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("<think>so</think><answer>7</answer>", 1), (r"<think>so</think>\boxed{7}", 1),
        ("<answer>8</answer><answer>7</answer>", 0), ("a</think>b</think><answer>7</answer>", 0),
        ("<think><answer>7</answer></think>", 0), ("<answer></answer>", 0),
    ],
)  # fmt: skip
def test_openr1mm_takes_the_one_tag_and_else_the_box(response, right):
    assert openr1mm.score(response, "7") == openr1mm.score(response, "<answer>7</answer>") == right


@pytest.mark.parametrize(
    ("response", "accuracy", "form"),
    [
        (r"<think>so</think>\boxed{30}", 0.9, 0.1),
        (r"<think>so</think>\boxed{31}", 0, 0.1),
        (r"\boxed{30}", 0.9, 0),
        ("<think>so</think>30", 0, 0),
    ],
)
def test_geometry3k_is_mostly_the_answer_and_a_little_the_form(response, accuracy, form):
    score = geometry3k.score(response, "30")
    assert score.parts == {"accuracy": pytest.approx(accuracy), "format": pytest.approx(form)}
    assert score.value == pytest.approx(accuracy + form)
    if form:
        assert geometry3k.score(response[7:], "30", opened=True).parts == score.parts
        assert geometry3k.score(response[7:], "30").parts == {**score.parts, "format": 0}


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"17+58 is \boxed{ 75 }.", 1), (r"\boxed{74} no, \boxed{75}", 1),
        (r"\boxed{75} or \boxed{x}", 0), (r"\boxed{75} and \boxed{7", 1), (r"\boxed{75", 0),
        (r"\boxed{\boxed{75}}", 0), (r"\boxed{7,5}", 0), ("\\boxed{" * 100_000 + "75}", 1),
        (r"<think>\boxed{75}</think>", 0), (r"<think>\boxed{74}</think>\boxed{75}", 1), ("", 0),
    ],
)  # fmt: skip
def test_only_the_last_box_with_the_right_number_is_rewarded(response, reward):
    assert boxed_number.score(response, "75") == reward


@pytest.mark.parametrize(
    ("box", "answer", "reward"),
    [("1,000", "1000", 1), ("-3", "-3", 1), ("3", "-3", 0), ("0.5", "0.50", 1), ("nan", "nan", 0)],
)
def test_numbers_are_compared_as_numbers(box, answer, reward):
    assert boxed_number.score(rf"\boxed{{{box}}}", answer) == reward


def test_every_reward_a_job_can_name_exists():
    for name, reward in REWARDS.items():
        assert callable(reward.import_module().score), name


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        ("[0, 0, 10, 10]", "[0,0,10,10]", 1), ("[0, 0, 10, 10]", "[5,0,15,10]", 50 / 150),
        ("[10, 10, 0, 0]", "[0,0,10,10]", 0), ("[-5, -5, 5, 5]", "[0,0,5,5]", 25 / 100),
        (r"\boxed{[0,0,10,10]}", "[0,0,10,10]", 1),
        ('<answer>{"bbox_2d": [0, 0, 10, 10]}</answer>', "[0,0,10,10]", 1),
        ("<answer>[0,0,10,10] [20,20,30,30]</answer>", "[0,0,10,10]", 1 / 2),
        ("<answer>[0,0,10,10]</answer>", "[[0,0,10,10], [20,20,30,30]]", 1 / 2),
        # 100/100 of the second; the first is left with no overlap, not with its 50/150
        ("<answer>[0,0,10,10] [5,0,15,10]</answer>", "[5,0,15,10], [90,90,99,99]", 1 / 2),
        ("<answer>" + "[0,0,10,10]" * 51 + "</answer>", "[0,0,10,10]", 0),
        ("<think>[0,0,10,10]</think>", "[0,0,10,10]", 0),
    ],
)  # fmt: skip
def test_boxes_are_worth_their_overlap(response, answer, value):
    assert iou.score(response, answer) == pytest.approx(value)


def test_above_a_threshold_an_overlap_is_all():
    boxes = "[0, 0, 10, 10]", "[0, 0, 10, 20]"  # 1/2
    assert [iou.score(*boxes, threshold=t) for t in (0.0, 0.5, 0.6)] == [0.5, 1.0, 0.0]


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
        ("<think>a</think><answer></answer>", 0), ("<answer>b</answer><think>a</think>", 0),
        ("<think>a<answer>b</answer></think>", 0), ("<think>a</think><answer>b</answer>so", 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0), ("", 0),
    ],
)  # fmt: skip
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
        (90, -1 / 2),
        (100, -1),
    ],
)
def test_a_long_response_costs_more_and_more_until_the_limit(num_tokens, value):
    assert length.score(num_tokens, limit=100, cache=20) == pytest.approx(value)


@pytest.mark.parametrize(
    ("response", "words", "value"),
    [
        ("a b c d", 2, 0),
        ("a b a b", 2, -1 / 3),  # ab ba ab
        ("a a a a", 2, -2 / 3),  # aa three times
        ("我们我们", 2, -1 / 3),
        ("so " * 1019, 20, -999 / 1000),
    ],
)
def test_what_was_said_before_costs(response, words, value):
    assert repetition.score(response, words=words) == pytest.approx(value)


def test_chance_falls_on_both_sides_and_the_same_way_twice():
    scores = [random.score(f"response {i}", "prompt") for i in range(200)]
    assert scores == [random.score(f"response {i}", "prompt") for i in range(200)]
    assert set(scores) == {0.0, 1.0} and 60 < sum(scores) < 140
    others = [random.score(f"response {i}", "another") for i in range(200)]
    assert 60 < sum(a != b for a, b in zip(scores, others, strict=True)) < 140


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("length", {"cache": 30_000}, "'length': args.cache = 30000: use 0 to args.limit = 20480"),
        ("iou", {"threshold": 2}, "'iou': args.threshold = 2: use 0 to 1"),
        ("repetition", {"words": 101}, "args.words = 101: use 1 to 100"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(name, args, words):
    assert words in refusal(RewardConfig(name=name, args=args), Sample("so"))
