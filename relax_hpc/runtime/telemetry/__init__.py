"""Events, curves and pictures of a run."""

from typing import Literal

Service = Literal["wandb", "mlflow"]
"""Where curves can be sent."""
