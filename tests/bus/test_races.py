"""Races that the crash runs and the state machine have found, each as short as it can be told."""

import os

import pytest
from bus_fixtures import PRODUCERS, SIBLINGS, group, make_bus, produce, whole_batch

from relax_hpc.bus import credits
from relax_hpc.bus.audit import audit
from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.log import RECORD_BYTES, read_log
from relax_hpc.bus.log_writer import LogWriter
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.errors import FencedError, PeerTimeoutError

P = 4


def sequencer(paths, position=None, **kwargs):
    return Sequencer(paths, prompts_per_step=P, position=position, **kwargs)


def before(monkeypatch, owner, name, act):
    """Lets `act` happen right before the next call of `owner.name`: a process that is stopped."""
    real = getattr(owner, name)

    def late(*args, **kwargs):
        monkeypatch.setattr(owner, name, real)
        act()
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, late)


def test_what_an_owner_commits_while_the_next_one_opens_is_kept(tmp_path, monkeypatch):
    paths = make_bus(tmp_path)
    old = Producer(paths, "rollout-0", {})
    before(monkeypatch, LogWriter, "_write", lambda: old.put([group(0)]))
    with Producer(paths, "rollout-0", {}) as new:
        assert new.committed == {0}
        assert paths.shard("rollout-0", 1, 0).exists()
        assert new.put([group(2)]) == 1


def test_an_owner_that_was_stopped_while_it_opened_deletes_nothing_of_the_next_one(
    tmp_path, monkeypatch
):
    paths = make_bus(tmp_path)
    before(monkeypatch, os, "mkdir", lambda: produce(paths, "rollout-0", [0]))
    with pytest.raises(FencedError):
        Producer(paths, "rollout-0", {}).put([group(2)])
    assert paths.shard("rollout-0", 2, 0).exists()


def test_an_owner_that_was_stopped_over_a_torn_tail_takes_nothing_from_the_next_one(
    tmp_path, monkeypatch
):
    paths = make_bus(tmp_path)
    produce(paths, "rollout-0", [0])
    log = paths.log("rollout-0")
    with log.open("ab") as file:
        file.write(log.read_bytes()[: RECORD_BYTES // 2])
    before(monkeypatch, os, "pwritev", lambda: produce(paths, "rollout-0", [2]))
    with Producer(paths, "rollout-0", {}) as late:
        assert late.committed == {0, 2}
    assert [r.guid_min for r in read_log(log) if r.rows] == [0, 2]


def test_a_trainer_that_was_stopped_while_it_started_finds_the_newer_one(tmp_path, monkeypatch):
    paths = make_bus(tmp_path)
    before(monkeypatch, credits, "FrameWriter", lambda: sequencer(paths).close())
    with pytest.raises(FencedError, match="plan fence 2 was claimed after 1"):
        sequencer(paths)


def test_a_snapshot_of_the_last_step_has_a_next_step_and_a_position(tmp_path, monkeypatch):
    monkeypatch.setattr("relax_hpc.bus.sequencer.SNAPSHOT_RECORDS", 1)
    paths = make_bus(tmp_path)
    for rank, name in enumerate(PRODUCERS):
        produce(paths, name, range(rank, 2 * P, 2))
    with sequencer(paths) as seq:
        whole_batch(seq, 1, timeout_s=0)
        position = seq.position
        seq.release(1)
        assert seq.position == position
    with sequencer(paths, position) as seq:
        position = seq.position  # of a trainer that is told to stop before it has done anything
    with sequencer(paths, position) as seq:
        assert whole_batch(seq, 2, timeout_s=0).guids == [4, 5, 6, 7]


def test_a_dropped_group_that_was_committed_twice_is_sampled_again(tmp_path):
    paths = make_bus(tmp_path)
    drop = {"over_age": "drop", "max_staleness": 0}
    produce(paths, "rollout-1", [1, 3, 5, 7], version=0)
    with Producer(paths, "rollout-0", {}) as producer:
        with sequencer(paths, **drop) as seq:
            whole_batch(seq, 1, timeout_s=0)
            for _ in range(2):
                producer.put([group(0)])
                producer._source.clear()
            producer._source[0] = read_log(paths.log("rollout-0"))[-1]
            with pytest.raises(PeerTimeoutError):
                whole_batch(seq, 2, timeout_s=0)
            assert producer.owe_again(CreditTail(paths).latest().owed) == [0]
        with sequencer(paths, **drop) as seq:
            with pytest.raises(PeerTimeoutError, match=r"rollout-0 owes \[0, 2, 4, 6\]"):
                whole_batch(seq, 2, timeout_s=0)
            producer.put([group(g, version=1) for g in (0, 2, 4, 6)])
            assert whole_batch(seq, 2, timeout_s=0).guids == [0, 2, 4, 6]
    counts = audit(paths)
    assert (counts.over_age, counts.duplicates, counts.dropped) == (SIBLINGS, SIBLINGS, 0)
    assert counts.committed == counts.planned + counts.over_age + counts.duplicates


def test_a_shard_that_was_used_before_the_snapshot_is_no_repetition_behind_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("relax_hpc.bus.sequencer.SNAPSHOT_RECORDS", 1)
    paths = make_bus(tmp_path)
    with sequencer(paths, over_age="mask") as seq:
        produce(paths, "rollout-1", [1, 3, 5, 7], per_shard=2)
        whole_batch(seq, 1, timeout_s=0)
        position = seq.position
        seq.release(1)  # guid 0 is open, so nothing is retired
        produce(paths, "rollout-0", [0, 2, 4, 6], per_shard=2)
        whole_batch(seq, 2, timeout_s=0)
    with sequencer(paths, position, over_age="mask") as seq:
        seq.finish()
        assert seq.duplicates == 0
    assert audit(paths).duplicates == 0
