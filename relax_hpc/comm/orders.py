"""The orders of a trainer to the engines of a weight group, and their answers.

An order goes to an engine over HTTP; what it refers to, and the answers of its ranks, lie in the
store of the group, or beside the files. So an answer comes from where the work was done, and a rank
can say what failed.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Task = Literal["learn", "prepare", "receive", "check", "compare", "count"]

LOADER = "relax_hpc.engines.sglang.receive.receive"
"""Name of our receiver for SGLang's `--custom-weight-loader` and `load_format`."""
PLAN = "plan"
"""Key of the bucket plan in the store."""


@dataclass
class Order:
    """A task that the trainer gives to one rank of an engine."""

    serial: str
    """Names the answer; never used twice."""
    group: str
    """A group that the engine has joined by /init_weights_update_group; "" where there is none."""
    task: Task
    """learn: find the places of what will be sent. prepare: that, and use the wire once. check:
    receive, and then read back what was received. compare: receive nothing, and tell whether the
    weights are those of a folder. count: nothing but what every receipt says."""
    timeout_s: float
    """Longer than the trainer waits, who finds out whom all wait for."""
    store: str = ""
    """"host:port" of a store, where it is not that of the group; see `comm.lanes`."""
    lane: int = -1
    """Lane of the rank that gets the order; -1 where there is none."""
    folder: str = ""
    """Folder of the snapshot to compare with."""
    skipped: tuple[int, ...] = ()
    """Buckets that are not sent: the rank has them, and nothing in them learns."""

    @property
    def begins(self) -> bool:
        """Whether it comes before weights of its sender, and changes none."""
        return self.task in ("learn", "prepare")

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Receipt:
    """The answer of one rank of an engine: what it did, and how long that took."""

    error: str = ""
    idle_seconds: float = 0.0
    """Wait until the GPU had done what was begun before the pause."""
    wire_seconds: float = 0.0
    """Time from the first byte asked for to the last one received."""
    load_seconds: float = 0.0
    """Time from then on, until the last byte was in its place."""
    fallback: list[str] = field(default_factory=list)
    """Reasons why buckets go through the model's own loader, which is slow."""
    fingerprints: list[int] = field(default_factory=list)
    """Fingerprints of the buckets in a check; checksums of the files in a comparison."""
    differing: int = 0
    """Slices of parameters that do not hold what they should; of a check or a comparison."""
    num_sampled: dict[str, int] | None = None
    """Response tokens of the requests that stood still meanwhile; None if it cannot be told."""

    @classmethod
    def from_json(cls, text: str) -> "Receipt":
        return cls(**json.loads(text))


def key_of(serial: str, rank: int) -> str:
    """Returns the key of the store under which a rank of the group leaves its receipt."""
    return f"receipt/{serial}/{rank}"


def receipt_file(folder: str, serial: str, rank: int) -> Path:
    """Returns the file in which a rank of an engine leaves its receipt of a comparison."""
    return Path(folder).parent / f".receipt-{serial}-{rank}.json"


def abort_key(serial: str) -> str:
    """Returns the key that the trainer, or a rank that fails, sets; ranks that wait look at it."""
    return f"abort/{serial}"
