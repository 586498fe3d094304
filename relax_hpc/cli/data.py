"""Commands that look at the data of a job."""

import typer

from relax_hpc import job_file
from relax_hpc.cli.arguments import AsJson, Job, Overrides
from relax_hpc.errors import ConfigError

data = typer.Typer()


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
        typer.echo(f"eval.{name}: {each.num_prompts:,} prompts")
    typer.echo(f"prompts.train: {found.num_train:,} prompts")
    lines = overlaps.lines(found)
    typer.echo("\n".join(lines or ["no prompt is there twice"]))
