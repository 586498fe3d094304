"""What rewards are made of, and which failed: on the bus, and as people look at it."""

import json

import h5py
import numpy as np
import pytest
from bus_fixtures import PRODUCERS, group, make_bus

from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.tools import export, selection, show
from relax_hpc.schema import PromptGroup

RIGHT = {"right": 1.0, "short": -0.25, "short/words": -0.25}


def put(root, *groups):
    paths = make_bus(root)
    with Producer(paths, PRODUCERS[0], {}) as producer:
        producer.put([PromptGroup(guid, rows) for guid, rows in enumerate(groups)])
    return paths


@pytest.fixture
def paths(tmp_path):
    """Group 0: a row of three parts and one that failed. Group 1: another part, and none."""
    (a, b), (c, d) = group(0).trajectories, group(1).trajectories
    return put(
        tmp_path,
        [a._replace(reward=0.75, parts=RIGHT), b._replace(reward=0.0, reward_error=True)],
        [c._replace(reward=2.0, parts={"found": 2.0, "short": 0.0}), d],
    )


def test_parts_come_back_by_name_with_the_rows_that_have_them(paths):
    rows = [
        row
        for guid in (0, 1)
        for row in Reader(paths).rows(selection.of_guid(paths, guid), range(2))
    ]
    assert [row.parts for row in rows] == [RIGHT, {}, {"found": 2.0, "short": 0.0}, {}]
    assert [row.reward_error for row in rows] == [False, True, False, False]


def test_a_trainer_does_not_read_parts_and_knows_failures_before_it_reads_rows(paths):
    record = selection.of_guid(paths, 0)
    reader = Reader(paths)
    assert [row.parts for row in reader.rows(record, range(2), [])] == [{}, {}]
    assert reader.index(record).reward_error.tolist() == [0, 1]


def test_parts_of_a_batch_are_read_without_its_rows(paths):
    of_both = [selection.of_guid(paths, guid) for guid in (0, 1)]
    found = [Reader(paths).parts(record) for record in of_both]
    nan = np.nan
    expected = {"found": [nan, nan, 2, nan], "right": [1, nan, nan, nan],
                "short": [-0.25, nan, 0, nan], "short/words": [-0.25, nan, nan, nan]}  # fmt: skip
    assert found[0].keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(np.concatenate([each[name] for each in found]), values)


def test_any_reader_of_hdf5_finds_the_names(paths):
    [path] = paths.fence(PRODUCERS[0], 1).glob("*.h5")
    with h5py.File(path, "r", locking=False) as file:
        names, values = json.loads(file.attrs["score_parts"]), file["row/score_parts"][:]
        assert file["row/reward_error"][:].tolist() == [0, 1, 0, 0]
    assert names == ["found", "right", "short", "short/words"]
    nan = np.nan
    expected = [[nan, 1, -0.25, -0.25], [nan] * 4, [2, nan, 0, nan], [nan] * 4]
    np.testing.assert_array_equal(values, expected)


def test_a_shard_without_parts_has_no_column_for_them(tmp_path):
    paths = put(tmp_path, group(0).trajectories)
    [path] = paths.fence(PRODUCERS[0], 1).glob("*.h5")
    with h5py.File(path, "r", locking=False) as file:
        assert "score_parts" not in file["row"] and "score_parts" not in file.attrs


def test_show_and_export_tell_parts_and_failures(paths, tmp_path):
    said = [line.split(maxsplit=1) for line in show.group(paths, 0, None).splitlines()]
    assert ["reward", "0.75"] in said and ["reward", "0, failed"] in said
    assert ["parts", "right 1, short -0.25, short/words -0.25"] in said
    target = tmp_path / "rows.jsonl"
    export.export(
        paths, target, export.columns_named(["reward_error", "parts"], None), None, lambda _: None
    )
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert rows[0] == {"reward_error": False, "parts": [[k, v] for k, v in RIGHT.items()]}
    assert rows[1] == {"reward_error": True, "parts": []}
