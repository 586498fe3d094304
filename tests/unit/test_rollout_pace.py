"""How far rollout runs ahead, when it publishes, and which engines it may ask."""

import pytest
from test_rollout_backpressure import Events, config

from relax_hpc import job_file
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
    monkeypatch.setattr(
        rollout, "publish", lambda producer, groups, events: published.append(groups)
    )
    outbox = rollout.Outbox(None, Events(), groups_per_shard=3)
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
