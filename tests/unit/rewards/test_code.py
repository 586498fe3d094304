"""Programs against unit tests, in the sandbox that there is."""

import json
import sys
from typing import NamedTuple

import pytest
from reward_runs import in_processes, refusal
from test_sandbox import REASON

from relax_hpc.config.rollout import RewardConfig
from relax_hpc.environments.rewards import trial
from relax_hpc.environments.rewards.contract import Sample, Score
from relax_hpc.environments.rewards.functions import code
from relax_hpc.environments.rewards.sandbox import SandboxError


class Problem(NamedTuple):
    solution: str
    right: str
    """Occurs once in the solution."""
    wrong: str
    """Makes the solution wrong, in place of it."""
    tests: object


def pairs(*pairs, fn_name=""):
    tests = {"inputs": [given for given, _ in pairs], "outputs": [wanted for _, wanted in pairs]}
    return tests | ({"fn_name": fn_name} if fn_name else {})


READING = {
    "sum": Problem("print(sum(map(int, input().split())))", "sum", "max",
                   pairs(("1 2 3", "6"), ("-1 1", "0"))),
    "depth": Problem("import sys, threading\nsys.setrecursionlimit(10**6)\n"
                     "threading.stack_size(64 << 20)\n"
                     "def f(n):\n    return n and 1 + f(n - 1)\n"
                     "t = threading.Thread(target=lambda: print(f(int(input()))))\n"
                     "t.start()\nt.join()", "n and 1", "n and 2", pairs(("20000", "20000"))),
}  # fmt: skip
CALLED = {
    "two_sum": Problem("def two_sum(numbers, target):\n    seen = {}\n"
                       "    for i, x in enumerate(numbers):\n        if target - x in seen:\n"
                       "            return [seen[target - x], i]\n        seen[x] = i",
                       "target - x in", "target in",
                       pairs(([[2, 7, 11], 9], [0, 1]), ([[3, 3], 6], [0, 1]), fn_name="two_sum")),
    "method": Problem("class Solution:\n    def twice(self, x):\n        return x * 2", "* 2",
                      "* 3", pairs(("[1]\n", "[1, 1]"), ('"a"', '"aa"'), fn_name="twice")),
    "root": Problem("def root(x):\n    return x ** 0.5", "0.5", "0.4",
                    pairs(([2], 1.4142135), fn_name="root")),
}  # fmt: skip
ASSERTED = {
    "factorial": Problem("def f(n):\n    return n * f(n - 1) if n else 1", "else 1", "else 0",
                         "assert f(0) == 1\nassert f(5) == 120"),
    "check": Problem("def add(a, b):\n    return a + b", "+", "-",
                     "def check(candidate):\n    assert candidate(2, 3) == 5"),
    "listed": Problem("print(input().upper())", "upper", "lower",
                      [{"input": "a\n", "output": "A\n", "type": "stdin"}]),
}  # fmt: skip
PROBLEMS = READING | CALLED | ASSERTED


SANDBOX = "limits" if REASON else "bubblewrap"
CACHED = 9_000 if sys.version_info < (3, 12) else 200
"""Calls through C within each other: from 3.12 on Python bounds them itself, 3.12.0 the most."""
THIRDS = {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "4"]}


def scored(program, tests, answer="", **settings):
    response = f"<think>```python\n1 / 0\n```</think>So:\n```python\n{program}\n```\nDone."
    metadata = {} if tests is None else {"tests": tests, "entry_point": "add"}
    settings = {"sandbox": SANDBOX, "deadline_s": 30.0, "budget_s": 60.0} | settings
    return code.score(response, answer, metadata, **settings)


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_right_solution_passes_and_one_with_a_mistake_does_not(name):
    problem = PROBLEMS[name]
    assert problem.solution.count(problem.right) == 1
    assert scored(problem.solution, problem.tests) == 1
    assert scored(problem.solution.replace(problem.right, problem.wrong), problem.tests) == 0


CALLS_F = [
    {"inputs": [[[1, 4]]], "outputs": [2], "fn_name": "f"},
    "def check(f):\n    assert f([1, 4]) == 2",
    ["assert Solution().f([1, 4]) == 2", "assert isclose(Solution().f([4, 1]), 2.0)"],
]


@pytest.mark.parametrize(
    "values",
    [["len(Counter(a))", "bisect_right(a, 4)", "bisect.bisect(a, 4)", "len(deepcopy(a))"],
     ["int(math.sqrt(len(a)) ** 2)", "len(reduce(concat, [a, []]))", "sum(repeat(1, len(a)))"],
     ["len(re.findall('[0-9]', str(a)))", "int(Fraction(len(a)))", "len(heapify(a) or a)"],
     ["len(a) if inf > gcd(4, 6) else sys.maxsize", "pow(len(a), 1, 9)", "len(itemgetter(0)([a]))",
      "len(a) + datetime.date(1, 1, 1).year - date.min.year", "len(a) * (string.digits == digits)"],
    ],
)  # fmt: skip
def test_a_program_has_the_names_that_graders_import_for_it(values):
    text = (
        "class Solution:\n    def f(self, a: List[int]) -> Optional[int]:\n"
        f"        values = ({', '.join(values)},)\n"
        "        return values[0] if len({*values}) == 1 else values\nadd = Solution().f"
    )
    assert all(scored(text, tests, sandbox="limits") == 1 for tests in CALLS_F)


@pytest.mark.parametrize(
    ("text", "said"),
    [("from __future__ import annotations\n'doc'\nx: Nowhere = 1\nprint(x)", "1"),
     ("'doc'\nprint(__doc__)", "doc"),
     ("input = stdin.readline\nprint(int(input()) + int(input()))", "7"),
     ("from math import *\ndef gcd(a, b):\n    return 'own'\nprint(gcd(2, 4), sqrt(4))", "own 2.0"),
     ("print(pow(2, 5, 7), max([1, 2]), 'Counter' in globals())", "4 2 False"),
     ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    print(e.__traceback__.tb_lineno)", "2"),
     ("def f(n):\n    return n and 1 + f(n - 1)\nprint(f(49_000))", "49000"),
     (f"@cache\ndef f(n):\n    return n and 1 + f(n - 1)\nprint(f({CACHED}))", str(CACHED)),
     ("def f():\n    f()\ntry:\n    f()\nexcept RecursionError:\n    print('deep')", "deep"),
     ("import resource as r\nsoft, hard = r.getrlimit(r.RLIMIT_STACK)\n"
      "r.setrlimit(r.RLIMIT_STACK, (hard, hard))\nprint(soft in (100 << 20, hard))", "True")],
)  # fmt: skip
def test_a_program_that_reads_and_prints_has_them_and_keeps_its_own(text, said):
    """R1: its own names, lines and beginning stay; so do deep calls."""
    assert scored(text, {"inputs": ["3\n4\n"], "outputs": [said]}, sandbox="limits") == 1


@pytest.mark.parametrize(
    "tests",
    ["assert add(4, 6) == 10", "def check(f):\n    assert f(4, 6) == 10",
     {"inputs": [[4, 6]], "outputs": [10], "fn_name": "add"}],
)  # fmt: skip
def test_a_function_that_python_has_is_no_answer_of_a_program_without_it(tests):
    """R1: names that are lent do not stand for what the program lacks."""
    own = "def add(a, b):\n    return operator.add(a, b)"
    assert scored("x = 1", tests, sandbox="limits") == 0
    assert scored(own, tests, sandbox="limits") == 1


def test_all_tests_count_or_the_fraction_that_passes():
    echo, one = "print(input())", {"inputs": ["1"], "outputs": ["1"]}
    assert (scored(echo, one), scored(f"{echo}\n1 / 0", one)) == (1, 0), "it says so, and fails"
    assert scored(echo, THIRDS) == 0
    assert scored(echo, THIRDS, all_or_nothing=False) == pytest.approx(2 / 3)


def test_the_answer_has_the_tests_where_the_metadata_has_none():
    assert scored("print(input())", None, json.dumps(THIRDS), all_or_nothing=False) > 0.6
    assert scored("print(2)", None, "assert True") == 1
    assert code.score("```python\nx = 1\n```", "", {"cases": "assert x"}, tests="cases",
                      sandbox=SANDBOX) == 1  # fmt: skip


def test_a_test_that_hangs_fails_alone_and_the_budget_bounds_all():
    sleeps = "import time\nn = int(input())\ntime.sleep(1000 * (n == 1))\nprint(n)"
    slow = {"all_or_nothing": False, "deadline_s": 1.0, "budget_s": 30.0}
    assert scored(sleeps, THIRDS, **slow) == pytest.approx(1 / 3)
    late = {"inputs": ["1"] * 1000, "outputs": ["1"] * 1000}
    assert scored(sleeps, late, **(slow | {"budget_s": 0.5})) == 0


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\nor\n```python\nb\n```", "b"), ("```python\na\n```\n```\n7\n```", "a"),
        ("```py\r\na\r\n```\r", "a\r"), ("```python\na\n```\n```python\nb", "a"),
        ("```python\na\n```python\nb\n```", "b"), ("```\na\n```", None),
        ("```python\n" * 50_000, None),
    ],
)  # fmt: skip
def test_the_last_block_of_python_that_is_closed_is_run(text, program):
    assert code.last_block(text) == program


def test_without_a_block_after_the_thoughts_it_is_0():
    assert code.score("print(1)", "", {"tests": THIRDS}, sandbox=SANDBOX) == 0
    thought = "<think>```python\nprint(input())\n```"
    assert code.score(thought, "", {"tests": "assert True"}, sandbox=SANDBOX) == 0


@pytest.mark.parametrize(
    ("given", "wanted", "right"),
    [("1 2\n", "1\n2", True), ("1.0", "1", False), ("0.33333333", "0.3333333333", True),
     ("0.334", "0.3333", False), ("1e3", "1000.0", True), ("nan", "1.0", False), ("a", "A", False),
     ("1 2 3", "1 2", False), ("", "", True), ("x", "1.5", False), ("1000001", "1000000", False)],
)  # fmt: skip
def test_output_is_compared_word_by_word(given, wanted, right):
    assert code.same_output(given, wanted) is right


@pytest.mark.parametrize(
    ("returned", "wanted", "right"),
    [("True", 1, False), ("1", True, False), ("[1, (2, 3)]", [1, [2, 3]], True),
     ("None", None, True), ("{1: 2}", {"1": 2}, True), ("0.1 + 0.2", 0.3, True), ("'5'", 5, False),
     ("[5]", 5, False),
     ("[[]] * 3", [[], [], []], True), ("float('nan')", 1.0, False), ("object()", None, False),
     ("x", 1, False)],
)  # fmt: skip
def test_values_are_compared_outside_of_the_program(returned, wanted, right):
    lies = "class Same:\n    def __eq__(self, other): return True\nx = Same()\n"
    tests = {"inputs": [[]], "outputs": [wanted], "fn_name": "f"}
    assert scored(f"{lies}def f():\n    return {returned}", tests) == right


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ("", "there are no tests"), ("assert (", "are not Python"),
        ("[" * 100_000, "nested too deeply"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"), ([3], "a test is '3'"),
    ],
)  # fmt: skip
def test_tests_of_another_form_are_an_error(tests, words):
    with pytest.raises(ValueError, match=words):
        code.tests_in(tests)


def test_a_job_scores_programs_by_the_name_of_the_reward_and_its_settings():
    settings = {"all_or_nothing": False, "sandbox": SANDBOX}
    config = RewardConfig(name="code", args=settings, advanced={"workers": 1}, deadline_s=30)
    sample = Sample("```python\nprint(input())\n```", answer=json.dumps(THIRDS))
    trial.check(config, sample)
    assert in_processes(config, [sample]) == [[Score(pytest.approx(2 / 3))]]


def test_a_job_whose_programs_have_no_sandbox_is_refused_by_the_name_of_the_reward(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    said = "reward.name = 'code': sandbox = \"bubblewrap\": there is no program bwrap"
    assert said in refusal(RewardConfig(name="code"), Sample(""))
    with pytest.raises(SandboxError, match="no program bwrap"):
        scored("print(1)", THIRDS, sandbox="bubblewrap")


def test_an_answer_that_only_looks_like_tests_can_never_be_matched():
    assert code.can_match(json.dumps(THIRDS)) and code.can_match("") and code.can_match("assert 1")
    assert not code.can_match('{"inputs": []}') and not code.can_match("[1, 2]")


def test_check_refuses_tests_that_are_not_where_the_job_says():
    here, there = {"tests": THIRDS}, {"args": {"sandbox": "limits"}}
    trial.check(RewardConfig(name="code", **there), Sample("", metadata=here))
    elsewhere = RewardConfig(name="code", args={"sandbox": "limits", "tests": "tsts"})
    said = refusal(elsewhere, Sample("", metadata=here))
    assert "reward.name = 'code': " in said and "neither 'tsts' nor an answer, but tests" in said


def test_check_refuses_a_budget_that_the_deadline_of_the_reward_ends():
    args = {"sandbox": "limits", "budget_s": 10.0}
    sample = Sample("", metadata={"tests": THIRDS})
    said = refusal(RewardConfig(name="code", args=args), sample)
    assert "reward.args.budget_s = 10: does not end before" in said
    trial.check(RewardConfig(name="code", args=args, deadline_s=10.5), sample)
