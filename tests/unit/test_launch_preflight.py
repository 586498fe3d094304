"""Preflight: what is refused, and that the refusal helps."""

import json

import pytest

from relax_hpc.config.actor import ActorConfig
from relax_hpc.config.engines import EnginePool
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.launch import partitions, preflight
from relax_hpc.launch.placement import Component
from relax_hpc.models.fields import CAUSAL
from relax_hpc.models.registry import read_architecture
from relax_hpc.roles.engine import check as engine_check
from relax_hpc.roles.rollout import check as rollout_check
from relax_hpc.roles.training import check as training_check
from relax_hpc.sections import Resources

SINFO = """\
gpu*|n1|gpu:h100:4(S:0-1)
gpu*|n2|gpu:h100:4(S:0,2),nvme:1
cpu|n2|gpu:h100:4(S:0,2),nvme:1
cpu|n3|(null)
"""


def model(folder, **fields):
    config = {
        "architectures": [CAUSAL.get(fields.get("model_type", "qwen3"))],
        "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    } | fields  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_sinfo_is_read_with_sockets_types_and_other_resources():
    found = partitions.parse_sinfo(SINFO)
    assert found == {"gpu": {"n1": 4, "n2": 4}, "cpu": {"n2": 4, "n3": 0}}
    assert found.default == "gpu"


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (
            {"partition": "gpus"},
            "rollout.resources.partition = 'gpus': no such partition; did you",
        ),
        (
            {"gpus_per_node": 8},
            "rollout.resources.gpus_per_node = 8: 0 nodes of partition gpu",
        ),
        ({"partition": "cpu", "gpus_per_node": 1, "nodes": 2}, "1 nodes of partition cpu have as"),
        ({"nodes": 2}, "actor.resources.nodes = 1: partition gpu has 2 nodes and the run needs 3"),
    ],
)
def test_what_the_cluster_cannot_give_is_refused_with_what_it_has(rollout, message):
    components = [
        Component("rollout", 2, Resources(**rollout)),
        Component("actor", 1, Resources()),
    ]
    with pytest.raises(ConfigError) as error:
        partitions.check_partitions(components, partitions.parse_sinfo(SINFO))
    assert message in str(error.value)


def test_what_the_cluster_can_give_is_accepted():
    components = [
        Component("rollout", 4, Resources(gpus_per_node=4)),
        Component("actor", 4, Resources(partition="gpu,cpu", gpus_per_node=4)),
    ]
    partitions.check_partitions(components, partitions.parse_sinfo(SINFO))


@pytest.mark.parametrize(
    ("fields", "actor", "message"),
    [
        (
            {"model_type": "gpt2"},
            {},
            "model_type = 'gpt2': only llama, mistral, qwen2, qwen3, qwen3_moe, qwen3_vl,",
        ),
        ({"attention_bias": True}, {}, "attention_bias = True: only False is supported"),
        (
            {},
            {"layout": {"tensor_parallel": 3}},
            "3: does not divide the model's 4 attention heads",
        ),
        (
            {},
            {"layout": {"pipeline_parallel": 4}},
            "pipeline_parallel = 4: does not divide the model's 2 lay",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(tmp_path, fields, actor, message):
    with pytest.raises(ConfigError) as error:
        training_check.check_model(model(tmp_path / "m", **fields), ActorConfig(**actor))
    assert message in str(error.value)


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        training_check.check_model(tmp_path / "missing", ActorConfig())
    with pytest.raises(ConfigError, match=r"has no config.json"):
        training_check.check_model(tmp_path, ActorConfig())


def test_the_embedded_engine_is_refused_for_experts(tmp_path):
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder = model(tmp_path / "m", model_type="qwen3_moe", **mixture)
    shape = training_check.check_model(
        folder, ActorConfig(layout={"expert_parallel": 2, "data_parallel": 2})
    )
    with pytest.raises(ConfigError, match=r"engines.rollout.kind = 'embedded': .* use 'sglang'"):
        engine_check.check_engine(EnginePool(), shape)


def test_a_run_directory_is_used_once_and_its_name_is_one_slurm_leaves_alone(tmp_path):
    with pytest.raises(ConfigError, match=r"name = 'used'.*, say --set name=used-2"):
        (tmp_path / "used").mkdir()
        preflight.check_run_dir(tmp_path / "used", "used")
    with pytest.raises(ConfigError, match="Slurm replaces"):
        preflight.check_run_dir(tmp_path / "100%j" / "run", "run")
    with pytest.raises(ConfigError, match="is not a folder"):
        (tmp_path / "file").touch()
        preflight.check_run_dir(tmp_path / "file" / "run", "run")
    preflight.check_run_dir(tmp_path / "deep" / "er" / "run", "run")


def test_tasks_that_would_share_a_gpu_and_times_slurm_cannot_read_are_refused():
    with pytest.raises(ConfigError, match=r"actor.resources.gpus_per_node = 2: 4 tasks run on"):
        preflight.check_component(Component("actor", 4, Resources(gpus_per_node=2)))
    with pytest.raises(ConfigError, match=r"actor.resources.time = 'tomorrow': is not a time"):
        preflight.check_component(Component("actor", 1, Resources(time="tomorrow")))


def test_hours_that_slurm_would_read_as_minutes_are_told_of_once():
    said = list[str]()
    times = ["1:30", "1:30", "90", "1:30:00", None]
    parts = [Component(f"c{n}", 1, Resources(time=time)) for n, time in enumerate(times)]
    preflight.doubt_times(parts, said.append)
    assert said == [
        "c0.resources.time = '1:30': is 2 min, as Slurm reads it (minutes:seconds); hours are "
        'written "1:30:00"'
    ]


def test_nodes_for_later_are_rollouts_counted_and_not_fewer_than_it_starts_with():
    with pytest.raises(ConfigError, match=r"actor.resources.max_nodes = 2: only rollout can be"):
        preflight.check_component(Component("actor", 1, Resources(max_nodes=2)))
    with pytest.raises(ConfigError, match=r"max_nodes = 1: is less than rollout.resources.nodes"):
        preflight.check_component(
            Component("rollout", 2, Resources(nodes=2, max_nodes=1), is_scalable=True)
        )
    nodes = partitions.parse_sinfo("main*|n1|(null)\nmain*|n2|(null)")
    partitions.check_partitions([Component("rollout", 1, Resources(max_nodes=2))], nodes)
    with pytest.raises(ConfigError, match=r"rollout.resources.max_nodes = 3"):
        partitions.check_partitions([Component("rollout", 1, Resources(max_nodes=3))], nodes)


@pytest.mark.parametrize(
    ("rollout", "answer"),
    [
        (
            {"args": {"enable_return_routed_experts": True}},
            "is set by the run; set rollout.routed_experts",
        ),
        ({"args": {"tp_size": 3}}, "tp_size = 3: 4 attention heads do not divide by 3"),
        (
            {"args": {"tp_size": 2}, "count": 2, "resources": {"gpus_per_node": 2}},
            "gpus_per_node = 2: the engines of a node take 4",
        ),
        (
            {"args": {"tp_size": 4}, "nodes_per_engine": 3, "resources": {"nodes": 3}},
            "tp_size = 4: does not divide over 3 nodes",
        ),
    ],
)
def test_an_engine_that_does_not_fit_its_gpus_or_its_model_is_refused_before_the_job(
    tmp_path, rollout, answer
):
    shape = training_check.check_model(model(tmp_path / "model"), ActorConfig())
    with pytest.raises(ConfigError) as error:
        engine_check.check_engine(EnginePool.model_validate({"kind": "sglang", **rollout}), shape)
    assert answer in str(error.value)
    with pytest.raises(ConfigError, match=r"routed_experts = true: a model of .* 'qwen3' has no"):
        engine_check.check_engine(EnginePool(kind="sglang"), shape, routed_experts=True)
    fits = {"args": {"tp_size": 2}, "count": 2, "resources": {"gpus_per_node": 4}}
    engine_check.check_engine(EnginePool.model_validate({"kind": "sglang", **fits}), shape)


@pytest.mark.parametrize("architectures", [None, "missing"])
def test_a_model_without_architectures_is_none_for_sglang(tmp_path, architectures):
    folder = model(tmp_path / "model", architectures=architectures)
    record = json.loads((folder / "config.json").read_text())
    if architectures:
        del record["architectures"]
        (folder / "config.json").write_text(json.dumps(record))
    shape = training_check.check_model(folder, ActorConfig())
    engine_check.check_engine(EnginePool(kind="embedded"), shape)
    said = r'architectures = None: SGLang goes by it; add "architectures": \["Qwen3ForCausalLM"\]'
    with pytest.raises(ConfigError, match=said):
        engine_check.check_engine(EnginePool(kind="sglang"), shape)


@pytest.mark.parametrize(
    ("kind", "family", "wanted", "found"),
    [
        ("sglang", "qwen3_moe", None, True),
        ("sglang", "qwen3_moe", False, False),
        ("sglang", "qwen3", None, False),
        ("embedded", "qwen3", None, False),
    ],
)
def test_routing_is_replayed_where_a_model_has_experts_and_nobody_says_no(
    tmp_path, kind, family, wanted, found
):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder = model(
        tmp_path / "model", model_type=family, **(experts if family == "qwen3_moe" else {})
    )
    asked = {} if wanted is None else {"routed_experts": wanted}
    config = RunConfig.model_validate(
        {
            "name": "test", "model": {"path": str(folder)}, "prompts": {"train": "unused"},
            "rollout": asked, "engines": {"rollout": {"kind": kind}}, "schedule": {"num_steps": 1},
        }
    )  # fmt: skip
    assert config.columns == frozenset()
    shape = read_architecture(folder)
    rollout = config.rollout.model_copy(update={"stop": ["end"]})
    stopping = config.model_copy(update={"rollout": rollout})
    assert rollout_check.with_routed_experts(stopping, shape).replays_routing is bool(wanted)
    config = rollout_check.with_routed_experts(config, shape)
    assert config.replays_routing is found
    assert config.columns == frozenset({"ragged/routed_experts"} if found else ())
    again = RunConfig.model_validate_json(config.model_dump_json())  # as a task reads it
    assert again.replays_routing is found
