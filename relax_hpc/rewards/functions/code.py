"""1 for a program that passes its unit tests."""

import textwrap
import time
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from relax_hpc.rewards.answers import final_text
from relax_hpc.rewards.sandbox import Limits, Sandbox, check_sandbox, run
from relax_hpc.rewards.unit_tests import FORMS, tests_in

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
        answer: the tests, where the metadata has none.
        metadata: has the tests, in one of the forms of `unit_tests.tests_in`, and `entry_point`, if
            they define a function `check` that is to be called with it.
        in_thought: the prompt opened a thought.
        tests: key of the metadata.
        all_or_nothing: 1 only if all pass, and none is run after one that fails; else the fraction
            that does.
        deadline_s: of a test.
        budget_s: of all tests; those not run by then have failed.
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
    limits = Limits(deadline_s, int(memory_mib * 2**20), int(disk_mib * 2**20))
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
    """Whether an answer that begins as JSON has tests; others stand in the metadata."""
    if answer.lstrip()[:1] not in ("{", "["):
        return True
    try:
        return bool(tests_in(answer))
    except ValueError:
        return False


def check(*, sandbox: Sandbox, **_: object) -> None:
    """Checks that there is a sandbox on this node.

    Raises:
        ConfigError: there is none.
    """
    check_sandbox(sandbox)


def last_block(text: str) -> str | None:
    """Returns the Python of the block that is closed last; None if there is none."""
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
