"""Records of what changed in the midst of requests stay as few as are asked for."""

import asyncio

import pytest

from relax_hpc.inference import switches
from relax_hpc.inference.members import Member
from relax_hpc.runtime.comm.orders import Receipt
from relax_hpc.runtime.paths import RunPaths


def member(start):
    return Member("rollout-0", start, "", 1, "sglang", "HEALTHY")


@pytest.mark.parametrize("every", [1, 3, 7])
def test_an_engine_that_skips_versions_leaves_no_more_than_one_that_does_not(tmp_path, every):
    paths = RunPaths(tmp_path)
    for begin in (0, 100):  # a trainer may be started again
        notes = switches.Notes(paths)
        for version in range(begin, begin + 100, every):
            notes.note(member("1.0-1-1"), version, [Receipt(num_sampled={"a": version})])
    left = sorted(int(each.stem) for each in paths.switches("rollout-0").glob("*/*.json"))
    assert left and left[0] > left[-1] - switches._KEPT
    seen = switches.Switches(paths, "rollout-0", "1.0-1-1")
    assert asyncio.run(seen.between(left[-2], left[-1])) == {left[-1]: {"a": left[-1]}}


def test_a_hundred_starts_of_an_engine_leave_what_one_does(tmp_path):
    paths = RunPaths(tmp_path)
    notes = switches.Notes(paths)
    switches.forget_earlier(paths, "rollout-0")
    for start in range(100):
        switches.forget_earlier(paths, "rollout-0")
        notes.note(member(f"1.{start}-1-1"), start, [])
        notes.note(member("1.0-1-1")._replace(id="rollout-0.1"), start, [])
    assert [each.name for each in paths.switches("rollout-0").iterdir()] == ["1.99-1-1"]
    assert len([*paths.switches("rollout-0.1").glob("*/*.json")]) == switches._KEPT
