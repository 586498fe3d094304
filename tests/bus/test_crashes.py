import errno
import hashlib
import os

import pytest
from bus_fixtures import batch, group, make_bus, sequencer, with_media
from deaths import deaths
from file_systems import read_only, small_tmpfs

from relax_hpc.bus.audit import audit
from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.durable import BusFullError
from relax_hpc.bus.log import CommitRecord, RecordKind, read_log
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.errors import DamagedError, RelaxError
from relax_hpc.runtime.paths import BusPaths

P, STEPS = 2, 2


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


def shown(guid):
    return with_media(group(guid))


@pytest.mark.parametrize("role", ["produce", "train", "collect"])
def test_killing_a_role_at_any_system_call_loses_and_doubles_nothing(tmp_path, monkeypatch, role):
    """`collect` is a producer that comes back after the trainer released shards."""
    (tmp_path / "undisturbed").mkdir()
    expected = undisturbed(tmp_path / "undisturbed", shown)
    for nth, life in deaths(monkeypatch):
        run = Run(tmp_path / str(nth), shown)
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


@pytest.mark.parametrize("where", ["in part", "no O_DIRECT", "zeros", "read only"])
def test_on_odd_storage_a_run_is_the_same(tmp_path, monkeypatch, caplog, where):
    """A power cut leaves zeros behind what was written; read only is a view of the bus."""
    (tmp_path / "undisturbed").mkdir()
    expected, run = undisturbed(tmp_path / "undisturbed", group), Run(tmp_path, group)
    pwritev, open_file = os.pwritev, os.open

    def take_part(fd, buffers, offset):
        return pwritev(fd, [buffers[0][: max(1, len(buffers[0]) // 2)]], offset)

    def refuse_direct(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_file(path, flags, *args, **kwargs)

    if where == "in part":
        monkeypatch.setattr(os, "pwritev", take_part)
    elif where == "no O_DIRECT":
        monkeypatch.setattr(os, "open", refuse_direct)
    run.produce()
    if where == "zeros":
        for file in (run.paths.log("rollout-0"), run.paths.credits):
            with file.open("ab") as end:
                end.write(bytes(4096))
    if where == "read only":
        with read_only(run.paths.root, tmp_path / "view") as view:
            with pytest.raises(RelaxError, match="Read-only file system"):
                Producer(BusPaths(view), "rollout-0", {})
            assert audit(BusPaths(view)).committed == 2 * P * STEPS
    run.train()
    run.produce()
    assert run.checkpoint[1] == expected and run.shard_files() == []
    refused = [line for line in caplog.messages if "O_DIRECT is refused here" in line]
    assert (len(set(refused)) == len(refused) > 0) == (where == "no O_DIRECT")


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
