import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from relax_hpc.errors import PeerTimeoutError
from relax_hpc.runtime.comm import address, bucket, torch_group
from relax_hpc.runtime.comm.torch_group import BroadcastGroup, Transfer
from relax_hpc.runtime.comm.world import SoloWorld, StarWorld, connect
from relax_hpc.runtime.files.run_secret import RunSecret

SECRET = RunSecret(bytes(32))


@pytest.mark.parametrize(
    ("named", "launcher", "taken", "interface"),
    [
        ("127.0.1.1", "10.9.0.1", "10.9.0.2", "ib0"),  # Debian's /etc/hosts
        ("10.8.0.2", "10.9.0.1", "10.9.0.2", "ib0"),  # O4: a name that leads to another network
        (None, "10.9.0.1", "10.9.0.2", "ib0"),  # O5: a name that leads nowhere
        ("127.0.1.1", None, "127.0.1.1", None),  # no Slurm: all of it is here
        ("127.0.1.1", "10.7.0.1", "127.0.1.1", None),  # no way there
    ],
)
def test_a_node_that_calls_itself_loopback_is_reached_as_its_launcher_reaches_it(
    monkeypatch, named, launcher, taken, interface
):
    environment = {"SLURM_LAUNCH_NODE_IPADDR": launcher} if launcher else {}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(address, "_address_of", lambda _: named)
    monkeypatch.setattr(address, "_towards", {"10.9.0.1": "10.9.0.2"}.get)
    own = {"lo": "127.0.0.1", "eth0": "10.8.0.2", "ib0": "10.9.0.2"}
    assert_taken(monkeypatch, environment, own, taken, interface)


def assert_taken(monkeypatch, environment, own, taken, interface):
    """A node with these addresses, by interface, says one of them, and gloo takes the interface."""
    cards = {
        name: [SimpleNamespace(address=each, family=socket.AF_INET)] for name, each in own.items()
    }
    monkeypatch.setattr(address.psutil, "net_if_addrs", lambda: cards)
    assert address.node_address() == taken
    address.settle(None)
    assert environment.get("GLOO_SOCKET_IFNAME") == interface


TWO = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
HET = {
    "SLURM_JOB_NUM_NODES": "1", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST": "n1",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2,4]",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "named", "taken", "interface"),
    [
        (TWO, "127.0.1.1", "10.9.0.1", "ib0"),
        (HET, "10.8.0.1", "10.9.0.1", "ib0"),
        (TWO | {"SLURM_JOB_NODELIST": "n[1,7]"}, "127.0.1.1", "10.8.0.1", "eth0"),  # no name
        (TWO | {"SLURM_JOB_NODELIST": "v[1-2]"}, "127.0.1.1", "127.0.1.1", None),  # nodes are here
        ({"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"}, "127.0.1.1", "127.0.1.1", None),
    ],
)
def test_on_the_node_that_starts_the_steps_the_way_to_the_jobs_others_counts(
    monkeypatch, environment, named, taken, interface
):
    environment = environment | {
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURMD_NODENAME": environment.get("SLURM_JOB_NODELIST", "n1")[0] + "1",
    }
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(socket, "gethostname", lambda: "n1.site")
    known = {"n1.site": named, "n1": named, "n2": "10.9.0.2", "n4": "10.9.0.4", "v2": "127.0.0.1"}

    def look_up(name):
        if name not in known:
            raise socket.gaierror
        return known[name]

    monkeypatch.setattr(socket, "gethostbyname", look_up)
    ways = {"10.9.0.2": "10.9.0.1", "10.9.0.4": "10.9.0.1", "192.0.2.1": "10.8.0.1"}
    monkeypatch.setattr(address, "_towards", ways.get)
    monkeypatch.setattr(address, "_ask_slurm", lambda _: {})
    own = {"lo": "127.0.0.1", "eth0": "10.8.0.1", "ib0": "10.9.0.1"}
    assert_taken(monkeypatch, environment, own, taken, interface)


def tensors():
    return [
        ("a", torch.arange(3, dtype=torch.bfloat16)),
        ("b", torch.randn(2, 5, generator=torch.Generator().manual_seed(0))),
        ("c", torch.tensor([7], dtype=torch.int64)),
    ]


def test_a_digest_sees_one_bit_name_type_and_shape_but_not_the_order():
    base = bucket.digest(tensors())
    assert bucket.digest(reversed(tensors())) == base
    changed = tensors()
    changed[1][1][0, 0] = torch.nextafter(changed[1][1][0, 0], torch.tensor(9.0))
    assert bucket.digest(changed) != base
    assert bucket.digest([("A", tensors()[0][1]), *tensors()[1:]]) != base
    zeros = torch.zeros(4)
    others = [zeros.int(), zeros.view(2, 2), torch.zeros(8, dtype=torch.bfloat16)]
    assert len({bucket.digest([("w", each)]) for each in (zeros, *others)}) == 4


def test_a_broadcast_that_does_not_end_is_given_up_by_whoever_waits_or_at_its_deadline():
    looks = iter([False] * 100)
    transfer = Transfer(SimpleNamespace(is_completed=lambda: next(looks)), torch.zeros(1))
    with pytest.raises(TimeoutError, match="a broadcast did not end"):
        transfer.wait(time.monotonic() - 1e-3)

    def give_up():
        raise KeyError("the trainer gave up")

    with pytest.raises(KeyError):
        transfer.wait(time.monotonic() + 60, give_up)


def test_a_broadcast_of_nccl_that_failed_has_not_ended_and_only_the_gpu_waits_for_what_follows():
    """`wait` blocks the host in a group without a watchdog, whatever becomes of the peers."""

    def wait():
        raise RuntimeError("remote process exited")

    asked = []
    work = SimpleNamespace(
        is_completed=lambda: True, wait=wait, synchronize=lambda: asked.append(1)
    )
    transfer = Transfer(work, SimpleNamespace(is_cuda=True))
    with pytest.raises(RuntimeError, match="remote process exited"):
        transfer.wait(time.monotonic() + 60)
    transfer.order_after()
    assert asked == [1]


@pytest.mark.parametrize("before", [None, "0"])
@pytest.mark.parametrize(("backend", "within"), [("nccl", "1"), ("gloo", "before")])
def test_no_watchdog_ends_a_process_whose_peers_may_go(monkeypatch, backend, within, before):
    name = "TORCH_NCCL_BLOCKING_WAIT"  # torch reads it when it makes a group
    monkeypatch.delenv(name, raising=False)
    if before:
        monkeypatch.setenv(name, before)
    seen, world = [], SimpleNamespace(pg_map={"group": ("", None)}, pg_group_ranks={})

    def make(*args, **kwargs):
        seen.append(os.environ.get(name))
        return "group", None

    monkeypatch.setattr(torch_group, "_world", world)
    monkeypatch.setattr(torch_group, "_new_process_group_helper", make)
    BroadcastGroup("h", 1, 0, 1, "g", backend, store=dist.HashStore())
    assert seen == [before if within == "before" else within]
    assert os.environ.get(name) == before


def star(folder, size, call, timeout_s=20.0):
    """Runs `call(world)` as all ranks; what each returned, or the error it ended with."""

    def rank(number):
        world = StarWorld.join(number, size, folder / "rendezvous", b"key", timeout_s=timeout_s)
        try:
            return call(world)
        except PeerTimeoutError as error:
            return str(error)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))


def test_ranks_of_a_colour_are_a_world_of_their_own(tmp_path):
    """4 ranks, even and odd; then each half once more, by what is left of its rank."""

    def divide(world):
        half = world.split(world.rank % 2)
        said = half.bcast(f"{world.rank} says")
        alone = half.split(half.rank)
        found = half.rank, said, half.allgather(world.rank), alone.bcast(world.rank), alone.size
        world.barrier()
        return found

    assert star(tmp_path, 4, divide) == [
        (rank // 2, f"{rank % 2} says", [rank % 2, rank % 2 + 2], rank, 1) for rank in range(4)
    ]


def test_a_rank_that_says_nothing_is_named_to_all_others(tmp_path):
    over = threading.Event()

    def talk(world):
        if world.rank == 2:
            over.wait(20)
            return ""
        try:
            world.allgather("here")
        finally:
            if world.rank == 0:
                over.set()

    said = "rank 2 of the 3 of this component said nothing for 0.5 s"
    # Rank 1 waits as long for rank 0 as that for rank 2, so whose patience ends first is open.
    first, second, _ = star(tmp_path, 3, talk, timeout_s=0.5)
    assert first == said
    assert second in (said, said.replace("rank 2", "rank 0"))


def test_a_rank_that_left_is_named_at_once(tmp_path):
    def talk(world):
        world.barrier()
        if world.rank == 1:
            world._channels[0].close()
            return ""
        world.barrier()

    errors = star(tmp_path, 3, talk, timeout_s=60)
    assert errors[1] == ""
    for error in (errors[0], errors[2]):
        assert error.startswith("rank 1 of the 3 of this component left")


def test_ranks_may_come_before_rank_0_and_more_than_a_connection_holds_gets_through(tmp_path):
    """Rank 0 sends before anybody listens, and what it sends outlasts it."""
    early, sent = threading.Event(), threading.Event()
    big = np.arange(3_000_000)

    def rank_0():
        early.wait(20)
        world = StarWorld.join(0, 2, tmp_path / "rendezvous", b"key", timeout_s=20)
        world.bcast("small")
        sent.set()
        world.bcast(big)
        world.barrier()

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(rank_0)
        early.set()
        world = StarWorld.join(1, 2, tmp_path / "rendezvous", b"key", timeout_s=20)
        sent.wait(20)
        assert world.bcast(None) == "small" and np.array_equal(world.bcast(None), big)
        world.barrier()
        first.result(30)


def test_ranks_that_do_not_come_are_named(tmp_path):
    world = StarWorld.join(0, 3, tmp_path / "waits", b"key", timeout_s=0.2)
    with pytest.raises(PeerTimeoutError, match=r"ranks 1, 2 of the 3 .* did not join within 0.2 s"):
        world.bcast("hello")
    with pytest.raises(PeerTimeoutError, match=r"rank 0 wrote no .*rendezvous"):
        connect(
            "files", rank=1, size=2, rendezvous=tmp_path / "rendezvous", secret=SECRET,
            timeout_s=0.2,
        )  # fmt: skip
    alone = connect("files", rank=0, size=1, rendezvous=tmp_path / "x", secret=SECRET)
    assert isinstance(alone, SoloWorld) and alone.split(3) is alone
