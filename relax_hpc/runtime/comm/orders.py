"""Defines the orders of a trainer to the engines of a weight group, their receipts, and how long
an engine's rank waits for the trainer.

An order goes to an engine over HTTP. Its data and the receipts of its ranks lie in the store of
the group, or beside the files. So each rank reports its own failure.
"""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch.distributed as dist

Task = Literal["learn", "prepare", "receive", "check", "compare", "count"]

LOADER = "relax_hpc.inference.sglang.receive.receive"
"""Our receiver for SGLang's `--custom-weight-loader` and `load_format`."""
PLAN = "plan"
"""Key of the bucket plan in the store."""


@dataclass
class Order:
    """A task from the trainer to one rank of an engine."""

    serial: str
    """Names the receipt; never used twice."""
    group: str
    """Group that the engine joined by /init_weights_update_group; "" if none."""
    task: Task
    """learn: map names to parameters. prepare: learn, and use the wire once. check: receive, then
    read back. compare: compare the weights with a folder. count: only fill the receipt."""
    timeout_s: float
    """Longer than the trainer's own limit: the trainer finds out which rank is missing."""
    store: str = ""
    """"host:port" of a store other than the group's; see `comm.lanes`."""
    lane: int = -1
    """Lane of the receiving rank; -1 if none."""
    folder: str = ""
    """Folder of the snapshot to compare with."""
    skipped: tuple[int, ...] = ()
    """Buckets that are not sent: the rank has them, and they do not learn."""

    @property
    def begins(self) -> bool:
        """Whether it precedes weights of its sender and changes none."""
        return self.task in ("learn", "prepare")

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Receipt:
    """The report of one engine rank on an order, with durations."""

    error: str = ""
    idle_seconds: float = 0.0
    """Seconds until the GPU finished work begun before the pause."""
    wire_seconds: float = 0.0
    """Seconds from the request of the first byte to the arrival of the last."""
    load_seconds: float = 0.0
    """Seconds from then until the last byte was in place."""
    fallback: list[str] = field(default_factory=list)
    """Reasons why buckets go through the model's own loader, which is slow."""
    fingerprints: list[int] = field(default_factory=list)
    """Fingerprints of the buckets in a check; checksums of the files in a comparison."""
    differing: int = 0
    """Slices of parameters that differ, in a check or a comparison."""
    num_sampled: dict[str, int] | None = None
    """Response tokens of the paused requests; None if unknown."""

    @classmethod
    def from_json(cls, text: str) -> "Receipt":
        return cls(**json.loads(text))


def key_of(serial: str, rank: int) -> str:
    """Returns the store key for a rank's receipt."""
    return f"receipt/{serial}/{rank}"


def receipt_file(folder: str, serial: str, rank: int) -> Path:
    """Returns the file for a rank's receipt of a comparison."""
    return Path(folder).parent / f".receipt-{serial}-{rank}.json"


def abort_key(serial: str) -> str:
    """Returns the key that the trainer or a failed rank sets; waiting ranks poll it."""
    return f"abort/{serial}"


_LOOK_S = 0.1
"""Seconds between polls of the abort key."""
GIVEN_UP = "this update was given up"
"""Last words of an error that another rank caused."""


class Patience:
    """Limits how long a rank waits for the trainer."""

    def __init__(self, order: Order, store: "dist.Store") -> None:
        self.deadline = time.monotonic() + order.timeout_s
        self._key, self._store, self._next = abort_key(order.serial), store, 0.0

    def check(self) -> None:
        """Raises an error if the deadline passed or somebody gave up."""
        now = time.monotonic()
        if now > self.deadline:
            raise TimeoutError("the trainer sent nothing more")
        if now > self._next:
            self._next = now + _LOOK_S
            if self._store.check([self._key]):  # an error, too, if the trainer is dead
                raise TimeoutError(GIVEN_UP)
