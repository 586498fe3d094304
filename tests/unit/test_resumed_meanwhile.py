"""Who has looked at a run, and is held up before it starts it, starts nothing beside a new job."""

import json

import fake_slurm
import pytest

from relax_hpc.errors import ConfigError
from relax_hpc.launch import record, states
from relax_hpc.paths import RunPaths
from relax_hpc.records import write_json
from relax_hpc.runs import resume as resuming
from relax_hpc.runs.resume import resume

MEANWHILE = "was resumed meanwhile, as job 9; nothing was started"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    fake = fake_slurm.make(tmp_path, monkeypatch)
    fake.leaves(1)
    yield fake
    states.has_accounting.cache_clear()


def by_another(slurm):
    """What a process does that resumes the run and exits: its claim is that of nobody alive."""
    assert resume(slurm.run_dir, ended=True).job_id == "9"
    paths = RunPaths(slurm.run_dir)
    claim = paths.launch_claim(record.read(slurm.run_dir).number)
    write_json(claim, json.loads(claim.read_text()) | {"pid": 2**22 - 3, "start_time": 1.0})


def meanwhile(monkeypatch, module, name, act):
    """Calls `act` once, when `name` of a module is called first."""
    real, acts = getattr(module, name), [act]

    def held_up(*args):
        if acts:
            acts.pop()()
        return real(*args)

    monkeypatch.setattr(module, name, held_up)


def started(slurm):
    paths = RunPaths(slurm.run_dir)
    return (
        [each.number for each in record.read(slurm.run_dir).all],
        sorted(path.name for path in paths.control.glob("launch-*.json")),
        len(slurm.asked("sbatch")),
    )


def test_who_is_sure_starts_nothing_beside_a_launch_that_came_after_the_look(slurm, monkeypatch):
    """Nor is there a claim of a third for a moment: the job of the second would end of it."""
    claimed, once = [], record.write_json_once
    monkeypatch.setattr(
        record, "write_json_once", lambda path, mine: claimed.append(path.name) or once(path, mine)
    )
    meanwhile(monkeypatch, resuming, "_compare_programs", lambda: by_another(slurm))
    with pytest.raises(ConfigError, match=MEANWHILE) as error:
        resume(slurm.run_dir, ended=True)
    assert f"relax-hpc status {slurm.run_dir}" in str(error.value)
    assert started(slurm) == ([2, 1], ["launch-2.json"], 1)
    assert claimed == ["launch-2.json"]


def test_a_claim_is_given_back_if_a_launch_is_recorded_while_it_is_made(slurm, monkeypatch):
    """The one who was thought dead, on another node, was only held up."""
    paths = RunPaths(slurm.run_dir)
    dead = {"time": 0.0, "node": "elsewhere", "pid": 1, "start_time": 1.0}
    write_json(paths.launch_claim(2), dead)

    def wakes():
        fields = json.loads(paths.launch_record.read_text())
        first = {key: fields[key] for key in ("mode", "leader", "components", "time", "controller")}
        write_json(paths.launch_record, fields | {"number": 2, "leader": "9", "earlier": [first]})

    meanwhile(monkeypatch, record, "write_json_once", wakes)
    with pytest.raises(ConfigError, match=MEANWHILE):
        resume(slurm.run_dir, ended=True)
    assert started(slurm) == ([2, 1], ["launch-2.json"], 0)
