"""Who follows the plan is given every batch once, and none that a later trainer cuts off."""

import pytest
from bus_fixtures import PRODUCERS, SIBLINGS, P, batch, make_bus, produce, produce_all, sequencer

from relax_hpc.bus.credits import CreditTail, CreditWriter
from relax_hpc.bus.frames import FrameWriter
from relax_hpc.bus.plan import PlanFollower, PlanTail, claim_fence, read_chain
from relax_hpc.bus.reader import Reader


@pytest.fixture
def paths(tmp_path):
    made = make_bus(tmp_path)
    produce_all(made, 5 * P)
    return made


def follow(paths, position=None):
    return PlanFollower(paths, CreditTail(paths), position)


def given(follower, paths):
    """The guids of the next batch, as a reader finds them; None while there is none."""
    batch = follower.next_batch()
    if batch is None:
        return None
    return sorted(set(Reader(paths).index(batch).guid.tolist()))


def guids(step):
    return [*range((step - 1) * P, step * P)]


def test_batches_are_given_in_their_order_once_they_are_planned(paths):
    follower = follow(paths)
    assert follower.next_batch() is None
    with sequencer(paths) as seq:
        assert follower.next_batch() is None
        batch(seq, 1)
        assert given(follower, paths) == guids(1)
        assert follower.position == seq.position
        for step in (2, 3):
            batch(seq, step)
        assert [given(follower, paths) for _ in range(3)] == [guids(2), guids(3), None]
        later = follow(paths, follower.position)
        batch(seq, 4)
        assert given(later, paths) == guids(4) and later.position == seq.position
        assert len(Reader(paths).rows(follower.next_batch(), range(P * SIBLINGS))) == P * SIBLINGS


def test_a_batch_in_portions_is_one_and_complete_with_the_last(tmp_path):
    paths = make_bus(tmp_path)
    follower = follow(paths)
    with sequencer(paths) as seq:
        produce(paths, PRODUCERS[0], (0, 2))
        assert not seq.next_portion(1, timeout_s=5, min_tokens=1).last
        assert follower.next_batch() is None
        produce(paths, PRODUCERS[1], (1, 3))
        assert seq.next_portion(1, timeout_s=5).last
    assert given(follower, paths) == guids(1)


def slip_in(paths, fence, step):
    """What a fenced trainer writes that looked at the credits before it was fenced."""
    record = read_chain(paths, below=fence + 1).steps[-1]
    log = FrameWriter(paths.plan_log(fence))
    log.append(record._replace(step=step)._asdict())
    log.close()


def test_what_a_superseded_trainer_slips_in_is_not_given(paths):
    follower = follow(paths)
    with sequencer(paths) as first:
        batch(first, 1)
        assert given(follower, paths) == guids(1)
        with sequencer(paths, first.position) as second:
            slip_in(paths, first.fence, 2)
            assert follower.next_batch() is None
            batch(second, 2)
            assert given(follower, paths) == guids(2)
            assert follower.position == second.position


def test_while_a_trainer_has_not_said_what_it_keeps_nothing_is_given(paths):
    """It may find what its predecessor slipped in, or not: the one after it decides."""
    follower = follow(paths)
    with sequencer(paths) as first:
        batch(first, 1)
        assert given(follower, paths) == guids(1)
        CreditWriter(paths, claim_fence(paths)).close()  # and died there
        slip_in(paths, first.fence, 2)
        assert follower.next_batch() is None
    with sequencer(paths, follower.position) as third:
        assert third.num_planned == 2
        assert follower.next_batch().step == 2
        assert follower.next_batch() is None
        batch(third, 3)
        assert follower.next_batch().step == 3


def test_a_tail_gives_each_record_once_those_that_are_summed_up_too(paths, monkeypatch):
    monkeypatch.setattr("relax_hpc.bus.sequencer.SNAPSHOT_RECORDS", 1)
    late = PlanTail(paths, CreditTail(paths))
    early, given = PlanTail(paths, CreditTail(paths)), []
    position = None
    for step in range(1, 5):
        with sequencer(paths, position) as seq:  # another trainer for each step
            batch(seq, step)
            seq.release(step)
            position = seq.position
            given += early.look()
    everything = list(enumerate((each.record for each in read_chain(paths).records), 1))
    assert [record.step for _, record in given] == [1, 2, 3, 4]
    assert given == everything == late.look()
    assert (early.look(), late.look()) == ([], [])
    assert read_chain(paths, whole=False).base.records > 0
