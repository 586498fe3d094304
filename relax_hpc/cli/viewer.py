"""Commands that show what a run samples: prompts and responses, with what they are worth."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from relax_hpc.cli.arguments import Run, going_on, run_dir_of
from relax_hpc.errors import ConfigError
from relax_hpc.paths import RunPaths
from relax_hpc.viewer.asked import Asked, By, Sort

viewer = typer.Typer()

Guid = Annotated[int | None, typer.Option(help="Only this prompt group.", show_default=False)]
Step = Annotated[
    int | None, typer.Option(help="Only what this step is trained on.", show_default=False)
]
Tokens = Annotated[
    int, typer.Option(min=2, help="Of a text, the first and last that are shown at most.")
]
Count = Annotated[int, typer.Option("--groups", min=1, help="Prompt groups at most.")]


@viewer.command(epilog="Example:  relax-hpc view arithmetic --sort worst --groups 8")
def view(
    run: Run,
    out: Annotated[
        Path | None, typer.Option(help="The page; view.html in the run if not given.")
    ] = None,
    sort: Annotated[
        Sort,
        typer.Option(help="Which come first; flipped: prompts that went from wrong to right."),
    ] = "newest",
    groups: Count = 16,
    step: Step = None,
    guid: Guid = None,
    by: Annotated[By, typer.Option(help="What colours the tokens.")] = "logprob",
    tokens: Tokens = 1000,
    text: Annotated[bool, typer.Option("--text", help="Print it instead.")] = False,
) -> None:
    """Write a page of trajectories: siblings side by side, every token coloured."""
    from relax_hpc.viewer import page, terminal
    from relax_hpc.viewer.run import Sight

    if step is not None and guid is not None:
        raise ConfigError("--step and --guid: give one of them")
    if sort == "flipped" and (step is not None or guid is not None):
        raise ConfigError("--sort flipped: compares steps; leave --step and --guid out")
    run_dir = run_dir_of(run)
    sight = Sight(run_dir)
    found = sight.view(Asked(sort, groups, step, guid), tokens)
    for remark in found.remarks:
        typer.echo(remark, err=True)
    if text:
        terminal.show(Console(), found.groups, by)
        return
    target = out or RunPaths(run_dir).view
    head = page.Head(run_dir.resolve().name, by, found.remarks, sight.solved_at)
    count = page.write(target, head, found.groups, replace=out is None)
    typer.echo(f"{target}: {count} prompt groups")


@viewer.command(epilog="Example:  relax-hpc peek arithmetic --follow --groups 1")
def peek(
    run: Run,
    groups: Count = 3,
    tokens: Tokens = 200,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Go on as the run goes on; Ctrl-C leaves, and the run goes on."
        ),
    ] = False,
) -> None:
    """Print the newest prompts and responses with their rewards, while the run goes on."""
    from relax_hpc.runs.watching import Watch
    from relax_hpc.viewer import terminal
    from relax_hpc.viewer.run import Sight

    run_dir = run_dir_of(run)
    sight = Sight(run_dir)
    until = Watch(run_dir).is_over if follow else (lambda: True)
    with going_on(run):
        for number, found in enumerate(sight.follow(groups, tokens, until=until)):
            for remark in found.remarks if number == 0 else ():
                typer.echo(remark, err=True)
            terminal.show(Console(), found.groups, by=None)
