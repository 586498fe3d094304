"""What is refused before a run is made; submitting, watching and ending one without Slurm."""

import errno
import json
import os
import resource
from pathlib import Path

import pytest
from hf_checkpoint import QWEN3
from job_trees import job_of

from relax_hpc.config import job_file
from relax_hpc.config.actor import ActorConfig
from relax_hpc.config.engines import EnginePool
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError, LaunchError
from relax_hpc.launch import cluster, local, preflight
from relax_hpc.launch.placement import Component, place
from relax_hpc.launch.submit import submit
from relax_hpc.roles.engine import check as engine_check
from relax_hpc.roles.rollout import check as rollout_check
from relax_hpc.roles.training import check as training_check
from relax_hpc.runs import logs
from relax_hpc.runs.cancel import cancel
from relax_hpc.sections import Resources
from relax_hpc.trainer.models.registry import FAMILIES, read_architecture

SINFO = """\
gpu*|n1|gpu:h100:4(S:0-1)
gpu*|n2|gpu:h100:4(S:0,2),nvme:1
cpu|n2|gpu:h100:4(S:0,2),nvme:1
cpu|n3|(null)
"""


def model(folder, **fields):
    family = FAMILIES[fields.get("model_type", "qwen3")]
    folder.mkdir()
    config = QWEN3 | {"architectures": [family.causal]} | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"gpus_per_node": 8}, "rollout.resources.gpus_per_node = 8: 0 nodes of partition gpu"),
        ({"partition": "cpu", "gpus_per_node": 1, "nodes": 2}, "1 nodes of partition cpu have as"),
        ({"nodes": 2}, "actor.resources.nodes = 1: partition gpu has 2 nodes and the run needs 3"),
    ],
)
def test_what_the_cluster_cannot_give_is_refused_with_what_it_has(rollout, message):
    components = [Component("rollout", 2, Resources(**rollout)), Component("actor", 1, Resources())]
    with pytest.raises(ConfigError, match=message):
        cluster.check_partitions(components, cluster.parse_sinfo(SINFO))
    fits = Component("actor", 4, Resources(partition="gpu,cpu", gpus_per_node=4))
    cluster.check_partitions([fits], cluster.parse_sinfo(SINFO))


def test_a_run_directory_is_below_folders_and_its_name_is_one_slurm_leaves_alone(tmp_path):
    with pytest.raises(ConfigError, match="Slurm replaces"):
        preflight.check_run_dir(tmp_path / "100%j" / "run")
    with pytest.raises(ConfigError, match="is not a folder"):
        (tmp_path / "file").touch()
        preflight.check_run_dir(tmp_path / "file" / "run")
    preflight.check_run_dir(tmp_path / "deep" / "er" / "run")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"gpus_per_node": 2}, "actor.resources.gpus_per_node = 2: 4 tasks run on"),
        ({"time": "tomorrow"}, "actor.resources.time = 'tomorrow': is not a time"),
        ({"max_nodes": 2}, "actor.resources.max_nodes = 2: only rollout can be"),
    ],
)
def test_what_a_component_cannot_ask_for_is_refused(asked, said):
    with pytest.raises(ConfigError, match=said):
        preflight.check_component(Component("actor", 4, Resources(**asked)))


def test_nodes_for_later_are_counted_and_not_fewer_than_rollout_starts_with():
    with pytest.raises(ConfigError, match=r"max_nodes = 1: is less than rollout.resources.nodes"):
        fewer = Resources(nodes=2, max_nodes=1)
        preflight.check_component(Component("rollout", 2, fewer, is_scalable=True))
    nodes = cluster.parse_sinfo("main*|n1|(null)\nmain*|n2|(null)")
    cluster.check_partitions([Component("rollout", 1, Resources(max_nodes=2))], nodes)
    with pytest.raises(ConfigError, match=r"rollout.resources.max_nodes = 3"):
        cluster.check_partitions([Component("rollout", 1, Resources(max_nodes=3))], nodes)


@pytest.mark.parametrize(
    ("rollout", "answer"),
    [
        ({"args": {"tp_size": 3}}, "tp_size = 3: 4 attention heads do not divide by 3"),
        ({"args": {"tp_size": 2}, "count": 2, "resources": {"gpus_per_node": 2}},
         "gpus_per_node = 2: the engines of a node take 4"),
        ({"args": {"tp_size": 4}, "nodes_per_engine": 3, "resources": {"nodes": 3}},
         "tp_size = 4: does not divide over 3 nodes"),
    ],
)  # fmt: skip
def test_an_engine_that_does_not_fit_its_gpus_or_its_model_is_refused_before_the_job(
    tmp_path, rollout, answer
):
    shape = training_check.check_model(model(tmp_path / "model"), ActorConfig())
    with pytest.raises(ConfigError, match=answer):
        engine_check.check_engine(EnginePool.model_validate({"kind": "sglang", **rollout}), shape)
    fits = {"args": {"tp_size": 2}, "count": 2, "resources": {"gpus_per_node": 4}}
    engine_check.check_engine(EnginePool.model_validate({"kind": "sglang", **fits}), shape)


def test_a_model_without_architectures_is_none_for_sglang(tmp_path):
    folder = model(tmp_path / "model", architectures=None)
    shape = training_check.check_model(folder, ActorConfig())
    engine_check.check_engine(EnginePool(kind="embedded"), shape)
    said = r'architectures = None: SGLang goes by it; add "architectures": \["Qwen3ForCausalLM"\]'
    with pytest.raises(ConfigError, match=said):
        engine_check.check_engine(EnginePool(kind="sglang"), shape)


@pytest.mark.parametrize(
    ("family", "wanted", "found"),
    [("qwen3_moe", None, True), ("qwen3_moe", False, False), ("qwen3", None, False)],
)
def test_routing_is_replayed_where_a_model_has_experts_and_nobody_says_no(
    tmp_path, family, wanted, found
):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    experts = experts if family == "qwen3_moe" else {}
    folder = model(tmp_path / "model", model_type=family, **experts)
    asked = {} if wanted is None else {"advanced": {"routed_experts": wanted}}
    config = job_of(rollout=asked, engines__rollout__kind="sglang")
    shape = read_architecture(folder)
    rollout = config.rollout.model_copy(update={"stop": ["end"]})
    stopping = config.model_copy(update={"rollout": rollout})
    assert rollout_check.with_routed_experts(stopping, shape).replays_routing is bool(wanted)
    config = rollout_check.with_routed_experts(config, shape)
    assert config.columns == frozenset({"ragged/routed_experts"} if found else ())
    again = RunConfig.model_validate_json(config.model_dump_json())  # as a task reads it
    assert again.replays_routing is found


def check_root(folder):
    said = []
    preflight.check_run_dir(folder / "runs" / "run", say=said.append)
    assert list(folder.iterdir()) == [], "what was tried goes again"
    return said


def not_supported(*_, **__):
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


# O3
@pytest.mark.parametrize(
    ("where", "name", "result", "said"),
    [
        (Path, "rename", not_supported, "a rename that replaces a file fails: Operation not"),
        (preflight, "sync", not_supported, "fsync of a file and of a folder fails: Oper"),
        (os, "link", lambda *_: None, "a link to a name that is taken is not refused"),
    ],
)
def test_what_a_run_root_cannot_do_is_refused_by_name(
    tmp_path, monkeypatch, where, name, result, said
):
    with monkeypatch.context() as patch:
        patch.setattr(where, name, result)
        with pytest.raises(ConfigError, match=said) as error:
            check_root(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
    assert list(tmp_path.iterdir()) == []


ANY = resource.RLIM_INFINITY
USUAL = {"NPROC": (95_000, 95_000), "NOFILE": (1024, 1 << 20), "MEMLOCK": (8 << 20, 8 << 20)}
ALL = "PropagateResourceLimits = ALL\nPropagateResourceLimitsExcept = (null)\n"
BUT = "PropagateResourceLimits = (null)\nPropagateResourceLimitsExcept = MEMLOCK,CPU\n"


def told(monkeypatch, limits, config=ALL, **asked):
    by_kind = {getattr(resource, f"RLIMIT_{name}"): pair for name, pair in (USUAL | limits).items()}
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda kind: by_kind.get(kind, (ANY, ANY)))
    monkeypatch.setattr("relax_hpc.launch.cluster._words", lambda *_: config)
    lines = []
    preflight.tell_limits(
        [Component("rollout", 1, Resources(**asked))], cluster.Cluster(), lines.append
    )
    return "".join(lines)


@pytest.mark.parametrize(
    ("limits", "named"),
    [({"CPU": (10, ANY)}, "cpu time 10 s (-t)"), ({"NOFILE": (256, 1024)}, "open files 1024 (-n)")],
)
def test_a_limit_that_would_end_a_task_is_named_with_the_remedy(monkeypatch, limits, named):
    """O9."""
    found = told(monkeypatch, limits)
    assert found.startswith(f"limits of this shell: {named}: Slurm hands them on to the tasks")
    assert 'set rollout.resources.sbatch = ["--propagate=NONE"]' in found
    assert told(monkeypatch, limits, sbatch=["--propagate=NONE"]) == ""


def test_usual_limits_and_those_that_slurm_keeps_are_not_spoken_of(monkeypatch):
    """O9."""
    assert told(monkeypatch, {}) == ""
    assert told(monkeypatch, {"CPU": (10, ANY)}, BUT) == ""
    assert told(monkeypatch, {"FSIZE": (10, ANY)}, BUT) != ""
    assert told(monkeypatch, {}, BUT, gpus_per_node=1) == ""
    assert "locked memory 8388608 bytes" in told(monkeypatch, {}, gpus_per_node=1)


@pytest.fixture
def of_job(job):
    """The job of this folder, and what a test wants otherwise."""
    long = "schedule.num_steps=100000"
    return lambda *changes: job_file.load(Path("job.toml"), ["run_root=my runs", long, *changes])


@pytest.mark.parametrize("at", ["relax_hpc.bus.layout.create", "relax_hpc.launch.record.write"])
def test_a_disk_that_is_full_while_a_run_is_made_leaves_nothing(tmp_path, of_job, monkeypatch, at):
    started = []
    start = local.start

    def starting(*args):
        started.append(start(*args))
        return started[-1]

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(local, "start", starting)
        patch.setattr(at, full)
        with pytest.raises(LaunchError, match="No space left on device; nothing was st") as error:
            submit(of_job(), local=True)
    assert "\n" not in str(error.value) and not (tmp_path / "my runs").exists()
    assert len(started) == (at.endswith("write"))
    assert not any(each.controller.find() for each in started), "what was not recorded has ended"
    assert submit(of_job(), local=True, dry_run=True).run_dir.name == "run", "the name is free"


def test_following_a_log_waits_for_the_second_half_of_a_line(tmp_path, of_job):
    submission = submit(of_job(), local=True)
    cancel(submission.run_dir)
    path = dict(logs.sources(submission.run_dir))["actor-0"]
    path.write_text("one\ntw")
    rounds = iter([False, False, True])

    def until_the_third_round():
        over = next(rounds)
        if over:
            path.write_text("one\ntwo\nthree")
        return over

    lines = logs.follow(submission.run_dir, "actor", until=until_the_third_round)
    assert [line.text for line in lines if line.text in ("one", "tw", "two", "three")] == [
        "one", "two", "three"]  # fmt: skip


def test_check_says_what_a_run_takes_at_most():
    said = []
    engine = {"kind": "sglang", "resources": {"gpus_per_node": 4, "nodes": 2, "time": "1:30:00"}}
    job = job_of(
        engines__rollout=engine | {"count": 8, "engines_per_task": 4},
        actor__resources={"gpus_per_node": 1, "time": "2:00:00"}, actor__layout={},
        schedule={"num_steps": 10, "prompts_per_step": 64},
        rollout={"samples_per_prompt": 8, "max_new_tokens": 1000},
    )  # fmt: skip
    preflight.tell_costs(job, place(job), said.append)
    assert said == [
        "cost: 9 GPUs, 14.0 GPU-hours at most before a requeue; "
        "5,120 responses are trained on, of 5.1M tokens at most"
    ]
