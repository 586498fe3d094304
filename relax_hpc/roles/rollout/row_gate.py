"""Decides once which rows of its data a run leaves out, and refuses it if it may leave out none.

Rows with broken media are found at submission, which decodes everything
(`prompts.media.advanced.broken = "skip"`). The others are found at the first start: each rollout
task checks a share of the rows and writes its results to a file. Once all files are there, the
decision is made and kept. Every later start follows both records, for any number of tasks and
whatever has become of the data: a guid always means the same row.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

from relax_hpc.bus.layout import open_bus
from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.data import order, tokenizer
from relax_hpc.data.media import recipe as recipes
from relax_hpc.data.media.canonical import measure_media, try_out
from relax_hpc.data.media.recipe import Recipe
from relax_hpc.data.media.source import MediaSource
from relax_hpc.data.media.workers import Decoders
from relax_hpc.data.media_tokens import check_taken
from relax_hpc.data.records import Records
from relax_hpc.data.rows import TaskShare, facts_of, naming
from relax_hpc.data.source import Examined
from relax_hpc.errors import ConfigError, MediumError, PeerTimeoutError
from relax_hpc.roles.role import Say
from relax_hpc.roles.rollout.prompt_check import Sources, check_lengths, examine, open_files
from relax_hpc.runtime.files.records import (
    read_bytes,
    read_json,
    write_json,
    write_json_once,
    write_text,
)
from relax_hpc.runtime.files.storage import patiently
from relax_hpc.runtime.paths import BusPaths, RunPaths

log = logging.getLogger(__name__)

_FORMAT = 1
_LOOK_S = 0.2
_BLOCK = 512
"""Rows in flight at once, which bounds memory."""
Advance = Callable[[int, int], None]
"""Called with the rows done, and the total."""


class Refused(NamedTuple):
    key: str
    row: int
    reason: str
    """File, line, medium and remedy."""
    is_medium: bool


class Decoded(NamedTuple):
    """Results of decoding the media of prompts."""

    num_media: int
    """Count of media; an unreadable row counts as one."""
    refused: list[Refused]
    """All unusable media; several may be of one row."""

    @property
    def broken(self) -> dict[str, dict[int, str]]:
        """Returns rows with an unusable medium, with the first reason found, by key."""
        found = dict[str, dict[int, str]]()
        for each in self.refused:
            if each.is_medium:
                found.setdefault(each.key, {}).setdefault(each.row, each.reason)
        return found


def decode(
    files: Mapping[str, Records], recipe: Recipe, num_processes: int | None, advance: Advance
) -> Decoded:
    """Decodes the media of all prompts.

    Args:
        files: the prompts, by the key that names the file.
        num_processes: see `Decoders`.
    """
    total, done, num_media, refused = sum(map(len, files.values())), 0, 0, list[Refused]()
    advance(done, total)
    with Decoders(num_processes) as decoders:
        for key, records in files.items():
            for first in range(0, len(records), _BLOCK):
                block = range(first, min(first + _BLOCK, len(records)))
                media, bad = _media_of(key, records, block, recipe)
                num_media += len(media) + len(bad)
                refused += bad
                jobs = [decoders.submit(each, _decode, each, recipe) for _, each in media]
                for (row, _), job in zip(media, jobs, strict=True):
                    try:
                        job.result()
                    except ConfigError as error:
                        refused.append(_refuse(key, row, error))
                    advance(done + row - first, total)
                done += len(block)
                advance(done, total)
    return Decoded(num_media, refused)


def _media_of(
    key: str, records: Records, rows: Iterable[int], recipe: Recipe
) -> tuple[list[tuple[int, MediaSource]], list[Refused]]:
    """Returns decodable media, each with its row, and unusable rows."""
    media, refused = list[tuple[int, MediaSource]](), list[Refused]()
    for row in rows:
        try:
            own = records[row].media
            check_taken(own, recipe)
        except ConfigError as error:
            refused.append(_refuse(key, row, error))
        else:
            media += [(row, each) for each in own]
    return media, refused


def _refuse(key: str, row: int, error: ConfigError) -> Refused:
    return Refused(key, row, str(error), isinstance(error, MediumError))


def _decode(source: MediaSource, recipe: Recipe) -> None:
    """Decodes a medium, in a worker process; raises ConfigError if it cannot."""
    for medium in measure_media([source], recipe):
        try_out(medium, recipe)


class MediaDecision(NamedTuple):
    """The rows that a run leaves out for their media."""

    num_rows: Mapping[str, int]
    """Number of rows, by the key that names the data."""
    rows: Mapping[str, Mapping[int, str]]
    """Rows left out, with the reason, by key."""

    def keep(self, paths: RunPaths) -> None:
        """Writes it for the run's tasks, and lists the rows for people."""
        paths.broken_media.parent.mkdir(exist_ok=True)
        rows = {key: list(each.items()) for key, each in self.rows.items()}
        record = {"format": _FORMAT, "num_rows": dict(self.num_rows), "left_out": rows}
        write_json(paths.broken_media, record)
        list_left_out(paths, self.rows)


def decide_media(
    config: JobConfig, *, say: Say, advance: Advance, files: Mapping[str, Records] | None = None
) -> MediaDecision | None:
    """Decodes all media of a job that skips rows with broken ones.

    Args:
        say: told that this may take long, and the result.
        files: the prompts, by the key that names the file; opened by default.

    Returns:
        None for a job that skips no such rows.

    Raises:
        ConfigError: all rows of some data are unusable.
    """
    if not isinstance(config, RunConfig) or config.prompts.media.advanced.broken != "skip":
        return None
    recipe = recipes.read_recipe(config.model.path, config.prompts.media)
    assert recipe is not None, "settings of media are refused for other models"
    files = files or open_files(config).by_key
    num_rows = {key: len(each) for key, each in files.items()}
    say(
        f'prompts.media.advanced.broken = "skip": the media of {sum(num_rows.values()):,} rows are '
        "decoded before anything is started; no other start decodes them again"
    )
    begin = time.monotonic()
    found = decode(files, recipe, config.prompts.media.advanced.workers, advance)
    took_s = time.monotonic() - begin
    for key, rows in found.broken.items():
        first = next(iter(rows.values()))
        if len(rows) == num_rows[key]:
            raise ConfigError(f"{key}: no row can be used; the first: {first}")
        say(f"{key}: {len(rows):,} of {num_rows[key]:,} rows are left out; the first: {first}")
    say(f"decoded {found.num_media:,} media in {took_s:,.0f} s")
    return MediaDecision(num_rows, found.broken)


def decide_media_once(
    config: JobConfig,
    paths: RunPaths,
    *,
    say: Say,
    advance: Advance,
    files: Mapping[str, Records] | None = None,
) -> None:
    """Decides for a run whose submission did not, because it was older or interrupted."""
    if not paths.broken_media.exists() and (
        decision := decide_media(config, say=say, advance=advance, files=files)
    ):
        decision.keep(paths)


def _read_broken(
    config: RunConfig, paths: RunPaths, num_rows: Mapping[str, int]
) -> dict[str, dict[int, str]]:
    """Reads which rows a run leaves out for their media, with the reasons, by key.

    Args:
        num_rows: current number of rows, by the key that names the data.
    """
    if config.prompts.media.advanced.broken != "skip":
        return {key: {} for key in num_rows}
    record = read_json(paths.broken_media)
    if record is None or record["format"] != _FORMAT:
        raise ConfigError(
            f"{paths.broken_media}: does not say which rows prompts.media.advanced.broken = "
            '"skip" leaves out; cancel the run, and resume it'
        )
    before = dict.fromkeys(num_rows, 0) | record["num_rows"]
    order.check_num_rows(num_rows, before, since="submitted")
    return {key: dict(map(tuple, record["left_out"].get(key, []))) for key in num_rows}


def list_left_out(paths: RunPaths, rows: Mapping[str, Mapping[int, str]]) -> None:
    """Lists for people which rows a run leaves out.

    Args:
        rows: with the reasons, by the key that names the data.
    """
    listed = [
        {"set": key, "row": row, "reason": each[row]}
        for key, each in rows.items()
        for row in sorted(each)
    ]
    write_text(paths.left_out, "".join(f"{json.dumps(each)}\n" for each in listed))


def check_order(paths: BusPaths) -> None:
    """Checks that the order of prompts is that in which the run began.

    Raises:
        ConfigError: another version of this package began it.
    """
    begun = open_bus(paths).run.get("order", 1)
    if begun != order.VERSION:
        raise ConfigError(
            f"{paths.header}: the run was begun in order {begun} of the prompts, this relax-hpc "
            f"has order {order.VERSION}; use the version that began it, or submit a new run"
        )


class RowDecision(NamedTuple):
    """The unusable rows that a run leaves out, and facts about the others."""

    num_rows: Mapping[str, int]
    """Number of rows, by the key that names the data."""
    longest: Mapping[str, int]
    left_out: Mapping[str, Sequence[int]]
    """Rows left out, by key, without those with broken media, which have their own record."""

    @classmethod
    def read(cls, paths: RunPaths) -> Self | None:
        """Reads it; None while nothing is decided.

        Raises:
            ConfigError: another version of this package decided.
        """
        record = read_json(paths.decided_rows)
        if record is None:
            return None
        if record.pop("format") != _FORMAT:
            raise ConfigError(
                f"{paths.decided_rows}: was written by another version of relax-hpc; use that one, "
                "or submit a new run"
            )
        return cls(**record)


class RowGate:
    """Lets those prompts into a rollout task that the run uses."""

    def __init__(
        self, config: RunConfig, paths: RunPaths, sources: Sources, share: TaskShare
    ) -> None:
        """Args:
            sources: all prompts; `settle` leaves rows out of them.
            share: the rows that this task checks.

        Raises:
            ConfigError: the job needs a decision about broken media and there is none, or one for
                other data.
        """
        self._config, self._paths, self._sources, self._share = config, paths, sources, share
        self._num_rows = {name: source.num_rows for name, source in sources.by_key.items()}
        self._broken = _read_broken(config, paths, self._num_rows)

    def settle(self) -> None:
        """Removes from the sources all rows that are left out; checks this task's share of the rows
        first if nothing is decided.

        Raises:
            ConfigError: a row is unusable and may not be skipped, no row is left, or the rows
                differ from those of an earlier start.
            PeerTimeoutError: another task did not check its rows in time.
        """
        if self._config.prompts.bad_rows == "skip":
            decision = RowDecision.read(self._paths) or self._decide()
            self._check_num_rows(decision.num_rows)
            bad, longest = decision.left_out, decision.longest
        else:
            bad, longest = {}, {name: each.longest for name, each in self._look().items()}
        if self._config.prompts.may_leave_out:
            listed = f"listed in {self._paths.left_out}"
            left_out = {
                name: dict.fromkeys(bad.get(name, ()), listed) | rows
                for name, rows in self._broken.items()
            }
            self._leave_out(left_out)
            for name, rows in left_out.items():
                if rows and self._share.number == 0:
                    told = name, len(rows), self._num_rows[name], listed
                    log.warning("%s: %d of %d rows are left out, %s", *told)
        check_lengths(self._config, longest)
        if self._share.number == 0:
            data = {
                name: {"num_rows": source.num_rows, "files": facts_of(source.records.files)}
                for name, source in self._sources.by_key.items()
            }
            write_json_once(self._paths.data_files, data)  # the first start's stays

    def _check_num_rows(self, before: Mapping[str, int]) -> None:
        order.check_num_rows(self._num_rows, self._num_rows | dict(before), since="begun")

    def _look(self) -> Mapping[str, Examined]:
        """Checks this task's share of the rows, or reads earlier results if nothing has changed."""
        record = self._paths.prompt_rows(self._share.number)
        self._check_num_rows((read_json(record) or {}).get("num_rows", {}))
        if (known := self._read(self._share.number, self._key)) is not None:
            return known
        rows = {
            name: [row for row in self._share.rows(count) if row not in self._broken[name]]
            for name, count in self._num_rows.items()
        }
        is_decoded = self._config.prompts.media.advanced.broken == "skip"
        own = examine(self._sources, rows, is_decoded=is_decoded)
        told = {"key": self._key, "tasks": self._share.size, "num_rows": self._num_rows}
        write_json(record, {**told, "found": own})
        return own

    def _decide(self) -> RowDecision:
        """Checks this task's share, and waits for the decision; task 0 makes it once all have
        checked.

        If all checked before but versions kept no decision, any task makes it from the earlier
        results without reading the data, since they determined the order. If no run can have begun
        with these results, the rows are checked anew.
        """
        if found := self._read_found_before():
            with suppress(ConfigError):
                return self._publish(found)
        own, size = self._share
        shares, timeout_s = {own: self._look()}, self._config.launch.advanced.peer_timeout_s
        deadline = time.monotonic() + timeout_s
        while (decision := RowDecision.read(self._paths)) is None:
            is_late = time.monotonic() > deadline
            if own == 0 or is_late:
                for number in set(range(size)) - set(shares):
                    if (each := self._read(number, self._key)) is not None:
                        shares[number] = each
            missing = [number for number in range(size) if number not in shares]
            if own == 0 and not missing:
                return self._publish([shares[number] for number in range(size)])
            if is_late:
                if not missing:
                    raise PeerTimeoutError(
                        f"rollout-0 did not decide in launch.advanced.peer_timeout_s = {timeout_s} "
                        "s which rows are left out; its log says why"
                    )
                names = ", ".join(f"rollout-{number}" for number in missing)
                raise PeerTimeoutError(
                    f"{names} did not look at its prompts in launch.advanced.peer_timeout_s = "
                    f"{timeout_s} s; its log says why"
                )
            time.sleep(_LOOK_S)
        return decision

    def _read_found_before(self) -> list[Mapping[str, Examined]]:
        """Reads the results of all tasks of an earlier start for the same data; none if one is
        missing.

        Raises:
            ConfigError: the rows differ now.
        """
        first = read_json(self._paths.prompt_rows(0))
        if first is None:
            return []
        self._check_num_rows(first.get("num_rows", {}))
        found = list[Mapping[str, Examined]]()
        for number in range(first.get("tasks", self._share.size)):
            each = self._read(number, first["key"])
            if each is None or each.keys() != self._num_rows.keys():
                return []
            found.append(each)
        return found

    def _publish(self, found: Sequence[Mapping[str, Examined]]) -> RowDecision:
        """Decides by the results of all tasks, if the run can go on with that, and lists it for
        people.

        Returns:
            The decision of the first task to publish one.

        Raises:
            ConfigError: no row is left, or a prompt is too long for the trainer.
        """
        names = self._num_rows
        bad = {name: dict(each for part in found for each in part[name].bad) for name in names}
        longest = {name: max(part[name].longest for part in found) for name in names}
        left_out = {name: rows | self._broken[name] for name, rows in bad.items()}
        self._leave_out(left_out)
        check_lengths(self._config, longest)
        # Before it holds: whoever finds it decided lists nothing.
        list_left_out(self._paths, left_out)
        made = RowDecision(names, longest, {name: sorted(rows) for name, rows in bad.items()})
        write_json_once(self._paths.decided_rows, {"format": _FORMAT, **made._asdict()})
        decided = RowDecision.read(self._paths)
        assert decided is not None, "it is never removed"
        return decided

    def _leave_out(self, rows: Mapping[str, Mapping[int, str]]) -> None:
        for name, source in self._sources.by_key.items():
            with naming(name):
                source.leave_out(rows[name])

    def _read(self, number: int, key: str) -> Mapping[str, Examined] | None:
        record = read_json(self._paths.prompt_rows(number))
        if record is None or record["key"] != key:
            return None
        return {
            name: Examined(longest, [(row, reason) for row, reason in bad])
            for name, (longest, bad) in record["found"].items()
        }

    @cached_property
    def _key(self) -> str:
        """Changes with every input of the results."""
        config, sources = self._config, self._sources.by_key.values()
        told: Any = [
            _FORMAT,
            self._share.size,
            config.prompts.model_dump(mode="json"),
            [each.columns.model_dump() for each in config.eval.values()],
            config.reward.model_dump(mode="json", include={"name", "terms"}),
            [
                [str(file), (stat := patiently(file, file.stat)).st_size, stat.st_mtime_ns]
                for source in sources
                for file in source.records.files
            ],
            [_hash_of(config.model.path / name) for name in (*tokenizer.READ, *recipes.READ)],
        ]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _hash_of(file: Path) -> str:
    try:
        return hashlib.sha256(read_bytes(file)).hexdigest()
    except OSError:
        return ""
