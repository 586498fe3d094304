"""How an actor is put together from the settings."""

from types import SimpleNamespace

from role_fakes import Events, config

from relax_hpc.bus import layout
from relax_hpc.inference.members import Member
from relax_hpc.roles.actor import build as actor_task
from relax_hpc.roles.role import ModelRank
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths


def test_the_sequencer_and_the_clients_of_engines_are_made_as_the_settings_say(
    tmp_path, monkeypatch
):
    given = []
    for name in ("Sequencer", "EngineClient"):
        monkeypatch.setattr(actor_task, name, lambda *args, **kwargs: given.append((args, kwargs)))
    monkeypatch.setattr(actor_task.Idle, "of", lambda *_: "idle")
    settings = config(
        schedule__prompts_per_step=6, schedule__over_age="mask", schedule__max_staleness=3,
        algorithm__groups__name="as_sampled",
        bus__keep_steps=5, reference__placement="own", engines__rollout__count=2,
        weights__advanced__kv_cache="recompute", weights__advanced__timeout_s=40,
    )  # fmt: skip
    paths, resumed = RunPaths(tmp_path), SimpleNamespace(position="position")
    layout.create(paths.bus, [], {}, sidecar_writers={"reference-0": "reference"})
    released = []

    class Rank0:
        def __init__(self, *args):
            given.append(args)

        def release(self):
            released.append(self)

    monkeypatch.setattr(actor_task, "ActorRank0", Rank0)

    def rank0(resumed):
        rank = ModelRank(settings, paths, None, None, "events")
        parts = ("reader", "shards", "publisher", "checkpoints")
        return actor_task._rank0(rank, *parts, resumed, "is_ending", "tell_others")

    assert released == [rank0(resumed)]  # whoever saved that checkpoint may not have come to it
    assert given[0] == (
        (paths.bus,),
        {
            "prompts_per_step": 6, "position": "position", "needs": ("reference",),
            "over_age": "mask", "max_staleness": 3, "keep_steps": 5, "shards": "shards",
            "judge": None, "most_skipped": 10 * 6 * 4,
        },
    )  # fmt: skip
    rank0_gets = (
        "reader", "publisher", "checkpoints", "events", "is_ending", "idle", "tell_others",
    )  # fmt: skip
    assert given[1] == (settings, None, *rank0_gets)
    rank0(None)
    assert given[2][1]["position"] is None and len(released) == 1
    given.clear()
    secret = RunSecret.new()
    actor_task._connect(settings, secret, Member("m", "1", "http://m", 1, "sglang", "HEALTHY"))
    [(at, how)] = given
    assert at == ("http://m", secret.engine_token("m", "1"))
    assert how["recompute"] and how["has_prefix_cache"] and how["timeout_s"] > 40


def test_the_reference_in_the_actor_is_the_model_of_its_path_renewed_as_often_as_it_says(
    monkeypatch,
):
    events, kept = Events(), []

    class Trainer:
        def keep(self, name, folder=None, *, lasting=False):
            kept.append((name, folder, lasting))

    for placement in ("none", "own"):
        none = config(reference__placement=placement)
        assert actor_task.own_columns(none, Trainer(), events) == []
    settings = config(
        reference__placement="actor", reference__path="elsewhere", reference__refresh_every=6
    )
    [found] = actor_task.own_columns(settings, Trainer(), events)
    for step in range(1, 7):
        found.end_step(step)
    path = settings.reference.path
    assert kept == [("reference", path, False), ("reference", None, True)]
    assert events.of("reference") == [{"step": 6}]
