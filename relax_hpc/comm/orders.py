"""What a trainer asks of the engines of a weight group, and what they answer.

An order goes to an engine over HTTP; what it refers to, and the answers of its ranks, lie in the
store of the group, or beside the files. So an answer comes from where the work was done, and a rank
can say what failed.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Task = Literal["prepare", "receive", "check", "compare", "count"]

LOADER = "relax_hpc.engines.sglang.receive.receive"
"""What SGLang's `--custom-weight-loader` and `load_format` call our receiver."""
PLAN = "plan"
"""Key of the bucket plan in the store."""


@dataclass
class Order:
    """What the trainer asks for."""

    serial: str
    """Names the answer; never used twice."""
    group: str
    """A group that the engine has joined by /init_weights_update_group; "" where there is none."""
    task: Task
    """check: receive, and then read back what was received. compare: receive nothing, and tell
    whether the weights are those of a folder. count: nothing but what every receipt says."""
    timeout_s: float
    store: str = ""
    """"host:port" of a store, where it is not that of the group; see `comm.lanes`."""
    lane: int = -1
    """Of the rank that gets the order."""
    folder: str = ""
    """Of a snapshot, to compare with."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Receipt:
    """What one rank of an engine did."""

    error: str = ""
    idle_seconds: float = 0.0
    """Until the GPU had done what was begun before the pause."""
    wire_seconds: float = 0.0
    """From the first byte asked for to the last one received."""
    load_seconds: float = 0.0
    """From then on, until the last byte was in its place."""
    fallback: list[str] = field(default_factory=list)
    """Reasons why buckets go through the model's own loader, which is slow."""
    fingerprints: list[int] = field(default_factory=list)
    """Of the buckets, if it is a check; checksums of the files that were compared with."""
    differing: int = 0
    """Slices of parameters that do not hold what they should; of a check or a comparison."""
    num_sampled: dict[str, int] | None = None
    """Response tokens of the requests that stood still meanwhile; None if it cannot be told."""

    @classmethod
    def from_json(cls, text: str) -> "Receipt":
        return cls(**json.loads(text))


def key_of(serial: str, rank: int) -> str:
    """Where the receipt of a rank of the group is left in the store."""
    return f"receipt/{serial}/{rank}"


def receipt_file(folder: str, serial: str, rank: int) -> Path:
    """Where a rank of an engine leaves its receipt of a comparison with `folder`."""
    return Path(folder).parent / f".receipt-{serial}-{rank}.json"


def abort_key(serial: str) -> str:
    """What the trainer sets in the store when it gives up; ranks that wait look at it."""
    return f"abort/{serial}"
