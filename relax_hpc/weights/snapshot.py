"""Writes snapshots: the weights of a version as a Hugging Face folder.

All ranks of the trainer write, each its share. A folder gets its name by a rename once it is
complete, and never changes afterwards. `files` has engines load them.
"""

import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from relax_hpc.errors import SnapshotError, without_number
from relax_hpc.runtime.comm.bucket import Spec
from relax_hpc.runtime.comm.world import World
from relax_hpc.runtime.files.storage import delete_folder, patiently
from relax_hpc.trainer.models import hf_folder
from relax_hpc.trainer.models.weight_files import (
    FILE_BYTES,
    MANIFEST,
    FileRecord,
    FileWriter,
    Manifest,
    plan_files,
)
from relax_hpc.weights.quantize import Quantizer

_KEPT = 2
_TORN = ".tmp"
_RECEIPT = ".receipt"
_READ_S = 3600.0
"""Age after which nobody reads a receipt: an engine may be loading while the trainer trains."""


class Snapshot(NamedTuple):
    """A complete folder of weights."""

    folder: Path
    manifest: Manifest

    @property
    def version(self) -> int:
        return self.manifest.version


class SnapshotWriter:
    """A rank's part in writing snapshots: `begin` on rank 0, `write` on all, `finish` on rank 0."""

    def __init__(
        self,
        root: Path,
        specs: Iterable[Spec],
        world: World,
        model_folder: Path,
        *,
        quantizer: Quantizer | None = None,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        """Touches no file yet.

        Args:
            root: of all snapshots of the run; only the trainer writes there.
            specs: of all tensors that `write` gets, in their order.
            model_folder: source of config.json, the tokenizer and other small files.
            quantizer: applied to the tensors before they are written.
            file_bytes: of a file at most; a larger tensor gets a file of its own.
        """
        self._root, self._world, self._model_folder = root, world, model_folder
        self._quantizer, specs = quantizer, list(specs)
        self._dtypes = {spec.dtype for spec in specs}
        written = quantizer.specs(specs) if quantizer else specs
        self._files = plan_files(written, world.size, max_bytes=file_bytes)
        self._own = [file for file in self._files if file.writer == world.rank]

    def begin(self, version: int, *, in_use: Collection[Path]) -> str:
        """Deletes old snapshots and makes a hidden folder.

        Returns:
            The final name of the folder, never used before: a restarted trainer makes a version
            again while engines may still read its first snapshot.

        Raises:
            SnapshotError: the folder cannot be written.
        """
        name = f"v{version:06d}-{uuid.uuid4().hex[:8]}"
        draft = self._draft(name)

        def make() -> None:
            delete_folder(draft)  # of an attempt that failed
            draft.mkdir(parents=True)
            hf_folder.copy_all_but_weights(self._model_folder, draft)
            hf_folder.set_dtype(draft, self._dtypes)
            if self._quantizer and self._quantizer.config_json:
                hf_folder.set_quantization(draft, self._quantizer.config_json)

        try:
            patiently(self._root, partial(self._clean_up, in_use), small=True)
            patiently(draft, make)
        except OSError as error:
            delete_folder(draft)
            raise self._error(version, [without_number(error)]) from error
        return name

    def write(self, name: str, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, FileRecord]:
        """Writes this rank's share. Collective over the tensors and over the writing ranks.

        Raises:
            SnapshotError: on all ranks, if any of them failed.
        """
        records, problem = dict[str, FileRecord](), ""
        if self._quantizer:
            own = {spec.name for file in self._own for spec in file.specs}
            tensors = self._quantizer.tensors(tensors, own)
        try:
            records = FileWriter(self._draft(name), self._own).write(tensors)
        except OSError as error:
            problem = f"rank {self._world.rank}: {without_number(error)}"
        outcomes = self._world.allgather((records, problem))
        if problems := [problem for _, problem in outcomes if problem]:
            raise self._error(int(name[1:7]), problems)
        return {file: record for records, _ in outcomes for file, record in records.items()}

    def finish(self, name: str, records: dict[str, FileRecord]) -> Snapshot:
        """Publishes the folder, after all ranks have written.

        Raises:
            SnapshotError: the last files cannot be written.
        """
        draft, folder = self._draft(name), self._root / name
        manifest = Manifest(int(name[1:7]), records)
        names = {file.name: [spec.name for spec in file.specs] for file in self._files}

        def publish() -> None:
            if folder.exists():  # by an attempt that was said to have failed
                return
            hf_folder.write_index(draft, names, sum(file.num_bytes for file in self._files))
            manifest.write(draft)
            draft.rename(folder)

        try:
            patiently(folder, publish)
        except OSError as error:
            raise self._error(manifest.version, [without_number(error)]) from error
        return Snapshot(folder, manifest)

    def discard(self, name: str) -> None:
        delete_folder(self._draft(name))

    def _draft(self, name: str) -> Path:
        return self._root / f".{name}{_TORN}"

    def _clean_up(self, in_use: Collection[Path]) -> None:
        if not self._root.is_dir():
            return
        found = list(self._root.iterdir())
        complete = [path for path in found if path.name.startswith("v")]
        complete.sort(key=_written_at)
        torn = [path for path in found if path.name.endswith(_TORN)]
        for path in (each for each in found if each.name.startswith(_RECEIPT)):
            with suppress(FileNotFoundError):  # its reader was here
                if time.time() - path.stat().st_mtime > _READ_S:
                    path.unlink()
        for path in [*torn, *complete[: 1 - _KEPT]]:
            if path not in in_use:
                delete_folder(path)

    def _error(self, version: int, problems: Sequence[str]) -> SnapshotError:
        return SnapshotError(f"{self._root}: v{version} was not written: {'; '.join(problems)}")


def _written_at(folder: Path) -> int:
    """Returns when a snapshot was complete, in ns; 0 if it is half deleted, by a trainer that was
    killed or while an engine held its files open."""
    manifest = folder / MANIFEST
    try:
        return patiently(manifest, manifest.stat).st_mtime_ns
    except FileNotFoundError:
        return 0
