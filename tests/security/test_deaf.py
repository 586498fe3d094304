"""S4: gloo listens for as long as a group lives, and ends the process once strangers have taken all
of its descriptors; so nobody gets to it any more once a group is made."""

import socket
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from relax_hpc.runtime.comm.torch_group import BroadcastGroup, open_store


def ports():
    listening = psutil.Process().net_connections("tcp")
    return {each.laddr.port: each.laddr.ip for each in listening if each.status == "LISTEN"}


def test_nobody_can_connect_to_a_group_of_gloo_that_is_made():
    """S4: 20,000 connections, silent ones among them, ended a trainer (SIGABRT)."""
    before = ports()
    store = open_store("127.0.0.1", 1, timeout_s=30)
    group = BroadcastGroup("127.0.0.1", store.port, 0, 1, "alone", "gloo", store=store)
    own = {port: host for port, host in ports().items() if port not in {*before, store.port}}
    assert own, "gloo listens, or nothing is shown here"
    for port, host in own.items():
        with pytest.raises(TimeoutError):
            socket.create_connection((host, port), timeout=0.5)
    with socket.create_connection(("127.0.0.1", store.port), timeout=5):
        pass  # the store's members may come later
    group.broadcast(torch.ones(1))
    dist.TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=10)).set("a", "b")
