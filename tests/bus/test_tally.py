"""Counts that are gone on with are those of counting everything again."""

import itertools
import json

import pytest
from bus_fixtures import SIBLINGS, P, batch, group, make_bus, produce, produce_all, sequencer
from bus_fixtures import judge as judge_rewards

from relax_hpc.bus.audit import BusAudit, Tally, audit
from relax_hpc.bus.frames import encode
from relax_hpc.bus.plan import IgnoredShard, SkippedGroup
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.tools import verify
from relax_hpc.errors import PeerTimeoutError
from relax_hpc.runs import summary
from relax_hpc.schema import FinishReason


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
    produce_all(paths, 2 * P)
    records.append(kept(paths))
    with sequencer(paths) as seq:
        for step in (1, 2):
            batch(seq, step)
            records.append(kept(paths))
        with Producer(paths, "rollout-0", {}) as producer:
            producer._source.clear()
            producer.put([group(0, version=1), group(8), group(10)])
        records.append(kept(paths))
        produce(paths, "rollout-1", [9, 11, 13])
        batch(seq, 3)
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
        done = batch(seq, 1).parts[0].uuid
        seq._append(IgnoredShard(done, SIBLINGS))
    assert done not in records[-1]["shards"]
    assert gone_on_with(paths, records[-1]) > 1


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
    assert summary.count(paths) == audit(paths)
    assert not summary.folder().exists(), "too little to be worth it"
    monkeypatch.setattr(summary, "KEPT_RECORDS", 1)
    assert summary.count(paths) == audit(paths)
    (file,) = summary.folder().iterdir()
    assert (summary.folder().stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"sums": [7, *record["sums"][1:]]}))
    assert summary.count(paths).committed == 7, "what was kept is gone on with"
    file.chmod(0o622)
    assert summary.count(paths) == audit(paths), "others may have written it"
    file.write_text("{")
    file.chmod(0o600)
    assert summary.count(paths) == audit(paths)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert summary.count(paths) == audit(paths)


# U03: whatever becomes of a row, the ledger says it

FATES = ("trained", "solved", "retired", "repeated", "over age")


def judge(index):
    """As that of the fixtures, and tells groups that nobody was asked for."""
    retired = (index.finish.reshape(-1, SIBLINGS) == FinishReason.RETIRED).all(axis=1)
    verdicts = zip(judge_rewards(index), retired, strict=True)
    return [verdict._replace(retired=bool(is_retired)) for verdict, is_retired in verdicts]


def made(guid, fate):
    version, reward = 0 if fate == "over age" else 90, 1.0 if fate in FATES[1:3] else None
    rows = group(guid, version=version, reward=reward)
    if fate != "retired":
        return rows
    nobody = [row._replace(finish=FinishReason.RETIRED) for row in rows.trajectories]
    return rows._replace(trajectories=nobody)


def plan_all(seq, step):
    """Plans every batch that there is; returns the first step that lacks groups."""
    while True:
        try:
            batch(seq, step)
        except PeerTimeoutError:
            return step
        step += 1


def test_whatever_becomes_of_rows_that_lie_in_a_shard_together_the_ledger_adds_up(tmp_path):
    paths, guids = make_bus(tmp_path, ["rollout-0"]), itertools.count(2)
    options = {"prompts_per_step": 1, "over_age": "drop", "max_staleness": 1, "judge": judge}
    shards = [{next(guids): fate for fate in pair} for pair in itertools.product(FATES, repeat=2)]
    lost = {guid for pair in shards[3::4] for guid in pair}
    fates = {guid: fate for pair in shards for guid, fate in pair.items() if guid not in lost}
    again = lost | {guid for guid, fate in fates.items() if fate in FATES[3:]}
    records = [kept(paths)]
    with Producer(paths, "rollout-0", {}) as producer:
        producer.put([group(0), group(1)])
        with sequencer(paths, **options) as seq:
            step = plan_all(seq, 1)
            for pair in shards:
                producer.put([made(*each) for each in pair.items()])
            for number in range(3, len(shards), 4):
                paths.shard("rollout-0", 1, 1 + number).write_bytes(b"")
            records.append(kept(paths))
            step = plan_all(seq, step)  # policy 0 is over age by now
            records.append(kept(paths))
        producer._source.clear()
        producer.put([made(guid, "trained") for guid in sorted(again)])
        with sequencer(paths, **options) as seq:
            plan_all(seq, step)
            records.append(kept(paths))
    # Each fate is there ten times. Six shards are lost: 2, 2, 2, 4, 2 groups, in FATES' order.
    counts = audit(paths)
    assert [list(fates.values()).count(fate) for fate in FATES] == [8, 8, 8, 6, 8]
    assert counts == BusAudit(
        committed=2 * (2 + 50 + len(again)), planned=2 * (2 + 12 + 8 + 6 + 8), planned_twice=0,
        duplicates=2 * 6, dropped=0, steps=36, max_staleness=1, over_age=2 * 8, damaged=2 * 12,
        skipped=2 * 16, retired=2 * 8,
    )  # fmt: skip
    used = counts.planned + counts.duplicates + counts.over_age + counts.damaged + counts.skipped
    assert counts.committed == used
    assert [Tally.of(paths, record).counts() for record in records] == [counts] * 4
    found = verify.verify(paths, lambda: [], lambda done, total: None)
    assert not [each.what for each in found.findings if each.kind == "count"]
