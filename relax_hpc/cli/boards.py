"""Commands that draw a run for TensorBoard and others."""

from typing import Annotated

import typer

from relax_hpc.cli.arguments import Run, run_dir_of
from relax_hpc.config.boards import Service
from relax_hpc.printable import argument

boards = typer.Typer()


@boards.command(epilog="Example:  relax-hpc report arithmetic")
def report(run: Run) -> None:
    """Write the summary, the picture of the curve and TensorBoard of a run, as far as it is."""
    from relax_hpc.boards import finish
    from relax_hpc.paths import RunPaths

    run_dir = run_dir_of(run)
    is_over = finish.report(run_dir)
    paths = RunPaths(run_dir)
    typer.echo(f"summary:     {paths.summary}")
    for picture in (paths.reward_curve, paths.loss_curve):
        if picture.exists():
            typer.echo(f"curve:       {picture}")
    kept = "" if is_over else "   (its job keeps it up to date)"
    typer.echo(f"tensorboard: tensorboard --logdir {argument(paths.tensorboard)}{kept}")


@boards.command(epilog="Example:  relax-hpc export wandb arithmetic --offline")
def export(
    service: Annotated[Service, typer.Argument(help="Where to.", show_default=False)],
    run: Run,
    offline: Annotated[
        bool, typer.Option("--offline", help="Write it below the run directory, send nothing.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on as the run goes on; Ctrl-C leaves.")
    ] = False,
    uri: Annotated[
        str | None,
        typer.Option("--tracking-uri", help="Server of MLflow, in place of the job's."),
    ] = None,
) -> None:
    """Send the curves of a run to a service: what it does not have yet."""
    from relax_hpc.boards import export as exports

    run_dir = run_dir_of(run)
    found = exports.send(run_dir, service, offline=offline, follow=follow, uri=uri)
    typer.echo(f"{service}: run {found.id}, up to step {found.step}")
    for folder in sorted(run_dir.glob("wandb/offline-run-*")) if service == "wandb" else ():
        typer.echo(f"to send it: wandb sync --append {folder}")
    if service == "mlflow" and offline:
        uri = f"sqlite:///{run_dir.absolute()}/mlflow.db"
        typer.echo(f"to look at it: mlflow ui --backend-store-uri {uri}")
