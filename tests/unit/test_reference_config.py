"""The section [reference]: which jobs are refused, and what a component of its own is given."""

import pytest
from hf_checkpoint import QWEN3, write

from relax_hpc.errors import ConfigError
from relax_hpc.job_file import validate
from relax_hpc.launch.placement import place
from relax_hpc.launch.script import Job, slurm_script
from relax_hpc.models import registry
from relax_hpc.roles import table
from relax_hpc.roles.scorer import check as scorer_check
from relax_hpc.roles.training import check as training_check
from relax_hpc.sections import Resources


def job(reference=None, *, kl=0.0, profile=None, path="m", **model):
    return validate(
        {
            "name": "run",
            "model": {"path": str(path), **model},
            "prompts": {"train": "t"},
            "algorithm": {"kl": {"name": "k3", "coefficient": kl}},
            "schedule": {"num_steps": 1},
            "actor": {
                "layout": {"tensor_parallel": 4},
                "tokens_per_micro_batch": 1000,
                "attention": "sdpa",
            },
            "reference": reference or {},
            "launch": {"profile": profile},
        },
        source="test",
    )


@pytest.mark.parametrize(
    ("reference", "kl", "message"),
    [
        ({}, 0.1, "algorithm.kl.coefficient = 0.1: needs a reference; set reference.placement"),
        (
            {"placement": "own", "refresh_every": 5},
            0.1,
            "reference.refresh_every = 5: means nothing with reference.placement = 'own'",
        ),
        (
            {"placement": "actor", "layout": {"tensor_parallel": 2}},
            0.1,
            "reference.layout = {'tensor_parallel': 2}: means nothing with "
            "reference.placement = 'actor'; remove it, or use 'own'",
        ),
        ({"path": "x"}, 0.0, "reference.path = x: means nothing with reference.placement = 'none'"),
        (
            {"placement": "own", "layout": {"virtual_pipeline": 2}},
            0.0,
            "reference.layout = {'virtual_pipeline': 2}: virtual_pipeline = 2: needs "
            "pipeline_parallel of 2 or more",
        ),
        (
            {"placement": "own", "layout": {"data_parallel": 3}, "resources": {"nodes": 2}},
            0.0,
            "the reference's ranks (tensor x pipeline x context x data_parallel) = 3: does not",
        ),
        ({"plaecment": "own"}, 0.0, "did you mean reference.placement?"),
    ],
)
def test_a_reference_that_cannot_be_is_refused(reference, kl, message):
    with pytest.raises(ConfigError) as error:
        job(reference, kl=kl)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_component_of_its_own_comes_last_and_has_its_own_grid_and_resources(tmp_path):
    profile = tmp_path / "site.toml"
    profile.write_text('partition = "a"\n[reference]\npartition = "small"\n')
    config = job(
        {
            "placement": "own",
            "layout": {"tensor_parallel": 2, "data_parallel": 3},
            "resources": {"nodes": 3},
        },
        profile=str(profile),
    )
    rollout, actor, reference = place(config)
    assert (rollout.name, actor.name, reference.name) == ("rollout", "actor", "reference")
    assert (reference.tasks, reference.tasks_per_node) == (6, 2)
    assert reference.resources == Resources(partition="small", nodes=3)
    text = slurm_script(Job("run", tmp_path), place(config))
    assert text.count("#SBATCH hetjob") == 2
    assert "srun --het-group=2 --job-name=reference --nodes=3 --ntasks=6" in text
    assert table.sidecar_writers(config) == {"reference-0": "reference"}


@pytest.mark.parametrize("placement", ["none", "actor"])
def test_otherwise_there_is_no_further_component(placement):
    config = job({"placement": placement})
    assert [component.name for component in place(config)] == ["rollout", "actor"]
    assert table.sidecar_writers(config) == {}


def test_a_component_of_its_own_has_its_layout_and_computes_as_the_actor_does():
    mine = {"placement": "own", "path": "other", "layout": {"tensor_parallel": 2}}
    config = job(mine)
    megatron = config.reference_megatron
    assert (str(config.reference_model.path), megatron.layout.world_size) == ("other", 2)
    assert (megatron.tokens_per_micro_batch, megatron.attention) == (1000, "sdpa")
    assert job({"placement": "own"}).reference_megatron.layout.world_size == 4  # the actor's
    assert job({"placement": "own", "layout": {}}).reference_megatron.layout.world_size == 1


def test_the_reference_is_what_training_starts_with_unless_it_names_another_model():
    config = job({"placement": "own"}, weights="step_1")
    assert config.reference_model == config.model
    other = job({"placement": "own", "path": "other"}, weights="step_1").reference_model
    assert (str(other.path), other.weights) == ("other", None)


def test_a_grid_that_does_not_divide_the_reference_is_named_by_its_own_key(tmp_path):
    config = job(
        {"placement": "own", "layout": {"tensor_parallel": 3}}, path=folder(tmp_path / "m")
    )
    with pytest.raises(
        ConfigError, match=r"reference\.layout\.tensor_parallel = 3: does not divide"
    ):
        training_check.check_model(config.model.path, config.reference_megatron)


def folder(path, **changes):
    path.mkdir()
    return write(path, QWEN3 | changes)


@pytest.mark.parametrize(
    ("placement", "changes", "message"),
    [
        ("actor", {"hidden_size": 16}, "hidden_size is 16 in its config.json, 8 in model.path's"),
        (
            "actor",
            {"rope_theta": 1e4},
            "default with base 10000 in its config.json, default with base 1e+06",
        ),
        ("own", {"vocab_size": 12}, "vocab_size is 12 in its config.json, 8 in model.path's"),
        ("own", {"hidden_size": 16}, None),
        ("actor", {}, None),
    ],
)
def test_a_model_that_cannot_be_the_reference_is_refused(tmp_path, placement, changes, message):
    model, other = folder(tmp_path / "model"), folder(tmp_path / "other", **changes)
    config = job({"placement": placement, "path": str(other)}, path=model)
    shape = registry.read_architecture(model)
    if message is None:
        scorer_check.check_reference(config, shape)
        return
    with pytest.raises(ConfigError) as error:
        scorer_check.check_reference(config, shape)
    assert message in str(error.value)
