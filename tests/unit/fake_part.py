"""A rank's part of a checkpoint, without a model: small files; rank 0 writes the last."""

from pathlib import Path

NAMES = "names"


class FakePart:
    def __init__(self, files, hold=None):
        self.files, self.hold = files, hold

    def write(self, folder: Path):
        if self.hold is not None:
            assert self.hold.wait(20)
        for name, content in self.files.items():
            (folder / name).write_text(content)

    def write_names(self, folder, *, timeout_s, cancelled):
        (folder / NAMES).write_text("all")
        return sum(path.stat().st_size for path in folder.iterdir())
