"""Who is told of a run besides its run directory."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from relax_hpc.sections import NonNegative, Section, UserPath

Service = Literal["wandb", "mlflow"]
News = Literal["start", "requeue", "plateau", "failure", "finish"]


class BoardsConfig(Section):
    """Services that show the curves of a run; TensorBoard always does."""

    export: list[Service] = []
    """Services that are sent the curves as the run goes, each by a process of its own that no step
    waits for. wandb: Weights & Biases, with the account of `wandb login`. mlflow: MLflow, at
    `tracking_uri`."""
    project: Annotated[str, Field(min_length=1, max_length=100)] = "relax-hpc"
    """Project of W&B, experiment of MLflow."""
    tracking_uri: str | None = None
    """Server of MLflow, e.g. "http://host:5000"."""
    offline: bool = False
    """Write below the run directory, for nodes without a network: `wandb sync` sends it later;
    MLflow shows its `mlflow.db`."""

    @model_validator(mode="after")
    def _mlflow_has_a_place(self) -> Self:
        if "mlflow" in self.export and self.tracking_uri is None and not self.offline:
            raise ValueError(
                "boards.export has mlflow, which needs a server; set boards.tracking_uri, or "
                "boards.offline = true"
            )
        return self


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
