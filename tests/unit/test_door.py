"""Who names the key is let in with every byte of its request; nobody else costs the server much."""

import asyncio
import logging
import socket
from collections import Counter
from contextlib import asynccontextmanager, closing
from http import HTTPStatus

import pytest

from relax_hpc.runtime.comm import door
from relax_hpc.runtime.comm.door import Door, reply

REFUSAL, HEALTHY = reply(HTTPStatus.UNAUTHORIZED, "{}"), reply(HTTPStatus.OK, '"healthy"')
KNOWN = b"POST /x HTTP/1.1\r\nauthorization:  Bearer key \r\nContent-Length: 5\r\n\r\n"
BROKEN = {
    "without the token": [
        b"GET /x HTTP/1.1\r\n\r\n",
        b"POST /health HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n{",
        b"GET /health_check HTTP/1.1\r\n\r\n",
        b"GET /x HTTP/1.1\r\nAuthorization: Bearer other\r\n\r\n",
        b"GET /x HTTP/1.1\r\nX-Authorization: Bearer key\r\n\r\n",
        b"GET /x HTTP/1.1\r\n\r\nAuthorization: Bearer key\r\n\r\n",
    ],
    "that spoke no HTTP": [b"\x16\x03\x01", b"\0" * 9000, b"GET / HTTP/1.1\r\nX: " + b"x" * 9000],
}


class Echo(asyncio.Protocol):
    """The server behind the door."""

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.transport.write(data)


@asynccontextmanager
async def opened():
    listener = socket.create_server(("127.0.0.1", 0))
    shut = Door("it", listener, lambda v: v == b"Bearer key", REFUSAL, {b"GET /health": HEALTHY})
    shut.open(Echo)
    try:
        yield shut
    finally:
        shut.close()


async def said(address, sent, *, then=b""):
    """What comes back until the other end leaves, or as much as was sent."""
    reader, writer = await asyncio.open_connection(*address)
    with closing(writer):
        writer.write(sent)
        if then:
            await asyncio.sleep(0.1)
            writer.write(then)
        try:
            return await asyncio.wait_for(reader.readexactly(len(sent + then)), 20)
        except asyncio.IncompleteReadError as error:
            return error.partial
        except ConnectionResetError:
            return b""


async def waits_until(is_so):
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.01)


def lines_of(caplog):
    return Counter(record.args[2] for record in caplog.records if record.name == door.__name__)


@pytest.mark.parametrize("cut", [1, len(KNOWN) - 1, len(KNOWN) + 2])
async def test_a_request_with_the_key_gets_in_whole_wherever_its_packets_are_cut(cut):
    async with opened() as shut:
        whole = KNOWN + b"01234"
        assert await said(shut.address, whole[:cut], then=whole[cut:]) == whole


async def test_each_kind_of_broken_request_is_refused_and_logged_once(caplog):
    """S4."""
    caplog.set_level(logging.WARNING)
    async with opened() as shut:
        for _ in range(20):
            for kind, requests in BROKEN.items():
                for sent in requests:
                    got = await said(shut.address, sent + b" " * 4000)
                    assert got == (REFUSAL if kind == "without the token" else b""), sent
        async with asyncio.timeout(20):  # half a head, and gone
            for _ in range(20):
                _, writer = await asyncio.open_connection(*shut.address)
                writer.write(b"GET /he")
                writer.close()
        await waits_until(lambda: lines_of(caplog)["that broke off"])
        assert await said(shut.address, KNOWN + b"01234") == KNOWN + b"01234"
    assert lines_of(caplog) == dict.fromkeys([*BROKEN, "that broke off"], 1)


async def test_anybody_hears_of_health_and_a_body_sent_with_it_is_not_kept():
    """S4: also where more is sent than any buffer holds."""
    async with opened() as shut:
        asked = b"GET /health HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n"
        assert await said(shut.address, asked + b" " * 500_000) == HEALTHY
        assert await said(shut.address, b"POST /health HTTP/1.1\r\n\r\n" + b" " * 500) == REFUSAL
        _, writer = await asyncio.open_connection(*shut.address)
        with closing(writer), pytest.raises(ConnectionError):
            async with asyncio.timeout(20):
                writer.write(asked)
                while True:
                    writer.write(b" " * 100_000)
                    await writer.drain()


async def test_silent_strangers_make_room_for_who_has_the_key_and_go_when_their_time_is_over(
    monkeypatch, caplog
):
    """S4."""
    monkeypatch.setattr(door, "_MOST_STRANGERS", 4)
    monkeypatch.setattr(door, "_PATIENCE_S", 1000.0)
    async with opened() as shut:
        silent = [await asyncio.open_connection(*shut.address) for _ in range(40)]
        await waits_until(lambda: len(shut._strangers) <= 4)
        assert await said(shut.address, KNOWN + b"01234") == KNOWN + b"01234"
        monkeypatch.setattr(door, "_PATIENCE_S", 0.0)
        for reader, writer in silent:
            with closing(writer):
                assert await asyncio.wait_for(reader.read(), 20) == b""
        await waits_until(lambda: not shut._strangers)
    assert lines_of(caplog) == {"that named no token in time": 1}
