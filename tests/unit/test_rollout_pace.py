"""How far rollout runs ahead, when it publishes, and which engines it may ask."""

import pytest
from episode_fakes import Folder
from roles import role_fakes
from test_rollout_backpressure import Events, config

from relax_hpc import job_file
from relax_hpc.bus.credits import Credit
from relax_hpc.errors import ConfigError
from relax_hpc.fleet.members import Member
from relax_hpc.fleet.roster import Roster, RosterEntry
from relax_hpc.roles.rollout import loop as rollout
from relax_hpc.sampling.client import engine_state
from relax_hpc.schema import PromptGroup


def pace(over_sampling=0.0, **schedule):
    over_age = "drop" if over_sampling else "wait"
    settings = config(num_steps=9, over_age=over_age, **schedule)
    rollout_config = settings.rollout.model_copy(update={"over_sampling": over_sampling})
    return rollout.Pace(settings.model_copy(update={"rollout": rollout_config}))


def admitted(pace, version):
    return sum(pace.may_start(guid, version) for guid in range(100))


def test_groups_start_within_the_staleness_bound_and_with_over_sampling_so_many_more():
    # 4 prompts a step; with version 2 step 3 is next
    assert admitted(pace(max_staleness=0), 2) == 12
    assert admitted(pace(max_staleness=1), 2) == 16
    assert admitted(pace(over_sampling=0.5, max_staleness=0), 2) == 14
    assert admitted(pace(over_sampling=0.5, max_staleness=1), 2) == 18
    assert admitted(pace(max_staleness=1), None) == 0  # there is no engine


def told(pace, step, *ends):
    pace.follow(Credit(step=step, policy_version=step, batch_ends=ends))
    return pace


def test_what_is_skipped_moves_the_ends_of_batches():
    # 4 prompts a step; of the first 14 groups 5 were skipped: 2 of batch 1, 3 of batch 2
    bound = told(pace(max_staleness=0), 0, 6, 13)
    batches = [bound.batch_of(guid) for guid in range(22)]
    assert batches == [1] * 6 + [2] * 7 + [3] * 4 + [4] * 4 + [5]
    assert [admitted(bound, version) for version in (0, 1, 2, 3)] == [6, 13, 17, 21]
    assert admitted(told(pace(max_staleness=1), 0, 6, 13), 0) == 13
    bound = told(pace(max_staleness=0), 3, 21, 25)  # of the batches from the fourth on
    assert bound.batch_of(0) == 4 and bound.batch_of(21) == 5
    assert admitted(bound, 3) == 21 and admitted(bound, 4) == 25
    over = told(pace(over_sampling=0.5, max_staleness=0), 0, 6, 13)
    assert admitted(over, 0) == 8


def test_as_many_groups_are_started_as_the_run_will_train_on():
    assert admitted(pace(max_staleness=5), 9) == 36  # nine steps
    assert admitted(told(pace(max_staleness=5), 8, 41), 9) == 41


def test_a_group_that_comes_earlier_than_its_place_wants_no_older_policy():
    bound = told(pace(max_staleness=1), 4, 22, 27)
    assert bound.min_version(24, 5) == 4  # batch 6
    assert bound.is_done(ready=[20], running=[22]) and not bound.is_done([22], [20])


def test_no_policy_beyond_the_bound_samples_for_a_group():
    bound = pace(max_staleness=1)
    assert bound.min_version(4 * 5, 5) == 4  # batch 6 is trained by step 6, on top of policy 5
    assert bound.min_version(0, 0) == 0
    over = pace(over_sampling=0.5, max_staleness=0)
    assert over.min_version(13, 2) == 2  # batch 4 wants policy 3, which is not there yet


def test_over_sampling_is_refused_where_batches_are_fixed():
    with pytest.raises(ConfigError, match=r"over_sampling = 0\.5: .*over_age to 'drop' or"):
        data = config().model_dump(mode="json", exclude_unset=True)
        data["rollout"]["over_sampling"] = 0.5
        job_file.validate(data, source="test")


def test_a_batch_is_published_when_its_last_group_is_done_and_not_before():
    batches = pace()
    assert not batches.is_done(ready=[0, 1, 3], running=[2, 4, 5])
    assert batches.is_done(ready=[0, 1, 2, 3], running=[4, 5])
    assert not batches.is_done(ready=[0, 1, 2, 3, 5], running=[4])
    assert batches.is_done(ready=[0], running=[])


def test_a_finished_group_does_not_wait_long_for_others(monkeypatch):
    published = []
    monkeypatch.setattr(rollout, "publish", lambda producer, groups, **_: published.append(groups))
    outbox = rollout.Outbox(Folder(), Events(), role_fakes.config(rollout__groups_per_shard=3))
    first, second = PromptGroup(0, []), PromptGroup(1, [])
    outbox.add([first])
    outbox.send(rest=False)
    assert published == [] and outbox.guids == [0]
    monkeypatch.setattr(rollout, "READY_S", -1.0)
    outbox.send(rest=False)
    assert published == [[first]] and outbox.guids == []
    outbox.send(rest=True)
    assert len(published) == 1  # nothing is no shard
    monkeypatch.setattr(rollout, "READY_S", 1e9)
    outbox.add([second])
    outbox.add([first])
    outbox.send(rest=False)
    assert len(published) == 1  # a shard is three
    outbox.add([second])
    outbox.send(rest=False)
    assert published[1:] == [[second, first, second]]


def member(state="HEALTHY", start="a"):
    return Member("extra-1", start, "http://x", 1, "embedded", state)


def roster(version=3, state="ACTIVE", start="a", at=3):
    return Roster(version, {"extra-1": RosterEntry(start, at, state)})


@pytest.mark.parametrize(
    ("record", "known", "own", "expected"),
    [
        (member(), None, True, "serving"),
        (member(), None, False, "held"),
        (member(), roster(), False, "serving"),
        (member(), roster(version=4), False, "held"),
        (member(), roster(state="SYNCING"), True, "held"),
        (member(), roster(state="FENCED", at=None), True, "lost"),
        (member(start="b"), roster(state="FENCED", at=None), True, "held"),
        (member(start="b"), roster(), True, "held"),
        (member(), Roster(3, {}), True, "held"),
        (member("DRAINING"), roster(), False, "held"),
        (member("STARTING"), roster(), True, "lost"),
        (member("GONE"), roster(), True, "lost"),
        (member("FAILED"), None, True, "lost"),
    ],
)
def test_only_an_engine_whose_records_agree_on_the_newest_policy_is_sent_requests(
    record, known, own, expected
):
    assert engine_state(record, known, own=own) == expected
