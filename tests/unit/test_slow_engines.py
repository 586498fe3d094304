"""An engine that is much slower than the others is named."""

from relax_hpc.runs import engine_rows


def load(name, num_tokens, time=100.0, in_flight=4, seconds=5.0):
    return {"event": "load", "time": time, "id": name, "num_tokens": num_tokens,
            "in_flight": in_flight, "seconds": seconds}  # fmt: skip


def test_an_engine_below_half_the_median_is_slow():
    events = [load("a", 2000), load("b", 2200), load("c", 900), load("d", 1200)]
    assert engine_rows.slow(events) == {}, "half of 80 is 40, and c has 45"
    events.append(load("c", 200))
    said = "slow: 27.5 tokens/s per request, the median engine 80"
    assert engine_rows.slow(events) == {"c": said}


def test_fewer_requests_or_none_or_a_bad_minute_long_ago_are_not_slow():
    events = [load("a", 2000), load("b", 2000), load("c", 2000)]
    fewer = load("d", 500, in_flight=1)
    idle = load("d", 0, in_flight=0)
    long_ago = load("c", 1, time=30.0)
    assert engine_rows.slow([*events, fewer, idle, long_ago]) == {}


def test_of_two_engines_none_is_slow():
    assert engine_rows.slow([load("a", 2000), load("b", 1)]) == {}
