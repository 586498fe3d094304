"""Storage that says no for a while, at any system call: nobody ends, nothing is lost or doubled."""

import errno
import hashlib
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
from bus_fixtures import group, make_bus, whole_batch
from failing_calls import DONE, HALF, UNDONE, failing
from file_systems import small_tmpfs

from relax_hpc.bus.audit import audit
from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.durable import BusFullError, Space
from relax_hpc.bus.log import SHARDS, read_log
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.runtime.files import records, storage

pytestmark = pytest.mark.long

P, STEPS = 2, 2
LONG = 40


@pytest.fixture(autouse=True)
def patient(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_FIRST_S", 0.0001)
    monkeypatch.setattr(storage, "_LONGEST_S", 0.001)
    monkeypatch.setattr("relax_hpc.bus.log.BALLAST_BYTES", 16)
    storage.settle(60.0)
    yield
    storage.settle(0.0)


class Run:
    """One producer and one trainer, neither of which is ever started again."""

    def __init__(self, root):
        self.root = root
        self.paths = make_bus(root, ["rollout-0"])
        self.seen = []

    def all_of_it(self):
        with Producer(self.paths, "rollout-0", {}, spares=1) as producer:
            sequencer = Sequencer(self.paths, prompts_per_step=P, position=None)
            reader, credits = Reader(self.paths), CreditTail(self.paths)
            for step in range(1, STEPS + 1):
                for guid in range((step - 1) * P, step * P):
                    with suppress(BusFullError):  # a role would hold it for FULL_RETRY_S
                        producer.put([group(guid)])
                    if guid not in producer.committed:
                        producer.put([group(guid)])
                record = whole_batch(sequencer, step, timeout_s=0)
                rows = reader.rows(record, range(record.num_trajectories))
                self.seen.append(_digest(rows))
                sequencer.advance(step=step, policy_version=step)
                records.write_json(self.root / "bus" / "checkpoint.json", sequencer.position)
                assert records.write_json_once(self.root / "bus" / f"once-{step}.json", {})
                sequencer.release(step)
                producer.collect(credits.latest().retired_guid_below)
            sequencer.finish()
            sequencer.close()


def _digest(rows):
    seen = "".join(f"{t.guid}/{t.sibling}:{t.token_ids.tobytes()}" for t in rows)
    return hashlib.sha256(seen.encode()).hexdigest()


KINDS = [(errno.ESTALE, UNDONE), (errno.EIO, DONE), (errno.ETIMEDOUT, HALF), (errno.ENOSPC, HALF)]


@pytest.mark.parametrize(
    "kinds", [None, *(pytest.param([kind], marks=pytest.mark.soak) for kind in KINDS)]
)
def test_an_error_at_any_system_call_ends_nobody_and_loses_and_doubles_nothing(
    tmp_path, monkeypatch, kinds
):
    """Of every kind at every call; where time is short, of the kinds in turn."""
    kinds = kinds or KINDS
    (tmp_path / "undisturbed").mkdir()
    undisturbed = Run(tmp_path / "undisturbed")
    undisturbed.all_of_it()
    nth, hit = 0, set()
    while True:
        nth += 1
        run = Run(tmp_path / str(nth))
        with failing(monkeypatch, run.root / "bus", nth, *kinds[nth % len(kinds)]) as faults:
            run.all_of_it()
        if faults.call is None:
            break
        hit.add(faults.call)
        assert run.seen == undisturbed.seen, (nth, faults.call)
        counts = audit(run.paths)
        assert (counts.planned, counts.planned_twice, counts.dropped) == (8, 0, 0), nth
        shards = [r for r in read_log(run.paths.log("rollout-0")) if r.kind in SHARDS]
        assert [r.guid_min for r in shards] == list(range(P * STEPS)), (nth, faults.call)
        with Sequencer(run.paths, prompts_per_step=P, position=None) as again:
            assert again.num_planned == STEPS
    assert nth > 100, "too few places"
    assert hit >= {"open", "pwritev", "preadv", "fsync", "rename", "replace", "link"}


def _take_all_room(folder):
    path = folder / "filling"
    with pytest.raises(OSError, match="No space"), path.open("ab", 0) as file:
        while True:
            file.write(bytes(4096))
    return path


class Threads:
    """A whole run in two threads, each of which is one process for the bus."""

    def __init__(self, root, done):
        self._root, self._done = root, done
        self._paths = make_bus(root, ["rollout-0"])
        self.seen, self.errors = [], []
        self._threads = [threading.Thread(target=self._train), threading.Thread(target=self._make)]
        for thread in self._threads:
            thread.start()
            time.sleep(0.2)  # the first credit is the trainer's

    @property
    def alive(self):
        return all(thread.is_alive() for thread in self._threads) and not self.errors

    def join(self):
        for thread in self._threads:
            thread.join(60)
        assert not self.errors
        return self.seen, audit(self._paths)

    def _make(self):
        try:
            space, credits = Space(), CreditTail(self._paths)
            with Producer(self._paths, "rollout-0", {}) as producer:
                for guid in range(P * LONG):
                    while not space.write(partial(producer.put, [group(guid, response=2000)])):
                        time.sleep(0.01)
                    producer.collect(credits.latest().retired_guid_below)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test says it
            self.errors.append(error)

    def _train(self):
        try:
            reader = Reader(self._paths)
            with Sequencer(self._paths, prompts_per_step=P, position=None) as sequencer:
                for step in range(1, LONG + 1):
                    record = whole_batch(sequencer, step, timeout_s=6.0)
                    self.seen.append(_digest(reader.rows(record, range(record.num_trajectories))))
                    sequencer.advance(step=step, policy_version=step)
                    records.write_json(self._root / "record.json", {"step": step})
                    self._done(step)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test says it
            self.errors.append(error)


def test_a_run_on_a_disk_that_is_full_for_a_while_holds_and_completes(tmp_path, monkeypatch):
    """For longer than the trainer waits for a batch. Nobody is started again."""
    monkeypatch.setattr("relax_hpc.bus.durable.FULL_RETRY_S", 0.05)
    with small_tmpfs(tmp_path / "full", megabytes=8) as root:
        storage.settle(60.0, reserve=root / "control" / "reserve")
        filling = []
        run = Threads(
            root, lambda step: filling.append(_take_all_room(root)) if step == 5 else None
        )
        deadline = time.monotonic() + 60
        while not filling or not storage.is_short():
            assert time.monotonic() < deadline and not run.errors, run.errors
            time.sleep(0.01)
        time.sleep(7.0)
        assert run.alive and len(run.seen) < LONG, run.errors
        filling[0].unlink()
        seen, counts = run.join()
    rows = [group(guid, response=2000).trajectories for guid in range(P * LONG)]
    assert seen == [_digest([*rows[n], *rows[n + 1]]) for n in range(0, P * LONG, P)]
    assert (counts.planned_twice, counts.dropped) == (0, 0)
