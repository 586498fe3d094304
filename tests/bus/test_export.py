import base64
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from bus_fixtures import PRODUCERS, group, make_bus, trajectory, whole_batch, with_media
from bus_steps import P, bus_with_steps, flip, plan, widen

from relax_hpc.bus import layout
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.bus.tools import export, selection, show
from relax_hpc.errors import BusError, ConfigError
from relax_hpc.paths import BusPaths
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
    paths = BusPaths(tmp_path / "bus")
    layout.create(paths, PRODUCERS, {}, sidecar_writers={"reference-0": "reference"})
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
    for name in ("old_logprobs", "advantages", "values"):
        assert found[name] is None
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


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_a_video_and_its_sound_are_exported_whole_with_their_spans(tmp_path, ending):
    """The bus has their bytes once, and the second group has none of its own."""
    paths = make_bus(tmp_path)
    groups = [with_media(group(guid)) for guid in range(2)]
    with Producer(paths, PRODUCERS[0], {}) as producer:
        producer.put(groups)
    found = write_out(paths, tmp_path / f"out.{ending}", ["media", "media_spans"])
    rows = [row for each in groups for row in each.trajectories]
    for line, row in zip(found, rows, strict=True):
        assert line["media_spans"] == row.media_spans.tolist()
        for medium, put in zip(line["media"], row.media, strict=True):
            data = base64.b64decode(medium["data"]) if ending == "jsonl" else medium["data"]
            assert data == put.data.tobytes()
            assert medium["canonical_xxh3"] == put.canonical_xxh3.hex()
            assert medium["grid_thw"] == list(put.grid_thw)


def test_a_step_is_exported_as_the_trainer_saw_it_whatever_was_restarted_since(tmp_path):
    paths = rich_bus(tmp_path)
    options = {"prompts_per_step": 3, "over_age": "drop", "max_staleness": 99}
    options |= {"needs": ["reference"]}
    with Sequencer(paths, position=None, **options) as first:
        seen = {1: [whole_batch(first, 1, timeout_s=1)]}
        position = first.position
        seen[2] = [first.next_portion(2, timeout_s=1, min_tokens=1)]  # and the trainer dies
        while not seen[2][-1].last:
            seen[2].append(first.next_portion(2, timeout_s=1, min_tokens=1))
    with Sequencer(paths, position=position, **options) as second:
        whole_batch(second, 2, timeout_s=1)
        seen[3] = [whole_batch(second, 3, timeout_s=1)]
    trained = {
        step: [row for r in records for row in Reader(paths).rows(r, range(r.num_trajectories))]
        for step, records in seen.items()
    }
    for steps in ((1, 1), (2, 2), (3, 3), (1, 3), (2, 3)):
        found = write_out(paths, tmp_path / "out.jsonl", steps=steps)
        expected = [(s, row) for s in range(steps[0], steps[1] + 1) for row in trained[s]]
        assert [(r["step"], r["guid"], r["sibling"]) for r in found] == [
            (step, row.guid, row.sibling) for step, row in expected
        ]
        for row, (_, saw) in zip(found, expected, strict=True):
            check_row(row, saw, is_json=True)


def test_rows_of_no_step_are_told_by_null(tmp_path):
    paths = bus_with_steps(tmp_path, steps=2)
    found = write_out(paths, tmp_path / "o.parquet", ["guid", "step"])
    assert {row["guid"]: row["step"] for row in found} == {
        guid: guid // P + 1 if guid < 8 else None for guid in range(16)
    }
    assert list(found[0]) == ["guid", "step"]


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
    with pytest.raises(ConfigError, match=r"must end in \.parquet or \.jsonl"):
        write_out(paths, tmp_path / "o.csv")
    with pytest.raises(ConfigError, match=r"--columns rewards: there are step, producer, .*reward"):
        export.columns_named(["guid", "rewards"], None)
    with pytest.raises(ConfigError, match="add --text"):
        export.columns_named(["response"], None)
    (tmp_path / "train.jsonl").write_text("of the user")
    with pytest.raises(ConfigError, match=r"--to .*train\.jsonl: is there; name another file"):
        export.export(paths, tmp_path / "train.jsonl", export.COLUMNS, None, print)
    assert (tmp_path / "train.jsonl").read_text() == "of the user"
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        write_out(paths, tmp_path / "nowhere" / "o.jsonl")
    with pytest.raises(BusError, match="has no step 9; steps 1 to 3 are planned"):
        write_out(paths, tmp_path / "o.jsonl", steps=(9, 9))
    with pytest.raises(ConfigError, match="--step 3-5: give a step, or the first and the last"):
        export.parse_steps("3-5")
    assert (export.parse_steps("12"), export.parse_steps("10:12")) == ((12, 12), (10, 12))


def test_columns_that_are_not_asked_for_are_not_even_read(tmp_path):
    paths = rich_bus(tmp_path)
    narrow = write_out(paths, tmp_path / "o.jsonl", ["guid", "token_ids"])
    path = paths.shard("rollout-0", 1, 0)
    for name in ("ragged/media_bytes", "ragged/routed_experts"):
        with Shard(path) as shard:
            field = shard.fields[name]
        flip(path, field.offset)
    assert write_out(paths, tmp_path / "o.jsonl", ["guid", "token_ids"]) == narrow
    for name in ("media", "routed_experts"):
        with pytest.raises(BusError, match=f"{name}.*does not match its checksum"):
            write_out(paths, tmp_path / "o.jsonl", ["guid", name])


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


def test_show_a_group_tells_its_fields_planned_or_not(tmp_path):
    paths = rich_bus(tmp_path)
    shown = show.group(paths, 7, None)
    assert "prompt group 7: not planned yet, rows 3..5 of" in shown
    assert "5 from token 2, 6 from token 3" in shown
    assert "mean 7.25 over sampled tokens" in shown
    assert "PNG 12 B" in shown
    with pytest.raises(BusError, match="prompt group 77 is not committed"):
        show.group(paths, 77, None)


def test_the_planned_copy_of_a_group_is_shown_not_the_ignored_one(tmp_path):
    paths = bus_with_steps(tmp_path)
    record = selection.of_guid(paths, 6)
    assert (record.step, record.parts[0].seq, record.num_trajectories) == (2, 1, 2)
