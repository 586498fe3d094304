"""`relax-hpc init`, `relax-hpc schema`: a job and a profile to begin with."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from relax_hpc.errors import ConfigError
from relax_hpc.sections import NAME

beginning = typer.Typer()


@beginning.command(
    epilog="Examples:  relax-hpc init first  |  relax-hpc init math --like qwen3-4b-gsm8k"
)
def init(
    name: Annotated[str, typer.Argument(help="Of the job; NAME.toml is made here.")],
    like: Annotated[str, typer.Option(help="Job that comes along, to begin from.")] = "demo",
) -> None:
    """Write a job with every key explained and, unless there is one, a profile of this cluster."""
    from relax_hpc.launch import profiles
    from relax_hpc.launch.submit import mode_of
    from relax_hpc.preparation import site, starting

    if not re.match(NAME, name):
        raise ConfigError(f"{name!r}: is no name of a run; use letters, digits, '.', '_' and '-'")
    job, folder = Path(f"{name}.toml"), profiles.folder()
    if job.exists():
        raise ConfigError(f"{job}: is there already; choose another name")
    schema_file, profile = folder / "job.schema.json", folder / "default.toml"
    text = starting.job_text(like, name, schema_file)
    is_new = not profile.exists()
    described = site.profile_text() if is_new else None
    is_silent = is_new and not described and mode_of(local=False) == "slurm"
    local = " --local" if is_silent else ""  # else submit would ask a Slurm that does not answer
    text = text.replace(f"relax-hpc submit {job}\n", f"relax-hpc submit {job}{local}\n", 1)
    folder.mkdir(parents=True, exist_ok=True)
    schema_file.write_text(json.dumps(starting.schema()))
    job.write_text(text)
    typer.echo(f"{job}: a job like {like}; relax-hpc init --like takes another")
    if not is_new:
        typer.echo(f"{profile}: your profile, left as it is")
    elif described:
        profile.write_text(described)
        profiles.load(str(profile))
        typer.echo(f"{profile}: what every job asks of this cluster; look through it")
    else:
        typer.echo("no Slurm answers here: no profile is made, jobs run on this machine")
    for command in re.findall("`(relax-hpc make-tiny .+?)`", text):
        typer.echo(f"next: {command}")
    typer.echo(f"next: relax-hpc check {job}{local}")


@beginning.command(epilog="Example:  relax-hpc schema --out job.schema.json")
def schema(
    out: Annotated[Path | None, typer.Option(help="File; printed if not given.")] = None,
) -> None:
    """JSON Schema of a job, for editors: a job names it in a line `#:schema FILE`."""
    from relax_hpc.preparation import starting

    text = json.dumps(starting.schema(), indent=1)
    if out is None:
        typer.echo(text)
    else:
        out.write_text(text)
