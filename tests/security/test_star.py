"""Ranks without MPI meet over TCP, where anybody may knock: nobody else gets in, or is believed."""

import pickle
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from adversary import bomb, talk

from relax_hpc.errors import PeerTimeoutError
from relax_hpc.runtime.comm import world
from relax_hpc.runtime.comm.world import Channel, StarWorld, StrangerError
from relax_hpc.runtime.files.records import read_json, write_json

KEY = b"the key of this start"
PATIENCE_S = 20


def join(rank, size, rendezvous, key=KEY, timeout_s=PATIENCE_S):
    return StarWorld.join(rank, size, rendezvous, key, timeout_s=timeout_s)


def agree(worlds):
    """A collective of all ranks; what each of them heard."""
    with ThreadPoolExecutor(len(worlds)) as threads:
        return list(threads.map(lambda world: world.allgather(f"rank {world.rank}"), worlds))


def test_ranks_meet_and_agree_among_strangers_that_shout_or_say_nothing(tmp_path):
    mark, rendezvous = tmp_path / "executed", tmp_path / "rendezvous"
    first = join(0, 3, rendezvous)
    host, port = first._hub.address
    rude = talk(host, port, mark)
    second = join(1, 3, rendezvous)
    rude += [socket.create_connection((host, port)) for _ in range(30)] + talk(host, port, mark)
    worlds = [first, second, join(2, 3, rendezvous)]
    said = ["rank 0", "rank 1", "rank 2"]
    assert agree(worlds) == [said] * 3
    with pytest.raises(OSError):  # all are in: nothing listens any more
        socket.create_connection((host, port), timeout=5)
    assert agree(worlds) == [said] * 3
    assert not mark.exists()
    for connection in rude:
        connection.close()


def test_who_has_the_key_of_another_start_is_not_let_in_and_says_so(tmp_path):
    first = join(0, 2, tmp_path / "rendezvous")
    with pytest.raises(PeerTimeoutError, match=r"did not let rank 1 in .* MAC"):
        join(1, 2, tmp_path / "rendezvous", key=b"another start's", timeout_s=0.5)
    assert agree([first, join(1, 2, tmp_path / "rendezvous")]) == [["rank 0", "rank 1"]] * 2


def test_a_rank_does_not_believe_who_has_taken_the_port_of_rank_0(tmp_path):
    """It sends pickles without being asked for a proof."""
    mark = tmp_path / "executed"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        port = server.getsockname()[1]
        write_json(tmp_path / "rendezvous", dict(host="127.0.0.1", port=port, node="n1"))

        def impostor():
            server.accept()[0].close()  # the rank looks whether there is a way
            connection, _ = server.accept()
            connection.sendall(b"\0" * 64 + struct.pack(">Q", 300) + b"\0" * 32 + bomb(mark))
            return connection

        with ThreadPoolExecutor(1) as thread:
            served = thread.submit(impostor)
            with pytest.raises(PeerTimeoutError, match="right MAC"):
                join(1, 2, tmp_path / "rendezvous", timeout_s=0.1)
            served.result(PATIENCE_S).close()
    assert not mark.exists()


class Tap:
    """Between a rank and rank 0; hears all, and may change what the rank says."""

    def __init__(self, address):
        self.heard, self.change = b"", lambda data: data
        self._server, self._address = socket.create_server(("127.0.0.1", 0)), address
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:  # the first connection only looks whether there is a way
            rank, _ = self._server.accept()
            hub = socket.create_connection(self._address)
            for ends in ((hub, rank, False), (rank, hub, True)):
                threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source, sink, up):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if up:
                    self.heard += data
                    data = self.change(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)


def tapped(folder, size):
    """Rank 0, rank 1 behind a tap, and the tap."""
    first = join(0, size, folder / "rendezvous")
    record = read_json(folder / "rendezvous")
    tap = Tap((record["host"], record["port"]))
    write_json(folder / "tapped", {"host": "127.0.0.1", "port": tap.port, "node": "n1"})
    return first, join(1, size, folder / "tapped"), tap


def test_what_a_rank_said_lets_nobody_else_in_when_it_is_said_again(tmp_path):
    first, second, tap = tapped(tmp_path, 3)
    hub = first._hub
    with ThreadPoolExecutor(1) as thread:
        heard = thread.submit(second.allgather, "rank 1")
        while len(tap.heard) < 150:  # the handshake, and a message
            pass
        known = dict(hub._channels)
        replay = socket.create_connection(hub.address, timeout=5)
        replay.sendall(tap.heard)
        with suppress(ConnectionResetError):
            while replay.recv(1 << 16):  # rank 0 answers with a number of its own, and closes
                pass
        assert hub._channels == known
        third = join(2, 3, tmp_path / "rendezvous")
        said = ["rank 0", "rank 1", "rank 2"]
        assert agree([first, third]) == [said] * 2
        assert heard.result(5) == said


def test_a_changed_message_is_not_unpickled_and_the_rank_is_named(tmp_path, monkeypatch):
    first, second, tap = tapped(tmp_path, 2)
    first._wait_for_all()
    tap.change = lambda data: data[:-1] + bytes([data[-1] ^ 1])
    unpickled = []
    monkeypatch.setattr(pickle, "loads", unpickled.append)
    with ThreadPoolExecutor(1) as thread:
        heard = thread.submit(second.allgather, "rank 1")
        with pytest.raises(
            PeerTimeoutError, match=r"rank 1 of the 2 of this component left: .* MAC"
        ):
            first.allgather("rank 0")
        with pytest.raises(PeerTimeoutError, match="rank 0"):
            heard.result(5)
    assert unpickled == []


def ends():
    """Both ends of a channel, and the connections below."""
    server, client = socket.socketpair()
    session = b"session"
    return (
        Channel(server, session, is_server=True),
        Channel(client, session, is_server=False),
        server,
        client,
    )


def said_by(write):
    """The bytes that a channel writes."""
    server, client = socket.socketpair()
    write(Channel(client, b"session", is_server=False))
    client.close()
    with server.makefile("rb") as file:
        return file.read()


def test_a_message_counts_once_in_its_order_and_in_its_direction():
    first, second = (
        said_by(lambda end: end.send(b"first", timeout_s=5)),
        said_by(lambda end: [end.send(each, timeout_s=5) for each in (b"first", b"second")]),
    )
    second = second[len(first) :]
    for given, expected in (([first, second], [b"first", b"second"]), ([first, first], [b"first"]),
                            ([second], [])):  # fmt: skip
        server, _, _, raw = ends()
        raw.sendall(b"".join(given))
        for content in expected:
            assert server.receive(timeout_s=5) == content
        if len(expected) < len(given):
            with pytest.raises(StrangerError):
                server.receive(timeout_s=5)
    _, client, raw, _ = ends()
    raw.sendall(first)  # its own words, said back to it
    with pytest.raises(StrangerError):
        client.receive(timeout_s=5)


@pytest.mark.parametrize("place", [0, 8, 41, -1], ids=["length", "its MAC", "content", "MAC"])
def test_one_bit_more_or_less_is_noticed_wherever_it_is(place):
    server, _, _, raw = ends()
    said = bytearray(said_by(lambda end: end.send(b"content", timeout_s=5)))
    said[place] ^= 1
    raw.sendall(said)
    with pytest.raises(StrangerError):
        server.receive(timeout_s=5)


def test_a_length_is_not_believed_without_its_mac(monkeypatch):
    """Else anybody could have rank 0 ask for all the memory there is."""
    server, _, _, raw = ends()
    asked = []
    read = world._read
    monkeypatch.setattr(
        world,
        "_read",
        lambda connection, size, **limits: asked.append(size) or read(connection, size, **limits),
    )
    raw.sendall(struct.pack(">Q", 1 << 62) + bytes(32))
    with pytest.raises(StrangerError):
        server.receive(timeout_s=5)
    assert asked == [40]


def test_a_sub_world_has_a_key_of_its_own(tmp_path):
    def divide(rank):
        world = join(rank, 4, tmp_path / "rendezvous")
        half = world.split(rank % 2)
        return world._key, half._key, half.allgather(rank)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(divide, range(4)))
    keys, halves, said = zip(*found, strict=True)
    assert set(keys) == {KEY}
    assert halves[0] == halves[2] != halves[1] == halves[3] != KEY
    assert said == ([0, 2], [1, 3], [0, 2], [1, 3])
