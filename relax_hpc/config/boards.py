"""Who is told of a run besides its run directory."""

from typing import Annotated, Literal

from pydantic import Field

from relax_hpc.sections import Section

Service = Literal["wandb"]


class BoardsConfig(Section):
    """Services that show the curves of a run; TensorBoard always does."""

    export: list[Service] = []
    """Services that are sent the curves as the run goes, each by a process of its own that no step
    waits for. wandb: Weights & Biases, with the account of `wandb login`."""
    project: Annotated[str, Field(min_length=1, max_length=100)] = "relax-hpc"
    """Project of W&B."""
    offline: bool = False
    """Write below the run directory, for nodes without a network: `wandb sync` sends it later."""
