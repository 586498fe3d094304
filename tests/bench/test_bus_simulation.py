import bus_flow
import pytest
from bus_flow import Outage
from bus_simulation import (
    Load,
    Site,
    breaking_point,
    credit_utilization,
    descriptor_utilization,
    operations,
    publish_latency,
    sequencer,
    utilization,
)

SITE = Site(capacity=1000, round_trip_s=1e-3, poll_cpu_s=0, admit_cpu_s=0, plan_cpu_s=0)


def test_the_load_of_the_metadata_server_adds_up_by_hand():
    # 100 producers, a shard every 50 s: 2 shards/s. Of each: create, rename, sync, unlink, its
    # writer's close, and an open and a close by rank 0 and by one other rank.
    load = Load(100, seconds_per_shard=50, sidecars=0)
    assert operations(load, SITE) == {
        "create": 2, "rename": 2, "sync_folder": 2, "unlink": 2, "open": 4, "close": 6,
    }  # fmt: skip
    work = 2 * 1.0 + 2 * 1.5 + 2 * 1.0 + 2 * 0.6 + 4 * 0.4 + 6 * 0.15
    assert utilization(load, SITE) == pytest.approx(work / 1000)


def test_what_rank_0_cannot_keep_open_it_opens_twice():
    few = Load(100, seconds_per_shard=50, sidecars=0)  # 120 shards a step
    many = few._replace(producers=300)  # 360, of which 256 may stay open
    assert operations(few, SITE)["open"] == 2 * 2
    assert operations(many, SITE)["open"] == 6 * 3


def test_logs_that_are_opened_anew_cost_an_open_and_a_close_per_poll():
    load = Load(100, seconds_per_shard=50, sidecars=0, credit_polls_per_s=2)
    there = operations(load, SITE)
    anew = operations(load._replace(direct=False), SITE)
    # 200 polls of the credits, and 1,000 logs a second, which a reader with 1 ms per log manages
    assert anew["open"] - there["open"] == pytest.approx(1200)
    assert anew["close"] - there["close"] == pytest.approx(1200)


def test_the_sequencer_is_busy_with_three_round_trips_a_shard_and_late_by_half_a_sweep():
    load = Load(1000, seconds_per_shard=10, sidecars=0)
    state = sequencer(load, SITE)
    assert state.busy == pytest.approx(100 * 3e-3)
    assert state.delay_s == pytest.approx((1000 * 1e-3 + 0.02) / 0.7 / 2)
    assert sequencer(load._replace(producers=4000), SITE).delay_s == float("inf")


@pytest.mark.parametrize("load", [Load(1), Load(1, sidecars=3), Load(1, direct=False)])
def test_a_part_is_below_its_limit_up_to_the_breaking_point_and_not_beyond(load):
    site = Site()
    uses = {
        "metadata server": utilization,
        "file of credits": credit_utilization,
        "sequencer": lambda load, site: sequencer(load, site).busy,
        "descriptors": descriptor_utilization,
    }
    for part, count in breaking_point(load, site).items():
        assert uses[part](load._replace(producers=count), site) >= 1
        assert uses[part](load._replace(producers=count - 1), site) < 1


def test_publishing_waits_for_its_own_operations_when_nobody_else_is_there():
    site = Site(capacity=1000, threads=2, round_trip_s=0.01)
    waits = publish_latency(Load(1, seconds_per_shard=1e6), site, seconds=1e5)
    # create 1, close 0.15, rename 1.5, sync 1: 3.65 units of 2 ms, and four round trips
    assert waits[len(waits) // 2] == pytest.approx(3.65 * 2e-3 + 4 * 0.01)


def test_publishing_waits_longer_near_saturation_and_for_ever_beyond():
    site = Site(capacity=1000)

    def p99(producers):
        return publish_latency(Load(producers), site, seconds=20)[-5]

    near = int(0.98 * breaking_point(Load(1), site)["metadata server"])
    assert p99(near) > 1.5 * p99(1)
    assert publish_latency(Load(2 * near), site) == []


FREE = Site(capacity=1e9, round_trip_s=0, admit_cpu_s=1e-9, poll_cpu_s=0, plan_cpu_s=0)


def test_a_bus_that_costs_nothing_loses_only_the_first_batch():
    flow = bus_flow.run(Load(100, sidecars=0), FREE)
    assert (flow.steps, flow.ideal_steps) == (29, 30)  # the first step has no batch yet
    assert flow.paused == 0


def test_half_of_the_publishing_that_is_needed_makes_half_of_the_steps():
    load = Load(1000, sidecars=0)
    # The batch takes twice as long to publish as to make; three batches are under way at the end.
    capacity = Site()._replace(capacity=Site().capacity * utilization(load, Site()) / 2)
    site = capacity._replace(round_trip_s=0, admit_cpu_s=1e-9)
    flow = bus_flow.run(load, site, duration_s=7200)
    assert flow.steps == pytest.approx(flow.ideal_steps / 2, abs=1)
    assert flow.outstanding == pytest.approx(3)  # max_staleness + 1: credits hold


@pytest.mark.parametrize("what", ["metadata server", "sequencer"])
@pytest.mark.parametrize("bound", [0, 1, 2])
def test_no_outage_makes_anything_staler_than_the_bound_or_pile_up(what, bound):
    flow = bus_flow.run(Load(1000), Site(), max_staleness=bound, outage=Outage(what, 300, 600))
    assert flow.max_staleness <= bound
    assert flow.outstanding <= bound + 1 + 1e-6
    # 300 s are five steps; a batch in hand bridges the first of them
    assert bus_flow.run(Load(1000), Site(), max_staleness=bound).steps - flow.steps <= 6
