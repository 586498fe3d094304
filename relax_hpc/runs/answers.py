"""Finds the row of the data behind a trajectory, with the right answer."""

from collections.abc import Mapping
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from relax_hpc.config import job_file
from relax_hpc.config.prompts import SourceConfig
from relax_hpc.config.run import RunConfig
from relax_hpc.data.records import PromptRecord, Records
from relax_hpc.data.rows import PLACE, facts_of, paths_of
from relax_hpc.errors import ConfigError, RelaxError, without_number
from relax_hpc.roles.rollout.prompt_check import TRAIN
from relax_hpc.runtime.files.records import compact, read_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.text import printable, shorten

_KEPT = 256
"""Rows in memory: siblings and neighbours have the same one."""
_LETTERS = 2000
"""Most letters shown of an answer, and of metadata."""


class _Data(NamedTuple):
    sets: Mapping[int, Records] = {}
    """The rows; without training several sets, by the guid of the first row."""
    is_trained: bool = True
    missing: str = ""


class Answers:
    """Rows of a run's data, each read on access. Programs are not run for it.

    The run may go on or be over, but its data must be what it began with.
    """

    def __init__(self, paths: RunPaths) -> None:
        """Reads nothing."""
        self._paths = paths
        self._row = lru_cache(_KEPT)(self._read)

    @property
    def missing(self) -> str:
        """Why there is no row at all; empty if there is."""
        return self._data.missing

    def of(self, guid: int, prompt_index: int) -> PromptRecord | None:
        """Returns the row of a trajectory as a prompt; None if it cannot be read."""
        return self._row(0 if self._data.is_trained else guid - prompt_index, prompt_index)

    def _read(self, first: int, index: int) -> PromptRecord | None:
        try:
            return self._data.sets[first][index]
        except (LookupError, ConfigError):
            return None

    @cached_property
    def _data(self) -> _Data:
        try:
            return _open(self._paths)
        except (RelaxError, OSError) as error:
            return _Data(missing=f"the answers are not shown: {without_number(error)}")


def _open(paths: RunPaths) -> _Data:
    config, known = job_file.read_resolved(paths.config), read_json(paths.data_files)
    if known is None or not isinstance(config, RunConfig):
        raise ConfigError(f"{paths.data_files} does not say what data the run began with")
    if TRAIN in known:
        return _Data({0: _records(config, known[TRAIN], config.prompts.mixture)})
    sets = [
        _records(
            config,
            known[f"eval.{name}.path"],
            {"": SourceConfig(path=each.path, columns=each.columns)},
            title=name,
        )
        for name, each in config.eval.items()
    ]
    firsts = accumulate(map(len, sets), initial=0)
    return _Data(dict(zip(firsts, sets, strict=False)), is_trained=False)


def _records(
    config: RunConfig,
    known: Mapping[str, Any],
    sources: Mapping[str, SourceConfig],
    title: str = "",
) -> Records:
    """Opens the data of `known`.

    Raises:
        ConfigError: they are gone or changed, or made by a program.
    """
    named = [path for each in sources.values() for path in each.path]
    if programs := [path for path in named if PLACE.match(str(path))]:
        raise ConfigError(f"{programs[0]} is a program, which is not run to look at its rows")
    before, now = known["files"], facts_of(paths_of(*named))
    for path in [*before, *now]:
        if before.get(path) != now.get(path):
            what = "has changed" if path in now else "is gone"
            raise ConfigError(f"{path} {what} since the run began")
    records = Records(sources, config.prompts, title=title)
    if len(records) != known["num_rows"]:  # a set of the hub has no files
        raise ConfigError(f"{named[0]} has changed since the run began")
    return records


def in_words(row: PromptRecord | None) -> dict[str, str]:
    """Returns answer, source and metadata of a row as they are shown, without empty ones."""
    if row is None:
        return {}
    metadata = compact(row.metadata) if row.metadata else ""
    found = {"answer": row.answer, "source": row.source, "metadata": metadata}
    return {name: printable(shorten(said, _LETTERS)) for name, said in found.items() if said}
