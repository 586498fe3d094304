"""Counts that are gone on with are those of counting everything again."""

import json

import pytest
from bus_fixtures import PRODUCERS, SIBLINGS, group, make_bus, produce, whole_batch

from relax_hpc.bus.audit import Tally, audit
from relax_hpc.bus.frames import encode
from relax_hpc.bus.plan import IgnoredShard, SkippedGroup
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.runs import counted

P = 4


def sequencer(paths, position=None):
    return Sequencer(paths, prompts_per_step=P, position=position)


def kept(paths):
    return json.loads(json.dumps(Tally.of(paths).to_record()))


def gone_on_with(paths, record):
    tally = Tally.of(paths, record)
    assert tally.counts() == audit(paths)
    return tally.num_new_records


@pytest.fixture
def history(tmp_path):
    """A bus of repeated, skipped and trained groups, and what was kept of its counts on the way."""
    paths, records = make_bus(tmp_path), []
    for number, name in enumerate(PRODUCERS):
        produce(paths, name, range(number, 2 * P, 2))
    records.append(kept(paths))
    with sequencer(paths) as seq:
        for step in (1, 2):
            whole_batch(seq, step, timeout_s=0)
            records.append(kept(paths))
        with Producer(paths, "rollout-0", {}) as producer:
            producer._source.clear()
            producer.put([group(0, version=1), group(8), group(10)])
        records.append(kept(paths))
        produce(paths, "rollout-1", [9, 11, 13])
        whole_batch(seq, 3, timeout_s=0)
        records.append(kept(paths))
        shard = next(uuid for uuid, each in records[-1]["shards"].items() if each[1] == 13)
        seq._append(SkippedGroup(13, shard, SIBLINGS, 4, 13, solved=True, reward=1.0))
        records.append(kept(paths))
    return paths, records


def test_from_wherever_it_goes_on_the_counts_are_those_of_all(history):
    paths, records = history
    assert audit(paths)[:5] == (14 * SIBLINGS, 12 * SIBLINGS, 0, SIBLINGS, 0)
    assert [gone_on_with(paths, record) for record in records] == [5, 4, 3, 3, 1, 0]


def test_a_record_about_a_shard_that_was_done_with_has_all_counted_again(history):
    paths, records = history
    with sequencer(paths) as seq:
        done = whole_batch(seq, 1, timeout_s=0).parts[0].uuid
        seq._append(IgnoredShard(done, SIBLINGS))
    assert done not in records[-1]["shards"]
    assert gone_on_with(paths, records[-1]) > 1


def test_little_is_kept_of_what_is_done_with(history):
    _, records = history
    assert records[2]["shards"] == {}
    (ignored,) = records[-1]["shards"].values()
    assert ignored == [3 * SIBLINGS, 10, 2 * SIBLINGS, [SIBLINGS]]


def test_a_plan_that_was_cut_back_is_counted_again(history):
    paths, records = history
    paths.plan_claim(3).touch()
    paths.plan_log(3).write_bytes(encode({"parent": 2, "keep": 2}))
    assert audit(paths).planned == 2 * P * SIBLINGS
    assert [gone_on_with(paths, record) for record in records] == [2, 1, 0, 0, 2, 2]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda record: [],
        lambda record: record | {"sums": [1]},
        lambda record: record | {"base": [9, 1, 0]},
        lambda record: {key: record[key] for key in record if key != "logs"},
    ],
)
def test_of_what_is_no_record_nothing_is_taken(history, spoil):
    paths, records = history
    gone_on_with(paths, spoil(records[-1]))


def test_counts_are_kept_by_who_looks_and_only_for_the_run_that_they_are_of(
    history, tmp_path, monkeypatch
):
    paths, _ = history
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert counted.count(paths) == audit(paths)
    assert not counted.folder().exists(), "too little to be worth it"
    monkeypatch.setattr(counted, "KEPT_RECORDS", 1)
    assert counted.count(paths) == audit(paths)
    (file,) = counted.folder().iterdir()
    assert (counted.folder().stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"sums": [7, *record["sums"][1:]]}))
    assert counted.count(paths).committed == 7, "what was kept is gone on with"
    file.chmod(0o622)
    assert counted.count(paths) == audit(paths), "others may have written it"
    file.write_text("{")
    file.chmod(0o600)
    assert counted.count(paths) == audit(paths)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert counted.count(paths) == audit(paths)
