"""How an engine is started, which seed it has, when it is given up: without an engine."""

import dataclasses
import threading
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
from role_fakes import Events, config

from relax_hpc.errors import EngineError
from relax_hpc.inference import members
from relax_hpc.inference.members import Member, Roster, RosterEntry
from relax_hpc.inference.spec import NodeShare
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.engine import host as engine_host
from relax_hpc.roles.engine import loop
from relax_hpc.roles.engine.host import EngineHost, EngineSlot, HostCall, hosting_of, slots_of
from relax_hpc.runtime.files.records import write_json
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths

CONTEXT = TaskContext("rollout", 1, 2, 0, attempt="7.0", start=2, node="here")
SLOT = EngineSlot("rollout-1", number=3, local_index=1)


@pytest.fixture
def host_of(tmp_path):
    def make(slot=SLOT, **settings):
        settings = {"seed": 40} | settings
        paths = RunPaths(tmp_path)
        RunSecret.create(paths.secret)
        return EngineHost(hosting_of(config(**settings), slot), paths, CONTEXT, Events())

    return make


def test_an_engine_is_started_with_the_models_settings_its_own_seed_and_its_token(
    host_of, monkeypatch
):
    started = []
    monkeypatch.setattr(engine_host, "start_engine", lambda *a, **k: started.append((a, k)))
    monkeypatch.setattr(engine_host, "node_address", lambda: "10.0.0.1")
    host = host_of(
        model__path="the model", model__dtype="float16",
        engines__rollout__max_running_requests=77,
    )  # fmt: skip
    of_before = host._paths.switch("rollout-1", "6.0-1-1", 3)
    of_before.parent.mkdir(parents=True)
    of_before.touch()
    host._member = host._new_member(5)
    host._start()
    assert not of_before.exists()
    [(given, how)] = started
    [spec] = given
    assert (spec.kind, str(spec.model_path)) == ("embedded", "the model")
    assert (how["host"], spec.dtype, spec.seed) == ("10.0.0.1", "float16", 43)
    secret = RunSecret.read(host._paths.secret)
    assert how["token"] == host.token == secret.engine_token("rollout-1", "7.0-2-5")
    assert how["log_path"] == host._paths.engine_log("rollout-1", "7.0-2-5")
    assert spec.quantization is None and spec.max_running_requests == 77
    told = members.find(host._paths, "rollout-1")
    assert (told.start, told.state, told.num_ranks, told.lane) == ("7.0-2-5", "STARTING", 1, -1)
    host._member = host._new_member(6)
    assert host.token != how["token"]


@pytest.mark.parametrize(("most", "given_up_at"), [(0, 1), (2, 3)])
def test_an_engine_is_given_up_when_it_ended_too_often_within_the_window(
    host_of, monkeypatch, most, given_up_at
):
    monkeypatch.setattr(engine_host, "RESTART_WINDOW_S", 100)
    host = host_of(launch__max_restarts=most)
    ends = []
    for number in range(1, given_up_at):
        ends = host._allow_restart([*ends, 10.0 * number], "died\nlast lines")
    with pytest.raises(EngineError, match=rf"rollout-1 ended {given_up_at} times within 100 s"):
        host._allow_restart([*ends, 10.0 * given_up_at], "died")
    assert host._events.of("engine_end")[0]["reason"] == "died"


def test_ends_that_are_long_ago_do_not_count(host_of, monkeypatch):
    monkeypatch.setattr(engine_host, "RESTART_WINDOW_S", 100)
    host = host_of(launch__max_restarts=1)
    ends = host._allow_restart([0.0], "died")
    assert host._allow_restart([*ends, 100.0], "died") == [100.0]
    assert host._allow_restart([150.0 - 100.0, 300.0], "died") == [300.0]


def lives(monkeypatch, host, answers):
    """Every start ends at once as an answer says; returns the starts and what was announced."""
    starts, told = [], []

    def live(start):
        starts.append(start)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(host, "_live", live)
    monkeypatch.setattr(host, "_announce", lambda state, reason="": told.append((state, reason)))
    return starts, told


def test_an_engine_is_started_again_under_the_next_number_until_it_is_stopped(host_of, monkeypatch):
    host = host_of()
    starts, told = lives(monkeypatch, host, ["was killed\nits log", "hangs", None])
    host._keep()
    assert starts == [1, 2, 3]
    again = [("STARTING", "again, since it was killed"), ("STARTING", "again, since it hangs")]
    assert told == [*again, ("GONE", "")]


def test_an_engine_that_drains_is_not_started_again(host_of, monkeypatch):
    host = host_of()
    starts, told = lives(monkeypatch, host, ["was killed"])
    host.drain()
    host._keep()
    assert starts == [1] and told == [("DRAINING", ""), ("GONE", "")]


def test_an_engine_that_fails_says_why_in_a_line_with_the_last_one_of_its_log(host_of, monkeypatch):
    host = host_of()
    _, told = lives(monkeypatch, host, [EngineError("no memory\nlog 1\n  CUDA error ")])
    with pytest.raises(EngineError):
        host._keep()
    assert told == [("FAILED", "no memory CUDA error")]
    assert engine_host._in_short(KeyError()) == "KeyError()"


@pytest.mark.parametrize(("start", "nodes", "fails"), [(1, 1, True), (2, 1, False), (1, 2, False)])
def test_only_the_very_first_start_of_an_engine_on_one_node_has_to_succeed(
    host_of, monkeypatch, start, nodes, fails
):
    host = host_of()
    host._spec = dataclasses.replace(host._spec, nodes=nodes)

    def refuse():
        raise EngineError("no port")

    monkeypatch.setattr(host, "_start", refuse)
    if fails:
        with pytest.raises(EngineError, match="engine rollout-1: no port"):
            host._live(start)
    else:
        assert host._live(start) == "did not start: no port"


def test_an_engine_waits_until_the_trainer_lends_its_gpus(host_of, monkeypatch):
    monkeypatch.setattr(engine_host.members, "is_with_engines", lambda paths, attempt: turns.pop(0))
    host = host_of()
    assert host._has_gpus(), "its own"
    host._hosting = dataclasses.replace(host._hosting, shares_gpus=True)
    told = []

    def announce(state, reason=""):
        host._member = host._member._replace(state=state, reason=reason)
        told.append(state)

    monkeypatch.setattr(host, "_announce", announce)
    turns = [False, False, False]
    assert not host._has_gpus() and not host._has_gpus()
    assert told == ["WAITING"]
    turns = [True, False]  # the trainer took it back between the announcement and the look
    assert not host._has_gpus()
    assert told == ["WAITING", "STARTING", "WAITING"]
    turns = [True, True]
    assert host._has_gpus()
    assert told[3:] == ["STARTING"] and not turns
    host.ask_to_stop()
    with pytest.raises(engine_host._Stopped):
        host._has_gpus()


class Process:
    """An engine that has its `end` said to it."""

    def __init__(self, end=""):
        self.said, self.stopped = end, []

    def end(self):
        return self.said

    def cause(self):
        return "OutOfMemoryError"

    def last_lines(self):
        return "the log"

    def whereabouts(self):
        return "process 1: state T"

    def stop(self, grace_s):
        self.stopped.append(grace_s)

    def __str__(self):
        return "engine http"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class Pulse:
    def __init__(self, silent_s=0.0):
        self.silent_s, self.excused = silent_s, 0

    def excuse(self):
        self.excused, self.silent_s = self.excused + 1, 0.0


def watch(host, monkeypatch, engine, pulse, entry=None):
    monkeypatch.setattr(engine_host, "_WATCH_S", 0.001)
    host._member = host._new_member(1)
    if entry:
        Roster(4, {"rollout-1": entry}).write(host._paths)
    timer = threading.Timer(0.05, host.ask_to_stop)
    timer.start()
    try:
        return host._watch(engine, pulse)
    finally:
        timer.cancel()


@pytest.mark.parametrize(
    ("engine", "silent_s", "entry", "why"),
    [
        (Process(), 0, None, None),
        (Process("was killed"), 0, None, "was killed while serving: OutOfMemoryError\nthe log"),
        (Process(), 121, None, "hangs: engine http has said nothing for 121 s"),
        (Process(), 119, None, None),
        (Process(), 121, RosterEntry("7.0-2-1", None, "SYNCING"), None),  # it need not answer
        (Process(), 121, RosterEntry("7.0-2-0", None, "SYNCING"), "hangs: "),  # its last start
        (Process(), 0, RosterEntry("7.0-2-1", None, "FENCED", "torn"), "was fenced: torn"),
        (Process(), 0, RosterEntry("7.0-2-0", None, "FENCED", "torn"), None),
    ],
)
def test_an_engine_is_ended_when_it_died_hangs_or_is_fenced_in_this_very_start(
    host_of, monkeypatch, engine, silent_s, entry, why
):
    found = watch(host_of(), monkeypatch, engine, Pulse(silent_s), entry)
    assert found is None if why is None else found.startswith(why)
    assert bool(engine.stopped) == bool(why and why.startswith("hangs"))


def test_a_part_runs_its_share_of_the_start_that_its_host_called_for(tmp_path, monkeypatch):
    started, paths = [], RunPaths(tmp_path)
    settings = config(
        seed=40, engines__rollout__kind="sglang", engines__rollout__nodes_per_engine=2,
        engines__rollout__count=2, engines__rollout__resources__nodes=4,
        engines__rollout__args={"tp_size": 4}, engines__rollout__resources__gpus_per_node=2,
    )  # fmt: skip
    slot = EngineSlot("rollout-1", number=5, local_index=0, part=1)
    context = TaskContext("rollout", 3, 4, 0, attempt="7.0", start=2, node="n3")
    part = engine_host._Part(hosting_of(settings, slot), paths, context)
    call = HostCall("7.0-2-1", "10.0.0.1:77", over=False)
    monkeypatch.setattr(engine_host, "_POLL_S", 0.001)

    def start(spec, **how):
        started.append((spec, how))
        how["progress"]("loading")
        return Process("was killed")

    monkeypatch.setattr(engine_host, "start_engine", start)
    write_json(paths.engine_call("rollout-1"), call._asdict())
    assert part.run(call) == "was killed\nthe log"
    [(spec, how)] = started
    assert how["share"] == NodeShare(2, 1, "10.0.0.1:77") and spec.seed == 45
    assert how["least_gpus"] == 2, "of this node"
    assert how["log_path"] == paths.engine_log("rollout-1.part1", "7.0-2-1")
    write_json(paths.engine_call("rollout-1"), call._replace(start="7.0-2-2")._asdict())
    part.report(call, "ended\nmore")
    host = engine_host.Parts(paths, "rollout-1", 2)
    assert host.end("7.0-2-1") == "lost part 1 on n3: it ended"
    assert host.end("7.0-2-2") == ""


def test_engines_of_tasks_on_one_node_sit_side_by_side():
    settings = config(engines__rollout__count=8, engines__rollout__engines_per_task=2).rollout_pool
    slots = [
        slot
        for rank in range(4)
        for slot in slots_of(
            settings, TaskContext("rollout", rank, 4, rank % 2, attempt="7.0", start=1, node="n")
        )
    ]
    assert [slot.number for slot in slots] == list(range(8))
    assert [slot.local_index for slot in slots] == [0, 1, 2, 3] * 2


def test_an_added_engine_has_a_seed_beyond_those_that_were_there(tmp_path, monkeypatch):
    made = []

    @contextmanager
    def host(hosting, paths, context, events):
        made.append(hosting.slot)
        drain = partial(made.append, "drain")
        yield SimpleNamespace(token="t", attends="none", ask_to_stop=int, drain=drain)

    paths, events = RunPaths(tmp_path), Events()
    monkeypatch.setattr(loop, "EngineHost", host)
    monkeypatch.setattr(loop.signal, "signal", lambda *_: None)
    monkeypatch.setattr(loop, "_POLL_S", 0.001)
    monkeypatch.setattr(loop, "_NOTICE_S", 0.001)
    context = TaskContext("extra", 2, 3, 1, attempt="7.0", start=1, node="n")
    write_json(paths.drain(context.name), {"drain_s": 0.5})
    loop.main_of_added(config(engines__rollout__count=4), paths, context, events)
    assert made == [EngineSlot(context.name, number=6, local_index=1), "drain"]
    assert [event["aborted"] for event in events.of("drain")] == [0]


def test_an_added_engine_serves_until_the_word_to_end_and_ends_if_its_engine_failed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "_POLL_S", 0.001)
    paths, never = RunPaths(tmp_path), threading.Event()
    write_json(paths.drain("extra-1"), {"drain_s": 12.5})
    assert loop._serve(paths, "extra-1", never) == 12.5
    members.announce(paths, Member("extra-1", "e", "", 1, "embedded", "FAILED", reason="no memory"))
    with pytest.raises(EngineError, match="extra-1 failed: no memory"):
        loop._serve(paths, "extra-1", never)
    never.set()
    assert loop._serve(paths, "extra-1", never) == 0.0


def test_an_engine_that_leaves_stays_to_the_end_of_an_update(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "_POLL_S", 0.001)
    paths = RunPaths(tmp_path)
    Roster(4, {"extra-1": RosterEntry("e", None, "SYNCING")}).write(paths)
    over = Roster(4, {"extra-1": RosterEntry("e", 4, "ACTIVE")})
    looks = []

    class Waits(threading.Event):
        def wait(self, timeout=None):
            looks.append(timeout)
            if len(looks) == 3:
                over.write(paths)
            return False

    loop._leave_update(paths, "extra-1", Waits())
    assert len(looks) == 3
