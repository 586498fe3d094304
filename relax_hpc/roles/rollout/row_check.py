"""Looks at all prompts when a run first starts, and decides once which of them are left out, beside
those with broken media, on which the submission has decided.

Each rollout task looks at a share of the rows and leaves what it found in a file. Once all files
are there, the decision is made of them and kept: every later start goes by it, however many tasks
there are then and whatever has become of the data. A prompt's ordinal means the same row for good.
"""

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from relax_hpc.bus.layout import open_bus
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError, PeerTimeoutError
from relax_hpc.media import recipe
from relax_hpc.paths import BusPaths, RunPaths
from relax_hpc.prompts import order, tokenizer
from relax_hpc.prompts.source import Examined
from relax_hpc.records import read_bytes, read_json, write_json, write_json_once
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


class Decision(NamedTuple):
    """The rows that cannot be used and that a run leaves out, and what the others are like."""

    num_rows: Mapping[str, int]
    """Rows that there were, by the key that names the data."""
    longest: Mapping[str, int]
    """Tokens of the longest prompt, by key."""
    left_out: Mapping[str, Sequence[int]]
    """Rows, by key; those with broken media are in a record of their own."""

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


def settle(config: RunConfig, paths: RunPaths, sources: Sources, share: Share) -> None:
    """Takes from the sources all rows that are left out; looks at this task's share of the rows if
    that is not decided.

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
    num_rows = {name: source.num_rows for name, source in sources.by_key.items()}
    broken = broken_media.decided_for(config, paths, num_rows)
    if config.prompts.bad_rows == "skip":
        decision = Decision.read(paths) or _decide(config, paths, sources, share, broken)
        order.check_num_rows(num_rows, num_rows | dict(decision.num_rows), since="begun")
        bad, longest = decision.left_out, decision.longest
    else:
        own = _look(config, paths, sources, share, broken, _key(config, sources, share.size))
        bad, longest = {}, {name: each.longest for name, each in own.items()}
    if config.prompts.may_leave_out:
        listed = f"listed in {paths.left_out}"
        left_out = {n: dict.fromkeys(bad.get(n, ()), listed) | rows for n, rows in broken.items()}
        _leave_out(sources, left_out)
        for name, rows in left_out.items():
            if rows and share.number == 0:
                count = num_rows[name]
                log.warning("%s: %d of %d rows are left out, %s", name, len(rows), count, listed)
    check_lengths(config, longest)


def _look(
    config: RunConfig,
    paths: RunPaths,
    sources: Sources,
    share: Share,
    broken: Mapping[str, Mapping[int, str]],
    key: str,
) -> Mapping[str, Examined]:
    """Looks at a task's share of the rows, or reads what it found when nothing was different."""
    num_rows = {name: source.num_rows for name, source in sources.by_key.items()}
    before = (read_json(paths.prompt_rows(share.number)) or {}).get("num_rows", {})
    order.check_num_rows(num_rows, num_rows | before, since="begun")
    if (known := _read(paths, share.number, key)) is not None:
        return known
    rows = {
        name: [row for row in share.rows(count) if row not in broken[name]]
        for name, count in num_rows.items()
    }
    own = examine(sources, rows, is_decoded=config.prompts.media.broken == "skip")
    record = {"key": key, "tasks": share.size, "num_rows": num_rows, "found": own}
    write_json(paths.prompt_rows(share.number), record)
    return own


def _decide(
    config: RunConfig,
    paths: RunPaths,
    sources: Sources,
    share: Share,
    broken: Mapping[str, Mapping[int, str]],
) -> Decision:
    """Looks at a task's share, and waits for the decision; task 0 makes it once all have looked.

    Where all have looked before, as in runs of versions that kept no decision, any task makes it,
    and the data are not asked: the order was drawn by what was found then. If no run can have begun
    with that, it is looked at anew.
    """
    if found := _found_before(paths, sources, share):
        with suppress(ConfigError):
            return _publish(config, paths, sources, found, broken)
    key = _key(config, sources, share.size)
    shares = {share.number: _look(config, paths, sources, share, broken, key)}
    timeout_s = config.launch.peer_timeout_s
    deadline = time.monotonic() + timeout_s
    while (decision := Decision.read(paths)) is None:
        is_late = time.monotonic() > deadline
        if share.number == 0 or is_late:
            for number in set(range(share.size)) - set(shares):
                if (each := _read(paths, number, key)) is not None:
                    shares[number] = each
        missing = [number for number in range(share.size) if number not in shares]
        if share.number == 0 and not missing:
            found = [shares[number] for number in range(share.size)]
            return _publish(config, paths, sources, found, broken)
        if is_late:
            if not missing:
                raise PeerTimeoutError(
                    f"rollout-0 did not decide in launch.peer_timeout_s = {timeout_s} s which rows "
                    "are left out; its log says why"
                )
            names = ", ".join(f"rollout-{number}" for number in missing)
            raise PeerTimeoutError(
                f"{names} did not look at its prompts in launch.peer_timeout_s = {timeout_s} "
                "s; its log says why"
            )
        time.sleep(_LOOK_S)
    return decision


def _found_before(paths: RunPaths, sources: Sources, share: Share) -> list[Mapping[str, Examined]]:
    """Reads what all tasks of an earlier start found of the same data; nothing if one is missing.

    Raises:
        ConfigError: there are other rows now.
    """
    first = read_json(paths.prompt_rows(0))
    if first is None:
        return []
    num_rows = {name: source.num_rows for name, source in sources.by_key.items()}
    order.check_num_rows(num_rows, num_rows | first.get("num_rows", {}), since="begun")
    found = list[Mapping[str, Examined]]()
    for number in range(first.get("tasks", share.size)):
        each = _read(paths, number, first["key"])
        if each is None or each.keys() != num_rows.keys():
            return []
        found.append(each)
    return found


def _publish(
    config: RunConfig,
    paths: RunPaths,
    sources: Sources,
    found: Sequence[Mapping[str, Examined]],
    broken: Mapping[str, Mapping[int, str]],
) -> Decision:
    """Decides by what all tasks found, if the run can go on with that, and lists it for people.

    Returns:
        The decision of whoever was first.

    Raises:
        ConfigError: no row is left, or a prompt is too long for the trainer.
    """
    bad = {name: dict(each for part in found for each in part[name].bad) for name in broken}
    longest = {name: max(part[name].longest for part in found) for name in broken}
    left_out = {name: rows | dict(broken[name]) for name, rows in bad.items()}
    _leave_out(sources, left_out)
    check_lengths(config, longest)
    # Before it holds: whoever finds it decided lists nothing.
    broken_media.list_left_out(paths, left_out)
    num_rows = {name: source.num_rows for name, source in sources.by_key.items()}
    made = Decision(num_rows, longest, {name: sorted(rows) for name, rows in bad.items()})
    write_json_once(paths.decided_rows, {"format": _FORMAT, **made._asdict()})
    decided = Decision.read(paths)
    assert decided is not None, "it is never removed"
    return decided


def _leave_out(sources: Sources, rows: Mapping[str, Mapping[int, str]]) -> None:
    for name, source in sources.by_key.items():
        try:
            source.leave_out(rows[name])
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None


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
