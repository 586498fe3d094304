"""The protocol between hosts that cache for themselves: the kernel's own NFS client and server."""

import json
import logging
import re
import sys
from pathlib import Path

import nfs_hosts
import pytest
from bus_roles import expected
from nfs_guest import MOUNT

ROLES = [sys.executable, Path(__file__).with_name("bus_roles.py")]
GROUPS = 32
REPOSITORY = Path(__file__).parents[2]


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
    host.run(*ROLES, "make", bus)
    return bus


def produce(host, bus, rank):
    return host.start(*ROLES, "produce", bus, f"rollout-{rank}", GROUPS)


def train(host, bus, checkpoint):
    return host.start(*ROLES, "train", bus, GROUPS, checkpoint)


def finish(trainer, producers):
    assert trainer.wait() == 0, trainer.err
    for producer in producers:
        assert producer.wait() == 0, producer.err
    assert json.loads(trainer.out) == expected(GROUPS)


def assert_sound(host, bus):
    counts = json.loads(host.run(*ROLES, "audit", bus))
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
    # The one claim of the trainer and the folders a producer makes are new names, asked for once.
    print(refused, after)
