"""The tiny task of programs: its wanted responses pass its tests, and a constant does not."""

import json

import pytest

from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.demo import checkpoint, programs
from relax_hpc.prompts.records import Records
from relax_hpc.rewards import unit_tests
from relax_hpc.rewards.sandbox import Limits, run


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    programs.write(folder, 40, 8, seed=3)
    found = {}
    for part in ("train", "heldout"):
        settings = PromptsConfig(train=[folder / f"{part}.jsonl"])
        records = Records(settings.mixture, settings)
        found[part] = [records[n] for n in range(len(records))]
    return found


def passes(program, answer):
    limits = Limits(10.0, 2**30, 2**26)
    tests = unit_tests.tests_in(answer)
    return [test.is_passed(run(test.of(program), limits, "limits")) for test in tests]


def test_the_wanted_program_passes_both_tests_and_a_constant_one_of_them_at_most(rows):
    for row in rows["train"][:3]:
        wanted = row.metadata["completion"]
        assert wanted.startswith("```python\n") and wanted.endswith("\n```")
        program = wanted.removeprefix("```python\n").removesuffix("\n```")
        assert passes(program, row.answer) == [True, True]
        first = json.loads(row.answer)["outputs"][0]
        assert passes(f"print({first})", row.answer) == [True, False]
        assert passes(program.replace("+", "-"), row.answer) == [False, False]


def test_prompts_are_there_once_and_the_tests_are_those_of_their_numbers(rows):
    asked = [row.prompt[0]["content"] for part in rows.values() for row in part]
    assert len(asked) == len(set(asked)) == 48 and len(rows["heldout"]) == 8
    for row in rows["heldout"]:
        factor, term = map(int, row.prompt[0]["content"].split("n+"))
        tests = json.loads(row.answer)
        assert [factor * int(n) + term for n in tests["inputs"]] == list(map(int, tests["outputs"]))


def test_a_program_is_few_tokens(rows):
    tokens = checkpoint.tokenizer(words=[*checkpoint.WORDS, *programs.WORDS])
    assert len(tokens) <= checkpoint.VOCAB_SIZE
    longest = max(len(tokens.encode(row.metadata["completion"])) for row in rows["train"])
    assert longest + 1 <= 11  # with the end of the turn
