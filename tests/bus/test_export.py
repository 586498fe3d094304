"""What people and their programs see of a bus: exports, and what `show` prints."""

import base64
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from bus_fixtures import PRODUCERS, P, batch, group, make_bus, rows_of, sequencer, trajectory
from bus_steps import bus_with_steps, plan, widen

from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.tools import export, inventory, show
from relax_hpc.errors import BusError, ConfigError
from relax_hpc.schema import MediaKind, Medium, PromptGroup


def rich_group(guid):
    """A group with everything a trajectory can have."""
    data = np.arange(guid + 5, dtype=np.uint8)
    image = Medium(MediaKind.PNG, data, (1, 2, 3), bytes(range(16)), (0, 4), 0.5)
    rows = []
    for sibling in range(3):
        row = trajectory(guid, sibling, prompt=2, response=guid % 3 + sibling)
        if len(row.token_ids) > 3:  # two policies sampled it
            row = row._replace(version_runs=np.array([[2, 5], [3, 6]], np.int32))
        experts = np.arange(len(row.token_ids) * 4, dtype=np.int16).reshape(-1, 4) + guid
        spans = np.array([[0, 0, 1 + sibling % 2]], np.int32)
        rows.append(row._replace(media=(image,), media_spans=spans, routed_experts=experts))
    return PromptGroup(guid, rows)


def rich_bus(tmp_path):
    paths = make_bus(tmp_path, writers={"reference-0": "reference"})
    for r, name in enumerate(PRODUCERS):
        with Producer(paths, name, {}) as producer:
            for lo in range(r, 12, 4):
                producer.put([rich_group(lo), rich_group(lo + 2)])
    widen(paths, 0.25)
    return paths


def write_out(paths, target, names=(), steps=None):
    rows = []
    target.unlink(missing_ok=True)
    chosen = export.columns_named(list(names), None)
    count = export.export(paths, target, chosen, steps, rows.append)
    assert rows[-1:] == [count]
    if target.suffix == ".parquet":
        return pq.read_table(target).to_pylist()
    return [json.loads(line) for line in target.read_text().splitlines()]


def check_row(found, expected, *, is_json):
    for name in ("guid", "sibling", "prompt_index", "seed", "environment", "prompt_len", "reward",
                 "policy_version_min", "policy_version_max"):  # fmt: skip
        assert found[name] == getattr(expected, name), name
    assert found["finish"] == expected.finish.name.lower()
    assert found["response_len"] == len(expected.token_ids) - expected.prompt_len
    assert found["rollout_logprobs"] == expected.columns["rollout_logprobs"].tolist()
    for name in ("token_ids", "loss_mask", "version_runs", "routed_experts"):
        assert found[name] == getattr(expected, name).tolist(), name
    # what widen wrote, 0.25 + guid, is exact in float32
    assert found["ref_logprobs"] == [0.25 + expected.guid] * len(expected.token_ids)
    assert found["values"] is None
    [medium] = found["media"]
    assert (medium["kind"], medium["grid_thw"]) == ("png", [1, 2, 3])
    assert medium["canonical_xxh3"] == "000102030405060708090a0b0c0d0e0f"
    assert (medium["frames"], medium["seconds_per_grid"]) == ([0, 4], 0.5)
    assert found["media_spans"] == [[0, 0, 1 + expected.sibling % 2]]
    data = base64.b64decode(medium["data"]) if is_json else medium["data"]
    assert data == expected.media[0].data.tobytes()


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_every_value_that_was_put_is_exported_sidecars_media_and_experts_included(tmp_path, ending):
    paths = rich_bus(tmp_path)
    found = write_out(paths, tmp_path / f"out.{ending}")
    expected = [row for r in (0, 1) for guid in range(r, 12, 2) for row in rich_group(guid)[1]]
    assert len(found) == len(expected) == 36
    for row, put in zip(found, expected, strict=True):
        check_row(row, put, is_json=ending == "jsonl")
        assert row["step"] is None
        assert row["producer"] == PRODUCERS[put.guid % 2]
    assert [row["shard_row"] for row in found[:6]] == list(range(6))


def test_a_step_is_exported_as_the_trainer_saw_it_whatever_was_restarted_since(tmp_path):
    paths = rich_bus(tmp_path)
    options = {"prompts_per_step": 3, "over_age": "drop", "max_staleness": 99}
    options |= {"needs": ["reference"]}
    with sequencer(paths, **options) as first:
        seen = {1: [batch(first, 1)]}
        position = first.position
        seen[2] = [first.next_portion(2, timeout_s=1, min_tokens=1)]  # and the trainer dies
        while not seen[2][-1].last:
            seen[2].append(first.next_portion(2, timeout_s=1, min_tokens=1))
    with sequencer(paths, position, **options) as second:
        batch(second, 2)
        seen[3] = [batch(second, 3)]
    trained = {step: rows_of(paths, *records) for step, records in seen.items()}
    for steps in ((1, 1), (2, 2), (3, 3), (1, 3), (2, 3)):
        found = write_out(paths, tmp_path / "out.jsonl", steps=steps)
        expected = [(s, row) for s in range(steps[0], steps[1] + 1) for row in trained[s]]
        assert [(r["step"], r["guid"], r["sibling"]) for r in found] == [
            (step, row.guid, row.sibling) for step, row in expected
        ]
        for row, (_, saw) in zip(found, expected, strict=True):
            check_row(row, saw, is_json=True)


def test_a_step_whose_shards_are_deleted_is_refused_with_the_key_that_keeps_them(tmp_path):
    paths = bus_with_steps(tmp_path, release=1)
    with pytest.raises(BusError, match=r"step 1: .*0000\.h5.* deleted.*bus\.keep_steps"):
        write_out(paths, tmp_path / "o.jsonl", steps=(1, 2))
    assert list(tmp_path.glob("*o.jsonl*")) == []
    assert len(write_out(paths, tmp_path / "o.jsonl", steps=(2, 2))) == 8


def test_blocks_that_go_out_one_by_one_make_the_same_file(tmp_path, monkeypatch):
    paths = rich_bus(tmp_path)
    whole = write_out(paths, tmp_path / "o.parquet")
    monkeypatch.setattr(export, "BLOCK_BYTES", 200)
    assert write_out(paths, tmp_path / "o.parquet") == whole
    assert pq.ParquetFile(tmp_path / "o.parquet").num_row_groups > 5


def test_what_cannot_be_exported_is_said_with_what_can(tmp_path):
    paths = bus_with_steps(tmp_path)
    with pytest.raises(ConfigError, match=r"--columns rewards: there are step, producer, .*reward"):
        export.columns_named(["guid", "rewards"], None)
    (tmp_path / "train.jsonl").write_text("of the user")
    with pytest.raises(ConfigError, match=r"--to .*train\.jsonl: is there; name another file"):
        export.export(paths, tmp_path / "train.jsonl", export.COLUMNS, None, print)
    assert (tmp_path / "train.jsonl").read_text() == "of the user"
    with pytest.raises(BusError, match="has no step 9; steps 1 to 3 are planned"):
        write_out(paths, tmp_path / "o.jsonl", steps=(9, 9))
    with pytest.raises(ConfigError, match="--step 3-5: give a step, or the first and the last"):
        export.parse_steps("3-5")
    assert (export.parse_steps("12"), export.parse_steps("10:12")) == ((12, 12), (10, 12))


def test_text_is_the_decoded_prompt_and_response(tmp_path):
    paths = bus_with_steps(tmp_path)
    chosen = export.columns_named(["guid", "prompt", "response"], lambda t: "|".join(map(str, t)))
    export.export(paths, tmp_path / "o.jsonl", chosen, (1, 1), lambda rows: None)
    first = json.loads((tmp_path / "o.jsonl").read_text().splitlines()[0])
    tokens = trajectory(0, 0).token_ids.tolist()
    assert first["prompt"] == "|".join(map(str, tokens[:3]))
    assert first["response"] == "|".join(map(str, tokens[3:]))


# ---------------------------------------------------------------- show


def test_show_a_step_tells_where_each_group_lies_and_how_stale_it_is(tmp_path):
    paths = bus_with_steps(tmp_path)
    lines = [line.split() for line in show.step(paths, 3).splitlines()]
    assert " ".join(lines[0]) == "step 3: 4 prompt groups, 8 trajectories"
    # guid, shard, rows, tokens, staleness (step 3 trained on policy 0), reward, sidecars
    assert lines[3] == ["8", "p/rollout-0/f1/000000000002.h5", "0..1", "14", "2", "0.5", "-"]
    assert lines[6] == ["11", "p/rollout-1/f1/000000000002.h5", "2..3", "14", "2", "0.5", "-"]
    paths.shard("rollout-1", 1, 2).unlink()
    assert "deleted" in show.step(paths, 3)
    with pytest.raises(BusError, match=r"^prompt group 11: .*h5 is deleted, .*bus ls says what"):
        show.group(paths, 11, None)


def test_show_a_step_tells_how_many_rewards_of_a_group_failed(tmp_path):
    paths = make_bus(tmp_path)
    failed = group(0)
    failed.trajectories[1] = failed.trajectories[1]._replace(reward=0.0, reward_error=True)
    with Producer(paths, "rollout-0", {}) as producer:
        producer.put([failed, *map(group, range(1, P))])
    plan(paths, 1)
    rewards = [line.split()[5:-1] for line in show.step(paths, 1).splitlines()[3:]]
    assert rewards == [["0", "(1", "failed)"], ["0.5"], ["0.5"], ["0.5"]]


def test_the_planned_copy_of_a_group_is_shown_not_the_ignored_one(tmp_path):
    paths = bus_with_steps(tmp_path)
    record = inventory.of_guid(paths, 6)
    assert (record.step, record.parts[0].seq, record.num_trajectories) == (2, 1, 2)


# ---------------------------------------------------------------- what rewards are made of

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
    rows = rows_of(paths, *(inventory.of_guid(paths, guid) for guid in (0, 1)))
    assert [row.parts for row in rows] == [RIGHT, {}, {"found": 2.0, "short": 0.0}, {}]
    assert [row.reward_error for row in rows] == [False, True, False, False]


def test_a_trainer_does_not_read_parts_and_knows_failures_before_it_reads_rows(paths):
    record = inventory.of_guid(paths, 0)
    reader = Reader(paths)
    assert [row.parts for row in reader.rows(record, range(2), [])] == [{}, {}]
    assert reader.index(record).reward_error.tolist() == [0, 1]


def test_parts_of_a_batch_are_read_without_its_rows(paths):
    of_both = [inventory.of_guid(paths, guid) for guid in (0, 1)]
    found = [Reader(paths).parts(record) for record in of_both]
    nan = np.nan
    expected = {"found": [nan, nan, 2, nan], "right": [1, nan, nan, nan],
                "short": [-0.25, nan, 0, nan], "short/words": [-0.25, nan, nan, nan]}  # fmt: skip
    assert found[0].keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(np.concatenate([each[name] for each in found]), values)


def test_show_and_export_tell_parts_and_failures(paths, tmp_path):
    said = [line.split(maxsplit=1) for line in show.group(paths, 0, None).splitlines()]
    assert ["reward", "0.75"] in said and ["reward", "0, failed"] in said
    assert ["parts", "right 1, short -0.25, short/words -0.25"] in said
    rows = write_out(paths, tmp_path / "rows.jsonl", ["reward_error", "parts"])
    assert rows[0] == {"reward_error": False, "parts": [[k, v] for k, v in RIGHT.items()]}
    assert rows[1] == {"reward_error": True, "parts": []}
