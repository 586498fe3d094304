"""Commands that draw a run for TensorBoard and others."""

import typer

from relax_hpc.cli.arguments import Run, run_dir_of

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
    typer.echo(f"tensorboard: tensorboard --logdir {paths.tensorboard}{kept}")
