import json

import pytest
from job_trees import job_of
from roles.role_fakes import row

from relax_hpc.bus import layout
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.config import job_file
from relax_hpc.runs import summary
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.schema import PromptGroup


def group(guid):
    return PromptGroup(guid, [row(guid, sibling, prompt=1, response=2) for sibling in range(2)])


@pytest.fixture
def paths(tmp_path):
    """A run of 10 steps of one prompt group, nothing done yet."""
    paths = RunPaths(tmp_path / "run")
    schedule = {"num_steps": 10, "prompts_per_step": 1}
    job = job_of(schedule=schedule, rollout__samples_per_prompt=2)
    paths.root.mkdir()
    paths.config.write_text(job.model_dump_json())
    return paths


def emit(paths, role, *events, rank=0):
    with EventWriter(paths.events(role, rank), role, rank) as writer:
        for name, fields in events:
            writer.emit(name, **fields)


def test_trajectories_are_counted_from_the_bus_and_the_steps(paths):
    layout.create(paths.bus, ["rollout-0"], {})
    with Producer(paths.bus, "rollout-0", {}) as producer:
        producer.put([group(0), group(1), group(2)])
    with Sequencer(paths.bus, prompts_per_step=1, position=None) as sequencer:
        for step in (1, 2):
            sequencer.next_portion(step, timeout_s=5)
    emit(paths, "actor", ("step", {"step": 1, "num_trajectories": 2}))
    found = summary.summarize(paths.root)
    assert found["trajectories"] == {
        "committed": 6,
        "trained": 2,
        "trained_twice": 0,
        "dropped": dict.fromkeys(
            ("duplicates", "over_age", "skipped", "retired", "damaged", "unaccounted"), 0
        ),
    }
    assert found["max_staleness_seen"] == 1  # step 2 trains on policy 0; one step is its due lag


def test_what_ends_have_cost_is_counted_and_shown(paths):
    emit(
        paths, "actor",
        *[("step", {"step": step, "num_tokens": 10 * step}) for step in (1, 2, 3, 2, 3, 4, 3)],
    )  # fmt: skip
    emit(
        paths, "rollout",
        ("continued", {"num_groups": 2, "num_tokens": 700, "num_dropped": 0}),
        ("unfinished", {"num_groups": 1, "num_tokens": 58, "num_lost": 3}),
        ("continued", {"num_groups": 1, "num_tokens": 50, "num_dropped": 8, "num_damaged": 9}),
    )  # fmt: skip
    assert summary.summarize(paths.root)["redone"] == {
        "steps": 3, "tokens_trained_again": 20 + 30 + 30,
        "tokens_continued": 750, "tokens_sampled_again": 8, "tokens_lost": 3 + 9,
    }  # fmt: skip


HELDOUT = {"name": "h", "headline": True, "num_samples": 8, "version_max": 10}


def test_events_say_how_far_a_run_is(paths):
    emit(
        paths, "rollout",
        ("eval", HELDOUT | {"when": "before", "number": 0, "version": 0, "correct": 2.0}),
        ("eval", HELDOUT | {"when": "during", "number": 1, "version": 1, "correct": 4.0}),
        ("eval", HELDOUT | {"when": "before", "number": 0, "version": 0, "correct": 8.0}
         | {"name": "other", "headline": False}),
    )  # fmt: skip
    emit(
        paths, "actor",
        ("publish", {"version": 0, "members": ["a", "b"]}),
        ("step", {"step": 1, "reward/mean": 0.25, "num_tokens": 30, "time/step": 3.0,
                  "eta_s": None, "staleness/max": 3}),
        ("publish", {"version": 1, "members": ["a"], "fenced": ["b"]}),
        ("step", {"step": 2, "reward/mean": 0.5, "num_tokens": 40, "time/step": 2.0,
                  "eta_s": 16.0, "staleness/max": 1}),
    )  # fmt: skip
    found = summary.summarize(paths.root)
    assert (found["steps_done"], found["last_reward"], found["tokens_per_s"]) == (2, 0.5, 20.0)
    assert (found["heldout_before"], found["heldout_after"]) == (0.25, None)
    assert found["heldout_newest"] == {"step": 1, "value": 0.5}
    assert found["max_staleness_seen"] == 3
    assert found["weight_versions"] == {"trainer": 1, "a": 1, "b": 0}
    assert found["checksums_equal"] is None
    more = HELDOUT | {"when": "during", "number": 2, "version": 2, "correct": 6.0}
    last = more | {"when": "after", "number": 0, "version": 10}
    emit(paths, "rollout", ("eval", more), ("eval", last))
    found = summary.summarize(paths.root)
    assert found["heldout_newest"] == {"step": 10, "value": 0.75}
    assert (found["heldout_before"], found["heldout_after"]) == (0.25, 0.75)
    assert found["heldout_sets"] == {
        "h": {"before": 0.25, "after": 0.75, "newest": {"step": 10, "value": 0.75}},
        "other": {"before": 1.0, "after": None, "newest": None},
    }


def test_what_was_scored_is_told_by_who_did(paths):
    told = {"num_shards": 1, "num_tokens": 9, "first_guid": 0}
    emit(paths, "critic", *[("scored", told | {"num_trajectories": n}) for n in (2, 4)])
    found = summary.summarize(paths.root)
    assert found["scored"] == {"critic": 6}
    emit(paths, "reference", ("scored", told | {"num_trajectories": 2}))
    assert summary.summarize(paths.root)["scored"] == {"critic": 6, "reference": 2}


def test_the_last_score_of_a_run_that_was_given_more_steps_is_that_of_its_new_end(paths):
    num_steps = job_file.read_resolved(paths.config).num_steps
    last = HELDOUT | {"when": "after", "number": num_steps - 1, "version": num_steps - 1,
                      "correct": 4.0}  # fmt: skip
    emit(paths, "rollout", ("eval", last))
    found = summary.summarize(paths.root)
    assert found["heldout_after"] is None and found["heldout_newest"]["step"] == num_steps - 1
    emit(paths, "rollout", ("eval", last | {"number": num_steps, "correct": 6.0}))
    assert summary.summarize(paths.root)["heldout_after"] == 0.75


def test_after_a_resume_the_figures_are_those_of_the_steps_that_it_goes_on_from(paths):
    done = [{"reward/mean": 0.5 * n, "num_trajectories": 2, "staleness/max": n} for n in (1, 2)]
    emit(paths, "actor", *[("step", {"step": n} | each) for n, each in enumerate(done, start=1)])
    emit(paths, "actor", ("resume", {"step": 1}))
    found = summary.summarize(paths.root)
    assert (found["steps_done"], found["last_reward"]) == (1, 0.5)
    assert found["trajectories"]["trained"] == 2


def test_the_time_left_is_the_pace_times_the_steps_left(paths):
    path = paths.events("actor", 0)
    path.parent.mkdir()
    base = {"role": "actor", "rank": 0, "pid": 1, "event": "step"}
    told = [(1, 50.0, None), (2, 2.0, 16.0), (3, 4.0, 21.0)]
    lines = [
        json.dumps(base | {"time": 1e3 * n, "step": n, "time/step": seconds, "eta_s": eta_s})
        for n, seconds, eta_s in told
    ]
    path.write_text("\n".join(lines) + "\n")
    assert summary.summarize(paths.root)["eta_s"] == 21.0  # 7 steps of 3 s


@pytest.mark.parametrize(
    ("members", "told", "equal"),
    [
        ({"a": "x", "b": "x"}, {}, True),
        ({"a": "x", "b": "y"}, {}, False),
        ({}, {}, False),
        ({"a": "own way to digest"}, {"equal": True}, True),
        ({"a": "x"}, {"equal": False}, False),
    ],
)
def test_the_last_comparison_of_weights_counts(paths, members, told, equal):
    last = {"version": 2, "trainer": "x", "members": members} | told
    emit(
        paths, "actor",
        ("verify", {"version": 1, "trainer": "x", "members": {"a": "z" if equal else "x"}}),
        ("verify", last),
    )  # fmt: skip
    assert summary.summarize(paths.root)["checksums_equal"] is equal


def test_every_engine_counts_that_loads_by_itself_and_a_late_one_does_not_turn_the_trainer_back(
    paths,
):
    def loaded(version, member, equal):
        told = {"version": version, "trainer": "x", "members": {member: "x" if equal else "y"}}
        return ("loaded", {"version": version, "members": [member]}), ("verify", told)

    emit(
        paths, "actor",
        ("publish", {"version": 1, "members": [], "loading": ["fast", "slow"]}),
        *loaded(1, "fast", True),
        ("publish", {"version": 2, "members": [], "loading": ["fast"]}),
        *loaded(2, "fast", True),
        *loaded(1, "slow", False),
    )  # fmt: skip
    found = summary.summarize(paths.root)
    assert found["weight_versions"] == {"trainer": 2, "fast": 2, "slow": 1}
    assert found["checksums_equal"] is False
    emit(paths, "actor", *loaded(2, "slow", True))
    assert summary.summarize(paths.root)["checksums_equal"] is True
