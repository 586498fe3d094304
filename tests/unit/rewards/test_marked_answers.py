"""Rewards that look for a mark: `Answer:`, `####`, a tag or a letter; all decided by hand."""
# ruff: noqa: RUF001

import pytest

from relax_hpc.environments.rewards.functions import (
    dapo,
    deepscaler,
    exact,
    f1,
    geometry3k,
    gsm8k,
    multiple_choice,
    openr1mm,
)
from relax_hpc.errors import ConfigError


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("Answer: 34", "34", 1),
        ("**Answer:** 34", "34", 1),
        ("Answer: $34$.", "34", 1),
        (r"Answer: so it is \boxed{34}", "34", 1),
        ("Answer: 34\nAnswer: 33", "34", 0),
        ("Answer: 34 or 33", "34", 0),
        (r"\boxed{34}", "34", 1),
        (r"\boxed{34} Answer: 33", "34", 0),
        (r"Answer: 34. Not \boxed{33}", "34", 0),  # the box on the line
        ("Answer: 34\n" + r"\boxed{33}", "34", 1),
        ("Answer:\n34", "34", 1),  # R11: as verl, `Answer\\s*:\\s*([^\\n]+)`
        ("Answer: 34\nAnswer:", "34", 1),
        ("Answer:\n33\n34", "34", 0),
        ("Answer: 34" + " so" * 200, "34", 0),
        ("Answer: 34\n" + "so " * 200, "34", 1),  # beyond DAPO's 300 characters
        ("<think>Answer: 34</think>", "34", 0),
        ("<think>Answer: 33</think>Answer: 34", "34", 1),
        ("Answer: ３４", "34.0", 1),
    ],
)
def test_dapo_takes_the_last_answer_line_and_else_the_box(response, answer, right):
    assert dapo.score(response, answer) == (1 if right else -1)
    assert dapo.score(response, answer, wrong=0.0) == right


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (r"<think>so</think>\boxed{7}", "7", 1),
        (r"so ###Response \boxed{7}", "7", 1),
        (r"\boxed{7} ###Response so", "7", 0),
        (r"\boxed{7}", "7", 0),
        (r"</think>7", "7", 0),
    ],
)
def test_deepscaler_wants_a_thought_that_ended(response, answer, right):
    assert deepscaler.score(response, answer) == right


@pytest.mark.parametrize(
    ("response", "right", "right_with_last_number"),
    [
        ("6 * 12 = 72\n#### 72", 1, 1),
        ("####72", 1, 1),
        ("#### 72.00", 1, 1),
        ("#### 72\nI hope so.", 1, 1),
        ("#### 72 #### 71", 0, 0),
        ("#### 72 or 71", 1, 1),  # R11: the public grader takes the number behind the hashes
        ("#### **72**", 1, 1),
        (r"#### $\boxed{72}$", 1, 1),
        ("#### 72cm", 1, 1),
        ("#### 72, since 6 * 12 = 72", 1, 1),
        ("#### 71 72", 0, 0),
        ("#### 1/72", 0, 0),
        ("#### $-72", 0, 0),
        ("####", 0, 0),
        ("#### 71 " + r"\boxed{72}", 0, 0),
        (r"\boxed{72}", 1, 1),
        ("so 72", 0, 1),
        ("$72 of 100", 0, 0),
        ("100 - 28 = 72", 0, 1),
        ("<think>#### 72</think>", 0, 0),
        ("<think>72</think> 71", 0, 0),
        ("none", 0, 0),
    ],
)
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
        ("Answer: B", 1),
        ("Answer: **B**", 1),
        ("Answer: B) Paris", 1),
        ("Answer: option B", 1),
        ("The correct answer: The answer is (B).", 1),
        (r"\boxed{B}", 1),
        ("<answer>B</answer>", 1),
        ("<answer>A</answer><answer>B</answer>", 1),
        ("<answer>B</answer><answer>A</answer>", 0),
        ("Answer: paris", 1),
        ("Answer: Rome", 0),
        ("Answer: A or B", 0),
        ("Answer: B) or C)", 0),
        ("Answer: AB", 0),
        ("Answer: A bird", 0),
        ("B", 0),
        ("Answer: B, because C is wrong", 1),  # R11: as simple-evals
        ("Answer: [B]", 1),
        ("Answer: **B.** Paris", 1),
        ("Answer:\nB", 1),
        ("Answer: [B] [C]", 0),
        ("Answer: Because", 0),
        ("Answer: I think B", 0),
        ("<think>Answer: A</think>Answer: B", 1),
        ("<answer></answer>", 0),
        ("Answer: Ｂ", 1),
    ],
)
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
        ("cat", "cat cat", 2 / 3),
        ("dog", "cat", 0),
        (r"in France \boxed{Paris}", "Paris", 1),
        ("<think>Paris</think> Rome", "Paris", 0),
        ("yes it is", "yes", 0),
        ("", "Paris", 0),
        ("", "", 0),
        ("new-york", "newyork", 1),
    ],
)
def test_f1_is_the_overlap_of_words(response, answer, value):
    assert f1.score(response, answer) == pytest.approx(value)


@pytest.mark.parametrize(
    ("response", "answer", "right", "right_in_any_case"),
    [
        ("Paris", "Paris", 1, 1),
        (" Paris\n", "Paris", 1, 1),
        ("paris", "Paris", 0, 1),
        ("New\n York", "New  York", 1, 1),
        ("<answer>Paris</answer> I think", "Paris", 1, 1),
        ("<think>Paris</think>", "Paris", 0, 0),
        ("7.0", "7", 0, 0),
        ("７", "7", 1, 1),
        ("", "", 0, 0),
    ],
)
def test_exact_wants_the_very_text(response, answer, right, right_in_any_case):
    assert exact.score(response, answer) == right
    assert exact.score(response, answer, ignore_case=True) == right_in_any_case


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("<think>so</think><answer>7</answer>", 1),
        ("<answer> 7.0 </answer>", 1),
        (r"<think>so</think>\boxed{7}", 1),
        ("<answer>8</answer><answer>7</answer>", 0),
        ("<answer><answer>7</answer>", 0),
        ("a</think>b</think><answer>7</answer>", 0),
        ("<think><answer>7</answer></think>", 0),
        ("<answer>I see 7</answer>", 0),
        ("<answer></answer>", 0),
    ],
)
def test_openr1mm_takes_the_one_tag_and_else_the_box(response, right):
    assert openr1mm.score(response, "7") == openr1mm.score(response, "<answer>7</answer>") == right


@pytest.mark.parametrize(
    ("response", "accuracy", "form"),
    [
        (r"<think>so</think>\boxed{30}", 0.9, 0.1),
        (r"<think>so</think>\boxed{31}", 0, 0.1),
        (r"\boxed{30}", 0.9, 0),
        ("<think>so</think>30", 0, 0),
        (r"<think>\boxed{30}", 0, 0),
    ],
)
def test_geometry3k_is_mostly_the_answer_and_a_little_the_form(response, accuracy, form):
    score = geometry3k.score(response, "30")
    assert score.parts == {"accuracy": pytest.approx(accuracy), "format": pytest.approx(form)}
    assert score.value == pytest.approx(accuracy + form)
    if form:
        assert geometry3k.score(response[7:], "30", opened=True).parts == score.parts
        assert geometry3k.score(response[7:], "30").parts == {**score.parts, "format": 0}


def test_the_form_may_count_more_but_not_more_than_all():
    response = r"<think>so</think>\boxed{31}"
    assert geometry3k.score(response, "30", format_weight=0.5).value == 0.5
    geometry3k.check(format_weight=1.0, opened=False)
    with pytest.raises(ConfigError, match=r"format_weight = 1.5: use 0 to 1"):
        geometry3k.check(format_weight=1.5, opened=False)
