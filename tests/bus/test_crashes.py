import hashlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bus_fixtures import batch, group, make_bus, sequencer, with_media
from deaths import deaths
from file_systems import small_tmpfs

from relax_hpc.bus.audit import audit
from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.durable import BusFullError
from relax_hpc.bus.log import CommitRecord, RecordKind, read_log
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.errors import DamagedError

P, STEPS = 2, 2
HERE = Path(__file__).parent


class Run:
    """One producer and a trainer whose state is a hash over all it was trained on."""

    def __init__(self, root, group):
        self.paths, self.group = make_bus(root, ["rollout-0"]), group
        self.checkpoint = (None, [])

    def produce(self):
        producer = Producer(self.paths, "rollout-0", {})
        producer.collect(self.retired())
        for guid in range(self.retired(), P * STEPS):
            if guid not in producer.committed:
                producer.put([self.group(guid)])

    def retired(self):
        credit = CreditTail(self.paths).latest()
        return credit.retired_guid_below if credit else 0

    def train(self):
        position, state = self.checkpoint[0], list(self.checkpoint[1])
        seq = sequencer(self.paths, position, prompts_per_step=P)
        reader = Reader(self.paths)
        seq.release(len(state))  # it may have died just before
        for step in range(len(state) + 1, STEPS + 1):
            record = batch(seq, step)
            rows = reader.rows(record, range(record.num_trajectories))
            seen = "".join(f"{t.guid}/{t.sibling}:{t.token_ids.tobytes()}" for t in rows)
            media = [(n, place) for n, t in enumerate(rows) for place in range(len(t.media))]
            for (number, place), each in zip(media, reader.media(record, media), strict=True):
                assert each.medium.data.tobytes() == rows[number].media[place].data.tobytes()
                spans = rows[number].media_spans.tolist()
                seen += f"{each.medium[2:]} {spans} {each.medium.data.tobytes()}"
            state.append(hashlib.sha256(seen.encode()).hexdigest())
            seq.advance(step=step, policy_version=step)
            self.checkpoint = (seq.position, list(state))
            seq.release(step)

    def shard_files(self):
        return sorted(self.paths.producer("rollout-0").glob("f*/*"))


def undisturbed(root, group):
    run = Run(root, group)
    run.produce()
    run.train()
    return run.checkpoint[1]


GROUPS = {"text": group, "media": lambda guid: with_media(group(guid))}


@pytest.mark.parametrize("shown", GROUPS)
@pytest.mark.parametrize("role", ["produce", "train", "collect"])
def test_killing_a_role_at_any_system_call_loses_and_doubles_nothing(
    tmp_path, monkeypatch, role, shown
):
    """`collect` is a producer that comes back after the trainer released shards."""
    (tmp_path / "undisturbed").mkdir()
    expected = undisturbed(tmp_path / "undisturbed", GROUPS[shown])
    for nth, life in deaths(monkeypatch):
        run = Run(tmp_path / str(nth), GROUPS[shown])
        if role != "produce":
            run.produce()
        if role == "collect":
            run.train()
        with life:
            run.train() if role == "train" else run.produce()
        run.produce()
        run.train()
        run.produce()
        assert run.checkpoint[1] == expected, nth
        assert run.shard_files() == []  # everything was released, so nothing may be left
        counts = audit(run.paths)
        assert (counts.planned, counts.planned_twice, counts.dropped) == (8, 0, 0), nth
        assert counts.committed == 8, nth
    assert nth > 12, "died at too few places"


def test_killing_a_producer_that_writes_over_a_spare_harms_no_other_shard(tmp_path, monkeypatch):
    for nth, life in deaths(monkeypatch):
        survived = False
        paths = make_bus(tmp_path / str(nth), ["rollout-0"])
        producer = Producer(paths, "rollout-0", {}, spares=1)
        for guid in range(3):
            producer.put([group(guid, response=40)])
        with life:
            producer.collect(2)  # keeps one of the two
            producer.put([group(3, response=5)])  # shorter than the spare
            producer.put([group(4, response=90)])
            survived = True
        with Producer(paths, "rollout-0", {}) as again:
            committed = again.committed - {0, 1}
            assert committed >= {2} and (not survived or committed == {2, 3, 4})
            again.collect(2)
            records = [r for r in read_log(paths.log("rollout-0")) if r.guid_min in committed]
            for record in records:
                with Shard(paths.shard("rollout-0", record.fence, record.seq)) as shard:
                    shard.verify()
                    assert (shard.uuid, shard.length) == (record.uuid, record.length)
                    tokens = shard.read("ragged/token_ids")
                    size = {2: 40, 3: 5, 4: 90}[record.guid_min]
                    expected = [t.token_ids for t in group(record.guid_min, response=size)[1]]
                    assert tokens.tolist() == [token for row in expected for token in row]
            assert len(list(paths.producer("rollout-0").glob("f*/*"))) == len(records)
    assert nth > 15, "died at too few places"


def test_a_file_that_is_written_over_is_as_long_as_its_new_shard_and_goes_in_the_end(tmp_path):
    paths = make_bus(tmp_path, ["rollout-0"])
    with Producer(paths, "rollout-0", {}, spares=1) as producer:
        producer.put([group(0, response=3000)])
        file = paths.shard("rollout-0", 1, 0)
        inode = file.stat().st_ino
        assert producer.collect(1) == 1
        producer.put([group(1)])
        again = paths.shard("rollout-0", 1, 1)
        assert again.stat().st_ino == inode
        assert not file.exists()
        with Shard(again) as shard:
            assert again.stat().st_size == shard.length < 3000 * 8
        assert producer.collect(2) == 1
        assert again.exists()
    assert not again.exists()


@pytest.mark.parametrize("compress", [(), ("ragged/token_ids",)])
def test_who_has_a_shard_open_is_not_given_the_rows_of_one_that_came_after_it(tmp_path, compress):
    paths = make_bus(tmp_path, ["rollout-0"])
    with Producer(paths, "rollout-0", {}, spares=1, compress=compress) as producer:
        producer.put([group(0, response=30_000)])
        with Shard(paths.shard("rollout-0", 1, 0)) as shard:
            producer.collect(1)
            producer.put([group(7, response=30_000)])
            expected = [token for row in group(0, response=30_000)[1] for token in row.token_ids]
            try:
                found = shard.read("ragged/token_ids").tolist()
            except DamagedError:  # it was written over
                assert not compress
            else:
                assert found == expected


PRODUCE_FOREVER = """
import itertools, sys
from pathlib import Path
from relax_hpc.bus.producer import Producer
from relax_hpc.runtime.paths import BusPaths
sys.path.insert(0, sys.argv[2])
from bus_fixtures import group
producer = Producer(BusPaths(Path(sys.argv[1])), "rollout-0", {})
for guid in itertools.count():
    if guid not in producer.committed:
        producer.put([group(guid, response=200)])
"""


def test_a_producer_killed_in_the_middle_of_its_work_goes_on_where_the_log_ends(tmp_path):
    paths = make_bus(tmp_path, ["rollout-0"])
    rng = random.Random(0)
    for _ in range(4):
        start = paths.log("rollout-0").stat().st_size
        process = subprocess.Popen([sys.executable, "-c", PRODUCE_FOREVER, paths.root, HERE])
        deadline = time.monotonic() + 60
        while paths.log("rollout-0").stat().st_size < start + 128 * 10:
            assert process.poll() is None
            assert time.monotonic() < deadline, "the producer committed nothing in 60 s"
            time.sleep(0.005)
        time.sleep(rng.random() / 50)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with Producer(paths, "rollout-0", {}) as producer:
        committed = producer.committed
    records = [r for r in read_log(paths.log("rollout-0")) if r.kind is RecordKind.BASE]
    assert [r.seq for r in records] == list(range(len(records)))
    assert [r.guid_min for r in records] == list(range(len(records)))
    assert committed == set(range(len(records)))
    for record in records:
        with Shard(paths.shard("rollout-0", record.fence, record.seq)) as shard:
            shard.verify()
            assert shard.uuid == record.uuid
    assert len(list(paths.producer("rollout-0").glob("f*/*"))) == len(records)
    steps = len(records) // P
    with sequencer(paths, prompts_per_step=P) as seq:
        for step in range(1, steps + 1):
            batch(seq, step)
        seq.finish()
        assert seq.duplicates == 0
    assert (audit(paths).planned, audit(paths).dropped) == (steps * P * 2, 0)


def test_a_full_file_system_leaves_nothing_half_and_goes_on_after_collecting(tmp_path):
    with small_tmpfs(tmp_path / "full", megabytes=4) as root:
        paths = make_bus(root, ["rollout-0"])
        producer = Producer(paths, "rollout-0", {})
        guid = 0
        with pytest.raises(BusFullError, match="No space left on device"):
            while True:
                producer.put([group(guid, response=30_000)])
                guid += 1
        assert guid >= 3
        names = [f.name for f in sorted(paths.producer("rollout-0").glob("f*/*"))]
        assert names == [f"{n:012d}.h5" for n in range(guid)]  # no draft
        assert producer.committed == set(range(guid))
        assert producer.collect(2) == 2
        producer.put([group(guid, response=30_000)])
        producer.close()
        assert [r.guid_min for r in read_log(paths.log("rollout-0")) if r.rows] == [
            *range(guid + 1)
        ]


def test_a_durable_shard_can_be_committed_on_a_full_file_system(tmp_path):
    with small_tmpfs(tmp_path / "full", megabytes=2) as root:
        paths = make_bus(root, ["rollout-0"])
        producer = Producer(paths, "rollout-0", {})
        record = CommitRecord(RecordKind.CLOSE, producer.fence, 0)
        while paths.log("rollout-0").stat().st_size % 4096:  # up to where a page is needed
            producer._log.append(record)
        with pytest.raises(OSError, match="No space"), (root / "rest").open("wb", 0) as rest:
            while True:
                rest.write(bytes(4096))
        producer._log.append(record)
        assert not paths.log("rollout-0").with_name("ballast").exists()
        assert len(read_log(paths.log("rollout-0"))) == 33
        (root / "rest").unlink()
        producer.put([group(0)])
        assert producer.collect(1) == 1
        assert paths.log("rollout-0").with_name("ballast").exists()
