"""A rollout on the actor's GPUs: one component, two steps, and what can be wrong about it."""

import re

import pytest

from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.job_file import validate
from relax_hpc.launch import script
from relax_hpc.launch.placement import groups, place
from relax_hpc.paths import RunPaths
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.engine.host import EngineHost
from relax_hpc.roles.engine.hosting import hosting_of, slots_of, spec_of
from relax_hpc.roles.rollout import check as rollout_check
from relax_hpc.run_secret import RunSecret
from relax_hpc.telemetry.events import EventWriter


def job(rollout=None, actor=None, reference=None, algorithm=None, **schedule):
    return validate(
        {
            "name": "run",
            "model": {"path": "m"},
            "prompts": {"train": "t"},
            "schedule": {"num_steps": 1, "max_staleness": 0, **schedule},
            "algorithm": algorithm or {},
            "engines": {"rollout": {"placement": "actor", "count": 4, **(rollout or {})}},
            "actor": {"layout": {"data_parallel": 4}, **(actor or {})},
            "reference": reference or {},
        },
        source="test",
    )


def test_rollout_is_a_step_on_the_actors_nodes_with_what_runs_of_its_own():
    config = job(
        rollout={"resources": {"python": "/sglang/python", "cpus_per_task": 2}},
        actor={"resources": {"nodes": 2, "gpus_per_node": 2, "mpi": "pmix", "time": "60"}},
    )
    actor, rollout = place(config)
    assert (actor.on, rollout.on) == (None, "actor")
    assert (rollout.tasks, rollout.nodes, rollout.bootstrap) == (4, 2, "files")
    mine, host = rollout.resources, actor.resources
    assert (mine.python, mine.cpus_per_task) == ("/sglang/python", 2)
    assert (mine.gpus_per_node, mine.time, mine.mpi) == (2, host.time, host.mpi)


def test_slurm_is_asked_for_one_component_with_two_steps_that_share_its_gpus(tmp_path):
    components = place(job(actor={"resources": {"gpus_per_node": 4}}))
    text = script.slurm_script(script.Job("run", tmp_path), components)
    assert "#SBATCH hetjob" not in text and not re.search(r"srun .*--het-group", text)
    assert text.count("#SBATCH --gpus-per-node=4") == 1
    actor, rollout = re.findall(r"srun --.*", text)
    assert "--overlap" not in actor
    assert "--overlap" in rollout
    assert all("--ntasks=4" in step and "--gpus-per-node=4" in step for step in (actor, rollout))
    # The memory saver of engines does not work with what trainers want of torch.
    functions = re.split(r"^component_\d\(\)", text, flags=re.MULTILINE)
    assert "expandable_segments" in functions[1] and "expandable_segments" not in functions[2]


def test_further_components_are_numbered_as_slurm_numbers_them(tmp_path):
    components = place(job(reference={"placement": "own"}, algorithm={"kl": {"coefficient": 0.1}}))
    assert [each.name for each in components] == ["actor", "rollout", "reference"]
    assert groups(components) == [0, 0, 1]
    text = script.slurm_script(script.Job("run", tmp_path), components)
    steps = re.findall(r"srun --het-group=(\d)", text)
    assert steps == ["0", "0", "1"]


def test_on_this_machine_both_see_the_same_gpus(tmp_path):
    config = job(actor={"resources": {"gpus_per_node": 4}}, reference={"placement": "own"})
    text = script.local_script(script.Job("run", tmp_path), place(config))
    assert re.findall(r"--first-gpu (\d)", text) == ["0", "0", "4"]


@pytest.mark.parametrize("engines_per_task", [1, 2, 4])
def test_an_engines_lane_is_the_trainers_rank_on_its_own_first_gpu(tmp_path, engines_per_task):
    """2 nodes of 8 GPUs, 8 engines of 2: however many of them a task keeps."""
    config = job(
        rollout={
            "kind": "sglang",
            "count": 8,
            "engines_per_task": engines_per_task,
            "args": {"tp_size": 2},
            "resources": {"gpus_per_node": 8, "nodes": 2},
        },
        actor={"layout": {"data_parallel": 16}, "resources": {"gpus_per_node": 8, "nodes": 2}},
    )
    [_, rollout], paths = place(config), RunPaths(tmp_path)
    RunSecret.create(paths.secret)
    events, found = EventWriter(tmp_path / "events.jsonl", "rollout", 0), []
    for rank in range(rollout.tasks):
        node, local_rank = divmod(rank, rollout.tasks_per_node)
        context = TaskContext("rollout", rank, rollout.tasks, local_rank, "1.0", 1, f"n{node}")
        for slot in slots_of(config.rollout_pool, context):
            member = EngineHost(hosting_of(config, slot), paths, context, events)._new_member(1)
            gpu = spec_of(config, slot).args["base_gpu_id"]
            assert divmod(member.lane, 8) == (node, gpu)  # as the actor's ranks fill nodes
            found.append((member.id, member.lane))
    assert found == list(zip(config.rollout_engines, range(0, 16, 2), strict=True))


@pytest.mark.parametrize(
    ("rollout", "schedule", "message"),
    [
        (
            {},
            {"max_staleness": 1},
            "schedule.max_staleness = 1: with engines.rollout.placement = .*to 0",
        ),
        (
            {"resources": {"gpus_per_node": 2}},
            {},
            "engines.rollout.resources.gpus_per_node = 2: .*it is actor.resources.gpus",
        ),
        (
            {"resources": {"max_nodes": 2}},
            {},
            "engines.rollout.resources.max_nodes = 2: .*none can be added; remove it",
        ),
        (
            {"kind": "sglang", "nodes_per_engine": 2, "resources": {"nodes": 8}},
            {},
            "engines.rollout.nodes_per_engine = 2: .*on one node",
        ),
    ],
)
def test_what_taking_turns_rules_out_is_refused(rollout, schedule, message):
    with pytest.raises(ConfigError, match=message):
        job(rollout=rollout, **schedule)


def test_a_resolved_job_is_accepted_again():
    config = job(actor={"resources": {"gpus_per_node": 4}})
    [_, rollout] = place(config)
    resolved = config.rollout_pool.model_copy(update={"resources": rollout.resources})
    whole = config.model_copy(update={"engines": {"rollout": resolved}}).model_dump(mode="json")
    assert RunConfig.model_validate(whole).rollout_pool.resources.gpus_per_node == 4


@pytest.mark.parametrize(
    ("rollout", "actor", "message"),
    [
        ({"count": 2}, {}, "count = 2: engines have 2 ranks, the actor has 4"),
        (
            {"kind": "sglang", "args": {"tp_size": 2}},
            {},
            "engines of tp_size 2 have 8 ranks, the actor has 4",
        ),
        (
            {"kind": "sglang", "count": 2, "args": {"tp_size": 2}},
            {"resources": {"gpus_per_node": 4}},
            "mem_fraction_static: is not set; .*e.g. 0.7",
        ),
    ],
)
def test_engines_that_do_not_cover_the_actors_ranks_are_refused(rollout, actor, message):
    with pytest.raises(ConfigError, match=message):
        rollout_check.check_lease(job(rollout=rollout, actor=actor))


def test_engines_that_cover_them_are_accepted():
    args = {"tp_size": 2, "mem_fraction_static": 0.7}
    rollout = {"kind": "sglang", "count": 2, "args": args}
    rollout_check.check_lease(job(rollout=rollout, actor={"resources": {"gpus_per_node": 4}}))
