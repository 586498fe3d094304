"""What a run needs to go on is looked at before it is queued again."""

import shutil
from pathlib import Path

import pytest

from relax_hpc.errors import ConfigError
from relax_hpc.job_file import load
from relax_hpc.paths import RunPaths
from relax_hpc.records import write_json
from relax_hpc.runs.resume import _check_inputs


@pytest.fixture
def begun(job):
    """The job of a run that has looked at its prompts, and its directory."""
    paths = RunPaths(job / "run")
    paths.prompt_rows(0).parent.mkdir(parents=True)
    write_json(paths.prompt_rows(0), {"num_rows": {"prompts.train": 4}})
    return load(Path("job.toml")), paths


def test_a_run_goes_on_with_the_data_it_was_begun_with(begun):
    config, paths = begun
    _check_inputs(config, paths)
    paths.prompt_rows(0).unlink()  # it did not get so far
    _check_inputs(config, paths)


def test_other_rows_and_what_is_gone_are_refused_at_once(begun):
    config, paths = begun
    train = Path("train.jsonl")
    row = train.read_text()
    train.write_text(2 * row)
    with pytest.raises(ConfigError, match=r"prompts.train: has 8 rows, the run was begun with 4"):
        _check_inputs(config, paths)
    train.unlink()
    with pytest.raises(ConfigError, match=r"train.jsonl.*: no such file"):
        _check_inputs(config, paths)
    train.write_text(row)
    shutil.move("model", "gone")
    with pytest.raises(ConfigError, match=r"model.path = .*: no such folder"):
        _check_inputs(config, paths)
