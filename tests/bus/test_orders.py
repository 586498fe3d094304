"""Groups that come late, and batches that are handed out in portions."""

import pytest
from bus_fixtures import (
    SIBLINGS,
    TOKENS,
    P,
    batch,
    group,
    make_bus,
    produce,
    produce_all,
    rows_of,
    same,
    sequencer,
    trajectory,
)

from relax_hpc.bus.audit import audit
from relax_hpc.bus.credits import CreditTail, Owed
from relax_hpc.bus.plan import read_chain
from relax_hpc.bus.producer import Producer
from relax_hpc.errors import BusError, FencedError, PeerTimeoutError
from relax_hpc.schema import PromptGroup


def portion(seq, step, min_tokens):
    return seq.next_portion(step, timeout_s=0, min_tokens=min_tokens)


def test_portions_are_handed_out_as_soon_as_they_hold_enough_and_make_up_the_batch(tmp_path):
    paths = make_bus(tmp_path)
    with sequencer(paths) as seq:
        produce(paths, "rollout-1", [3])
        with pytest.raises(
            PeerTimeoutError, match=r"rollout-0 owes \[0, 2\].*rollout-1 owes \[1\]"
        ):
            portion(seq, 1, 2 * TOKENS)
        produce(paths, "rollout-0", [2, 4])
        first = portion(seq, 1, 2 * TOKENS)
        assert (first.guids, first.portion, first.last) == ([2, 3], 0, False)
        assert (first.num_tokens, first.num_trajectories) == (2 * TOKENS, 2 * SIBLINGS)
        produce(paths, "rollout-0", [0])
        with pytest.raises(PeerTimeoutError, match=r"lacks prompt groups.*rollout-1 owes \[1\]"):
            portion(seq, 1, 2 * TOKENS)
        produce(paths, "rollout-1", [1])
        rest = portion(seq, 1, 100 * TOKENS)  # never waits for more than the batch has
        assert (rest.guids, rest.portion, rest.last) == ([0, 1], 1, True)
        assert [t.guid for t in rows_of(paths, first, rest)] == [2, 2, 3, 3, 0, 0, 1, 1]
    counts = audit(paths)
    assert (counts.planned, counts.steps, counts.dropped) == (P * SIBLINGS, 1, 0)


def test_a_restart_replays_the_same_portions_and_completes_the_batch(tmp_path):
    paths = make_bus(tmp_path)
    produce(paths, "rollout-0", [0, 2])
    with sequencer(paths) as seq:
        first = portion(seq, 1, TOKENS)
        assert not first.last
    produce(paths, "rollout-1", [1, 3, 5, 7])
    produce(paths, "rollout-0", [4, 6])
    with sequencer(paths) as seq:
        assert portion(seq, 1, 100 * TOKENS) == first  # as planned, whatever is asked for now
        rest = portion(seq, 1, 100 * TOKENS)
        assert (rest.guids, rest.last) == ([1, 3], True)
        position = seq.position
    with sequencer(paths) as seq:
        assert batch(seq, 1).guids == [0, 2, 1, 3]
        assert seq.position == position._replace(fence=seq.fence)
    with sequencer(paths, position) as seq:
        assert batch(seq, 2).guids == [4, 5, 6, 7]


def test_a_superseded_trainer_is_not_even_given_what_was_planned(tmp_path):
    paths = make_bus(tmp_path)
    produce(paths, "rollout-0", [0, 2])
    with sequencer(paths) as seq:
        portion(seq, 1, TOKENS)
    zombie = sequencer(paths)
    with sequencer(paths), pytest.raises(FencedError, match="fence 3 was claimed after 2"):
        portion(zombie, 1, TOKENS)


def test_between_two_portions_the_position_is_that_of_the_step_before(tmp_path):
    paths = make_bus(tmp_path)
    produce(paths, "rollout-0", [0, 2])
    with sequencer(paths) as seq:
        begun = seq.position
        assert begun[1:] == (0, 0)
        assert not portion(seq, 1, TOKENS).last
        assert seq.position == begun
        produce(paths, "rollout-1", [1, 3, 5])
        assert portion(seq, 1, TOKENS).last
        saved = seq.position
        assert saved.step == 1
        first = portion(seq, 2, TOKENS)
        assert not first.last
        assert seq.position == saved  # of the step that a trainer saves that is told to end here
    with sequencer(paths, saved) as seq:
        assert seq.position == saved._replace(fence=seq.fence)
        assert portion(seq, 2, TOKENS) == first


def test_drop_has_groups_that_come_too_late_sampled_again(tmp_path):
    paths = make_bus(tmp_path)
    drop = {"over_age": "drop", "max_staleness": 1}
    with sequencer(paths, **drop) as seq, Producer(paths, "rollout-0", {}) as producer:
        produce(paths, "rollout-1", [1, 3, 5, 7, 9, 11, 13, 15])
        assert batch(seq, 1).guids == [1, 3, 5, 7]  # whoever is there first
        producer.put([group(0, version=0)])  # one step stale in step 2, which is allowed
        second = batch(seq, 2)
        assert second.guids == [0, 9, 11, 13]
        producer.put([group(2, version=0), group(4, version=1)])
        with pytest.raises(PeerTimeoutError, match=r"rollout-0 owes \[2, 6, 8\]"):
            batch(seq, 3)  # in step 3 version 0 is two steps stale
        uuid = second.parts[1].uuid
        credit = CreditTail(paths).latest()
        assert [owed.guid for owed in credit.owed] == [2, 15]
        assert producer.owe_again(credit.owed) == [2]
        producer.put([group(2, version=2), group(6, version=2)])
        with Producer(paths, "rollout-1", {}) as other:
            assert other.owe_again([Owed(9, uuid)]) == [9]
            assert other.owe_again(credit.owed) == [15]
            other.put([group(15, version=2)])
        third = batch(seq, 3)
        assert (third.guids, third.policy_version_min) == ([2, 4, 6, 15], 1)
        assert CreditTail(paths).latest().owed[0] in credit.owed  # until the next grant
        seq.advance(step=3, policy_version=3)
        assert CreditTail(paths).latest().owed == ()
    with sequencer(paths, **drop) as seq:
        assert [batch(seq, s).guids for s in (2, 3)] == [second.guids, third.guids]
        assert seq.duplicates == 0
    assert [t.policy_version_max for t in rows_of(paths, third)] == [2, 2, 1, 1, 2, 2, 2, 2]
    counts = audit(paths)
    assert (counts.over_age, counts.dropped, counts.duplicates) == (2 * SIBLINGS, 0, 0)
    assert counts.max_staleness == 1
    assert counts.committed == counts.planned + counts.over_age


def test_a_group_is_as_old_as_the_oldest_of_its_siblings(tmp_path):
    paths = make_bus(tmp_path)
    siblings = [trajectory(0, 0, version=3), trajectory(0, 1, version=1)]
    with Producer(paths, "rollout-0", {}) as producer:
        producer.put([PromptGroup(0, siblings)])
    with sequencer(paths, prompts_per_step=1) as seq:
        assert batch(seq, 1).policy_version_min == 1


def test_what_was_dropped_is_owed_once_whoever_says_it_again(tmp_path):
    paths = make_bus(tmp_path)
    with Producer(paths, "rollout-0", {}) as producer:
        producer.put([group(0), group(2)])
        owed = [Owed(0, producer._source[0].uuid), Owed(2, "0" * 32)]
        assert producer.owe_again(owed) == [0]
        producer.put([group(0)])
        assert producer.owe_again(owed) == []  # the shard that was dropped is another one
        assert producer.committed == {0, 2}


def test_a_restarted_producer_owes_again_what_was_dropped(tmp_path):
    paths = make_bus(tmp_path)
    produce(paths, "rollout-0", [0, 2])
    produce(paths, "rollout-1", [1, 3], version=3)
    produce(paths, "rollout-0", [4], version=3)
    with sequencer(paths, over_age="drop", max_staleness=0) as seq:
        seq._portions = {1: [], 2: [], 3: []}
        seq._places = {3: None}
        with pytest.raises(PeerTimeoutError):
            seq.next_portion(4, timeout_s=0)
    owed = CreditTail(paths).latest().owed
    with Producer(paths, "rollout-0", {}) as producer:
        assert producer.committed == {0, 2, 4}
        assert producer.owe_again(owed) == [0, 2]
        assert producer.committed == {4}
    with sequencer(paths, over_age="drop", max_staleness=0) as seq:  # the drops are on record
        assert seq._intake.list_owed_again() == [(r.guid, r.uuid) for r in owed]


def test_mask_takes_what_is_there_and_drops_nothing(tmp_path):
    paths = make_bus(tmp_path)
    with sequencer(paths, over_age="mask", max_staleness=0) as seq:
        produce(paths, "rollout-1", [1, 3, 5, 7])
        produce(paths, "rollout-0", [2, 4])
        assert batch(seq, 1).guids == [1, 2, 3, 4]
        produce(paths, "rollout-0", [0, 6])
        assert batch(seq, 2).guids == [0, 5, 6, 7]
        assert CreditTail(paths).latest().owed == ()


def test_what_is_retired_follows_the_lowest_group_that_is_not_trained_on(tmp_path):
    paths = make_bus(tmp_path)
    with sequencer(paths, over_age="mask", keep_steps=1) as seq:
        produce(paths, "rollout-1", [1, 3, 5, 7])
        batch(seq, 1)
        produce(paths, "rollout-0", [0, 2, 4, 6])
        batch(seq, 2)
        produce(paths, "rollout-1", [9, 11, 13, 15])
        batch(seq, 3)
        retired = []
        for step in (1, 2, 3):
            seq.release(step)
            retired.append(CreditTail(paths).latest().retired_guid_below)
    assert retired == [0, 0, 8]  # nothing for step 1 alone: guid 0 is open; step 3 is kept


def test_a_partial_group_is_kept_for_its_owner_and_never_planned(tmp_path):
    paths = make_bus(tmp_path)
    with Producer(paths, "rollout-0", {}) as producer:
        producer.put_partial([group(0, response=2), group(2, response=0)])
        producer.put_partial([group(0, response=3)])
        assert producer.committed == set()
    with Producer(paths, "rollout-0", {}) as producer:
        for guid, response in ((0, 3), (2, 0)):
            sent = group(guid, response=response).trajectories
            assert all(map(same, producer.partial[guid].trajectories, sent))
        producer.put([group(0)])
        assert set(producer.partial) == {2}
        assert producer.collect(0) == 1  # the second partial shard; the first holds group 2 still
        produce(paths, "rollout-1", [1, 3])
        with (
            sequencer(paths) as seq,
            pytest.raises(PeerTimeoutError, match=r"rollout-0 owes \[2\]"),
        ):
            batch(seq, 1)
        producer.put([group(2)])
        assert producer.collect(0) == 1
    with Producer(paths, "rollout-0", {}) as producer:
        assert (producer.partial, producer.committed) == ({}, {0, 2})
        with sequencer(paths) as seq:
            assert batch(seq, 1).guids == [0, 1, 2, 3]
    counts = audit(paths)
    assert (counts.committed, counts.dropped) == (P * SIBLINGS, 0)


def test_what_is_kept_of_a_dropped_group_that_is_sampled_again_outlives_a_restart(tmp_path):
    paths = make_bus(tmp_path)
    with Producer(paths, "rollout-0", {}) as producer:
        producer.put_partial([group(2, response=1)])
        producer.put([group(0), group(2)])
        assert producer.owe_again([Owed(0, producer._source[0].uuid)]) == [0]  # it came too late
        producer.put_partial([group(0, response=2)])
    with Producer(paths, "rollout-0", {}) as producer:
        assert producer.committed == {0, 2}  # the shard is there until the trainer releases it
        assert set(producer.partial) == {0}
        assert producer.collect(0) == 1  # what was kept of group 2 before it was finished
        assert producer.owe_again([Owed(0, producer._source[0].uuid)]) == [0]
        assert len(producer.partial[0].trajectories[0].token_ids) == 3 + 2
        producer.put([group(0)])
        assert producer.partial == {} and producer.collect(0) == 1


def test_a_restart_from_a_snapshot_goes_on_as_one_from_the_whole_plan(tmp_path, monkeypatch):
    monkeypatch.setattr("relax_hpc.bus.sequencer.SNAPSHOT_RECORDS", 3)
    paths = make_bus(tmp_path)
    drop = {"over_age": "drop", "max_staleness": 6}
    positions, plans = [None], [[]]
    for step in range(1, 13):
        lo = (step - 1) * P
        if step == 7:  # a group that comes very late, and a repetition
            produce(paths, "rollout-0", [0], version=0)
            with Producer(paths, "rollout-0", {}) as producer:
                producer._source.pop(lo - P, None)
                producer.put([group(lo - P, version=step)])
        produce(paths, "rollout-0", range(max(lo, 2), lo + P + 4, 2), version=step)
        produce(paths, "rollout-1", range(lo + 1, lo + P + 4, 2), version=step)
        with sequencer(paths, positions[-1], **drop) as seq:
            record = batch(seq, step)
            positions.append(seq.position)
            plans.append(record)
            seq.advance(step=step, policy_version=step)
            seq.release(step - 2)
    snapshots = sorted(file.name for file in paths.plan.glob("snap.*"))
    assert len(snapshots) == 2
    whole, short = (read_chain(paths, whole=whole) for whole in (True, False))
    assert 0 < len(short.records) < len(whole.records)
    assert whole.records[-len(short.records) :] == short.records
    assert short.num_records == whole.num_records
    assert len({guid for record in whole.steps for guid in record.guids}) == 12 * P
    for step in (10, 11, 12):  # every checkpoint that may still be resumed
        with sequencer(paths, positions[step - 1], **drop) as seq:
            assert batch(seq, step) == plans[step]
            with_snapshot = (seq.duplicates, seq._intake.waiting, seq._intake.list_owed_again())
        for file in paths.plan.glob("snap.*"):
            file.rename(file.with_suffix(".hidden"))
        with sequencer(paths, positions[step - 1], **drop) as seq:
            from_plan = (seq.duplicates, seq._intake.waiting, seq._intake.list_owed_again())
            assert from_plan == with_snapshot
            assert batch(seq, step) == plans[step]
        for file in paths.plan.glob("*.hidden"):
            file.rename(file.with_suffix(".json"))
    with pytest.raises(BusError, match="plan position"):
        sequencer(paths, None, **drop)  # its first shards are gone


def test_a_snapshot_of_what_was_cut_off_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr("relax_hpc.bus.sequencer.SNAPSHOT_RECORDS", 1)
    paths = make_bus(tmp_path)
    produce_all(paths, 3 * P)
    zombie = sequencer(paths)
    batch(zombie, 1)
    with sequencer(paths) as owner:
        monkeypatch.setattr(zombie._credits, "check_fenced", lambda: None)
        zombie._log.append(zombie._portions[1][0]._replace(step=2)._asdict())
        zombie._count(zombie._portions[1][0]._replace(step=2), 1, zombie._log.end)
        zombie._sum_up(2, zombie._places[2])
        assert len(list(paths.plan.glob("snap.*"))) == 1
        assert batch(owner, 2).guids == [4, 5, 6, 7]
    with sequencer(paths) as seq:
        assert batch(seq, 2).guids == [4, 5, 6, 7]
        assert seq._base.records == 0
