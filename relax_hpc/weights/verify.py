"""The check that engines hold what the trainer sent."""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from relax_hpc.comm.orders import Receipt
from relax_hpc.fleet.control import EngineControl
from relax_hpc.fleet.members import Member


class Sent(NamedTuple):
    """Digests of what the trainer sent."""

    fingerprints: list[int]
    """One number for each bucket or file, in order."""
    by_name: str
    """Digest by name, if it was made."""


class Verified(NamedTuple):
    """Digests of one version, as trainer and engines hold it."""

    trainer: str
    """One for each way in which engines tell what they hold."""
    members: dict[str, str]
    equal: bool


def compare(
    updated: dict[Member, EngineControl], sent: Sent, receipts: dict[Member, list[Receipt]]
) -> Verified:
    """Compares the engines that were just updated with what was sent to them.

    Those that left receipts have compared every slice of their parameters with what they received,
    so what they received is compared with what was sent. Embedded engines digest by name what they
    hold.
    """
    expected, held = {}, {}
    for member, receiver in updated.items():
        if member in receipts:
            expected[member.id] = _digest_of(sent.fingerprints)
            held[member.id] = _of_receipts(receipts[member])
        elif sent.by_name:
            expected[member.id], held[member.id] = sent.by_name, receiver.checksum()
    trainer = " ".join(sorted(set(expected.values())))
    return Verified(trainer, dict(sorted(held.items())), held == expected)


def _of_receipts(ranks: Iterable[Receipt]) -> str:
    """The digest that all ranks agree on; else what is wrong."""
    ranks = list(ranks)
    if errors := [receipt.error for receipt in ranks if receipt.error]:
        return errors[0]
    wrong = sum(receipt.differing for receipt in ranks)
    if wrong:
        return f"{wrong} slices differ from what was received"
    digests = {_digest_of(receipt.fingerprints) for receipt in ranks}
    return digests.pop() if len(digests) == 1 else "the ranks received different bytes"


def _digest_of(fingerprints: Iterable[int]) -> str:
    return hashlib.sha256(repr(list(fingerprints)).encode()).hexdigest()
