"""How an actor is put together from the settings."""

from types import SimpleNamespace

from role_fakes import Events, config

from relax_hpc.fleet.members import Member
from relax_hpc.paths import RunPaths
from relax_hpc.roles.actor import build as actor_task
from relax_hpc.run_secret import RunSecret


def test_the_sequencer_and_the_clients_of_engines_are_made_as_the_settings_say(
    tmp_path, monkeypatch
):
    given = []
    for name in ("Sequencer", "ActorLead", "EngineClient"):
        monkeypatch.setattr(
            actor_task, name, lambda *args, _name=name, **kwargs: given.append((args, kwargs))
        )  # fmt: skip
    settings = config(
        algorithm__prompts_per_step=6, algorithm__over_age="mask", algorithm__max_staleness=3,
        bus__keep_steps=5, reference__placement="own", rollout__num_engines=2,
        weights__kv_cache="recompute", weights__timeout_s=40,
    )  # fmt: skip
    paths, resumed = RunPaths(tmp_path), SimpleNamespace(position="position")
    actor_task._lead(settings, "publisher", paths, "checkpoints", resumed, "shards", "events")
    assert given[0] == (
        (paths.bus, ["rollout-0", "rollout-1"]),
        {
            "prompts_per_step": 6, "position": "position", "needs": ("reference",),
            "over_age": "mask", "max_staleness": 3, "keep_steps": 5, "shards": "shards",
        },
    )  # fmt: skip
    assert given[1] == ((settings, None, "publisher", "checkpoints", "events"), {})
    actor_task._lead(settings, "publisher", paths, "checkpoints", None, "shards", "events")
    assert given[2][1]["position"] is None
    given.clear()
    secret = RunSecret.new()
    actor_task._connect(settings, secret, Member("m", "1", "http://m", 1, "sglang", "HEALTHY"))
    [(at, how)] = given
    assert at == ("http://m", secret.engine_token("m", "1"))
    assert how["recompute"] and how["has_prefix_cache"] and how["timeout_s"] > 40


def test_the_reference_in_the_actor_is_the_model_of_its_path_renewed_as_often_as_it_says(
    monkeypatch,
):
    made = []
    monkeypatch.setattr(actor_task, "SwappedReference", lambda *args: made.append(args) or "policy")
    events = Events()
    for placement in ("none", "own"):
        none = config(reference__placement=placement)
        assert actor_task._reference(none, "trainer", events) is None
    settings = config(
        reference__placement="actor", reference__path="elsewhere", reference__refresh_every=6
    )
    found = actor_task._reference(settings, "trainer", events)
    assert made == [("trainer", settings.reference.path)]
    assert (found._policy, found._refresh_every, found._events) == ("policy", 6, events)
