"""Who is told of a run besides its run directory."""

from typing import Annotated, Literal

from pydantic import Field

from relax_hpc.sections import NonNegative, Section, UserPath

Service = Literal["wandb"]
News = Literal["start", "requeue", "plateau", "failure", "finish"]


class BoardsConfig(Section):
    """Services that show the curves of a run; TensorBoard always does."""

    export: list[Service] = []
    """Services that are sent the curves as the run goes, each by a process of its own that no step
    waits for. wandb: Weights & Biases, with the account of `wandb login`."""
    project: Annotated[str, Field(min_length=1, max_length=100)] = "relax-hpc"
    """Project of W&B."""
    offline: bool = False
    """Write below the run directory, for nodes without a network: `wandb sync` sends it later."""


class NotifyConfig(Section):
    """Messages about a run, see docs/boards.md."""

    command: list[str] = []
    """Program and arguments that get each message as JSON on standard input, on the job's first
    node."""
    webhook: UserPath | None = None
    """File with the URL to which each message is posted as JSON; only you may be able to read
    it."""
    on: list[News] = ["start", "requeue", "plateau", "failure", "finish"]
    """Occasions: the run begins, goes on after a requeue, gets no better, failed, is complete."""
    plateau_steps: NonNegative = 0
    """Steps without a better reward that are a plateau; 0 is none."""
