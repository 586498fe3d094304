"""`control/replay.json`: the step that is trained again, its run, and where training begins."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from relax_hpc.records import read_json, write_json


@dataclass(frozen=True, slots=True)
class Replay:
    """A step that is trained again."""

    run_dir: Path
    """Run that has its shards."""
    step: int
    first: int
    """Step that training begins with: `step`, or one before it."""
    checkpoint: Path | None
    """Checkpoint of the step before `first`; None begins with the job's model."""

    def write(self, path: Path) -> None:
        folder = self.checkpoint and str(self.checkpoint)
        write_json(path, asdict(self) | {"run_dir": str(self.run_dir), "checkpoint": folder})

    @classmethod
    def read(cls, path: Path) -> Self:
        fields = read_json(path)
        assert fields is not None, path
        folder = fields["checkpoint"] and Path(fields["checkpoint"])
        return cls(Path(fields["run_dir"]), fields["step"], fields["first"], folder)
