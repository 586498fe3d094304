import ctypes
import errno
import gc
import os
import pathlib
import re
import tracemalloc
from pathlib import Path

import bus_fixtures as made
import pytest

from relax_hpc.bus import credits, durable, layout
from relax_hpc.bus import sequencer as lateness
from relax_hpc.bus.audit import BusAudit, audit
from relax_hpc.bus.credits import Credit, CreditTail, CreditWriter
from relax_hpc.bus.durable import PAGE
from relax_hpc.bus.frames import FrameWriter, encode, read_frames
from relax_hpc.bus.log import (
    RECORD_BYTES,
    CommitRecord,
    Fences,
    LogTail,
    LogWriter,
    RecordKind,
    pack,
    read_log,
)
from relax_hpc.bus.plan import PlanPosition, claim_fence, is_planned, read_chain
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.staleness import may_start_batch, staleness
from relax_hpc.errors import BusError, FencedError, PeerTimeoutError
from relax_hpc.runtime.files.records import write_json


def files(paths, name):
    return sorted(f.name for f in paths.producer(name).glob("f*/*"))


# from trajectories to batches


def test_a_batch_is_the_next_prompts_in_order_whatever_order_they_were_committed_in(tmp_path):
    paths = made.make_bus(tmp_path)
    made.produce(paths, "rollout-1", [7, 3, 1, 5])
    made.produce(paths, "rollout-0", [2, 6, 0, 4], per_shard=3)
    with made.sequencer(paths) as seq:
        assert [made.batch(seq, step).guids for step in (1, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        reader = Reader(paths)
        index = reader.index(made.batch(seq, 1))
        assert index.guid.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert index.sibling.tolist() == [0, 1] * 4
        assert index.segment.tolist() == [0] * 8
        assert index.rewards.tolist() == [0.0, 1.0] * 4
        assert index.response_len.tolist() == [4] * 8


def test_the_reader_returns_exactly_what_was_put_in_the_order_asked_for(tmp_path):
    paths = made.make_bus(tmp_path)
    made.produce_all(paths, made.P, per_shard=2)
    expected = [t for guid in range(made.P) for t in made.group(guid).trajectories]
    with made.sequencer(paths) as seq:
        record = made.batch(seq, 1)
    for rows in [range(8), [6, 1, 0, 7], [3], [], [2, 2]]:
        found = Reader(paths).rows(record, rows)
        assert len(found) == len(rows)
        assert all(made.same(t, expected[row]) for t, row in zip(found, rows, strict=True))


def test_damaged_payload_is_found_before_it_reaches_the_trainer(tmp_path):
    paths = made.make_bus(tmp_path)
    made.produce_all(paths, made.P)
    shard = paths.shard("rollout-1", 1, 1)  # guid 3
    data = bytearray(shard.read_bytes())
    at = data.index(made.group(3).trajectories[0].token_ids.tobytes())
    data[at] ^= 1
    shard.write_bytes(data)
    with made.sequencer(paths) as seq:
        record = made.batch(seq, 1)
    Reader(paths).rows(record, range(6))
    with pytest.raises(BusError, match=r"rollout-1/f1/0{11}1\.h5: is corrupt.*token_ids"):
        Reader(paths).rows(record, [6])


def damage_header(path):
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"\xff")


def put_another_shard_there(path):
    path.write_bytes(path.with_name(f"{1:012d}.h5").read_bytes())


@pytest.mark.parametrize("damage", [damage_header, put_another_shard_there, Path.unlink])
@pytest.mark.parametrize("restart", [False, True])
def test_groups_of_a_damaged_shard_are_sampled_again(tmp_path, caplog, damage, restart):
    paths = made.make_bus(tmp_path)
    made.produce(paths, "rollout-1", [1, 3])
    producer = Producer(paths, "rollout-0", {})
    producer.put([made.group(0)])
    producer.put([made.group(2)])
    damage(paths.shard("rollout-0", 1, 0))
    with made.sequencer(paths) as seq:
        with pytest.raises(PeerTimeoutError, match=r"rollout-0 owes \[0\]"):
            made.whole_batch(seq, 1, timeout_s=0)
        assert re.search(r"rollout-0/f1/0{12}\.h5: .*sampled again", caplog.text)
        if restart:
            producer = Producer(paths, "rollout-0", {})
            owed = [guid for guid in (0, 2) if guid not in producer.committed]
        else:
            owed = producer.owe_again(CreditTail(paths).latest().owed)
        assert owed == [0]
        assert producer.owe_again(CreditTail(paths).latest().owed) == []
        producer.put([made.group(0, version=7)])
        record = made.batch(seq, 1)
        assert record.guids == [0, 1, 2, 3]
        assert CreditTail(paths).latest().owed[0].guid == -1
    with made.sequencer(paths) as seq:
        assert made.batch(seq, 1) == record
    assert [t.policy_version_max for t in made.rows_of(paths, record)] == [7, 7, 0, 0, 0, 0, 0, 0]
    counts = audit(paths)
    assert (counts.damaged, counts.dropped, counts.duplicates) == (made.SIBLINGS, 0, 0)
    assert counts.committed == counts.planned + counts.damaged


def test_storage_that_keeps_losing_shards_stops_the_run(tmp_path):
    paths = made.make_bus(tmp_path)
    made.produce(paths, "rollout-0", range(0, 20, 2))
    for seq in range(9):
        damage_header(paths.shard("rollout-0", 1, seq))
    with (
        made.sequencer(paths) as seq,
        pytest.raises(BusError, match="8 committed shards of rollout-0"),
    ):
        made.batch(seq, 1)


def test_waiting_ends_at_the_deadline_and_names_who_owes_what(tmp_path):
    paths = made.make_bus(tmp_path)
    made.produce(paths, "rollout-0", [0, 2])
    polls = []
    with made.sequencer(paths) as seq, pytest.raises(PeerTimeoutError) as error:
        made.whole_batch(seq, 1, timeout_s=0.1, on_wait=lambda: polls.append(1))
    assert "rollout-1 owes [1, 3]" in str(error.value)
    assert "rollout-0" not in str(error.value)
    assert polls


def test_who_waits_asks_seldom_whether_there_is_room_and_has_patience_while_there_is_none(
    tmp_path, monkeypatch
):
    answers = [True] * 40
    monkeypatch.setattr(lateness, "is_short", lambda: bool(answers) and answers.pop())
    paths, polls = made.make_bus(tmp_path), []

    def poll():
        polls.append(1)
        if len(polls) == 20:
            raise KeyboardInterrupt

    with made.sequencer(paths) as seq, pytest.raises(KeyboardInterrupt):
        made.whole_batch(seq, 1, timeout_s=1800, on_wait=poll)
    assert len(answers) == 39
    polls.clear()
    with made.sequencer(paths) as seq, pytest.raises(KeyboardInterrupt):
        made.whole_batch(seq, 1, timeout_s=0.05, on_wait=poll)  # twenty polls take longer


@pytest.mark.parametrize("over_age", ["wait", "drop"])
def test_groups_are_lacking_until_all_are_committed_though_a_column_is_missing(tmp_path, over_age):
    paths, seen = made.make_bus(tmp_path, writers={"reference-0": "reference"}), []
    with made.sequencer(paths, over_age=over_age, needs=("reference",)) as seq:

        def wait():
            seen.append(seq.lacks_groups())
            if len(seen) == 3:
                raise KeyboardInterrupt
            made.produce(paths, f"rollout-{len(seen) - 1}", [len(seen) - 1, len(seen) + 1])

        with pytest.raises(KeyboardInterrupt):
            seq.next_portion(1, timeout_s=60, on_wait=wait)
    assert seen == [True, True, False]


# exactly once, over restarts


def test_a_restarted_sequencer_replays_the_identical_plan_and_goes_on(tmp_path):
    paths = made.make_bus(tmp_path)
    made.produce_all(paths, 3 * made.P)
    with made.sequencer(paths) as seq:
        first = [made.batch(seq, step) for step in (1, 2)]
        position = seq.position
        third = made.batch(seq, 3)
    made.produce_all(paths, 4 * made.P)
    with made.sequencer(paths, position) as seq:
        assert made.batch(seq, 3) == third
        assert made.batch(seq, 4).guids == [12, 13, 14, 15]
    with made.sequencer(paths) as seq:  # as if it had died before its first checkpoint
        assert [made.batch(seq, step) for step in (1, 2, 3)] == [*first, third]
    assert audit(paths) == BusAudit(32, 32, 0, 0, 0, steps=4, max_staleness=3)


def test_a_group_committed_twice_is_used_once_and_counted_also_over_restarts(tmp_path):
    paths = made.make_bus(tmp_path)
    with Producer(paths, "rollout-0", {}) as producer:
        producer.put([made.group(0, version=0), made.group(2)])
        producer._source.clear()  # as if it had lost its memory
        producer.put([made.group(2, version=1), made.group(4)])
        producer.put([made.group(6)])
    made.produce(paths, "rollout-1", [1, 3, 5, 7])
    with made.sequencer(paths) as seq:
        record = made.batch(seq, 1)
        assert seq.duplicates == made.SIBLINGS
    with made.sequencer(paths) as seq:
        assert made.batch(seq, 1) == record
        assert made.batch(seq, 2).guids == [4, 5, 6, 7]
        assert seq.duplicates == made.SIBLINGS
    assert {t.policy_version_max for t in made.rows_of(paths, record)} == {0}
    counts = audit(paths)
    assert (counts.duplicates, counts.planned_twice, counts.dropped) == (made.SIBLINGS, 0, 0)
    assert counts.committed == counts.planned + counts.duplicates


def test_the_audit_sees_a_double_planning_that_the_sequencer_would_never_do(tmp_path):
    paths = made.make_bus(tmp_path)
    made.produce_all(paths, 2 * made.P)
    with made.sequencer(paths) as seq:
        record = made.batch(seq, 1)
        seq._append(record._replace(step=2))
    assert audit(paths).planned_twice == made.P * made.SIBLINGS


def test_a_zombie_sequencer_is_fenced_and_what_it_appends_does_not_count(tmp_path):
    paths = made.make_bus(tmp_path)
    made.produce_all(paths, 3 * made.P)
    zombie = made.sequencer(paths)
    first = made.batch(zombie, 1)
    zombie.check_fenced()
    with made.sequencer(paths) as owner:
        for act in (
            zombie.check_fenced,
            lambda: made.batch(zombie, 2),
            lambda: zombie.advance(step=1, policy_version=1),
            lambda: zombie.release(1),
            zombie.finish,
        ):
            with pytest.raises(BusError, match="fence 2 was claimed after 1"):
                act()
        zombie._log.append(first._replace(step=2)._asdict())  # it had passed the check just before
        assert made.batch(owner, 2).guids == [4, 5, 6, 7]
        assert [r.guids[0] for r in read_chain(paths).steps] == [0, 4]
    zombie.close()
    slipped_in = PlanPosition(fence=1, records=2, step=2)
    assert not is_planned(paths, slipped_in)
    assert is_planned(paths, PlanPosition(fence=1, records=1, step=1))
    with pytest.raises(BusError, match="fenced trainer"):
        made.sequencer(paths, slipped_in)


def test_a_sequencer_that_died_between_claim_and_header_changes_nothing(tmp_path):
    paths = made.make_bus(tmp_path)
    made.produce_all(paths, made.P)
    with made.sequencer(paths) as seq:
        record = made.batch(seq, 1)
        position = seq.position
    assert claim_fence(paths) == 2
    with made.sequencer(paths, position) as seq:
        assert seq.fence == 3
        assert made.batch(seq, 1) == record


@pytest.mark.parametrize("left", [0, 1])
def test_a_plan_whose_older_logs_lack_records_is_refused(tmp_path, left):
    """What was planned there would be planned again, as if nobody had trained on it."""
    paths = made.make_bus(tmp_path)
    made.produce_all(paths, 3 * made.P)
    with made.sequencer(paths) as seq:
        made.batch(seq, 1)
        position = seq.position
        made.batch(seq, 2)
    made.sequencer(paths, position).close()
    log = paths.plan_log(1)
    _, *ends = [end for _, end in read_frames(log)]
    os.truncate(log, ends[0] if left else 0)
    with pytest.raises(BusError, match=rf"f000002.log: continues .* 2 records, of which {left} "):
        made.sequencer(paths, position)


def test_another_batch_size_is_refused_on_a_plan(tmp_path):
    paths = made.make_bus(tmp_path)
    made.produce_all(paths, made.P)
    with made.sequencer(paths) as seq:
        made.batch(seq, 1)
    with pytest.raises(BusError, match="prompts_per_step was not 2"):
        made.sequencer(paths, prompts_per_step=2)


# owners delete, and only what nobody can need


def test_owners_keep_every_shard_at_or_above_the_released_ordinal(tmp_path):
    paths = made.make_bus(tmp_path)
    made.produce(paths, "rollout-1", [1, 3, 5, 7])
    with Producer(paths, "rollout-0", {}) as producer:
        producer.put([made.group(0), made.group(2)])
        producer.put([made.group(4), made.group(6)])
        producer.put([made.group(8)])
        with made.sequencer(paths) as seq:
            position = None
            for step in (1, 2):
                made.batch(seq, step)
                position = position or seq.position
            seq.release(1)
        credit = CreditTail(paths).latest()
        assert credit.retired_guid_below == made.P
        assert producer.collect(credit.retired_guid_below) == 1
        assert producer.collect(credit.retired_guid_below) == 0
        assert producer.collect(6) == 0  # guid 6 shares a shard with guid 4
        assert files(paths, "rollout-0") == ["000000000001.h5", "000000000002.h5"]
    with Producer(paths, "rollout-0", {}) as producer:
        assert producer.committed == {4, 6, 8}
    with made.sequencer(paths, position) as seq:  # resumes without the deleted shard
        assert Reader(paths).index(made.batch(seq, 2)).guid[0] == 4
    assert audit(paths)[:5] == (
        (2 * made.P + 1) * made.SIBLINGS,
        2 * made.P * made.SIBLINGS,
        0,
        0,
        0,
    )


def test_credits_show_the_newest_and_only_deletions_outlive_a_restart(tmp_path):
    paths = made.make_bus(tmp_path)
    made.produce_all(paths, made.P)
    tail = CreditTail(paths)
    assert tail.latest() is None
    with made.sequencer(paths) as seq:
        assert tail.latest() == Credit(0, 0, 0, finished=False)
        made.batch(seq, 1)
        position = seq.position
        seq.advance(step=1, policy_version=1)
        seq.release(1)
        assert tail.latest() == Credit(1, 1, made.P, finished=False)
        assert tail.latest() == Credit(1, 1, made.P, finished=False)
    with made.sequencer(paths) as seq:
        assert tail.latest() == Credit(0, 0, made.P, finished=False)
        seq.finish()
        assert tail.latest().finished
    with made.sequencer(paths, position):
        assert tail.latest() == CreditTail(paths).latest() == Credit(1, 1, made.P, finished=False)
    last_words = encode({"plan_fence": 1, **Credit(9, 9, 99)._asdict()})  # of a fenced trainer
    with paths.credits.open("ab") as file:
        file.write(last_words)
    assert tail.latest() == Credit(1, 1, made.P, finished=False)


def test_the_end_of_a_run_is_taken_back_by_the_next_trainer_before_it_reads_the_plan(tmp_path):
    """Nor is it one of a run that was given more steps: who starts before its trainer would end."""
    paths = made.make_bus(tmp_path)
    first = CreditWriter(paths, 1)
    first.write(Credit(step=3, policy_version=3, retired_guid_below=8, finished=True))
    first.close()
    tails = [CreditTail(paths, num_steps=num_steps) for num_steps in (0, 3, 4)]
    assert [tail.latest() for tail in tails] == [
        Credit(3, 3, 8, finished=finished) for finished in (True, True, False)
    ]
    CreditWriter(paths, 2).close()
    assert [tail.latest() for tail in tails] == [Credit(3, 3, 8, finished=False)] * 3


# logs


def test_a_torn_tail_is_not_yet_a_record_and_the_next_writer_goes_on_behind_it(tmp_path):
    paths = made.make_bus(tmp_path)
    made.produce(paths, "rollout-0", [0, 2])
    log = paths.log("rollout-0")
    whole = log.read_bytes()
    tail = LogTail(log)
    assert [r.kind.name for r in tail.poll()] == ["OPEN", "BASE", "BASE", "CLOSE"]
    log.write_bytes(whole + whole[RECORD_BYTES : RECORD_BYTES + 100])
    assert tail.poll() == []
    made.produce(paths, "rollout-0", [0, 2, 4])
    assert [(r.kind.name, r.fence) for r in tail.poll()] == [("OPEN", 2), ("BASE", 2), ("CLOSE", 2)]
    assert len(log.read_bytes()) == 9 * RECORD_BYTES  # nothing is ever cut off
    assert log.read_bytes()[: 4 * RECORD_BYTES + 100] == whole + whole[128:228]


def test_a_damaged_committed_record_is_never_skipped(tmp_path):
    paths = made.make_bus(tmp_path)
    made.produce(paths, "rollout-0", [0, 2])
    log = paths.log("rollout-0")
    data = bytearray(log.read_bytes())
    data[RECORD_BYTES + 9] ^= 1
    log.write_bytes(data)
    for read in (
        lambda: read_log(log),
        lambda: Producer(paths, "rollout-0", {}),
        lambda: made.batch(made.sequencer(paths), 1),
    ):
        with pytest.raises(BusError, match="rollout-0/log: record 1 is damaged"):
            read()


@pytest.mark.parametrize("direct", [True, False])
def test_a_short_read_is_not_taken_for_the_end_of_a_file(tmp_path, monkeypatch, direct):
    log = tmp_path / "log"
    log.write_bytes(b"".join(encode({"number": number}) for number in range(1000)))
    real = os.preadv

    def short(fd, buffers, at):
        return real(fd, [memoryview(buffers[0])[:PAGE]], at)

    monkeypatch.setattr(os, "preadv", short)
    if not direct:
        monkeypatch.setattr(os, "O_DIRECT", 0)
    assert log.stat().st_size > 4 * PAGE
    assert [record["number"] for record, _ in read_frames(log)] == list(range(1000))


def test_of_a_long_file_only_what_is_new_is_read(tmp_path, monkeypatch):
    """A plan of 100,000 steps may have a GB, and each checkpoint is looked up in it."""
    log, real, sizes = tmp_path / "log", os.preadv, []
    frame = encode({"text": "x" * 10_000})
    log.write_bytes(101 * frame)

    def counted(*args):
        sizes.append(real(*args))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", counted)
    assert len(read_frames(log, 100 * len(frame))) == 1
    assert sum(sizes) < 200_000


def test_a_signal_while_the_size_of_a_log_is_asked_ends_nobody(tmp_path, monkeypatch):
    real, codes = durable._statx(), [errno.EINTR, errno.EINTR]

    def interrupted(*args):
        if codes:
            ctypes.set_errno(codes.pop())
            return -1
        return real(*args)

    monkeypatch.setattr(durable, "_statx", lambda: interrupted)
    frames = FrameWriter(tmp_path / "log")
    frames.append({"number": 0})
    assert not codes and [record for record, _ in read_frames(frames.path)] == [{"number": 0}]
    frames.close()


def test_a_torn_frame_is_cut_off_and_a_damaged_one_is_an_error(tmp_path):
    path = tmp_path / "frames"
    writer = FrameWriter(path)
    for n in range(3):
        writer.append({"n": n})
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert [record for record, _ in read_frames(path)] == [{"n": 0}, {"n": 1}]
    again = FrameWriter(path)
    again.append({"n": 7})
    assert [record for record, _ in read_frames(path)] == [{"n": 0}, {"n": 1}, {"n": 7}]
    end_of_first = read_frames(path)[0][1]
    assert read_frames(path, end_of_first) == read_frames(path)[1:]
    for at in (5, 14):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(BusError, match="frames: a record is damaged"):
            read_frames(path)


def test_two_writers_of_one_log_are_noticed(tmp_path):
    paths = made.make_bus(tmp_path)
    zombie = Producer(paths, "rollout-0", {})
    with Producer(paths, "rollout-0", {}) as owner:
        owner.put([made.group(0)])
        with pytest.raises(BusError, match="another process took it over"):
            zombie.put([made.group(2)])
    assert [r.guid_min for r in read_log(paths.log("rollout-0")) if r.rows] == [0]


# producers


def test_who_starts_again_keeps_nothing_of_what_was_done_long_ago(tmp_path):
    paths = made.make_bus(tmp_path)
    old = CommitRecord(RecordKind.BASE, 1, 0, uuid="ab" * 16, rows=1, guid_min=0, guid_max=0)
    records = [CommitRecord(RecordKind.OPEN, 1, 0), *(old._replace(seq=n) for n in range(9_999))]
    paths.log("rollout-0").write_bytes(b"".join(map(pack, records)))
    granted = [{"plan_fence": 1, **Credit(step, step, step)._asdict()} for step in range(10_000)]
    paths.credits.write_bytes(b"".join(map(encode, granted)))
    del records, granted
    for start in (lambda: Producer(paths, "rollout-0", {}), lambda: CreditWriter(paths, 2)):
        tracemalloc.start()
        started = start()
        gc.collect()
        _, most = tracemalloc.get_traced_memory()
        # pathlib interns names: the interpreter's table of them grows by 7 MB now and then.
        others = tracemalloc.Filter(inclusive=False, filename_pattern=pathlib.__file__)
        kept = tracemalloc.take_snapshot().filter_traces([others])
        held = sum(each.size for each in kept.statistics("filename"))
        tracemalloc.stop()
        started.close()
        assert held < 3_000_000 < 6_000_000 < most


def test_a_producer_refuses_to_commit_a_group_again(tmp_path):
    paths = made.make_bus(tmp_path)
    with Producer(paths, "rollout-0", {}) as producer:
        producer.put([made.group(0), made.group(2)])
        for again in ([made.group(2)], [made.group(4), made.group(4)]):
            with pytest.raises(BusError, match="committed already"):
                producer.put(again)
        assert producer.committed == {0, 2}
    assert files(paths, "rollout-0") == ["000000000000.h5"]


def test_a_producer_deletes_its_own_orphans_and_nothing_else(tmp_path):
    paths = made.make_bus(tmp_path)
    made.produce(paths, "rollout-0", [0, 2])
    made.produce(paths, "rollout-1", [1])
    orphan = paths.shard("rollout-0", 1, 2)
    orphan.write_bytes(paths.shard("rollout-0", 1, 0).read_bytes())  # renamed, never recorded
    orphan.with_name(".000000000003.h5.99.tmp").write_bytes(b"half")
    with Producer(paths, "rollout-0", {}) as producer:
        assert producer.committed == {0, 2}
        assert (producer.fence, producer.put([made.group(4)])) == (2, 2)
    assert files(paths, "rollout-0") == [f"{n:012d}.h5" for n in range(3)]
    assert files(paths, "rollout-1") == ["000000000000.h5"]


def test_only_what_the_newest_owner_of_a_log_appends_counts():
    """Fence 2 is claimed twice, by owners that raced; whoever was second went on to 3."""
    base, opened, cut = RecordKind.BASE, RecordKind.OPEN, RecordKind.CUT
    log = [(opened, 1, True), (base, 1, True), (opened, 2, True), (base, 1, False),
           (opened, 2, False), (base, 2, True), (opened, 1, False), (cut, 2, False),
           (opened, 3, True), (base, 2, False), (base, 3, True)]  # fmt: skip
    fences = Fences()
    assert [fences.admit(CommitRecord(kind, fence, 0)) for kind, fence, _ in log] == [
        counts for *_, counts in log
    ]


def test_rows_that_nobody_planned_nor_passed_over_are_counted_as_dropped(tmp_path):
    paths = made.make_bus(tmp_path)
    made.produce_all(paths, made.P)
    with made.sequencer(paths) as seq:
        made.batch(seq, 1)
    with Producer(paths, "rollout-0", {}) as producer:
        del producer._source[2]
        producer.put([made.group(2)])  # while no trainer looks
        producer.put([made.group(made.P)])  # may be planned yet
    counts = audit(paths)
    assert (counts.committed, counts.planned) == (
        (made.P + 2) * made.SIBLINGS,
        made.P * made.SIBLINGS,
    )
    assert (counts.dropped, counts.duplicates) == (made.SIBLINGS, 0)
    with made.sequencer(paths, PlanPosition(1, 1, 1)) as seq, pytest.raises(PeerTimeoutError):
        made.whole_batch(seq, 2, timeout_s=0)
    assert (audit(paths).dropped, audit(paths).duplicates) == (0, made.SIBLINGS)


# the bus as a whole


def test_a_newer_or_missing_bus_is_refused_by_everyone(tmp_path):
    paths = made.make_bus(tmp_path)
    openers = [
        layout.open_bus,
        Reader,
        made.sequencer,
        audit,
        lambda paths: Producer(paths, "rollout-0", {}),
    ]
    for other in (1, 4, 6):
        write_json(paths.header, {"format": other, "producers": made.PRODUCERS, "shape": "unknown"})
        for opener in openers:
            with pytest.raises(BusError, match=rf"RUN\.json: is bus format {other}, .* reads 5"):
                opener(paths)
    paths.header.unlink()
    for opener in openers:
        with pytest.raises(BusError, match="is not a bus"):
            opener(paths)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_rollout_runs_exactly_max_staleness_batches_ahead(max_staleness):
    allowed = [
        b for b in range(1, 20) if may_start_batch(b, policy_version=4, max_staleness=max_staleness)
    ]
    assert max(allowed) == 5 + max_staleness  # batch 5 is the one policy 4 trains on
    assert staleness(max(allowed), 4) == max_staleness


# races that crash runs and the state machine have found, each as short as it can be told


def before(monkeypatch, owner, name, act):
    """Lets `act` happen right before the next call of `owner.name`: a process that is stopped."""
    real = getattr(owner, name)

    def late(*args, **kwargs):
        monkeypatch.setattr(owner, name, real)
        act()
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, late)


def test_what_an_owner_commits_while_the_next_one_opens_is_kept(tmp_path, monkeypatch):
    paths = made.make_bus(tmp_path)
    old = Producer(paths, "rollout-0", {})
    before(monkeypatch, LogWriter, "_write", lambda: old.put([made.group(0)]))
    with Producer(paths, "rollout-0", {}) as new:
        assert new.committed == {0}
        assert paths.shard("rollout-0", 1, 0).exists()
        assert new.put([made.group(2)]) == 1


def test_an_owner_that_was_stopped_while_it_opened_deletes_nothing_of_the_next_one(
    tmp_path, monkeypatch
):
    paths = made.make_bus(tmp_path)
    before(monkeypatch, os, "mkdir", lambda: made.produce(paths, "rollout-0", [0]))
    with pytest.raises(FencedError):
        Producer(paths, "rollout-0", {}).put([made.group(2)])
    assert paths.shard("rollout-0", 2, 0).exists()


def test_an_owner_that_was_stopped_over_a_torn_tail_takes_nothing_from_the_next_one(
    tmp_path, monkeypatch
):
    paths = made.make_bus(tmp_path)
    made.produce(paths, "rollout-0", [0])
    log = paths.log("rollout-0")
    with log.open("ab") as file:
        file.write(log.read_bytes()[: RECORD_BYTES // 2])
    before(monkeypatch, os, "pwritev", lambda: made.produce(paths, "rollout-0", [2]))
    with Producer(paths, "rollout-0", {}) as late:
        assert late.committed == {0, 2}
    assert [r.guid_min for r in read_log(log) if r.rows] == [0, 2]


def test_a_trainer_that_was_stopped_while_it_started_finds_the_newer_one(tmp_path, monkeypatch):
    paths = made.make_bus(tmp_path)
    before(monkeypatch, credits, "FrameWriter", lambda: made.sequencer(paths).close())
    with pytest.raises(FencedError, match="plan fence 2 was claimed after 1"):
        made.sequencer(paths)


def test_a_snapshot_of_the_last_step_has_a_next_step_and_a_position(tmp_path, monkeypatch):
    monkeypatch.setattr("relax_hpc.bus.sequencer.SNAPSHOT_RECORDS", 1)
    paths = made.make_bus(tmp_path)
    made.produce_all(paths, 2 * made.P)
    with made.sequencer(paths) as seq:
        made.batch(seq, 1)
        position = seq.position
        seq.release(1)
        assert seq.position == position
    with made.sequencer(paths, position) as seq:
        position = seq.position  # of a trainer that is told to stop before it has done anything
    with made.sequencer(paths, position) as seq:
        assert made.batch(seq, 2).guids == [4, 5, 6, 7]


def test_a_dropped_group_that_was_committed_twice_is_sampled_again(tmp_path):
    paths = made.make_bus(tmp_path)
    drop = {"over_age": "drop", "max_staleness": 0}
    made.produce(paths, "rollout-1", [1, 3, 5, 7], version=0)
    with Producer(paths, "rollout-0", {}) as producer:
        with made.sequencer(paths, **drop) as seq:
            made.batch(seq, 1)
            for _ in range(2):
                producer.put([made.group(0)])
                producer._source.clear()
            producer._source[0] = read_log(paths.log("rollout-0"))[-1]
            with pytest.raises(PeerTimeoutError):
                made.batch(seq, 2)
            assert producer.owe_again(CreditTail(paths).latest().owed) == [0]
        with made.sequencer(paths, **drop) as seq:
            with pytest.raises(PeerTimeoutError, match=r"rollout-0 owes \[0, 2, 4, 6\]"):
                made.batch(seq, 2)
            producer.put([made.group(g, version=1) for g in (0, 2, 4, 6)])
            assert made.batch(seq, 2).guids == [0, 2, 4, 6]
            assert [seq.count_over_age(step) for step in (1, 2)] == [0, 1]
    counts = audit(paths)
    assert (counts.over_age, counts.duplicates, counts.dropped) == (made.SIBLINGS, made.SIBLINGS, 0)
    assert counts.committed == counts.planned + counts.over_age + counts.duplicates


def test_a_shard_that_was_used_before_the_snapshot_is_no_repetition_behind_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("relax_hpc.bus.sequencer.SNAPSHOT_RECORDS", 1)
    paths = made.make_bus(tmp_path)
    with made.sequencer(paths, over_age="mask") as seq:
        made.produce(paths, "rollout-1", [1, 3, 5, 7], per_shard=2)
        made.batch(seq, 1)
        position = seq.position
        seq.release(1)  # guid 0 is open, so nothing is retired
        made.produce(paths, "rollout-0", [0, 2, 4, 6], per_shard=2)
        made.batch(seq, 2)
    with made.sequencer(paths, position, over_age="mask") as seq:
        seq.finish()
        assert seq.duplicates == 0
    assert (audit(paths).duplicates, audit(paths).dropped) == (0, 0)
