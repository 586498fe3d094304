"""Tensors that are made once for all who ask, and kept up to a number of bytes."""

import asyncio
import threading
from functools import partial

import pytest
import torch

from relax_hpc.engines.sglang.kept import Kept

SIZE = 40


def key_of(number):
    return number.to_bytes(16, "big")


class Asked:
    """Counts what is made, which it may hold up."""

    def __init__(self, most):
        self.kept, self.made, self.gates = Kept(most * SIZE), [], {}

    def of(self, number, size=SIZE):
        return self.kept.of(key_of(number), partial(self._make, number, size))

    def _make(self, number, size):
        self.made.append(number)
        if gate := self.gates.get(number):
            assert gate.wait(20)
        return torch.full((size,), number % 256, dtype=torch.uint8)

    def are_kept(self):
        return [int.from_bytes(key, "big") for key in self.kept._kept]

    def is_counted(self):
        return self.kept._bytes == sum(each.nbytes for each in self.kept._kept.values())


def test_what_is_kept_stays_within_bounds_however_many_ask_at_once():
    async def run():
        asked, slots = Asked(most=100), asyncio.Semaphore(16)

        async def one(number):
            async with slots:
                assert (await asked.of(number))[0] == number % 256

        await asyncio.gather(*(one(number) for number in range(1000)))
        assert len(asked.are_kept()) == 100 and asked.is_counted()

    asyncio.run(run())


def test_the_first_asked_is_counted_and_kept_where_it_is_made_last():
    """Others fill the bound while it is being made."""

    async def run():
        asked = Asked(most=2)
        asked.gates[0] = threading.Event()
        first = asyncio.create_task(asked.of(0))
        await asyncio.gather(*(asked.of(number) for number in (1, 2, 3)))
        assert len(asked.are_kept()) == 2 and asked.is_counted()
        asked.gates[0].set()
        await first
        assert asked.are_kept()[-1] == 0 and len(asked.are_kept()) == 2 and asked.is_counted()

    asyncio.run(run())


def test_siblings_share_one_that_is_being_made_and_one_that_is_kept():
    async def run():
        asked = Asked(most=2)
        together = await asyncio.gather(*(asked.of(1) for _ in range(8)))
        later = await asked.of(1)
        assert asked.made == [1] and all(each is later for each in together)

    asyncio.run(run())


def test_what_was_asked_for_longest_ago_goes_first_and_one_beyond_the_bound_is_kept_alone():
    async def run():
        asked = Asked(most=2)
        for number in (1, 2, 1, 3):
            await asked.of(number)
        assert asked.are_kept() == [1, 3] and asked.made == [1, 2, 3]
        await asked.of(4, size=3 * SIZE)
        assert asked.are_kept() == [4] and asked.is_counted()

    asyncio.run(run())


def test_one_who_hangs_up_takes_it_from_nobody():
    """Also where it is the first, or the only one, who asked."""

    async def run():
        asked = Asked(most=2)
        asked.gates[1] = threading.Event()
        first, sibling = asyncio.create_task(asked.of(1)), asyncio.create_task(asked.of(1))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        asked.gates[1].set()
        assert (await sibling)[0] == 1 and asked.made == [1]
        asked.gates[2] = threading.Event()
        only = asyncio.create_task(asked.of(2))
        await asyncio.sleep(0)
        only.cancel()
        with pytest.raises(asyncio.CancelledError):
            await only
        asked.gates[2].set()
        assert (await asked.of(2))[0] == 2 and asked.made == [1, 2] and asked.is_counted()

    asyncio.run(run())


def test_an_error_goes_to_all_who_wait_and_is_not_kept():
    def missing():
        raise ValueError("not on this node")

    async def run():
        asked = Asked(most=2)
        both = [asked.kept.of(key_of(1), missing) for _ in range(2)]
        found = await asyncio.gather(*both, return_exceptions=True)
        assert [str(each) for each in found] == ["not on this node"] * 2
        assert (await asked.of(1))[0] == 1 and asked.made == [1] and asked.is_counted()

    asyncio.run(run())


def test_who_brings_the_contents_does_not_fail_with_one_who_named_a_file_that_is_not_there():
    """An engine on another node is asked by files, and then with what is in them."""

    async def run():
        asked, gate = Asked(most=2), threading.Event()

        def missing():
            assert gate.wait(20)
            raise ValueError("not on this node")

        bare = [asyncio.create_task(asked.kept.of(key_of(1), missing)) for _ in range(2)]
        await asyncio.sleep(0)
        whole = [asyncio.create_task(asked.of(1)) for _ in range(2)]
        await asyncio.sleep(0)
        gate.set()
        first, second, third, fourth = await asyncio.gather(*bare, *whole, return_exceptions=True)
        assert str(first) == str(second) == "not on this node"
        assert third[0] == 1 and fourth is third and asked.made == [1] and asked.is_counted()

    asyncio.run(run())
