"""Groups that come late, and batches that are handed out in portions."""

import bus_fixtures as made
import pytest

from relax_hpc.bus.audit import audit
from relax_hpc.bus.credits import CreditTail, Owed
from relax_hpc.bus.producer import Producer
from relax_hpc.errors import FencedError, PeerTimeoutError
from relax_hpc.schema import PromptGroup


def portion(seq, step, min_tokens):
    return seq.next_portion(step, timeout_s=0, min_tokens=min_tokens)


def test_portions_are_handed_out_as_soon_as_they_hold_enough_and_make_up_the_batch(tmp_path):
    paths = made.make_bus(tmp_path)
    with made.sequencer(paths) as seq:
        made.produce(paths, "rollout-1", [3])
        with pytest.raises(
            PeerTimeoutError, match=r"rollout-0 owes \[0, 2\].*rollout-1 owes \[1\]"
        ):
            portion(seq, 1, 2 * made.TOKENS)
        made.produce(paths, "rollout-0", [2, 4])
        first = portion(seq, 1, 2 * made.TOKENS)
        assert (first.guids, first.portion, first.last) == ([2, 3], 0, False)
        assert (first.num_tokens, first.num_trajectories) == (2 * made.TOKENS, 2 * made.SIBLINGS)
        made.produce(paths, "rollout-0", [0])
        with pytest.raises(PeerTimeoutError, match=r"lacks prompt groups.*rollout-1 owes \[1\]"):
            portion(seq, 1, 2 * made.TOKENS)
        made.produce(paths, "rollout-1", [1])
        rest = portion(seq, 1, 100 * made.TOKENS)  # never waits for more than the batch has
        assert (rest.guids, rest.portion, rest.last) == ([0, 1], 1, True)
        assert [t.guid for t in made.rows_of(paths, first, rest)] == [2, 2, 3, 3, 0, 0, 1, 1]
    counts = audit(paths)
    assert (counts.planned, counts.steps, counts.dropped) == (made.P * made.SIBLINGS, 1, 0)


def test_a_restart_replays_the_same_portions_and_completes_the_batch(tmp_path):
    paths = made.make_bus(tmp_path)
    made.produce(paths, "rollout-0", [0, 2])
    with made.sequencer(paths) as seq:
        first = portion(seq, 1, made.TOKENS)
        assert not first.last
    made.produce(paths, "rollout-1", [1, 3, 5, 7])
    made.produce(paths, "rollout-0", [4, 6])
    with made.sequencer(paths) as seq:
        assert portion(seq, 1, 100 * made.TOKENS) == first  # as planned, whatever is asked for now
        rest = portion(seq, 1, 100 * made.TOKENS)
        assert (rest.guids, rest.last) == ([1, 3], True)
        position = seq.position
    with made.sequencer(paths) as seq:
        assert made.batch(seq, 1).guids == [0, 2, 1, 3]
        assert seq.position == position._replace(fence=seq.fence)
    with made.sequencer(paths, position) as seq:
        assert made.batch(seq, 2).guids == [4, 5, 6, 7]


def test_a_superseded_trainer_is_not_even_given_what_was_planned(tmp_path):
    paths = made.make_bus(tmp_path)
    made.produce(paths, "rollout-0", [0, 2])
    with made.sequencer(paths) as seq:
        portion(seq, 1, made.TOKENS)
    zombie = made.sequencer(paths)
    with made.sequencer(paths), pytest.raises(FencedError, match="fence 3 was claimed after 2"):
        portion(zombie, 1, made.TOKENS)


def test_between_two_portions_the_position_is_that_of_the_step_before(tmp_path):
    paths = made.make_bus(tmp_path)
    made.produce(paths, "rollout-0", [0, 2])
    with made.sequencer(paths) as seq:
        begun = seq.position
        assert begun[1:] == (0, 0)
        assert not portion(seq, 1, made.TOKENS).last
        assert seq.position == begun
        made.produce(paths, "rollout-1", [1, 3, 5])
        assert portion(seq, 1, made.TOKENS).last
        saved = seq.position
        assert saved.step == 1
        first = portion(seq, 2, made.TOKENS)
        assert not first.last
        assert seq.position == saved  # of the step that a trainer saves that is told to end here
    with made.sequencer(paths, saved) as seq:
        assert seq.position == saved._replace(fence=seq.fence)
        assert portion(seq, 2, made.TOKENS) == first


def test_drop_has_groups_that_come_too_late_sampled_again(tmp_path):
    paths = made.make_bus(tmp_path)
    drop = {"over_age": "drop", "max_staleness": 1}
    with made.sequencer(paths, **drop) as seq, Producer(paths, "rollout-0", {}) as producer:
        made.produce(paths, "rollout-1", [1, 3, 5, 7, 9, 11, 13, 15])
        assert made.batch(seq, 1).guids == [1, 3, 5, 7]  # whoever is there first
        producer.put([made.group(0, version=0)])  # one step stale in step 2, which is allowed
        second = made.batch(seq, 2)
        assert second.guids == [0, 9, 11, 13]
        producer.put([made.group(2, version=0), made.group(4, version=1)])
        with pytest.raises(PeerTimeoutError, match=r"rollout-0 owes \[2, 6, 8\]"):
            made.batch(seq, 3)  # in step 3 version 0 is two steps stale
        uuid = second.parts[1].uuid
        credit = CreditTail(paths).latest()
        assert [owed.guid for owed in credit.owed] == [2, 15]
        assert producer.owe_again(credit.owed) == [2]
        producer.put([made.group(2, version=2), made.group(6, version=2)])
        with Producer(paths, "rollout-1", {}) as other:
            assert other.owe_again([Owed(9, uuid)]) == [9]
            assert other.owe_again(credit.owed) == [15]
            other.put([made.group(15, version=2)])
        third = made.batch(seq, 3)
        assert (third.guids, third.policy_version_min) == ([2, 4, 6, 15], 1)
        assert CreditTail(paths).latest().owed[0] in credit.owed  # until the next grant
        seq.advance(step=3, policy_version=3)
        assert CreditTail(paths).latest().owed == ()
    with made.sequencer(paths, **drop) as seq:
        assert [made.batch(seq, s).guids for s in (2, 3)] == [second.guids, third.guids]
        assert seq.duplicates == 0
    assert [t.policy_version_max for t in made.rows_of(paths, third)] == [2, 2, 1, 1, 2, 2, 2, 2]
    counts = audit(paths)
    assert (counts.over_age, counts.dropped, counts.duplicates) == (2 * made.SIBLINGS, 0, 0)
    assert counts.max_staleness == 1
    assert counts.committed == counts.planned + counts.over_age


def test_a_group_is_as_old_as_the_oldest_of_its_siblings(tmp_path):
    paths = made.make_bus(tmp_path)
    siblings = [made.trajectory(0, 0, version=3), made.trajectory(0, 1, version=1)]
    with Producer(paths, "rollout-0", {}) as producer:
        producer.put([PromptGroup(0, siblings)])
    with made.sequencer(paths, prompts_per_step=1) as seq:
        assert made.batch(seq, 1).policy_version_min == 1


def test_what_was_dropped_is_owed_once_whoever_says_it_again(tmp_path):
    paths = made.make_bus(tmp_path)
    with Producer(paths, "rollout-0", {}) as producer:
        producer.put([made.group(0), made.group(2)])
        owed = [Owed(0, producer._source[0].uuid), Owed(2, "0" * 32)]
        assert producer.owe_again(owed) == [0]
        producer.put([made.group(0)])
        assert producer.owe_again(owed) == []  # the shard that was dropped is another one
        assert producer.committed == {0, 2}


def test_what_is_retired_follows_the_lowest_group_that_is_not_trained_on(tmp_path):
    paths = made.make_bus(tmp_path)
    with made.sequencer(paths, over_age="mask", keep_steps=1) as seq:
        made.produce(paths, "rollout-1", [1, 3, 5, 7])
        made.batch(seq, 1)
        made.produce(paths, "rollout-0", [0, 2, 4, 6])
        made.batch(seq, 2)
        made.produce(paths, "rollout-1", [9, 11, 13, 15])
        made.batch(seq, 3)
        retired = []
        for step in (1, 2, 3):
            seq.release(step)
            retired.append(CreditTail(paths).latest().retired_guid_below)
    assert retired == [0, 0, 8]  # nothing for step 1 alone: guid 0 is open; step 3 is kept


def test_a_partial_group_is_kept_for_its_owner_and_never_planned(tmp_path):
    paths = made.make_bus(tmp_path)
    with Producer(paths, "rollout-0", {}) as producer:
        producer.put_partial([made.group(0, response=2), made.group(2, response=0)])
        producer.put_partial([made.group(0, response=3)])
        assert producer.committed == set()
    with Producer(paths, "rollout-0", {}) as producer:
        for guid, response in ((0, 3), (2, 0)):
            sent = made.group(guid, response=response).trajectories
            assert all(map(made.same, producer.partial[guid].trajectories, sent))
        producer.put([made.group(0)])
        assert set(producer.partial) == {2}
        assert producer.collect(0) == 1  # the second partial shard; the first holds group 2 still
        made.produce(paths, "rollout-1", [1, 3])
        with (
            made.sequencer(paths) as seq,
            pytest.raises(PeerTimeoutError, match=r"rollout-0 owes \[2\]"),
        ):
            made.batch(seq, 1)
        producer.put([made.group(2)])
        assert producer.collect(0) == 1
    with Producer(paths, "rollout-0", {}) as producer:
        assert (producer.partial, producer.committed) == ({}, {0, 2})
        with made.sequencer(paths) as seq:
            assert made.batch(seq, 1).guids == [0, 1, 2, 3]
    counts = audit(paths)
    assert (counts.committed, counts.dropped) == (made.P * made.SIBLINGS, 0)


def test_what_is_kept_of_a_dropped_group_that_is_sampled_again_outlives_a_restart(tmp_path):
    paths = made.make_bus(tmp_path)
    with Producer(paths, "rollout-0", {}) as producer:
        producer.put_partial([made.group(2, response=1)])
        producer.put([made.group(0), made.group(2)])
        assert producer.owe_again([Owed(0, producer._source[0].uuid)]) == [0]  # it came too late
        producer.put_partial([made.group(0, response=2)])
    with Producer(paths, "rollout-0", {}) as producer:
        assert producer.committed == {0, 2}  # the shard is there until the trainer releases it
        assert set(producer.partial) == {0}
        assert producer.collect(0) == 1  # what was kept of group 2 before it was finished
        assert producer.owe_again([Owed(0, producer._source[0].uuid)]) == [0]
        assert len(producer.partial[0].trajectories[0].token_ids) == 3 + 2
        producer.put([made.group(0)])
        assert producer.partial == {} and producer.collect(0) == 1


def test_a_snapshot_of_what_was_cut_off_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr("relax_hpc.bus.sequencer.SNAPSHOT_RECORDS", 1)
    paths = made.make_bus(tmp_path)
    made.produce_all(paths, 3 * made.P)
    zombie = made.sequencer(paths)
    made.batch(zombie, 1)
    with made.sequencer(paths) as owner:
        monkeypatch.setattr(zombie._credits, "check_fenced", lambda: None)
        zombie._log.append(zombie._portions[1][0]._replace(step=2)._asdict())
        zombie._count(zombie._portions[1][0]._replace(step=2), 1, zombie._log.end)
        zombie._sum_up(2, zombie._places[2])
        assert len(list(paths.plan.glob("snap.*"))) == 1
        assert made.batch(owner, 2).guids == [4, 5, 6, 7]
    with made.sequencer(paths) as seq:
        assert made.batch(seq, 2).guids == [4, 5, 6, 7]
        assert seq._base.records == 0
