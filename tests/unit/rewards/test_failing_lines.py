"""A reward that fails says which line of whose file, and which response it was given."""

import asyncio
import re

import pytest

from relax_hpc.config.reward import RewardConfig
from relax_hpc.errors import ConfigError
from relax_hpc.rewards import trial
from relax_hpc.rewards.contract import Sample
from relax_hpc.rewards.functions.boxed_number import score as boxed_number
from relax_hpc.rewards.reward import Reward, Weighted

LINES = """\
import json, helper
from relax_hpc.rewards.functions.boxed_number import score as boxed

def score(response):
    if response == "helper":
        return helper.halve(response)
    if response == "library":
        return json.loads("no")
    if response == "ours":
        return boxed(7, 7)
    if response == "text":
        return "1"
    if response == "long":
        raise ValueError("x" * 1000)
    if response == "built":
        return eval("1 / 0")
    return float(response.split("{")[1])

async def waits(response):
    return score(response)

def of_group(group):
    for sample in group:
        yield score(sample.response)
"""


@pytest.fixture
def lines(tmp_path):
    """A program whose every failure has a line of its own."""
    (tmp_path / "mine.py").write_text(LINES)
    (tmp_path / "helper.py").write_text("def halve(text):\n    return text / 2\n")
    return tmp_path / "mine.py"


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ("177", "IndexError: list index out of range (mine.py:17)"),
        ("helper", "TypeError: unsupported operand type(s) for /: 'str' and 'int' (helper.py:2)"),
        ("library", "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (mine.py:8)"),
        ("ours", "(mine.py:10)"),
        ("text", "TypeError: gave no number, and no relax_hpc.rewards.contract.Score, but '1'"),
        ("long", "ValueError: " + "x" * 188 + " (mine.py:14)"),
        ("built", "ZeroDivisionError: division by zero (mine.py:16)"),
    ],
)
@pytest.mark.parametrize("function", ["score", "waits", "of_group"])
def test_a_reward_that_fails_is_refused_with_the_response_and_its_own_line(
    lines, function, response, words
):
    config = RewardConfig(terms={"a" * 40: {"name": f"{lines}:{function}"}})
    with pytest.raises(ConfigError) as refused:
        trial.check(config, Sample(response))
    assert f"scoring the response '{response}' to a prompt of yours, aaa" in str(refused.value)
    assert str(refused.value).endswith(f"{words}; correct it")


def test_of_a_long_response_both_ends_are_shown_on_one_line(lines):
    response = "begin\n" + "so " * 1000 + "end"
    with pytest.raises(ConfigError) as refused:
        trial.check(RewardConfig(name=f"{lines}:score"), Sample(response))
    said = str(refused.value)
    assert re.search(r"the response 'begin\\n[so .]{50,80}end' to a", said) and "\n" not in said


def test_what_is_built_in_fails_without_a_line_of_ours():
    scores = asyncio.run(
        Reward([Weighted(boxed_number)])([Sample(7, answer="7")], 5.0, lambda number: None)
    )
    assert scores[0].error and ".py:" not in scores[0].error
