r"""Mathematics in a box against the answer of the data, all decided by hand.

Where math-verify 0.9 alone, given the whole response, says otherwise, a comment says so.
"""
# ruff: noqa: RUF001

import itertools
import random
import re
import subprocess
import sys

import pytest

from relax_hpc.environments.rewards.equality import equal, is_too_large
from relax_hpc.environments.rewards.functions import math
from relax_hpc.runs.evaluations import final_answer

BOXES = [
    ("75", "75.0", 1), ("-75", "75", 0), ("−75", "-75", 1), ("74.999999999", "75", 0),
    (r"1 \times 10^3", "1000", 1), ("1,000", "1000", 1), ("1,00", "100", 0), ("７５", "75", 1),
    ("10²", "100", 1), (r"\log_2 8", "3", 1), (r"\infty", "∞", 1),
    ("123456789012345678901234567891", "123456789012345678901234567890", 0),
    ("0.1234567", "0.1234568", 0),  # math-verify rounds to six places
    ("1/2", r"\frac{1}{2}", 1), (r"\frac12", "1/2", 1), (r"\frac{-1}{2}", "-0.5", 1),
    ("0.333333", "1/3", 0),  # math-verify rounds to six places
    ("½", "0.5", 1), ("1 1/2", "3/2", 1), (r"-2\frac{1}{4}", "-1.75", 0),
    (r"2\frac{1}{2}", "1", 0),  # two and a half, not two halves
    (r"\frac{1}{0}", "0", 0), (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", 1), ("5 cm", "5", 1),
    (r"5\text{ cm}", r"5\text{ m}", 0),  # math-verify drops every unit
    (r"5\text{ cm}^2", r"5\text{ square centimeters}", 1), (r"5\text{ cm}^2", r"5\text{ cm}", 0),
    (r"3\text{ apples}", r"3\text{ apple}", 1), ("25 square units", "25", 1),
    ("5 sq ft", r"5\text{ ft}^2", 1), ("5 feet 3 inches", "5", 0), (r"\$18", "18", 1),
    (r"90^\circ", "90", 1),
    ("5t", "5", 0),  # math-verify takes t for a unit
    ("50%", "50", 1),
    ("50%", "0.5", 0),  # math-verify: 50% is 50 and 0.5
    ("(1,2)", "(2,1)", 0), ("(1,2)", "[1,2]", 0), ("[1,2)", "(1,2]", 0),
    (r"\left(\frac12, 3\right)", "(0.5,3)", 1),
    (r"(-\infty, 1) \cup (2, \infty)", r"(-\infty,1)\cup(2,\infty)", 1),
    (r"x \in [1,2]", "[1,2]", 1), (r"\{1,2,2\}", r"\{1,2\}", 1), ("1,2", "2,1", 1),
    ("1, 2", "1", 0), (r"3 \text{ or } 4", "4", 0), (r"\emptyset", r"\{\}", 1),
    (r"\pm 2", "-2, 2", 1), (r"1 \pm \sqrt{2}", r"1+\sqrt{2}, 1-\sqrt{2}", 1),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", 1),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", 0),
    ("x=5", "5", 1), ("x=5", "y=5", 0), ("f(x)=2x+1", "2x+1", 1), ("x^2+2x+1", "(x+1)^2", 1),
    (r"\sqrt{8}", r"2\sqrt{2}", 1), ("π/4", r"\frac{\pi}{4}", 1),
    (r"e^{i\pi}", "-1", 1),  # math-verify takes i for a letter
    ("3+4i", "3-4i", 0), ("2x - y + 1 = 0", "y = 2x+1", 1), (r"x \le 3", r"3 \geq x", 1),
    ("x<3", r"x \le 3", 0), (r"\text{7}", "7", 1), (r"\text{Monday}", "monday", 1),
    ("evil", "live", 0),  # math-verify multiplies the letters
    (r"\text{(A)}", "A", 1),
    ("I think 7", "7", 0),  # math-verify finds the last number
    ("3+4 = 7", "7", 1), ("7 = 8", "7", 0),
]  # fmt: skip


@pytest.mark.parametrize(("box", "answer", "right"), BOXES)
def test_mathematics_in_a_box_is_right_where_it_means_the_answer(box, answer, right):
    assert math.score(rf"So it is $\boxed{{{box}}}$.", answer) == right


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (r"\boxed{1} no, \boxed{2}", "2", 1),
        (r"\boxed{1} and \boxed{2}", "1,2", 0),  # math-verify joins boxes
        (r"\boxed{2} or \boxed{}", "2", 0), (r"\boxed{7} and \boxed{8", "7", 1),
        (r"\boxed{\boxed{7}}", "7", 1), (r"\boxed{\frac{\text{1}}{2}}", "1/2", 1),
        (r"<think>\boxed{7}</think> done", "7", 0), (r"<think>\boxed{8}</think> \boxed{7}", "7", 1),
        (r"<think>\boxed{7}", "7", 0), (r"a</think>\boxed{7}<think>\boxed{8}", "7", 1),
        ("the answer is 7", "7", 0), ("", "", 0), (r"\boxed{7}", r"\boxed{7}", 1),
    ],
)  # fmt: skip
def test_only_the_last_box_after_the_thought_is_looked_at(response, answer, right):
    assert math.score(response, answer) == right


@pytest.mark.parametrize(
    "babble",
    [
        "\\boxed{" * 140_000,
        "7 " * 500_000,
        "Answer: " * 125_000,
    ],
)
def test_a_megabyte_of_babble_is_searched_in_one_pass_or_this_would_take_hours(babble):
    half = babble[: len(babble) // 2]
    assert math.score(rf"{half}\boxed{{{half}}}", "8") == 0.0


def test_numbers_are_compared_without_math_verify_and_it_is_imported_only_when_asked():
    code = """
import sys
from relax_hpc.environments.rewards.functions import dapo, deepscaler, geometry3k, gsm8k
from relax_hpc.environments.rewards.functions import math, openr1mm
assert math.score(r"\\boxed{1 1/2 cm}", "3/2") and not math.score(r"\\boxed{74}", "75")
assert "sympy" not in sys.modules and "pydantic" not in sys.modules
assert math.score(r"\\boxed{x+1}", "1+x") and "sympy" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_is_equal_to_nothing():
    assert not equal("", "") and not equal("$$", "$$") and not equal(" ", "0")


SAME = [
    ("5+9i", "9 i+5"), ("i^2", "-1"), ("3+4i", r"3+4\mathrm{i}"),
    (r"120^\circ, 60^\circ", r"60^\circ, 120^\circ"), ("60, 120", r"60^\circ, 120^\circ"),
    (r"05\!:\!00", "05:00"), (r"11,\! 111,\! 111,\! 100", "11,111,111,100"),
    (r"\dfrac{2469}{20,000}", r"\dfrac{2469}{20000}"), ("10\u202f000", "10000"),
    ("1,234x", "1234x"), ("x=1,234", "1234"), (r"1{,}000\pi", r"1000\pi"),
    ("8.7e8", r"8.7 \times 10^{8}"), ("-1.6e-19", "-1.6 * 10^{-19}"), ("(1e3, 2)", "(1000,2)"),
    (r"125\textnormal{ miles}", "125"), (r"125{\rm\ miles}", "125"), ("€5", "5"), ("5 euros", "€5"),
    (r"\$5", "5 dollars"), (r"6.5\mathrm{~m} \cdot \mathrm{s}^{-1}", r"6.5\text{ m/s}"),
    (r"60\text{ miles per hour}", "60 mph"), (r"0.\overline{3}", r"\frac13"), ("0.(3)", "1/3"),
    (r"0.\overline{142857}", r"0.\dot{1}4285\dot{7}"), ("(1101)_2", "1101_2"),
    (r"\text{A5}_{11}", "A5_{11}"), (r"1101_{\text{two}}", "1101_2"), ("5 million", "5000000"),
    (r"\$5 \text{ million}", r"\$5{,}000{,}000"), (r"(-\infty,2)", r"( -\infty , 2 )"),
    (r"\frac{i}{2}", "0.5i"), (r"e^{2\pi i/3}", r"-\frac12+\frac{\sqrt3}{2}i"),
    (r"2\mathbf{i}+3\mathbf{j}", "2i+3j"), (r"\frac{10}{3}\text{ cm}", r"3.\overline{3}"),
    ("(90°, 45°)", r"(90,45^\circ)"), (r"\textbf{(A)}", "A"),
    (r"\frac{1}{2}x^{0.5}", r"\frac{\sqrt{x}}{2}"),
]  # fmt: skip
# of each kind what is wrong
WRONG = [
    (r"\frac{24}{125} = (4,1)", r"\frac{24}{125}"),  # math-verify: what it can read of it counts
    ("4210_{5} or 4210_{7}", "4210_{5}"), ("2i", "-2i"), ("2i", "2"), ("ii", "-1"),
    (r"(6,235^\circ)", r"(235^\circ,6)"), ("(1,234)", "1234"), ("10{,}000", "1000"),
    (r"\frac{1}{29,322,216}", r"\frac{1}{29}"), ("(3,100,5)", "(3100,5)"),
    (r"1.6\times10^{-19}", r"1.7\times10^{-19}"), ("(0.1234567,1)", "(0.1234568,1)"),
    (r"125\textnormal{ miles}", r"125\text{ km}"), (r"5\text{ s}", r"5\text{ m}"),
    (r"0.\overline{3}", "0.3"), ("40_8", "40_9"), ("1101_2", "13"), ("x_2", "x_3"),
    ("5 million", "5 billion"), (r"[-\infty,2)", r"(-\infty,2)"), ("(1+i,1-i)", "(1-i,1+i)"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), SAME)
def test_two_spellings_are_equal_in_both_directions(one, other):
    assert equal(one, other) and equal(other, one)


@pytest.mark.parametrize(("one", "other"), WRONG)
def test_what_means_something_else_is_refused_in_both_directions(one, other):
    assert not equal(one, other) and not equal(other, one)


_TOKEN = re.compile(
    r"\\(?:text\w*|math\w+|hbox|operatorname)\s*\{[^{}]*\}|\{\\rm[^{}]*\}|\{,\}|,\\!\s*|\\[A-Za-z]+|\\."
    r"|[\d.]+[eE][+-]?\d+|\d[\d.,(){}\s\u2009\u202f\xa0\\!]*\d|\w+|\s+|."
)
_SPACES = [r"\ ", r"\,", r"\!", r"\;", "~", "\u2009", "\u202f", "\xa0", "  "]


def _spaced(text, draw):
    said = []
    for token, following in itertools.pairwise([*_TOKEN.findall(text), ""]):
        is_open = token in ("\\", "_", "^") or ("," in (token, following) and token[-1].isdigit())
        is_free = following.strip() and not is_open and token != "," and draw.random() < 0.5
        said += [token, draw.choice(_SPACES) if is_free else ""]
    return "".join(said)


def test_spacing_never_decides():
    """R2, R3, R4: any space between any tokens, also where another answer is wrong."""
    draw = random.Random(5)
    for (one, other), is_same in [*((s, True) for s in SAME), *((w, False) for w in WRONG)]:
        spaced = _spaced(one, draw)
        assert equal(spaced, other) == is_same, (spaced, other)


@pytest.mark.parametrize(
    "votes",
    [
        ("10{,}000", "10000", "10,000", r"10,\!000", r"10\,000", r"1 \times 10^{4}", "1e4"),
        ("2 i", "2i", r"2\,\mathrm{i}"),
    ],
)
def test_answers_that_are_one_have_one_vote(votes):
    """R4: maj@k took 10{,}000 and 10000 for two answers."""
    assert len({final_answer(rf"\boxed{{{vote}}}") for vote in votes}) == 1


TOO_LARGE = [
    r"9^{9^{9^9}}", "9^9^9^9", "{9^9}^{9^9}", "9^{(9^9)}", r"9^{\frac{9^9}{1}}", "2^{-10^{9}}",
    r"x^{9^{9}}", r"0.99^{1000000000}", r"(1+10^{-9})^{10^{9}}", r"((9^{99})^{99})^{99}",
    r"3^{1/0.0000001}", r"e^{e^{e^9}}", r"\exp(\exp(\exp(9)))", r"\sqrt{9^{9^9}}",
    "10^9!", "(10^9)!", r"\left(10^9\right)!", "5!!!!", "(((3!)!)!)!", r"(10^9)_{5}",
    r"\binom{10^9}{500000000}", r"{10^9 \choose 5}", r"\Gamma(100000000)",
    r"7^{10^{18}} \mod 10", r"\sum_{i=1}^{10^9} i", r"\prod_{i=1}^{10^9} i", r"\int_0^1 x^x dx",
    r"\lim_{x\to0} x^x", "1e999999999", r"10\times10^{999999999}", r"\tan(10^{1000})",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{1000000000}", "(x+y)^{1000}", r"\cos^{1000}x",
    "x^9+x+1=0", "(" * 30 + "1" + ")" * 30, "{" * 30 + "1" + "}" * 30,
    r"\sqrt{" * 30 + "2" + "}" * 30,
    "+".join(f"x^{{{i}}}" for i in range(60)), r"\sqrt{" + "9" * 1500 + "}", "x" + "!" * 30,
    "[0,1]" + r"\cup[2,3]" * 30, "2^" * 50 + "2", "x+" * 900 + "x",
]  # fmt: skip


@pytest.mark.parametrize("text", TOO_LARGE, ids=lambda text: text[:30])
def test_what_is_too_large_to_be_worked_out_equals_only_itself(text):
    """S9: each cost a deadline and a worker; asked for in earnest, most would not end today."""
    assert not equal(text, "5") and not equal("7", text) and not equal(f"(1,{text})", "(1,2)")
    assert equal(text, text) and not equal(f"{text}+1", text)


def test_what_is_longer_than_any_answer_equals_only_itself():
    """S9: a megabyte on either side."""
    long = "9" * 1_000_000
    assert equal(long, long) and not equal(long, "9") and not equal("9", long)


@pytest.mark.parametrize(
    "text",
    [
        r"2^{2008}-2", "3^{2007}", r"\frac{1}{2004!}", "10^{-19}", "e^{-x^2}", "x^{2^n}", "100!",
        r"e^{\frac{123}{10000}t}", r"(-1)^{n(n+1)/2}", r"\binom{100}{50}", "2^{2^3}", "(n+1)!",
        r"\left(\frac{3}{4}\right)^{20}", r"e^{2\pi i/3}", "((x+1)^2+(y-2)^2)^2", "x^2+y^2=1",
    ],
)  # fmt: skip
def test_what_people_answer_is_not_too_large(text):
    """S9: golds of MATH and their like."""
    assert not is_too_large(text)
