"""MLflow."""

import os
from collections.abc import Mapping

from relax_hpc.boards.service import Described
from relax_hpc.telemetry.tensorboard import Text

_TAG = "relax_hpc.id"
"""MLflow gives runs ids of its own; by this tag a run is found again."""
_MOST_PARAMS, _LONGEST = 100, 6000
"""Params that a request may have, and characters of one."""


class Mlflow:
    """A run of MLflow. Offline it is a database in the run directory, `mlflow.db`."""

    def __init__(self, run: Described) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it has no other switch
        from mlflow import MlflowClient

        address = f"sqlite:///{run.folder}/mlflow.db" if run.offline else run.address
        self._client = MlflowClient(tracking_uri=address)
        known = self._client.get_experiment_by_name(run.project)
        kept = str(run.folder / "mlflow") if run.offline else None
        experiment = (
            known.experiment_id if known else self._client.create_experiment(run.project, kept)
        )
        found = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{run.id}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._create(experiment, run)

    def _create(self, experiment: str, run: Described) -> str:
        from mlflow.entities import Param

        made = self._client.create_run(experiment, run_name=run.name, tags={_TAG: run.id})
        settings = [Param(key, str(value)[:_LONGEST]) for key, value in run.settings.items()]
        for first in range(0, len(settings), _MOST_PARAMS):
            some = settings[first : first + _MOST_PARAMS]
            self._client.log_batch(made.info.run_id, params=some)
        return str(made.info.run_id)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        from mlflow.entities import Metric

        points = [Metric(tag, value, int(1e3 * time), step) for tag, value in values.items()]
        self._client.log_batch(self._id, metrics=points)

    def say(self, text: Text) -> None:
        self._client.log_text(self._id, text.text, f"{text.tag}/{text.step:06}.txt")

    def finish(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")

    def pause(self) -> None:
        """Nothing: it is RUNNING there, as it is."""
