"""Do engines hold what the trainer sent?"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from relax_hpc.comm.orders import Receipt
from relax_hpc.weights.members import Member
from relax_hpc.weights.receiver import Receiver
from relax_hpc.weights.staging import Outgoing


class Verified(NamedTuple):
    """Digests of one version, as trainer and engines hold it."""

    trainer: str
    members: dict[str, str]
    equal: bool


def compare(
    updated: dict[Member, Receiver], outgoing: Outgoing, receipts: dict[Member, list[Receipt]]
) -> Verified:
    """Compares the engines that were just updated with what was sent to them.

    Those that left receipts have compared every slice of their parameters with what they received,
    so what they received is compared with what was sent. Embedded engines digest by name what they
    hold. Others digest it in a layout of their own, and are compared with each other.
    """
    sent = _digest_of(outgoing.fingerprints)
    held = {member.id: _of_receipts(ranks) for member, ranks in receipts.items()}
    asked = [member for member in updated if member not in receipts]
    held |= {member.id: updated[member].checksum() for member in asked}
    by_name = [member.id for member in asked if member.engine == "embedded"]
    if by_name:
        sent = outgoing.hexdigest()
    own = {held[member.id] for member in asked if member.engine != "embedded"}
    compared = {held[member.id] for member in receipts} | {held[name] for name in by_name}
    equal = compared <= {sent} and len(own) <= 1
    return Verified(sent, dict(sorted(held.items())), equal)


def _of_receipts(ranks: Iterable[Receipt]) -> str:
    """The digest that all ranks agree on."""
    wrong = sum(receipt.differing for receipt in ranks)
    if wrong:
        return f"{wrong} slices differ from what was received"
    digests = {_digest_of(receipt.fingerprints) for receipt in ranks}
    return digests.pop() if len(digests) == 1 else "the ranks received different bytes"


def _digest_of(fingerprints: Iterable[int]) -> str:
    return hashlib.sha256(repr(list(fingerprints)).encode()).hexdigest()
