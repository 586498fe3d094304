"""`relax-hpc scale`: adds engines to a running run, and removes them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_hpc.cli.arguments import AsJson, Run, own_run_dir_of, run_dir_of
from relax_hpc.cli.lines import PlainGroup, echo

if TYPE_CHECKING:
    from relax_hpc.runs.scale.requests import ScaleResponse

scale = typer.Typer(
    cls=PlainGroup,
    no_args_is_help=True,
    help="Add rollout engines to a run that is running, and remove them.",
)

_DRAIN_S = 300.0
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done; exit code 1 if not.")]


@scale.command(
    "out",
    epilog="Examples:  relax-hpc scale out arithmetic --engines 4  |  "
    "relax-hpc scale out arithmetic --engines 4 --transport files --wait",
)
def scale_out(
    run: Run,
    engines: Annotated[int, typer.Option(help="Total number of engines of the run.")],
    transport: Annotated[
        str | None,
        typer.Option(help="collective, or files without a fabric; else weights.transport."),
    ] = None,
    wait: Wait = False,
) -> None:
    """Add engines in nodes that the run holds and does not use (resources.max_nodes)."""
    from relax_hpc.runs.scale import requests as scaling

    run_dir = own_run_dir_of(run)
    _tell(run_dir, scaling.out(run_dir, engines, transport), wait=wait)


@scale.command(
    "in",
    epilog="Examples:  relax-hpc scale in arithmetic --engines 2  |  "
    "relax-hpc scale in arithmetic --member extra-3 --drain 60",
)
def scale_in(
    run: Run,
    engines: Annotated[int | None, typer.Option(help="Total number of engines of the run.")] = None,
    member: Annotated[str | None, typer.Option(help="An added engine, see scale list.")] = None,
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds for its requests to end; then others go on.")
    ] = _DRAIN_S,
    wait: Wait = False,
) -> None:
    """Remove added engines, the newest first; those the run started with stay."""
    from relax_hpc.runs.scale import requests as scaling

    run_dir = own_run_dir_of(run)
    asked = scaling.scale_in(run_dir, engines=engines, member=member, drain_s=drain)
    _tell(run_dir, asked, wait=wait)


@scale.command("cancel", epilog="Example:  relax-hpc scale cancel arithmetic")
def scale_cancel(run: Run, wait: Wait = False) -> None:
    """Take back a scale out that is under way; engines it has started are ended."""
    from relax_hpc.runs.scale import requests as scaling

    run_dir = own_run_dir_of(run)
    request = scaling.cancel(run_dir)
    echo(f"{request}: is taken back")
    if wait:
        outcome = scaling.wait(run_dir, request)
        echo(f"{request}: {outcome.state.lower()}")


@scale.command(
    "list", epilog="Example:  relax-hpc scale list arithmetic --json | jq '.rows[].state'"
)
def scale_list(run: Run, as_json: AsJson = False) -> None:
    """Engines of a run: state, node, version of the weights, requests they have now."""
    from relax_hpc.runs.scale import requests

    found = requests.collect(run_dir_of(run))
    echo(found.to_json() if as_json else requests.text(found))


def _tell(run_dir: Path, asked: "ScaleResponse", *, wait: bool) -> None:
    from relax_hpc.runs.scale import requests as scaling
    from relax_hpc.runtime.text import argument

    if asked.request is None:
        echo(f"nothing to do: the run has {asked.engines} engines")
        return
    echo(f"{asked.request}: {'is under way already' if asked.repeated else 'is begun'}")
    if not wait:
        echo(f"next: relax-hpc scale list {argument(run_dir)}")
        return
    outcome = scaling.wait(run_dir, asked.request)
    said = f"{asked.request}: {outcome.state.lower()}{outcome.reason and ': '}{outcome.reason}"
    echo(said)
    if outcome.state != "DONE":
        raise typer.Exit(1)
