"""A run goes on with the programs, data and paths that it began with, wherever it lies now."""

import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import fake_slurm
import pytest
from job_trees import job_of

from relax_hpc.algorithms import table
from relax_hpc.config import job_file, programs
from relax_hpc.config.job_file import load, read_resolved, validate
from relax_hpc.config.model import learning_rate
from relax_hpc.data import rows as files
from relax_hpc.errors import ConfigError, ends_of
from relax_hpc.launch import cluster, entry, known_runs, profiles, record, submit
from relax_hpc.runs import replay
from relax_hpc.runs import resume as resuming
from relax_hpc.runs.resume import _check_inputs, resume
from relax_hpc.runtime.files import permissions, user_programs
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.files.user_programs import place_of
from relax_hpc.runtime.paths import RunPaths

REWARD = """\
import random
from pathlib import Path
import helper, installed

def score(sample):
    return helper.VALUE + float((Path(__file__).parent / "table.txt").read_text())
"""
PART = """\
from relax_hpc.algorithms.part import Advantage

class Mine(Advantage):
    name: str = "mine"
    scale: float = 1.0

    def of_groups(self, rows):
        return rows.rewards * {}
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder of programs; `random.py` in it must not take the place of Python's."""
    folder = tmp_path / "mine"
    (folder / "installed").mkdir(parents=True)
    files = {
        "reward.py": REWARD, "helper.py": "import deeper\nVALUE = deeper.VALUE\n",
        "deeper.py": "import helper\nVALUE = 1\n", "table.txt": "0.5", "unused.py": "raise 1\n",
        "random.py": "raise ImportError\n", "installed/__init__.py": "", "part.py": PART.format(2),
        "rows.py": "Rows = list\n", "world.py": "World = object\n",
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return folder


def submitted(tmp_path):
    """The job that a run directory has of a job file that names them."""
    job = job_of(
        run_root=str(tmp_path), prompts__train=["rows.py:Rows", "data.jsonl"],
        reward__terms={"a": {"name": "reward.py:score"}, "b": {"name": "gsm8k"}},
        rollout__environment="world.py:World", eval__heldout__path="rows.py:Rows",
        algorithm__advantage={"name": "part.py:Mine", "scale": 3.0},
    )  # fmt: skip
    with permissions.set_umask(permissions.UMASKS["none"]):  # as the command has it
        config, _ = submit.resolve(job)
        paths = RunPaths(config.run_dir)
        submit.make_run_dir(config, paths)
        return paths, read_resolved(paths.config)


def printed(folder, program, *words):
    """What Python prints of this program in a folder."""
    command = [sys.executable, "-P", "-c", program, *words]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert not said.returncode, said.stderr
    return said.stdout


def test_the_programs_of_a_job_are_copied_with_what_they_import(tmp_path, mine):
    paths, config = submitted(tmp_path)
    named = [
        config.reward.terms["a"].name, config.algorithm.advantage.name, config.rollout.environment,
        str(config.prompts.train[0]), str(config.eval["heldout"].path[0]),
    ]  # fmt: skip
    assert [place_of(name)[0].parent.parent for name in named] == [paths.programs] * 5
    assert named[3] == named[4], "one copy of one file"
    assert config.reward.terms["b"].name == "gsm8k"
    assert config.prompts.train[1] == mine / "data.jsonl"
    beside = {path.name for path in place_of(named[0])[0].parent.iterdir()}
    assert beside == {"reward.py", "helper.py", "deeper.py", ".origin"}
    assert {path.stat().st_mode & 0o077 for path in paths.programs.rglob("*")} == {0}


def test_a_package_beside_the_command_is_found_and_no_module_there_takes_the_place_of_pythons(mine):
    (mine / "pack").mkdir()
    (mine / "wave.py").write_text("raise ImportError\n")  # one that nobody has imported before
    score = "import wave\ndef score(): return wave.WAVE_FORMAT_PCM"
    (mine / "pack" / "rewards.py").write_text(score)
    program = (
        "import sys\nfrom relax_hpc.runtime.files.user_programs import import_place\n"
        "assert 'wave' not in sys.modules; print(import_place('pack.rewards:score')())"
    )
    assert printed(mine, program) == "1\n"


def test_a_copy_is_run_though_the_program_changed_and_finds_its_data_where_it_was(tmp_path, mine):
    _, config = submitted(tmp_path)
    for path in mine.glob("*.py"):
        path.write_text("raise RuntimeError('changed meanwhile')\n")
    (mine / "table.txt").write_text("0.25")
    program = (
        "import random, sys\nfrom relax_hpc.runtime.files.user_programs import import_place\n"
        "sys.path.insert(0, '.')  # as where a command is run\n"
        "print(import_place(sys.argv[1])(None), import_place(sys.argv[2]).__name__)"
    )
    names = config.reward.terms["a"].name, config.algorithm.advantage.name
    assert printed(mine, program, *names) == "1.25 Mine\n"


@pytest.fixture
def hostile(tmp_path, mine):
    """The run has a program that leaves a file where it is run."""
    paths, config = submitted(tmp_path)
    copy = place_of(config.algorithm.advantage.name)[0]
    copy.write_text(f"from pathlib import Path\nPath({str(tmp_path)!r}, 'executed').touch()\n")
    return paths


def test_nothing_of_a_run_that_others_may_write_is_run_to_resume_it(tmp_path, hostile):
    paths = hostile
    paths.programs.chmod(0o722)
    with pytest.raises(permissions.LaunchError, match=r"programs: owner .* others may write"):
        resume(paths.root)
    assert not (tmp_path / "executed").exists()


def test_who_resumes_a_run_is_told_of_programs_that_changed_since(tmp_path, mine, monkeypatch):
    slurm = fake_slurm.make(tmp_path, monkeypatch)
    paths, said = RunPaths(slurm.run_dir), []
    names = {"a": {"name": "reward.py:score"}, "b": {"name": "rows.py:score"}}
    tree = json.loads(paths.config.read_text()) | {"reward": {"terms": names}}
    programs.keep(submit.resolve(validate(tree, source="job"))[0], paths.programs)
    slurm.says("7+0|FAILED", "7+1|FAILED")
    (mine / "unused.py").write_text("raise 2\n")
    (mine / "rows.py").unlink()
    assert resume(paths.root, say=said.append).number == 2
    assert said == []
    slurm.says(*(f"{job}+{k}|FAILED" for job in (7, 9) for k in (0, 1)))
    (mine / "helper.py").write_text("VALUE = 7\n")
    (mine / "reward.py").write_text(REWARD.replace("helper.VALUE", "0"))
    assert resume(paths.root, say=said.append).number == 3
    told = [line.partition("; this run keeps its copy")[0] for line in said]
    assert told == [f"{mine / name}: has changed since" for name in ("helper.py", "reward.py")]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_to_look_at_a_run_of_another_user_nothing_of_theirs_is_run(tmp_path, hostile):
    paths = hostile
    table.load.cache_clear()
    os.chown(paths.config, 65534, -1)
    with pytest.raises(ConfigError, match=f"^{paths.config}: names a program .* owner 65534"):
        read_resolved(paths.config)
    assert not (tmp_path / "executed").exists()
    tree = json.loads(paths.config.read_text())
    tree["algorithm"]["advantage"] = {"name": "grpo"}
    paths.config.write_text(json.dumps(tree))
    assert read_resolved(paths.config).algorithm.advantage.name == "grpo"


def test_an_error_that_fits_is_told_as_it_is_and_of_a_longer_one_both_ends_are():  # U1
    assert ends_of("0123456789" * 2, 20) == "0123456789" * 2
    assert ends_of("0123456789" * 3, 20) == "01234 ... 0123456789"


PROGRAM = """
import time
class Squares:
    def __len__(self):
        return 600

    def __getitem__(self, index):
        if index == 7:
            raise OSError("no such disk")
        return {"prompt": f"{index}*{index}=", "answer": str(index**2)}

class Endless:
    pass

class SlowLength:
    def __len__(self):
        time.sleep(5)

class SlowRow:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        time.sleep(5)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PROGRAM)
    return path


def test_rows_are_asked_of_it_by_number_and_a_slice_may_stand_behind_it(program):
    rows = files.open_rows(Path(f"{program}:Squares"))
    assert len(rows) == sum(rows.blocks.sizes) == 600
    assert rows[599].fields == {"prompt": "599*599=", "answer": "358801"}
    some = files.open_rows(Path(f"{program}:Squares[100:-100]"))
    assert (len(some), some[0].fields["answer"]) == (400, "10000")
    assert files.paths_of(Path(f"{program}:Squares")) == [program], "the file that it depends on"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("mine.py:Endless", r"mine\.py:Endless: cannot be made: TypeError: .*len"),
        ("gone.py:Rows", r"gone\.py:Rows: cannot be made: FileNotFoundError"),
        ("mine.py:Squares", "Squares, row 7: cannot be made: OSError: no such disk"),
    ],
)
def test_what_it_does_wrong_is_said_with_its_place(program, rows, said):
    with pytest.raises(ConfigError, match=said):
        files.open_rows(program.with_name(rows))[7]


def test_a_length_or_a_first_row_that_takes_too_long_is_ended(program, monkeypatch):
    monkeypatch.setattr(user_programs, "PATIENCE_S", 0.2)
    monkeypatch.setattr(user_programs, "_TELL_S", 0.1)
    said = r": cannot be made: TimeoutError: making it takes longer than 0\.2 s \(mine\.py:\d+\)"
    with pytest.raises(ConfigError, match=rf"mine\.py:SlowLength{said}"):
        files.open_rows(Path(f"{program}:SlowLength"))
    rows = files.open_rows(Path(f"{program}:SlowRow"))
    with pytest.raises(ConfigError, match=rf"mine\.py:SlowRow, row 2{said}"):
        rows[2]


DEMO = Path(__file__).parents[2] / "jobs" / "demo.toml"


def test_a_path_may_begin_with_the_home_of_who_runs_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = job_file.load(DEMO, ["run_root=~/runs", "model.path=~/model", "prompts.train=~/t"])
    assert config.run_root == tmp_path / "runs" and config.model.path == tmp_path / "model"
    assert list(config.prompts.train) == [tmp_path / "t"]
    assert job_file.load(DEMO, ["run_root=a~b"]).run_root == Path("a~b")


def test_variables_are_refused_and_not_taken_for_names():
    with pytest.raises(ConfigError, match=r"run_root = '\$HOME/r': variables are not put in"):
        job_file.load(DEMO, ["run_root=$HOME/r"])


def no_home(patch):
    def home(*_):
        raise KeyError("uid not found")

    for name in ("HOME", "USER", "LOGNAME", "USERNAME", "LNAME"):
        patch.delenv(name, raising=False)
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        patch.delenv(name, raising=False)
    patch.setattr(pwd, "getpwuid", home)


def test_without_a_home_or_an_entry_for_the_user_a_job_is_checked_and_remembered_nowhere(
    tmp_path, monkeypatch
):  # O6
    no_home(monkeypatch)
    assert profiles.chosen(None) is None and profiles.chosen("local") == "local"
    assert "nodes" in profiles.load("local").model_dump()
    with pytest.raises(ConfigError, match=r"no such profile; use a path, or one of .*local"):
        profiles.chosen("nowhere")
    known_runs.remember(tmp_path)
    assert known_runs.find_runs("run") == []
    assert cluster._me() == str(os.geteuid())


def test_a_tilde_without_a_home_is_refused_with_its_key(monkeypatch):  # O6
    no_home(monkeypatch)
    with pytest.raises(ConfigError, match=r"model.path = '~/m': no home folder is known for ~"):
        validate({"model": {"path": "~/m"}}, source="test")
    monkeypatch.setenv("RELAX_RUN_ROOT", "~/runs")
    with pytest.raises(ConfigError, match=r"RELAX_RUN_ROOT = '~/runs': no home folder"):
        known_runs.default_root()
    with pytest.raises(ConfigError, match="you have no home folder here"):
        profiles.folder()


def test_a_folder_whose_name_is_no_text_is_refused_in_a_line(refused, job, tmp_path):  # O1
    odd = Path(os.fsdecode(b"r\xe9sum\xe9"))
    odd.mkdir()
    try:
        shutil.copy("job.toml", odd)
        os.chdir(odd)
        said = refused("check", "job.toml", "--local")
    finally:
        os.chdir(tmp_path)
    assert "r\\udce9sum\\udce9: its name is no UTF-8 text" in said and "\n" not in said
    with pytest.raises(ConfigError, match=r"--set run_root=.*UTF-8 text"):
        job_file.load(Path("job.toml"), [f"run_root={odd}"])


@pytest.fixture
def made(tmp_path):
    """The directory of a run with a reward of its own, and a set of prompts in it."""
    (tmp_path / "mine.py").write_text("def score(sample):\n    return 1.0\n")
    made = job_of(
        run_root=f"{tmp_path}/runs", prompts__train=f"{tmp_path}/runs/run/rows.jsonl",
        reward__name=f"{tmp_path}/mine.py:score",
        eval__heldout__path=f"{tmp_path}/runs/runner/rows.jsonl",
    )  # fmt: skip
    config, _ = submit.resolve(made)
    submit.make_run_dir(config, RunPaths(config.run_dir))
    return config.run_dir


def test_what_lies_in_a_run_that_was_moved_is_found_where_it_lies_now(tmp_path, made):
    (tmp_path / "elsewhere").mkdir()
    there = made.rename(tmp_path / "elsewhere" / "second")
    config = read_resolved(RunPaths(there).config)
    assert (config.run_dir, config.name) == (there, "second")
    program, _ = place_of(config.reward.name)
    assert program.is_relative_to(there) and program.is_file()
    assert config.prompts.train == [there / "rows.jsonl"]
    assert config.eval["heldout"].path == [tmp_path / "runs/runner/rows.jsonl"], "of another run"


@pytest.mark.parametrize("asked", [{"decay": "cosine"}, {"decay": "sqrt"}, {"decay_steps": 3}])
def test_a_run_of_before_a_decay_to_nowhere_was_refused_goes_on_at_its_constant_rate(made, asked):
    path = RunPaths(made).config
    stored = read_json(path)
    stored["actor"]["optimizer"] |= asked
    write_json(path, stored)
    found = read_resolved(path).actor.optimizer
    assert {learning_rate(found, step, 9) for step in range(1, 10)} == {found.lr}
    stored["actor"]["optimizer"]["final_lr_fraction"] = 0.5
    write_json(path, stored)
    meant = read_resolved(path).actor.optimizer
    assert {key: getattr(meant, key) for key in asked} == asked


def without_advanced(tree):
    """The tables of a job as they were before some keys became advanced."""
    found = {}
    for key, value in tree.items():
        inside = without_advanced(value) if isinstance(value, dict) else value
        found |= inside if key == "advanced" else {key: inside}
    return found


def test_the_job_of_a_run_of_before_keys_became_advanced_is_read_as_it_was(tmp_path):
    job = job_of(
        run_root=str(tmp_path), algorithm__preset="ppo", critic={"advanced": {"value_clip": 0.5}},
        engines__judge__advanced__drain_slow=True, engines__rollout__advanced__hang_timeout_s=9,
        launch__advanced={"share": "group", "idle_s": 7}, actor__advanced__attention="sdpa",
    )  # fmt: skip
    paths = RunPaths(job.run_dir)
    write_json(paths.config, without_advanced(job.model_dump(mode="json")))
    assert read_resolved(paths.config) == job


def test_a_run_behind_a_link_keeps_its_name_and_a_copy_or_a_renamed_one_has_its_own(tmp_path, made):
    def found(folder):
        return read_resolved(RunPaths(folder).config).run_dir

    (tmp_path / "latest").symlink_to(made)
    (tmp_path / "scratch").symlink_to(made.parent)
    assert found(tmp_path / "latest") == found(tmp_path / "scratch" / "run") == made
    write_json(RunPaths(tmp_path / "copied").config, read_json(RunPaths(made).config))
    assert found(tmp_path / "copied") == tmp_path / "copied"
    there = made.rename(tmp_path / "second")
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("second")
    assert found(tmp_path / "latest") == there
    there.rename(tmp_path / "run (old)")
    with pytest.raises(ConfigError, match=r"run \(old\): is no name of a run, .*; rename it"):
        found(tmp_path / "run (old)")


def test_a_replay_is_found_where_it_lies_and_runs_the_programs_of_its_run(made):
    config = read_resolved(RunPaths(made).config)
    folder = replay._make(RunPaths(made), config, replay.Replay(made, 1, 1, None))
    again = read_resolved(folder.config)
    assert again.run_dir == folder.root and again.reward == config.reward


def test_a_run_that_was_moved_is_resumed_where_it_is_and_leaves_nothing_where_it_was(
    tmp_path, slurm
):
    there = slurm.run_dir.rename(tmp_path / "second")
    slurm.says()
    (RunPaths(there).submission / "7_exit_code").write_text("1\n")
    started = resume(there)
    assert started.run_dir == there and not slurm.run_dir.exists()
    paths = RunPaths(there)
    script = (paths.submission / "9_submission.sh").read_text()
    assert str(there) in script and str(slurm.run_dir) not in script
    folders = {each.folder for one in record.read(there).all for each in one.components}
    assert folders == {paths.component("rollout"), paths.component("actor")}


def test_who_is_sure_starts_nothing_beside_a_launch_that_came_after_the_look(slurm, monkeypatch):
    """Nor is there a claim of a third for a moment: the job of the second would end of it."""
    slurm.leaves(1)
    paths, real, once = RunPaths(slurm.run_dir), resuming._compare_programs, record.write_json_once
    claimed, acts = [], [lambda: resume(slurm.run_dir, ended=True)]

    def meanwhile(*args):
        for act in acts and [acts.pop()]:  # by another, who exits: its claim is of nobody alive
            assert act().job_id == "9"
            claim = paths.launch_claim(2)
            write_json(claim, read_json(claim) | {"pid": 2**22 - 3, "start_time": 1.0})
            claimed.clear()
        return real(*args)

    def claim_once(path, mine):
        claimed.append(path.name)
        return once(path, mine)

    monkeypatch.setattr(resuming, "_compare_programs", meanwhile)
    monkeypatch.setattr(record, "write_json_once", claim_once)
    with pytest.raises(ConfigError, match="was resumed meanwhile, as job 9; nothing was started"):
        resume(slurm.run_dir, ended=True)
    assert [each.number for each in record.read(slurm.run_dir).all] == [2, 1]
    assert [path.name for path in paths.control.glob("launch-*.json")] == ["launch-2.json"]
    assert len(slurm.asked("sbatch")) == 1 and claimed == []


def test_a_claim_is_given_back_if_a_launch_is_recorded_while_it_is_made(slurm, monkeypatch):
    """The one who was thought dead, on another node, was only held up."""
    slurm.leaves(1)
    paths, once = RunPaths(slurm.run_dir), record.write_json_once
    dead = {"time": 0.0, "node": "elsewhere", "pid": 1, "start_time": 1.0}
    write_json(paths.launch_claim(2), dead)

    def wakes(path, mine):
        known = read_json(paths.launch_record)
        first = {key: known[key] for key in ("mode", "leader", "components", "time", "controller")}
        write_json(paths.launch_record, known | {"number": 2, "leader": "9", "earlier": [first]})
        return once(path, mine)

    monkeypatch.setattr(record, "write_json_once", wakes)
    with pytest.raises(ConfigError, match="was resumed meanwhile, as job 9"):
        resume(slurm.run_dir, ended=True)
    assert [path.name for path in paths.control.glob("launch-*.json")] == ["launch-2.json"]
    assert slurm.asked("sbatch") == []


def test_a_run_goes_on_with_the_data_it_was_begun_with_and_no_other(job):
    config, paths, train = load(Path("job.toml")), RunPaths(job / "run"), Path("train.jsonl")
    row = train.read_text(encoding="utf-8")
    _check_inputs(config, paths)  # it did not get so far as to look at its prompts
    paths.prompt_rows(0).parent.mkdir(parents=True)
    write_json(paths.prompt_rows(0), {"num_rows": {"prompts.train": 4}})
    _check_inputs(config, paths)
    train.write_text(2 * row, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"prompts.train: has 8 rows, the run was begun with 4"):
        _check_inputs(config, paths)
    train.unlink()
    with pytest.raises(ConfigError, match=r"train.jsonl.*: no such file"):
        _check_inputs(config, paths)
    train.write_text(row, encoding="utf-8")
    shutil.move("model", "gone")
    with pytest.raises(ConfigError, match=r"model.path = .*: no such folder"):
        _check_inputs(config, paths)


def test_a_script_of_before_the_modules_moved_is_refused_by_one_line(tmp_path):
    """It was queued before relax-hpc was upgraded."""
    script = tmp_path / "7_submission.sh"
    script.write_text(
        "srun python -u -P -m relax_hpc.launch.entry run rollout --start 1 &\n"
        "python -P -m relax_hpc.scale.scaler_main run &\n"
    )
    with pytest.raises(ConfigError) as error:
        entry.check_script(script, tmp_path)
    said = str(error.value)
    assert "\n" not in said and "starts relax_hpc.scale.scaler_main," in said
    assert said.endswith(f"relax-hpc resume {tmp_path}") and error.value.is_final
