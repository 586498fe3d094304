"""Files are strict JSON: no reader but Python's knows NaN."""

import json
import math

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from relax_hpc import job_file
from relax_hpc.boards import finish
from relax_hpc.bus.frames import encode
from relax_hpc.paths import RunPaths
from relax_hpc.records import finite, write_json
from relax_hpc.runs import summary
from relax_hpc.telemetry import curve
from relax_hpc.telemetry.events import EventWriter, read_events

NAN, INF = float("nan"), float("inf")


def strict(text):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_figure_that_is_not_finite_is_null_and_named(tmp_path):
    path = tmp_path / "events" / "actor-0.jsonl"
    with EventWriter(path, "actor", 0) as events:
        events.emit(
            "step", step=3, loss=NAN, grad_norm=np.float32(INF), lr=0.5,
            num_tokens=[["a", 1.0], ["b", -INF]], num_documents="NaN",
        )  # fmt: skip
        events.emit("end")
    first, second = map(strict, path.read_text().splitlines())
    assert (first["step"], first["loss"], first["grad_norm"], first["lr"]) == (3, None, None, 0.5)
    assert (first["num_tokens"], first["num_documents"]) == ([["a", 1.0], ["b", None]], "NaN")
    assert first["not_finite"] == {
        "loss": "NaN",
        "grad_norm": "Infinity",
        "num_tokens": "-Infinity",
    }
    assert "not_finite" not in second


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_a_run_with_such_figures_has_its_summary_its_picture_and_its_tensorboard(tmp_path, kind):
    paths = RunPaths(tmp_path / "run")
    tree = {"name": "run", "model": {"path": "m"}} | {
        "rl": {"prompts": {"train": "t"}, "schedule": {"num_steps": 9}},
        "sft": {"sft": {"train": "t", "batch_size": 1, "num_steps": 9}},
    }[kind]
    paths.root.mkdir()
    paths.config.write_text(job_file.validate(tree, source="test").model_dump_json())
    with EventWriter(paths.events("actor", 0), "actor", 0) as events:
        events.emit("step", step=1, loss=1.0, **{"reward/mean": 0.25})
        events.emit("step", step=2, loss=NAN, grad_norm=INF, **{"reward/mean": NAN})
        events.emit("heldout", step=2, loss=NAN, num_tokens=5)
    with EventWriter(paths.events("rollout", 0), "rollout", 0) as events:
        events.emit(
            "eval",
            name="h",
            headline=True,
            when="before",
            number=0,
            version=0,
            version_max=0,
            correct=NAN,
            num_samples=4,
        )
        events.emit("shard", num_trajectories=2, **{"reward/mean": NAN})
    found = summary.write(paths.root)
    assert strict(paths.summary.read_text()) == found
    assert found["steps_done"] == 2
    finish.complete(paths, job_file.read_resolved(paths.config), failed=False)
    drawn = EventAccumulator(str(paths.tensorboard)).Reload()
    losses = [scalar.value for scalar in drawn.Scalars("loss/total")]
    assert losses[0] == 1.0 and math.isnan(losses[1])
    assert [scalar.value for scalar in drawn.Scalars("trainer/grad_norm")] == [INF]
    (curve.plot_loss if kind == "sft" else curve.plot)(paths.root)


def test_what_an_older_writer_left_is_read_as_null(tmp_path):
    line = '{"time": 1.0, "event": "step", "step": 1, "loss": NaN}\n'
    (tmp_path / "actor-0.jsonl").write_text(line)
    assert read_events(tmp_path) == [{"time": 1.0, "event": "step", "step": 1, "loss": None}]


@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_records_hold_no_such_numbers(tmp_path, number):
    for write in (lambda record: write_json(tmp_path / "a.json", record), encode):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write({"value": number})
    assert not (tmp_path / "a.json").exists()
    assert finite({"a": [1, {"b": number}]})[0] == {"a": [1, {"b": None}]}
