import base64
import json
import os
import subprocess
import threading

import numpy as np
import pyarrow.parquet as pq
import pytest
from bus_fixtures import PRODUCERS, group, make_bus, produce, same, trajectory
from typer.testing import CliRunner

from relax_hpc.bus import layout
from relax_hpc.bus.frames import FrameWriter
from relax_hpc.bus.log import read_log
from relax_hpc.bus.plan import Part, PlanPosition, PlanRecord, Sidecar
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.shard import Shard
from relax_hpc.bus.sidecar import SidecarWriter
from relax_hpc.bus.tools import export, garbage, listing, selection, show, verify
from relax_hpc.cli import app
from relax_hpc.errors import BusError, ConfigError, LaunchError
from relax_hpc.launch.local import ProcessId
from relax_hpc.paths import BusPaths, RunPaths
from relax_hpc.records import write_json
from relax_hpc.schema import MediaKind, Medium, PromptGroup

P = 4
"""Prompt groups of a step; a shard of the two producers holds two."""


def bus_with_steps(root, *, num_guids=16, steps=3, release=0):
    """Shard k of producer r holds the guids 4k + r and 4k + r + 2: step k + 1 reads shards k."""
    paths = make_bus(root)
    for r, name in enumerate(PRODUCERS):
        produce(paths, name, range(r, num_guids, 2), per_shard=2)
    plan(paths, steps, release=release)
    if release:
        for name in PRODUCERS:
            with Producer(paths, name, {}) as producer:
                producer.collect(release * P)
    return paths


def plan(paths, steps, *, release=0, position=None):
    """One incarnation of the trainer; returns the positions after each step."""
    positions, records = {}, []
    with Sequencer(paths, PRODUCERS, prompts_per_step=P, position=position) as sequencer:
        for step in range(1 + (position.step if position else 0), steps + 1):
            records.append(sequencer.next_batch(step, timeout_s=1))
            positions[step] = sequencer.position
        if release:
            sequencer.release(release)
    return positions, records


def widen(paths, value):
    """Reference log-probabilities for every shard: `value` + guid of each token's row."""
    with SidecarWriter(paths, "reference-0", {}) as writer:
        for pending in writer.pending():
            with writer.open(pending) as shard:
                guids = np.repeat(shard.read("row/guid"), np.diff(shard.read("index/offsets")))
            writer.put(pending, {"ragged/ref_logprobs": (value + guids).astype(np.float32)})


def check(paths, checkpoints=()):
    return verify.verify(paths, lambda: list(checkpoints), lambda done, total: None)


def wrong(found):
    return [(finding.kind, finding.what) for finding in found.findings if finding.harmful]


# ---------------------------------------------------------------- ls


def test_ls_counts_what_is_live_retired_and_missing(tmp_path):
    paths = bus_with_steps(tmp_path, release=1)
    paths.shard("rollout-1", 1, 3).unlink()
    found = listing.collect(paths, PlanPosition(1, 3, 3))
    zero, one = found.writers
    assert (zero.live_shards, zero.retired_shards, zero.missing_shards) == (3, 1, 0)
    assert (one.live_shards, one.retired_shards, one.missing_shards) == (2, 1, 1)
    # 8 prompt groups of 2 siblings of 7 tokens each
    assert (one.trajectories, one.tokens, one.guid_min, one.guid_max) == (16, 112, 1, 15)
    assert (one.state, one.epoch, one.policy_version_min) == ("closed", 2, 0)
    on_disk = sum(file.stat().st_size for file in paths.producer("rollout-1").glob("e*/*"))
    assert one.bytes_on_disk == on_disk > 0
    assert (found.total.trajectories, found.total.live_shards) == (32, 5)
    assert (found.plan.steps, found.plan.trajectories) == (3, 24)
    assert found.plan.epochs == [(1, 0)]
    assert found.plan.credit.retired_guid_below == P


def test_ls_tells_rates_from_the_times_of_the_files(tmp_path):
    paths = bus_with_steps(tmp_path)
    for seq in range(4):
        os.utime(paths.shard("rollout-0", 1, seq), (0, 1000 + 2 * seq))
        os.utime(paths.shard("rollout-1", 1, seq), (0, 1000))
    zero, one = listing.collect(paths, None).writers
    assert zero.trajectories_per_s == 2.0  # 3 x 4 rows in 6 s, the first shard's not counted
    assert one.trajectories_per_s is None


def test_ls_counts_trajectories_once_however_many_roles_widen_them(tmp_path):
    paths = BusPaths(tmp_path / "bus")
    layout.create(paths, PRODUCERS, {}, sidecar_writers={"reference-0": "reference"})
    produce(paths, "rollout-0", [0, 2], per_shard=1)
    widen(paths, 0)
    found = listing.collect(paths, None)
    side = found.writers[2]
    assert (side.name, side.role, side.live_shards, side.trajectories) == (
        "reference-0", "reference", 2, 4,
    )  # fmt: skip
    assert (found.total.trajectories, found.total.live_shards) == (4, 4)
    assert found.writers[1].state == "unused"


def test_ls_as_json_names_what_it_counts(tmp_path):
    paths = bus_with_steps(tmp_path)
    record = json.loads(listing.collect(paths, PlanPosition(1, 3, 3)).to_json())
    assert record["plan"]["checkpoint"] == {"epoch": 1, "records": 3, "step": 3}
    assert record["plan"]["credit"]["finished"] is False
    assert [writer["name"] for writer in record["writers"]] == PRODUCERS


# ---------------------------------------------------------------- verify


def test_a_healthy_bus_is_sound_through_restarts_sidecars_portions_and_retirement(tmp_path):
    paths = BusPaths(tmp_path / "bus")
    layout.create(paths, PRODUCERS, {}, sidecar_writers={"reference-0": "reference"})
    for r, name in enumerate(PRODUCERS):
        produce(paths, name, range(r, 12, 2), per_shard=2)
    widen(paths, 0)
    options = {"prompts_per_step": P, "needs": ["reference"]}
    with Sequencer(paths, PRODUCERS, position=None, **options) as first:
        first.next_batch(1, timeout_s=1)
        position = first.position
        while not first.next_portion(2, min_tokens=20, timeout_s=1).last:
            pass
    with Sequencer(paths, PRODUCERS, position=position, **options) as second:
        second.next_batch(2, timeout_s=1)
        second.next_batch(3, timeout_s=1)
        second.release(1)
    for name in PRODUCERS:
        with Producer(paths, name, {}) as producer:
            assert producer.collect(P) == 1
    found = check(paths, [position])
    assert found.findings == []
    assert (found.shards, found.retired, found.steps) == (10, 2, 3)
    assert found.nbytes == sum(file.stat().st_size for file in paths.root.glob("p/*/e*/*.h5"))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


SHARD = ("rollout-0", 1, 1)
"""Guids 4 and 6, of step 2."""


def overwrite(paths, *, source):
    paths.shard(*SHARD).write_bytes(paths.shard(*source).read_bytes())


DAMAGE = {
    "missing": (lambda p: p.shard(*SHARD).unlink(), "missing", "it is gone"),
    "empty": (lambda p: p.shard(*SHARD).write_bytes(b""), "shard", "is empty"),
    "torn": (lambda p: p.shard(*SHARD).open("r+b").truncate(5000), "shard", "is torn"),
    "no shard": (lambda p: p.shard(*SHARD).write_bytes(b"hello"), "shard", "is not a shard"),
    "header": (lambda p: flip(p.shard(*SHARD), 20), "shard", "is corrupt: the header"),
    "another shard": (
        lambda p: overwrite(p, source=("rollout-0", 1, 2)), "foreign", "is not the shard that was",
    ),
    "stray file": (
        lambda p: (p.epoch("rollout-0", 1) / "notes.txt").touch(), "foreign", "is no file of a bus",
    ),
    "stray folder": (
        lambda p: p.producer("rollout-7").mkdir(), "foreign", "is no file of a bus",
    ),
    "stray plan": (lambda p: (p.plan / "e1.log").touch(), "foreign", "is no file of a bus"),
    "log": (lambda p: flip(p.log("rollout-0"), 128 * 2 + 30), "log", "record 2 is damaged"),
    "plan log": (lambda p: flip(p.plan_log(1), 40), "plan", "a record is damaged"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "kind", "what"), DAMAGE.values(), ids=DAMAGE)
def test_verify_names_what_is_damaged_missing_or_foreign(tmp_path, damage, kind, what):
    paths = bus_with_steps(tmp_path)
    assert check(paths).is_sound
    damage(paths)
    found = check(paths)
    assert not found.is_sound
    [(found_kind, found_what)] = wrong(found)
    assert found_kind == kind
    assert what in found_what
    assert found.shards >= 4  # one damaged log or file does not hide the others


def test_verify_finds_a_flipped_bit_wherever_there_is_data(tmp_path):
    paths = bus_with_steps(tmp_path)
    path = paths.shard(*SHARD)
    healthy = path.read_bytes()
    with Shard(path) as shard:
        fields = dict(shard.fields)
    for name, field in fields.items():
        flip(path, field.offset + field.nbytes // 2)
        [(kind, what)] = wrong(check(paths))
        assert kind == "shard"
        assert name in what
        path.write_bytes(healthy)
    assert check(paths).is_sound


def test_what_a_crash_leaves_is_listed_and_not_wrong(tmp_path):
    paths = bus_with_steps(tmp_path)
    orphan = paths.shard("rollout-0", 1, 99)
    orphan.write_bytes(paths.shard(*SHARD).read_bytes())
    draft = orphan.with_name(".000000000100.h5.4711.tmp")
    draft.touch()
    with paths.log("rollout-1").open("ab") as log:
        log.write(b"RLC1 and no more")
    found = check(paths)
    assert found.is_sound
    assert {(f.kind, f.where) for f in found.findings} == {
        ("orphan", str(orphan)), ("orphan", str(draft)),
    }  # fmt: skip


def part_of(paths, name, seq, lo, hi):
    record = next(r for r in read_log(paths.log(name)) if r.seq == seq and r.rows)
    return Part(name, record.epoch, record.seq, record.uuid, lo, hi)


def step_four(paths, **changes):
    """What step 4 should be: the guids 12 to 15."""
    parts = [part_of(paths, PRODUCERS[g % 2], 3, g // 2 % 2 * 2, g // 2 % 2 * 2 + 2)
             for g in range(12, 16)]  # fmt: skip
    record = PlanRecord(4, list(range(12, 16)), parts, 8, 0, 56, sidecars={})
    return record._replace(**changes)


BAD_PLANS = {
    "wrong step": (lambda p: step_four(p, step=5), "stands where step 4, portion 0 is due"),
    "half a portion": (lambda p: step_four(p, portion=1), "stands where step 4, portion 0 is due"),
    "count": (lambda p: step_four(p, num_trajectories=9), "says 9 trajectories"),
    "twice": (
        lambda p: step_four(p, guids=[11, 12, 13, 14],
                            parts=[part_of(p, "rollout-1", 2, 2, 4), *step_four(p).parts[:3]]),
        "prompt group 11 is in step 3 too",
    ),
    "uncommitted": (
        lambda p: step_four(p, parts=[step_four(p).parts[0]._replace(uuid="ab" * 16),
                                      *step_four(p).parts[1:]]),
        f"{'ab' * 16} is not committed",
    ),
    "elsewhere": (
        lambda p: step_four(p, parts=[step_four(p).parts[0]._replace(producer="rollout-1"),
                                      *step_four(p).parts[1:]]),
        "is shard 3 of rollout-0, not shard 3 of rollout-1",
    ),
    "beyond the shard": (
        lambda p: step_four(p, num_trajectories=10,
                            parts=[step_four(p).parts[0]._replace(hi=6), *step_four(p).parts[1:]]),
        "rows 0..5 of a shard of 4 rows",
    ),
    "other rows": (
        lambda p: step_four(p, parts=[step_four(p).parts[0]._replace(lo=2, hi=4),
                                      *step_four(p).parts[1:]]),
        "rows 2..3 are planned as prompt group 12, and hold [14]",
    ),
    "no such sidecar": (
        lambda p: step_four(p, sidecars={
            step_four(p).parts[0].uuid: {"reference": Sidecar("r", 1, 0, "cd" * 16)}}),
        f"sidecar {'cd' * 16} (reference) is not committed",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("record", "what"), BAD_PLANS.values(), ids=BAD_PLANS)
def test_verify_finds_a_plan_that_does_not_fit_the_logs(tmp_path, record, what):
    paths = bus_with_steps(tmp_path)
    log = FrameWriter(paths.plan_log(1))
    log.append(record(paths)._asdict())
    log.close()
    found = check(paths)
    assert any(kind == "plan" and what in text for kind, text in wrong(found)), found.findings


def test_the_hand_made_step_of_these_tests_is_right(tmp_path):
    paths = bus_with_steps(tmp_path)
    log = FrameWriter(paths.plan_log(1))
    log.append(step_four(paths)._asdict())
    log.close()
    assert check(paths).findings == []


def test_a_shard_deleted_with_leave_is_not_missing_but_a_checkpoint_that_reads_it_is_told(tmp_path):
    paths = bus_with_steps(tmp_path, release=2)
    assert check(paths, [PlanPosition(1, 2, 2), PlanPosition(1, 3, 3)]).findings == []
    [(kind, what)] = wrong(check(paths, [PlanPosition(1, 1, 1)]))[:1]
    assert kind == "checkpoint"
    assert "step 2 reads" in what


def test_a_checkpoint_of_a_fenced_trainer_is_told(tmp_path):
    paths = bus_with_steps(tmp_path, steps=2)
    plan(paths, 3, position=PlanPosition(1, 1, 1))
    assert check(paths, [PlanPosition(1, 2, 2)]).is_sound
    [(kind, what)] = wrong(check(paths, [PlanPosition(1, 3, 3)]))
    assert kind == "checkpoint"
    assert "not in this run's plan" in what


def test_a_sidecar_in_the_place_of_another_is_told(tmp_path):
    paths = BusPaths(tmp_path / "bus")
    layout.create(paths, PRODUCERS, {}, sidecar_writers={"reference-0": "reference"})
    produce(paths, "rollout-0", [0, 2], per_shard=1)
    widen(paths, 0)
    assert check(paths).findings == []
    first, second = (paths.shard("reference-0", 1, seq) for seq in (0, 1))
    second.write_bytes(first.read_bytes())
    assert {kind for kind, _ in wrong(check(paths))} == {"foreign"}


def test_verify_finds_nothing_wrong_while_a_run_commits_plans_and_deletes(tmp_path):
    paths, stop, failures, looks, saved = make_bus(tmp_path), threading.Event(), [], [], []

    def look():
        while not stop.is_set():
            found = verify.verify(paths, lambda: saved[-2:], lambda done, total: None)
            failures.extend(found.findings if found.is_sound else wrong(found))
            looks.append(found)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        producers = [Producer(paths, name, {}) for name in PRODUCERS]
        with Sequencer(paths, PRODUCERS, prompts_per_step=2, position=None) as sequencer:
            for step in range(1, 60):
                for r, producer in enumerate(producers):
                    producer.put([group(2 * (step - 1) + r)])
                sequencer.next_batch(step, timeout_s=5)
                saved.append(sequencer.position)  # a checkpoint every step; two are kept
                sequencer.release(saved[-2:][0].step)
                for producer in producers:
                    producer.collect(2 * saved[-2:][0].step)
    finally:
        stop.set()
        looker.join()
    assert [f for f in failures if getattr(f, "kind", "") != "orphan"] == []
    assert len(looks) > 3
    assert looks[-1].retired > 0


# ---------------------------------------------------------------- gc


def resume_and_read(paths, position, steps):
    """Every trajectory that the steps after `position` train on."""
    _, records = plan(paths, steps, position=position)
    reader = Reader(paths)
    return [row for r in records for row in reader.rows(r, range(r.num_trajectories))]


def test_gc_deletes_orphans_and_what_was_released_and_no_checkpoint_needs(tmp_path):
    paths = bus_with_steps(tmp_path, steps=3)
    positions, _ = plan(paths, 3, release=2)
    orphan = paths.shard("rollout-0", 1, 99)
    orphan.touch()
    kept = [positions[2], positions[3]]
    found = garbage.find(paths, kept)
    assert [file.path for file in found.orphans] == [orphan]
    assert {file.path for file in found.retired} == {
        paths.shard(name, 1, seq) for name in PRODUCERS for seq in (0, 1)
    }
    before = sum(file.stat().st_size for file in paths.root.rglob("*.h5"))
    garbage.delete(found)
    assert sum(file.stat().st_size for file in paths.root.rglob("*.h5")) == before - found.nbytes
    assert check(paths, kept).findings == []
    assert garbage.find(paths, kept) == garbage.Garbage([], [])
    for position in kept:
        rows = resume_and_read(paths, position, 4)
        expected = [trajectory(g, s) for g in range(P * position.step, 16) for s in (0, 1)]
        assert all(map(same, rows, expected)), position
        assert len(rows) == len(expected)


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_gc_never_deletes_what_the_oldest_checkpoint_needs_even_if_it_was_released(tmp_path, step):
    paths = bus_with_steps(tmp_path, steps=0)
    positions, _ = plan(paths, 3, release=3)  # the trainer released all three steps
    kept = [positions[step]] if step else []  # but its newer checkpoints are lost
    garbage.delete(garbage.find(paths, kept))
    left = {path for path in paths.root.rglob("*.h5")}
    assert left == {paths.shard(name, 1, seq) for name in PRODUCERS for seq in range(step, 4)}


def test_gc_keeps_what_was_not_released_and_what_is_not_planned(tmp_path):
    paths = bus_with_steps(tmp_path, steps=0)
    positions, _ = plan(paths, 3)
    assert garbage.find(paths, [positions[3]]) == garbage.Garbage([], [])
    # A grant that goes beyond the plan, as no trainer writes it.
    credits = FrameWriter(paths.credits)
    credits.append({"plan_epoch": 9, "step": 3, "policy_version": 3,
                    "retired_guid_below": 1000, "finished": False})  # fmt: skip
    credits.close()
    found = garbage.find(paths, [positions[3]])
    assert {int(file.path.stem) for file in found.retired} == {0, 1, 2}


def test_a_sidecar_goes_with_the_shard_it_widens(tmp_path):
    paths = BusPaths(tmp_path / "bus")
    layout.create(paths, PRODUCERS, {}, sidecar_writers={"reference-0": "reference"})
    for r, name in enumerate(PRODUCERS):
        produce(paths, name, range(r, 12, 2), per_shard=2)
    widen(paths, 0)
    positions, _ = plan(paths, 3, release=3)
    found = garbage.find(paths, [positions[2]])
    gone = {file.path for file in found.retired}
    assert {path.parent.parent.name for path in gone} == {*PRODUCERS, "reference-0"}
    garbage.delete(found)
    assert check(paths, [positions[2]]).findings == []
    assert len(list(paths.producer("reference-0").rglob("*.h5"))) == 2


def test_gc_deletes_nothing_from_a_bus_whose_records_are_damaged(tmp_path):
    paths = bus_with_steps(tmp_path, steps=0)
    positions, _ = plan(paths, 3, release=3)
    flip(paths.log("rollout-0"), 128 * 2 + 30)
    with pytest.raises(BusError, match="record 2 is damaged"):
        garbage.find(paths, [positions[3]])


def make_run(tmp_path, controller):
    """A run directory with a bus, one checkpoint, and a launch record of `controller`."""
    run = RunPaths(tmp_path / "run")
    run.root.mkdir()
    write_json(run.config, {})
    bus_with_steps(run.root, steps=0)
    positions, _ = plan(run.bus, 3, release=3)
    progress = {"step": 3, "position": list(positions[3])}
    write_json(run.checkpoints / "step_00000003" / "progress.json", progress)
    folder = run.submission / "c0"
    folder.mkdir(parents=True)
    component = {"role": "rollout", "job_id": "local-1", "tasks": 1, "folder": str(folder)}
    write_json(
        run.launch_record,
        {"mode": "local", "leader": "local-1", "components": [component], "time": 0,
         "controller": {"pid": controller.pid, "start_time": controller.start_time}},
    )  # fmt: skip
    return run


def test_gc_refuses_while_the_run_is_alive_and_works_once_it_has_ended(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as process:
        run = make_run(tmp_path, ProcessId.of(process.pid))
        result = CliRunner().invoke(app, ["bus", "gc", str(run.root)])
        process.terminate()
    assert isinstance(result.exception, LaunchError)
    assert "wait for its end, or end it: relax-hpc cancel" in str(result.exception)
    before = set(run.bus.root.rglob("*.h5"))
    dry = CliRunner().invoke(app, ["bus", "gc", str(run.root), "--dry-run"])
    assert "would free" in dry.output
    assert "6 retired shards" in dry.output
    assert set(run.bus.root.rglob("*.h5")) == before
    done = CliRunner().invoke(app, ["bus", "gc", str(run.root)])
    assert "freed" in done.output
    assert len(set(run.bus.root.rglob("*.h5"))) == 2  # step 4, which is not planned yet


# ---------------------------------------------------------------- export


def rich_group(guid):
    """A group with everything a trajectory can have."""
    image = Medium(MediaKind.PNG, np.arange(guid + 5, dtype=np.uint8), (1, 2, 3))
    rows = []
    for sibling in range(3):
        row = trajectory(guid, sibling, prompt=2, response=guid % 3 + sibling)
        if len(row.token_ids) > 3:  # two policies sampled it
            row = row._replace(version_runs=np.array([[2, 5], [3, 6]], np.int32))
        experts = np.arange(len(row.token_ids) * 4, dtype=np.int16).reshape(-1, 4) + guid
        rows.append(row._replace(media=(image,), routed_experts=experts))
    return PromptGroup(guid, rows)


def rich_bus(tmp_path):
    paths = BusPaths(tmp_path / "bus")
    layout.create(paths, PRODUCERS, {}, sidecar_writers={"reference-0": "reference"})
    for r, name in enumerate(PRODUCERS):
        with Producer(paths, name, {}) as producer:
            for lo in range(r, 12, 4):
                producer.put([rich_group(lo), rich_group(lo + 2)])
    widen(paths, 0.25)
    return paths


def write_out(paths, target, names=(), steps=None):
    rows = []
    chosen = export.columns_named(list(names), None)
    count = export.export(paths, target, chosen, steps, rows.append)
    assert rows[-1:] == [count]
    if target.suffix == ".parquet":
        return pq.read_table(target).to_pylist()
    return [json.loads(line) for line in target.read_text().splitlines()]


def check_row(found, expected, *, is_json):
    for name in ("guid", "sibling", "prompt_index", "seed", "environment", "prompt_len", "reward",
                 "policy_version_min", "policy_version_max"):  # fmt: skip
        assert found[name] == getattr(expected, name), name
    assert found["finish"] == expected.finish.name.lower()
    assert found["response_len"] == len(expected.token_ids) - expected.prompt_len
    for name in ("token_ids", "loss_mask", "rollout_logprobs", "version_runs", "routed_experts"):
        assert found[name] == getattr(expected, name).tolist(), name
    # what widen wrote, 0.25 + guid, is exact in float32
    assert found["ref_logprobs"] == [0.25 + expected.guid] * len(expected.token_ids)
    for name in ("old_logprobs", "advantages", "values"):
        assert found[name] is None
    [medium] = found["media"]
    assert (medium["kind"], medium["grid_thw"]) == ("png", [1, 2, 3])
    data = base64.b64decode(medium["data"]) if is_json else medium["data"]
    assert data == expected.media[0].data.tobytes()


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_every_value_that_was_put_is_exported_sidecars_media_and_experts_included(tmp_path, ending):
    paths = rich_bus(tmp_path)
    found = write_out(paths, tmp_path / f"out.{ending}")
    expected = [row for r in (0, 1) for guid in range(r, 12, 2) for row in rich_group(guid)[1]]
    assert len(found) == len(expected) == 36
    for row, put in zip(found, expected, strict=True):
        check_row(row, put, is_json=ending == "jsonl")
        assert row["step"] is None
        assert row["producer"] == PRODUCERS[put.guid % 2]
    assert [row["shard_row"] for row in found[:6]] == list(range(6))


def test_a_step_is_exported_as_the_trainer_saw_it_whatever_was_restarted_since(tmp_path):
    paths = rich_bus(tmp_path)
    options = {"prompts_per_step": 3, "over_age": "drop", "max_staleness": 99}
    options |= {"needs": ["reference"]}
    with Sequencer(paths, PRODUCERS, position=None, **options) as first:
        seen = {1: [first.next_batch(1, timeout_s=1)]}
        position = first.position
        seen[2] = [first.next_portion(2, timeout_s=1, min_tokens=1)]  # and the trainer dies
        while not seen[2][-1].last:
            seen[2].append(first.next_portion(2, timeout_s=1, min_tokens=1))
    with Sequencer(paths, PRODUCERS, position=position, **options) as second:
        second.next_batch(2, timeout_s=1)
        seen[3] = [second.next_batch(3, timeout_s=1)]
    trained = {
        step: [row for r in records for row in Reader(paths).rows(r, range(r.num_trajectories))]
        for step, records in seen.items()
    }
    for steps in ((1, 1), (2, 2), (3, 3), (1, 3), (2, 3)):
        found = write_out(paths, tmp_path / "out.jsonl", steps=steps)
        expected = [(s, row) for s in range(steps[0], steps[1] + 1) for row in trained[s]]
        assert [(r["step"], r["guid"], r["sibling"]) for r in found] == [
            (step, row.guid, row.sibling) for step, row in expected
        ]
        for row, (_, saw) in zip(found, expected, strict=True):
            check_row(row, saw, is_json=True)


def test_rows_of_no_step_are_told_by_null(tmp_path):
    paths = bus_with_steps(tmp_path, steps=2)
    found = write_out(paths, tmp_path / "o.parquet", ["guid", "step"])
    assert {row["guid"]: row["step"] for row in found} == {
        guid: guid // P + 1 if guid < 8 else None for guid in range(16)
    }
    assert list(found[0]) == ["guid", "step"]


def test_a_step_whose_shards_are_deleted_is_refused_with_the_key_that_keeps_them(tmp_path):
    paths = bus_with_steps(tmp_path, release=1)
    with pytest.raises(BusError, match=r"step 1: .*0000\.h5.* deleted.*bus\.keep_steps"):
        write_out(paths, tmp_path / "o.jsonl", steps=(1, 2))
    assert list(tmp_path.glob("*o.jsonl*")) == []
    assert len(write_out(paths, tmp_path / "o.jsonl", steps=(2, 2))) == 8


def test_blocks_that_go_out_one_by_one_make_the_same_file(tmp_path, monkeypatch):
    paths = rich_bus(tmp_path)
    whole = write_out(paths, tmp_path / "o.parquet")
    monkeypatch.setattr(export, "BLOCK_BYTES", 200)
    assert write_out(paths, tmp_path / "o.parquet") == whole
    assert pq.ParquetFile(tmp_path / "o.parquet").num_row_groups > 5


def test_what_cannot_be_exported_is_said_with_what_can(tmp_path):
    paths = bus_with_steps(tmp_path)
    with pytest.raises(ConfigError, match=r"must end in \.parquet or \.jsonl"):
        write_out(paths, tmp_path / "o.csv")
    with pytest.raises(ConfigError, match=r"--columns rewards: there are step, producer, .*reward"):
        export.columns_named(["guid", "rewards"], None)
    with pytest.raises(ConfigError, match="add --text"):
        export.columns_named(["response"], None)
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        write_out(paths, tmp_path / "nowhere" / "o.jsonl")
    with pytest.raises(BusError, match="has no step 9; steps 1 to 3 are planned"):
        write_out(paths, tmp_path / "o.jsonl", steps=(9, 9))
    with pytest.raises(ConfigError, match="--step 3-5: give a step, or the first and the last"):
        export.parse_steps("3-5")
    assert (export.parse_steps("12"), export.parse_steps("10:12")) == ((12, 12), (10, 12))


def test_text_is_the_decoded_prompt_and_response(tmp_path):
    paths = bus_with_steps(tmp_path)
    chosen = export.columns_named(["guid", "prompt", "response"], lambda t: "|".join(map(str, t)))
    export.export(paths, tmp_path / "o.jsonl", chosen, (1, 1), lambda rows: None)
    first = json.loads((tmp_path / "o.jsonl").read_text().splitlines()[0])
    tokens = trajectory(0, 0).token_ids.tolist()
    assert first["prompt"] == "|".join(map(str, tokens[:3]))
    assert first["response"] == "|".join(map(str, tokens[3:]))


# ---------------------------------------------------------------- show


def test_show_a_step_tells_where_each_group_lies_and_how_stale_it_is(tmp_path):
    paths = bus_with_steps(tmp_path)
    lines = [line.split() for line in show.step(paths, 3).splitlines()]
    assert " ".join(lines[0]) == "step 3: 4 prompt groups, 8 trajectories"
    # guid, shard, rows, tokens, staleness (step 3 trained on policy 0), reward, sidecars
    assert lines[3] == ["8", "p/rollout-0/e1/000000000002.h5", "0..1", "14", "2", "0.5", "-"]
    assert lines[6] == ["11", "p/rollout-1/e1/000000000002.h5", "2..3", "14", "2", "0.5", "-"]
    paths.shard("rollout-1", 1, 2).unlink()
    assert "deleted" in show.step(paths, 3)


def test_show_a_group_tells_its_fields_planned_or_not(tmp_path):
    paths = rich_bus(tmp_path)
    shown = show.group(paths, 7, None)
    assert "prompt group 7: not planned yet, rows 3..5 of" in shown
    assert "5 from token 2, 6 from token 3" in shown
    assert "mean 7.25 over sampled tokens" in shown
    assert "PNG 12 B" in shown
    with pytest.raises(BusError, match="prompt group 77 is not committed"):
        show.group(paths, 77, None)


def test_the_planned_copy_of_a_group_is_shown_not_the_ignored_one(tmp_path):
    paths = bus_with_steps(tmp_path)
    record = selection.of_guid(paths, 6)
    assert (record.step, record.parts[0].seq, record.num_trajectories) == (2, 1, 2)


# ---------------------------------------------------------------- the commands


def invoke(*args):
    return CliRunner().invoke(app, ["bus", *map(str, args)])


def test_the_commands_work_on_a_run_directory_and_say_what_they_allow(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as process:
        run = make_run(tmp_path, ProcessId.of(process.pid))
        process.terminate()
    assert "step 3: 4 records of plan epoch 1" not in invoke("ls", run.root).output
    assert "step 3: 3 records of plan epoch" in invoke("ls", run.root).output
    assert "4 prompt groups" in invoke("show", run.root, "--step", 2).output
    shard = run.bus.shard(*SHARD)
    assert "all checksums match" in invoke("show", shard).output
    assert invoke("verify", run.root).exit_code == 0
    target = tmp_path / "o.parquet"
    assert "16 rows" in invoke("export", run.root, "--to", target, "--step", "1:2").output
    shard.unlink()
    damaged = invoke("verify", run.root)
    assert damaged.exit_code == 0  # released, and behind the checkpoint
    run.bus.shard("rollout-0", 1, 3).unlink()
    damaged = invoke("verify", run.root, "--json")
    assert damaged.exit_code == 1
    assert json.loads(damaged.stdout)["findings"][0]["kind"] == "missing"
    for args, what in (
        (("show", run.root), "give --step or --guid, or name a shard"),
        (("show", shard), "cannot be opened"),
        (("ls", tmp_path / "no"), "no such run"),
    ):
        assert what in str(invoke(*args).exception)
