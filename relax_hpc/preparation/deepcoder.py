"""DeepCoder-Preview: 24 thousand programming problems with unit tests."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from relax_hpc.preparation.data_set import DataSet, Task, text

_WISH = "Think step by step, and end with the whole program in one ```python block."
_STARTER = "Begin with this code:"
_STDIN = "It reads from standard input and prints to standard output."
_MOST_TESTS = 15
"""Number of tests of a problem, those with the longest inputs."""
_LONGEST = 65_536
"""Characters of a test; a longer one is taken only where all are longer."""


def _task(fields: Mapping[str, Any]) -> Task:
    """The answer is the tests, as JSON that the reward `code` reads."""
    tests = _tests(text(fields, "tests"))
    starter = str(fields.get("starter_code") or "").strip()
    parts = [text(fields, "problem"), f"{_STARTER}\n```python\n{starter}\n```" if starter else ""]
    if "fn_name" not in tests:
        parts.append(_STDIN)
    return Task("\n\n".join([*filter(None, parts), _WISH]), json.dumps(tests, ensure_ascii=False))


def _tests(said: str) -> dict[str, Any]:
    """Reads the tests in any of the forms of the parts of the data set: pairs, or a list of them.

    Raises:
        ValueError: they have another form.
    """
    given = json.loads(said)
    if isinstance(given, dict):
        pairs = list(zip(given.get("inputs", ()), given.get("outputs", ()), strict=True))
        function = given.get("fn_name")
    elif isinstance(given, list) and all(isinstance(each, dict) for each in given):
        pairs = [(each.get("input"), each.get("output")) for each in given]
        functions = {_function(each) for each in given}
        if len(functions) > 1:
            raise ValueError(
                f"tests call {', '.join(sorted(map(str, functions)))}; one is expected"
            )
        function = functions.pop() if functions else None
    else:
        raise ValueError("tests are neither a table nor a list of tables")
    if not pairs or any(None in pair for pair in pairs):
        raise ValueError("tests lack inputs or outputs")
    inputs, outputs = zip(*_chosen(pairs), strict=True)
    tests = {"inputs": list(inputs), "outputs": list(outputs)}
    return {"fn_name": function, **tests} if function else tests


def _function(test: Mapping[str, Any]) -> str | None:
    """Name of what a test calls; None if it reads standard input."""
    metadata = test.get("metadata")
    named = metadata.get("func_name") if isinstance(metadata, dict) else None
    return test.get("fn_name") or named


def _chosen(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """At most so many, in their order."""
    sizes = [len(json.dumps(pair)) for pair in pairs]
    fitting = [index for index, size in enumerate(sizes) if size <= _LONGEST]
    longest = sorted(fitting or [sizes.index(min(sizes))], key=lambda index: -sizes[index])
    return [pairs[index] for index in sorted(longest[:_MOST_TESTS])]


DEEPCODER = DataSet(
    "deepcoder",
    "agentica-org/DeepCoder-Preview-Dataset",
    (":primeintellect/train", ":taco/train", ":lcbv5/train", ":lcbv5/test", ":codeforces/test"),
    _task,
)
