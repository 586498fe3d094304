"""A whole run over two nodes, each a network namespace, whose names lead to the wrong network.

There is no Slurm, for its daemons would need the namespaces: a stand-in for srun starts the step of
each component on a node of its own, with the variables that Slurm gives.
"""

import os
import shutil
import subprocess
from dataclasses import replace

import pytest
from e2e_runs import REPOSITORY, cli, events_of
from network_nodes import Nodes

from relax_hpc.config import job_file
from relax_hpc.launch import script, submit
from relax_hpc.runtime.paths import RunPaths

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="takes root and ip (iproute2)"
    ),
]

SRUN = """#!/bin/bash
place=0 count=1
while [ "${1:0:2}" = -- ]; do
  case $1 in
    --het-group=*) place=${1#*=} ;;
    --ntasks=*) count=${1#*=} ;;
    --output=*) exec > "${1#*=}" 2>&1 ;;
  esac
  shift
done
case $place in 0) node=(FIRST) ;; 1) node=(SECOND) ;; esac
export SLURM_NTASKS=$count SLURM_NNODES=1 SLURM_NODEID=0 SLURM_STEP_ID=$place
export SLURM_LAUNCH_NODE_IPADDR=10.1.0.2
tasks=()
for ((rank = 0; rank < count; rank++)); do
  SLURM_PROCID=$rank SLURM_LOCALID=$rank "${node[@]}" "$@" & tasks+=($!)
done
trap 'kill "${tasks[@]}"' TERM
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""


def test_a_run_over_two_nodes_completes_though_their_names_lead_to_the_wrong_network(
    tiny, tmp_path
):
    """O4, O5."""
    overrides = [
        f"model.path={tiny}/model", f"prompts.train={tiny}/train.jsonl[0:64]",
        f"eval.heldout.path={tiny}/heldout.jsonl", "eval.heldout.every=0",
        "eval.heldout.num_prompts=8", f"run_root={tmp_path}", "name=two", "schedule.num_steps=2",
        "schedule.prompts_per_step=4", "rollout.samples_per_prompt=4", "engines.rollout.count=1",
        "engines.rollout.resources.nodes=1",
        "launch.advanced.bootstrap=files", "launch.advanced.peer_timeout_s=120",
        "launch.max_restarts=0",
    ]  # fmt: skip
    job = job_file.load(REPOSITORY / "jobs" / "tiny" / "arithmetic.toml", overrides)
    config, components = submit.resolve(job)
    paths = RunPaths(config.run_dir)
    submit.make_run_dir(config, paths)
    planned = replace(submit._job(config, 1), has_summary=False)
    script.make_folders(planned, components)
    (tmp_path / "script").write_text(script.slurm_script(planned, components))
    with Nodes() as nodes:
        words = [" ".join(f"'{word}'" for word in nodes.on(place)) for place in range(2)]
        text = SRUN.replace("FIRST", words[0]).replace("SECOND", words[1])
        for name, said in (("srun", text), ("squeue", "#!/bin/sh\n"), ("scontrol", "#!/bin/sh\n")):
            (tmp_path / name).write_text(said)
            (tmp_path / name).chmod(0o755)
        slurm = {
            "SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST_HET_GROUP_0": nodes.names[0],
            "SLURM_JOB_NODELIST_HET_GROUP_1": nodes.names[1],
        }  # fmt: skip
        environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", tmp_path / "script"], env=environment, capture_output=True, text=True,
            timeout=400,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(events_of(paths.root, "actor", "step")) == 2
    members = [path.read_text() for path in paths.root.glob("members/*.json")]
    assert members and all("http://10.1.0.2:" in each for each in members)
    cli("bus", "verify", paths.root)
