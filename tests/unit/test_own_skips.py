"""What a rollout task makes of its own groups that teach nothing, before the trainer sees them."""

import random
from contextlib import ExitStack

from bus_fixtures import PRODUCERS, SIBLINGS, group, make_bus
from roles import role_fakes

from relax_hpc.bus.credits import Credit, CreditTail
from relax_hpc.bus.plan import read_chain
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.skips import SkippedGuids
from relax_hpc.errors import PeerTimeoutError
from relax_hpc.roles.dealing.portions import judge_of, most_skipped
from relax_hpc.roles.rollout import skips as skips_module
from relax_hpc.roles.rollout.folders import Folders
from relax_hpc.roles.rollout.loop import Pace
from relax_hpc.roles.rollout.skips import TaskSkips, exchange_of
from relax_hpc.runtime.files.records import read_json
from relax_hpc.runtime.paths import RunPaths

P = 4
APART = {"weights__transport": "files"}


def config(lag=1, **settings):
    return role_fakes.config(
        schedule__num_steps=99, schedule__prompts_per_step=P, schedule__max_staleness=lag,
        rollout__samples_per_prompt=SIBLINGS, algorithm__groups__name="refill", **settings,
    )  # fmt: skip


def sampled(guid, *, flat, version=0):
    """A group of equal rewards, or of different ones."""
    return group(guid, version=version, reward=1.0 if flat else None)


def ends(credit, skipped, lag=1):
    pace = Pace(config(lag))
    pace.follow(credit, skipped)
    return [min(g for g in range(99) if pace.batch_of(g) > b) for b in range(1, lag + 3)]


# the ends of batches


def test_own_skips_move_the_ends_of_batches_that_the_trainer_says():
    # 0 . . 3 4 5 | 6 7 8 9 | 10 ..
    assert ends(Credit(), [1, 2]) == [6, 10, 14]
    # 0 . . 3 4 . 6 | 7 8 9 . 11
    assert ends(Credit(), [1, 2, 5, 10]) == [7, 12, 16]
    told = Credit(batch_ends=(6, 13, 17))  # it knows of two in batch 1, of three in batch 2
    assert ends(told, []) == [6, 13, 17]
    assert ends(told, [4, 6, 20]) == [8, 15, 19]
    late = Credit(step=2, policy_version=2, batch_ends=(17, 21, 25))
    pace = Pace(config())
    pace.follow(late, [15, 17, 24])
    assert [pace.batch_of(g) for g in (16, 18, 19, 22, 23, 24)] == [3, 3, 4, 4, 5, 5]


def test_an_end_is_never_further_away_than_by_all_skips_and_as_far_if_all_are_own():
    for seed in range(300):
        dice = random.Random(seed)
        all_of_them = sorted(dice.sample(range(24), dice.randrange(16)))
        own = [guid for guid in all_of_them if dice.random() < 0.5]
        known = SkippedGuids(above=set(all_of_them) - set(own))
        both = SkippedGuids(above=all_of_them).batch_ends(1, 3, P) or [4, 8, 12]
        here = ends(Credit(batch_ends=tuple(known.batch_ends(1, 3, P))), own)
        assert all(mine <= theirs for mine, theirs in zip(here, both, strict=True)), seed
        assert ends(Credit(), all_of_them) == both, seed


# which groups they are


def test_they_are_own_from_the_moment_they_are_finished_until_the_trainer_has_seen_them(tmp_path):
    paths, made = make_bus(tmp_path), config()
    credits = CreditTail(paths)
    with Folders.open(paths, 0, len(PRODUCERS), {}) as folders:
        skips = TaskSkips(made, folders)
        groups = [sampled(guid, flat=guid in (2, 6)) for guid in (0, 2, 4, 6)]
        skips.judge(groups[:2])
        assert skips.unknown_to(None) == [2]
        folders.put(groups[:2])
        with Sequencer(
            paths, prompts_per_step=P, position=None, max_staleness=1, judge=judge_of(made)
        ) as trainer:
            assert credits.latest().seen == ()
            assert skips.unknown_to(credits.latest()) == [], "whether it knows cannot be told"
            trainer.look()
            assert credits.latest().seen == (1, 0)
            assert skips.unknown_to(credits.latest()) == []
            assert credits.latest().batch_ends[:1] == (5,)
            skips.judge(groups[2:])
            assert skips.unknown_to(credits.latest()) == [6]
            folders.put(groups[2:])
            assert skips.unknown_to(credits.latest()) == [6]
            trainer.look()
            assert credits.latest().batch_ends[:1] == (5,), "1, 3 are of the other task"
            assert skips.unknown_to(credits.latest()) == []
        skips.judge([sampled(8, flat=True)])
        assert skips.unknown_to(credits.latest()) == [8]
        skips.take_back([8])  # its shard was damaged
        assert skips.unknown_to(credits.latest()) == []
        skips.judge([sampled(8, flat=True)])
        assert skips.unknown_to(credits.latest()._replace(retired_guid_below=9)) == []


def test_without_a_trainer_no_more_are_replaced_than_it_would_let_pass():
    made = config(lag=0)
    skips, pace = TaskSkips(made, None), Pace(made)
    for guid in range(999):
        pace.follow(Credit(), skips.unknown_to(None))
        if pace.wait_reason(guid, 0):
            break
        skips.judge([sampled(guid, flat=True)])
    assert guid == most_skipped(made) + P == 44


# all of it


LAG, STEPS, NUM_GUIDS = 2, 6, 400


class Run:
    """Two tasks that go as far as they may, a trainer that looks now and then and starts again."""

    def __init__(self, paths, dice, folders):
        self.paths, self.dice, self.folders, self.made = paths, dice, folders, config(LAG)
        self.flat = {guid for guid in range(NUM_GUIDS) if dice.random() < 0.5}
        self.tasks = [(TaskSkips(self.made, each), Pace(self.made)) for each in folders]
        self.credits, self.credit = CreditTail(paths), None
        self.next_guids, self.running = [0, 1], {}
        self.trainer, self.position, self.step = None, None, 1
        self.num_ahead = 0
        """Groups that the trainer had not let them start yet."""

    def hear(self):
        self.credit = self.credits.latest()

    def start(self):
        credit, task = self.credit or Credit(), self.dice.randrange(2)
        (skips, pace), guid = self.tasks[task], self.next_guids[task]
        pace.follow(credit, skips.unknown_to(self.credit))
        if pace.wait_reason(guid, credit.policy_version) is None:
            self.num_ahead += bool(credit.batch_ends) and guid >= credit.batch_ends[LAG]
            self.running[guid] = credit.policy_version
            self.next_guids[task] += 2

    def finish(self):
        if self.running:
            guid = self.dice.choice(sorted(self.running))
            done = sampled(guid, flat=guid in self.flat, version=self.running.pop(guid))
            self.tasks[guid % 2][0].judge([done])
            self.folders[guid % 2].put([done])

    def restart(self):
        if self.trainer:
            self.trainer.close()
        self.trainer = Sequencer(
            self.paths, prompts_per_step=P, position=self.position, max_staleness=LAG,
            judge=judge_of(self.made),
        )  # fmt: skip
        self.trainer.advance(step=self.step - 1, policy_version=self.step - 1)

    def train(self):
        if self.trainer is None:
            return
        try:
            self.trainer.next_portion(self.step, timeout_s=-1)
        except PeerTimeoutError:
            return
        self.trainer.advance(step=self.step, policy_version=self.step)
        self.trainer.release(self.step - 1)
        self.position, self.step = self.trainer.position, self.step + 1


def test_no_token_is_staler_than_the_bound_and_batches_are_exact_whoever_knows_what(tmp_path):
    num_ahead = 0
    acts = {"start": 30, "finish": 15, "train": 10, "hear": 10, "restart": 1}
    for seed in range(8):
        paths = make_bus(tmp_path / str(seed))
        with ExitStack() as opened:
            folders = [opened.enter_context(Folders.open(paths, n, 2, {})) for n in (0, 1)]
            run = Run(paths, random.Random(seed), folders)
            while run.step <= STEPS:
                getattr(run, *run.dice.choices([*acts], [*acts.values()]))()
            run.trainer.close()
        num_ahead += run.num_ahead
        teaching = [guid for guid in range(NUM_GUIDS) if guid not in run.flat]
        for record in read_chain(paths).steps:
            assert sorted(record.guids) == teaching[(record.step - 1) * P : record.step * P], seed
            assert record.step - 1 - record.policy_version_min <= LAG, seed
    assert num_ahead > 10


# other tasks


def test_of_a_producer_that_a_trainer_did_not_know_nothing_was_seen():
    told = Credit(seen=(2, 9))
    places = ((0, 1), (0, 2), (1, 8), (2, 0), None)
    assert [told.covers(7, place) for place in places] == [1, 0, 1, 0, 0]
    retired = told._replace(retired_guid_below=8)
    assert [retired.covers(7, place) for place in places] == [1, 1, 1, 1, 1]
    assert [retired.covers(8, place) for place in places] == [1, 0, 1, 0, 0]


def test_tasks_that_have_nothing_to_do_tell_each_other_what_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(skips_module, "EXCHANGE_EVERY_S", 0.0)
    run, made = RunPaths(tmp_path / "run"), config(launch__layout="separate", **APART)
    paths = make_bus(tmp_path)
    with ExitStack() as opened:
        folders = [opened.enter_context(Folders.open(paths, n, 2, {})) for n in (0, 1)]
        tasks = [TaskSkips(made, f, exchange_of(made, run, n, 2)) for n, f in enumerate(folders)]
        tasks[0].judge([sampled(0, flat=True), sampled(2, flat=False)])
        tasks[1].judge([sampled(1, flat=True)])
        for task in tasks:
            task.note(idle=True)
        assert [task.unknown_to(None) for task in tasks] == [[0], [1]], "none is committed"
        folders[0].put([sampled(0, flat=True)])
        folders[1].put([sampled(1, flat=True)])
        for task in (*tasks, *tasks):
            task.note(idle=False)
        assert [task.unknown_to(None) for task in tasks] == [[0], [1]]
        for task in (*tasks, tasks[0]):
            task.note(idle=True)
        assert [task.unknown_to(None) for task in tasks] == [[0, 1], [0, 1]]
        assert read_json(run.skips(1)) == {"skips": [[1, 1, 0]]}
        half = Credit(seen=(1, 0))
        assert [task.unknown_to(half) for task in tasks] == [[1], [1]]
        assert [task.unknown_to(Credit(seen=(1, 1))) for task in tasks] == [[], []]
        assert [task.unknown_to(Credit()) for task in tasks] == [[], []]
