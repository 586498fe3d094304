"""Manages the bus folders of a rollout task: its own, and those of tasks that are gone.

A prompt group is committed in its folder, whichever task samples it. So the next task that keeps
the folder, however many tasks there are then, finds all work on its prompts there.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

from relax_hpc.bus import layout
from relax_hpc.bus.credits import Owed
from relax_hpc.bus.layout import Deals
from relax_hpc.bus.producer import Producer
from relax_hpc.config.run import RunConfig
from relax_hpc.data import tokenizer
from relax_hpc.data.media import recipe
from relax_hpc.data.media.stored import DECODERS, decoders
from relax_hpc.errors import BusError
from relax_hpc.roles.context import TaskContext
from relax_hpc.runtime.files.records import read_bytes
from relax_hpc.runtime.files.storage import names, patiently
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.schema import PromptGroup

MODEL = "model_digests"
"""Shard attribute: digests of the files that determine tokens and their meaning."""
_READ = ("config.json", *tokenizer.READ, *recipe.READ)
_WEIGHTS = "*.safetensors"
_DIGITS = 16


class Folders:
    """The producers of one rollout task, one per folder, used as one producer."""

    def __init__(self, deals: Deals, task: int, producers: Mapping[int, Producer]) -> None:
        self._deals, self._task, self._producers = deals, task, producers

    @classmethod
    @contextmanager
    def open(
        cls,
        paths: BusPaths,
        task: int,
        size: int,
        provenance: Mapping[str, str | int],
        *,
        compress: Iterable[str] = (),
        spares: int = 0,
    ) -> Iterator[Self]:
        """Opens a task's folders, and fences their earlier owners.

        Args:
            provenance: as for `Producer`, like `compress` and `spares`.

        Raises:
            BusError: as for `Producer`, or prompts are dealt to another number of tasks.
        """
        header = layout.open_bus(paths)
        if size != header.deals.num_tasks:
            raise BusError(
                f"{paths.header}: prompts are dealt over {header.deals.num_tasks} rollout tasks, "
                f"this job has {size}; cancel the run and resume it"
            )
        with ExitStack() as opened:
            kept = {
                number: opened.enter_context(
                    Producer(paths, name, provenance, compress=compress, spares=spares)
                )
                for number, name in enumerate(header.producers)
                if header.deals.task_of(number) == task
            }
            yield cls(header.deals, task, kept)

    def list_owed(self, *, start: int) -> Iterator[int]:
        """Yields the task's uncommitted prompt groups from `start` on, rising, without end."""
        committed = self.committed
        return (g for g in self._deals.guids(self._task, start=start) if g not in committed)

    @property
    def committed(self) -> set[int]:
        """Does as `Producer`, like the methods below, for all folders."""
        return {guid for each in self._producers.values() for guid in each.committed}

    @property
    def partial(self) -> dict[int, PromptGroup]:
        return {guid: group for p in self._producers.values() for guid, group in p.partial.items()}

    @property
    def partial_origin(self) -> dict[int, Mapping[str, object]]:
        found = (each.partial_origin.items() for each in self._producers.values())
        return {guid: origin for items in found for guid, origin in items}

    @property
    def num_damaged_tokens(self) -> int:
        return sum(each.num_damaged_tokens for each in self._producers.values())

    def lots(self, groups: Sequence[PromptGroup]) -> list[Sequence[PromptGroup]]:
        """Divides groups by folder: only groups of one folder fit in one shard."""
        found = dict[int, list[PromptGroup]]()
        for group in groups:
            found.setdefault(self._deals.folder_of(group.guid), []).append(group)
        return list(found.values())

    def times_kept(self, guid: int) -> int:
        return self._of(guid).times_kept(guid)

    def place_of(self, guid: int) -> tuple[int, int] | None:
        """Returns the numbers of the folder, and of the shard in it, with a committed group; None
        if uncommitted."""
        seq = self._of(guid).seq_of(guid)
        return None if seq is None else (self._deals.folder_of(guid), seq)

    def put(self, groups: Sequence[PromptGroup]) -> int:
        return self._of(groups[0].guid).put(groups)

    def put_partial(self, groups: Sequence[PromptGroup]) -> int:
        return self._of(groups[0].guid).put_partial(groups)

    def owe_again(self, again: Iterable[Owed]) -> list[int]:
        again = list(again)
        return sorted(guid for each in self._producers.values() for guid in each.owe_again(again))

    def collect(self, retired_guid_below: int) -> int:
        return sum(each.collect(retired_guid_below) for each in self._producers.values())

    def _of(self, guid: int) -> Producer:
        return self._producers[self._deals.folder_of(guid)]


def provenance(config: RunConfig, context: TaskContext) -> dict[str, str | int]:
    """Returns the attributes of a task's shards: who samples them, and with what."""
    try:
        build = version(config.rollout_pool.kind)
    except PackageNotFoundError:
        build = version("relax-hpc")
    return {
        "run": config.name,
        "job": context.attempt,
        "component": context.component,
        "rank": context.rank,
        "start": context.start,
        "node": context.node,
        "engine": f"{config.rollout_pool.kind} {build}",
        MODEL: digests_of(config.model.path),
        **({DECODERS: decoders()} if recipe.is_shown_media(config.model.path) else {}),
    }


def digests_of(model: Path) -> str:
    """Returns digests by name of the model files that determine tokens and their meaning.

    The digest of weights covers names and sizes only: reading all bytes at every start would take
    long, and the samples are from a policy that the trainer has made since.
    """
    found = dict[str, bytes]()
    for name in sorted(_READ):
        with suppress(FileNotFoundError):
            found[name] = read_bytes(model / name)
    weights = [model / name for name in names(model) if fnmatch(name, _WEIGHTS)]
    sizes = [(path.name, patiently(path, path.stat).st_size) for path in weights]
    found |= {_WEIGHTS: json.dumps(sizes).encode()} if sizes else {}
    short = {name: hashlib.sha256(data).hexdigest()[:_DIGITS] for name, data in found.items()}
    return json.dumps(short)
