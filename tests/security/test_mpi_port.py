"""Doors of MPI: who is let in, what passes, and what strangers and the dead cost."""

import ctypes.util
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import psutil
import pytest
from network_nodes import Nodes, ip

from relax_hpc.runtime.comm import mpi_door
from relax_hpc.runtime.comm.mpi_door import FRAME, DoorProcess, Link, LinkError

KEY = b"k" * 32


class Done:
    def Test(self):  # noqa: N802 - MPI's name
        return True


class Wire:
    """A communicator of two, whose frames the test can see, alter and repeat."""

    def __init__(self):
        self.frames, self.other = deque(), None

    def Isend(self, frame, dest, tag):  # noqa: N802
        self.other.frames.append(bytes(frame))
        return Done()

    def Irecv(self, buffer, source, tag):  # noqa: N802
        wire = self

        class Arrives:
            def Test(self):  # noqa: N802
                if wire.frames:
                    buffer[:] = wire.frames.popleft()
                    return True
                return False

        return Arrives()


def wires():
    one, two = Wire(), Wire()
    one.other, two.other = two, one
    return one, two


def greet(server, client, keys=(KEY, KEY)):
    """Both handshakes, turn by turn; each name that was told, or the error."""
    meetings = [
        server.prove(keys[0], "trainer", is_server=True),
        client.prove(keys[1], "task", is_server=False),
    ]
    told = [None, None]
    for _ in range(20):
        for at, meeting in enumerate(meetings):
            if told[at] is None:
                try:
                    next(meeting)
                except StopIteration as end:
                    told[at] = end.value["name"]
                except LinkError as error:
                    told[at] = str(error)
    return told


def linked():
    one, two = wires()
    server, client = Link(one, 0), Link(two, 0)
    assert greet(server, client) == ["task", "trainer"]
    return (one, server), (two, client)


def test_messages_arrive_in_order_in_frames_of_one_size():
    (at_server, server), (_, client) = linked()
    client.send({"n": 1})
    client.send(["é" * 900])
    assert [len(frame) for frame in at_server.frames] == [FRAME, FRAME]
    assert (server.poll(), server.poll(), server.poll()) == ({"n": 1}, ["é" * 900], None)


def test_who_has_another_key_is_refused_and_learns_nothing():
    one, two = wires()
    told = greet(Link(one, 0), Link(two, 0), keys=(KEY, b"x" * 32))
    assert told == ["what came does not have the right MAC"] * 2


@pytest.mark.parametrize("harm", ["repeat", "alter", "reflect", "swap", "garbage"])
def test_a_frame_that_is_not_the_other_ends_next_one_ends_the_link(harm):
    (at_server, server), (at_client, client) = linked()
    client.send("first")
    first = at_server.frames[0]
    match harm:
        case "repeat":
            assert server.poll() == "first"
            at_server.frames.append(first)
        case "alter":
            at_server.frames[0] = first.replace(b"first", b"fIrst")
        case "reflect":
            at_client.frames.append(at_server.frames.pop())
            server = client
        case "swap":
            client.send("second")
            at_server.frames.reverse()
        case "garbage":
            at_server.frames[0] = b"\xff" * FRAME
    with pytest.raises(LinkError, match="right MAC"):
        server.poll()


def test_a_recorded_handshake_opens_nothing():
    one, two = wires()
    sent = []
    keep, two.Isend = two.Isend, lambda frame, **to: sent.append(frame) or keep(frame, **to)
    greet(Link(one, 0), Link(two, 0))
    again, _ = wires()
    server = Link(again, 0)
    again.frames.extend(sent)
    meeting = server.prove(KEY, "trainer", is_server=True)
    with pytest.raises(LinkError, match="right MAC"):
        for _ in range(5):
            next(meeting)


def test_what_does_not_fit_into_a_frame_is_not_cut_off():
    (_, server), _ = linked()
    with pytest.raises(LinkError, match="a frame holds"):
        server.send("x" * FRAME)


@pytest.fixture
def doors():
    opened = []

    def door(name, key=KEY):
        heard = queue.Queue()
        made = DoorProcess(name, key, lambda who, message: heard.put((who, message)))
        made.heard = heard
        opened.append(made)
        return made

    yield door
    for each in opened:
        each.close()


def children(door):
    return psutil.Process(door._process.pid).children(recursive=True)


def test_real_doors_link_talk_and_outlive_each_other(doors):
    trainer, first, second = doors("trainer"), doors("a"), doors("b")
    port = trainer.accept(["a", "b"])
    assert "MPICH" in trainer.library and not trainer.problem
    assert (first.call(port), second.call(port)) == ("", "")
    trainer.wait_for(["a", "b"], 10)
    trainer.send("b", {"x": 1})
    assert second.heard.get(timeout=10) == ("trainer", {"x": 1})
    first.send("trainer", [2])
    assert trainer.heard.get(timeout=10) == ("a", [2])

    os.kill(children(first)[-1].pid, signal.SIGKILL)
    second.send("trainer", "still here")
    assert trainer.heard.get(timeout=10) == ("b", "still here")
    again = doors("a2")
    begin = time.monotonic()
    port = trainer.accept(["b", "a2"])
    assert again.call(port) == ""
    trainer.wait_for(["a2"], 10)
    assert trainer.links == {"b", "a2"} and time.monotonic() - begin < 10
    again.send("trainer", "new")
    assert trainer.heard.get(timeout=10) == ("a2", "new")


def test_strangers_cost_those_who_are_expected_nothing(doors):
    trainer, stranger, guest = doors("trainer"), doors("a", b"x" * 32), doors("a")
    port = trainer.accept(["a"])
    [process] = [each for each in children(trainer) if not each.children()]
    listening = [each.laddr for each in process.net_connections() if each.status == "LISTEN"]
    assert listening
    silent = [socket.create_connection(address) for address in listening]
    for address in listening:
        with socket.create_connection(address) as noisy:
            noisy.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(5000))
    assert "right MAC" in stranger.call(port)
    assert guest.call(port) == ""
    trainer.wait_for(["a"], 10)
    trainer.send("a", "hello")
    assert guest.heard.get(timeout=10) == ("trainer", "hello")
    for each in silent:
        each.close()


@pytest.mark.parametrize("order", [{"accept": []}, {"accept": ["nobody"]}, {"call": "no port"}])
def test_a_door_whose_parent_has_gone_ends(doors, order):
    door, other = doors("trainer"), doors("other")
    if "call" in order:  # a port at which nobody accepts
        order = {"call": other.accept([])}
    door._tell(**order)
    time.sleep(1)
    below = children(door)
    assert below
    door._process.stdin.close()
    psutil.wait_procs(below, timeout=20)
    assert not [each for each in below if each.is_running()]


def test_open_mpi_is_refused_by_name_for_nobody_would_be_let_in(doors, monkeypatch, tmp_path):
    if ctypes.util.find_library("mpi") is None:
        pytest.skip("Open MPI: not installed")
    launcher = tmp_path / "mpiexec.gforker"
    launcher.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setattr(mpi_door, "find_launcher", lambda: [str(launcher), "-n", "1"])
    monkeypatch.setenv("MPI4PY_LIBMPI", "libmpi.so.40")
    door = doors("trainer")
    assert door.accept(["a"]) == "" and not door.has_died
    assert re.fullmatch(r"mpi4py took Open MPI v\S+, whose .* 'relax-hpc\[mpi\]'", door.problem)


RANK = """
import queue, sys, time
from mpi4py import MPI
from relax_hpc.runtime.comm.mpi_door import DoorProcess, door_type
world, heard = MPI.COMM_WORLD, queue.Queue()
make = door_type(is_one_world=True)
door = make(f"rank {world.rank}", b"x" * 32 if world.rank == 3 else b"k" * 32,
            lambda who, said: heard.put((who, said)))
port = world.bcast(door.accept(["rank 1", "rank 2"]) if world.rank == 0 else None)
if world.rank == 0:
    door.wait_for(["rank 1", "rank 2"], 20)
    assert door.links == {"rank 1", "rank 2"}, door.links
    for name in door.links:
        door.send(name, {"to": name})
    print(sorted(heard.get(timeout=20) for _ in range(2)), flush=True)
elif world.rank < 3:
    assert door.call(port) == ""
    assert heard.get(timeout=20) == ("rank 0", {"to": f"rank {world.rank}"})
    door.send("rank 0", world.rank)
else:
    assert door.call(port), "a stranger is refused, or not heard once all are there"
world.barrier()
door.close()
"""


def test_ranks_of_one_world_have_doors_in_it_and_no_process(tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    launcher = Path(sys.executable).with_name("mpiexec.gforker")
    answer = subprocess.run(
        [launcher, "-n", "4", sys.executable, "-m", "mpi4py", program],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.stdout == "[('rank 1', 1), ('rank 2', 2)]\n", answer.stdout + answer.stderr
    assert answer.returncode == 0, answer.stderr
    assert mpi_door.door_type(is_one_world=True) is DoorProcess, "MPI has not begun here"


def test_without_mpich_it_says_what_to_install(doors, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    door = doors("trainer")
    assert door.problem == "MPICH is not installed (pip install 'relax-hpc[mpi]')"
    assert (door.accept(["a"]), door.call("port")) == ("", door.problem)


END = """
import sys, time
from pathlib import Path
from relax_hpc.runtime.comm.mpi_door import DoorProcess
name, port = sys.argv[1], Path(sys.argv[2])
door = DoorProcess(name, b"k" * 32, lambda who, said: print(who, said, flush=True))
if name == "trainer":
    port.with_suffix(".draft").write_text(door.accept(["task"]))
    port.with_suffix(".draft").rename(port)
    door.wait_for(["task"], 20)
    door.send("task", "hello")
    time.sleep(1)
else:
    while not port.exists():
        time.sleep(0.05)
    assert door.call(port.read_text()) == "", door.problem
    time.sleep(1)
door.close()
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="takes root and ip (iproute2)"
)
def test_hosts_with_ipv6_alone_meet_though_both_have_the_kernel_of_one(tmp_path):
    (tmp_path / "end.py").write_text(END)
    with Nodes() as nodes:
        for place, name in enumerate(nodes.names):
            ip("-n", name, "address", "delete", f"10.1.0.{place + 2}/24", "dev", "ib0")
        ends = [
            subprocess.Popen(
                [*nodes.on(place), sys.executable, tmp_path / "end.py", name, tmp_path / "port"],
                env=os.environ | {"GLOO_SOCKET_IFNAME": "ib0"}, stdout=subprocess.PIPE, text=True,
            )
            for place, name in enumerate(("trainer", "task"))
        ]  # fmt: skip
        said = [end.communicate(timeout=60)[0] for end in ends]
    assert said == ["", "trainer hello\n"]
