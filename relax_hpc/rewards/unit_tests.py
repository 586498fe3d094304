"""Unit tests as data sets write them, and whether what a program gave is what they want."""

import ast
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from relax_hpc.rewards.sandbox import Outcome, Program

FORMS = (
    'write {"inputs": [...], "outputs": [...]}, with "fn_name" if a function is to be called, or '
    "assert lines"
)
_CLOSE = 1e-6


class UnitTest(NamedTuple):
    """One test of a program."""

    stdin: str = ""
    function: str = ""
    arguments: Sequence[Any] = ()
    wanted: Any = None
    """Output of the program; value of its function."""
    lines: str = ""
    """Lines to be run behind the program, instead of all else."""

    def of(self, text: str) -> Program:
        """Returns the program that is to be run."""
        return Program(text, self.stdin, self.function, self.arguments, self.lines)

    def is_passed(self, outcome: Outcome) -> bool:
        """Whether it did what is wanted, and ended well."""
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
            list of assert lines; Python text, of which each assertion is a test if there is
            nothing else in it; or JSON text of one of these.
        entry_point: function that a test in Python text gets, if it defines `check`.

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
    """Compares word by word; numbers with a point or an exponent need to be close only."""
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
    """A call of a function; as text, each line of the arguments and the value is JSON."""
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
    """Whether a value is what is wanted; some data sets write it as a list of one."""
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
