r"""Mathematics in a box against the answer of the data, all decided by hand.

Where math-verify 0.9 alone, given the whole response, says otherwise, a comment says so.
"""
# ruff: noqa: RUF001

import subprocess
import sys

import pytest

from relax_hpc.environments.rewards.equality import equal
from relax_hpc.environments.rewards.functions import math

NUMBERS = [
    ("75", "75", 1),
    ("75", "75.0", 1),
    ("-75", "75", 0),
    ("−75", "-75", 1),
    ("74.999999999", "75", 0),
    ("1e3", "100", 0),
    (r"1 \times 10^3", "1000", 1),
    ("1,000", "1000", 1),
    ("1,00", "100", 0),
    ("1,000.5", "1000.5", 1),
    ("７５", "75", 1),
    ("2^10", "1024", 1),
    ("10²", "100", 1),
    (r"\binom{5}{2}", "10", 1),
    (r"\log_2 8", "3", 1),
    (r"\infty", "∞", 1),
    (r"-\infty", r"\infty", 0),
    ("123456789012345678901234567890", "123456789012345678901234567890", 1),
    ("123456789012345678901234567891", "123456789012345678901234567890", 0),
    ("0.1234567", "0.1234568", 0),  # math-verify rounds to six places
    ("3.14", r"\pi", 0),
    ("0", "-0", 1),
    ("1/0", "75", 0),
]
FRACTIONS = [
    ("1/2", r"\frac{1}{2}", 1),
    (r"\frac12", "1/2", 1),
    (r"\dfrac{1}{2}", r"\tfrac{1}{2}", 1),
    (r"\frac{2}{4}", "1/2", 1),
    (r"\frac{-1}{2}", "-0.5", 1),
    (r"\frac{1}{2}", r"\frac{2}{1}", 0),
    (r"\frac { 3 } { 4 }", "0.75", 1),
    ("0.333", "1/3", 0),
    ("0.333333", "1/3", 0),  # math-verify rounds to six places
    ("½", "0.5", 1),
    ("1 1/2", "3/2", 1),
    (r"1\frac{1}{2}", "3/2", 1),
    (r"-2\frac{1}{4}", "-2.25", 1),
    (r"-2\frac{1}{4}", "-1.75", 0),
    (r"2\frac{1}{2}", "1", 0),  # two and a half, not two halves
    ("1 -1/2", "1/2", 1),
    (r"\frac{1}{0}", "0", 0),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", 1),
    (r"\frac{a+b}{2}", r"\frac{b+a}{2}", 1),
]
UNITS = [
    ("5 cm", "5", 1),
    (r"5\text{ cm}", "5 cm", 1),
    (r"5\text{ cm}", r"5\text{ m}", 0),  # math-verify drops every unit
    (r"5\text{ cm}^2", r"5\text{ square centimeters}", 1),
    (r"5\text{ cm}^2", r"5\text{ cm}", 0),
    (r"500\text{ cm}", r"5\text{ m}", 0),  # nothing is converted
    (r"3\text{ apples}", r"3\text{ apple}", 1),
    (r"3\text{ apples}", r"3\text{ pears}", 0),
    ("25 square units", "25", 1),
    ("5 square feet", "5 feet", 0),
    ("5 sq ft", r"5\text{ ft}^2", 1),
    ("5 sq ft", r"5\text{ ft}", 0),
    ("6 square units", "5", 0),
    ("5 feet 3 inches", "5", 0),
    (r"12\text{ inches}", r"12\text{ in}", 1),
    ("2 hours", "2", 1),
    (r"\$18", "18", 1),
    ("-$18", "18", 0),
    (r"90^\circ", "90", 1),
    ("90°", "90 degrees", 1),
    (r"3\pi\text{ cm}", r"3\pi", 1),
    ("5t", "5", 0),  # math-verify takes t for a unit
    ("5x", "5", 0),
    ("50%", "50", 1),
    ("50%", "0.5", 0),  # math-verify: 50% is 50 and 0.5
    ("50 percent", "50%", 1),
]
LISTS = [
    ("(1,2)", "(1, 2)", 1),
    ("(1,2)", "(2,1)", 0),
    ("(1,2)", "[1,2]", 0),
    ("[1,2)", "(1,2]", 0),
    ("(1,2)", "(1,2,3)", 0),
    (r"\left(\frac12, 3\right)", "(0.5,3)", 1),
    (r"(-\infty, 3)", r"(-\infty,3]", 0),
    (r"(-\infty, 1) \cup (2, \infty)", r"(-\infty,1)\cup(2,\infty)", 1),
    (r"(-\infty, 1) \cup (2, \infty)", r"(-\infty,1)\cup[2,\infty)", 0),
    (r"x \in [1,2]", "[1,2]", 1),
    (r"\{1,2,2\}", r"\{1,2\}", 1),
    (r"\{1,2\}", r"\{1,2,3\}", 0),
    ("1,2", "2,1", 1),
    ("1, 2", "1", 0),
    (r"3 \text{ or } 4", "4", 0),
    ("3 or 4", "3, 4", 1),
    (r"\emptyset", r"\{\}", 1),
    (r"\pm 2", r"\pm 2", 1),
    (r"\pm 2", "2", 0),
    (r"\pm 2", "-2, 2", 1),
    (r"1 \pm \sqrt{2}", r"1+\sqrt{2}, 1-\sqrt{2}", 1),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", 1),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", 0),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}", 0),
]
FORMULAS = [
    ("x=5", "5", 1),
    ("x=5", "x=6", 0),
    ("x=5", "y=5", 0),
    ("f(x)=2x+1", "2x+1", 1),
    ("x^2+2x+1", "(x+1)^2", 1),
    ("x^2+2x+1", "(x-1)^2", 0),
    ("2x", "x*2", 1),
    ("x", "y", 0),
    (r"\sqrt{8}", r"2\sqrt{2}", 1),
    ("2√2", r"\sqrt{8}", 1),
    (r"\sin^2 x+\cos^2 x", "1", 1),
    ("π/4", r"\frac{\pi}{4}", 1),
    (r"e^{i\pi}", "-1", 1),  # math-verify takes i for a letter
    ("3+4i", "4i+3", 1),
    ("3+4i", "3-4i", 0),
    ("2x - y + 1 = 0", "y = 2x+1", 1),
    (r"x \le 3", r"3 \geq x", 1),
    ("x<3", r"x \le 3", 0),
    (r"x^{-1}", r"\frac{1}{x}", 1),
    ("2**3", "8", 1),
    (r"\displaystyle 7", "7", 1),
    ("$7$", "7", 1),
    (r"\text{7}", "7", 1),
    ("{7}", "7", 1),
    (r"\text{Monday}", "monday", 1),
    ("evil", "live", 0),  # math-verify multiplies the letters
    (r"\text{(A)}", "A", 1),
    ("I think 7", "7", 0),  # math-verify finds the last number
    ("not 7 but 8", "8", 0),
    ("3+4 = 7", "7", 1),
    ("7 = 8", "7", 0),
    ("x = 7 = 8", "7", 0),
    ("it is surely and truly 7", "7", 0),
]


@pytest.mark.parametrize(
    ("box", "answer", "right"), [*NUMBERS, *FRACTIONS, *UNITS, *LISTS, *FORMULAS]
)
def test_mathematics_in_a_box_is_right_where_it_means_the_answer(box, answer, right):
    assert math.score(rf"So it is $\boxed{{{box}}}$.", answer) == right


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (r"\boxed{1} no, \boxed{2}", "2", 1),
        (r"\boxed{1} and \boxed{2}", "1,2", 0),  # math-verify joins boxes
        (r"\boxed{2} or \boxed{}", "2", 0),
        (r"\boxed{ } \boxed{7", "7", 0),
        (r"\boxed{7} and \boxed{8", "7", 1),
        (r"\boxed{\boxed{7}}", "7", 1),
        (r"\boxed{x = \boxed{7}}", "7", 1),
        (r"\boxed{\frac{\text{1}}{2}}", "1/2", 1),
        (r"\boxed {7}", "7", 1),
        (r"\boxed{\{1,2\}}", r"\{1,2\}", 1),
        (r"<think>\boxed{7}</think> done", "7", 0),
        (r"<think>\boxed{8}</think> \boxed{7}", "7", 1),
        (r"<think>\boxed{7}", "7", 0),
        (r"a</think>\boxed{7}<think>\boxed{8}", "7", 1),
        ("the answer is 7", "7", 0),
        ("", "7", 0),
        ("", "", 0),
        (r"\boxed{7}", "", 0),
        (r"\boxed{7}", r"\boxed{7}", 1),
    ],
)
def test_only_the_last_box_after_the_thought_is_looked_at(response, answer, right):
    assert math.score(response, answer) == right


@pytest.mark.parametrize(
    "babble",
    [
        "\\boxed{" * 140_000,
        "7 " * 500_000,
        "$" * 1_000_000,
        "Answer: " * 125_000,
        r"\text{" * 160_000,
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
