"""What announced ends of a job took and wasted, by hand."""

from relax_hpc.runs import report
from relax_hpc.telemetry import ends


def event(time, kind, **fields):
    return {"time": time, "event": kind, "role": "actor", "rank": 0} | fields


def step(time, number, seconds):
    return event(time, "step", step=number, **{"time/step": seconds})


RUN = [
    event(1000, "start", attempt="7.0"),
    step(1300, 1, 200.0),
    step(1900, 2, 500.0),
    event(2100, "start", attempt="7.1"),
    step(2200, 3, 90.0),
    step(2290, 4, 80.0),
    event(2400, "start", attempt="7.2"),
    step(2500, 4, 90.0),
]


def test_what_was_drained_and_what_is_trained_again_is_waste_of_the_last_ten_minutes():
    records = {
        "7.1": {"time": 2291.0, "asked": 2300.0, "limit": 2380.0},
        "7.0": {"time": 1901.0, "asked": 1904.0, "limit": None},
    }
    first, second = ends.announced(records, RUN)
    assert first == ("7.0", 3.0, 600.0, 3.0)  # it ran for longer than 10 minutes
    assert second == ("7.1", 9.0, 200.0, 9.0 + 80.0)  # and this one 200 s
    [(name, said)] = report._announced_ends([first._asdict(), second._asdict()])
    assert name == "ends"
    assert said == (
        "2 announced: requeued 9.0 s after that at most; 11.5% of the last 10 minutes before them "
        "wasted"
    )
    assert report._announced_ends([]) == []


def test_a_step_that_is_trained_again_counts_as_far_as_it_lies_in_the_ten_minutes():
    # Step 2 ended 5 s before the window, step 3 began 95 s before it.
    run = [
        event(0, "start", attempt="7.0"), step(995, 2, 300.0), step(1105, 3, 200.0),
        event(1700, "start", attempt="7.1"), step(1800, 2, 1.0), step(1900, 3, 1.0),
    ]  # fmt: skip
    [end] = ends.announced({"7.0": {"time": 1599.0, "asked": 1600.0}}, run)
    assert (end.window_s, end.wasted_s) == (600.0, 105.0 + 1.0)


def test_an_end_that_was_refused_or_is_under_way_is_none_yet():
    records = {"7.0": {"time": 1901.0, "refused": "by Slurm"}, "7.1": {"time": 2291.0}}
    assert ends.announced(records, RUN) == []
