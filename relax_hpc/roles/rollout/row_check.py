"""Looks at all prompts when the job starts, and decides once which of them are left out, beside
those with broken media, on which the submission has decided.

Each rollout task looks at a share of the rows and leaves what it found in a file; together the
files say for all producers which rows there are. They are kept: whoever starts again reads them,
also where there are more or fewer tasks by then.
"""

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from relax_hpc.bus.layout import open_bus
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError, PeerTimeoutError
from relax_hpc.media import recipe
from relax_hpc.paths import BusPaths, RunPaths
from relax_hpc.prompts import order, tokenizer
from relax_hpc.prompts.source import Examined
from relax_hpc.records import read_bytes, read_json, write_json
from relax_hpc.roles.rollout import broken_media
from relax_hpc.roles.rollout.prompt_check import Sources, check_lengths, examine
from relax_hpc.storage import patiently

log = logging.getLogger(__name__)

_FORMAT = 1
_LOOK_S = 0.2


class Share(NamedTuple):
    """A task's part of the rows, and of the work."""

    number: int
    """0 to size - 1."""
    size: int
    """Tasks."""

    def rows(self, num_rows: int) -> range:
        """Rows that lie together, so that a file is read once by all tasks together."""
        first, end = (num_rows * n // self.size for n in (self.number, self.number + 1))
        return range(first, end)


def check_order(paths: BusPaths) -> None:
    """Refuses to go on with a run in another order than it began in.

    Raises:
        ConfigError: another version of this package began it.
    """
    begun = open_bus(paths).run.get("order", 1)
    if begun != order.VERSION:
        raise ConfigError(
            f"{paths.header}: the run was begun in order {begun} of the prompts, this relax-hpc "
            f"has order {order.VERSION}; use the version that began it, or submit a new run"
        )


def settle(config: RunConfig, paths: RunPaths, sources: Sources, share: Share) -> None:
    """Looks at this task's share of the rows, and takes from the sources all that are left out.

    Args:
        config: the run.
        paths: of it.
        sources: the prompts; those that no run could use are left out of them afterwards.
        share: this task's.

    Raises:
        ConfigError: a row cannot be used and none may be left out, or none is left; or there are
            other rows than at an earlier start.
        PeerTimeoutError: another task did not look at its rows in time.
    """
    key = _key(config, sources, share.size)
    num_rows = {name: source.num_rows for name, source in sources.by_key.items()}
    before = (read_json(paths.prompt_rows(share.number)) or {}).get("num_rows", {})
    order.check_num_rows(num_rows, num_rows | before, since="begun")
    broken = broken_media.decided_for(config, paths, num_rows)
    settled = _settled_before(config, paths, sources, share)
    own = settled[0] if settled else _read(paths, share.number, key)
    if own is None:
        rows = {
            name: [row for row in share.rows(count) if row not in broken[name]]
            for name, count in num_rows.items()
        }
        own = examine(sources, rows, is_decoded=config.prompts.media.broken == "skip")
        record = {"key": key, "tasks": share.size, "num_rows": num_rows, "found": own}
        write_json(paths.prompt_rows(share.number), record)
    found = [own]
    if config.prompts.bad_rows == "skip":
        found = settled or _of_all(config, paths, share, key, own)
    if config.prompts.may_leave_out:
        _leave_out(paths, sources, found, broken, is_first=share.number == 0)
    longest = {
        name: max(each[name].longest for each in found if name in each) for name in sources.by_key
    }
    check_lengths(config, longest)


def _settled_before(
    config: RunConfig, paths: RunPaths, sources: Sources, share: Share
) -> list[Mapping[str, Examined]]:
    """Reads what all tasks found when there were more or fewer; nothing if there were not.

    A row that is mended since stays left out: the order was drawn without it.
    """
    size = int((read_json(paths.prompt_rows(0)) or {}).get("tasks", share.size))
    if size == share.size or config.prompts.bad_rows != "skip":
        return []
    key = _key(config, sources, size)
    found = [_read(paths, number, key) for number in range(size)]
    known = [each for each in found if each is not None]
    return known if len(known) == size else []


def _of_all(
    config: RunConfig, paths: RunPaths, share: Share, key: str, own: Mapping[str, Examined]
) -> list[Mapping[str, Examined]]:
    found: dict[int, Mapping[str, Examined]] = {share.number: own}
    timeout_s = config.launch.peer_timeout_s
    deadline = time.monotonic() + timeout_s
    while missing := [number for number in range(share.size) if number not in found]:
        for number in missing:
            if (each := _read(paths, number, key)) is not None:
                found[number] = each
        if len(found) < share.size:
            if time.monotonic() > deadline:
                names = ", ".join(f"rollout-{n}" for n in missing if n not in found)
                raise PeerTimeoutError(
                    f"{names} did not look at its prompts in launch.peer_timeout_s = {timeout_s} "
                    "s; its log says why"
                )
            time.sleep(_LOOK_S)
    return [found[number] for number in range(share.size)]


def _leave_out(
    paths: RunPaths,
    sources: Sources,
    found: Sequence[Mapping[str, Examined]],
    broken: Mapping[str, Mapping[int, str]],
    *,
    is_first: bool,
) -> None:
    left_out = dict[str, dict[int, str]]()
    for name, source in sources.by_key.items():
        bad = dict(each for part in found for each in part[name].bad) | dict(broken[name])
        try:
            source.leave_out(bad)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        left_out[name] = bad
        if bad and is_first:
            log.warning(
                "%s: %d of %d rows are left out, listed in %s; the first: %s",
                name, len(bad), source.num_rows, paths.left_out, bad[min(bad)],
            )  # fmt: skip
    if is_first:
        broken_media.list_left_out(paths, left_out)


def _read(paths: RunPaths, number: int, key: str) -> Mapping[str, Examined] | None:
    record = read_json(paths.prompt_rows(number))
    if record is None or record["key"] != key:
        return None
    return {
        name: Examined(longest, [(row, reason) for row, reason in bad])
        for name, (longest, bad) in record["found"].items()
    }


def _key(config: RunConfig, sources: Sources, size: int) -> str:
    """Changes with everything that what is found depends on."""
    files = [file for source in sources.by_key.values() for file in source.records.files]
    told: Any = [
        _FORMAT,
        size,
        config.prompts.model_dump(mode="json"),
        [each.columns.model_dump() for each in config.eval.values()],
        config.reward.model_dump(mode="json", include={"name", "terms"}),
        [
            [str(file), (stat := patiently(file, file.stat)).st_size, stat.st_mtime_ns]
            for file in files
        ],
        [_hash_of(config.model.path / name) for name in (*tokenizer.READ, *recipe.READ)],
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _hash_of(file: Path) -> str:
    try:
        return hashlib.sha256(read_bytes(file)).hexdigest()
    except OSError:
        return ""
