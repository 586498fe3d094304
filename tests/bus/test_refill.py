"""Groups that teach nothing are skipped, and further ones take their place in the batch."""

import os
import random
import shutil
import tempfile
from pathlib import Path

import bus_fixtures
import pytest
from bus_fixtures import PRODUCERS, SIBLINGS, TOKENS, P, group, judge, make_bus, whole_batch
from deaths import deaths

from relax_hpc.bus.audit import audit
from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.plan import SkippedGroup, read_chain
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.errors import PeerTimeoutError, SpreadError
from relax_hpc.runtime.paths import BusPaths

SOLVED, FAILED = 1.0, 0.0


@pytest.fixture
def tmp_path():
    """In memory: these tests write thousands of small files."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="refill", dir=memory) as folder:
        yield Path(folder)


def sequencer(paths, position=None, **kwargs):
    return bus_fixtures.sequencer(paths, position, **{"judge": judge, "max_staleness": 1} | kwargs)


def put(paths, guids, flat=(), **kwargs):
    """Commits groups by their owners, a shard each; those in `flat` have one reward."""
    for name in PRODUCERS:
        with Producer(paths, name, {}) as producer:
            for guid in guids:
                if PRODUCERS[guid % 2] == name:
                    reward = SOLVED if guid in flat else None
                    producer.put([group(guid, reward=reward, **kwargs)])


def batch(seq, step):
    return whole_batch(seq, step, timeout_s=0).guids


def ends(paths):
    return CreditTail(paths).latest().batch_ends


# which groups a batch has


def test_a_batch_has_the_next_groups_that_teach_and_the_others_are_on_record(tmp_path):
    paths = make_bus(tmp_path)
    put(paths, range(8), flat={1, 2, 6})
    with sequencer(paths) as seq:
        assert batch(seq, 1) == [0, 3, 4, 5]
        with pytest.raises(PeerTimeoutError, match=r"rollout-0 owes \[8, 10\].*owes \[9\]"):
            batch(seq, 2)
        put(paths, range(8, 12), flat={8, 9})
        with pytest.raises(PeerTimeoutError, match=r"rollout-0 owes \[12\]"):
            batch(seq, 2)
        put(paths, [12, 13])
        assert batch(seq, 2) == [7, 10, 11, 12]
        assert [group.guid for group in seq.find_skipped(1)] == [2, 6, 1]  # as they came
        assert [group.guid for group in seq.find_skipped(2)] == [8, 9]
    skipped = {group.guid: group for group in read_chain(paths).skipped}
    uuid = skipped[6].skipped
    assert skipped[6] == SkippedGroup(6, uuid, SIBLINGS, 1, 1000 - 6, solved=True, reward=1.0)
    counts = audit(paths)
    assert (counts.planned, counts.skipped, counts.dropped) == (8 * 2, 5 * 2, 0)
    assert counts.committed == counts.planned + counts.skipped + SIBLINGS  # 13 is there, too


def test_batches_are_those_groups_in_whatever_order_they_come_and_however_often_it_restarts(
    tmp_path,
):
    for seed in range(5):
        dice = random.Random(seed)
        paths = make_bus(tmp_path / str(seed))
        flat = {guid for guid in range(40) if dice.random() < 0.4}
        teaching = [guid for guid in range(40) if guid not in flat]
        coming = dice.sample(range(40), 40)
        step, found, position, guids = 1, {1: []}, None, []
        seq = sequencer(paths)
        while len(teaching) >= step * P:
            act = dice.choice(["come", "plan", "look", "restart"])
            if act == "come" and coming:
                put(paths, [coming.pop() for _ in range(min(len(coming), 6))], flat)
            if act == "look":
                seq.look()
            if act == "restart":
                seq.close()
                seq, found[step] = sequencer(paths, position), []
            if act == "plan":
                try:
                    record = seq.next_portion(step, timeout_s=-1, min_tokens=2 * TOKENS)
                except PeerTimeoutError:
                    continue
                found[step] += record.guids
                if record.last:
                    position, step = seq.position, step + 1
                    found[step] = []
        seq.close()
        guids = [sorted(found[step]) for step in sorted(found)][:-1]
        assert guids == [teaching[lo : lo + P] for lo in range(0, (step - 1) * P, P)], seed


# how far producers may go


def test_credits_say_where_batches_end_as_soon_as_something_is_skipped(tmp_path):
    paths = make_bus(tmp_path)
    with sequencer(paths) as seq:
        assert ends(paths) == ()
        put(paths, [0, 1, 5], flat={0, 5})
        seq.look()
        assert ends(paths) == (5, 10, 14)  # of steps 1 to 3
        put(paths, [2, 3, 4, 6], flat={6})
        assert batch(seq, 1) == [1, 2, 3, 4]
        seq.advance(step=1, policy_version=1)
        assert ends(paths) == (11, 15, 19)
        position = seq.position
    for start in (position, None):
        with sequencer(paths, start):
            assert ends(paths) == ((11, 15, 19) if start else (7, 11, 15))  # 7 is next


def test_no_token_is_staler_than_the_bound_whatever_is_skipped_after_it_was_sampled(tmp_path):
    """Producers that go as far as the credits let them, and groups that come in any order."""
    lag = 2
    for seed in range(2):
        dice = random.Random(seed)
        paths = make_bus(tmp_path / str(seed))
        producers = [Producer(paths, name, {}) for name in PRODUCERS]
        sampled, running = set(), {}
        with sequencer(paths, max_staleness=lag) as seq:
            for step in range(1, 5):
                for _ in range(100):
                    credit = CreditTail(paths).latest()
                    limits = credit.batch_ends or tuple(P * (step + n) for n in range(lag + 2))
                    for guid in range(limits[lag]):  # of batch `credit.step` + 1 + lag
                        if guid not in sampled:
                            sampled.add(guid)
                            running[guid] = credit.policy_version
                    if running:
                        guid = dice.choice(sorted(running))
                        reward = SOLVED if guid % 5 < 2 else None
                        version = running.pop(guid)
                        producers[guid % 2].put([group(guid, version=version, reward=reward)])
                    seq.look()
                    try:
                        record = whole_batch(seq, step, timeout_s=-1)
                    except PeerTimeoutError:
                        continue
                    break
                else:
                    pytest.fail("producers may not begin what the step waits for")
                assert record.policy_version_min >= step - 1 - lag
                seq.advance(step=step, policy_version=step)
        for producer in producers:
            producer.close()


# owners delete what is skipped


def test_a_shard_of_skipped_groups_goes_with_the_step_that_they_were_skipped_for(tmp_path):
    paths = make_bus(tmp_path)
    put(paths, range(12), flat={0, 2, 4, 5})
    with sequencer(paths) as seq:
        assert [batch(seq, step) for step in (1, 2)] == [[1, 3, 6, 7], [8, 9, 10, 11]]
        seq.release(1)
        assert CreditTail(paths).latest().retired_guid_below == 8
        with Producer(paths, "rollout-0", {}) as producer:
            assert producer.collect(8) == 4
            assert producer.committed == {8, 10}


def test_a_restart_from_a_snapshot_knows_what_was_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("relax_hpc.bus.sequencer.SNAPSHOT_RECORDS", 2)
    paths = make_bus(tmp_path)
    flat = {0, 5, 9, 10, 17, 21}
    put(paths, range(24), flat)
    with sequencer(paths, over_age="mask") as seq:
        for step in (1, 2, 3):
            batch(seq, step)
            seq.advance(step=step, policy_version=step)
            seq.release(step)
        position, before = seq.position, ends(paths)
    assert len(list(paths.plan.glob("snap.*"))) == 2
    assert len(read_chain(paths, whole=False).skipped) < len(read_chain(paths).skipped)
    with sequencer(paths, position) as seq:
        assert ends(paths) == before
        assert batch(seq, 4) == [16, 18, 19, 20]
        assert seq.duplicates == 0


# kills


def test_killing_the_trainer_at_any_system_call_leaves_the_same_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("relax_hpc.bus.sequencer.SNAPSHOT_RECORDS", 2)
    flat, steps = {0, 3, 4, 8, 9}, 2
    expected = [[1, 2, 5, 6], [7, 10, 11, 12]]

    def train(paths, checkpoint):
        """Two steps with a checkpoint each, which it returns all of; looks in between."""
        position = checkpoint[-1]["position"] if checkpoint else None
        seq = sequencer(paths, position)
        seq.release(len(checkpoint))
        for step in range(len(checkpoint) + 1, steps + 1):
            seq.look()
            record = whole_batch(seq, step, timeout_s=0)
            Reader(paths).index(record)
            seq.advance(step=step, policy_version=step)
            seq.look()
            checkpoint.append({"position": seq.position, "guids": record.guids})
            seq.release(step)

    put(make_bus(tmp_path / "0"), range(13), flat)
    for nth, life in deaths(monkeypatch):
        shutil.copytree(tmp_path / "0", tmp_path / str(nth))
        paths, checkpoint = BusPaths(tmp_path / str(nth) / "bus"), []
        with life:
            train(paths, checkpoint)
        train(paths, checkpoint)
        assert [each["guids"] for each in checkpoint] == expected, nth
        chain = read_chain(paths)
        assert sorted(group.guid for group in chain.skipped) == sorted(flat), nth
        counts = audit(paths)
        assert (counts.planned, counts.skipped) == (8 * SIBLINGS, 5 * SIBLINGS), nth
        assert (counts.planned_twice, counts.dropped, counts.duplicates) == (0, 0, 0), nth
        assert CreditTail(paths).latest().retired_guid_below == 13, nth
    assert nth > 20, "died at too few places"


# when there is nothing to learn


def test_a_run_whose_prompts_never_differ_ends_and_names_them(tmp_path):
    paths = make_bus(tmp_path)
    put(paths, range(12), flat=set(range(12)))
    with Producer(paths, "rollout-0", {}) as producer:
        producer.put([group(12, reward=FAILED)])
    with sequencer(paths, most_skipped=13) as seq, pytest.raises(PeerTimeoutError):
        batch(seq, 1)
    with (
        sequencer(paths, most_skipped=12) as seq,
        pytest.raises(SpreadError, match=r"step 1 .* 13 prompt groups were skipped") as error,
    ):
        batch(seq, 1)
    said = str(error.value)
    assert "12 are solved (row 989, 990, 991, 992, 993, 994, 995, 996 and 4 more of" in said
    assert "1 are never solved (row 988 of the data)" in said and error.value.is_final


def test_skips_of_earlier_steps_do_not_count_towards_the_limit(tmp_path):
    paths = make_bus(tmp_path)
    put(paths, range(14), flat={0, 1, 2, 7, 8, 9})
    with sequencer(paths, most_skipped=5) as seq, pytest.raises(SpreadError):
        batch(seq, 1)
    paths = make_bus(tmp_path / "later")
    put(paths, range(7), flat={0, 1, 2})
    with sequencer(paths, most_skipped=5) as seq:
        batch(seq, 1)
        put(paths, range(7, 14), flat={7, 8, 9})
        assert batch(seq, 2) == [10, 11, 12, 13]
