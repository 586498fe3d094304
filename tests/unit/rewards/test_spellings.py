r"""Spellings of the same mathematics, and near misses; R2 to R6, R8 of the review.

Each pair is taken in both directions, and with spaces put between its tokens.
"""
# ruff: noqa: RUF001

import itertools
import random
import re

import pytest

from relax_hpc.environments.rewards.equality import equal, is_too_large
from relax_hpc.runs.evaluations import final_answer

# R2
COMPLEX = [
    ("5+9i", "9 i+5"),
    (r"\frac{2-14i}{25}", r"\frac{2}{25} - \frac{14}{25}i"),
    ("i^2", "-1"),
    ("3+4i", r"3+4\mathrm{i}"),
    (r"2\sqrt{-1}", "2i"),
]
# R3
DEGREES = [
    (r"120^\circ, 60^\circ", r"60^\circ, 120^\circ"),
    ("60, 120", r"60^\circ, 120^\circ"),
    (r"05\!:\!00", "05:00"),
    ("–3", "-3"),
]
# R4
THOUSANDS = [
    (r"11,\! 111,\! 111,\! 100", "11,111,111,100"),
    (r"\dfrac{2469}{20,000}", r"\dfrac{2469}{20000}"),
    (r"(10,\!000, 5)", "(10000,5)"),
    ("10\u202f000", "10000"),
    ("10 000", "10000"),
    ("1,234x", "1234x"),
    ("x=1,234", "1234"),
    (r"3.141\,592", "3.141592"),
    (r"1{,}000\pi", r"1000\pi"),
    (r"\sqrt{1,024}", "32"),
]
# R5
POWERS_OF_TEN = [
    ("8.7e8", r"8.7 \times 10^{8}"),
    ("-1.6e-19", "-1.6 * 10^{-19}"),
    ("(1e3, 2)", "(1000,2)"),
    ("8.7×10^8", "8.7e8"),
]
# R6
UNITS = [
    (r"125\textnormal{ miles}", "125"),
    (r"125\operatorname{miles}", "125"),
    (r"125{\rm\ miles}", "125"),
    ("€5", "5"),
    ("5€", "€5"),
    ("5 euros", "€5"),
    (r"\$5", "5 dollars"),
    (r"\pounds 5", "5"),
    (r"6.5\mathrm{~m} \cdot \mathrm{s}^{-1}", r"6.5\text{ m/s}"),
    (r"60\text{ miles per hour}", "60 mph"),
]
# R6
REPEATING = [
    (r"0.\overline{3}", r"\frac13"),
    ("0.(3)", "1/3"),
    (r"2+0.\overline{3}", r"\frac73"),
    (r"0.\overline{142857}", r"0.\dot{1}4285\dot{7}"),
]
# R8
BASES_AND_SCALES = [
    ("(1101)_2", "1101_2"),
    (r"\text{A5}_{11}", "A5_{11}"),
    (r"1101_{\text{two}}", "1101_2"),
    ("-37_8", "-37_{8}"),
    ("5 million", "5000000"),
    (r"\$5 \text{ million}", r"\$5{,}000{,}000"),
    ("5 million dollars", "5000000 dollars"),
    (r"5\times10^6", "5 million"),
    (r"(-\infty,2)", r"( -\infty , 2 )"),
]
MORE = [
    (r"\frac{i}{2}", "0.5i"),
    (r"e^{2\pi i/3}", r"-\frac12+\frac{\sqrt3}{2}i"),
    ("(2+i)^2", "3+4i"),
    (r"\imath", "i"),
    (r"2\mathbf{i}+3\mathbf{j}", "2i+3j"),
    (r"\frac{10}{3}\text{ cm}", r"3.\overline{3}"),
    ("(90°, 45°)", r"(90,45^\circ)"),
    (r"30^\circ+45^\circ", "75"),
    ("$5", "5"),
    ("1.23456789", r"\frac{123456789}{100000000}"),
    (r"\textbf{(A)}", "A"),
    (r"\frac{1}{2}x^{0.5}", r"\frac{\sqrt{x}}{2}"),
]
# of each kind what is wrong
WRONG = [
    (r"\frac{24}{125} = (4,1)", r"\frac{24}{125}"),  # math-verify: what it can read of it counts
    (r"\frac{18}{19} or (-\infty,-5) \cup (-5,5)", r"\frac{18}{19}"),
    ("4210_{5} or 4210_{7}", "4210_{5}"),
    ("2i", "-2i"),
    ("i", "-1"),
    ("2i", "2"),
    ("3i", "3j"),
    ("ii", "-1"),
    (r"(6,235^\circ)", r"(235^\circ,6)"),
    (r"90^\circ", r"90\text{ cm}"),
    ("(1,234)", "1234"),
    ("(1,234)", "(12,34)"),
    ("10{,}000", "1000"),
    ("1 000", "1001"),
    (r"\frac{1}{29,322,216}", r"\frac{1}{29}"),
    ("(3,100,5)", "(3100,5)"),
    (r"1.6\times10^{-19}", r"1.7\times10^{-19}"),
    (r"1.6\times10^{-19}", "0"),
    ("10^{-19}", "10^{19}"),
    ("(0.1234567,1)", "(0.1234568,1)"),
    (r"125\textnormal{ miles}", r"125\text{ km}"),
    ("€5", "£5"),
    (r"5\text{ s}", r"5\text{ m}"),
    (r"5\text{ m}^2", r"5\text{ m}^3"),
    (r"0.\overline{3}", "0.3"),
    (r"0.\overline{36}", r"0.3\overline{6}"),
    ("40_8", "40_9"),
    ("1101_2", "13"),
    ("x_2", "x_3"),
    ("x_2", "x"),
    ("12_3+1", "12_4+1"),
    ("5 million", "5 billion"),
    ("5 million", "5000001"),
    (r"[-\infty,2)", r"(-\infty,2)"),
    (r"[-\infty,2)\cup(3,4)", r"(-\infty,2)\cup(3,4)"),
    ("(1+i,1-i)", "(1-i,1+i)"),
]

SAME = [
    *COMPLEX, *DEGREES, *THOUSANDS, *POWERS_OF_TEN, *UNITS, *REPEATING, *BASES_AND_SCALES, *MORE,
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), SAME)
def test_two_spellings_are_equal_in_both_directions(one, other):
    """R2, R3, R4, R5, R6, R8: complex numbers, degrees, thousands, powers of ten, units, bases."""
    assert equal(one, other) and equal(other, one)


@pytest.mark.parametrize(("one", "other"), WRONG)
def test_what_means_something_else_is_refused_in_both_directions(one, other):
    """R2 to R6, R8."""
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
        (r"\frac{1}{3}", r"0.\overline{3}", "1/3"),
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
