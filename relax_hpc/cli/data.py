"""Commands that look at the data of a job."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from relax_hpc import job_file
from relax_hpc.cli.arguments import AsJson, Job, Overrides
from relax_hpc.cli.rows_shown import RowsShown
from relax_hpc.errors import ConfigError

if TYPE_CHECKING:
    from relax_hpc.config.run import JobConfig
    from relax_hpc.prompts.overlap import LeftOut

data = typer.Typer()
_MOST_SHOWN = 20


@data.command("data", epilog="Example:  relax-hpc data jobs/tiny/arithmetic.toml")
def overlap(
    job: Job,
    overrides: Overrides = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Look through all prompts of a job: those there are twice, and held-out ones that are trained
    on."""
    import json

    from relax_hpc.config.run import RunConfig
    from relax_hpc.prompts import overlap as overlaps
    from relax_hpc.roles.rollout import prompt_check

    config = job_file.load(job, overrides)
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{job}: a job with [sft] has no prompts; name another")
    found = prompt_check.overlap_of(config, prompt_check.read(config))
    if as_json:
        typer.echo(json.dumps(overlaps.to_json(found), indent=1))
        return
    for name, each in found.sets.items():
        typer.echo(f"eval.{name}: {each.num_prompts:,} prompts{_without(each.left_out)}")
    typer.echo(f"prompts.train: {found.num_train:,} prompts{_without(found.left_out)}")
    lines = overlaps.lines(found)
    typer.echo("\n".join(lines or ["no prompt is there twice"]))


def _without(left_out: "LeftOut") -> str:
    """Says how many of the prompts that were counted cannot be used, and why the first cannot."""
    count = left_out.num_rows
    return f", {count:,} of which cannot be used; the first: {left_out.first}" if count else ""


def decode_media(config: "JobConfig", say: Callable[[str], None]) -> None:
    """Decodes all media of a job, and shows how far it is.

    Raises:
        ConfigError: some cannot be used, and the job does not skip such rows.
    """
    import os

    from relax_hpc.config.run import RunConfig
    from relax_hpc.media.recipe import read_recipe
    from relax_hpc.models.config_json import ConfigJson
    from relax_hpc.roles.rollout import decode_check, prompt_check

    if not isinstance(config, RunConfig):
        raise ConfigError("--decode: a job with [sft] has no prompts with media; leave it out")
    ConfigJson(config.model.path)  # refused here if it is not there
    recipe = read_recipe(config.model.path, config.prompts.media)
    if recipe is None:
        raise ConfigError(
            f"--decode: the model in {config.model.path} reads text only; leave it out, or use a "
            "model that takes media"
        )
    files = prompt_check.open_files(config).by_key
    workers = config.prompts.media.workers or len(os.sched_getaffinity(0))
    with RowsShown() as shown:
        found = decode_check.decode(files, recipe, workers, shown)
    count, first = len(found.refused), [each.reason for each in found.refused[:_MOST_SHOWN]]
    if count:
        rest = [f"and {count - len(first):,} more"] if count > len(first) else []
        said = f"{count:,} of {found.num_media:,} media cannot be used"
        lines = "\n".join([said, *first, *rest])
        if config.prompts.media.broken == "error":
            raise ConfigError(f'{lines}\nreplace them, or set prompts.media.broken = "skip"')
        say(f"{lines}\ntheir rows are left out")
    else:
        say(f"decoded {found.num_media:,} media: each can be used")
