"""Storage that fails: each fault is survived or named, and the run goes on afterwards.

Damaged files (truncated, flipped, foreign, newer, empty) are in test_shard.py and
test_protocol.py; a full tmpfs while shards are written in test_crashes.py.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import bad_storage
import pytest
from bad_storage import NO_DIRECT, SHORT, Fault
from bus_roles import NAMED, expected, wait_for
from file_systems import btrfs_with_quota, full, read_only, small_ext4, small_tmpfs

pytestmark = pytest.mark.long

GROUPS = 8


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stage")
    if reason := bad_storage.missing(folder):
        pytest.skip(reason)
    with bad_storage.stage(folder) as stage:
        yield stage


@pytest.fixture
def bus(stage, tmp_path):
    assert stage.run("make", tmp_path / "bus").code == 0
    return tmp_path / "bus"


def finish(stage, bus, *, fault=None):
    """Runs everything to the end: nothing is lost, nothing is used twice.

    Returns:
        What the roles had to say.
    """
    names = ["rollout-0", "rollout-1"]
    producers = [stage.start("produce", bus, name, GROUPS, fault=fault) for name in names]
    trained = stage.run("train", bus, GROUPS, bus.with_name("checkpoint.json"), fault=fault)
    ended = [producer.end() for producer in producers]
    assert trained.code == 0, trained.err
    assert json.loads(trained.out) == expected(GROUPS)
    for outcome in ended:
        assert outcome.code == 0, outcome.err
    assert_sound(stage, bus)
    return [trained.err, *(outcome.err for outcome in ended)]


def assert_sound(stage, bus):
    counts = json.loads(stage.run("audit", bus).out)
    assert (counts["planned"], counts["planned_twice"], counts["dropped"]) == (2 * GROUPS, 0, 0)


def commit_all(stage, bus, groups=GROUPS):
    for rank in (0, 1):
        puts = [f"put:{guid}" for guid in range(rank, groups, 2)]
        outcome = stage.run("act", bus, f"rollout-{rank}", "open", *puts, "close")
        assert outcome.code == 0, outcome.err


def assert_named(outcome, *words):
    assert outcome.code == NAMED, outcome.err
    assert all(word in outcome.err for word in words), outcome.err


def survived_or_named(outcome, fault, bus):
    """A named error says which file it was about, and what the system said."""
    if outcome.code:
        assert_named(outcome, str(bus), os.strerror(fault.code))
        assert "Traceback" not in outcome.err


CODES = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE]
WRITES = [
    ("open", ".tmp"), ("pwritev", ".tmp"), ("fsync", ".tmp"), ("close", ".tmp"), ("rename", ".h5"),
    ("fsync", "/f"), ("mkdir", "/f"), ("open", "/log"), ("pwritev", "/log"), ("fsync", "/log"),
    ("open", "RUN.json"), ("read", "RUN.json"), ("preadv", "/log"), ("open", "/ballast"),
    ("write", "/ballast"),
]  # fmt: skip
PLANS = [
    ("open", "FENCE."), ("open", "/f0"), ("pwritev", "/f0"), ("fsync", "/f0"), ("open", "/credits"),
    ("pwritev", "/credits"), ("fsync", "/credits"), ("preadv", "/credits"), ("open", "/log"),
    ("preadv", "/log"), ("fsync", "/plan"), ("open", "RUN.json"), ("read", "RUN.json"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "path"), WRITES)
def test_a_producer_survives_or_names_what_its_storage_refuses(stage, bus, call, path):
    """One error after the other, each met by a new incarnation."""
    for groups, code in enumerate(CODES, start=1):
        fault = Fault(call, code, path)
        outcome = stage.run("act", bus, "rollout-0", "open", f"share:{2 * groups}", fault=fault)
        survived_or_named(outcome, fault, bus)
    finish(stage, bus)


@pytest.mark.parametrize(("call", "path"), PLANS)
def test_a_trainer_survives_or_names_what_its_storage_refuses(stage, bus, call, path):
    commit_all(stage, bus)
    for code in CODES:
        fault = Fault(call, code, path)
        outcome = stage.run("plan", bus, "open", "batch:1", "advance:1", "batch:2", fault=fault)
        survived_or_named(outcome, fault, bus)
    finish(stage, bus)


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_shard_that_cannot_be_read_is_named_or_sampled_again(stage, bus, call, code):
    fault = Fault(call, code, ".h5", after=1)
    names = ["rollout-0", "rollout-1"]
    producers = [stage.start("produce", bus, name, GROUPS) for name in names]
    checkpoint = bus.with_name("checkpoint.json")
    trained = stage.run("train", bus, GROUPS, checkpoint, fault=fault)
    if trained.code:
        survived_or_named(trained, fault, bus)
        trained = stage.run("train", bus, GROUPS, checkpoint)
    assert json.loads(trained.out) == expected(GROUPS)
    assert [producer.end().code for producer in producers] == [0, 0]
    assert_sound(stage, bus)


HALF = [
    ("pwritev", SHORT), ("preadv", SHORT), ("open", errno.EINTR), ("pwritev", errno.EINTR),
    ("preadv", errno.EINTR), ("fsync", errno.EINTR),
]  # fmt: skip


@pytest.mark.parametrize(("call", "code"), HALF)
def test_short_and_interrupted_calls_change_nothing(stage, bus, call, code):
    finish(stage, bus, fault=Fault(call, code, "/bus/", after=1, times=200))


@pytest.mark.parametrize("call", ["open", "fsync", "mkdir", "write", "rename"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
def test_a_bus_is_made_whole_or_is_none(stage, tmp_path, call, code):
    path = "RUN.json" if call in ("write", "rename") else "/bus"
    fault = Fault(call, code, path, after=2 if call in ("open", "fsync", "mkdir") else 0)
    outcome = stage.run("make", tmp_path / "bus", fault=fault)
    survived_or_named(outcome, fault, tmp_path / "bus")
    if outcome.code:
        again = stage.run("act", tmp_path / "bus", "rollout-0", "open")
        assert_named(again, "is not a bus")


# full, forbidden and limited


@pytest.mark.parametrize(
    ("small", "said"),
    [
        (small_tmpfs, "No space left on device"),
        (small_ext4, "No space left on device"),
        (btrfs_with_quota, "Disk quota exceeded"),
    ],
)
def test_a_full_file_system_is_named_by_every_role_and_the_run_goes_on_after(
    stage, tmp_path, small, said
):
    with small(tmp_path / "small", 8) as root:
        bus = root / "bus"
        assert stage.run("make", bus).code == 0
        commit_all(stage, bus, groups=4)
        with full(root):
            for role in (
                ["act", bus, "rollout-0", "open", "put:4"],
                ["plan", bus, "open", "batch:1", "advance:1"],
                ["make", root / "other" / "bus"],
            ):
                assert_named(stage.run(*role), said)
        finish(stage, bus)


def test_a_directory_that_may_only_be_read_stops_writers_by_name_and_readers_not(
    stage, bus, tmp_path
):
    commit_all(stage, bus)
    plan = stage.run("plan", bus, "open", "batch:1", "batch:2")
    assert plan.code == 0, plan.err
    with read_only(bus, tmp_path / "view") as view:
        for role in (
            ["act", view, "rollout-0", "open"],
            ["plan", view, "open"],
            ["make", view / "bus"],
        ):
            assert_named(stage.run(*role), str(view), "Read-only file system")
        assert_sound(stage, view)
        read = stage.run("read", view)
        assert read.code == 0, read.err
        assert json.loads(read.out) == expected(GROUPS)
    finish(stage, bus)


def test_zeros_that_a_power_cut_left_at_the_end_of_a_file_are_cut_off(stage, bus):
    commit_all(stage, bus, groups=4)
    assert stage.run("plan", bus, "open", "batch:1").code == 0
    for file in ("p/rollout-0/log", "ctl/credits"):
        with (bus / file).open("ab") as end:
            end.write(bytes(4096))
    finish(stage, bus)


# two owners


def test_a_producer_that_slept_through_its_succession_is_fenced(stage, bus, tmp_path):
    held, go = tmp_path / "held", tmp_path / "go"
    steps = ["open", "put:0", f"touch:{held}", f"wait:{go}", "put:2"]
    zombie = stage.start("act", bus, "rollout-0", *steps)
    wait_for(held)
    zombie.signal(signal.SIGSTOP)
    go.touch()
    heir = stage.run("act", bus, "rollout-0", "open", "put:4", "close")
    assert heir.code == 0, heir.err
    zombie.signal(signal.SIGCONT)
    assert_named(zombie.end(), "FencedError", str(bus / "p" / "rollout-0"))
    assert json.loads(stage.run("log", bus, "rollout-0").out) == [0, 4]
    finish(stage, bus)


@pytest.mark.parametrize("attempt", range(5))
def test_of_two_producers_with_one_name_one_goes_on_and_the_other_is_told(stage, bus, attempt):
    names = ["rollout-0", "rollout-0", "rollout-1"]
    producers = [stage.start("produce", bus, name, GROUPS) for name in names]
    trained = stage.run("train", bus, GROUPS, bus.with_name("checkpoint.json"))
    assert trained.code == 0, trained.err
    assert json.loads(trained.out) == expected(GROUPS)
    twins = sorted((producer.end() for producer in producers[:2]), key=lambda o: o.code)
    assert [o.code for o in twins] in ([0, NAMED], [0, 0]), twins
    assert twins[0].code == twins[1].code or "FencedError" in twins[1].err
    assert producers[2].end().code == 0
    assert_sound(stage, bus)


# what a file system may lack


def test_where_o_direct_is_refused_logs_are_opened_anew_and_it_says_so(stage, bus):
    for said in finish(stage, bus, fault=Fault("open", NO_DIRECT, "/bus/")):
        lines = [line for line in said.splitlines() if "O_DIRECT is refused here" in line]
        assert f"{bus / 'ctl'}: O_DIRECT" in said
        assert len(lines) == len(set(lines)), "said once by each process"


def test_where_o_direct_is_served_nothing_is_said(stage, bus):
    assert finish(stage, bus) == ["", "", ""]


@pytest.mark.parametrize(("producer", "trainer"), [(3600, -3600), (-3600, 3600)])
def test_clocks_of_hosts_may_be_an_hour_apart(stage, bus, producer, trainer):
    def clock(skew):
        return Fault("clock", skew, "")

    stage.run("act", bus, "rollout-0", "open", "put:0", "put:2", "close", fault=clock(producer))
    for n, file in enumerate(sorted(bus.rglob("*"))):
        os.utime(file, (0, time.time() + (-1) ** n * 3600 * n))
    outcome = stage.run("plan", bus, "open", fault=clock(trainer))
    assert outcome.code == 0, outcome.err
    finish(stage, bus, fault=clock(producer))


def test_neither_locks_nor_links_are_used(bus, tmp_path):
    """Also where HDF5_USE_FILE_LOCKING does not forbid it."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    roles = Path(__file__).with_name("bus_roles.py")
    steps = ["act", bus, "rollout-0", "open", *(f"put:{guid}" for guid in range(4)), "close"]
    environment = {k: v for k, v in os.environ.items() if k != "HDF5_USE_FILE_LOCKING"}
    for words in (steps, ["plan", bus, "open", "batch:1"], ["read", bus]):
        calls = tmp_path / "calls"
        command = [strace, "-f", "-y", "-e", "trace=link,linkat,symlink,symlinkat,flock,fcntl"]
        answer = subprocess.run(
            [*command, "-o", calls, sys.executable, roles, *map(str, words)],
            env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        locked = [
            line
            for line in calls.read_text().splitlines()
            if str(bus) in line and ("link" in line or "flock" in line or "SETLK" in line)
        ]
        assert locked == []
