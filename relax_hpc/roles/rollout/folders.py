"""The folders of the bus that one rollout task keeps: its own, and those whose task is no more.

A prompt group is committed in its folder, whoever samples it. So whoever keeps the folder next,
however many tasks there are then, finds there all that was done of its prompts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Self

from relax_hpc.bus import layout
from relax_hpc.bus.credits import Owed
from relax_hpc.bus.layout import Deals
from relax_hpc.bus.producer import Producer
from relax_hpc.errors import BusError
from relax_hpc.paths import BusPaths
from relax_hpc.schema import PromptGroup


class Folders:
    """The producers of one rollout task, each of a folder; to the task they are one.

    Args:
        deals: of the run.
        task: number of the rollout task.
        producers: by number of their folder.
    """

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
        """Opens the folders that are a task's; whoever had one open before is fenced.

        Args:
            paths: of the bus.
            task: number of the rollout task.
            size: rollout tasks that there are.
            provenance: as of `Producer`, like `compress` and `spares`.

        Raises:
            BusError: as `Producer`, or prompts are dealt over another number of tasks.
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

    def owed(self, *, start: int) -> Iterator[int]:
        """Prompt groups of the task from `start` on that are not committed now, rising and without
        end."""
        committed = self.committed
        return (g for g in self._deals.guids(self._task, start=start) if g not in committed)

    @property
    def committed(self) -> set[int]:
        """As of `Producer`, like all below, of all folders."""
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
        """Divides groups into those of each folder: only they can be put as one shard."""
        found = dict[int, list[PromptGroup]]()
        for group in groups:
            found.setdefault(self._deals.folder_of(group.guid), []).append(group)
        return list(found.values())

    def times_kept(self, guid: int) -> int:
        return self._of(guid).times_kept(guid)

    def place_of(self, guid: int) -> tuple[int, int] | None:
        """Number of the folder, and of the shard in it, that a group of the task is committed in;
        None if it is not."""
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
