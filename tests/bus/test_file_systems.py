"""The protocol between hosts that cache for themselves: the kernel's own NFS client and server."""

import json
import re
import time

import nfs_hosts
import pytest
from bus_roles import NAMED, expected
from nfs_guest import MOUNT

pytestmark = pytest.mark.long

GROUPS = 20


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if reason := nfs_hosts.missing():
        pytest.skip(f"no NFS between hosts here: {reason}")
    with nfs_hosts.nfs_hosts(tmp_path_factory.mktemp("nfs")) as hosts:
        yield hosts


def work(hosts):
    """A folder that the hosts and this machine see at the same path."""
    return hosts[0].work


def made(host, name):
    bus = MOUNT / name
    host.run("role", "make", bus)
    return bus


def produce(host, bus, rank):
    return host.start("role", "produce", bus, f"rollout-{rank}", GROUPS)


def train(host, bus, checkpoint):
    return host.start("role", "train", bus, GROUPS, checkpoint)


def finish(trainer, producers):
    assert trainer.wait() == 0, trainer.err
    for producer in producers:
        assert producer.wait() == 0, producer.err
    assert json.loads(trainer.out) == expected(GROUPS)


def assert_sound(host, bus):
    counts = json.loads(host.run("role", "audit", bus))
    assert (counts["planned"], counts["planned_twice"], counts["dropped"]) == (2 * GROUPS, 0, 0)


def errors(host, operation):
    """How many calls of an NFS operation the server refused; a missing name is a refused LOOKUP."""
    stats = host.run("cat", "/proc/self/mountstats")
    match = re.search(rf"^\s+{operation}: (.*)$", stats, re.MULTILINE)
    return int(match[1].split()[-1]) if match else 0


def test_producers_and_trainer_on_different_hosts_lose_and_double_nothing(hosts, tmp_path):
    alpha, beta = hosts
    bus = made(alpha, "apart")
    refused = [errors(host, "LOOKUP") + errors(host, "OPEN") for host in hosts]
    producers = [produce(alpha, bus, rank) for rank in (0, 1)]
    finish(train(beta, bus, work(hosts) / "apart.json"), producers)
    for host in hosts:
        assert_sound(host, bus)
    left = alpha.run("find", bus, "-name", "*.h5", "-o", "-name", ".*")
    assert left == "", "released shards and drafts are deleted"
    after = [errors(host, "LOOKUP") + errors(host, "OPEN") for host in hosts]
    # Two producers each look for the folder that they are about to make, and nobody for more.
    assert [b - a for a, b in zip(refused, after, strict=True)] == [2, 0]


def test_what_is_committed_on_one_host_is_seen_by_the_next_look_on_another(hosts):
    """With O_DIRECT, and by opening anew where a file system refuses that."""
    alpha, beta = hosts
    bus, here, turns = made(alpha, "looks"), work(hosts), 20
    reader = beta.start("role", "follow", bus / "p" / "rollout-0" / "log", turns, here)
    writer = alpha.start("role", "append", bus / "p" / "rollout-0" / "log", turns, here)
    assert reader.wait() == 0, reader.err
    assert writer.wait() == 0, writer.err
    direct, seen = json.loads(reader.out)
    assert direct
    assert seen == [[n, n] for n in range(2, turns + 2)]  # the first record is OPEN


def test_a_zombie_producer_on_another_host_is_fenced_although_its_caches_say_otherwise(hosts):
    alpha, beta = hosts
    bus, here = made(alpha, "zombie"), work(hosts)
    held, go = here / "zombie-held", here / "zombie-go"
    steps = ["open", "put:0", f"touch:{held}", f"wait:{go}", "put:2"]
    zombie = alpha.start("role", "act", bus, "rollout-0", *steps)
    steps = [f"wait:{held}", "open", "put:4", f"touch:{go}", "put:6", "close"]
    beta.run("role", "act", bus, "rollout-0", *steps)
    assert zombie.wait() == NAMED, zombie.err
    assert "FencedError" in zombie.err
    found = beta.run("role", "log", bus, "rollout-0")
    assert json.loads(found) == [0, 4, 6]


def test_a_zombie_trainer_on_another_host_is_fenced_and_harms_nothing(hosts):
    alpha, beta = hosts
    bus, here = made(alpha, "trainers"), work(hosts)
    held, go = here / "trainer-held", here / "trainer-go"
    for rank in (0, 1):
        puts = [f"put:{guid}" for guid in range(rank, 8, 2)]
        alpha.run("role", "act", bus, f"rollout-{rank}", "open", *puts, "close")
    steps = ["open", "batch:1", f"touch:{held}", f"wait:{go}", "batch:2"]
    zombie = alpha.start("role", "plan", bus, *steps)
    steps = [f"wait:{held}", "open", f"touch:{go}", "batch:1", "batch:2", "advance:2"]
    plan = beta.run("role", "plan", bus, *steps)
    assert plan == "[0, 1, 2, 3]\n[4, 5, 6, 7]\n"
    assert zombie.wait() == NAMED, zombie.err
    assert "FencedError" in zombie.err
    counts = json.loads(alpha.run("role", "audit", bus))
    assert (counts["planned"], counts["planned_twice"], counts["steps"]) == (16, 0, 2)
    assert counts["dropped"] == 0


def test_a_host_that_loses_power_has_lost_nothing_that_was_committed(hosts):
    alpha, beta = hosts
    bus, checkpoint = made(beta, "power"), work(hosts) / "power.json"
    for rank in (0, 1):
        produce(alpha, bus, rank)
    trainer = train(beta, bus, checkpoint)
    deadline = time.monotonic() + 60
    while not checkpoint.exists():
        assert time.monotonic() < deadline, trainer.err
        time.sleep(0.01)
    alpha.crash()
    again = [produce(alpha, bus, rank) for rank in (0, 1)]
    finish(trainer, again)
    assert_sound(beta, bus)
