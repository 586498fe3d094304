"""Placement and site profiles: pure functions of what the user wrote; a rollout on the actor's
GPUs: one component, two steps."""

import re
from types import SimpleNamespace

import pytest
from job_trees import job_of

from relax_hpc.errors import ConfigError
from relax_hpc.launch import script
from relax_hpc.launch.placement import groups, place
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.engine import check as engine_check
from relax_hpc.roles.engine.host import EngineHost, hosting_of, slots_of, spec_of
from relax_hpc.roles.rollout import check as rollout_check
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.sections import Resources, SharedResources


def config(rollout=None, actor=None, **launch):
    return job_of(
        engines__rollout={"count": 4, "resources": rollout or {}},
        actor={"layout": {"tensor_parallel": 2}, "resources": actor or {}},
        launch=launch,
    )


@pytest.fixture
def profile(tmp_path):
    def write(text):
        (tmp_path / "site.toml").write_text(text)
        return f"{tmp_path}/site.toml"

    return write


def test_rollout_is_component_0_because_its_time_limit_ends_the_job():
    components = place(config(rollout={"nodes": 2}))
    found = [(each.name, each.tasks, each.nodes, each.tasks_per_node) for each in components]
    assert found == [("rollout", 4, 2, 2), ("actor", 2, 1, 2)]


def test_the_job_overrides_the_role_and_the_role_overrides_the_site(profile):
    site = profile(
        'partition = "a"\nqos = "site"\ngpus_per_node = 1\n'
        '[actor]\nqos = "role"\ngpus_per_node = 2\n'
    )
    rollout, actor = place(config(actor={"gpus_per_node": 8}, profile=site))
    assert rollout.resources == Resources(partition="a", qos="site", gpus_per_node=1)
    assert actor.resources == Resources(partition="a", qos="role", gpus_per_node=8)
    site = profile("[rollout]\nnodes = 3\n")
    assert place(config(rollout={"nodes": 1}, profile=site))[0].nodes == 1, "a default, but said"
    with pytest.raises(ConfigError, match=r"rollout.resources.nodes = 3: 4 tasks do not divide"):
        place(config(profile=site))


@pytest.mark.parametrize(
    ("mpi", "wanted", "rollout", "actor"),
    [("pmix", "auto", "files", "mpi"), ("pmix", "mpi", "mpi", "mpi"),
     ("pmix", "files", "files", "files"), (None, "auto", "files", "files")],
)  # fmt: skip
def test_mpi_joins_the_ranks_where_it_is_set_and_not_declined(mpi, wanted, rollout, actor):
    """Tasks of engines know nothing of each other and are not joined unless somebody says so."""
    asked = {"mpi": mpi} if mpi else {}
    placed = place(config(asked, asked, advanced={"bootstrap": wanted}))
    assert [component.bootstrap for component in placed] == [rollout, actor]


def test_a_type_of_gpus_of_which_nobody_says_a_number_is_refused(profile):
    said = "rollout.resources.gpu_type = 'h100': nobody says how many; set "
    shared = {"resources": SharedResources(gpu_type="h100")}
    for job in (config(rollout={"gpu_type": "h100"}), config().model_copy(update=shared)):
        with pytest.raises(ConfigError, match=said):
            place(job)
    for count in (0, 4):
        asked = {"gpu_type": "h100", "gpus_per_node": count}
        assert place(config(rollout=asked))[0].resources.gpus_per_node == count
    path = profile("gpus_per_node = 4")
    assert place(config({"gpu_type": "h100"}, profile=path))[0].resources.gpus_per_node == 4


def job(rollout=None, actor=None, reference=None, algorithm=None, **schedule):
    return job_of(
        schedule={"num_steps": 1, "max_staleness": 0, **schedule},
        algorithm=algorithm or {},
        engines__rollout={"placement": "actor", "count": 4, **(rollout or {})},
        actor={"layout": {"data_parallel": 4}, **(actor or {})},
        reference=reference or {},
    )


def test_slurm_is_asked_for_one_component_with_two_steps_that_share_its_gpus(tmp_path):
    components = place(job(actor={"resources": {"gpus_per_node": 4}}))
    text = script.slurm_script(script.Job("run", tmp_path), components)
    assert "#SBATCH hetjob" not in text and not re.search(r"srun .*--het-group", text)
    assert text.count("#SBATCH --gpus-per-node=4") == 1
    actor, rollout = re.findall(r"srun --.*", text)
    assert "--overlap" in rollout and "--overlap" not in actor
    assert all("--ntasks=4" in step and "--gpus-per-node=4" in step for step in (actor, rollout))
    # The memory saver of engines does not work with what trainers want of torch.
    functions = re.split(r"^component_\d\(\)", text, flags=re.MULTILINE)
    assert "expandable_segments" in functions[1] and "expandable_segments" not in functions[2]


def test_further_components_are_numbered_as_slurm_numbers_them(tmp_path):
    components = place(job(reference={"placement": "own"}, algorithm={"kl": {"coefficient": 0.1}}))
    assert [each.name for each in components] == ["actor", "rollout", "reference"]
    assert groups(components) == [0, 0, 1]
    text = script.slurm_script(script.Job("run", tmp_path), components)
    assert re.findall(r"srun --het-group=(\d)", text) == ["0", "0", "1"]


@pytest.mark.parametrize("engines_per_task", [1, 2, 4])
def test_an_engines_lane_is_the_trainers_rank_on_its_own_first_gpu(tmp_path, engines_per_task):
    """2 nodes of 8 GPUs, 8 engines of 2: however many of them a task keeps."""
    config = job(
        rollout={
            "kind": "sglang", "count": 8, "engines_per_task": engines_per_task,
            "args": {"tp_size": 2}, "resources": {"gpus_per_node": 8, "nodes": 2},
        },
        actor={"layout": {"data_parallel": 16}, "resources": {"gpus_per_node": 8, "nodes": 2}},
    )  # fmt: skip
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


PAIRS = {
    "kind": "sglang", "engines_per_task": 4, "args": {"max_total_tokens": 9},
    "advanced": {"engines_per_gpu": 2},
}  # fmt: skip


def test_engines_that_share_a_gpu_are_neighbours_in_a_task():
    """2 nodes of 2 GPUs, 8 engines."""
    resources = {"gpus_per_node": 2, "nodes": 2}
    layout = {"layout": {"data_parallel": 4}, "resources": resources}
    config = job(rollout=PAIRS | {"count": 8, "resources": resources}, actor=layout)
    tasks = [TaskContext("rollout", rank, 2, 0, "1.0", 1, f"n{rank}") for rank in range(2)]
    slots = [slot for task in tasks for slot in slots_of(config.rollout_pool, task)]
    assert [slot.number for slot in slots] == [*range(8)]
    assert [spec_of(config, slot).args["base_gpu_id"] for slot in slots] == [0, 0, 1, 1] * 2
    engine_check._check_size("engines.rollout", config.rollout_pool, SimpleNamespace(num_heads=4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engines_per_task": 1}, "engines_per_gpu = 2: engines that share a GPU are of one task"),
        ({"args": {}}, r"engines_per_gpu = 2: .*set engines.rollout.args.max_total_tokens"),
        ({"placement": "own"}, "weights.transport = 'collective': NCCL .*engines_per_gpu = 2; use"),
        ({"engines_per_task": 1, "nodes_per_engine": 2}, "engines_per_gpu = 2: an engine over 2 n"),
        ({"args": {"tp_size": 2, "max_total_tokens": 9}}, "engines_per_gpu = 2: an engine has 2 G"),
        ({"resources": {"gpus_per_node": 1}}, "gpus_per_node = 1: the engines of a node take 2"),
    ],
)
def test_engines_that_cannot_share_a_gpu_are_refused(change, message):
    asked = (PAIRS | change).get("resources", {})
    with pytest.raises(ConfigError, match=message):
        pool = job(rollout=PAIRS | change, actor={"resources": asked}).rollout_pool
        engine_check._check_size("engines.rollout", pool, SimpleNamespace(num_heads=4))


@pytest.mark.parametrize(
    ("rollout", "schedule", "message"),
    [
        ({}, {"max_staleness": 1}, "schedule.max_staleness = 1: with engines.rollout.place.*to 0"),
        ({"resources": {"gpus_per_node": 2}}, {}, "s.gpus_per_node = 2: .*it is actor.resources"),
        ({"kind": "sglang", "nodes_per_engine": 2, "resources": {"nodes": 8}}, {},
         "engines.rollout.nodes_per_engine = 2: .*on one node"),
    ],
)  # fmt: skip
def test_what_taking_turns_rules_out_is_refused(rollout, schedule, message):
    with pytest.raises(ConfigError, match=message):
        job(rollout=rollout, **schedule)


TWO_OF_TWO = {"kind": "sglang", "count": 2, "args": {"tp_size": 2}}


@pytest.mark.parametrize(
    ("rollout", "actor", "message"),
    [
        (TWO_OF_TWO | {"count": 4}, {}, "engines of tp_size 2 have 8 ranks, the actor has 4"),
        (TWO_OF_TWO, {"resources": {"gpus_per_node": 4}}, "fraction_static: is not set; .*g. 0.7"),
        (PAIRS, {}, "engines of tp_size 1 have 4 ranks, the actor has 4; .* are 2 to a rank"),
    ],
)
def test_engines_that_do_not_cover_the_actors_ranks_are_refused(rollout, actor, message):
    with pytest.raises(ConfigError, match=message):
        rollout_check.check_lease(job(rollout=rollout, actor=actor))
    fits = TWO_OF_TWO | {"args": {"tp_size": 2, "mem_fraction_static": 0.7}}
    rollout_check.check_lease(job(rollout=fits, actor={"resources": {"gpus_per_node": 4}}))
    rollout_check.check_lease(job(rollout=PAIRS, actor={"layout": {"data_parallel": 2}}))
