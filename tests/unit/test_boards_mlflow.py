"""MLflow, read by its own API: a run is one run there over restarts, with all of its points."""

import importlib.util
import warnings

import pytest
from board_runs import evaluation, event, make, step, write
from typer.testing import CliRunner

from relax_hpc.boards.mlflow import _TAG, Mlflow
from relax_hpc.boards.service import Described
from relax_hpc.cli.main import app
from relax_hpc.errors import ConfigError
from relax_hpc.job_file import validate
from relax_hpc.runs import status
from relax_hpc.telemetry.tensorboard import Text

HAS_IT = importlib.util.find_spec("mlflow") is not None
needs_it = pytest.mark.skipif(not HAS_IT, reason="needs relax-hpc[mlflow]")


def at(uri):
    """What its own client finds there: the runs, and a function that gives points of one."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()])

    def points(run, tag):
        found = client.get_metric_history(run.info.run_id, tag)
        return [(point.step, point.value, point.timestamp) for point in found]

    return runs, points, client


@needs_it
def test_a_run_is_one_run_of_mlflow_over_restarts_and_resumes(tmp_path, monkeypatch):
    paths, _ = make(tmp_path)
    uri = f"sqlite:///{tmp_path}/server.db"
    command = ["export", "mlflow", str(paths.root)]
    write(paths, step(1, 1.0, 0.25, loss=0.5), step(2, 2.0, 0.5))
    states = iter(("RUNNING", "CANCELLED", "COMPLETED"))
    monkeypatch.setattr(status, "job_state", lambda _: next(states))
    ends = []
    for more in ((), (event("resume", 3.0, step=1), step(2, 4.0, 0.75)), (step(3, 5.0, 1.0),)):
        write(paths, *more, evaluation(0, 1.0, 2.5, number=0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = CliRunner().invoke(app, [*command, "--tracking-uri", uri])
        assert found.exit_code == 0, (found.output, found.exception)
        [run], points, client = at(uri)
        ends.append(run.info.status)
    assert ends == ["RUNNING", "FAILED", "FINISHED"]
    assert points(run, "reward/mean") == [(1, 0.25, 1000), (2, 0.5, 2000), (3, 1.0, 5000)]
    assert points(run, "loss/total") == [(1, 0.5, 1000)]
    assert points(run, "eval/heldout/reward") == [(0, 0.25, 2500)]
    assert run.data.params["schedule.num_steps"] == "9" and run.info.run_name == "run"
    assert client.get_experiment(run.info.experiment_id).name == "relax-hpc"


@needs_it
def test_offline_it_is_a_database_in_the_run(tmp_path):
    described = Described("run-1", "run", "p", {"a": "x" * 9000}, tmp_path, True)
    board = Mlflow(described)
    board.say(Text("samples/heldout", 4, "<b>hello", 1.0))
    board.finish(failed=False)
    [run], _, _ = at(f"sqlite:///{tmp_path}/mlflow.db")
    assert run.data.params["a"] == "x" * 6000 and run.data.tags[_TAG] == "run-1"
    [file] = (tmp_path / "mlflow").rglob("000004.txt")
    assert file.read_text() == "<b>hello" and file.parent.name == "heldout"


def test_a_job_that_does_not_say_where_mlflow_is_is_refused(tmp_path, monkeypatch):
    boards = {"export": ["mlflow"]}
    tree = {"name": "run", "model": {"path": "m"}, "prompts": {"train": "t"},
            "schedule": {"num_steps": 9}, "boards": boards}  # fmt: skip
    with pytest.raises(ConfigError, match=r"mlflow.* set boards.tracking_uri, or boards.offline"):
        validate(tree, source="test")
    for more in ({"tracking_uri": "http://h:5000"}, {"offline": True}):
        assert validate(tree | {"boards": boards | more}, source="test").boards.export == ["mlflow"]
    paths, _ = make(tmp_path)
    monkeypatch.setattr(status, "job_state", lambda _: "COMPLETED")
    found = CliRunner().invoke(app, ["export", "mlflow", str(paths.root)])
    assert isinstance(found.exception, ConfigError) and "--tracking-uri" in str(found.exception)
    assert not paths.exported("mlflow").exists()
