"""Rows that a run leaves out since a medium of theirs cannot be used.

With `prompts.media.broken = "skip"` this is decided once, where the run is submitted: everything is
decoded, and what is left out stands in a record of the run, which all tasks read, at every start.
"""

import json
import time
from collections.abc import Mapping
from typing import NamedTuple

from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.media.recipe import read_recipe
from relax_hpc.paths import RunPaths
from relax_hpc.prompts import order
from relax_hpc.prompts.records import Records
from relax_hpc.records import read_json, write_json, write_text
from relax_hpc.roles.role import Say
from relax_hpc.roles.rollout import decode_check, prompt_check
from relax_hpc.roles.rollout.decode_check import Advance

_FORMAT = 1


class Decision(NamedTuple):
    """The rows that a run leaves out, and of how many."""

    num_rows: Mapping[str, int]
    """Rows that there were, by the key that names the data."""
    rows: Mapping[str, Mapping[int, str]]
    """Rows that are left out, with the reason, by key."""

    def keep(self, paths: RunPaths) -> None:
        """Writes it down for the tasks of a run, and lists the rows for people."""
        paths.broken_media.parent.mkdir(exist_ok=True)
        rows = {key: list(each.items()) for key, each in self.rows.items()}
        record = {"format": _FORMAT, "num_rows": dict(self.num_rows), "left_out": rows}
        write_json(paths.broken_media, record)
        list_left_out(paths, self.rows)


def decide(
    config: JobConfig,
    *,
    say: Say,
    advance: Advance,
    files: Mapping[str, Records] | None = None,
) -> Decision | None:
    """Decodes all media of a job whose rows are left out where one is broken.

    Args:
        config: the job, which has passed its checks.
        say: is told that this may take long, and what was found.
        advance: is told how far it is.
        files: the prompts, by the key that names the file; opened if not given.

    Returns:
        None of a job that leaves out no rows for that.

    Raises:
        ConfigError: no row of some data can be used.
    """
    if not isinstance(config, RunConfig) or not _is_asked(config):
        return None
    recipe = read_recipe(config.model.path, config.prompts.media)
    assert recipe is not None, "settings of media are refused for other models"
    files = files or prompt_check.open_files(config).by_key
    num_rows = {key: len(each) for key, each in files.items()}
    say(
        f'prompts.media.broken = "skip": the media of {sum(num_rows.values()):,} rows are decoded '
        "before anything is started; no other start decodes them again"
    )
    begin = time.monotonic()
    found = decode_check.decode(files, recipe, config.prompts.media.workers, advance)
    took_s = time.monotonic() - begin
    for key, rows in found.broken.items():
        first = next(iter(rows.values()))
        if len(rows) == num_rows[key]:
            raise ConfigError(f"{key}: no row can be used; the first: {first}")
        say(f"{key}: {len(rows):,} of {num_rows[key]:,} rows are left out; the first: {first}")
    say(f"decoded {found.num_media:,} media in {took_s:,.0f} s")
    return Decision(num_rows, found.broken)


def decide_if_undecided(
    config: JobConfig,
    paths: RunPaths,
    *,
    say: Say,
    advance: Advance,
    files: Mapping[str, Records] | None = None,
) -> None:
    """Decides for a run whose submission did not: of an older version, or broken off."""
    if paths.broken_media.exists():
        return
    if decision := decide(config, say=say, advance=advance, files=files):
        decision.keep(paths)


def decided_for(
    config: RunConfig, paths: RunPaths, num_rows: Mapping[str, int]
) -> dict[str, dict[int, str]]:
    """Reads which rows a run leaves out for their media, with the reasons, by key.

    Args:
        config: the run.
        paths: of it.
        num_rows: rows that there are, by the key that names the data.

    Raises:
        ConfigError: the job asks for it and nothing was decided, or of other data.
    """
    if not _is_asked(config):
        return {key: {} for key in num_rows}
    record = read_json(paths.broken_media)
    if record is None or record["format"] != _FORMAT:
        raise ConfigError(
            f'{paths.broken_media}: does not say which rows prompts.media.broken = "skip" leaves '
            "out; cancel the run, and resume it"
        )
    before = dict.fromkeys(num_rows, 0) | record["num_rows"]
    order.check_num_rows(num_rows, before, since="submitted")
    return {key: dict(map(tuple, record["left_out"].get(key, []))) for key in num_rows}


def list_left_out(paths: RunPaths, rows: Mapping[str, Mapping[int, str]]) -> None:
    """Lists for people which rows a run leaves out.

    Args:
        paths: of the run.
        rows: with the reasons, by the key that names the data.
    """
    listed = [
        {"set": key, "row": row, "reason": each[row]}
        for key, each in rows.items()
        for row in sorted(each)
    ]
    write_text(paths.left_out, "".join(f"{json.dumps(each)}\n" for each in listed))


def _is_asked(config: RunConfig) -> bool:
    return config.prompts.media.broken == "skip"
