"""Pools of engines: what a job may declare, and which components follow from it."""

import json
import shutil

import pytest
from roles.role_fakes import config

from relax_hpc.config import engines
from relax_hpc.errors import ConfigError
from relax_hpc.fleet import members
from relax_hpc.fleet.members import Member
from relax_hpc.launch.placement import place
from relax_hpc.paths import RunPaths
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.engine import check, hosting, loop


def test_every_job_has_the_pool_that_follows_the_policy_and_others_stay_as_they_are():
    assert config().engines.keys() == {"rollout"}
    settings = config(engines__judge__model="judge", engines__judge__count=2)
    assert list(settings.engines) == ["rollout", "judge"]
    found = {name: engines.follows_policy(name) for name in settings.engines}
    assert found == {"rollout": True, "judge": False}
    assert settings.engines_in("judge") == ["judge-0", "judge-1"]
    assert settings.rollout_engines == settings.producers == ["rollout-0"]


@pytest.mark.parametrize(
    ("settings", "answer"),
    [
        ({"engines__judge__weights": "policy"}, "engines.judge.weights = 'policy': is gone, the"),
        ({"engines__rollout__model": "m"}, "engines.rollout.model = 'm': its weights follow"),
        ({"engines__judge__placement": "actor"}, "engines.judge.placement = 'actor': only the po"),
        ({"engines__judge__resources__max_nodes": 2}, "engines.judge.resources.max_nodes = 2: eng"),
        ({"engines__judge__count": 3, "engines__judge__engines_per_task": 2}, "engines.judge.engi"),
        ({"engines__judge__nodes_per_engine": 2}, "engines.judge.nodes_per_engine = 2: the embed"),
        ({"engines__judge__resources__nodes": 2}, "engines.judge.count = 1: does not divide over"),
        ({"engines__Judge__count": 1}, "engines.Judge.[key] = 'Judge': use letters of a to z,"),
        ({"engines__judge__kimd": "sglang"}, "unknown key; did you mean engines.judge.kind?"),
    ],
)
def test_what_a_pool_cannot_be_is_refused_by_its_name(settings, answer):
    with pytest.raises(ConfigError) as refused:
        config(**settings)
    assert answer in str(refused.value)


def test_a_pool_of_its_own_is_a_component_between_rollout_and_the_actor():
    components = place(
        config(
            engines__judge__count=4, engines__judge__engines_per_task=2,
            engines__judge__resources__gpus_per_node=2,
        )
    )  # fmt: skip
    assert [each.name for each in components] == ["rollout", "judge", "actor"]
    judge = components[1]
    assert (judge.tasks, judge.resources.gpus_per_node) == (2, 2)
    assert judge.key == "engines.judge.resources"


@pytest.mark.parametrize("name", ["actor", "extra", "reference"])
def test_a_pool_is_not_called_like_another_component(name):
    settings = {f"engines__{name}__count": 1, "reference__placement": "own"}
    with pytest.raises(ConfigError, match=rf"another component is called {name}; choose"):
        place(config(**settings))


def test_engines_of_a_fixed_pool_are_started_with_what_is_theirs_and_not_the_policys():
    settings = config(
        model__path="policy", seed=7, weights__quantize="fp8", weights__kv_cache="recompute",
        engines__rollout__kind="sglang", engines__judge__kind="sglang",
        engines__judge__model="judge", engines__judge__args={"tp_size": 2},
        engines__judge__resources__gpus_per_node=4, engines__judge__count=2,
        engines__judge__max_running_requests=5,
    )  # fmt: skip
    context = TaskContext("judge", 1, 2, 1, attempt="7.0", start=1, node="n")
    [slot] = hosting.slots_of(settings.engines["judge"], context)
    made = hosting.hosting_of(settings, slot, "judge")
    spec = made.spec
    assert (slot.id, str(spec.model_path), spec.pool, spec.seed) == ("judge-1", "judge", "judge", 8)
    assert spec.args == {"tp_size": 2, "base_gpu_id": 2} and spec.max_running_requests == 5
    assert spec.quantization is None and not made.recomputes and not made.follows_policy
    rollout = hosting.hosting_of(settings, slot)
    assert str(rollout.spec.model_path) == "policy" and rollout.spec.quantization
    assert rollout.recomputes and rollout.follows_policy


def test_a_pools_model_is_looked_at_before_the_job(tiny_model, tmp_path):
    good = {"model__path": str(tiny_model), "engines__judge__model": str(tiny_model)}
    check.check_pools(config(**good))
    with pytest.raises(ConfigError, match=r"engines\.judge\.model = '.*none'"):
        check.check_pools(config(**good | {"engines__judge__model": str(tmp_path / "none")}))
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(settings | {"vocab_size": 77}))
    with pytest.raises(ConfigError, match=r"engines\.judge\.model = .*other: "):
        check.check_pools(config(**good | {"engines__judge__model": str(other)}))
    with pytest.raises(ConfigError, match=r"engines\.judge\.args\.num_thread: the embedded"):
        check.check_pools(config(**good, engines__judge__args={"num_thread": 2}))


def test_a_fixed_pool_is_there_until_rollout_has_scored_the_last_policy(tmp_path):
    settings, paths = config(engines__rollout__count=2), RunPaths(tmp_path)

    def rollout(*states):
        for number, state in enumerate(states):
            record = Member(f"rollout-{number}", "7.0-1-1", "", 1, "embedded", state)
            members.announce(paths, record)
        return loop.is_rollout_gone(settings, paths)

    assert not rollout()
    assert not rollout("GONE")
    assert not rollout("GONE", "HEALTHY")
    assert rollout("GONE", "FAILED")
