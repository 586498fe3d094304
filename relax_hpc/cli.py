"""Verbs only. A command parses, calls one function and prints; heavy imports stay inside."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from relax_hpc import config as job_config
from relax_hpc.errors import ConfigError, RelaxError

if TYPE_CHECKING:
    from relax_hpc.launch.submit import Submission

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Asynchronous RL post-training of language models on plain Slurm.",
)
bench = typer.Typer(no_args_is_help=True, help="Measure parts of relax-hpc on this machine.")
app.add_typer(bench, name="bench")
console = Console(soft_wrap=True)

Job = Annotated[Path, typer.Argument(help="A job file, see jobs/.", show_default=False)]
Run = Annotated[str, typer.Argument(help="A run directory, or its name under runs/.")]
Overrides = Annotated[
    list[str], typer.Option("--set", help="section.key=value; repeatable.", show_default=False)
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the rows to this file.")]


@app.command(
    epilog="Example:  relax-hpc check jobs/arithmetic.toml --set algorithm.max_staleness=3"
)
def check(job: Job, overrides: Overrides = []) -> None:  # noqa: B006
    """Validate a job, the files it names and the cluster; print it with every default filled in."""
    from relax_hpc.launch import preflight
    from relax_hpc.launch.submit import resolve

    config, components = resolve(job_config.load(job, overrides))
    preflight.check(config, components, use_slurm=shutil.which("sbatch") is not None)
    typer.echo(config.model_dump_json(indent=2))


@app.command(epilog="Example:  relax-hpc submit jobs/arithmetic.toml --set name=try1 --dry-run")
def submit(
    job: Job,
    overrides: Overrides = [],  # noqa: B006
    dry_run: Annotated[bool, typer.Option(help="Print the batch script, submit nothing.")] = False,
    local: Annotated[bool, typer.Option(help="Run on this machine even if Slurm is here.")] = False,
    follow: Annotated[bool, typer.Option(help="Show the steps until the run ends.")] = False,
) -> None:
    """Submit every role of a job as one heterogeneous Slurm job, or run it on this machine."""
    from relax_hpc.launch.submit import submit as submit_job

    submission = submit_job(job_config.load(job, overrides), local=local, dry_run=dry_run)
    if dry_run:
        typer.echo(submission.script)
        return
    _announce(submission, local=local, follow=follow)


@app.command(epilog="Example:  relax-hpc resume arithmetic")
def resume(
    run: Run,
    local: Annotated[bool, typer.Option(help="Run on this machine even if Slurm is here.")] = False,
    follow: Annotated[bool, typer.Option(help="Show the steps until the run ends.")] = False,
) -> None:
    """Start a run again that was cancelled or gave up; it goes on from its newest checkpoint."""
    from relax_hpc.launch.submit import resume as resume_job

    _announce(resume_job(_run_dir(run), local=local), local=local, follow=follow)


@app.command(epilog="Example:  relax-hpc status arithmetic --json | jq .trajectories")
def status(
    run: Run, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """What a run is doing, and what it has done."""
    from relax_hpc.launch import report
    from relax_hpc.launch import status as run_status

    found = run_status.collect(_run_dir(run))
    if as_json:
        typer.echo(found.to_json())
    else:
        typer.echo(report.text(found))


@app.command(epilog="Example:  relax-hpc logs arithmetic --role actor --follow")
def logs(
    run: Run,
    role: Annotated[str | None, typer.Option(help="Only this role.", show_default=False)] = None,
    follow: Annotated[bool, typer.Option(help="Go on as the run goes on.")] = False,
) -> None:
    """Print the logs of a run, each line with the task it comes from."""
    from relax_hpc.launch import logs as run_logs
    from relax_hpc.launch.report import is_over

    run_dir = _run_dir(run)
    lines = (
        run_logs.follow(run_dir, role, until=lambda: is_over(run_dir))
        if follow
        else run_logs.lines(run_dir, role)
    )
    for line in lines:
        typer.echo(f"{line.source}: {line.text}")


@app.command(epilog="Example:  relax-hpc cancel arithmetic")
def cancel(run: Run) -> None:
    """End everything a run started, and nothing else."""
    from relax_hpc.launch import cancel as run_cancel

    run_dir = _run_dir(run)
    run_cancel.cancel(run_dir)
    typer.echo(f"cancelled; what it has done: relax-hpc status {run_dir}")


@app.command(epilog="Example:  relax-hpc peek runs/arithmetic/bus/p/rollout-0/e1/000000000003.h5")
def peek(
    shard: Annotated[Path, typer.Argument(help="A shard of the bus.", show_default=False)],
) -> None:
    """Show what is in a shard."""
    from relax_hpc.bus.peek import describe

    typer.echo(describe(shard))


@app.command("make-tiny", epilog="Example:  relax-hpc make-tiny models/tiny --digits 2")
def make_tiny(
    folder: Annotated[Path, typer.Argument(help="Gets model/ and the prompts.")],
    digits: Annotated[int, typer.Option(help="Of each summand.", min=1, max=6)] = 2,
    seed: int = 0,
    target: Annotated[float, typer.Option(help="Held-out accuracy to start RL from.")] = 0.45,
) -> None:
    """Make a tiny policy and an addition task to try everything with: offline, in a minute."""
    import torch

    from relax_hpc.roles.make_tiny import make

    torch.set_num_threads(1)  # the model is too small to share out
    made = make(folder, digits=digits, seed=seed, target=target, progress=typer.echo)
    typer.echo(f"{folder}: {made}")


@bench.command(
    "shard", epilog="Example:  relax-hpc bench shard --folder /scratch --json shard.json"
)
def bench_shard(
    folder: Annotated[Path | None, typer.Option(help="File system to measure.")] = None,
    repeats: Annotated[int, typer.Option(min=3)] = 9,
    json_file: JsonFile = None,
) -> None:
    """Durable write and verified read of a text batch, against the same bytes raw."""
    from relax_hpc.bench import report, shard

    report.show(shard.measure(folder, repeats), console, json_file)


def _run_dir(run: str) -> Path:
    for candidate in (Path(run), Path("runs") / run):
        if (candidate / "run.json").is_file():
            return candidate
    raise ConfigError(f"{run}: no such run; give a run directory, or a name under runs/")


def _announce(submission: "Submission", *, local: bool, follow: bool) -> None:
    if submission.mode == "local" and not local:
        typer.echo("there is no sbatch here: running on this machine")
    for role, job_id in submission.job_ids.items():
        typer.echo(f"{role + ':':<9}{job_id}")
    typer.echo(f"run directory: {submission.run_dir}")
    if follow:
        _follow_run(submission.run_dir)
    else:
        typer.echo(f"next: relax-hpc status {submission.run_dir}")


def _follow_run(run_dir: Path) -> None:
    """Shows the actor's steps as they come, then what the run has come to."""
    from relax_hpc.launch import report
    from relax_hpc.launch import status as run_status

    for line in report.progress(run_dir):
        typer.echo(line)
    found = run_status.collect(run_dir)
    typer.echo(report.text(found))
    if found.state != "COMPLETED":
        raise typer.Exit(1)


def main() -> None:
    """Entry point: what we raise on purpose becomes one line and exit code 2."""
    try:
        app()
    except RelaxError as error:
        typer.secho(str(error), fg="red", err=True)
        sys.exit(2)
