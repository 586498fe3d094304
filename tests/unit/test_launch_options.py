"""What a user adds to the script, in words of sbatch, srun and bash, and what the submitter's own
environment adds to it, or does not."""

import subprocess
import sys

import pytest
import toys
from test_launch_placement import config
from test_launch_script import bash

from relax_hpc.config.job_file import read_resolved
from relax_hpc.errors import ConfigError
from relax_hpc.launch import cluster, preflight, script
from relax_hpc.launch.cluster import Cluster
from relax_hpc.launch.placement import Component, place
from relax_hpc.launch.slurm import HetSlurmExecutor
from relax_hpc.launch.supervision import WAIT
from relax_hpc.runs import verdict
from relax_hpc.runs.boards import finish
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.sections import Resources

TASKS, SCRIPT = "the number of tasks of [actor]", "the way in which a run is started"
KEY = "actor.resources"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"srun": ["--ntasks=3"]}, f"srun[0] = '--ntasks=3': --ntasks is set by {TASKS}; remove"),
        ({"srun": ["-c2"], "cpus_per_task": 4}, f"--cpus-per-task is set by {KEY}.cpus_per_task"),
        ({"sbatch": ["--exclusive --nodes 3"]}, f"--nodes is set by {KEY}.nodes"),
        ({"sbatch": ["--outp=/x"]}, f"--output is set by {SCRIPT}"),
        ({"sbatch": ["--gres=gpu:1"]}, f"GPUs are set by {KEY}.gpus_per_node; remove it here"),
        ({"sbatch": ["-p a"], "partition": "b"}, f"--partition is set by {KEY}.partition"),
        ({"srun": ["--cpu-bind", "none"]}, "srun[1] = 'none': is no option"),
        ({"sbatch": ["--mail-type=END --mail-user=me"]}, "has several options; write each in an"),
        ({"sbatch": ["--hold\n#SBATCH --nodes=2"]}, "has more than one line"),
    ],
)  # fmt: skip
def test_what_is_no_option_or_one_that_the_script_says_is_refused(asked, said):
    with pytest.raises(ConfigError) as error:
        place(config(actor=asked))
    [line] = str(error.value).splitlines()
    assert line.startswith(f"{KEY}.s") and said in line


def test_mpi_that_is_none_is_none_whatever_the_site_says(tmp_path):
    (tmp_path / "site.toml").write_text('mpi = "pmix"')
    site = str(tmp_path / "site.toml")
    [rollout, actor] = place(config(actor={"mpi": "none"}, profile=site))
    assert [rollout.resources.mpi, actor.resources.mpi] == ["pmix", None]
    assert actor.bootstrap == "files" and place(config(profile=site))[1].bootstrap == "mpi"


PLUGINS = (
    "MPI plugin types are...\n\tpmix\n\tpmi2\nspecific pmix plugin versions available: pmix_v4\n"
)


def test_mpi_that_srun_does_not_know_is_refused_where_it_can_be_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}")
    wrong = Component("actor", 1, Resources(mpi="pmxi"), "mpi")
    cluster.check_limits([wrong], Cluster())  # there is no srun
    (tmp_path / "plugins").write_text(PLUGINS)
    (tmp_path / "srun").write_text(f'#!/bin/bash\necho "$(<{tmp_path}/plugins)"\n')
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    said = "mpi = 'pmxi': is not known to srun; did you mean pmix. It has pmix, pmi2, pmix_v4"
    with pytest.raises(ConfigError, match=said):
        cluster.check_limits([wrong], Cluster())
    for each in ("pmix", "pmix_v4", "pmi2"):
        cluster.check_limits([Component("actor", 1, Resources(mpi=each), "mpi")], Cluster())
    cluster.check_limits([Component("actor", 1, Resources(mpi="pmxi"), "files")], Cluster())


HIDING = """#!/bin/bash
[[ "$*" = *--all* ]] || exit 0
case ${0##*/} in
  sinfo) echo "hidden|n1|(null)" ;;
  scontrol) echo "PartitionName=hidden MaxTime=01:00:00" ;;
esac
"""


def test_partitions_that_slurm_does_not_show_by_itself_are_found_with_their_limits(
    tmp_path, monkeypatch
):
    for name in ("sinfo", "scontrol"):
        (tmp_path / name).write_text(HIDING)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    asked = [Component("actor", 1, Resources(partition="hidden", time="61"))]
    cluster.check_partitions(asked, Cluster().nodes)
    with pytest.raises(ConfigError, match=r"time = '61': partition hidden lets jobs run for 01:00"):
        cluster.check_limits(asked, Cluster())


def test_variables_of_sbatch_are_defaults_of_keys_that_nobody_sets(monkeypatch, tmp_path):
    for name, value in {
        "PARTITION": "left", "ACCOUNT": "mine", "TIMELIMIT": "5", "QOS": "", "GRES": "gpu:8"
    }.items():  # fmt: skip
        monkeypatch.setenv(f"SBATCH_{name}", value)
    (tmp_path / "site.toml").write_text('account = "site"')
    job = config(actor={"partition": "right"}, profile=str(tmp_path / "site.toml"))
    asked = [each.resources for each in place(job)]
    assert [each.partition for each in asked] == ["left", "right"]
    assert [(each.account, each.time, each.qos) for each in asked] == [("site", "5", None)] * 2


def test_a_variable_of_sbatch_does_not_end_its_line_of_the_script(monkeypatch):
    monkeypatch.setenv("SBATCH_ACCOUNT", "a\n#SBATCH --nodes=9")
    with pytest.raises(ConfigError, match=r"\$SBATCH_ACCOUNT = 'a\\n.*': has a line break or ano"):
        place(config())


FOREIGN = {
    "SLURM_RESTART_COUNT": "1", "SLURM_CPU_BIND": "quiet", "SLURM_EXACT": "1",
    "SBATCH_PARTITION": "left", "SRUN_EXPORT_ENV": "NONE", "PMIX_RANK": "3", "PMI_FD": "4",
    "OMPI_COMM_WORLD_RANK": "3", "SHELLOPTS": "noexec",
}  # fmt: skip


def test_sbatch_knows_nothing_of_the_job_that_it_is_called_in(tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text(f"#!/bin/bash\nenv > {tmp_path}/seen\necho 7\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_CLUSTERS": "a", "PMIX_MCA_gds": "hash"}
    for name, value in (FOREIGN | kept).items():
        monkeypatch.setenv(name, value)
    job, alone = toys.job(tmp_path / "run"), [Component("actor", 1, Resources())]
    for ask in (
        lambda: cluster.estimate_start(job, alone),
        lambda: HetSlurmExecutor(job.folder).submit_het(job, alone),
    ):
        ask()
        lines = (tmp_path / "seen").read_text().splitlines()
        assert {f"{name}={value}" for name, value in kept.items()} <= {*lines}
        assert not {line.partition("=")[0] for line in lines} & {*FOREIGN}
        (tmp_path / "seen").unlink()


def run_setup(tmp_path, *setup, leaves_mark=False):
    """Runs the script of a job whose step says ok, here."""
    folder = tmp_path / "run"
    mark = RunPaths(folder).component("actor") / "7_0_done"
    program = f"open({str(mark)!r}, 'w')" if leaves_mark else "print('ok')"
    toy = script.Job("toy", folder, has_summary=False, task=("-c", program))
    asked = Resources(setup=list(setup), python=sys.executable)
    components = [Component("actor", 1, asked)]
    script.make_folders(toy, components)
    (folder / "job.sh").write_text(script.local_script(toy, components))
    command = ["bash", folder / "job.sh", "7"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60), toy.folder


def test_a_failing_setup_line_ends_the_run_with_its_text(tmp_path):
    done, folder = run_setup(tmp_path, "export A=1 # and a comment", "module load nothing")
    assert done.returncode not in (0, 143)
    assert "actor: setup ended with exit code 127: module load nothing\n" in done.stdout
    assert (folder / "7_exit_code").read_text() == f"{done.returncode}\n"
    assert "start 1" not in done.stdout, "no step ran"


@pytest.mark.parametrize(
    "line",
    [
        "set -euo pipefail",
        "set -E; trap 'exit 9' ERR",
        "set -T; trap '[[ $BASH_COMMAND != supervise* ]] || exit 9' DEBUG",
    ],
)
def test_a_setup_line_does_not_make_the_supervision_end_at_a_failure(tmp_path, line):
    done, folder = run_setup(tmp_path, line, 'export B=1; [ -z "$UNSET" ]')
    said = [each.partition(" ")[2] for each in done.stdout.splitlines()]
    assert said == [
        "actor: start 1 ended with exit code 1",
        "actor: failed 1 times within 1800 s, giving up",
    ], done
    assert (folder / "7_exit_code").read_text() == "1\n"
    done, _ = run_setup(tmp_path / "failing", line, "false")
    assert "actor: setup ended with exit code 1: false\n" in done.stdout


@pytest.mark.parametrize("line", ["set -f", "set -k", "shopt -s failglob", "GLOBIGNORE='*'"])
def test_a_setup_line_does_not_hide_from_the_supervision_that_tasks_are_done(tmp_path, line):
    done, folder = run_setup(tmp_path, line, leaves_mark=True)
    assert done.returncode == 0, done
    assert (folder / "7_exit_code").read_text() == "0\n"


def test_the_verdict_names_a_component_that_ended_without_a_word(slurm):
    done = bash(
        "exit 142 & components+=($!) names+=(actor)",
        "true & components+=($!) names+=(rollout)",
        WAIT,
        'echo "${ended[@]}"',
    )
    assert done.stdout == "--ended actor=142\n"
    paths = RunPaths(slurm.run_dir)
    ended = ["actor=142", "rollout=1", "judge=143"]
    for log, words in (
        ("", "actor ended with exit code 142, and its script did not say why, "
             "rollout ended with exit code 1, and its script did not say why"),
        ("x rollout: start 1 ended with exit code 1\n",
         "actor ended with exit code 142, and its script did not say why: "
         "rollout failed, exit code 1"),
    ):  # fmt: skip
        (paths.submission / "7_batch.log").write_text(log)
        paths.verdict.unlink(missing_ok=True)
        finish.tell(paths, read_resolved(paths.config), 0, failed=True, ended=ended)
        assert verdict.read(slurm.run_dir).words.startswith(words)


def test_what_sbatch_passes_on_to_a_component_that_names_none_is_said():
    def told(*values):
        parts, lines = [], []
        for k, value in enumerate(values):
            asked = Resources(account=value)
            parts.append(Component(f"part{k}", 1, asked, section=f"engines.part{k}"))
        preflight.tell_inherited(parts, lines.append)
        return lines

    for values in ((None, "a"), ("a", "b"), ("a", "a", "b"), (None, None)):
        assert told(*values) == []
    assert told(None, "a", "b", None) == [
        "engines.part2.resources.account = 'b': Slurm gives it to engines.part3.resources as well, "
        "which names none; to have another, say engines.part3.resources.account"
    ]
