"""Prompts are dealt over other rollout tasks between two jobs: nothing begun moves or is lost."""

import errno
import itertools
import random

import pytest
from bus_fixtures import group, make_bus, produce, whole_batch
from failing_calls import DONE, HALF, UNDONE, failing

from relax_hpc.bus import layout
from relax_hpc.bus.audit import audit
from relax_hpc.bus.layout import Deal, Deals, open_bus
from relax_hpc.bus.plan import read_chain
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.errors import BusError, FencedError, PeerTimeoutError
from relax_hpc.roles.rollout.folders import Folders
from relax_hpc.runtime.files.records import read_json, write_json

P = 4


def names(count):
    return [f"rollout-{number}" for number in range(count)]


def first(deals, task, count, *, start=0):
    return list(itertools.islice(Deals(deals).guids(task, start=start), count))


def test_two_tasks_then_one_then_three():
    deals = [Deal(0, 2), Deal(5, 1), Deal(9, 3)]
    assert first(deals, 0, 10) == [0, 2, 4, 5, 6, 7, 8, 9, 12, 15]
    assert first(deals, 1, 5) == [1, 3, 10, 13, 16]
    assert first(deals, 2, 3) == [11, 14, 17]
    assert first(deals, 1, 3, start=3) == [3, 10, 13] and first(deals, 0, 2, start=13) == [15, 18]
    folders = [Deals(deals).folder_of(guid) for guid in range(13)]
    assert folders == [0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 2, 0]


def test_of_fewer_tasks_each_keeps_the_folders_of_some_that_are_no_more():
    deals = [Deal(0, 5), Deal(10, 2)]
    assert [Deals(deals).task_of(folder) for folder in range(5)] == [0, 1, 0, 1, 0]
    assert first(deals, 0, 9) == [0, 2, 4, 5, 7, 9, 10, 12, 14]
    assert first(deals, 1, 6) == [1, 3, 6, 8, 11, 13]


@pytest.mark.parametrize("seed", range(20))
def test_however_it_is_dealt_each_prompt_is_one_task_s_and_they_rise(seed):
    dice = random.Random(seed)
    begins = [0, *sorted(dice.sample(range(1, 40), dice.randrange(5)))]
    deals = Deals(Deal(begin, dice.randrange(1, 6)) for begin in begins)
    start = dice.randrange(30)
    tasks = range(deals.num_tasks)
    shares = [
        list(itertools.takewhile(lambda guid: guid < 60, deals.guids(task, start=start)))
        for task in tasks
    ]
    assert sorted(guid for share in shares for guid in share) == list(range(start, 60))
    for task, share in zip(tasks, shares, strict=True):
        assert share == sorted(share)
        assert {deals.task_of(deals.folder_of(guid)) for guid in share} <= {task}


def test_what_is_begun_stays_in_its_folder_and_the_rest_is_dealt_anew(tmp_path):
    paths = make_bus(tmp_path)
    header = paths.header.read_bytes()
    layout.deal(paths, names(2))
    assert paths.header.read_bytes() == header, "as many as before change nothing"
    layout.deal(paths, names(3))
    assert open_bus(paths).deals == ((0, 3),), "nothing was begun"
    layout.deal(paths, names(2))
    produce(paths, "rollout-0", [0, 4])
    with Producer(paths, "rollout-1", {}) as producer:
        producer.put_partial([group(7)])
    layout.deal(paths, names(1))
    assert open_bus(paths).deals == ((0, 2), (8, 1))
    layout.deal(paths, names(4))
    assert open_bus(paths).deals == ((0, 2), (8, 4)), "the one task has begun nothing"
    assert open_bus(paths).producers == names(4)
    layout.deal(paths, names(2))
    assert open_bus(paths).deals == ((0, 2),), "nor have the four"
    assert open_bus(paths).producers == names(4)


def test_a_run_of_before_that_says_nothing_of_deals_has_one(tmp_path):
    paths = make_bus(tmp_path)
    record = read_json(paths.header)
    assert record.pop("deals") == [[0, 2]]
    write_json(paths.header, record)
    assert open_bus(paths).deals == ((0, 2),)


@pytest.mark.parametrize("how", [UNDONE, DONE, HALF])
@pytest.mark.parametrize("wanted", [1, 4])
def test_whoever_dies_anywhere_in_a_deal_leaves_a_run_that_any_number_of_tasks_goes_on_with(
    tmp_path, monkeypatch, how, wanted
):
    then = itertools.cycle([2, wanted, 3])
    for nth in itertools.count(1):
        paths = make_bus(tmp_path / str(nth))
        produce(paths, "rollout-0", [0, 2])
        produce(paths, "rollout-1", [5])
        with failing(monkeypatch, paths.root, nth, errno.EACCES, how) as faults:
            try:
                layout.deal(paths, names(wanted))
            except (BusError, OSError):
                assert faults.call is not None
        if faults.call is None:
            break
        left = open_bus(paths).deals
        assert left in (((0, 2),), ((0, 2), (6, wanted)))
        count = next(then)
        layout.deal(paths, names(count))
        header = open_bus(paths)
        assert header.deals.num_tasks == count
        assert [header.deals.folder_of(guid) for guid in range(6)] == [0, 1] * 3
        assert header.producers == names(len(header.producers)) and len(header.producers) >= count
        assert all(paths.log(name).exists() for name in header.producers)
    assert nth > 10, "too few places"


def test_a_task_goes_on_with_what_the_tasks_that_are_no_more_have_kept_and_fences_them(tmp_path):
    paths = make_bus(tmp_path, names(3))
    old = [Producer(paths, name, {"job": 7}) for name in names(3)]
    old[0].put([group(0)])
    old[1].put_partial([group(1), group(4)])
    old[2].put([group(2)])
    old[2].put_partial([group(5)])
    layout.deal(paths, names(2))
    with Folders.open(paths, 0, 2, {"job": 8}) as kept, Folders.open(paths, 1, 2, {}) as other:
        assert kept.committed == {0, 2} and kept.partial.keys() == {5}
        assert other.committed == set() and other.partial.keys() == {1, 4}
        assert kept.partial_origin[5]["job"] == 7 and kept.times_kept(5) == 1
        assert [[g.guid for g in lot] for lot in kept.lots([group(g) for g in (3, 5, 6)])] == [
            [3, 6], [5]
        ]  # fmt: skip
        for lot in kept.lots([group(3), group(5)]):
            kept.put(lot)
        assert kept.committed == {0, 2, 3, 5} and kept.partial == {}
        for producer in old:
            with pytest.raises(FencedError):
                producer.put([group(8)])
        assert kept.collect(6) == 5, "all shards of both folders"


def test_tasks_of_another_number_than_prompts_are_dealt_over_do_not_begin(tmp_path):
    paths = make_bus(tmp_path)
    with (
        pytest.raises(BusError, match="over 2 rollout tasks, this job has 3; cancel the run and"),
        Folders.open(paths, 0, 3, {}),
    ):
        pass
    assert paths.log("rollout-0").read_bytes() == b""


def test_who_is_waited_for_is_the_task_that_there_is(tmp_path):
    paths = make_bus(tmp_path)
    produce(paths, "rollout-0", [2])
    produce(paths, "rollout-1", [5])
    layout.deal(paths, names(1))
    with Sequencer(paths, prompts_per_step=2 * P, position=None) as sequencer:
        late = (
            r"rollout-0 owes \[0, 4, 6, 7\] \(its log has 3 records\); "
            r"rollout-0 owes \[1, 3\] \(its log in rollout-1 has 3 records\)"
        )
        with pytest.raises(PeerTimeoutError, match=late):
            sequencer.next_portion(1, timeout_s=0)


class Lives:
    """A run whose tasks are killed again and again, and are others in number afterwards."""

    def __init__(self, root, seed):
        self.paths, self.dice = make_bus(root), random.Random(seed)
        self.kept, self.number, self.position, self.step = {}, 0, None, 0
        """Of unfinished groups: the life in which they were kept."""

    def live(self, count, horizon, *, finishes=False):
        """Each task commits, keeps or loses prompts below `horizon`, and is killed then."""
        self.number += 1
        layout.deal(self.paths, names(count))
        found = {}
        for task in range(count):
            with (
                pytest.raises(KeyboardInterrupt),
                Folders.open(self.paths, task, count, {}) as kept,
            ):
                for guid, begun in kept.partial.items():
                    assert guid not in found, "one task goes on with it"
                    found[guid] = int(begun.trajectories[0].version_runs[0, 1])
                self._work(kept, horizon, finishes=finishes)
                raise KeyboardInterrupt
        before = {guid: life for guid, life in self.kept.items() if life < self.number}
        assert {g: life for g, life in found.items() if g in before} == before
        self._train()

    def _work(self, kept, horizon, *, finishes):
        for guid in [*itertools.takewhile(lambda g: g < horizon, kept.list_owed(start=0))]:
            drawn = 0 if finishes else self.dice.random()
            if drawn < 0.5:
                version = self.kept.pop(guid, 0)
                kept.put([group(guid, version=version)])
            elif drawn < 0.8 and guid not in self.kept:
                kept.put_partial([group(guid, version=self.number)])
                self.kept[guid] = self.number

    def _train(self):
        with Sequencer(self.paths, prompts_per_step=P, position=self.position) as sequencer:
            while True:
                try:
                    whole_batch(sequencer, self.step + 1, timeout_s=0)
                except PeerTimeoutError:
                    return
                self.step, self.position = self.step + 1, sequencer.position


@pytest.mark.parametrize("seed", range(4))
def test_every_prompt_is_trained_once_and_every_partial_gone_on_with_by_one_task(tmp_path, seed):
    lives = Lives(tmp_path, seed)
    counts = [2, 1, 3, 3, lives.dice.randrange(1, 6), lives.dice.randrange(1, 6)]
    for number, count in enumerate(counts, start=1):
        lives.live(count, 5 * number)
    steps = 5 * len(counts) // P + 1
    lives.live(2, steps * P, finishes=True)
    assert lives.kept == {} and lives.step == steps
    plan = [guid for record in read_chain(lives.paths).steps for guid in record.guids]
    assert plan == list(range(steps * P))
    counted = audit(lives.paths)
    assert counted.committed == counted.planned == 2 * steps * P
    assert counted.planned_twice == counted.duplicates == counted.dropped == 0
