"""1 for a program that passes its unit tests.

Reads unit tests in the forms of public data sets, and compares a program's results.
"""

import ast
import json
import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from relax_hpc.environments.rewards.answers import final_text
from relax_hpc.environments.rewards.sandbox import (
    Program,
    ProgramLimits,
    ProgramOutcome,
    Sandbox,
    check_sandbox,
    run,
)

FORMS = (
    'write {"inputs": [...], "outputs": [...]}, with "fn_name" if a function is to be called, or '
    "assert lines"
)
_CLOSE = 1e-6


class UnitTest(NamedTuple):
    stdin: str = ""
    function: str = ""
    arguments: Sequence[Any] = ()
    wanted: Any = None
    """Output of the program, or value of its function."""
    lines: str = ""
    """Lines to run after the program, instead of the rest."""

    def of(self, text: str) -> Program:
        """Returns the program to run."""
        return Program(text, self.stdin, self.function, self.arguments, self.lines)

    def is_passed(self, outcome: ProgramOutcome) -> bool:
        """Whether the result is right, and the program ended well."""
        if not outcome.is_well:
            return False
        if self.lines:
            return outcome.passed
        if not self.function:
            return same_output(outcome.output, self.wanted)
        try:
            return outcome.has_value and _is_value(outcome.value, self.wanted)
        except RecursionError:
            return False


def tests_in(given: object, entry_point: str = "") -> list[UnitTest]:
    """Reads the tests of a prompt.

    Args:
        given: {"inputs", "outputs"} with or without "fn_name"; a list of {"input", "output"}; a
            list of assert lines; Python text, in which each assertion is a test if there is nothing
            else; or JSON text of one of these.
        entry_point: function passed to `check`, if Python text defines that.

    Raises:
        ValueError: there is none, or it has another form.
    """
    if isinstance(given, str):
        tests = _in_text(given, entry_point)
    elif isinstance(given, Mapping):
        tests = _in_pairs(given)
    elif isinstance(given, Sequence):
        tests = [each for item in given for each in _in_item(item, entry_point)]
    else:
        tests = []
    if not tests:
        raise ValueError(f"there are no tests in {str(given)[:80]!r}; {FORMS}")
    return tests


def same_output(given: str, wanted: str) -> bool:
    """Compares word by word; numbers with a point or an exponent only approximately."""
    words, wanted_words = given.split(), wanted.split()
    return len(words) == len(wanted_words) and all(map(_is_word, words, wanted_words))


def _in_text(text: str, entry_point: str) -> list[UnitTest]:
    if text.lstrip()[:1] in ("{", "["):
        try:
            return tests_in(json.loads(text), entry_point)
        except RecursionError:
            raise ValueError("the tests are nested too deeply") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"the tests are not JSON: {error}; {FORMS}") from None
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"the tests {text[:80]!r} are not Python; {FORMS}") from None
    if all(isinstance(each, ast.Assert) for each in body):
        return [UnitTest(lines=ast.unparse(each)) for each in body]
    if not any(isinstance(each, ast.Assert) for node in body for each in ast.walk(node)):
        return []
    checks = any(isinstance(each, ast.FunctionDef) and each.name == "check" for each in body)
    if checks and entry_point:
        text += f"\ncheck({entry_point})"
    return [UnitTest(lines=text)]


def _in_item(item: object, entry_point: str) -> list[UnitTest]:
    if isinstance(item, str):
        return _in_text(item, entry_point)
    if isinstance(item, Mapping) and {"input", "output"} <= set(item):
        return _in_pairs({**item, "inputs": [item["input"]], "outputs": [item["output"]]})
    raise ValueError(f"a test is {str(item)[:80]!r}; {FORMS}")


def _in_pairs(given: Mapping[str, Any]) -> list[UnitTest]:
    inputs, outputs = given.get("inputs"), given.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError(f"the tests have keys {', '.join(given)}; {FORMS}")
    if len(inputs) != len(outputs):
        raise ValueError(f"the tests have {len(inputs)} inputs and {len(outputs)} outputs")
    if name := str(given.get("fn_name") or ""):
        return [_call(name, *pair) for pair in zip(inputs, outputs, strict=True)]
    return [
        UnitTest(stdin=_text(given), wanted=_text(wanted))
        for given, wanted in zip(inputs, outputs, strict=True)
    ]


def _call(name: str, arguments: object, wanted: object) -> UnitTest:
    """Makes the test of a function call; text has one JSON value per line, for arguments and
    result."""
    if isinstance(arguments, str):
        try:
            arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
            wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
        except ValueError as error:
            raise ValueError(f"a test of {name} is not JSON: {error}") from None
    if not isinstance(arguments, list):
        raise ValueError(f"a test of {name} has inputs {str(arguments)[:80]!r}; write a list")
    return UnitTest(function=name, arguments=arguments, wanted=wanted)


def _text(given: object) -> str:
    if isinstance(given, list):
        return "\n".join(map(str, given))
    return str(given)


def _is_word(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    try:
        is_real = not wanted.lstrip("+-").isdigit()
        return is_real and math.isclose(float(given), float(wanted), rel_tol=_CLOSE, abs_tol=_CLOSE)
    except ValueError:
        return False


def _is_value(given: object, wanted: object) -> bool:
    """Whether a value is right; some data sets wrap it in a list."""
    if _equal(given, wanted):
        return True
    return isinstance(wanted, list) and len(wanted) == 1 and _equal(given, wanted[0])


def _equal(given: object, wanted: object) -> bool:
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, float) or isinstance(wanted, float):
        if not isinstance(given, int | float) or not isinstance(wanted, int | float):
            return False
        return math.isclose(given, wanted, rel_tol=_CLOSE, abs_tol=_CLOSE)
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(_equal, given, wanted))
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(_equal(given[k], wanted[k]) for k in wanted)
    return given == wanted


REMEDY = FORMS
_LANGUAGES = ("python", "py", "python3")
_FENCE = "```"

Amount = Annotated[float, Field(gt=0)]


def score(
    response: str,
    answer: str,
    metadata: Mapping[str, Any],
    *,
    in_thought: bool = False,
    tests: str = "tests",
    all_or_nothing: bool = True,
    deadline_s: Amount = 4.0,
    budget_s: Amount = 8.0,
    memory_mib: Amount = 1024.0,
    disk_mib: Amount = 64.0,
    sandbox: Sandbox = "bubblewrap",
) -> float:
    """Runs the last ```python block after the last `</think>` against the tests of its prompt.

    Args:
        response: to be scored.
        answer: the tests, if the metadata has none.
        metadata: the tests, in one of the forms of `tests_in`, and `entry_point`, if they define a
            function `check` that takes it.
        in_thought: the prompt opened a thought.
        tests: key of the metadata.
        all_or_nothing: 1 only if all pass, and stop at the first failure; else the fraction that
            passes.
        deadline_s: per test.
        budget_s: for all tests; those not run by then have failed.
        memory_mib: of a program.
        disk_mib: of a program in /tmp.
        sandbox: "bubblewrap", or "limits", which isolates nothing.

    Raises:
        ValueError: there are no tests, or in another form.
        SandboxError: there is no sandbox on this node.
    """
    entry_point = str(metadata.get("entry_point") or "")
    given = metadata.get(tests) or answer
    if not given:
        raise ValueError(
            f"the line of the data has neither {tests!r} nor an answer, but {', '.join(metadata)}; "
            "name the key of the tests: reward.args.tests"
        )
    wanted = tests_in(given, entry_point)
    program = last_block(final_text(response, in_thought))
    if program is None:
        return 0.0
    limits = ProgramLimits(deadline_s, int(memory_mib * 2**20), int(disk_mib * 2**20))
    end, passed = time.monotonic() + budget_s, 0
    for test in wanted:
        left = end - time.monotonic()
        if left <= 0:
            break
        limits = limits._replace(deadline_s=min(deadline_s, left))
        is_passed = test.is_passed(run(test.of(program), limits, sandbox))
        passed += is_passed
        if all_or_nothing and not is_passed:
            break
    return float(passed == len(wanted)) if all_or_nothing else passed / len(wanted)


def can_match(answer: str) -> bool:
    """Whether an answer that begins as JSON has tests; other tests are in the metadata."""
    if answer.lstrip()[:1] not in ("{", "["):
        return True
    try:
        return bool(tests_in(answer))
    except ValueError:
        return False


def check(*, sandbox: Sandbox, **_: object) -> None:
    """Checks that the sandbox works on this node.

    Raises:
        ConfigError: it does not.
    """
    check_sandbox(sandbox)


def last_block(text: str) -> str | None:
    """Returns the Python block that is closed last, or None."""
    opened: list[str] | None = None
    language, found = "", None
    for line in text.split("\n"):
        if not line.lstrip().startswith(_FENCE):
            if opened is not None:
                opened.append(line)
        elif opened is not None and not line.strip(" \t\r`"):
            found = textwrap.dedent("\n".join(opened)) if language in _LANGUAGES else found
            opened = None
        else:
            opened, language = [], line.strip(" \t\r`").lower()
    return found
