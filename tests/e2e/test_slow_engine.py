"""An engine that is much slower than its neighbours, as its user sees it who lets it rest."""

import os
import signal
import threading

import pytest
from e2e_runs import cli, events_of, status, submit, wait_for

pytestmark = pytest.mark.long

SLOW = "rollout-0.1"


class Held:
    """Holds a process up nine tenths of the time, until it is closed."""

    def __init__(self, pid):
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._hold)
        self._thread.start()

    def _hold(self):
        while not self._over.wait(0.05):
            os.kill(self._pid, signal.SIGSTOP)
            self._over.wait(0.45)
            os.kill(self._pid, signal.SIGCONT)

    def close(self):
        self._over.set()
        self._thread.join()


def test_a_slow_engine_is_named_and_asked_nothing_new_while_the_others_work(tiny, tmp_path):
    run_dir = submit(
        "demo", tiny, local=True,
        run_root=tmp_path, engines__rollout__count=3, engines__rollout__engines_per_task=3,
        engines__rollout__advanced__drain_slow="true", schedule__num_steps=2000,
        actor__save_every=2000, rollout__max_new_tokens=64,
        eval__heldout__every=0, eval__heldout__num_prompts=8,
    ).run_dir  # fmt: skip
    held = None
    try:
        wait_for(lambda: len(events_of(run_dir, "rollout", "engine")) == 3, 120)
        [engine] = [e for e in events_of(run_dir, "rollout", "engine") if e["id"] == SLOW]
        held = Held(engine["engine_pid"])
        wait_for(lambda: events_of(run_dir, "rollout", "rests"), 240)
        [rests] = events_of(run_dir, "rollout", "rests")
        assert rests["id"] == SLOW and rests["rate"] < rests["median"] / 2

        def loads(name):
            found = events_of(run_dir, "rollout", "load")
            return [e for e in found if e["id"] == name and e["time"] > rests["time"] + 5]

        wait_for(lambda: any(e["in_flight"] == 0 for e in loads(SLOW)), 120)
        idle = next(e["time"] for e in loads(SLOW) if e["in_flight"] == 0)
        wait_for(lambda: len([e for e in loads(SLOW) if e["time"] > idle]) >= 3, 60)
        since = [e for e in loads(SLOW) if e["time"] > idle]
        assert [e["num_given"] for e in since] == [0] * len(since), "nothing new"
        assert sum(e["num_given"] for e in loads("rollout-0.0") if e["time"] > idle) > 0
        said = {each["id"]: each["reason"] for each in status(run_dir)["engines"]}
        assert "a task asks nothing new of it" in said[SLOW] and not said["rollout-0.0"]
    finally:
        if held:
            held.close()
        cli("cancel", run_dir)
