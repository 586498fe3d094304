"""Two nodes, each a network namespace, that `ib0` joins and `eth0` does not."""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack

import pytest
from network_nodes import Nodes, ip

from relax_hpc.runtime.comm import address

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="takes root and ip (iproute2)"
)

# A rank: says its address, and meets the other one.
RANK = """
import sys
from pathlib import Path
from relax_hpc.runtime.comm import address
from relax_hpc.runtime.comm.world import connect
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.errors import RelaxError
rank, network, reach_s = int(sys.argv[1]), sys.argv[2] or None, float(sys.argv[3])
address._REACH_S = reach_s
try:
    address.settle(network)
    world = connect("files", rank=rank, size=2, rendezvous=Path(sys.argv[4]),
                    secret=RunSecret(bytes(32)), timeout_s=60)
    print(world.allgather(address.node_address()))
except RelaxError as error:
    print(type(error).__name__, error)
    sys.exit(1)
"""
SLURM = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "h4[a-b]"}


class Ranks(Nodes):
    def meet(self, folder, network="", reach_s=20, **variables):
        """Returns what rank 0 on the first node and rank 1 on the second one said."""
        told = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)} | variables
        arguments = network, str(reach_s), str(folder / "record")
        ranks = [
            subprocess.Popen(
                [*self.on(k), sys.executable, "-c", RANK, str(k), *arguments], env=told,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for k in range(2)
        ]  # fmt: skip
        if reach_s == 20:
            return [each.communicate(timeout=60)[0].strip() for each in ranks]
        said = ranks[1].communicate(timeout=60)[0].strip()
        ranks[0].kill()
        ranks[0].communicate()
        return [said]


@pytest.fixture(scope="module")
def nodes():
    with ExitStack() as stack:
        try:
            nodes = stack.enter_context(Ranks())
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces: {error.stderr}")
        yield nodes


MET = ["['10.1.0.2', '10.1.0.3']"] * 2


@pytest.mark.parametrize(
    "found",
    [None, *(pytest.param(each, marks=pytest.mark.long) for each in ("192.168.7.1", "127.0.1.1"))],
)
def test_wherever_names_lead_ranks_meet_where_slurm_reaches_their_nodes(nodes, tmp_path, found):
    nodes.call_both(found)
    launcher = {"SLURM_LAUNCH_NODE_IPADDR": "10.1.0.2"}
    assert nodes.meet(tmp_path, **launcher, **SLURM) == MET


@pytest.mark.long
def test_slurms_own_addresses_of_nodes_go_before_their_names(nodes, tmp_path):
    nodes.call_both("192.168.7.1")
    line = "NodeName={} Arch=x86_64 NodeAddr={} NodeHostName=x\n".format
    both = "".join(line(name, f"10.1.0.{k + 2}") for k, name in enumerate(nodes.names))
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\ncat <<END\n{both}END\n")
    (tmp_path / "scontrol").chmod(0o755)
    variables = {
        "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": ",".join(nodes.names),
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }  # fmt: skip
    assert nodes.meet(tmp_path, **variables) == MET


@pytest.mark.long
def test_a_job_over_several_nodes_never_takes_loopback(nodes, tmp_path):
    nodes.call_both(None)
    said = nodes.meet(tmp_path, SLURM_LAUNCH_NODE_IPADDR="127.0.0.1", **SLURM)
    for node, line in zip(nodes.names, said, strict=True):
        assert line.startswith(f"ConfigError node {node} knows no address at which h4a")
        assert "it has ib0 (10.1.0." in line and line.endswith(
            "set launch.advanced.network to an interface or a subnet that joins all nodes of the "
            "job"
        )


def test_a_connection_that_is_dropped_fails_in_seconds_and_names_both_ends(nodes, tmp_path):
    one, other = nodes.names
    lost = ["10.1.0.2", "lladdr", "02:00:00:00:00:99", "dev", "ib0"]
    ip("-n", other, "neigh", "replace", *lost, "nud", "permanent")
    try:
        [said] = nodes.meet(tmp_path, "ib0", reach_s=1)
    finally:
        ip("-n", other, "neigh", "del", *lost)
    assert said.startswith(
        f"PeerTimeoutError rank 1 on node {other} (10.1.0.3) cannot reach rank 0 of this component "
        f"on {one} at 10.1.0.2:"
    )
    assert "within 1 s: timed out; if it runs, set launch.advanced.network to" in said


def test_gloo_and_nccl_take_the_network_of_the_job_unless_they_are_told_another(monkeypatch):
    for told, gloo, nccl in (({}, "lo", "=lo"), (dict.fromkeys("gn", "eth7"), "eth7", "eth7")):
        named = {"g": "GLOO_SOCKET_IFNAME", "n": "NCCL_SOCKET_IFNAME"}
        environment = {named[each]: value for each, value in told.items()}
        monkeypatch.setattr(os, "environ", environment)
        address.settle("lo")
        assert address.node_address() == "127.0.0.1"
        assert [environment[each] for each in named.values()] == [gloo, nccl]
    monkeypatch.setattr(os, "environ", {})
    address.settle(None)
