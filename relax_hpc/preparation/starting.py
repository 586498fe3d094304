"""A job file to begin with: one that comes along, every key explained, under a name of its own."""

import difflib
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from relax_hpc.config.keys import keys_of
from relax_hpc.config.run import RunConfig
from relax_hpc.config.sft import SftRunConfig
from relax_hpc.errors import ConfigError

JOBS = Path(__file__).parents[1] / "jobs"
_WIDTH = 96
_END = """
# What is asked of Slurm for every component; ~/.config/relax-hpc/default.toml, or another profile,
# says the rest. [engines.rollout.resources] and [actor.resources] refine it.
# [resources]
# time = "2-00:00:00"
# gpus_per_node = 4

# All keys: relax-hpc keys. One of them: relax-hpc keys actor.optimizer.lr
"""


def templates() -> dict[str, Path]:
    """The jobs that come along, by name."""
    return {path.stem: path for path in sorted(JOBS.glob("**/*.toml"))}


def job_text(like: str, name: str, schema: Path) -> str:
    """A job like one that comes along.

    Args:
        like: name of that.
        name: of the run, and of the file without its suffix.
        schema: file that editors check the job with.

    Raises:
        ConfigError: there is no such job.
    """
    known = templates()
    if like not in known:
        close = difflib.get_close_matches(like, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}"
        raise ConfigError(f"--like {like}: no such job; {hint}")
    lines = known[like].read_text().splitlines()
    about = [line for line in lines if re.match(r"#   (shows|needs|expect| )", line)]
    at = next(number for number, line in enumerate(lines) if line.startswith("name ="))
    head = [
        f"#:schema file://{schema}",
        f"# {name}: begun from the job `{like}` that comes with relax-hpc.",
        "#",
        *about,
        f"#   run       relax-hpc submit {name}.toml",
        "",
        f"name = {json.dumps(name)}",
    ]
    return "\n".join([*head, *_explained(lines[at + 1 :])]) + "\n" + _END


def _explained(lines: list[str]) -> Iterator[str]:
    """Puts the text of its key above every line that sets one."""
    keys = {key.name: key.text for kind in (SftRunConfig, RunConfig) for key in keys_of(kind)}
    section = ""
    for line in lines:
        if table := re.match(r"\[(.*)\]", line):
            section = f"{table[1]}."
        elif (key := re.match(r"([\w.]+) *=", line)) and (text := _text_of(section + key[1], keys)):
            wrapped = textwrap.wrap(text, _WIDTH, break_on_hyphens=False)
            yield from (f"# {part}" for part in wrapped)
        yield line


def _text_of(key: str, keys: dict[str, str]) -> str:
    first, *rest = key.split(".")
    of_any_name = ".".join([first, "<name>", *rest[1:]])
    component = re.fullmatch(r"(.*\.)?resources\.(\w+)", key)
    told_once = f"<component>.resources.{component[2]}" if component else ""
    return keys.get(key) or keys.get(of_any_name) or keys.get(told_once, "")


def schema() -> dict[str, Any]:
    """The JSON Schema of a job."""
    kinds = (RunConfig, SftRunConfig)
    refs, made = models_json_schema([(kind, "validation") for kind in kinds])
    learning, tuning = (refs[kind, "validation"] for kind in kinds)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A job of relax-hpc",
        "if": {"required": ["sft"]},
        "then": tuning,
        "else": learning,
        **made,
    }
